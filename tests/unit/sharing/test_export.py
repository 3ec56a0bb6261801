"""`trlx-like export`: the folder that plain transformers loads, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.contract.recipes import make
from tests.unit.cli_support import said


def test_an_adapter_alone_and_merged(tuned: Path, tmp_path: Path) -> None:
    alone, whole, half = (tmp_path / name for name in ("alone", "whole", "half"))
    assert "best_checkpoint" in said(0, "export", tuned, "--to", alone)
    said(0, "export", tuned, "--to", whole, "--merge")
    said(0, "export", tuned / "checkpoint_8", "--to", half, "--merge", "--dtype", "bfloat16")
    assert (alone / "adapter_config.json").is_file() and not list(whole.glob("adapter*"))
    ids = AutoTokenizer.from_pretrained(whole)("abcd", return_tensors="pt").input_ids
    models = [AutoModelForCausalLM.from_pretrained(folder, dtype="auto") for folder in (alone, whole, half)]
    with torch.no_grad():
        one, other = (model(ids).logits for model in models[:2])
    assert torch.allclose(one, other, atol=1e-5) and models[2].dtype == torch.bfloat16
    base = AutoModelForCausalLM.from_pretrained(tuned.parent / "model")
    assert not torch.allclose(base(ids).logits, one, atol=1e-3)
    texts = [(folder / "README.md").read_text() for folder in (alone, whole, half)]
    assert ["library_name: peft" in text for text in texts] == [True, False, False]
    assert ["6 optimizer steps" in text for text in texts] == [True, True, False] and "8 optimizer steps" in texts[2]
    assert all("AutoModelForCausalLMWithValueHead" in text for text in texts)


def test_a_readme_in_the_folder_is_kept(tuned: Path, tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("mine")
    assert "your README.md is kept" in said(0, "export", tuned, "--to", tmp_path)
    assert (tmp_path / "README.md").read_text() == "mine" and (tmp_path / "adapter_config.json").is_file()


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--dtype", "int8"], "--dtype (int8) must be one of float32, bfloat16, float16."),
        (["--to", "."], "has files already; name a new folder."),
    ],
)
def test_what_is_refused(words: list[str], sentence: str, tuned: Path, tmp_path: Path) -> None:
    where = [] if "--to" in words else ["--to", tmp_path / "new"]
    assert sentence in said(2, "export", tuned, *where, *words)
    assert not (tmp_path / "new").exists()


def test_runs_without_a_checkpoint_or_an_adapter(tmp_path: Path) -> None:
    assert "is not a checkpoint, or a run with a checkpoint" in said(2, "export", tmp_path, "--to", tmp_path / "new")
    trainer = make("SFTTrainer", tmp_path / "run")
    trainer.learn()
    assert "has no adapter" in said(2, "export", tmp_path / "run", "--to", tmp_path / "new", "--merge")
    trainer.save_pretrained(tmp_path / "hf")
    steps = trainer.progress.step
    assert f"{steps} optimizer steps" in (tmp_path / "hf" / "README.md").read_text()
    assert not list((tmp_path / "run").glob("checkpoint_*/hf_model/training.svg"))  # the same run has the same files
