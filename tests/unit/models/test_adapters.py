"""Adapters: what is trained, what the reference is, what is written, and what is refused before a model loads."""

from __future__ import annotations

import copy
import json
import sys
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.tiny import save_tiny, tiny_config, tiny_lm
from tests.unit.models.support import (
    batch_of_ids,
    gradients,
    plain_logprobs,
    rows_of_ids,
    sharp_lm,
    valued_policy,
)
from trlx_like.config import ModelConfig
from trlx_like.errors import ConfigError
from trlx_like.functional.kl import full_kl
from trlx_like.models.adapters import add_adapter, read_adapter
from trlx_like.models.export import save_model
from trlx_like.models.loading import load_model, load_trained_model
from trlx_like.models.policy import LanguagePolicy

LINEAR = {"target_modules": "all-linear"}
LORA: dict[str, Any] = {"peft_type": "LORA", "r": 2, "lora_alpha": 64}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "lora": ("gpt2", LORA),
    "lora on llama": ("llama", {**LORA, **LINEAR}),
    "dora": ("llama", {**LORA, "use_dora": True}),
    "rank-stabilised": ("qwen3", {**LORA, "use_rslora": True}),
    "the head as well": ("llama", {**LORA, "target_modules": ["q_proj", "lm_head"]}),
    "the head in full": ("llama", {**LORA, "modules_to_save": ["lm_head"]}),
    "tied head": ("gpt2", {**LORA, "target_modules": ["c_attn", "lm_head"]}),
    "tied head in full": ("gpt2", {**LORA, "modules_to_save": ["lm_head"]}),
    "tied embeddings": ("gpt2", {**LORA, "target_modules": ["wte"], "init_lora_weights": False}),
    "trained before": ("gpt2", {**LORA, "init_lora_weights": False}),
    "encoder-decoder": ("t5", {**LORA, "task_type": "SEQ_2_SEQ_LM"}),
    "ia3": ("llama", {"peft_type": "IA3"}),
    "loha": ("llama", {"peft_type": "LOHA", "r": 2, "alpha": 64, **LINEAR}),
    "lokr": ("llama", {"peft_type": "LOKR", "r": 2, "alpha": 64, **LINEAR}),
}
pytestmark = pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")  # of peft, and so it is
every_kind = pytest.mark.parametrize(("family", "options"), KINDS.values(), ids=KINDS)


def adapted(family: str, options: dict[str, Any], source: str | None = None) -> PreTrainedModel:
    lm = sharp_lm(family)
    torch.manual_seed(5)
    add_adapter(lm, options, source)
    return lm


def move(policy: LanguagePolicy) -> None:
    """A large step on everything that is trained."""
    (policy(batch_of_ids()).logprobs.sum()).backward()
    trained = [parameter for parameter in policy.parameters() if parameter.requires_grad]
    torch.optim.SGD(trained, lr=0.05).step()
    policy.zero_grad(set_to_none=True)


@every_kind
def test_the_reference_is_the_policy_as_it_was(family: str, options: dict[str, Any]) -> None:
    """Exactly: at the start the two say the same, bit by bit, and later the reference says what it said."""
    policy = valued_policy(adapted(family, options))
    policy.add_reference()
    batch = batch_of_ids()
    with torch.no_grad():
        start = policy(batch, reference=True, divergence=full_kl)
    assert torch.equal(start.ref_logprobs, start.logprobs)
    assert start.divergence.abs().max() == 0
    move(policy)
    move(policy)
    with torch.no_grad():
        later = policy(batch, reference=True)
    assert torch.equal(later.ref_logprobs, start.logprobs)
    assert (later.logprobs - start.logprobs).abs().max() > 0.01


def test_the_reference_of_a_new_adapter_is_the_model_without_it() -> None:
    policy = valued_policy(adapted("gpt2", LORA))
    policy.add_reference()
    move(policy)
    rows = rows_of_ids()
    with torch.no_grad():
        got = policy(batch_of_ids(), reference=True).ref_logprobs
    for row, logprobs in zip(rows, got, strict=True):
        expected = plain_logprobs(sharp_lm("gpt2"), row)
        torch.testing.assert_close(logprobs[: len(expected)].double(), expected, rtol=0, atol=1e-5)


@every_kind
def test_only_the_adapter_is_trained(family: str, options: dict[str, Any]) -> None:
    policy = LanguagePolicy(adapted(family, options))
    before = {name: value.clone() for name, value in policy.lm.state_dict().items()}
    move(policy)
    after = policy.lm.state_dict()
    moved = {name for name, value in before.items() if not torch.equal(value, after[name])}
    marks = ("lora_", "ia3_", "hada_", "lokr_", "modules_to_save")
    assert moved and all(any(mark in name for mark in marks) for name in moved)


def test_a_reference_does_not_disturb_gradients() -> None:
    """Of a loss with the exact KL in it: those that a second, whole model as reference gives."""
    batch = batch_of_ids()
    found = []
    for other in (None, sharp_lm("llama")):
        policy = LanguagePolicy(adapted("llama", {**LORA, "target_modules": ["q_proj", "lm_head"]}))
        policy.add_reference(other)
        move(policy)
        out = policy(batch, divergence=full_kl)
        assert out.divergence is not None
        (out.divergence.sum() - 0.1 * out.logprobs.sum()).backward()
        found.append(gradients(policy))
    assert list(found[0]) == list(found[1])
    assert len(found[0]) == 8  # two matrices each of q_proj in three layers, and of the head
    for name, gradient in found[1].items():
        torch.testing.assert_close(found[0][name], gradient, rtol=1e-4, atol=1e-6)
    assert max(gradient.abs().max() for gradient in found[0].values()) > 0.01


def test_its_state_is_what_is_trained() -> None:
    """Of a model with an adapter: without what is frozen. Tied weights have two names."""
    policy = valued_policy(adapted("gpt2", LORA))
    state = {name: value.clone() for name, value in policy.state_dict().items()}
    assert all("lora_" in name or name.startswith("heads.") for name in state)
    assert len([name for name in state if "lora_" in name]) == 6
    other = valued_policy(adapted("gpt2", {**LORA, "init_lora_weights": False}))
    other.load_state_dict(state)
    batch = batch_of_ids()
    with torch.no_grad():
        assert torch.equal(other(batch).logprobs, policy(batch).logprobs)
    del state["heads.value.layers.0.weight"]
    with pytest.raises(RuntimeError, match=r"Missing key.*heads\.value\.layers\.0\.weight"):
        other.load_state_dict(state)


@pytest.mark.parametrize("options", [{"target_modules": ["lm_head"]}, {"modules_to_save": ["lm_head"]}])
def test_the_tied_embeddings_of_an_encoder_decoder_have_no_adapter(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="embeddings of T5ForConditionalGeneration share a weight"):
        adapted("t5", {**LORA, **options})


# Files.


def trained_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, PreTrainedModel]:
    """An exported adapter that has moved, of a model at a relative path."""
    save_tiny(folder / "base", "gpt2")
    monkeypatch.chdir(folder)
    lm = load_trained_model(ModelConfig(model_path="base", peft_config=LORA))
    move(LanguagePolicy(lm))
    save_model(lm, folder / "adapter")
    return folder / "adapter", lm


def test_an_exported_adapter_loads_with_transformers_and_with_peft(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From any folder, and whoever writes the YAML: the model's path is a whole one."""
    folder, lm = trained_folder(tmp_path, monkeypatch)
    assert {path.name for path in folder.iterdir()} >= {"adapter_config.json", "adapter_model.safetensors"}
    assert not (folder / "model.safetensors").exists()
    monkeypatch.chdir("/")
    ids = torch.arange(2, 12)[None]
    with torch.no_grad():
        expected = lm.eval()(ids).logits
        for loader in (AutoModelForCausalLM, peft.AutoPeftModelForCausalLM):
            assert torch.equal(loader.from_pretrained(folder).eval()(ids).logits, expected)


def test_names_are_written_in_one_order(tmp_path: Path) -> None:
    """peft keeps them in a set, whose order differs from process to process."""
    path = save_tiny(tmp_path / "base", "llama")
    save_model(load_trained_model(ModelConfig(model_path=path, peft_config=LORA | LINEAR)), tmp_path / "new")
    save_model(load_trained_model(ModelConfig(model_path=str(tmp_path / "new"))), tmp_path / "again")
    for folder in ("new", "again"):
        names = json.loads((tmp_path / folder / "adapter_config.json").read_text())["target_modules"]
        assert len(names) == 14 and names == sorted(names)


def test_an_exported_adapter_is_trained_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, lm = trained_folder(tmp_path, monkeypatch)
    again = load_trained_model(ModelConfig(model_path=str(folder)))
    policy = LanguagePolicy(again)
    policy.add_reference()
    trained = {name: value for name, value in again.named_parameters() if value.requires_grad}
    assert [name for name in trained if "lora_" not in name] == []
    assert len(trained) == 4
    for name, value in trained.items():
        assert torch.equal(value, lm.get_parameter(name))
    batch = batch_of_ids()
    with torch.no_grad():
        out = policy(batch, reference=True)
        assert torch.equal(out.ref_logprobs, LanguagePolicy(lm.eval())(batch).logprobs)
    move(policy)
    save_model(again, tmp_path / "second")
    read = AutoModelForCausalLM.from_pretrained(tmp_path / "second").eval()
    with torch.no_grad():
        assert torch.equal(LanguagePolicy(read)(batch).logprobs, policy(batch).logprobs)


def test_as_a_reference_it_is_loaded_and_not_trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, lm = trained_folder(tmp_path, monkeypatch)
    policy = LanguagePolicy(tiny_lm("gpt2", seed=3))
    policy.add_reference(load_model(str(folder), ModelConfig(model_path="base", peft_config=LORA)))
    batch = batch_of_ids()
    with torch.no_grad():
        expected = LanguagePolicy(lm.eval())(batch).logprobs
        assert torch.equal(policy(batch, reference=True).ref_logprobs, expected)


def test_a_peft_model_in_memory(tmp_path: Path) -> None:
    """As TRL's users have them. Its base is the one that it was made from."""
    base = AutoModelForCausalLM.from_pretrained(save_tiny(tmp_path / "base"))
    given = peft.get_peft_model(base, peft.LoraConfig(r=2, fan_in_fan_out=True))
    lm = load_trained_model(ModelConfig(model_path=given))
    assert lm is base
    move(LanguagePolicy(lm))
    save_model(lm, tmp_path / "adapter")
    assert torch.equal(
        AutoModelForCausalLM.from_pretrained(tmp_path / "adapter").eval()(torch.tensor([[3, 4]])).logits,
        given.eval()(input_ids=torch.tensor([[3, 4]])).logits,
    )


@pytest.mark.parametrize(
    "source", [tiny_config(), tiny_lm(), "tests.tiny:tiny_lm"], ids=["config", "model", "function"]
)
def test_of_a_model_that_cannot_be_named_the_whole_is_written(source: Any, tmp_path: Path) -> None:
    lm = load_trained_model(ModelConfig(model_path=copy.deepcopy(source), peft_config=LORA))
    save_model(lm, tmp_path)
    assert (tmp_path / "model.safetensors").exists() and not (tmp_path / "adapter_config.json").exists()


def test_a_folder_of_one_kind_is_not_mixed_with_the_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers would load both, and the adapter on top of what it was merged into."""
    folder, lm = trained_folder(tmp_path, monkeypatch)
    with pytest.raises(ConfigError, match="holds an adapter, which would be mixed with a whole model; name another"):
        save_model(lm, folder, merge=True)
    save_model(lm, tmp_path / "whole", merge=True)
    with pytest.raises(ConfigError, match="holds a whole model, which would be mixed with an adapter"):
        save_model(lm, tmp_path / "whole")
    save_model(lm, folder)  # the same kind again


# What is refused, before a model loads.


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"peft_type": "LORA", "rank": 2}, r"model\.peft_config\.rank: LORA has no such option"),
        ({"peft_type": "lora", "lora_alfa": 2}, r"model\.peft_config\.lora_alfa: .* Did you mean lora_alpha\?"),
        ({"peft_type": "LORAA"}, r"model\.peft_config\.peft_type \('LORAA'\) must be one of LORA, IA3, LOHA, LOKR"),
        ({"peft_type": "PROMPT_TUNING", "num_virtual_tokens": 4}, r"PROMPT_TUNING is not supported; peft_type may be"),
        ({"peft_type": "PREFIX_TUNING", "num_virtual_tokens": 4}, r"PREFIX_TUNING is not supported"),
        ({"peft_type": "ADALORA", "total_step": 9}, r"ADALORA is not supported"),
        ({"peft_type": "LORA", "bias": "all"}, r"model\.peft_config\.bias \('all'\)"),
        ({"peft_type": "LORA", "init_lora_weights": "pissa"}, r"init_lora_weights \('pissa'\) changes the weights"),
        ({"peft_type": "LORA", "init_lora_weights": "loftq"}, r"model\.peft_config: "),
    ],
)
def test_options_that_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_trained_model(ModelConfig(model_path="/nowhere/at/all", peft_config=options))


@pytest.mark.parametrize("given", ["LORA", 8, {"r": 8}, {"peft_type": 3}, peft.LoraConfig])
def test_what_is_no_configuration(given: Any) -> None:
    with pytest.raises(
        ConfigError, match="model.peft_config: must be a peft configuration, a mapping of its options with"
    ):
        ModelConfig(model_path="x", peft_config=given)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"target_modules": ["nothing"]}, "model.peft_config does not fit GPT2LMHeadModel: .*nothing"),
        (
            {"peft_type": "LOKR", "target_modules": ["c_attn"]},
            "model.peft_config does not fit GPT2LMHeadModel: .*Conv1D",
        ),
    ],
)
def test_options_that_do_not_fit_the_model(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        add_adapter(tiny_lm(), {"peft_type": "LORA", **options}, None)


def test_one_adapter_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, _ = trained_folder(tmp_path, monkeypatch)
    with pytest.raises(ConfigError, match="model.peft_config: model.model_path has an adapter already"):
        load_trained_model(ModelConfig(model_path=str(folder), peft_config=LORA))


def test_adapters_of_other_names() -> None:
    """Which of several active ones would be meant is not known, and the reference has but one."""
    given = peft.get_peft_model(tiny_lm("llama"), peft.LoraConfig(r=2), adapter_name="mine")
    with pytest.raises(ConfigError, match="has the active adapters mine; it must have only one, named 'default'"):
        load_trained_model(ModelConfig(model_path=given))


def test_an_adapter_beside_the_active_one_stays_frozen() -> None:
    """Such as a reward adapter on the policy's base."""
    lm: Any = tiny_lm("llama")
    for name in ("default", "reward"):
        lm.add_adapter(peft.LoraConfig(r=2), adapter_name=name)
    lm.set_adapter("default")
    load_trained_model(ModelConfig(model_path=lm))
    trained = {name.split(".")[-2] for name, value in lm.named_parameters() if value.requires_grad}
    assert trained == {"default"} and lm.active_adapters() == ["default"]


def test_without_peft_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder, _ = trained_folder(tmp_path, monkeypatch)
    monkeypatch.setitem(sys.modules, "peft", None)
    for config in (ModelConfig(model_path="/nowhere", peft_config=LORA), ModelConfig(model_path=str(folder))):
        with pytest.raises(ConfigError, match=r'adapters need peft .*pip install "trlx-like\[peft\]"'):
            load_trained_model(config)


def test_an_adapter_that_does_not_say_what_it_is_for(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    with pytest.raises(ConfigError, match="its adapter_config.json does not name the model it is for"):
        load_trained_model(ModelConfig(model_path=str(tmp_path)))


def test_a_peft_configuration_is_a_mapping_of_what_was_changed() -> None:
    """So that the config.yml of a run can be read again."""
    config = peft.LoraConfig(r=2, target_modules=["v_proj", "q_proj"], task_type=peft.TaskType.CAUSAL_LM)
    options = ModelConfig(model_path="x", peft_config=config).peft_config
    assert options == {"peft_type": "LORA", "r": 2, "target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM"}
    made = read_adapter(options)
    assert (made.r, made.target_modules, made.task_type) == (2, {"q_proj", "v_proj"}, "CAUSAL_LM")
    assert config.base_model_name_or_path is None
