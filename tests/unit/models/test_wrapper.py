"""The language model with heads: every option of `from_pretrained` is followed or refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM

from tests.tiny import save_tiny, tiny_config, tiny_lm
from trlx_like import (
    AutoModelForCausalLMWithILQLHeads,
    AutoModelForCausalLMWithValueHead,
    AutoModelForSeq2SeqLMWithValueHead,
    PreTrainedModelWrapper,
)
from trlx_like.errors import ConfigError
from trlx_like.models.merging import has_adapter
from trlx_like.models.saved_heads import HEADS_FILE

LORA = LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True, init_lora_weights=False)
IDS = torch.tensor([[3, 4, 5]])
Model = AutoModelForCausalLMWithValueHead


def trained(model: nn.Module) -> set[str]:
    """The kinds of weights that have gradients: "lora", "head" or "base"."""
    names = [name for name, weight in model.named_parameters() if weight.requires_grad]
    return {"lora" if "lora_" in name else "head" if name.startswith("v_head") else "base" for name in names}


def test_names_in_the_state_dict() -> None:
    model = Model(tiny_lm())
    assert isinstance(model, PreTrainedModelWrapper)
    plain = set(tiny_lm().state_dict())
    assert set(model.state_dict()) == plain | {"v_head.summary.weight", "v_head.summary.bias"}
    outer = nn.ModuleDict({"policy": model})
    assert set(outer.state_dict()) == {f"policy.{name}" for name in model.state_dict()}
    other = Model(tiny_lm(seed=1))
    assert not torch.equal(other(IDS)[0], model(IDS)[0])
    nn.ModuleDict({"policy": other}).load_state_dict(outer.state_dict())
    for one, two in zip(other(IDS)[::2], model(IDS)[::2], strict=True):
        assert torch.equal(one, two)


def test_of_a_peft_model() -> None:
    peft = get_peft_model(tiny_lm(), LORA)
    with torch.no_grad():
        expected = peft(IDS).logits
    for model in (Model.from_pretrained(peft), Model(peft)):
        assert has_adapter(model.pretrained_model) and trained(model) == {"lora", "head"}
        assert torch.equal(model(IDS)[0], expected)


def test_adapters(tmp_path: Path) -> None:
    base = save_tiny(tmp_path / "base")
    new = Model.from_pretrained(base, peft_config=LORA)
    assert trained(new) == {"lora", "head"}
    new.save_pretrained(tmp_path / "adapter")
    assert not list((tmp_path / "adapter").glob("model*"))
    for is_trainable, expected in ((False, {"head"}), (True, {"lora", "head"})):
        again = Model.from_pretrained(tmp_path / "adapter", is_trainable=is_trainable)
        assert trained(again) == expected
        for one, two in zip(again(IDS)[::2], new(IDS)[::2], strict=True):
            assert torch.equal(one, two)
    assert trained(Model.from_pretrained(tiny_lm(), peft_config={"peft_type": "LORA", "r": 2})) == {"lora", "head"}
    assert trained(Model.from_pretrained(base, is_trainable=True)) == {"base", "head"}
    with pytest.raises(ConfigError, match="has an adapter already"):
        Model.from_pretrained(tmp_path / "adapter", peft_config=LORA)


@pytest.mark.parametrize(
    ("source", "options", "message"),
    [
        ("memory", {"dtype": torch.bfloat16}, "from_pretrained: dtype cannot change a model in memory"),
        ("folder", {"score_module": nn.Linear(2, 1)}, "score_module is not taken: load the reward model's adapter"),
        ("folder", {"rm_adapter_name": "a"}, "rm_adapter_name is not taken: it is called reward_adapter_name"),
        ("folder", {"supports_rm_adapter": True}, "supports_rm_adapter is not taken"),
        ("folder", {"v_head_init_strategy": "uniform"}, r"v_head_init_strategy \('uniform'\) must be 'normal' or None"),
        ("folder", {"use_gradient_checkpointing": True}, "these prepare a quantized model for a new adapter"),
        ("folder", {"reward_adapter": "x"}, "give the policy an adapter of its own first"),
    ],
)
def test_options_that_cannot_be_followed(source: str, options: dict[str, Any], message: str, tmp_path: Path) -> None:
    given: Any = tiny_lm() if source == "memory" else save_tiny(tmp_path)
    with pytest.raises(ConfigError, match=message):
        Model.from_pretrained(given, **options)


def test_options_of_the_constructor_that_are_not_taken() -> None:
    with pytest.raises(ConfigError, match="AutoModelForCausalLMWithValueHead: score_module is not taken: load the"):
        Model(tiny_lm(), score_module=nn.Linear(2, 1))
    with pytest.raises(
        ConfigError, match="AutoModelForCausalLMWithValueHead takes no peft_config; from_pretrained may"
    ):
        Model(tiny_lm(), peft_config=LORA)
    with pytest.raises(ConfigError, match="alpha is not taken: it is an argument of ilql_heads.sync"):
        AutoModelForCausalLMWithILQLHeads.from_pretrained(tiny_lm(), alpha=0.5)


def test_quantization_needs_its_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "bitsandbytes", None)
    with pytest.raises(ConfigError, match="load_in_4bit needs bitsandbytes .*: pip install"):
        Model.from_pretrained(save_tiny(tmp_path), load_in_4bit=True)


@pytest.mark.slow
def test_a_quantized_model_with_a_new_adapter(tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    path = save_tiny(tmp_path, "llama", hidden_size=64, intermediate_size=64)
    lora = {"peft_type": "LORA", "r": 2, "target_modules": ["q_proj"]}
    model = Model.from_pretrained(path, load_in_4bit=True, peft_config=lora, use_gradient_checkpointing=False)
    assert trained(model) == {"lora", "head"}
    model.generate(IDS, max_new_tokens=2, do_sample=False)
    logits, _, values = model(IDS)
    (logits.square().mean() + values.mean()).backward()
    gradients = [weight.grad for name, weight in model.named_parameters() if "lora_B" in name]
    assert any(gradient is not None and gradient.abs().sum() > 0 for gradient in gradients)


def test_a_classifier_is_no_language_model(tmp_path: Path) -> None:
    from transformers import AutoModelForSequenceClassification

    AutoModelForSequenceClassification.from_config(tiny_config("llama", num_labels=1)).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"has no lm_head.weight: it is another kind of model"):
        Model.from_pretrained(tmp_path)


def test_of_a_configuration() -> None:
    model = Model.from_config(tiny_config(), peft_config=LORA, v_head_init_strategy="normal", dtype=torch.bfloat16)
    assert trained(model) == {"lora", "head"} and model.config.n_embd == 16
    assert model.pretrained_model.lm_head.weight.dtype == torch.bfloat16
    assert model(IDS)[0].dtype == model(IDS)[2].dtype == torch.float32


def test_what_save_pretrained_takes(tmp_path: Path) -> None:
    model = Model(tiny_lm())
    state = {name: value + 1 if name.startswith("v_head") else value for name, value in model.state_dict().items()}
    model.save_pretrained(tmp_path, max_shard_size="20KB", state_dict=state, safe_serialization=True)
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 1
    bias = load_file(tmp_path / HEADS_FILE)["heads.value.summary.bias"]
    assert torch.equal(bias, state["v_head.summary.bias"])
    assert torch.equal(AutoModelForCausalLM.from_pretrained(tmp_path)(IDS).logits, model.pretrained_model(IDS).logits)
    model.save_pretrained(tmp_path / "other", is_main_process=False)
    assert not (tmp_path / "other" / HEADS_FILE).exists()
    refused: list[tuple[dict[str, Any], str]] = [
        ({"safe_serialization": False}, "weights are written as safetensors only"),
        ({"push_to_hub": True}, r"would leave the heads behind; call push_to_hub\(repo_id\)"),
        ({"save_functions": 1}, "save_pretrained takes no save_functions"),
    ]
    for options, message in refused:
        with pytest.raises(ConfigError, match=message):
            model.save_pretrained(tmp_path, **options)


def test_push_to_hub_sends_the_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything but the network: what would be uploaded is what `save_pretrained` writes."""
    from transformers.utils import hub

    sent: dict[str, Any] = {}

    class Api:
        def create_repo(self, repo_id: str, **_: Any) -> Any:
            return type("Repo", (), {"repo_id": repo_id})

        def create_commit(self, repo_id: str, operations: Any, **_: Any) -> str:
            sent[repo_id] = {operation.path_in_repo for operation in operations}
            return "done"

    class Card:
        def save(self, file: str) -> None:
            Path(file).write_text("")

    monkeypatch.setattr(hub, "hf_api", Api)
    monkeypatch.setattr(hub, "create_and_tag_model_card", lambda *args, **kwargs: Card())
    assert Model(tiny_lm()).push_to_hub("someone/tiny") == "done"
    assert {HEADS_FILE, "config.json", "model.safetensors"} <= sent["someone/tiny"]


def test_gradient_checkpointing() -> None:
    model = Model(tiny_lm("llama")).train()
    gradients = []
    for enabled in (False, True):
        if enabled:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        assert model.pretrained_model.is_activation_checkpointing == enabled
        model.zero_grad()
        logits, _, values = model(IDS)
        (logits.square().mean() + values.mean()).backward()
        gradients.append([weight.grad for weight in model.parameters()])
    for one, two in zip(*gradients, strict=True):
        torch.testing.assert_close(one, two)
    model.gradient_checkpointing_disable()
    assert not model.pretrained_model.is_activation_checkpointing


def test_the_same_of_an_encoder_decoder() -> None:
    """Of its configuration, its state, the cache of its decoder, checkpointing, and logits in float32."""
    lm: Any = tiny_lm("t5")
    kind = AutoModelForSeq2SeqLMWithValueHead
    model: Any = kind(lm).eval()
    again: Any = kind.from_config(lm.config).eval()
    assert model.config is lm.config and model.pretrained_model is lm
    assert {"v_head.summary.weight", "shared.weight"} <= set(model.state_dict())
    again.load_state_dict(model.state_dict())
    ids, mask = torch.tensor([[3, 4, 5], [6, 7, 1]]), torch.tensor([[1, 1, 1], [1, 1, 0]])
    decoded = torch.tensor([[1, 5, 6], [1, 7, 8]])
    with torch.no_grad():
        logits, _, values = model(ids, mask, decoder_input_ids=decoded)
        for one, other in zip(again(ids, mask, decoder_input_ids=decoded)[::2], (logits, values), strict=True):
            assert torch.equal(one, other)
        embedded = model(None, mask, inputs_embeds=lm.get_input_embeddings()(ids), decoder_input_ids=decoded)
        torch.testing.assert_close(embedded[0], logits)
        *_, cache = model(ids, mask, decoder_input_ids=decoded[:, :2], return_past_key_values=True)
        rest = model(ids, mask, decoder_input_ids=decoded[:, 2:], past_key_values=cache)
        torch.testing.assert_close(rest[0], logits[:, 2:], rtol=0, atol=1e-4)
        torch.testing.assert_close(rest[2], values[:, 2:], rtol=0, atol=1e-4)
    model.gradient_checkpointing_enable()
    _, loss, values = model.train()(ids, mask, labels=decoded)
    (loss + values.sum()).backward()
    assert model.v_head.summary.weight.grad is not None and lm.shared.weight.grad is not None
    options = {"v_head_init_strategy": "normal", "v_head_initializer_range": 0.0, "summary_dropout_prob": 0.5}
    head: Any = kind.from_pretrained(lm, **options).v_head
    assert not head.summary.weight.any() and head.dropout.p == 0.5
    torch.nn.Module.to(lm, torch.bfloat16)
    assert kind(lm)(ids, mask, decoder_input_ids=decoded)[0].dtype == torch.float32


def test_a_model_without_a_place_for_a_reward_adapter(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="a model with these heads takes no reward_adapter"):
        AutoModelForCausalLMWithILQLHeads.from_pretrained(tiny_lm(), reward_adapter=str(tmp_path))
    with pytest.raises(ConfigError, match="needs a model of transformers, not a Linear"):
        Model(nn.Linear(2, 2))
