"""Processes with less data than others, with none, or with a reward function that fails: none waits for ever."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.contract.recipes import GENERATION, PROMPTS, count_letters, make
from tests.contract.runs import assert_same, rows, state_of
from tests.distributed.ranks import on_ranks
from tests.tiny import tiny_lm
from trlx_like.errors import RewardError

TWO_STEPS = {"train.batch_size": 4, "train.total_steps": 2, "train.eval_interval": 1}


def learn(rank: int, folder: Path, changes: dict[str, Any]) -> dict[str, Any]:
    trainer = make("PPOTrainer", folder, **{**TWO_STEPS, **changes})
    trainer.learn()
    metrics = {name: value for name, value in trainer.last_metrics.items() if not name.startswith("time/")}
    shared = {name: value for name, value in state_of(trainer).items() if not trainer.state.items[name].local}
    return {"shared": shared, "metrics": metrics, "rollouts": len(trainer.store)}


def agreed(folder: Path, changes: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """A run on two processes that end with the same state and metrics."""
    first, second = on_ranks(learn, folder, changes)
    assert_same(second["shared"], first["shared"])
    assert_same(second["metrics"], first["metrics"])
    assert first["shared"]["progress"]["step"] == 2
    return first, second


@pytest.mark.parametrize("rollouts", [3, 1])
def test_few_rollouts(rollouts: int, tmp_path: Path) -> None:
    """Three for two processes, and one: the second has nothing to train on, and only one prompt to evaluate."""
    runs = agreed(tmp_path, {"method.num_rollouts": rollouts, "eval_prompts": PROMPTS[:1]})
    assert [run["rollouts"] for run in runs] == [rollouts] * 2  # both hold the whole round


def only_from_the_first(outputs: Sequence[str], prompts: Sequence[str], **_: Any) -> list[float | None]:
    """Abstains from whatever the second process samples in the first round."""
    first = torch.distributed.get_rank() == 0
    return [float(len(output)) if first else None for output in outputs]


def test_abstaining_on_one_process_only(tmp_path: Path) -> None:
    first, second = agreed(tmp_path, {"reward_fn": only_from_the_first})
    assert (first["rollouts"], second["rollouts"]) == (3, 3)
    assert rows(tmp_path)[1]["rollout/score_std"] >= 0


def abstain(outputs: Sequence[str], **_: Any) -> list[None]:
    return [None] * len(outputs)


def learn_and_fail(rank: int, folder: Path, changes: dict[str, Any]) -> tuple[str, int]:
    """The error that a run ends with, and its last step."""
    trainer = make("PPOTrainer", folder, **{"train.batch_size": 4, **changes})
    with pytest.raises(RewardError) as failure:
        trainer.learn()
    return str(failure.value), trainer.progress.step


def test_abstaining_from_everything_is_the_same_error_on_both(tmp_path: Path) -> None:
    first, second = on_ranks(learn_and_fail, tmp_path, {"reward_fn": abstain})
    assert first == second
    assert "reward_fn abstained (None) from all 5 samples" in first[0]


class FailsOn:
    """A reward function that raises on one process after a few rounds."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.calls = 0

    def __call__(self, outputs: Sequence[str], **_: Any) -> list[float]:
        self.calls += 1
        if self.calls == 4 and torch.distributed.get_rank() == self.rank:
            raise ZeroDivisionError("no luck")
        return count_letters(outputs)


@pytest.mark.parametrize("on_main", [False, True])
def test_a_reward_that_fails_on_one_process_ends_and_saves_both(on_main: bool, tmp_path: Path) -> None:
    where = 0 if on_main else 1
    changes = {"reward_fn": FailsOn(where), "train.epochs": 5, "train.reward_on_main_process": on_main}
    (message, step), (other, same_step) = on_ranks(learn_and_fail, tmp_path, changes)
    failed, told = (message, other) if on_main else (other, message)
    assert failed.startswith("FailsOn raised ZeroDivisionError: no luck")
    assert told == f"On process {where}: {failed}"
    assert step == same_step > 0
    assert [path.name for path in tmp_path.glob("checkpoint_*")] == [f"checkpoint_{step:03d}"]


def test_rewards_of_the_main_process_are_those_of_each(tmp_path: Path) -> None:
    own = agreed(tmp_path / "own", {})
    main = agreed(tmp_path / "main", {"train.reward_on_main_process": True})
    assert_same(main, own)


class OnMain:
    """A reward function that only one process has, and a metric that all have."""

    def __call__(self, outputs: Sequence[str], **_: Any) -> list[float]:
        assert torch.distributed.get_rank() == 0, "called on another process"
        return count_letters(outputs)


def test_only_the_main_process_is_asked_in_evaluations_too(tmp_path: Path) -> None:
    changes = {"reward_fn": OnMain(), "train.reward_on_main_process": True, "eval_prompts": PROMPTS}
    agreed(tmp_path, changes)
    table = [row for row in rows(tmp_path, "samples.jsonl") if row["step"] == 0]
    assert [row["prompt"] for row in table] == PROMPTS
    assert [row["reward"] for row in table] == count_letters([row["output"] for row in table])
    assert [row["metrics/length"] for row in table] == [len(row["output"]) for row in table]


@pytest.mark.parametrize("function", ["reward_fn", "metric_fn"])
def test_an_evaluation_that_fails_on_one_process_ends_both(function: str, tmp_path: Path) -> None:
    """The second has one prompt of three to evaluate, and trouble with it."""
    changes = {function: FAILING[function], "eval_prompts": PROMPTS[:3]}
    (told, _), (failed, _) = on_ranks(learn_and_fail, tmp_path, changes)
    assert "raised ZeroDivisionError" in failed
    assert told == f"On process 1: {failed}"


def no_luck_on_the_second(outputs: Sequence[str], **_: Any) -> Any:
    return [1.0] * len(outputs) if torch.distributed.get_rank() == 0 else 1 / 0


def no_metric_on_the_second() -> dict[str, float]:
    return {"one": 1 / (1 - torch.distributed.get_rank())}


FAILING = {"reward_fn": no_luck_on_the_second, "metric_fn": no_metric_on_the_second}


def kl_of_own_models(rank: int, folder: Path) -> float:
    """Each process comes with a model of its own, as a script without a seed makes them."""
    changes = {"model.model_path": tiny_lm(seed=rank, vocabulary=32), **TWO_STEPS}
    trainer = make("PPOTrainer", folder, **changes)
    trainer.make_experience()
    own = torch.cat([element.kl for element in trainer.store.elements])
    return float(own.abs().max())


def test_the_reference_is_the_first_processes_too(tmp_path: Path) -> None:
    assert on_ranks(kl_of_own_models, tmp_path) == [0.0, 0.0]


def with_a_mask(rank: int, folder: Path) -> list[int]:
    """Tokens sampled where every token may be followed by the next two only."""
    allowed = torch.zeros(32, 32, dtype=torch.bool)
    for token in range(32):
        allowed[token, [(token + 1) % 32, (token + 2) % 32]] = True
    trainer = make("PPOTrainer", folder, **TWO_STEPS, logit_mask=allowed)
    trainer.learn()
    return [
        int(n - p) % 32
        for e in trainer.store.elements
        for p, n in zip([*e.prompt[-1:], *e.response[:-1]], e.response, strict=True)
    ]


def test_a_table_of_allowed_tokens_reaches_both(tmp_path: Path) -> None:
    for jumps in on_ranks(with_a_mask, tmp_path):
        assert set(jumps) == {1, 2}


def draws(rank: int, folder: Path) -> list[list[int]]:
    """What this process sampled, and the next random numbers of its reward function."""
    trainer = make("PPOTrainer", folder, **{**TWO_STEPS, "method.gen_kwargs": {**GENERATION, "temperature": 1.0}})
    trainer.make_experience()
    return [[*element.response.tolist()] for element in trainer.store.elements] + [[random.randrange(10**6)]]


def test_processes_draw_different_numbers(tmp_path: Path) -> None:
    first, second = on_ranks(draws, tmp_path)
    assert first[0] != second[0] and first[-1] != second[-1]


def grown(rank: int, folder: Path, changes: dict[str, Any]) -> dict[str, Any]:
    """The pool and the metrics of a run of RFT, and how many responses this process has to learn from."""
    trainer = make("RFTTrainer", folder, **{**TWO_STEPS, **changes})
    trainer.learn()
    metrics = {name: value for name, value in trainer.last_metrics.items() if not name.startswith("time/")}
    return {"pool": trainer.pool.state_dict(), "metrics": metrics, "held": len(trainer.store)}


@pytest.mark.parametrize("count", [3, 1])
def test_a_pool_is_the_same_on_both(count: int, tmp_path: Path) -> None:
    """One response to each of three prompts, of which the second process makes one; and to one, so that it has none."""
    changes = {"prompts": PROMPTS[:count], "eval_prompts": PROMPTS[:1], "method.n_generations_per_prompt": 1}
    first, second = on_ranks(grown, tmp_path, {**changes, "method.n_improve_steps": 2, "train.epochs": 2})
    assert_same([second["pool"], second["metrics"]], [first["pool"], first["metrics"]])
    assert len(first["pool"]["scores"]) == count
    assert first["held"] == second["held"] == first["metrics"]["pool/selected"]


def test_a_pool_without_what_one_process_made(tmp_path: Path) -> None:
    changes = {"reward_fn": only_from_the_first, "train.total_steps": 1}
    first, second = on_ranks(grown, tmp_path, changes)
    assert_same([second["pool"], second["metrics"]], [first["pool"], first["metrics"]])
    assert len(first["pool"]["scores"]) == 8  # of fifteen
    assert second["held"] > 0


class FirstProcess:
    """A judge that prefers the later of two, and has an opinion on the first process only; or breaks on the second."""

    def __init__(self, breaks: bool = False) -> None:
        self.breaks = breaks

    def compare(self, prompts: Sequence[str], pairs: Sequence[tuple[str, str]]) -> list[int | None]:
        first = torch.distributed.get_rank() == 0
        if self.breaks and not first:
            raise OSError("no network")
        return [1 if first else None for _ in pairs]


def judged_round(rank: int, folder: Path, changes: dict[str, Any]) -> tuple[int, dict[str, float]] | str:
    """Pairs and metrics of a round of three prompts, of which the second process answers one; or the error."""
    options = {"train.batch_size": 2, "method.num_prompts": 3, "method.chunk_size": 1, "reward_fn": None}
    trainer = make("OnlineDPOTrainer", folder, **{**options, **changes})
    try:
        metrics = trainer.make_experience()
    except RewardError as error:
        return str(error)
    return len(trainer.store), metrics


def test_pairs_on_one_process_only(tmp_path: Path) -> None:
    (held, metrics), (none, others) = on_ranks(judged_round, tmp_path, {"judge": FirstProcess()})
    assert (held, none) == (2, 0) and metrics == others
    assert (metrics["rollout/pairs"], metrics["rollout/ties"]) == (2, 1)
    changes = {"judge": FirstProcess(), "train.reward_on_main_process": True}
    assert [held for held, _ in on_ranks(judged_round, tmp_path, changes)] == [2, 1]


def test_a_judge_that_breaks_on_one_process(tmp_path: Path) -> None:
    first, second = on_ranks(judged_round, tmp_path, {"judge": FirstProcess(breaks=True)})
    assert first.startswith("On process 1: ") and "FirstProcess.compare raised OSError: no network" in first
    assert "FirstProcess.compare raised OSError: no network" in second
