"""Training an adapter: gradients, dropout, sampling, and what a checkpoint and an export hold."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.contract.recipes import LORA, PROMPTS, make
from tests.contract.runs import StopAfter, run_until_stopped
from tests.tiny import save_tiny, tiny_config, tiny_lm, tiny_tokenizer
from trlx_like import AutoModelForCausalLMWithValueHead
from trlx_like.config import TRLConfig
from trlx_like.data import Completion
from trlx_like.errors import CheckpointError
from trlx_like.models.faster import faster

ADAPTER = {"model.peft_config": LORA}
trainers = pytest.mark.parametrize("name", ["PPOTrainer", "RFTTrainer", "SFTTrainer"])


def gradients(trainer: Any) -> dict[str, torch.Tensor]:
    """Of one step on a round's experience, which is refused."""
    seen: dict[str, torch.Tensor] = {}

    def look(metrics: dict[str, float]) -> bool:
        seen.update((n, p.grad.clone()) for n, p in trainer.model.named_parameters() if p.grad is not None)
        return False

    trainer.accept = look
    trainer.make_experience()
    trainer.optimize(trainer.experience_class.collate(trainer.store.elements))
    return seen


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
@trainers
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_gradient_checkpointing_changes_no_gradient(name: str, family: str, tmp_path: Path) -> None:
    """Although nothing that is trained comes before the first checkpointed block."""
    changes = {**ADAPTER, "model.model_path": tiny_config(family), "train.max_grad_norm": None}
    if family == "gpt2":
        changes["model.model_path"] = tiny_config(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    # Moved away from the start, where half of an adapter's gradients are zero.
    changes["model.peft_config"] = {**LORA, "init_lora_weights": False}
    expected = gradients(make(name, tmp_path / "plain", **changes))
    got = gradients(make(name, tmp_path / "checkpointed", **changes, **{"backend.gradient_checkpointing": True}))
    adapters = [key for key in expected if "lora_" in key]
    assert len(adapters) == {"gpt2": 4, "llama": 8}[family]
    assert list(got) == list(expected)
    for key, gradient in expected.items():
        assert gradient.abs().max() > 0, key
        torch.testing.assert_close(got[key], gradient, rtol=1e-4, atol=1e-6)


def test_kl_is_zero_at_the_start_and_the_adapter_moves_it(tmp_path: Path) -> None:
    trainer = make("PPOTrainer", tmp_path, **ADAPTER, **{"model.model_path": tiny_lm(), "train.epochs": 3})
    trainer.make_experience()
    assert all(element.kl.abs().max() == 0 for element in trainer.store.elements)
    trainer.store.clear()
    assert trainer.learn()["policy/kl"] > 0


def test_dropout_of_the_adapter_follows_the_trainer(tmp_path: Path) -> None:
    """PPO compares with what was sampled and has none; SFT keeps it."""
    changes = {"model.peft_config": {**LORA, "lora_dropout": 0.5}}
    rates = {}
    for name in ("PPOTrainer", "SFTTrainer"):
        modules = make(name, tmp_path / name, **changes).model.lm.modules()
        rates[name] = {module.p for module in modules if isinstance(module, torch.nn.Dropout)}
    assert rates == {"PPOTrainer": {0.0}, "SFTTrainer": {0.0, 0.5}}


def test_layers_that_are_asked_for_do_nothing_beside_an_adapter(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As in trlX, but the log says so."""
    with caplog.at_level(logging.INFO, logger="trlx_like"):
        trainer = make("PPOTrainer", tmp_path, **ADAPTER, **{"model.num_layers_unfrozen": 1})
    assert "model.num_layers_unfrozen is set but does nothing with this configuration." in caplog.messages
    trained = [name for name, value in trainer.model.lm.named_parameters() if value.requires_grad]
    assert {name.split(".")[2] for name in trained} == {"0", "1"}
    # Once, although the model was looked at without its weights before.
    assert [message[:28] for message in caplog.messages if "adapter:" in message] == ["Training an adapter: 256 of "]


def test_samples_are_of_the_model_with_its_adapter(tmp_path: Path) -> None:
    trainer = make("SFTTrainer", tmp_path, **ADAPTER, **{"optimizer.kwargs": {"lr": 0.05}})
    greedy = {"do_sample": False, "max_new_tokens": 6, "eos_token_id": 0}
    before = trainer.generate(PROMPTS, **greedy)
    trainer.learn()
    trainer.save_pretrained(tmp_path / "whole", merged=True)
    after = trainer.generate(PROMPTS, **greedy)
    assert trainer.decode(before) != trainer.decode(after)
    changes = {"model.model_path": str(tmp_path / "whole")}
    assert trainer.decode(after) == trainer.decode(
        make("SFTTrainer", tmp_path / "2", **changes).generate(PROMPTS, **greedy)
    )


@trainers
def test_a_checkpoint_holds_what_is_trained_and_exports_the_adapter(name: str, tmp_path: Path) -> None:
    base = save_tiny(tmp_path / "base")
    trainer = make(name, tmp_path / "run", **ADAPTER, **{"model.model_path": base, "train.total_steps": 3})
    trainer.learn()
    checkpoint = tmp_path / "run" / "checkpoint_3"
    with safe_open(checkpoint / "state" / "shared" / "model.safetensors", "pt") as file:
        numbers = sum(file.get_tensor(key).numel() for key in file.keys())  # noqa: SIM118
    assert numbers == sum(value.numel() for value in trainer.model.parameters() if value.requires_grad)
    assert not (checkpoint / "hf_model" / "model.safetensors").exists()
    model = faster(AutoModelForCausalLM.from_pretrained(checkpoint / "hf_model").eval())
    ids = AutoTokenizer.from_pretrained(checkpoint / "hf_model")("the cats", return_tensors="pt").input_ids
    with torch.no_grad():
        assert torch.equal(model(ids).logits, trainer.model.lm.eval()(ids).logits)


def test_another_model_under_the_adapter_is_refused_on_resuming(tmp_path: Path) -> None:
    base = save_tiny(tmp_path / "base")
    changes = {**ADAPTER, "model.model_path": base, "train.resume_from_checkpoint": "auto"}
    run_until_stopped(make("SFTTrainer", tmp_path / "run", **changes, callbacks=[StopAfter(2)]))
    tiny_lm(seed=1).save_pretrained(base)
    with pytest.raises(CheckpointError, match="what the adapter is for is not the model that the run began with"):
        make("SFTTrainer", tmp_path / "run", **changes).learn()


def test_a_run_from_its_own_configuration_file(tmp_path: Path) -> None:
    """A peft configuration object is written as its options."""
    import peft

    base = save_tiny(tmp_path / "base")
    given = peft.LoraConfig(r=2, target_modules=["c_attn"])
    changes = {"model.model_path": base, "model.peft_config": given, "tokenizer.tokenizer_path": base}
    make("SFTTrainer", tmp_path / "run", **changes).learn()
    read = TRLConfig.load_yaml(tmp_path / "run" / "config.yml")
    assert read.model.peft_config == {"peft_type": "LORA", "r": 2, "target_modules": ["c_attn"]}


def test_an_exported_adapter_is_a_start_for_another_trainer(tmp_path: Path) -> None:
    """From SFT to PPO: the reference is the tuned model, and not what the adapter was for."""
    save_tiny(tmp_path / "base")
    changes = {"model.model_path": str(tmp_path / "base"), "optimizer.kwargs": {"lr": 0.05}}
    tuned = make("SFTTrainer", tmp_path / "sft", **ADAPTER, **changes)
    tuned.learn()
    tuned.save_pretrained(tmp_path / "adapter")
    start = {"model.model_path": str(tmp_path / "adapter"), "tokenizer.tokenizer_path": None}
    trainer = make("PPOTrainer", tmp_path / "ppo", **start)
    assert trainer.tokenizer.get_vocab() == tiny_tokenizer().get_vocab()
    trainer.make_experience()
    assert all(element.kl.abs().max() == 0 for element in trainer.store.elements)
    ids = torch.arange(2, 12)[None]
    with torch.no_grad():
        expected = tuned.model.lm.eval()(ids).logits
        assert torch.equal(trainer.model.lm.eval()(ids).logits, expected)
        assert not torch.allclose(AutoModelForCausalLM.from_pretrained(tmp_path / "base")(ids).logits, expected)


def test_the_value_head_beside_an_exported_adapter(tmp_path: Path) -> None:
    changes = {"model.model_path": save_tiny(tmp_path / "base"), "train.total_steps": 3}
    trainer = make("PPOTrainer", tmp_path / "run", **ADAPTER, **changes)
    trainer.learn()
    model = AutoModelForCausalLMWithValueHead.from_pretrained(tmp_path / "run" / "checkpoint_3" / "hf_model").eval()
    batch = Completion.collate(trainer.store.elements)
    with torch.no_grad():
        values = model(input_ids=batch.inputs()["input_ids"], attention_mask=batch.inputs()["attention_mask"])[2]
        expected = trainer.model.eval()(batch).heads["value"]
    width = batch.response.shape[1]
    real = torch.cat([torch.ones_like(batch.mask[:, :1]), batch.mask], dim=1)
    torch.testing.assert_close(values[:, -width - 1 :][real], expected[real], rtol=0, atol=1e-6)
