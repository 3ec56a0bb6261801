"""The statistics of a round, by hand and by numpy."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from tests.contract.recipes import make
from trlx_like.trainers.rollouts import Sample, round_metrics


def sample(prompt: str, output: str, length: int, score: float | None, kept: bool | None = None) -> Sample:
    keep = score is not None if kept is None else kept
    return Sample(score, {}, keep, prompt, output, prompt_length=2, length=length, finished=length < 4)


def test_by_hand() -> None:
    """Two texts in four outputs, one of them three times; scores that rise with lengths, where there is one.

    All: lengths 1 2 9 3, mean 15/4, squared distances (11/4)^2 + (7/4)^2 + (21/4)^2 + (3/4)^2 = 155/4, over 3.
    Kept: scores 2 4 6 with deviation 2, lengths 1 2 3 with deviation 1.
    """
    samples = [sample("a", "x", 1, 2.0), sample("b", "x", 2, 4.0), sample("c", "x", 9, None), sample("d", "y", 3, 6.0)]
    assert round_metrics(samples) == {
        "rollout/samples": 4,
        "rollout/score_mean": 4.0,
        "rollout/score_std": pytest.approx(2.0),
        "rollout/length_mean": 3.75,
        "rollout/length_std": pytest.approx(math.sqrt(155 / 4 / 3)),
        "rollout/finished_fraction": 0.75,
        "rollout/prompt_length_mean": 2.0,
        "rollout/abstained_fraction": 0.25,
        "rollout/kept/fraction": 0.75,
        "rollout/kept/score_mean": 4.0,
        "rollout/kept/score_std": pytest.approx(2.0),
        "rollout/kept/length_mean": 2.0,
        "rollout/kept/length_std": 1.0,
        "rollout/kept/finished_fraction": 1.0,
        "rollout/duplicate_fraction": 0.5,
        "rollout/top_output_fraction": 0.75,
        "rollout/length_reward_correlation": pytest.approx(1.0),
    }


def test_images_have_no_length() -> None:
    found = round_metrics([Sample(1.0, {"a": 1.0, "b": None}, True), Sample(4.0, {"a": 3.0, "b": None}, True)])
    assert math.isnan(found.pop("rollout/reward/b/mean"))
    assert found == {
        "rollout/samples": 2,
        "rollout/score_mean": 2.5,
        "rollout/score_std": pytest.approx(math.sqrt(4.5)),
        "rollout/abstained_fraction": 0,
        "rollout/kept/fraction": 1,
        "rollout/reward/a/mean": 2.0,
    }


def test_what_cannot_be_told() -> None:
    """Three prompts are too few for a commonest output; one length, one score or one sample have no correlation."""
    few = round_metrics([sample(prompt, "x", n, 1.0) for prompt, n in (("a", 1), ("b", 2), ("c", 3), ("c", 4))])
    assert few["rollout/duplicate_fraction"] == 0.75 and few["rollout/score_std"] == 0
    assert not {"rollout/top_output_fraction", "rollout/length_reward_correlation"} & set(few)
    for second in (sample("a", "y", 1, 2.0), sample("a", "y", 2, None)):
        found = round_metrics([sample("a", "x", 1, 1.0), second])
        assert found["rollout/duplicate_fraction"] == 0.0 and "rollout/length_reward_correlation" not in found
    nothing = round_metrics([sample("a", "x", 1, 1.0, kept=False)])
    assert nothing["rollout/kept/fraction"] == 0 and "rollout/kept/score_mean" not in nothing


@settings(max_examples=50, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from("abcdef"), st.sampled_from("xyz"), st.integers(1, 50), st.floats(-10, 10)),
        min_size=2,
    )
)
def test_it_is_what_numpy_finds(table: list[tuple[str, str, int, float]]) -> None:
    found = round_metrics([sample(*row) for row in table])
    prompts, texts, lengths, scores = (list(column) for column in zip(*table, strict=True))
    assert found["rollout/score_mean"] == pytest.approx(np.mean(scores), abs=1e-9)
    assert found["rollout/score_std"] == pytest.approx(np.std(scores, ddof=1), abs=1e-9)
    assert found["rollout/length_std"] == pytest.approx(np.std(lengths, ddof=1))
    assert found["rollout/duplicate_fraction"] == 1 - len(np.unique(texts)) / len(texts)
    if len(set(prompts)) >= 4:
        assert found["rollout/top_output_fraction"] == np.unique(texts, return_counts=True)[1].max() / len(texts)
    if np.std(scores) > 1e-3 and len(set(lengths)) > 1:
        expected = np.corrcoef(np.array(lengths, dtype=np.float64), np.array(scores, dtype=np.float64))[0, 1]
        assert found["rollout/length_reward_correlation"] == pytest.approx(expected, abs=1e-9)


def test_a_round_that_is_made_again_writes_its_file_anew(tmp_path: Path) -> None:
    trainer = make("PPOTrainer", tmp_path, **{"train.rollout_logging_dir": str(tmp_path / "rollouts")})
    for _ in range(2):
        trainer.make_experience()
    (file,) = (tmp_path / "rollouts").iterdir()
    lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    assert len(lines) == 5 and set(lines[0]) == {"prompt", "output", "reward"}
