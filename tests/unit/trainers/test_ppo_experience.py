"""From scores to advantages: numbers worked by hand, and what the policy, value head and reference are asked."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.contract.recipes import PROMPTS, count_letters, make
from tests.distributed.ranks import on_ranks
from tests.unit.trainers import ppo_numpy
from trlx_like import BaseRLTrainer
from trlx_like.data import Completion
from trlx_like.errors import ConfigError, RewardError
from trlx_like.trainers.online import dense
from trlx_like.trainers.ppo import PPOExperience, PPOTrainer

PLAIN = {
    "method.whiten_advantages": False,
    "method.init_kl_coef": 0.0,
    "method.cliprange_reward": None,
    "train.batch_size": 4,
}
# A = r - V, token by token.
NO_FUTURE = {**PLAIN, "method.gamma": 0.0, "method.lam": 0.0}


def element(
    scores: Sequence[float],
    values: Sequence[float] | None = None,
    kl: Sequence[float] | None = None,
    log_ratio: float = 0.0,
) -> PPOExperience:
    """A response to a prompt of one token. log_ratio: of policy to reference, at every token."""
    count = len(scores)
    zeros, real = torch.zeros(count), torch.ones(count, dtype=torch.bool)
    return PPOExperience(
        prompt=torch.tensor([5]),
        prompt_mask=torch.tensor([True]),
        response=torch.arange(count) + 3,
        mask=real,
        old_logprobs=zeros - 1 + log_ratio,
        old_values=zeros if values is None else torch.tensor(values),
        ref_logprobs=zeros - 1,
        kl=zeros if kl is None else torch.tensor(kl),
        scores=torch.tensor(scores),
        advantages=zeros,
        returns=zeros,
    )


def column(trainer: PPOTrainer, name: str) -> list[list[float]]:
    return [getattr(stored, name).tolist() for stored in trainer.store.elements]


def approx(expected: Any) -> Any:
    """Of nested lists."""
    return [pytest.approx(row, abs=1e-6) for row in expected]


# Where rewards are put.


def test_a_score_is_put_on_the_last_token_and_a_list_from_the_first() -> None:
    mask = torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1], [1, 0, 0, 0], [1, 1, 0, 0]]).bool()
    expected = [[0.0, 0.0, 2.0, 0.0], [0.5, -1.0, 0.0, 0.0], [3.0, 0.0, 0.0, 0.0], [1.0, 4.0, 0.0, 0.0]]
    assert dense([2.0, [0.5, -1.0], 3.0, [1.0, 4.0]], mask).tolist() == expected


def test_the_reward_of_a_sampled_response_is_on_its_eos(tmp_path: Path) -> None:
    """Of real samples: the last token is the one that ended the response, and has the whole score."""
    seen: dict[str, float] = {}

    def reward(outputs: Sequence[str], samples: Sequence[str], **_: Any) -> list[float]:
        scores = [1.0 + len(output) for output in outputs]
        seen.update(zip(samples, scores, strict=True))
        return scores

    trainer = make("PPOTrainer", tmp_path, reward_fn=reward, **PLAIN)
    trainer.make_experience()
    for stored in trainer.store.elements:
        text = trainer.tokenizer.decode(torch.cat([stored.prompt, stored.response]), skip_special_tokens=True)
        assert stored.scores.tolist() == [0.0] * (len(stored.response) - 1) + [seen[text]]
        assert not (stored.response[:-1] % 4 == 0).any()  # multiples of 4 end a response
        ended = bool(stored.response[-1] % 4 == 0)
        assert ended or len(stored.response) == 6
    assert {len(stored.response) for stored in trainer.store.elements} != {6}


def test_missing_eos_costs_and_scores_are_clipped(tmp_path: Path) -> None:
    """Scores 1 and 9: the first response did not end, so 1 - 3 = -2; clipped to 2 they are -2 and 2."""
    changes = {"method.missing_eos_penalty": 3.0, "method.cliprange_reward": 2.0}
    trainer = make("PPOTrainer", tmp_path, **{**PLAIN, **changes})
    batch = PPOExperience.collate([element([0.0, 1.0]), element([0.0, 0.0, 9.0])])
    completion = Completion(batch.prompt, batch.prompt_mask, batch.response, batch.mask)
    stored = trainer.record(completion, batch.scores, [False, True])
    assert [e.scores.tolist() for e in stored] == [[0.0, -2.0], [0.0, 0.0, 2.0]]


def test_abstained_samples_are_left_out(tmp_path: Path) -> None:
    def reward(outputs: Sequence[str], **_: Any) -> list[float | None]:
        return [None, *([1.0] * (len(outputs) - 1))]

    trainer = make("PPOTrainer", tmp_path, reward_fn=reward, **PLAIN)  # five rollouts in chunks of three
    metrics = {**trainer.make_experience(), **trainer.rollouts.metrics()}
    assert len(trainer.store) == 3
    assert metrics["rollout/score_mean"] == 1.0
    with pytest.raises(RewardError, match="abstained"):
        make("PPOTrainer", tmp_path, reward_fn=lambda outputs: [None] * len(outputs)).make_experience()


def test_dense_rewards_reach_their_tokens(tmp_path: Path) -> None:
    def reward(output_ids: list[list[int]]) -> list[list[float]]:
        return [[0.25, 0.5, 0.0, 0.0, 0.0, 0.0][: len(ids)] for ids in output_ids]

    trainer = make("PPOTrainer", tmp_path, reward_fn=reward, **NO_FUTURE)
    trainer.make_experience()
    for stored in trainer.store.elements:
        expected = [0.25, 0.5, 0.0, 0.0, 0.0, 0.0][: len(stored.response)]
        assert stored.scores.tolist() == expected
        assert torch.equal(stored.returns - stored.old_values, stored.advantages)


# From rewards to advantages.


def test_advantages_and_returns_by_hand(tmp_path: Path) -> None:
    """gamma 1, lambda .95, V = (.1, .2, .3), reward 1 at the end:
    deltas .2 - .1, .3 - .2, 1 - .3; A = .7, .1 + .95 * .7 = .765, .1 + .95 * .765 = .82675 from the last; R = A + V.
    """
    trainer = make("PPOTrainer", tmp_path, **PLAIN)
    trainer.add_experience([element([0.0, 0.0, 1.0], [0.1, 0.2, 0.3]), element([2.0], [0.5])])
    assert column(trainer, "advantages") == approx([[0.82675, 0.765, 0.7], [1.5]])
    assert column(trainer, "returns") == approx([[0.92675, 0.965, 1.0], [2.0]])


def test_the_kl_penalty_is_taken_off_each_token(tmp_path: Path) -> None:
    """Coefficient .5: rewards 0 - .05 and 1 - .1; without discount or values the first sees both: .85."""
    trainer = make("PPOTrainer", tmp_path, **{**PLAIN, "method.lam": 1.0, "method.init_kl_coef": 0.5})
    metrics = trainer.add_experience([element([0.0, 1.0], kl=[0.1, 0.2])])
    assert column(trainer, "advantages") == approx([[0.85, 0.9]])
    assert metrics["rollout/return_mean"] == pytest.approx(0.85)


def test_in_the_loss_the_penalty_is_not_in_the_reward(tmp_path: Path) -> None:
    trainer = make("PPOTrainer", tmp_path, **{**NO_FUTURE, "method.init_kl_coef": 0.5, "method.kl_in": "loss"})
    trainer.add_experience([element([0.0, 1.0], kl=[0.1, 0.2])])
    assert column(trainer, "advantages") == [[0.0, 1.0]]


ROWS = [element([1.0, 2.0, 3.0]), element([6.0])]
# A = 1, 2, 3, 6 over both rows: mean 3, squared distances 4 + 1 + 0 + 9 = 14, variance 14 / 3.
WHITE = [[(a - 3) / math.sqrt(14 / 3) for a in row] for row in ([1, 2, 3], [6])]


def test_advantages_are_whitened_over_the_real_tokens_of_the_round(tmp_path: Path) -> None:
    trainer = make("PPOTrainer", tmp_path, **{**NO_FUTURE, "method.whiten_advantages": True})
    trainer.add_experience(ROWS)
    assert column(trainer, "advantages") == approx(WHITE)
    assert column(trainer, "returns") == [[1.0, 2.0, 3.0], [6.0]]


def advantages_on(rank: int, folder: Path, shares: list[list[PPOExperience]]) -> tuple[list[list[float]], Any]:
    trainer = make("PPOTrainer", folder, **{**NO_FUTURE, "method.whiten_advantages": True})
    metrics = trainer.add_experience(shares[rank])
    return column(trainer, "advantages"), metrics


@pytest.mark.parametrize("shares", [[ROWS[:1], ROWS[1:]], [ROWS, []]], ids=["a row each", "one has none"])
def test_the_round_is_that_of_both_processes(shares: list[list[PPOExperience]], tmp_path: Path) -> None:
    (first, metrics), (second, same) = on_ranks(advantages_on, tmp_path, shares)
    assert first + second == approx(WHITE)
    assert metrics == same
    alone = make("PPOTrainer", tmp_path, **{**NO_FUTURE, "method.whiten_advantages": True}).add_experience(ROWS)
    assert metrics == pytest.approx(alone)


def test_rewards_are_whitened_around_their_mean(tmp_path: Path) -> None:
    """1 and 3: mean 2, variance 2: 2 -+ 1 / sqrt(2)."""
    trainer = make("PPOTrainer", tmp_path, **{**NO_FUTURE, "method.whiten_rewards": True})
    trainer.add_experience([element([1.0]), element([3.0])])
    assert column(trainer, "advantages") == approx([[2 - math.sqrt(0.5)], [2 + math.sqrt(0.5)]])


# Scaling. The score of a sample is the sum over its tokens: 1 and 3, then 5 and 7.
FIRST, THEN = [element([0.0, 1.0]), element([3.0])], [element([5.0]), element([4.0, 3.0])]


def test_scores_over_the_deviation_of_all_so_far(tmp_path: Path) -> None:
    """After 1, 3: deviation sqrt(2). After 1, 3, 5, 7: squared distances from 4: 9 + 1 + 1 + 9 = 20, over 3."""
    trainer = make("PPOTrainer", tmp_path, **{**NO_FUTURE, "method.scale_reward": "running"})
    trainer.add_experience(FIRST)
    trainer.add_experience(THEN)
    now, later = math.sqrt(2), math.sqrt(20 / 3)
    expected = [[0.0, 1 / now], [3 / now], [5 / later], [4 / later, 3 / later]]
    assert column(trainer, "advantages") == approx(expected)


def test_scores_less_their_running_mean(tmp_path: Path) -> None:
    """The mean, 2 and then 4, is taken off a sample's last token, once."""
    changes = {"method.scale_reward": "running", "method.norm_reward": True}
    trainer = make("PPOTrainer", tmp_path, **{**NO_FUTURE, **changes})
    trainer.add_experience(FIRST)
    trainer.add_experience(THEN)
    now, later = math.sqrt(2), math.sqrt(20 / 3)
    expected = [[0.0, -1 / now], [1 / now], [1 / later], [4 / later, -1 / later]]
    assert column(trainer, "advantages") == approx(expected)


@pytest.mark.parametrize(
    ("given", "mean", "deviation"), [({}, 2, math.sqrt(2)), ({"method.ref_mean": 1.0, "method.ref_std": 4.0}, 1, 4)]
)
def test_scores_by_the_first_round(given: dict[str, float], mean: float, deviation: float, tmp_path: Path) -> None:
    changes = {"method.scale_reward": "ref", "method.norm_reward": True, **given}
    trainer = make("PPOTrainer", tmp_path, **{**NO_FUTURE, **changes})
    trainer.add_experience(FIRST)
    trainer.add_experience(THEN)
    expected = [[0, 1 - mean], [3 - mean], [5 - mean], [4, 3 - mean]]
    assert column(trainer, "advantages") == approx([[score / deviation for score in row] for row in expected])


@pytest.mark.parametrize("kind", ["running", "ref"])
def test_equal_scores_are_not_blown_up(kind: str, tmp_path: Path) -> None:
    """They have no deviation to divide by. It counts as 1."""
    trainer = make("PPOTrainer", tmp_path, **{**NO_FUTURE, "method.scale_reward": kind})
    trainer.add_experience([element([0.1])] * 7)
    assert column(trainer, "advantages") == approx([[0.1]] * 7)


def test_the_coefficient_follows_its_target(tmp_path: Path) -> None:
    """d = ln 2 at each of two tokens: k3 = 1/2 - 1 + ln 2 = .19315 a token, .38629 a response. Target .4:
    error -.0343; two responses, horizon 10: .1 (1 - .0343 * .2). Then target / 10: the error is clipped to .2.
    """
    changes = {"method.target": 0.4, "method.horizon": 10, "method.init_kl_coef": 0.1}
    trainer = make("PPOTrainer", tmp_path, **{**PLAIN, **changes})
    rows = [element([0.0, 1.0], log_ratio=math.log(2))] * 2
    kl = 2 * (0.5 - 1 + math.log(2))
    metrics = trainer.add_experience(rows)
    assert metrics["policy/kl"] == pytest.approx(kl)
    assert metrics["policy/kl_per_token"] == pytest.approx(kl / 2)
    assert metrics["policy/kl_coef"] == 0.1  # the one that this round was made with
    assert trainer.kl_coef == pytest.approx(0.1 * (1 + (kl / 0.4 - 1) * 0.2))
    trainer.method.target = 0.04
    before = trainer.kl_coef
    assert trainer.add_experience(rows)["policy/kl_coef"] == before
    assert trainer.kl_coef == pytest.approx(before * (1 + 0.2 * 0.2))


# What the policy, the value head and the reference say.


T = TypeVar("T", bound=BaseRLTrainer[Any])


def shaken(trainer: T, scale: float = 0.3) -> T:
    """Move a trainer's weights at random, so that the policy is not the reference and values differ."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in trainer.model.parameters():
            if parameter.requires_grad:
                parameter.add_(scale * torch.randn(parameter.shape, generator=generator))
    return trainer


@pytest.mark.parametrize("minibatch_size", [None, 1])
@pytest.mark.parametrize("kind", ["kl", "abs", "mse", "full"])
def test_observations_are_those_of_plain_models(kind: str, minibatch_size: int | None, tmp_path: Path) -> None:
    """Log-probabilities under the temperature, values and KL of padded batches, against unpadded float64."""
    changes = {"method.kl_penalty": kind, "train.minibatch_size": minibatch_size}
    trainer = make("PPOTrainer", tmp_path, **changes)
    start = copy.deepcopy(trainer.model.lm)
    shaken(trainer).make_experience()
    assert {len(stored.response) for stored in trainer.store.elements} != {6}
    for stored in trainer.store.elements:
        ids = stored.prompt.tolist(), stored.response.tolist()
        policy = ppo_numpy.see(trainer.model.lm, *ids, 0.7, trainer.model.heads["value"])
        reference = ppo_numpy.see(start, *ids, 0.7)
        np.testing.assert_allclose(stored.old_logprobs, policy.logprobs, atol=2e-5)
        np.testing.assert_allclose(stored.ref_logprobs, reference.logprobs, atol=2e-5)
        assert policy.values is not None
        np.testing.assert_allclose(stored.old_values, policy.values, atol=2e-5)
        np.testing.assert_allclose(stored.kl, ppo_numpy.penalty(policy, reference, kind), atol=2e-4)
        assert stored.kl.abs().max() > 0.01


@pytest.mark.parametrize("kind", ["kl", "full"])
@pytest.mark.parametrize("unfrozen", [-1, 0, 1])
def test_the_kl_is_exactly_zero_in_the_first_round(unfrozen: int, kind: str, tmp_path: Path) -> None:
    changes = {"model.num_layers_unfrozen": unfrozen, "method.kl_penalty": kind, "train.minibatch_size": 1}
    trainer = make("PPOTrainer", tmp_path, **changes)
    metrics = {**trainer.make_experience(), **trainer.rollouts.metrics()}
    assert metrics["policy/kl"] == metrics["policy/kl_per_token"] == 0.0
    assert torch.equal(kls(trainer), torch.zeros_like(kls(trainer)))


@pytest.mark.parametrize("unfrozen", [-1, 1])
def test_the_reference_stays_behind(unfrozen: int, tmp_path: Path) -> None:
    """After a round the KL is above zero, and the reference says of the same tokens what it said before."""
    changes = {"model.num_layers_unfrozen": unfrozen, "train.epochs": 3, "method.init_kl_coef": 0.0}
    trainer = make("PPOTrainer", tmp_path, **changes)
    trainer.make_experience()
    batch = PPOExperience.collate(trainer.store.elements)
    metrics = trainer.learn()
    assert metrics["policy/kl"] > 1e-4
    with torch.no_grad():
        again = trainer.model.eval()(batch, reference=True)
    torch.testing.assert_close(again.ref_logprobs, batch.ref_logprobs, rtol=0, atol=1e-6)
    assert (again.logprobs - batch.old_logprobs).abs().max() > 1e-3


def kls(trainer: PPOTrainer) -> Tensor:
    return torch.cat([stored.kl for stored in trainer.store.elements])


def test_options_that_the_loss_cannot_follow_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"method.gen_kwargs.num_beams.*use 1"):
        make("PPOTrainer", tmp_path, **{"method.gen_kwargs.num_beams": 5})


def test_prompts_leave_room_for_the_longest_response(tmp_path: Path) -> None:
    """Of 20 tokens the training's own options take 15, evaluation's 6."""
    longer = {"max_new_tokens": 15, "temperature": 0.7}
    trainer = make("PPOTrainer", tmp_path, prompts=PROMPTS, **{"method.gen_experience_kwargs": longer})
    assert trainer.max_prompt_length == 5
    trainer.make_experience()
    assert max(len(stored.prompt) + len(stored.response) for stored in trainer.store.elements) <= 20


def test_rollouts_are_written_once_a_round(tmp_path: Path) -> None:
    """A round that is made again replaces what was written of it."""
    trainer = make("PPOTrainer", tmp_path, **{"train.rollout_logging_dir": str(tmp_path / "text")})
    trainer.make_experience()
    trainer.make_experience()
    (file,) = (tmp_path / "text").iterdir()
    assert file.name == "rollouts_000001_rank0.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert len(rows) == 5
    assert [row["reward"] for row in rows] == count_letters([row["output"] for row in rows])
