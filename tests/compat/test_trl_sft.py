"""TRL's IterativeSFTTrainer: a step is the same as one of SFT on the same samples."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.contract.recipes import RECIPES, SEQ2SEQ, make
from tests.contract.runs import rows
from trlx_like.compat.trl import IterativeSFTTrainer
from trlx_like.errors import ConfigError, DataError

SAMPLES = [("ab", " cd"), ("the cat", " sat."), ("b", "bcd")]


def iterative(folder: Path, **changes: Any) -> Any:
    config = make("SFTTrainer", folder, **{"train.batch_size": 3, "train.total_steps": 2, **changes}).config
    return IterativeSFTTrainer(config.evolve(train={"epochs": 10}))


def test_steps_are_those_of_sft(tmp_path: Path) -> None:
    """Of ids and labels, one batch twice; the labels leave the prompts out."""
    assert RECIPES["SFTTrainer"].train
    offline = make("SFTTrainer", tmp_path / "sft", samples=SAMPLES, **{"train.batch_size": 3, "train.total_steps": 2})
    offline.learn()
    trainer = iterative(tmp_path / "iterative")
    ids = [torch.tensor(dialogue.ids) for dialogue in offline.dialogues]
    labels = [torch.where(torch.tensor(d.is_output), row, -100) for d, row in zip(offline.dialogues, ids, strict=True)]
    padded = [torch.nn.functional.pad(row, (0, 2), value=1) for row in ids]
    masks = [(torch.arange(len(row)) < len(row) - 2).long() for row in padded]
    ignored = [torch.nn.functional.pad(row, (0, 2), value=-100) for row in labels]
    trainer.step(input_ids=ids, labels=labels)
    stats = trainer.step(input_ids=padded, attention_mask=masks, labels=ignored)
    assert stats["data/tokens"] == 4 + 6 + 4 and trainer.finished  # letters of the outputs, each with an EOS
    tables = [
        {r["step"]: r["losses/total_loss"] for r in rows(tmp_path / n) if r["step"]} for n in ("sft", "iterative")
    ]
    assert tables[0] == pytest.approx(tables[1], rel=1e-5)
    expected = offline.model.state_dict()
    for name, weight in trainer.model.state_dict().items():
        torch.testing.assert_close(weight, expected[name], rtol=1e-4, atol=1e-5)
    assert (tmp_path / "iterative" / "report.html").is_file()
    with pytest.raises(ConfigError, match="step: training is complete after 2 steps"):
        trainer.step(texts=["ab"])


def test_texts_and_an_encoder_decoder(tmp_path: Path) -> None:
    trainer = iterative(tmp_path / "causal")
    stats = trainer.step(texts=["ab cd", "the cat"])
    assert stats["data/samples"] == 2 and stats["losses/total_loss"] > 0
    for given, words in (
        ({}, "give input_ids or texts, one of the two"),
        ({"texts": ["ab"], "labels": [torch.tensor([3])] * 2}, "2 rows of labels for 1 samples"),
        (
            {"input_ids": [torch.tensor([3, 4])], "labels": [torch.tensor([3])]},
            "2 ids, 2 entries of its mask and 1 lab",
        ),
        ({"input_ids": [torch.tensor([3, 4])], "labels": [torch.tensor([3, 5])]}, r"labels\[0\] must be the ids"),
        ({"input_ids": [torch.tensor([3])]}, "sample 0 has nothing to learn"),
    ):
        with pytest.raises(DataError, match=words):
            trainer.step(**given)
    trainer.close()
    seq2seq = iterative(tmp_path / "seq2seq", **SEQ2SEQ, samples=SAMPLES)
    assert seq2seq.step(texts=["ab", "c"], texts_labels=["cd", "e"])["losses/total_loss"] > 0
    seq2seq.close()


@pytest.mark.parametrize("side", ["right", "left"])
def test_a_longer_sample_is_cut(side: str, tmp_path: Path) -> None:
    """At `train.seq_length`, at the side that the tokenizer cuts; ids may be plain lists."""
    trainer = iterative(tmp_path, **{"tokenizer.truncation_side": side})
    length = trainer.config.train.seq_length
    ids = trainer.tokenizer("the cat sat. " * length)["input_ids"]
    (element,) = trainer._elements([ids], [[1] * len(ids)], [ids])
    assert [*element.prompt.tolist(), *element.response.tolist()] == (
        ids[:length] if side == "right" else ids[-length:]
    )
    assert element.target.tolist() == [True] * (length - 1)


def test_options_of_data_are_refused(tmp_path: Path) -> None:
    for name, value in (("packing", True), ("eval_packing", "bins"), ("formatting_func", str)):
        with pytest.raises(ConfigError, match=rf"method.{name}: IterativeSFTTrainer trains on what `step` gets"):
            iterative(tmp_path, **{f"method.{name}": value})
