"""What the outputs of a round have in common."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from tests.contract.recipes import make
from tests.contract.runs import rows
from tests.distributed.ranks import on_ranks
from trlx_like.trainers.outputs import Output, output_metrics

ONLINE = ["GRPOTrainer", "OnlineDPOTrainer", "PPOTrainer", "RFTTrainer", "RLOOTrainer"]


def test_by_hand() -> None:
    """Two texts in four outputs, one of them three times; rewards that rise with lengths, where there is one."""
    outputs = [Output("a", "x", 1, 2.0), Output("b", "x", 2, 4.0), Output("c", "x", 9, None), Output("d", "y", 3, 6.0)]
    assert output_metrics(outputs) == {
        "rollout/duplicate_fraction": 0.5,
        "rollout/top_output_fraction": 0.75,
        "rollout/length_reward_correlation": pytest.approx(1.0),
    }


def test_what_cannot_be_told() -> None:
    """Three prompts are too few for a commonest output; one length, one reward or one sample have no correlation."""
    few = [Output(prompt, "x", length, 1.0) for prompt, length in (("a", 1), ("b", 2), ("c", 3), ("c", 4))]
    assert output_metrics(few) == {"rollout/duplicate_fraction": 0.75}
    assert output_metrics([Output("a", "x", 1, 1.0), Output("a", "y", 1, 2.0)]) == {"rollout/duplicate_fraction": 0.0}
    assert output_metrics([Output("a", "x", 1, 1.0), Output("a", "y", 2, None)]) == {"rollout/duplicate_fraction": 0.0}


@settings(max_examples=50, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from("abcdef"), st.sampled_from("xyz"), st.integers(1, 50), st.floats(-10, 10)),
        min_size=2,
    )
)
def test_it_is_what_numpy_finds(table: list[tuple[str, str, int, float]]) -> None:
    found = output_metrics([Output(*row) for row in table])
    prompts, texts, lengths, rewards = (list(column) for column in zip(*table, strict=True))
    assert found["rollout/duplicate_fraction"] == 1 - len(np.unique(texts)) / len(texts)
    if len(set(prompts)) >= 4:
        assert found["rollout/top_output_fraction"] == np.unique(texts, return_counts=True)[1].max() / len(texts)
    if np.std(rewards) > 1e-3 and len(set(lengths)) > 1:
        expected = np.corrcoef(np.array(lengths, dtype=np.float64), np.array(rewards, dtype=np.float64))[0, 1]
        assert found["rollout/length_reward_correlation"] == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("name", ONLINE)
def test_every_online_trainer_logs_them_each_round(name: str, tmp_path: Path) -> None:
    """With the first step of each round; of RFT, of each round that samples."""
    trainer = make(name, tmp_path, **{"train.epochs": 2, "method.n_improve_steps": 1} if name == "RFTTrainer" else {})
    trainer.learn()
    first = [row for row in rows(tmp_path) if "rollout/score_mean" in row]
    assert len(first) > 1
    for row in first:
        assert 0 <= row["rollout/duplicate_fraction"] < 1
        assert {"rollout/length_mean", "rollout/finished_fraction"} <= set(row)
        assert -1 <= row["rollout/length_reward_correlation"] <= 1


def _round(rank: int, folder: Path, reward: Any) -> list[Any]:
    trainer = make("PPOTrainer", folder, reward_fn=reward, **{"train.batch_size": 4})
    trainer.make_experience()
    keep = ("rollout/duplicate_fraction", "rollout/top_output_fraction", "rollout/length_reward_correlation")
    own = [(output.prompt, output.text) for output in trainer.outputs]
    return [own, {name: value for name, value in trainer._pending.items() if name in keep}]


def longest(outputs: list[str], **_: Any) -> list[float]:
    return [float(len(output)) for output in outputs]


def test_they_are_of_all_processes(tmp_path: Path) -> None:
    (first, metrics), (second, others) = on_ranks(_round, tmp_path, longest, timeout=60)
    assert metrics == others
    texts = [text for _, text in first + second]
    assert len(texts) == 5
    assert metrics["rollout/duplicate_fraction"] == 1 - len(set(texts)) / 5
