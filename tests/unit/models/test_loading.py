"""Loading: what may be named, what comes back, and that nothing random or noisy is left."""

from __future__ import annotations

import contextlib
import copy
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer, PreTrainedModel
from transformers.activations import NewGELUActivation
from transformers.utils import logging as transformers_logging

from tests.tiny import FAMILIES, save_tiny, tiny_config, tiny_lm, tiny_tokenizer
from trlx_like.config import ModelConfig, TokenizerConfig
from trlx_like.errors import ConfigError
from trlx_like.models.dropout import disable_dropout, has_dropout
from trlx_like.models.loading import arch_type, load_model
from trlx_like.models.reward_model import load_reward_model
from trlx_like.models.sources import check_fit, no_progress_bars
from trlx_like.models.tokenizer import load_tokenizer

# Every rate that a family knows.
DROPOUTS: dict[str, dict[str, float]] = {
    "gpt2": {"resid_pdrop": 0.5, "embd_pdrop": 0.5, "attn_pdrop": 0.5},
    "llama": {"attention_dropout": 0.5},
    "qwen3": {"attention_dropout": 0.5},
    "gpt_neox": {"attention_dropout": 0.5, "hidden_dropout": 0.5},
    "opt": {"dropout": 0.5, "attention_dropout": 0.5, "layerdrop": 0.5},
    "t5": {"dropout_rate": 0.5},
    "bart": {"dropout": 0.5, "attention_dropout": 0.5, "activation_dropout": 0.5, "decoder_layerdrop": 0.5},
    "bloom": {"attention_dropout": 0.5, "hidden_dropout": 0.5},
    "mixtral": {"attention_dropout": 0.5, "router_jitter_noise": 0.5},
}


def load(path: Any, **options: Any) -> PreTrainedModel:
    config = ModelConfig(model_path=path, **options)
    return load_model(config.model_path, config)


@pytest.mark.parametrize("nested", [False, True])
def test_longrope_beyond_its_original_length_is_no_model_to_sample_from(
    nested: bool, caplog: pytest.LogCaptureFixture
) -> None:
    config = tiny_config("llama")
    rope = {"rope_type": "longrope", "original_max_position_embeddings": 24}
    config.rope_parameters = {"full_attention": rope, "sliding_attention": {"rope_type": "default"}} if nested else rope
    check_fit(config, 24, tiny_tokenizer(), sampled=True)
    said = r"train\.seq_length \(25\) should be at most 24 for this model \(llama\)"
    with pytest.raises(ConfigError, match=said):
        check_fit(config, 25, tiny_tokenizer(), sampled=True)
    assert not caplog.records
    check_fit(config, 25, tiny_tokenizer())  # rows that are given
    assert re.match(said, caplog.messages[0])


def test_the_activation_of_gpt2_is_one_kernel_and_the_same_function(tmp_path: Path) -> None:
    plain = tiny_lm("gpt2").double()
    fused = load(copy.deepcopy(plain))
    assert not any(isinstance(module, NewGELUActivation) for module in fused.modules())
    assert any(isinstance(module, torch.nn.GELU) for module in fused.modules())
    ids = torch.arange(20)[None]
    torch.testing.assert_close(fused(ids).logits, plain(ids).logits, rtol=0, atol=1e-12)
    fused.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert again.config.activation_function == "gelu_new" and any(
        type(module) is NewGELUActivation for module in again.modules()
    )


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize(
    ("family", "rates"), [(family, {name: rate}) for family, rates in DROPOUTS.items() for name, rate in rates.items()]
)
def test_without_dropout_training_mode_is_deterministic(family: str, rates: dict[str, float], attention: str) -> None:
    all_rates: dict[str, Any] = {**dict.fromkeys(DROPOUTS[family], 0.0), **rates}
    lm = tiny_lm(family, **all_rates, initializer_range=0.5, init_std=0.5)
    lm.set_attn_implementation(attention)
    lm.train()
    ids = torch.arange(2, 14).reshape(2, 6)
    inputs = {"input_ids": ids, **({"decoder_input_ids": ids} if lm.config.is_encoder_decoder else {})}

    def outputs() -> list[torch.Tensor]:
        return [lm(**inputs).logits for _ in range(6)]

    first, *others = outputs()
    assert any(not torch.equal(first, other) for other in others), "this rate does nothing: the test would not see it"
    assert has_dropout(lm)
    disable_dropout(lm)
    assert not has_dropout(lm)
    first, *others = outputs()
    assert all(torch.equal(first, other) for other in others)
    assert torch.equal(lm.eval()(**inputs).logits, first)


def test_noise_is_removed_and_the_choice_of_experts_stays() -> None:
    """In spite of its name, `router_jitter_noise` of Phimoe is a threshold, which evaluation takes too."""
    lm = tiny_lm("phimoe", input_jitter_noise=0.5, router_jitter_noise=0.3, initializer_range=0.5)
    ids = torch.arange(12)[None]
    expected = lm(ids).logits
    disable_dropout(lm)
    assert torch.equal(lm(ids).logits, expected)
    noise = [module.input_jitter_noise for module in lm.modules() if hasattr(module, "input_jitter_noise")]
    assert set(noise) == {0.0}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_folder(tmp_path: Path, family: str) -> None:
    lm = load(save_tiny(tmp_path, family))
    for name, parameter in tiny_lm(family).named_parameters():
        assert torch.equal(lm.get_parameter(name), parameter)


def test_a_folder_in_half_precision_is_loaded_in_float32_unless_told(tmp_path: Path) -> None:
    tiny_lm().bfloat16().save_pretrained(tmp_path)
    assert load(str(tmp_path)).dtype == torch.float32
    assert load(str(tmp_path), dtype="bfloat16").dtype == torch.bfloat16


def test_a_config_a_model_and_a_function() -> None:
    torch.manual_seed(0)
    assert load(tiny_config("llama")).dtype == torch.float32
    lm = tiny_lm()
    assert load(lm) is lm
    with pytest.raises(ConfigError, match=r"model\.model_path: GPT2Model is not a language model"):
        load(lm.base_model)
    made = load("tests.tiny:tiny_lm")
    assert torch.equal(made.lm_head.weight, lm.lm_head.weight)


@pytest.mark.parametrize(
    ("path", "options", "message"),
    [
        ("/nowhere/at/all", {}, r"model\.model_path \('/nowhere/at/all'\): there is no such folder"),
        (
            "tests.tiny:tiny_lm",
            {"model_arch_type": "seq2seq"},
            r"model\.model_arch_type \('seq2seq'\): GPT2LMHeadModel is no encoder-decoder",
        ),
        ("tests.tiny:tiny_lm", {"peft_config": {"r": 8}}, r"model\.peft_config"),
    ],
)
def test_what_cannot_be_loaded(path: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(path, **options)


def test_weights_that_a_folder_does_not_have_are_not_made_up(tmp_path: Path) -> None:
    """A classifier of a family without tied embeddings has no head of a language model."""
    AutoModelForSequenceClassification.from_config(tiny_config("llama")).save_pretrained(tmp_path)
    with pytest.raises(
        ConfigError, match=r"model\.model_path \('.*'\) has no lm_head\.weight: it is another kind of model"
    ):
        load_model(str(tmp_path), ModelConfig(model_path=str(tmp_path)))


def test_an_encoder_decoder_has_to_be_asked_for(tmp_path: Path) -> None:
    # Bart would load as a causal model, without its encoder.
    tiny_lm("bart").save_pretrained(tmp_path)
    for path, name in (
        (str(tmp_path), str(tmp_path)),
        (tiny_config("t5"), "T5Config"),
        (tiny_lm("t5"), "T5ForConditionalGeneration"),
    ):
        with pytest.raises(ConfigError, match=rf"\('causal'\): .*{name}.* is an encoder-decoder; set it to 'seq2seq'"):
            load(path)
        assert load(path, model_arch_type="seq2seq").config.is_encoder_decoder
    assert arch_type(str(tmp_path)) == "seq2seq" and arch_type(save_tiny(tmp_path / "causal")) == "causal"
    with pytest.raises(ConfigError, match=r"model\.model_path \('/nowhere/at/all'\): there is no such folder"):
        arch_type("/nowhere/at/all")


def test_no_bars_and_what_the_user_set_comes_back(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    seen: list[Any] = []

    def users_hook(bar: Any, args: Any, kwargs: Any) -> Any:
        seen.append(kwargs)
        return bar(*args, **kwargs)

    lm = tiny_lm()
    lm.save_pretrained(tmp_path)
    assert "Writing model shards" in capfd.readouterr().err, "transformers shows no bar: this test would not see one"
    before = transformers_logging.set_tqdm_hook(users_hook)
    try:
        with no_progress_bars():
            lm.save_pretrained(tmp_path)
        load(str(tmp_path))
        with pytest.raises(ConfigError):
            load(str(tmp_path / "missing"))
        assert capfd.readouterr().err == "" and not seen
        AutoModelForCausalLM.from_pretrained(tmp_path)
        assert seen and "Loading weights" in capfd.readouterr().err
    finally:
        transformers_logging.set_tqdm_hook(before)


def test_what_is_saved_is_what_plain_transformers_loads(tmp_path: Path) -> None:
    path = save_tiny(tmp_path, "qwen3")
    ids = torch.tensor([AutoTokenizer.from_pretrained(path)("abc").input_ids])
    assert torch.equal(AutoModelForCausalLM.from_pretrained(path)(ids).logits, tiny_lm("qwen3")(ids).logits)


def folder_with_code(folder: Path, marker: Path) -> Path:
    """A model of an unknown kind, whose folder brings the Python file that it needs."""
    save_tiny(folder)
    config = json.loads((folder / "config.json").read_text())
    names = {"AutoConfig": "evil.EvilConfig", "AutoTokenizer": [None, "evil.EvilTokenizer"]}
    config |= {"model_type": "evil", "auto_map": {**names, "AutoModelForCausalLM": "evil.Evil"}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "evil.py").write_text(f"open({str(marker)!r}, 'w').close()\n")
    return folder


def test_code_of_a_model_is_not_run_unless_it_is_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor is anybody asked at the terminal, as transformers does."""
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    marker, model = tmp_path / "ran", folder_with_code(tmp_path / "model", tmp_path / "ran")
    advice = "comes with code of its own, which is not run."
    command = "If you trust its author, add to the command: --set"
    with pytest.raises(ConfigError, match=rf"{advice} {command} model.model_extra_configs.trust_remote_code=true$"):
        load(str(model))
    with pytest.raises(ConfigError, match=rf"{advice}$"):
        arch_type(str(model))
    with pytest.raises(ConfigError, match=rf"data.reward_fn .* {advice}$"):
        load_reward_model(str(model), trained=True, option="data.reward_fn")
    wanted = rf"{advice} {command} tokenizer.tokenizer_extra_configs.trust_remote_code=true$"
    (model / "tokenizer_config.json").write_text(json.dumps({"auto_map": {"AutoTokenizer": [None, "evil.Evil"]}}))
    with pytest.raises(ConfigError, match=wanted):
        load_tokenizer(TokenizerConfig(tokenizer_path=str(model)), None)
    assert not marker.exists()
    with contextlib.suppress(Exception):  # the file has no such class
        load(str(model), model_extra_configs={"trust_remote_code": True})
    assert marker.exists()
