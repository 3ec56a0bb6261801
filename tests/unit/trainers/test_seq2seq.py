"""PPO and SFT with an encoder-decoder: the same trainers, whose policy reads prompts with an encoder."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.contract.recipes import SEQ2SEQ, make
from tests.contract.runs import rows
from tests.tiny import save_tiny, tiny_config, tiny_lm, tiny_tokenizer
from trlx_like.errors import ConfigError, DataError
from trlx_like.trainers.sft import SFTExperience

PAIRS = [("ab", " cd"), ("the cat", " sat."), ("b", "")]


ADAPTER = {"model.peft_config": {"peft_type": "LORA", "r": 2, "target_modules": ["q", "v"]}}


@pytest.mark.parametrize("trained", [*({"model.num_layers_unfrozen": k} for k in (-1, 0, 1, 2)), ADAPTER], ids=str)
def test_ppo_begins_at_a_kl_of_zero_and_ratios_of_one(trained: dict[str, Any], tmp_path: Path) -> None:
    trainer = make("PPOTrainer", tmp_path, **{**SEQ2SEQ, **trained, "train.minibatch_size": 1})
    trainer.learn()
    first, *later = [row for row in rows(tmp_path) if "policy/ratio_deviation" in row]
    assert first["policy/kl"] == first["policy/sqrt_kl"] == 0.0
    assert first["policy/ratio_deviation"] < 1e-6
    if trained != {"model.num_layers_unfrozen": 0}:
        assert max(row.get("policy/kl", 0) for row in later) > 0
        assert max(row["policy/ratio_deviation"] for row in later) > 1e-4


def test_what_a_reward_function_sees(tmp_path: Path) -> None:
    seen: dict[str, list[str]] = {}

    def score(samples: list[str], prompts: list[str], outputs: list[str]) -> list[float]:
        seen.update(samples=samples, prompts=prompts, outputs=outputs)
        return [0.0] * len(samples)

    changes = {**SEQ2SEQ, "prompts": ["the cat", "ab"], "reward_fn": score, "method.chunk_size": 5}
    trainer = make("PPOTrainer", tmp_path, **changes)
    trainer.make_experience()
    assert set(seen["prompts"]) == {"the cat", "ab"}
    texts = zip(seen["prompts"], seen["outputs"], strict=True)
    assert seen["samples"] == [f"{prompt}<sep>{output}" for prompt, output in texts]
    assert all(element.prompt[-1] == 0 for element in trainer.store.elements)  # EOS, as the tokenizer puts it
    assert trainer.by_hand.ids("ab") == [2, 3, 0]


def test_a_table_of_allowed_tokens_begins_after_the_decoders_start(tmp_path: Path) -> None:
    # <pad> (1) is the start. After it "a" (2) only, and then "b" (3) for ever.
    table = torch.ones(32, 32).bool()
    table[1], table[2], table[3] = False, False, False
    table[1, 2] = table[2, 3] = table[3, 3] = True
    trainer = make("PPOTrainer", tmp_path, **SEQ2SEQ, logit_mask=table, **{"method.gen_kwargs.eos_token_id": 0})
    assert all(ids.tolist() == [2, 3, 3, 3, 3, 3] for ids in trainer.generate(["ab", "zz top"]))
    trainer.make_experience()
    assert all(torch.equal(element.old_logprobs, torch.zeros(6)) for element in trainer.store.elements)


@pytest.mark.parametrize("family", ["t5", "bart"])
def test_the_loss_of_sft_is_that_of_hugging_face(family: str, tmp_path: Path) -> None:
    changes = {**SEQ2SEQ, "model.model_path": tiny_lm(family), "samples": PAIRS}
    trainer = make("SFTTrainer", tmp_path, **changes)
    trainer.make_experience()
    batch = SFTExperience.collate(trainer.store.elements)
    assert trainer.units(batch) == 4 + 6 + 1  # outputs and their EOS
    trainer.model.eval()
    with torch.no_grad():
        loss = float(trainer.loss(batch).loss) / 11
        prompts = trainer.tokenizer(
            [prompt for prompt, _ in PAIRS], padding=True, return_tensors="pt", padding_side="right"
        )
        labels = torch.full((3, 6), -100)
        for row, (_, output) in enumerate(PAIRS):
            ids = trainer.tokenizer(output).input_ids
            labels[row, : len(ids)] = torch.tensor(ids)
        expected = trainer.model.lm(**prompts, labels=labels).loss
    assert loss == pytest.approx(float(expected), abs=1e-6)


def test_sft_begins_with_the_dropout_of_the_model(tmp_path: Path) -> None:
    trainer = make("SFTTrainer", tmp_path, **{**SEQ2SEQ, "model.model_path": tiny_config("t5"), "samples": PAIRS})
    trainer.make_experience()
    batch = SFTExperience.collate(trainer.store.elements)
    trainer.model.train()
    assert trainer.loss(batch).loss != trainer.loss(batch).loss


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"method.packing": True}, ConfigError, "method.packing: an encoder-decoder would mix packed samples"),
        ({"method.eval_packing": "bins"}, ConfigError, "method.eval_packing: an encoder-decoder would mix"),
        ({"samples": [("a", "b", "c", "d")]}, DataError, "samples[0] has 4 turns; model.model_arch_type: seq2seq"),
    ],
)
def test_what_is_refused_before_a_model_is_loaded(
    changes: dict[str, Any], error: type[Exception], message: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=re.escape(message)):
        make("SFTTrainer", tmp_path, **{**SEQ2SEQ, "model.model_path": "/nowhere/at/all", "samples": PAIRS, **changes})


def test_another_reference_and_a_run_on_an_export(tmp_path: Path) -> None:
    path = save_tiny(tmp_path / "other", "t5", seed=9)
    tiny_tokenizer(ends=True).save_pretrained(path)
    trainer = make("PPOTrainer", tmp_path / "run", **SEQ2SEQ, **{"model.ref_model_path": path, "train.total_steps": 2})
    trainer.learn()
    assert rows(tmp_path / "run")[1]["policy/kl"] > 0
    trainer.save_pretrained(tmp_path / "export")
    changes = {**SEQ2SEQ, "model.model_path": str(tmp_path / "export"), "tokenizer.tokenizer_path": None}
    again = make("PPOTrainer", tmp_path / "again", **changes)
    for name, weight in trainer.model.lm.state_dict().items():
        assert torch.equal(again.model.lm.state_dict()[name], weight)
    assert again.by_hand.ids("ab") == [2, 3, 0]
