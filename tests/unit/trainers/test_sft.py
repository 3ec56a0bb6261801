"""SFT's loss is Hugging Face's own, on the tokens that it should be on, however rows are padded and packed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.contract.recipes import NO_DROPOUT, make
from tests.contract.runs import rows
from tests.tiny import tiny_config, tiny_lm
from trlx_like.errors import ConfigError
from trlx_like.trainers.sft import SFTExperience, SFTTrainer

TEXTS = ["ab cd", "the cat sat", "a", "zz top."]
DIALOGUES = [("the cat", " sat."), ("b", "bcd", "e", "efghijk"), ("ab", "c")]


def batch_of(trainer: SFTTrainer) -> SFTExperience:
    """All that there is to learn, in one batch."""
    trainer.make_experience()
    return SFTExperience.collate(trainer.store.elements)


def mean_loss(trainer: SFTTrainer, batch: SFTExperience) -> float:
    with torch.no_grad():
        return float(trainer.loss(batch).mean({"tokens": trainer.units(batch)}, "tokens"))


def hugging_face_loss(trainer: SFTTrainer, samples: list[tuple[list[int], list[bool]]], side: str) -> float:
    """`labels` of -100 where nothing is learnt, padded on a side. samples: ids, and which of them count."""
    longest = max(len(ids) for ids, _ in samples)
    columns: dict[str, list[list[int]]] = {"input_ids": [], "attention_mask": [], "labels": [], "position_ids": []}
    for ids, counts in samples:
        gap, real = longest - len(ids), [1] * len(ids)
        # The first token has nothing before it. Padded left, Hugging Face would predict it from the padding.
        labels = [-100, *(token if count else -100 for token, count in zip(ids[1:], counts[1:], strict=True))]
        for name, row, fill in (
            ("input_ids", ids, 1),
            ("attention_mask", real, 0),
            ("labels", labels, -100),
            ("position_ids", list(range(len(ids))), 0),
        ):
            columns[name].append([fill] * gap + row if side == "left" else row + [fill] * gap)
    with torch.no_grad():
        return float(trainer.model.lm.eval()(**{name: torch.tensor(row) for name, row in columns.items()}).loss)


def ids_of(trainer: SFTTrainer, text: str) -> list[int]:
    return [trainer.tokenizer.convert_tokens_to_ids(letter) for letter in text]


@pytest.mark.parametrize("family", ["gpt2", "llama"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_of_text_every_token_counts(side: str, family: str, tmp_path: Path) -> None:
    changes = {"model.model_path": tiny_lm(family), "tokenizer.padding_side": side}
    trainer = make("SFTTrainer", tmp_path, samples=TEXTS, **changes)
    samples = [(ids := [*ids_of(trainer, text), trainer.tokenizer.eos_token_id], [True] * len(ids)) for text in TEXTS]
    batch = batch_of(trainer)
    assert mean_loss(trainer, batch) == pytest.approx(hugging_face_loss(trainer, samples, side), abs=1e-6)
    # Each text's letters and its EOS, but for the first token, which nothing predicts.
    assert trainer.units(batch) == sum(len(text) for text in TEXTS)


def test_of_dialogues_the_outputs_count(tmp_path: Path) -> None:
    trainer = make("SFTTrainer", tmp_path, samples=DIALOGUES)
    samples = []
    for turns in DIALOGUES:
        parts = [ids_of(trainer, turn) for turn in turns]
        parts[-1].append(trainer.tokenizer.eos_token_id)
        counts = [bool(turn % 2) for turn, part in enumerate(parts) for _ in part]
        samples.append(([token for part in parts for token in part], counts))
    batch = batch_of(trainer)
    assert mean_loss(trainer, batch) == pytest.approx(hugging_face_loss(trainer, samples, "right"), abs=1e-6)
    # " sat." and EOS; "bcd", "efghijk" and EOS; "c" and EOS.
    assert trainer.units(batch) == 6 + 3 + 8 + 2


def gradients(trainer: SFTTrainer, monkeypatch: pytest.MonkeyPatch) -> tuple[dict[str, Tensor], dict[str, float]]:
    """Make one step on everything; return the gradients and the metrics."""
    seen: dict[str, Tensor] = {}

    def look(metrics: dict[str, float]) -> bool:
        seen.update((name, p.grad.clone()) for name, p in trainer.model.named_parameters() if p.grad is not None)
        return True

    monkeypatch.setattr(trainer, "accept", look)
    return seen, trainer.optimize(batch_of(trainer))


@pytest.mark.parametrize("family", ["gpt2", "llama", "gpt_neox"])
def test_packed_rows_have_the_loss_and_gradient_of_their_samples(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seven samples fit into fewer rows of 20 tokens; none sees another."""
    loose, packed = (
        make(
            "SFTTrainer",
            tmp_path,
            samples=[*TEXTS, *DIALOGUES],
            **{
                "method.packing": packing,
                "model.model_path": tiny_lm(family, **NO_DROPOUT if family == "gpt2" else {}),
            },
        )
        for packing in (False, True)
    )
    (expected, metrics), (got, same) = gradients(loose, monkeypatch), gradients(packed, monkeypatch)
    assert len(packed.store) < len(loose.store) == 7
    assert same == pytest.approx(metrics, abs=1e-5)
    assert metrics["losses/total_loss"] > 1
    for name, gradient in expected.items():
        torch.testing.assert_close(got[name], gradient, rtol=0, atol=1e-6)


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_packed_held_out_samples_have_the_loss_of_the_samples(family: str, tmp_path: Path) -> None:
    """Seven samples of two sets: over all and of each set, however held-out samples are packed, or training samples."""
    sets = {"eval_samples": {"a": TEXTS, "b": DIALOGUES}}
    model = {"model.model_path": tiny_lm(family, **NO_DROPOUT if family == "gpt2" else {})}

    def held_out(**method: Any) -> tuple[dict[str, float], list[int]]:
        trainer = make("SFTTrainer", tmp_path, **model, **sets, **{f"method.{k}": v for k, v in method.items()})
        metrics = trainer.evaluate_held_out(trainer.held_out)
        return metrics, [len(rows) for rows in trainer.held_out.values()]

    expected, counts = held_out()
    assert counts == [4, 3] and expected["eval/losses/total_loss@b"] > 1
    for options in ({"eval_packing": True}, {"packing": "blocks", "eval_packing": "bins"}, {"packing": True}):
        metrics, packed = held_out(**options)
        assert packed == [2, 2], options  # of 28 and 34 tokens, 20 in a row
        assert metrics == pytest.approx(expected, abs=1e-6)
    assert held_out(packing=True, eval_packing=False) == (expected, counts)


@pytest.mark.parametrize("option", ["packing", "eval_packing"])
def test_a_family_that_would_mix_packed_samples_is_refused(option: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"^method.{option}: BloomForCausalLM would mix the samples of a packed row"):
        make("SFTTrainer", tmp_path, **{"model.model_path": tiny_lm("bloom"), f"method.{option}": True})


def test_packing_measures_all_of_a_long_held_out_sample(tmp_path: Path) -> None:
    """75 letters and EOS, of which a row of 20 keeps 19 without packing."""
    for packing, tokens in ((None, 19), (True, 75)):
        changes = {"method.eval_packing": packing, "eval_samples": ["abc" * 25]}
        trainer = make("SFTTrainer", tmp_path, **changes)
        assert sum(trainer.units(row) for rows in trainer.held_out.values() for row in rows) == tokens


def shout(sample: dict[str, str]) -> str:
    """A `formatting_func`, by name as well."""
    return f"{sample['question']} {sample['answer']}"


def test_a_formatting_function_makes_the_text(tmp_path: Path) -> None:
    given = [{"question": "ab", "answer": "cd"}, {"question": "the cat", "answer": "sat"}]
    plain = make("SFTTrainer", tmp_path, samples=["ab cd", "the cat sat"])
    expected = mean_loss(plain, batch_of(plain))
    for function in (shout, f"{__file__}:shout"):
        formatted = make("SFTTrainer", tmp_path, samples=given, **{"method.formatting_func": function})
        assert mean_loss(formatted, batch_of(formatted)) == expected
    assert given[0] == {"question": "ab", "answer": "cd"}


@pytest.mark.parametrize("packing", [True, "bins", "blocks"])
def test_packing_learns_all_of_a_long_document(packing: Any, tmp_path: Path) -> None:
    """75 letters and EOS do not fit into rows of 20; 75 tokens are learned, and those of the other texts."""
    changes = {"method.packing": packing}
    trainer = make("SFTTrainer", tmp_path, samples=["abc" * 25, *TEXTS], **changes)
    made = trainer.make_experience()
    assert made["data/tokens"] == 75 + sum(map(len, TEXTS))
    assert "data/cut_rows" not in made
    assert made["data/rows"] == 6  # of 76 + 4 of context, 28 and 4 of the ends: 108 tokens and more
    alone = make("SFTTrainer", tmp_path, samples=["abc" * 25], **changes)
    first = batch_of(alone)
    assert first.target.sum() == 75 and first.response.shape[1] < 20
    assert int(first.inputs()["position_ids"].max()) < 20


@pytest.mark.parametrize("option", ["packing", "eval_packing"])
def test_packed_rows_need_two_tokens(option: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="train.seq_length: 1 leaves a packed row nothing to predict"):
        make("SFTTrainer", tmp_path, **{f"method.{option}": "blocks", "train.seq_length": 1})


def test_what_it_says_about_its_data(tmp_path: Path) -> None:
    trainer = make("SFTTrainer", tmp_path, samples=TEXTS)
    assert trainer.make_experience() == {"data/samples": 4.0, "data/rows": 4.0, "data/tokens": 24.0}


def test_dropout_is_on_while_it_trains_and_off_while_it_is_evaluated(tmp_path: Path) -> None:
    trainer = make("SFTTrainer", tmp_path, **{"model.model_path": tiny_config(), "train.total_steps": 1})
    batch = batch_of(trainer)
    trainer.model.train()
    assert trainer.loss(batch).loss != trainer.loss(batch).loss
    trainer.learn()
    assert mean_loss(trainer, batch) == mean_loss(trainer, batch)


def test_without_evaluation_prompts_there_is_no_evaluation(tmp_path: Path) -> None:
    make("SFTTrainer", tmp_path, eval_prompts=None, **{"train.eval_interval": 1, "train.total_steps": 2}).learn()
    assert [row["step"] for row in rows(tmp_path)] == [1, 2]
    assert not any("generation/length" in row for row in rows(tmp_path))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"samples": None}, r"SFTTrainer needs samples: pass train\(samples=...\) or set data.samples"),
        ({"prompts": ["a"]}, r"SFTTrainer cannot use prompts; it takes eval_prompts, eval_samples, samples"),
        ({"model.num_layers_unfrozen": 0}, r"model.num_layers_unfrozen \(0\) leaves this trainer nothing to train"),
    ],
)
def test_what_it_cannot_work_with(arguments: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        make("SFTTrainer", tmp_path, **arguments)


def test_similar_lengths_in_a_batch(tmp_path: Path) -> None:
    """24 samples in batches of 4: sorted by length, in a random order of batches; half a pass later, the same order."""
    texts = ["abcdefgh"[: 1 + n % 8] for n in range(24)]
    options = {"train.batch_size": 4, "train.group_by_length": True}

    def lengths(trainer: SFTTrainer, position: int = 0) -> list[list[int]]:
        trainer.make_experience()
        trainer.progress.position = position
        return [sorted(batch.lengths().tolist()) for batch in trainer.round_batches() if batch is not None]

    trainer = make("SFTTrainer", tmp_path, samples=texts, **options)
    found = lengths(trainer)
    passes = [found[start : start + 6] for start in range(0, len(found), 6)]
    assert len(passes) > 1 and all(len(batch) == 4 and batch[-1] - batch[0] <= 1 for batch in found)
    assert all(sorted(one) == sorted(passes[0]) for one in passes) and passes[0] != passes[1] != sorted(passes[1])
    trainer.store.clear()
    assert lengths(trainer, position=3) == found[3:]
    plain = make("SFTTrainer", tmp_path, samples=texts, **{"train.batch_size": 4})
    assert any(batch[-1] - batch[0] > 1 for batch in lengths(plain))
