"""PPO's loss against a second implementation, when it skips and stops, and the loop by hand."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.contract.recipes import GENERATION, make
from tests.contract.runs import assert_same, rows
from tests.unit.trainers import ppo_numpy
from tests.unit.trainers.test_ppo_experience import kls, shaken
from trlx_like import Callback
from trlx_like.api import make_trainer
from trlx_like.errors import ConfigError, DataError, SamplerError
from trlx_like.trainers.ppo import PPOExperience, PPOTrainer

OLD = ("old_logprobs", "old_values", "advantages", "returns")
EVERYTHING = {
    "method.vf_coef": 0.7,
    "method.ent_coef": 0.3,
    "method.kl_in": "loss",
    "method.init_kl_coef": 0.4,
    "method.whiten_advantages": False,
}


def sampled(folder: Path, **changes: Any) -> tuple[PPOTrainer, Any]:
    """A trainer with a round of experience whose policy has then moved, and a copy of the model it began with."""
    trainer = make("PPOTrainer", folder, **changes)
    start = copy.deepcopy(trainer.model.lm)
    trainer.make_experience()
    return shaken(trainer, 0.1), start


@pytest.mark.parametrize(
    "changes",
    [
        {"method.kl_in": "reward"},
        {"method.cliprange": 0.05, "method.cliprange_value": 0.02},
        {"method.cliprange_value": None, "method.ent_coef": 0.0},
        {"method.kl_penalty": "abs"},
        {"method.kl_penalty": "mse"},
        {"method.kl_penalty": "full"},
    ],
)
def test_the_loss_is_that_of_the_second_implementation(changes: dict[str, Any], tmp_path: Path) -> None:
    """Summed over the real tokens of a padded batch, with every ratio, value and distribution off its old one."""
    trainer, start = sampled(tmp_path, **{**EVERYTHING, **changes})
    method, elements = trainer.method, trainer.store.elements
    expected = 0.0
    for stored in elements:
        ids = stored.prompt.tolist(), stored.response.tolist()
        policy = ppo_numpy.see(trainer.model.lm, *ids, 0.7, trainer.model.heads["value"])
        reference = ppo_numpy.see(start, *ids, 0.7)
        # As a loss the log-ratio has no gradient to speak of; half its square is what takes its place.
        kind = "mse" if method.kl_penalty == "kl" else method.kl_penalty
        old = {name: getattr(stored, name).double().numpy() for name in OLD}
        kl = ppo_numpy.penalty(policy, reference, kind)
        expected += ppo_numpy.token_losses(policy, old, method, 0.4, kl).sum()
    output = trainer.loss(PPOExperience.collate(elements))
    assert output.sums("tokens")["tokens"].item() == pytest.approx(expected, rel=1e-4)
    assert trainer.units(PPOExperience.collate(elements)) == sum(len(stored.response) for stored in elements)
    if "method.cliprange" in changes:
        for name in ("policy/clip_fraction", "values/clip_fraction"):
            clipped = output.metrics[name]
            assert isinstance(clipped, torch.Tensor) and clipped > 0, "nothing was clipped, so nothing was tested"


def test_the_metrics_of_a_step_by_hand(tmp_path: Path) -> None:
    """One response of two tokens: ratios 1/2 and 2, k3 of the old policy 1/2 - 1 + ln 2 and 2 - 1 - ln 2."""
    trainer = make("PPOTrainer", tmp_path, **{"method.cliprange": 0.2})
    trainer.make_experience()
    stored = max(trainer.store.elements, key=lambda e: len(e.response))
    trainer.model.eval()
    with torch.no_grad():
        now = trainer.model(PPOExperience.collate([stored])).logprobs[0]
    count = len(now)
    stored.old_logprobs = now + torch.tensor([math.log(2), -math.log(2)] + [0.0] * (count - 2))
    metrics = trainer.optimize(PPOExperience.collate([stored]))
    assert metrics["policy/ratio"] == pytest.approx((0.5 + 2 + count - 2) / count, abs=1e-5)
    assert metrics["policy/ratio_deviation"] == pytest.approx(1.5 / count, abs=1e-5)
    assert metrics["policy/clip_fraction"] == pytest.approx(2 / count)
    assert metrics["policy/approx_kl"] == pytest.approx(0.5 / count, abs=1e-5)
    assert metrics["losses/value_loss"] == pytest.approx(metrics["values/error"] / 2, abs=1e-6)


def moves(trainer: PPOTrainer, batch: PPOExperience) -> torch.Tensor:
    """How the log-probability of each real token changes with one small step."""
    with torch.no_grad():
        before = trainer.model.eval()(batch).logprobs[batch.mask]
    trainer.optimize(batch)
    with torch.no_grad():
        return trainer.model.eval()(batch).logprobs[batch.mask] - before


SMALL_STEP = {"optimizer.name": "sgd", "optimizer.kwargs": {"lr": 1e-2}, "train.max_grad_norm": None}


@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_good_actions_become_likelier_and_bad_ones_less_so(advantage: float, tmp_path: Path) -> None:
    trainer = make("PPOTrainer", tmp_path, **SMALL_STEP, **{"method.vf_coef": 0.0})
    trainer.make_experience()
    batch = PPOExperience.collate(trainer.store.elements)
    batch.advantages = torch.full_like(batch.advantages, advantage)
    assert advantage * moves(trainer, batch).sum() > 1e-3


def test_beyond_the_clip_there_is_nothing_to_gain(tmp_path: Path) -> None:
    """Good actions whose ratio is 2 already, and bad ones at 1/2, are left alone; the other way round they are not."""
    trainer = make("PPOTrainer", tmp_path, **SMALL_STEP, **{"method.vf_coef": 0.0})
    trainer.make_experience()
    batch = PPOExperience.collate(trainer.store.elements)
    fresh = batch.old_logprobs.clone()
    for ratio, advantage, moved in ((2, 1.0, False), (0.5, -1.0, False), (0.5, 1.0, True), (2, -1.0, True)):
        batch.old_logprobs = fresh - math.log(ratio)
        batch.advantages = torch.full_like(batch.advantages, advantage)
        change = moves(trainer, batch)
        assert (change.abs().max() > 1e-4) == moved
        with torch.no_grad():
            fresh = trainer.model.eval()(batch).logprobs


def test_the_entropy_bonus_raises_the_entropy(tmp_path: Path) -> None:
    changes = {"method.vf_coef": 0.0, "method.ent_coef": 1.0, "optimizer.kwargs": {"lr": 0.1}}
    trainer = shaken(make("PPOTrainer", tmp_path, **{**SMALL_STEP, **changes}), 1.0)
    trainer.make_experience()
    batch = PPOExperience.collate(trainer.store.elements)
    batch.advantages = torch.zeros_like(batch.advantages)

    def entropy() -> float:
        with torch.no_grad():
            return float(trainer.model.eval()(batch, entropy=True).entropy[batch.mask].mean())

    before = entropy()
    trainer.optimize(batch)
    assert entropy() > before + 1e-3


@pytest.mark.parametrize("kind", ["kl", "mse", "full"])
def test_a_penalty_in_the_loss_pulls_to_the_reference(kind: str, tmp_path: Path) -> None:
    """Many small steps with nothing else to gain bring a policy that has drifted back."""
    changes = {
        **{"method.vf_coef": 0.0, "method.kl_in": "loss", "method.init_kl_coef": 1.0, "method.kl_penalty": kind},
        **{"method.whiten_advantages": False, "method.ratio_threshold": None, "optimizer.kwargs": {"lr": 0.02}},
    }
    trainer = shaken(make("PPOTrainer", tmp_path, **{**SMALL_STEP, **changes}), 0.1)
    trainer.make_experience()
    batch = PPOExperience.collate(trainer.store.elements)
    batch.advantages = torch.zeros_like(batch.advantages)
    before = trainer.loss(batch).sums("tokens")["tokens"].item()
    for _ in range(10):
        trainer.optimize(batch)
    assert 0 <= trainer.loss(batch).sums("tokens")["tokens"].item() < 0.9 * before


# The trust region.


class Collect(Callback):
    """The metrics of every step, and where in its round it was."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []

    def on_step(self, trainer: Any, metrics: Mapping[str, float]) -> None:
        place = {"position": trainer.progress.position, "round": trainer.progress.round}
        self.steps.append({**metrics, **place})


@pytest.mark.parametrize("minibatch_size", [None, 1, 2])
def test_fresh_experience_has_a_ratio_of_one(minibatch_size: int | None, tmp_path: Path) -> None:
    """In every round, at a temperature of 0.7, and however the sampler and the learner batch and pad."""
    collect = Collect()
    changes = {"train.minibatch_size": minibatch_size, "train.batch_size": 4, "train.epochs": 3}
    make("PPOTrainer", tmp_path, **changes, callbacks=[collect]).learn()
    firsts = [step for step in collect.steps if step["position"] == 1]
    assert len(firsts) == 3
    for step in firsts:
        assert step["policy/ratio_deviation"] < 1e-6
        assert step["policy/clip_fraction"] == 0
    assert max(step["policy/ratio_deviation"] for step in collect.steps) > 1e-3


def test_disagreement_on_fresh_experience_stops_the_run(tmp_path: Path) -> None:
    """The learner scores at another temperature than the one recorded: no step is made, and the run is saved."""
    options = {"train.epochs": 3, "train.batch_size": 5}
    trainer = make("PPOTrainer", tmp_path, **options)
    record = trainer.record

    def recorded(*args: Any) -> Any:
        found = record(*args)
        if trainer.progress.round == 2:
            trainer.model.temperature = 0.5
        return found

    trainer.record = recorded
    with pytest.raises(SamplerError, match=r"^policy/ratio_deviation is 0\.\d+ on fresh experience, above 0\.001"):
        trainer.learn()
    assert trainer.progress.step == 4  # two rounds of two passes
    saved = make("PPOTrainer", tmp_path / "again", **options)
    saved.load(tmp_path)
    assert_same(saved.model.state_dict(), trainer.model.state_dict())
    assert (saved.progress.round, saved.progress.position, saved.progress.step) == (3, 0, 4)


def test_too_large_a_kl_ends_the_round(tmp_path: Path) -> None:
    """The step that finds it out is dropped, and the next one is on new experience."""
    collect = Collect()
    changes = {"method.target_kl": 1e-5, "train.epochs": 3, "optimizer.kwargs": {"lr": 0.01}}
    trainer = make("PPOTrainer", tmp_path, **changes, callbacks=[collect])
    trainer.learn()
    assert [(step["round"], step["position"]) for step in collect.steps] == [(r, p) for r in (1, 2, 3) for p in (1, 2)]
    assert [step["policy/skipped"] for step in collect.steps] == [0, 1] * 3
    assert ["rollout/score_mean" in row for row in rows(tmp_path)[1:]] == [True, False] * 3
    assert trainer.progress.round == 3 and not trainer.progress.in_round


def test_a_batch_beyond_the_ratio_is_skipped(tmp_path: Path) -> None:
    """Its gradients are dropped, the weights and the optimiser's averages stay, the round goes on."""
    trainer = make("PPOTrainer", tmp_path, **{"method.ratio_threshold": 10.0})
    trainer.make_experience()
    trainer.begin_round()
    batch = PPOExperience.collate(trainer.store.elements)
    trainer.optimize(batch)
    trainer.progress.position = 1  # the experience is not fresh any more
    before = copy.deepcopy([trainer.model.state_dict(), trainer.optimizer.state_dict()])
    batch.old_logprobs = batch.old_logprobs - 3  # e^3 = 20
    metrics = trainer.optimize(batch)
    assert metrics["policy/skipped"] == 1.0 and metrics["policy/ratio"] > 10
    assert_same([trainer.model.state_dict(), trainer.optimizer.state_dict()], before)
    assert trainer.progress.in_round and trainer.progress.step == 2
    assert all(parameter.grad is None for parameter in trainer.model.parameters())
    batch.old_logprobs = batch.old_logprobs + 3
    assert trainer.optimize(batch)["policy/skipped"] == 0.0


def test_a_value_branch_of_its_own_learns_without_the_policy(tmp_path: Path) -> None:
    """With `num_value_layers_unfrozen` the value loss moves the branch, and not the policy's frozen blocks."""
    changes = {"method.num_value_layers_unfrozen": 1, "model.num_layers_unfrozen": 0, "train.epochs": 2}
    trainer = make("PPOTrainer", tmp_path, **changes)
    before = copy.deepcopy({name: p.detach() for name, p in trainer.model.named_parameters()})
    trainer.learn()
    moved = {name for name, p in trainer.model.named_parameters() if not torch.equal(p, before[name])}
    assert not any(name.startswith("lm.") for name in moved)
    assert any(name.startswith("head_tops.value") for name in moved)
    assert any(name.startswith("heads.value") for name in moved)
    assert torch.equal(kls(trainer), torch.zeros_like(kls(trainer)))


# By hand.


def test_the_loop_by_hand_learns_a_bandit(tmp_path: Path) -> None:
    """One token, 1 for an "a" and 0 for anything else."""
    options = {"max_new_tokens": 1, "temperature": 1.0}
    changes = {"method.gen_kwargs": options, "optimizer.kwargs": {"lr": 0.01}, "train.batch_size": 16}
    trainer = make(
        "PPOTrainer",
        tmp_path,
        **changes,
        **{"method.init_kl_coef": 0.01, "train.total_steps": 160, "train.epochs": 40},
    )
    wanted = trainer.tokenizer.convert_tokens_to_ids("a")
    queries = ["ab"] * 32
    history = []
    for _ in range(40):
        responses = trainer.generate(queries)
        scores = [float(response[0] == wanted) for response in responses]
        stats = trainer.step(queries, responses, scores)
        assert stats["rollout/score_mean"] == pytest.approx(np.mean(scores))
        history.append(np.mean(scores))
    assert history[0] < 0.3 and history[-1] > 0.9
    assert stats["policy/kl"] > 1 and stats["policy/approx_kl"] >= 0
    assert trainer.progress.round == 40 and trainer.progress.step == 40 * 2 * 2 and trainer.finished
    assert trainer.decode(responses).count("a") > 28


def test_a_step_by_hand_is_a_step_of_the_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same responses and scores, given by hand, are the same experience."""
    trainer = make("PPOTrainer", tmp_path, **{"train.batch_size": 4})
    trainer.make_experience()
    stored = trainer.store.elements
    by_hand = make("PPOTrainer", tmp_path, **{"train.batch_size": 4})
    optimised: list[PPOExperience] = []

    def note(batch: PPOExperience) -> dict[str, float]:
        optimised.append(batch)
        return {"policy/ratio_deviation": 0.0}

    monkeypatch.setattr(by_hand, "optimize", note)
    queries = [element.prompt for element in stored]
    by_hand.step(queries, [element.response for element in stored], [float(e.scores.sum()) for e in stored])
    for got, expected in zip(by_hand.store.elements, stored, strict=True):
        for name, value in vars(expected).items():
            if name != "place":  # among the samples of a round, which a step by hand has not
                torch.testing.assert_close(getattr(got, name), value, rtol=0, atol=1e-5)
    assert len(optimised) == 4


def test_a_step_by_hand_knows_what_ends_a_response(tmp_path: Path) -> None:
    """The penalty for a response without an end: any of the EOS ids is one, and a stop sequence."""
    changes = {"method.missing_eos_penalty": 2.0, "stop_sequences": ["cd"], "method.gen_kwargs": GENERATION}
    trainer = make("PPOTrainer", tmp_path, **changes)
    ids = trainer.tokenizer.convert_tokens_to_ids
    ended, stopped, neither = [5, 8], [5, ids("c"), ids("d")], [5, 5]
    trainer.step(["a", "a", "a"], [torch.tensor(row) for row in (ended, stopped, neither)], [1.0, 1.0, 1.0])
    assert [float(element.scores.sum()) for element in trainer.store.elements] == [1.0, 1.0, -1.0]


def test_a_step_by_hand_refuses_what_does_not_fit(tmp_path: Path) -> None:
    trainer = make("PPOTrainer", tmp_path)
    with pytest.raises(DataError, match="1 queries, 2 responses and 1 scores"):
        trainer.step(["a"], [torch.tensor([3]), torch.tensor([3])], [1.0])
    with pytest.raises(DataError, match=r"responses\[1\] is empty"):
        trainer.step(["a", "b"], [torch.tensor([3]), torch.tensor([], dtype=torch.int64)], [1.0, 1.0])


def test_a_loop_by_hand_needs_no_reward_function_and_no_prompts(tmp_path: Path) -> None:
    config = make("PPOTrainer", tmp_path).config
    trainer = PPOTrainer(config)
    responses = trainer.generate(["ab", "c"])
    assert trainer.step(["ab", "c"], responses, [1.0, 0.0])["policy/ratio_deviation"] < 1
    cases: list[tuple[dict[str, Any], str]] = [({}, "reward_fn"), ({"reward_fn": len}, "prompts")]
    for given, name in cases:
        sentence = rf"PPOTrainer needs {name}: pass train\({name}=...\) or set data.{name}."
        with pytest.raises(ConfigError, match=sentence):
            PPOTrainer(config, **given).learn()
        with pytest.raises(ConfigError, match=sentence):
            make_trainer(config.evolve(model={"model_path": "no/model"}), **given)
