"""`replay_best`: an earlier response among the new ones, for GRPO, RLOO, Online DPO and PPO."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st

from tests.contract.recipes import PROMPTS, count_letters, make
from trlx_like.data.pool import BestResponse, BestResponses
from trlx_like.errors import ConfigError, RewardError

GROUPS = {"method.num_prompts": len(PROMPTS), "method.num_generations": 3, "method.replay_best": True}
PAIRS = {"method.num_prompts": len(PROMPTS), "method.n_generations_per_prompt": 3, "method.replay_best": True}
ROUND = {"method.num_rollouts": 3 * len(PROMPTS), "method.replay_best": True}  # each prompt three times
SINGLE = {
    **{"method.num_prompts": 3 * len(PROMPTS), "method.num_generations": 1, "method.replay_best": True},
    "method.baseline": "batch",
}
EVERY = [("GRPOTrainer", GROUPS), ("RLOOTrainer", GROUPS), ("OnlineDPOTrainer", PAIRS), ("PPOTrainer", ROUND)]


class OnlyOnce:
    """A reward function: count_letters in the first round, and less than any of these scores from then on."""

    def __init__(self) -> None:
        self.later = False
        self.made: dict[str, list[tuple[float, list[int]]]] = {}  # by prompt: scores and ids in the first round
        self.calls = 0

    def __call__(
        self, prompts: Sequence[str], outputs: Sequence[str], output_ids: Sequence[list[int]], **_: Any
    ) -> list[float]:
        places = range(self.calls, self.calls + len(outputs))
        self.calls += len(outputs)
        if self.later:
            return [-1.0 - place % 3 for place in places]
        scores = count_letters(outputs=outputs)
        for prompt, score, ids in zip(prompts, scores, output_ids, strict=True):
            self.made.setdefault(prompt, []).append((score, ids))
        return scores

    def best(self) -> dict[str, tuple[float, list[int]]]:
        return {prompt: max(made, key=lambda pair: pair[0]) for prompt, made in self.made.items()}


def two_rounds(name: str, folder: Path, changes: dict[str, Any]) -> tuple[Any, OnlyOnce, dict[str, float]]:
    """A trainer in its second round, its reward function, and what there was to log."""
    reward_fn = OnlyOnce()
    trainer = make(name, folder, reward_fn=reward_fn, **changes)
    first = {**trainer.make_experience(), **trainer.rollouts.metrics()}
    assert first["rollout/replayed"] == 0
    reward_fn.later = True
    trainer.store.clear()
    return trainer, reward_fn, {**trainer.make_experience(), **trainer.rollouts.metrics()}


def prompt_of(trainer: Any, element: Any) -> str:
    return trainer.tokenizer.decode(element.prompt[element.prompt_mask].tolist(), skip_special_tokens=True)


@pytest.mark.parametrize(("name", "groups"), EVERY[:2])
def test_the_best_response_so_far_stands_in_for_the_last_new_one(name: str, groups: Any, tmp_path: Path) -> None:
    trainer, reward_fn, metrics = two_rounds(name, tmp_path, {**groups, "method.beta": 0.0})
    best, elements = reward_fn.best(), trainer.store.elements
    assert len(elements) == 3 * len(PROMPTS)
    for start in range(0, len(elements), 3):
        group = elements[start : start + 3]
        score, ids = best[prompt_of(trainer, group[0])]
        assert group[2].response.tolist() == ids
        assert group[2].mask.all()
        assert [float(element.scores) for element in group] == pytest.approx([-1.0, -2.0, score])
        assert group[2].advantages.tolist() == [pytest.approx(float(group[2].advantages[0]))] * len(ids)
        assert float(group[2].advantages[0]) > 0 > float(group[1].advantages[0])
    assert metrics["rollout/replayed"] == len(PROMPTS)
    assert metrics["rollout/score_mean"] == -2.0  # of new responses only
    assert metrics["rollout/kept/fraction"] == pytest.approx(2 / 3)
    assert reward_fn.calls == 6 * len(PROMPTS)  # an earlier response is not scored again


@pytest.mark.parametrize(("name", "changes"), [("PPOTrainer", ROUND), ("RLOOTrainer", SINGLE)])
def test_without_groups_it_stands_in_for_the_last_of_the_round_to_the_same_prompt(
    name: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    trainer, reward_fn, metrics = two_rounds(name, tmp_path, {**changes, "method.chunk_size": 4})
    best, elements = reward_fn.best(), trainer.store.elements
    assert len(elements) == 3 * len(PROMPTS)
    for text in PROMPTS:
        of_prompt = [element for element in elements if prompt_of(trainer, element) == text]
        score, ids = best[text]
        assert of_prompt[2].response.tolist() == ids
        assert float(of_prompt[2].scores.sum()) == pytest.approx(score)
        assert all(float(element.scores.sum()) < 0 for element in of_prompt[:2])
    batch = type(elements[0]).collate(elements)
    with torch.no_grad():
        assert torch.allclose(trainer.model(batch).logprobs[batch.mask], batch.old_logprobs[batch.mask], atol=1e-5)
    assert metrics["rollout/replayed"] == len(PROMPTS)
    assert metrics["rollout/score_mean"] < 0  # of new responses only
    assert metrics["rollout/kept/fraction"] == pytest.approx(2 / 3)
    assert reward_fn.calls == 6 * len(PROMPTS)


def test_the_only_new_response_of_a_round_stays(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    _, _, metrics = two_rounds("PPOTrainer", tmp_path, {**ROUND, "method.num_rollouts": len(PROMPTS)})
    assert metrics["rollout/replayed"] == 0
    told = [record.message for record in caplog.records if "method.replay_best" in record.message]
    assert len(told) == 1
    assert f"the {len(PROMPTS)} responses of this round are to as many prompts" in told[0]


def test_rewards_of_tokens_come_back_to_their_tokens(tmp_path: Path) -> None:
    class OfTokens(OnlyOnce):
        def __call__(self, prompts: Any, outputs: Any, output_ids: Any, **_: Any) -> Any:
            scores = super().__call__(prompts, outputs, output_ids)
            return [[score / len(ids)] * len(ids) for score, ids in zip(scores, output_ids, strict=True)]

    reward_fn = OfTokens()
    trainer = make("PPOTrainer", tmp_path, reward_fn=reward_fn, **ROUND)
    trainer.make_experience()
    reward_fn.later = True
    saved = BestResponses()
    saved.load_state_dict(trainer.replay.best.state_dict())
    trainer.replay.best = saved
    trainer.store.clear()
    trainer.make_experience()
    assert trainer.rollouts.metrics()["rollout/replayed"] == len(PROMPTS)
    for element in trainer.store.elements[-len(PROMPTS) :]:
        score, ids = reward_fn.best()[prompt_of(trainer, element)]
        assert element.scores.tolist() == pytest.approx([score / len(ids)] * len(ids))


def test_what_the_caller_sampled_is_refused(tmp_path: Path) -> None:
    trainer = make("PPOTrainer", tmp_path, **ROUND)
    with pytest.raises(ConfigError, match="method.replay_best: step cannot tell which row"):
        trainer.step(["ab"], [torch.tensor([3, 4])], [1.0])


@pytest.mark.parametrize("name", ["GRPOTrainer", "RLOOTrainer"])
def test_its_log_probabilities_are_those_of_the_present_policy(name: str, tmp_path: Path) -> None:
    """Also with one step a round, when those of the other responses are left to the loss."""
    changes = {"method.num_iterations": 1, "train.batch_size": 3 * len(PROMPTS), "method.beta": 0.0}
    trainer, _, _ = two_rounds(name, tmp_path, {**GROUPS, **changes})
    batch = type(trainer.store.elements[0]).collate(trainer.store.elements)
    with torch.no_grad():
        assert torch.allclose(trainer.model(batch).logprobs[batch.mask], batch.old_logprobs[batch.mask], atol=1e-5)


def test_the_pair_of_online_dpo_has_it(tmp_path: Path) -> None:
    trainer, reward_fn, metrics = two_rounds("OnlineDPOTrainer", tmp_path, PAIRS)
    best = reward_fn.best()
    for element in trainer.store.elements:
        score, ids = best[prompt_of(trainer, element)]
        assert element.chosen.tolist() == ids
        assert element.scores.tolist() == pytest.approx([score, -2.0])
    assert metrics["rollout/pairs"] == metrics["rollout/replayed"] == len(PROMPTS)


@pytest.mark.parametrize(("name", "groups"), EVERY)
def test_an_equal_score_keeps_the_new_responses(name: str, groups: Any, tmp_path: Path) -> None:
    trainer = make(name, tmp_path, reward_fn=lambda outputs, **_: [1.0] * len(outputs), **groups)
    for _ in range(2):
        trainer.store.clear()
        trainer.make_experience()
        assert trainer.rollouts.metrics()["rollout/replayed"] == 0


@pytest.mark.parametrize(("name", "groups"), EVERY)
def test_a_round_does_not_depend_on_how_many_prompts_are_sampled_at_a_time(
    name: str, groups: Any, tmp_path: Path
) -> None:
    stores = []
    for size in (1, 100):
        trainer, _, _ = two_rounds(name, tmp_path / str(size), {**groups, "method.chunk_size": size})
        stores.append([vars(element) for element in trainer.store.elements])
    for one, other in zip(*stores, strict=True):
        for field in ("response", "chosen", "rejected", "scores"):
            assert field not in one or torch.equal(one[field], other[field])


def test_a_judge_that_compares_is_refused(tmp_path: Path) -> None:
    class Longest:
        def compare(self, pairs: Sequence[tuple[str, str]], **_: Any) -> list[int]:
            return [int(len(b) > len(a)) for a, b in pairs]

    class Long:
        def check(self, completions: Sequence[str], **_: Any) -> list[bool]:
            return [len(text) > 3 for text in completions]

    with pytest.raises(ConfigError, match="replay_best: the judge's scores count wins within a group"):
        make("OnlineDPOTrainer", tmp_path, judge=Longest(), reward_fn=None, **PAIRS)
    assert make("OnlineDPOTrainer", tmp_path, judge=Long(), reward_fn=None, **PAIRS).replay is not None


IDS = st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=4)
FOUND = st.tuples(st.integers(0, 3), st.integers(-3, 3), IDS, st.none() | st.lists(st.floats(-1, 1), min_size=1))


@given(st.lists(FOUND))
def test_the_first_of_the_best_is_remembered_and_saved(found: list[tuple[int, int, list[int], Any]]) -> None:
    best = BestResponses()
    best.update((row, BestResponse(float(score), ids, "eos", rewards)) for row, score, ids, rewards in found)
    loaded = BestResponses()
    loaded.load_state_dict(best.state_dict())
    for row in range(4):
        of_row = [(float(score), ids, "eos", rewards) for of, score, ids, rewards in found if of == row]
        expected = max(of_row, key=lambda entry: entry[0]) if of_row else None
        assert best.get(row) == loaded.get(row) == expected


def test_a_round_that_failed_leaves_nothing_behind(tmp_path: Path) -> None:
    class Failing:
        calls = 0

        def __call__(self, outputs: Sequence[str], **_: Any) -> list[float]:
            self.calls += 1
            if self.calls == 3:
                raise ValueError("no answer")
            return [10.0 if self.calls < 3 else 1.0] * len(outputs)

    trainer = make("GRPOTrainer", tmp_path, reward_fn=Failing(), **{**GROUPS, "method.chunk_size": 1})
    with pytest.raises(RewardError, match="no answer"):
        trainer.make_experience()
    trainer.make_experience()
    assert {trainer.replay.best.get(row).score for row in range(len(PROMPTS))} == {1.0}
