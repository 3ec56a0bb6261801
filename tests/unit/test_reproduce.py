"""A run is run again from its folder, and the first difference is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import trlx_like
from tests.tiny import save_tiny
from trlx_like.errors import DataError
from trlx_like.reproduce import reproduce

torch.set_num_threads(1)
TRAIN = {
    "seq_length": 20,
    "batch_size": 2,
    "total_steps": 6,
    "epochs": 50,
    "checkpoint_interval": 2,
    "eval_interval": 4,
}
GENERATION = {"max_new_tokens": 4, "temperature": 0.7}
REWARD = "def reward(outputs):\n    return [output.count('a') - 0.1 * len(output) for output in outputs]\n"


@pytest.fixture(params=["SFT", "PPO"])
def run(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run of which everything is in files."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "reward.py").write_text(REWARD)
    (tmp_path / "texts.jsonl").write_text("".join(f'"{text}"\n' for text in ("ab cd", "a cat", "zz top", "bb")))
    method = {"name": f"{request.param}Config", "gen_kwargs": GENERATION}
    online = request.param == "PPO"
    data = {"prompts": "texts.jsonl", "reward_fn": "reward.py:reward"} if online else {"samples": "texts.jsonl"}
    config: dict[str, Any] = {
        "model": {"model_path": save_tiny(tmp_path / "model")},
        "method": method | ({"num_rollouts": 4, "chunk_size": 2} if online else {}),
        "train": {**TRAIN, "trainer": f"{request.param}Trainer", "checkpoint_dir": "run"},
        "data": data,
    }
    (tmp_path / "config.yml").write_text(yaml.safe_dump(config))
    trlx_like.train("config.yml")
    return tmp_path / "run"


def files(run: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}


def test_a_run_is_repeated_bit_by_bit(run: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = yaml.safe_load((run / "config.yml").read_text())
    config["train"]["push_to_hub"] = "me/thing"
    (run / "config.yml").write_text(yaml.safe_dump(config))
    before = files(run)
    for step in (None, 3, 6, 1):
        sentence, equal = reproduce(run, step)
        assert equal and f"again to step {step or 6}: all metrics and checkpoints are equal" in sentence
    assert files(run) == before and "me/thing" not in caplog.text  # offline an upload fails with a warning
    with pytest.raises(DataError, match=r"--step \(7\) must be from 1 to 6"):
        reproduce(run, 7)


def test_the_first_difference_is_named(run: Path) -> None:
    lines = (run / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    for row in rows[4:]:
        row["learning_rate"] += 1e-9
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    sentence, equal = reproduce(run)
    assert not equal and sentence.startswith(f"step {rows[4]['step']}: learning_rate was {rows[4]['learning_rate']}")
    assert reproduce(run, rows[3]["step"])[1]


def test_other_data_is_named_as_the_reason(run: Path, tmp_path: Path) -> None:
    (tmp_path / "texts.jsonl").write_text("".join(f'"{text}"\n' for text in ("ab cd", "a dog", "zz top", "bb")))
    sentence, equal = reproduce(run)
    assert not equal
    assert any(line.startswith("data: ") and "4 rows, " in line for line in sentence.splitlines())


def test_what_the_folder_cannot_tell_is_refused(run: Path) -> None:
    with (run / "history.jsonl").open("a") as history:
        change = {"option": "optimizer.kwargs.lr", "was": 1, "now": 2, "refused": None}
        history.write(json.dumps({"event": "resumed", "step": 4, "changes": [change], "processes": 1}) + "\n")
    with pytest.raises(DataError, match=r"optimizer.kwargs.lr changed at step 4"):
        reproduce(run)
    with pytest.raises(DataError, match="is not a run folder"):
        reproduce(run.parent)


def test_data_from_python_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = {
        "model": {"model_path": save_tiny(tmp_path / "model")},
        "method": {"name": "SFTConfig", "gen_kwargs": GENERATION},
        "train": {**TRAIN, "trainer": "SFTTrainer", "checkpoint_dir": "run", "total_steps": 2},
    }
    trlx_like.train(config, samples=["ab cd", "a cat"])
    with pytest.raises(DataError, match="samples came from Python"):
        reproduce(tmp_path / "run")
