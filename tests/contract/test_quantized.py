"""Adapters on quantized weights (QLoRA): every trainer of text takes steps, resumes bitwise and exports."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM

from tests.contract.recipes import LORA, PROMPTS, RECIPES, SEQ2SEQ, make
from tests.contract.runs import StopAfter, assert_same_run, run_until_stopped
from tests.tiny import save_tiny, tiny_lm, tiny_tokenizer
from trlx_like.config import TRLConfig
from trlx_like.models.formats import is_quantized

pytest.importorskip("bitsandbytes")

TEXT = [name for name, recipe in RECIPES.items() if recipe.model is None]
QUANTIZED = {"model.peft_config": LORA, "model.quantization": "nf4"}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny(tmp_path_factory.mktemp("base"), "llama")


def trained(trainer: Any) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in trainer.model.named_parameters() if p.requires_grad}


@pytest.mark.parametrize(
    ("name", "kind", "dtype"),
    [(name, "nf4", "float32") for name in TEXT]
    + [(name, "int8", "float32") for name in ("PPOTrainer", "SFTTrainer")]
    + [(name, "nf4", "bfloat16") for name in ("PPOTrainer", "RewardTrainer", "ILQLTrainer")],
)
def test_every_text_trainer_takes_two_steps(name: str, kind: str, dtype: str, base: str, tmp_path: Path) -> None:
    """Every trained weight moves; nothing that is trained is coarser than float32; quantized weights stay."""
    changes = {**QUANTIZED, "model.quantization": kind, "model.dtype": dtype, "model.model_path": base}
    trainer = make(name, tmp_path, **changes, **{"train.total_steps": 2, "optimizer.kwargs": {"lr": 0.01}})
    before = trained(trainer)
    held = {n: p.clone() for n, p in trainer.model.named_parameters() if not p.requires_grad and "target" not in n}
    assert {value.dtype for value in before.values()} == {torch.float32}
    assert any(is_quantized(module) for module in trainer.model.modules())
    trainer.learn()
    assert trainer.progress.step == 2
    after = dict(trainer.model.named_parameters())
    assert [n for n, value in before.items() if torch.equal(after[n], value)] == []
    assert [n for n, value in held.items() if not torch.equal(after[n], value)] == []


def test_gradients_are_not_zero_after_generating(base: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """bitsandbytes packs weights for AVX512 when a model in evaluation mode computes; backward is then of zeros."""
    monkeypatch.setattr("bitsandbytes.nn.modules.has_avx512bf16", lambda: True)  # also where the CPU lacks it
    trainer = make("SFTTrainer", tmp_path, **QUANTIZED, **{"model.model_path": base})
    trainer.generate(PROMPTS, max_new_tokens=4)
    trainer.make_experience()
    seen: dict[str, float] = {}

    def look(metrics: dict[str, float]) -> bool:
        seen.update((n, float(p.grad.abs().max())) for n, p in trainer.model.named_parameters() if p.grad is not None)
        return False

    trainer.accept = look
    trainer.optimize(trainer.experience_class.collate(trainer.store.elements))
    assert len(seen) == 8 and all(largest > 0 for name, largest in seen.items() if "lora_B" in name), seen


@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_kl_is_exactly_zero_at_step_0(kind: str, base: str, tmp_path: Path) -> None:
    changes = {**QUANTIZED, "model.quantization": kind, "model.model_path": base}
    trainer = make("PPOTrainer", tmp_path, **changes)
    trainer.make_experience()
    assert all(element.kl.abs().max() == 0 for element in trainer.store.elements)
    assert {p.dtype for p in trainer.model.heads["value"].parameters()} == {torch.float32}


@pytest.mark.parametrize("name", ["PPOTrainer", "SFTTrainer"])
def test_a_resumed_run_is_the_same_run(name: str, base: str, tmp_path: Path) -> None:
    changes = {**QUANTIZED, "model.model_path": base, "train.total_steps": 4}
    expected = make(name, tmp_path / "whole", **changes)
    expected.learn()
    run_until_stopped(make(name, tmp_path / "parts", **changes, callbacks=[StopAfter(2)]))
    with safe_open(tmp_path / "parts" / "checkpoint_2" / "state" / "shared" / "model.safetensors", "pt") as file:
        numbers = sum(file.get_tensor(key).numel() for key in file.keys())  # noqa: SIM118
    assert numbers == sum(value.numel() for value in trained(expected).values())
    resumed = make(name, tmp_path / "parts", **changes)
    resumed.load(tmp_path / "parts")
    assert resumed.progress.step == 2
    resumed.learn()
    assert_same_run(resumed, expected, tmp_path / "parts", tmp_path / "whole")


def test_an_export_is_the_adapter_or_a_plain_model(base: str, tmp_path: Path) -> None:
    """The adapter goes on in a run of its own, and the merged model computes what was trained."""
    trainer = make("SFTTrainer", tmp_path / "run", **QUANTIZED, **{"model.model_path": base})
    trainer.learn()
    ids = torch.arange(3, 20)[None]
    with torch.no_grad():
        expected = trainer.model.lm.eval()(ids).logits
    trainer.save_pretrained(tmp_path / "adapter")
    trainer.save_pretrained(tmp_path / "merged", merged=True)
    whole = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    assert not any(is_quantized(module) for module in whole.modules())
    more = {"model.model_path": str(tmp_path / "adapter"), "model.quantization": "nf4"}
    again = make("SFTTrainer", tmp_path / "again", **more).model.lm.eval()
    with torch.no_grad():
        torch.testing.assert_close(whole(ids).logits, expected, rtol=0, atol=2e-6)
        assert torch.equal(again(ids).logits, expected)
        assert (tiny_lm("llama").eval()(ids).logits - expected).abs().max() > 0.01


def test_an_encoder_decoder_and_the_engine_with_a_copy(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "t5", "t5", dropout_rate=0.0)
    changes = {**SEQ2SEQ, "model.model_path": folder, "tokenizer.tokenizer_path": tiny_tokenizer(ends=True)}
    trainer = make("PPOTrainer", tmp_path / "run", **QUANTIZED, **changes, **{"sampler.engine": "copy"})
    assert trainer.learn()["policy/kl"] > 0
    assert isinstance(trainer.config, TRLConfig)
