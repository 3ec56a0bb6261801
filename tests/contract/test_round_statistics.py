"""The statistics of a round of every online trainer, against a count by hand of what was sampled.

The reward abstains on responses that were cut off (of images, on every second), so what is learned from is not what was
sampled: statistics of all samples and of those that are kept must be told apart.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.contract.recipes import RECIPES, make
from tests.contract.runs import rows
from tests.distributed.ranks import on_ranks
from trlx_like.config import TRAINERS
from trlx_like.errors import RewardError
from trlx_like.samplers.text import TextSamples

ONLINE = [name for name in RECIPES if not TRAINERS.get(name).offline]
TEXT = [name for name in ONLINE if name != "DDPOTrainer"]


def ends_well(output: str) -> bool:
    """Whether a response has an even number of characters; the others stand for those that a function refuses."""
    return len(output) % 2 == 0


def some(outputs: Sequence[str], **_: Any) -> list[float | None]:
    return [output.count("a") + len(output) / 10 if ends_well(output) else None for output in outputs]


def round_of(name: str, folder: Path, **changes: Any) -> tuple[list[dict[str, Any]], Mapping[str, float]]:
    """Make one round; return one row a sample as it came from the sampler, and the statistics."""
    trainer = make(name, folder, reward_fn=some, **changes)
    sampled: list[dict[str, Any]] = []
    sample = trainer.sampler.sample

    def recorded(*args: Any, **options: Any) -> TextSamples:
        samples: TextSamples = sample(*args, **options)
        for row, completion in enumerate(samples.completion.split()):
            score = some([samples.outputs[row]])[0]
            ended = samples.finish_reasons[row] != "length"
            found = {"score": score, "ended": ended, "output": samples.outputs[row], "prompt": samples.prompts[row]}
            sampled.append({**found, "length": len(completion.response), "prompt_length": len(completion.prompt)})
        return samples

    trainer.sampler.sample = recorded
    trainer.make_experience()
    return sampled, trainer.rollouts.metrics()


def by_hand(sampled: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    scores = [row["score"] for row in sampled if row["score"] is not None]
    lengths = [row["length"] for row in sampled]
    return {
        "rollout/samples": len(sampled),
        "rollout/score_mean": pytest.approx(statistics.fmean(scores)),
        "rollout/score_std": pytest.approx(statistics.stdev(scores) if len(scores) > 1 else 0),
        "rollout/length_mean": pytest.approx(statistics.fmean(lengths)),
        "rollout/length_std": pytest.approx(statistics.stdev(lengths)),
        "rollout/prompt_length_mean": pytest.approx(statistics.fmean(row["prompt_length"] for row in sampled)),
        "rollout/finished_fraction": pytest.approx(statistics.fmean(row["ended"] for row in sampled)),
        "rollout/abstained_fraction": pytest.approx(1 - len(scores) / len(sampled)),
        "rollout/duplicate_fraction": pytest.approx(1 - len({row["output"] for row in sampled}) / len(sampled)),
    }


@pytest.mark.parametrize("name", TEXT)
def test_statistics_are_of_all_samples(name: str, tmp_path: Path) -> None:
    sampled, metrics = round_of(name, tmp_path, **{"train.seed": 5})
    assert 0 < sum(row["score"] is None for row in sampled) < len(sampled)
    assert 0 < sum(row["ended"] for row in sampled) < len(sampled)
    expected = by_hand(sampled)
    assert {key: metrics[key] for key in expected} == expected


@pytest.mark.parametrize("name", ["PPOTrainer", "RFTTrainer"])
def test_what_is_kept_has_names_of_its_own(name: str, tmp_path: Path) -> None:
    """These two learn from every sample with a score."""
    more = {"method.num_rollouts": 20} if name == "PPOTrainer" else {}
    sampled, metrics = round_of(name, tmp_path, **{"train.seed": 5, **more})
    kept = by_hand([row for row in sampled if row["score"] is not None])
    assert metrics["rollout/kept/fraction"] == kept["rollout/samples"] / len(sampled)
    for key in ("score_mean", "score_std", "length_mean", "length_std", "finished_fraction"):
        assert metrics[f"rollout/kept/{key}"] == kept[f"rollout/{key}"]


def test_a_group_method_keeps_what_it_trains_on(tmp_path: Path) -> None:
    changes = {"method.mask_truncated_completions": True, "method.num_prompts": 8, "train.seed": 5}
    sampled, metrics = round_of("RLOOTrainer", tmp_path, **changes)
    kept = by_hand([row for row in sampled if row["score"] is not None and row["ended"]])
    assert metrics["rollout/kept/fraction"] == kept["rollout/samples"] / len(sampled)
    assert metrics["rollout/kept/finished_fraction"] == 1.0
    assert metrics["rollout/kept/score_mean"] == kept["rollout/score_mean"]


def _share(rank: int, folder: Path, name: str) -> tuple[list[dict[str, Any]], Mapping[str, float]]:
    return round_of(name, folder, **{"train.batch_size": 4, "train.seed": 5})


@pytest.mark.parametrize("name", ["PPOTrainer", "OnlineDPOTrainer"])
def test_statistics_are_of_all_processes(name: str, tmp_path: Path) -> None:
    (first, metrics), (second, others) = on_ranks(_share, tmp_path, name, timeout=90)
    assert metrics == others and first != second
    expected = by_hand(first + second)
    assert {key: metrics[key] for key in expected} == expected


@pytest.mark.parametrize("name", ONLINE)
def test_every_online_trainer_logs_them_with_each_round(name: str, tmp_path: Path) -> None:
    """With the first step of each round; of RFT, of each round that samples."""
    trainer = make(name, tmp_path, **{"train.epochs": 2, "method.n_improve_steps": 1} if name == "RFTTrainer" else {})
    trainer.learn()
    first = [row for row in rows(tmp_path) if "rollout/score_mean" in row]
    assert len(first) > 1
    for row in first:
        assert {"rollout/samples", "rollout/score_std", "rollout/kept/fraction"} <= set(row)
        assert name == "DDPOTrainer" or {"rollout/length_mean", "rollout/finished_fraction"} <= set(row)


def every_second(prompts: Sequence[str], images: Sequence[Any], **_: Any) -> list[float | None]:
    return [None if row % 2 else float(len(prompt) + row) for row, prompt in enumerate(prompts)]


def test_statistics_of_images(tmp_path: Path) -> None:
    given: list[float | None] = []

    def reward(**keywords: Any) -> list[float | None]:
        scores = every_second(**keywords)
        given.extend(scores)
        return scores

    trainer = make("DDPOTrainer", tmp_path, reward_fn=reward)
    trainer.make_experience()
    metrics = trainer.rollouts.metrics()
    scores = [score for score in given if score is not None]
    assert 0 < len(scores) < len(given)
    assert metrics == {
        "rollout/samples": len(given),
        "rollout/score_mean": pytest.approx(statistics.fmean(scores)),
        "rollout/score_std": pytest.approx(statistics.stdev(scores)),
        "rollout/abstained_fraction": pytest.approx(1 - len(scores) / len(given)),
        "rollout/kept/fraction": pytest.approx(len(scores) / len(given)),
        "rollout/kept/score_mean": pytest.approx(statistics.fmean(scores)),
        "rollout/kept/score_std": pytest.approx(statistics.stdev(scores)),
        "rollout/reward_faults": 0,
    }


def test_rounds_may_be_made_by_hand_one_after_the_other(tmp_path: Path) -> None:
    for name in ("DDPOTrainer", "GRPOTrainer"):
        trainer = make(name, tmp_path / name)
        trainer.make_experience()
        first = trainer.rollouts.metrics()["rollout/samples"]
        trainer.store.clear()
        trainer.make_experience()
        assert trainer.rollouts.metrics()["rollout/samples"] == first


@pytest.mark.parametrize("value", [3e38, 1e300, -1e16])
@pytest.mark.parametrize("name", ["PPOTrainer", "GRPOTrainer", "DDPOTrainer"])
def test_a_reward_that_overflows_is_refused(name: str, value: float, tmp_path: Path) -> None:
    def huge(**columns: Any) -> list[float]:
        count = len(next(column for column in columns.values() if isinstance(column, list)))
        return [value, *[0.5] * (count - 1)]

    trainer = make(name, tmp_path, reward_fn=huge)
    with pytest.raises(RewardError, match=r"sample 0: the absolute value of a reward must not be above 1e\+15"):
        trainer.make_experience()


@pytest.mark.parametrize("name", ["PPOTrainer", "GRPOTrainer", "RLOOTrainer", "DDPOTrainer"])
def test_an_outlier_is_warned_of_once_with_its_sample(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    given: list[float] = []

    def outlying(**columns: Any) -> list[float]:
        count = len(next(column for column in columns.values() if isinstance(column, list)))
        rewards = [0.1 * (place + len(given)) for place in range(count)]
        given.extend(rewards)
        return [1e6, *rewards[1:]] if len(given) == count else rewards

    trainer = make(name, tmp_path, reward_fn=outlying, **{"train.total_steps": 100})
    trainer.make_experience()
    for _ in range(2):
        trainer.rollouts.metrics()
    (warning,) = [record.getMessage() for record in caplog.records if "so far from the others" in record.message]
    prompts = [sample["prompt"] if isinstance(sample, dict) else sample for sample in trainer.data["prompts"]]
    assert "reward 1e+06 of the sample '" in warning and any(repr(prompt) in warning for prompt in prompts)
