"""The run folder: which checkpoint is best, which are kept, and how a run finds its own again."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.contract.recipes import make
from tests.contract.runs import rows
from tests.tiny import tiny_config
from tests.unit.trainers.test_saving import contents, refuse
from trlx_like import Callback, TRLConfig
from trlx_like.checkpoint import CheckpointStore, manifest
from trlx_like.checkpoint.tree import load_tree
from trlx_like.errors import CheckpointError, ConfigError
from trlx_like.registry import _Entry
from trlx_like.tracking import RunInfo, Tracker
from trlx_like.tracking.base import TRACKERS

NAN = float("nan")
BEST_AT_2 = {"train.total_steps": 4, "train.checkpoint_interval": 2, "train.eval_interval": 2}
NAMES_OF_2 = ("best_checkpoint", "checkpoint_2")
LARGE = ["hf_model/model.safetensors", "state/shared/model.safetensors", "state/shared/optimizer.safetensors"]


def best_at_2(folder: Path, **options: Any) -> Any:
    """A run whose evaluation of step 2 is the best one, so that two checkpoints of that step are written."""
    rewards = iter([0.0, 5.0, 4.0])
    given = {"reward_fn": None, "metric_fn": lambda: {"reward": next(rewards)}}
    trainer = make("SFTTrainer", folder, **BEST_AT_2, **given, **options)
    trainer.learn()
    return trainer


def test_the_newest_checkpoints_and_the_best_are_kept(tmp_path: Path) -> None:
    rewards = iter([0.0, 5.0, 4.0, 3.0, 2.0])  # best after the first step
    changes = {"train.total_steps": 4, "train.checkpoint_interval": 1, "train.keep_checkpoints": 2}
    options = {**changes, "train.eval_interval": 1}
    make("SFTTrainer", tmp_path, **options, reward_fn=None, metric_fn=lambda: {"reward": next(rewards)}).learn()
    kept = sorted(path.name for path in tmp_path.iterdir() if path.is_dir())
    assert kept == ["best_checkpoint", "checkpoint_3", "checkpoint_4"]
    progress = json.loads((tmp_path / "best_checkpoint" / "state" / "shared" / "progress.json").read_text())["tree"]
    assert (progress["step"], progress["best"]) == (1, 5.0)


@pytest.mark.parametrize("beside", [False, True])
def test_a_checkpoint_shares_large_files_with_the_best_one_of_its_step(
    beside: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It holds the bytes that it has where a callback might have changed the weights, so that nothing is shared."""
    options = {"train.async_save": beside}
    best_at_2(tmp_path / "alone", callbacks=[Callback()], **options)
    monkeypatch.setattr(manifest, "LEAST_SHARED", 0)
    best_at_2(tmp_path / "shared", **options)
    for run, links in (("alone", 1), ("shared", 2)):
        folder = tmp_path / run
        for name in (*NAMES_OF_2, "checkpoint_4"):
            CheckpointStore(folder).verify(folder / name)
            found = [(folder / name / file).stat().st_nlink for file in LARGE]
            assert found == [1 if name == "checkpoint_4" else links] * len(LARGE), (run, name)
        assert (folder / "checkpoint_2/state/shared/progress.json").stat().st_nlink == 1
    for name in (*NAMES_OF_2, "checkpoint_4"):
        assert contents(tmp_path / "shared" / name) == contents(tmp_path / "alone" / name)
    # What is exported into one of them leaves the other as it is: safetensors replaces files.
    save_file({"other": torch.zeros(3)}, tmp_path / "shared/best_checkpoint" / LARGE[0])
    CheckpointStore(tmp_path / "shared").verify(tmp_path / "shared/checkpoint_2")


def test_a_weight_that_a_callback_changes_after_an_evaluation_is_in_the_next_checkpoint(tmp_path: Path) -> None:
    class Change(Callback):
        def on_evaluate(self, trainer: Any, metrics: Any) -> None:
            next(trainer.model.parameters()).data.fill_(trainer.progress.step)

    best_at_2(tmp_path, callbacks=[Change()])
    first = [next(iter(load_tree(tmp_path / name / "state/shared/model").values())) for name in NAMES_OF_2]
    assert not (first[0] == 2).all() and (first[1] == 2).all()


def test_nothing_is_shared_with_a_best_checkpoint_that_was_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(manifest, "LEAST_SHARED", 0)
    refuse(monkeypatch, "best_checkpoint")
    options = {"train.async_save": True, "train.on_checkpoint_error": "continue"}
    best_at_2(tmp_path, **options)
    CheckpointStore(tmp_path).verify(tmp_path / "checkpoint_2")
    assert [(tmp_path / "checkpoint_2" / file).stat().st_nlink for file in LARGE] == [1, 1, 1]


def test_a_resumed_run_removes_what_it_had_no_time_to_remove(tmp_path: Path) -> None:
    """It was killed after its last checkpoint was written, and before the oldest was removed."""
    changes = {"train.total_steps": 4, "train.checkpoint_interval": 1}
    make("SFTTrainer", tmp_path, **changes).learn()
    assert len(list(tmp_path.glob("checkpoint_*"))) == 4
    made = {**changes, "train.keep_checkpoints": 2, "train.resume_from_checkpoint": "auto"}
    make("SFTTrainer", tmp_path, **made).learn()
    assert sorted(path.name for path in tmp_path.glob("checkpoint_*")) == ["checkpoint_3", "checkpoint_4"]


def test_the_configuration_beside_a_run_can_be_loaded(tmp_path: Path) -> None:
    trainer = make("PPOTrainer", tmp_path, **{"train.total_steps": 1, "method.init_kl_coef": 0.25})
    trainer.learn()
    loaded = TRLConfig.load_yaml(tmp_path / "config.yml", ["model.model_path=x", "tokenizer.tokenizer_path=x"])
    assert loaded.train == trainer.config.train and loaded.method == trainer.config.method


def test_a_fresh_run_in_a_used_folder_keeps_the_old_files(tmp_path: Path) -> None:
    for _ in range(2):
        make("SFTTrainer", tmp_path, **{"train.total_steps": 2}).learn()
    assert [row["step"] for row in rows(tmp_path)] == [0, 1, 2]
    assert [row["step"] for row in rows(tmp_path / "earlier_1")] == [0, 1, 2]
    more = {"train.total_steps": 3, "train.epochs": 9, "train.resume_from_checkpoint": "auto"}
    again = make("SFTTrainer", tmp_path / "earlier_1", **more)
    again.learn()  # what is kept is a run folder of its own
    assert again.progress.step == 3


def test_resuming_says_from_where(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    auto = {"train.total_steps": 1, "train.resume_from_checkpoint": "auto"}
    finished = "The run is finished: train.total_steps (1) ended it at step 1. Raise that to go on."
    with caplog.at_level(logging.INFO, logger="trlx_like"):
        make("SFTTrainer", tmp_path, **auto).learn()
        assert f"No checkpoint in {tmp_path} yet: starting from the beginning." in caplog.messages
        assert f"Saved {tmp_path / 'checkpoint_1'}." in caplog.messages
        assert finished not in caplog.messages
        make("SFTTrainer", tmp_path, **auto).learn()
    assert f"Resumed from {tmp_path / 'checkpoint_1'}." in caplog.messages and finished in caplog.messages


@pytest.mark.parametrize(
    ("options", "option"),
    [
        ({"train.epochs": 1}, "train.epochs (1)"),
        ({"train.early_stopping": {"patience": 1, "min_delta": 9.0}, "train.eval_interval": 1}, "train.early_stopping"),
    ],
)
def test_a_finished_run_says_what_ended_it(
    options: dict[str, Any], option: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    wanted = {"train.total_steps": 100, "train.resume_from_checkpoint": "auto", **options}
    make("SFTTrainer", tmp_path, **wanted).learn()
    with caplog.at_level(logging.INFO, logger="trlx_like"):
        make("SFTTrainer", tmp_path, **wanted).learn()
    assert f"The run is finished: {option}" in caplog.text


def refused(folder: Path, **changes: Any) -> str:
    with pytest.raises(CheckpointError) as error:
        make("SFTTrainer", folder / "new", **changes).learn()
    return str(error.value)


def test_what_cannot_be_resumed(tmp_path: Path) -> None:
    make("PPOTrainer", tmp_path / "ppo", **{"train.total_steps": 1}).learn()
    make("SFTTrainer", tmp_path / "sft", **{"train.total_steps": 1}).learn()
    missing = refused(tmp_path, **{"train.resume_from_checkpoint": str(tmp_path / "nowhere")})
    assert "there is no such folder" in missing
    other = refused(tmp_path, **{"train.resume_from_checkpoint": str(tmp_path / "ppo")})
    assert any(line.split()[:3] == ["train.trainer", "'PPOTrainer'", "->"] for line in other.splitlines())
    forced = {"train.force_resume": True}
    other = refused(tmp_path, **{"train.resume_from_checkpoint": str(tmp_path / "ppo")}, **forced)
    assert "written by trainer PPOTrainer" in other and "does not fit trainer SFTTrainer" in other
    sft = {"train.resume_from_checkpoint": str(tmp_path / "sft"), **forced}
    assert "model cannot be restored" in refused(tmp_path, **sft, **{"model.model_path": tiny_config(layers=3)})
    assert "optimizer" in refused(tmp_path, **sft, **{"train.save_optimizer": False})


def test_a_secret_is_in_no_file_of_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The configuration is written by the run folder, trackers and report; the data that is learned from stays."""
    seen: list[RunInfo] = []

    class Watch(Tracker):
        def __init__(self, run: RunInfo) -> None:
            seen.append(run)

    monkeypatch.setitem(TRACKERS._entries, "watch", _Entry("watch", "x:Watch", Watch))
    options = {
        "tokenizer.tokenizer_extra_configs": {"password": "opensesame"},
        "tokenizer.chat_template_kwargs": {"note": "hf_opensesame0123456789"},
        "data.eval_prompts": ["http://user:shown@host"],
        "train.total_steps": 1,
        "train.tracker": ["watch", "tensorboard"],
    }
    trainer = make("SFTTrainer", tmp_path, **options)
    trainer.learn()
    texts = {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()}
    assert [file for file, text in texts.items() if b"opensesame" in text] == []
    for name, shown in (("config.yml", b"password: <redacted>"), ("report.html", b"password: &lt;redacted&gt;")):
        assert shown in texts[tmp_path / name]
    assert b"http://user:shown@host" in texts[tmp_path / "config.yml"]
    assert seen[0].config["tokenizer"]["tokenizer_extra_configs"] == {"password": "<redacted>"}
    assert "opensesame" not in f"{trainer.config} {trainer.config!r}"
    # What is not in the file has to come from elsewhere.
    with pytest.raises(ConfigError) as refused:
        TRLConfig.load_yaml(tmp_path / "config.yml")
    lines = [line for line in str(refused.value).splitlines() if "is a secret" in line]
    assert [line.partition("config.yml:")[2].partition(": ")[2] for line in lines] == [
        f"tokenizer.{option}: is a secret that is not in this file: set it again with --set, or take it out."
        for option in ("tokenizer_extra_configs.password", "chat_template_kwargs.note")
    ]


def test_a_run_with_a_key_in_the_environment_is_read_back_from_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUDGE_KEY", "opensesame")
    judge = {"name": "llm", "url": "http://localhost/v1", "model": "m", "api_key_env": "JUDGE_KEY"}
    trainer = make("OnlineDPOTrainer", tmp_path, reward_fn=None, **{"data.judge": judge})
    trainer.config.model.model_path = trainer.config.tokenizer.tokenizer_path = "m"
    trainer.config.dump_yaml(tmp_path / "config.yml")
    again = TRLConfig.load_yaml(tmp_path / "config.yml")
    assert again == trainer.config and again.data.judge == judge
    assert "opensesame" not in (tmp_path / "config.yml").read_text()
