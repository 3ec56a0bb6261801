"""GRPO, RLOO and REINFORCE++: what a round holds, against a second implementation of advantages and loss."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.contract.recipes import GENERATION, count_letters, make
from tests.contract.runs import rows
from tests.distributed.ranks import on_ranks
from tests.unit.functional import groups_numpy as twin
from tests.unit.trainers import ppo_numpy
from tests.unit.trainers.test_ppo_experience import shaken
from trlx_like import GRPOConfig, RLOOConfig
from trlx_like.errors import ConfigError, RewardError
from trlx_like.trainers.groups import GroupExperience, GroupTrainer

ROUND = {"method.num_prompts": 4, "method.num_generations": 3, "method.beta": 0.0}
ONE_STEP = {"method.num_iterations": 1, "train.batch_size": 12}


class Record:
    """A reward function that keeps its calls, and the scores it gave by prompt."""

    def __init__(self, score: Any = count_letters) -> None:
        self.score = score
        self.prompts: list[list[str]] = []
        self.scores: list[float | None] = []

    def __call__(self, prompts: Sequence[str], outputs: Sequence[str], **_: Any) -> list[float | None]:
        self.prompts.append(list(prompts))
        self.scores += self.score(outputs=outputs)
        return self.scores[-len(outputs) :]

    def groups(self, size: int) -> list[list[float]]:
        rows = [self.scores[at : at + size] for at in range(0, len(self.scores), size)]
        return [[score for score in row if score is not None] for row in rows]


def collected(name: str, folder: Path, score: Any = count_letters, **changes: Any) -> tuple[GroupTrainer, Record, Any]:
    """A trainer with a round of experience, its reward function, and what there was to log."""
    record = Record(score)
    trainer = make(name, folder, reward_fn=record, **{**ROUND, **changes})
    made = trainer.make_experience()
    return trainer, record, {**made, **trainer.rollouts.metrics()}


def of_responses(trainer: GroupTrainer) -> list[float]:
    """The advantage of each response, which all its tokens have."""
    assert all(len(set(element.advantages.tolist())) == 1 for element in trainer.store.elements)
    return [float(element.advantages[0]) for element in trainer.store.elements]


def test_a_prompt_is_answered_several_times_in_a_row(tmp_path: Path) -> None:
    trainer, record, _ = collected("GRPOTrainer", tmp_path, **{"method.chunk_size": 3})
    assert [len(call) for call in record.prompts] == [9, 3]
    prompts = [prompt for call in record.prompts for prompt in call]
    assert all(len(set(prompts[at : at + 3])) == 1 for at in range(0, 12, 3))
    assert len(set(prompts)) == 4
    assert len(trainer.store) == 12


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_advantages_of_grpo(scale: str, tmp_path: Path) -> None:
    trainer, record, metrics = collected("GRPOTrainer", tmp_path, **{"method.scale_rewards": scale})
    groups = record.groups(3)
    assert of_responses(trainer) == pytest.approx(twin.grpo(groups, scale), rel=1e-4, abs=1e-6)
    assert metrics["rollout/score_mean"] == pytest.approx(twin.mean([s for group in groups for s in group]))
    assert metrics["rollout/score_std"] == pytest.approx(twin.deviation([s for group in groups for s in group]))
    assert metrics["rollout/group_std"] == pytest.approx(twin.mean([twin.deviation(group) for group in groups]))
    assert metrics["rollout/zero_std_fraction"] == twin.mean([float(len(set(group)) == 1) for group in groups])


def test_advantages_of_rloo(tmp_path: Path) -> None:
    trainer, record, _ = collected("RLOOTrainer", tmp_path)
    assert of_responses(trainer) == pytest.approx(twin.rloo(record.groups(3)), rel=1e-5, abs=1e-6)


def test_the_best_of_k_falls_to_the_score_itself(tmp_path: Path) -> None:
    """With 9 steps k is 3 before the first step, 2 after three (1 + 2 * 6 / 9 = 2.3), and 1 from the seventh on."""
    changes = {"method.max_at_k": 3, "method.max_at_k_steps": 9, "method.num_generations": 6, "method.beta": 0.0}
    for name, step, k in [("RLOOTrainer", 0, 3), ("RLOOTrainer", 3, 2), ("RLOOTrainer", 7, 1), ("RLOOTrainer", 99, 1)]:
        record = Record()
        trainer = make(name, tmp_path / str(step), reward_fn=record, **{**ROUND, **changes})
        trainer.progress.step = step
        assert trainer.make_experience()["rollout/max_at_k"] == k
        groups = record.groups(6)
        expected = [value - baseline for value, baseline in twin.best_of(groups, k)]
        assert of_responses(trainer) == pytest.approx(expected, rel=1e-5, abs=1e-6)
        assert k == 1 or expected != pytest.approx(twin.rloo(groups), rel=1e-2)


def test_the_best_of_k_with_grpo_is_centered_and_divided(tmp_path: Path) -> None:
    changes = {"method.max_at_k": 2, "method.num_generations": 4, "method.scale_rewards": "group"}
    trainer, record, _ = collected("GRPOTrainer", tmp_path, **changes)
    expected = []
    for group in record.groups(4):
        values = [value for value, _ in twin.best_of([group], 2)]
        expected += [(value - twin.mean(values)) / (twin.deviation(group) + twin.EPS) for value in values]
    assert of_responses(trainer) == pytest.approx(expected, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("name", ["GRPOTrainer", "RLOOTrainer"])
def test_credit_by_prefix_is_that_of_the_second_implementation(name: str, tmp_path: Path) -> None:
    changes = {"method.credit": "prefix", "method.scale_rewards": "none", "method.num_generations": 6}
    trainer, record, _ = collected(name, tmp_path, **changes)
    elements, groups = trainer.store.elements, record.groups(6)
    wholes = twin.rloo(groups) if name == "RLOOTrainer" else twin.grpo(groups, "none")
    places = [row // 6 for row in range(len(elements))]
    scores = [score for group in groups for score in group]
    expected = twin.prefix(scores, wholes, places, [element.response.tolist() for element in elements])
    got = torch.cat([element.advantages for element in elements]).tolist()
    assert got == pytest.approx(expected, rel=1e-4, abs=1e-5)
    assert any(len(set(element.advantages.tolist())) > 1 for element in elements)  # some share a first token


def differing_policy(trainer: GroupTrainer) -> tuple[Any, Any]:
    """Moves the policy off its reference; returns plain models of both."""
    reference = copy.deepcopy(trainer.model.lm)
    return copy.deepcopy(shaken(trainer, 0.1).model.lm), reference


def seen(element: GroupExperience, policy: Any, reference: Any) -> tuple[ppo_numpy.Seen, ppo_numpy.Seen]:
    ids = element.prompt.tolist(), element.response.tolist()
    return ppo_numpy.see(policy, *ids, 0.7), ppo_numpy.see(reference, *ids, 0.7)


@pytest.mark.parametrize(
    ("name", "scale"),
    [("GRPOTrainer", "none"), ("GRPOTrainer", "group"), ("RLOOTrainer", "none"), ("RLOOTrainer", "batch")],
)
def test_the_kl_in_the_reward_is_that_of_the_whole_response(name: str, scale: str, tmp_path: Path) -> None:
    """The scores are scaled before it is subtracted, so that its weight is in units of their deviation."""
    changes = {"method.beta": 0.5, "method.kl_in": "reward", "method.scale_rewards": scale}
    record = Record()
    trainer = make(name, tmp_path, reward_fn=record, **{**ROUND, **changes})
    models = differing_policy(trainer)
    metrics = {**trainer.make_experience(), **trainer.rollouts.metrics()}
    pairs = [seen(element, *models) for element in trainer.store.elements]
    kls = [float((policy.logprobs - reference.logprobs).sum()) for policy, reference in pairs]
    scores = [score for group in record.groups(3) for score in group]
    unit = {
        "none": [1.0] * 4,
        "batch": [twin.deviation(scores) + 1e-4] * 4,
        "group": [twin.deviation(g) + 1e-4 for g in record.groups(3)],
    }
    net = [score / unit[scale][at // 3] - 0.5 * kl for at, (score, kl) in enumerate(zip(scores, kls, strict=True))]
    groups = [net[at : at + 3] for at in range(0, 12, 3)]
    expected = twin.rloo(groups) if name == "RLOOTrainer" else twin.grpo(groups, "none")
    assert of_responses(trainer) == pytest.approx(expected, rel=1e-3, abs=1e-4)
    assert metrics["policy/kl"] == pytest.approx(
        twin.mean([float(ppo_numpy.penalty(*p, "k3").sum()) for p in pairs]), rel=1e-3
    )


def test_reinforce_plus_plus_counts_the_kl_from_each_token_on(tmp_path: Path) -> None:
    record = Record()
    changes = {**ROUND, "method.beta": 0.5, "method.baseline": "batch", "method.num_generations": 1}
    trainer = make("RLOOTrainer", tmp_path, reward_fn=record, **changes)
    models = differing_policy(trainer)
    trainer.make_experience()
    returns = []
    for element, score in zip(trainer.store.elements, record.scores, strict=True):
        policy, reference = seen(element, *models)
        kl = policy.logprobs - reference.logprobs
        returns += [score - 0.5 * kl[t:].sum() for t in range(len(kl))]
    expected = (np.array(returns) - np.mean(returns)) / np.std(returns, ddof=1)
    got = torch.cat([element.advantages for element in trainer.store.elements])
    assert got.tolist() == pytest.approx(expected.tolist(), rel=1e-3, abs=1e-3)


@pytest.mark.parametrize("loss_type", ["dapo", "grpo", "dr_grpo"])
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_the_loss_is_that_of_the_second_implementation(loss_type: str, level: str, tmp_path: Path) -> None:
    """On a padded batch whose ratios are off 1, some of them clipped on each side; KL in the loss."""
    changes = {
        **{"method.beta": 0.4, "method.loss_type": loss_type, "method.importance_sampling_level": level},
        **{"method.epsilon": 0.02, "method.epsilon_high": 0.05, "optimizer.kwargs": {"lr": 0.0}},
    }
    trainer, _, _ = collected("GRPOTrainer", tmp_path, **changes)
    reference = copy.deepcopy(trainer.model.lm)
    shaken(trainer, 0.1)
    losses, low, high, tokens = [], 0, 0, 0
    for element in trainer.store.elements:
        policy, start = seen(element, trainer.model.lm, reference)
        d = policy.logprobs - element.old_logprobs.double().numpy()
        d = d if level == "token" else np.full_like(d, d.mean())
        advantage = float(element.advantages[0])
        ratio = np.exp(d)
        surrogate = -np.minimum(ratio * advantage, np.clip(ratio, 0.98, 1.05) * advantage)
        losses.append(list(surrogate + 0.4 * ppo_numpy.penalty(policy, start, "k3")))
        low += int(((ratio < 0.98) & (advantage < 0)).sum())
        high += int(((ratio > 1.05) & (advantage > 0)).sum())
        tokens += len(d)
    assert low and high, "nothing was clipped, so nothing was tested"
    metrics = trainer.optimize(GroupExperience.collate(trainer.store.elements))
    assert metrics["losses/total_loss"] == pytest.approx(twin.loss(losses, loss_type, 6), rel=1e-3, abs=1e-4)
    assert metrics["policy/clip_fraction_low"] == pytest.approx(low / tokens)
    assert metrics["policy/clip_fraction_high"] == pytest.approx(high / tokens)
    assert metrics["losses/total_loss"] == pytest.approx(
        metrics["losses/policy_loss"] + 0.4 * metrics["losses/kl"], rel=1e-4, abs=1e-5
    )


@pytest.mark.parametrize("passes", [1, 2])
def test_responses_are_passed_over_num_iterations_times(passes: int, tmp_path: Path) -> None:
    """Twelve responses, four to a step: three steps a pass. Only the first is of the policy that sampled."""
    changes = {"method.num_iterations": passes, "train.epochs": 2, "train.batch_size": 4}
    trainer = make("GRPOTrainer", tmp_path, **{**ROUND, **changes})
    trainer.learn()
    assert (trainer.progress.step, trainer.progress.round) == (2 * 3 * passes, 2)
    deviations = [row["policy/ratio_deviation"] for row in rows(tmp_path) if "policy/ratio_deviation" in row]
    fresh = [step % (3 * passes) == 0 for step in range(len(deviations))]
    assert [deviation < 1e-5 for deviation in deviations] == fresh


@pytest.mark.parametrize("name", ["GRPOTrainer", "RLOOTrainer"])
def test_one_step_a_round_needs_no_forward_before_it(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two rounds of the canary and one step, with the weights that the old log-probabilities lead to."""
    changes = {**ROUND, **ONE_STEP, "train.epochs": 2}
    made: list[tuple[int, list[torch.Tensor]]] = []
    for _ in range(2):
        trainer = make(name, tmp_path / str(len(made)), **changes)
        forwards: list[int] = []
        trainer.model.register_forward_pre_hook(lambda *_, seen=forwards: seen.append(1))
        trainer.learn()
        assert trainer.progress.step == 2
        made.append((len(forwards), [weight.detach() for weight in trainer.model.parameters()]))
        monkeypatch.setattr(GroupTrainer, "observes", True)
    assert [count for count, _ in made] == [2 * (1 + 1), 2 * (1 + 1 + 1)]
    for without, observed in zip(made[0][1], made[1][1], strict=True):
        torch.testing.assert_close(without, observed, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    "change",
    [
        {"method.num_iterations": 2},
        {"train.batch_size": 6},
        {"method.beta": 0.1},
        {"method.rollout_correction": "token"},
        {"sampler.engine": "copy"},
    ],
    ids=str,
)
def test_what_needs_the_log_probabilities_before_the_first_step(change: dict[str, Any], tmp_path: Path) -> None:
    whole = {**ROUND, **ONE_STEP}
    assert not make("GRPOTrainer", tmp_path / "a", **whole).observes
    assert make("GRPOTrainer", tmp_path / "b", **{**whole, **change}).observes


def test_without_a_weight_there_is_no_reference(tmp_path: Path) -> None:
    trainer, _, metrics = collected("GRPOTrainer", tmp_path)
    assert trainer.model.reference_modules() == []
    assert all(element.ref_logprobs is None for element in trainer.store.elements)
    assert not [name for name in metrics if name.startswith("policy/kl")]


class Uneven:
    """Scores every other call of three all the same."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, outputs: Sequence[str]) -> list[float]:
        self.calls += 1
        return [1.0] * len(outputs) if self.calls % 2 else [float(row) for row in range(len(outputs))]


DYNAMIC = {"method.max_sampling_attempts": 4, "method.chunk_size": 1, "method.num_prompts": 2}


def test_groups_of_equal_scores_are_replaced(tmp_path: Path) -> None:
    """Equal, kept; then one is wanted: equal, and then kept."""
    trainer, record, metrics = collected("GRPOTrainer", tmp_path, Uneven(), **DYNAMIC)
    assert len(record.prompts) == 4
    assert len(trainer.store) == 6
    assert metrics["rollout/sampling_attempts"] == 3
    assert metrics["rollout/groups_skipped"] == 2
    assert metrics["rollout/zero_std_fraction"] == 0.5
    assert metrics["rollout/score_mean"] == 1  # of all twelve, those left out as well
    assert metrics["rollout/kept/fraction"] == 0.5


def all_equal(outputs: Sequence[str]) -> list[float]:
    return [1.0] * len(outputs)


def test_a_task_that_is_solved_ends_the_search(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Four times two prompts and no more; rounds without a step pass until the epochs are over."""
    record = Record(all_equal)
    trainer = make("GRPOTrainer", tmp_path, reward_fn=record, **{**ROUND, **DYNAMIC, "train.epochs": 2})
    trainer.learn()
    assert (trainer.progress.step, trainer.progress.round) == (0, 2)
    assert "Nothing of this round can be learned from" in caplog.text
    evaluation = 1
    assert len(record.prompts) - evaluation == 2 * 4 * 2


def test_rows_of_every_attempt_are_written(tmp_path: Path) -> None:
    changes = {**DYNAMIC, "train.rollout_logging_dir": str(tmp_path / "rollouts")}
    collected("GRPOTrainer", tmp_path, Uneven(), **changes)
    (file,) = (tmp_path / "rollouts").iterdir()
    assert len(file.read_text().splitlines()) == 12


def sometimes(outputs: Sequence[str]) -> list[float | None]:
    """No score for the first response to a prompt."""
    return [float(row) if row % 3 else None for row in range(len(outputs))]


def test_an_abstention_leaves_the_others_to_be_compared(tmp_path: Path) -> None:
    trainer, _, metrics = collected("RLOOTrainer", tmp_path, sometimes, **{"method.chunk_size": 1})
    assert of_responses(trainer) == [-1, 1] * 4
    assert metrics["rollout/score_mean"] == 1.5


class OnlyAtFirst(Uneven):
    """As `Uneven`, and no scores after two prompts."""

    def __call__(self, outputs: Sequence[str]) -> list[Any]:
        scores: list[Any] = super().__call__(outputs)
        return scores if self.calls <= 2 else [None] * len(outputs)


def test_abstaining_from_what_replaces_a_group_is_no_error(tmp_path: Path) -> None:
    trainer, record, metrics = collected("GRPOTrainer", tmp_path, OnlyAtFirst(), **DYNAMIC)
    assert len(record.prompts) == 2 + 3
    assert len(trainer.store) == 3
    assert metrics["rollout/sampling_attempts"] == 4


def test_nothing_but_abstentions(tmp_path: Path) -> None:
    with pytest.raises(RewardError, match=r"abstained \(None\) from all 12 samples"):
        collected("RLOOTrainer", tmp_path, lambda outputs: [None] * len(outputs))


def test_truncated_responses_are_compared_with_and_not_learned_from(tmp_path: Path) -> None:
    trainer, record, metrics = collected("RLOOTrainer", tmp_path, **{"method.mask_truncated_completions": True})
    whole, _, _ = collected("RLOOTrainer", tmp_path)
    assert 0 < metrics["rollout/finished_fraction"] < 1
    assert metrics["rollout/kept/fraction"] == pytest.approx(metrics["rollout/finished_fraction"])
    ended = [element.response[-1] % 4 == 0 for element in whole.store.elements]
    expected = [advantage for advantage, kept in zip(of_responses(whole), ended, strict=True) if kept]
    assert of_responses(trainer) == expected


def test_long_responses_lose_part_of_their_score(tmp_path: Path) -> None:
    """Of at most 6 tokens the last 3 cost a third each."""
    trainer, _, metrics = collected("RLOOTrainer", tmp_path, all_equal, **{"method.soft_punish_cache": 3})
    lengths = [len(element.response) for element in trainer.store.elements]
    scores = [1 - max(0, length - 3) / 3 for length in lengths]
    assert len(set(scores)) > 1
    expected = twin.rloo([scores[at : at + 3] for at in range(0, 12, 3)])
    assert of_responses(trainer) == pytest.approx(expected, abs=1e-6)
    assert metrics["rollout/score_mean"] == 1  # as the reward function gave them


def round_on(rank: int, folder: Path, changes: dict[str, Any]) -> dict[str, Any]:
    """The groups that a process holds, the advantages of their responses, and the metrics of the round."""
    trainer, record, metrics = collected("GRPOTrainer", folder, **changes)
    return {"groups": record.groups(3), "advantages": of_responses(trainer), "metrics": metrics}


@pytest.mark.parametrize("prompts", [3, 1])
@pytest.mark.parametrize("scale", ["group", "batch"])
def test_two_processes_compare_as_one(prompts: int, scale: str, tmp_path: Path) -> None:
    """A group stays on one process; the deviation of the batch is that of both. With one prompt one has nothing."""
    changes = {"method.scale_rewards": scale, "method.num_prompts": prompts}
    first, second = on_ranks(round_on, tmp_path, changes)
    assert [len(side["groups"]) for side in (first, second)] == [(prompts + 1) // 2, prompts // 2]
    expected = twin.grpo(first["groups"] + second["groups"], scale)
    assert first["advantages"] + second["advantages"] == pytest.approx(expected, rel=1e-4, abs=1e-6)
    assert first["metrics"] == second["metrics"]


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        (GRPOConfig, {"num_generations": 1}, "method.num_generations: 1 leaves nothing to compare"),
        (GRPOConfig, {"soft_punish_cache": 41}, "method.soft_punish_cache: 41 is above"),
        (
            GRPOConfig,
            {"gen_kwargs": {**GENERATION, "do_sample": False}},
            "do_sample: false samples text in a way the loss cannot account for",
        ),
        (GRPOConfig, {"gen_kwargs": {**GENERATION, "num_beams": 2}}, "the loss cannot account for"),
        (GRPOConfig, {"num_generation": 4}, "Did you mean method.num_generations"),
        (GRPOConfig, {"loss_type": "bnpo"}, "loss_type"),
        (RLOOConfig, {"num_generations": 1}, "method.num_generations: 1 leaves nothing to compare"),
        (RLOOConfig, {"baseline": "batch", "scale_rewards": "group"}, "scale_rewards: 'group' compares within groups"),
        (RLOOConfig, {"baseline": "batch", "credit": "prefix"}, "method.credit: 'prefix' compares within groups"),
        (RLOOConfig, {"baseline": "batch", "max_at_k": 2}, "method.max_at_k: above 1 compares within groups"),
        (
            GRPOConfig,
            {"replay_best": True, "rollout_correction": "token"},
            "replay_best: method.rollout_correction cannot",
        ),
        (GRPOConfig, {"replay_best": True, "gen_kwargs": {**GENERATION, "top_k": 5}}, "replay_best: .* top_k forbids"),
        (GRPOConfig, {"num_generations": 4, "max_at_k": 4}, r"max_at_k: 4 .* method.num_generations .4. must be above"),
        (
            RLOOConfig,
            {"num_generations": 1, "baseline": "batch", "max_sampling_attempts": 2},
            "method.max_sampling_attempts: 2 would leave out all groups",
        ),
    ],
)
def test_options_that_cannot_be_meant(kind: type[Any], options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        kind(**options)


def test_options_that_are_fine() -> None:
    assert RLOOConfig(num_generations=1, baseline="batch").unused_options() == []
    assert GRPOConfig(kl_in="reward").unused_options() == ["kl_in"]
    assert GRPOConfig(kl_in="reward", beta=0.1).unused_options() == []
    assert GRPOConfig(max_at_k_steps=10).unused_options() == ["max_at_k_steps"]
    assert GRPOConfig(max_at_k=4, max_at_k_steps=10).unused_options() == []
    assert math.isclose(RLOOConfig().beta, 0.05)
