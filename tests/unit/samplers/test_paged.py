"""Continuous batching of transformers: the tokens of the engine in process, also if its cache is too small."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, DeepseekV3Config, Llama4TextConfig
from transformers.generation.continuous_batching.requests import RequestState

from tests.contract.recipes import make
from tests.tiny import tiny_config, tiny_lm, tiny_tokenizer
from tests.unit.models.support import sharp_lm
from tests.unit.samplers.scripted import EOS, prompts, sampler, spelled, table
from trlx_like.errors import ConfigError, SamplerError
from trlx_like.models.policy import LanguagePolicy
from trlx_like.samplers.paged import PagedEngine
from trlx_like.samplers.text import TextSampler, TextSamples

TEXTS = ["abc", "d", "efghij", "abcdk", "kl", "mnopabcdef"] * 2
SMALL = {"page_size": 4, "max_batch_tokens": 12}


def sample(
    lm: Any, options: dict[str, Any], allowed: Any = None, stop: tuple[str, ...] = (), **pages: Any
) -> tuple[TextSamples, TextSamples]:
    """By continuous batching, five rows at a time, and by the engine "transformers"."""
    engine = PagedEngine(lm, tiny_tokenizer(), allowed, **{**SMALL, **pages})
    paged = TextSampler(engine, tiny_tokenizer(), stop_sequences=stop, batch_size=5)
    options = {"max_new_tokens": 9, "eos_token_id": [EOS, 5, 10], **options}
    return tuple(each.sample(prompts(TEXTS), options, 7) for each in (paged, sampler(allowed, lm=lm, stop=stop)))  # type: ignore[return-value]


CASES = [("gpt2", None), ("llama", 7), ("mistral", None)]  # the last attends to 4 tokens at most


@pytest.mark.parametrize(("family", "blocks"), [*CASES[:2], pytest.param(*CASES[2], marks=pytest.mark.slow)])
def test_the_same_tokens_with_the_log_probabilities_of_the_learner(
    family: str, blocks: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    lm = sharp_lm(family)
    begun_again: list[str] = []
    start = RequestState.create_equivalent_initial_request

    def again(self: Any) -> Any:
        begun_again.append(self.request_id)
        return start(self)

    monkeypatch.setattr(RequestState, "create_equivalent_initial_request", again)
    lm.train()
    before = lm.config._attn_implementation
    made, expected = sample(lm, {"temperature": 0.7}, num_blocks=blocks)
    assert lm.training and lm.config._attn_implementation == before
    assert made.completion.response.tolist() == expected.completion.response.tolist()
    assert made.completion.mask.tolist() == expected.completion.mask.tolist()
    lengths = made.completion.mask.sum(dim=1)
    assert lengths.min() < lengths.max()
    assert made.sampling_logprobs is not None
    scored = LanguagePolicy(lm.eval(), temperature=0.7)(made.completion).logprobs
    apart = (scored - made.sampling_logprobs)[made.completion.mask].abs().max()
    assert apart < 1e-5, apart
    assert bool(begun_again) == (blocks is not None)


@pytest.mark.parametrize(
    "options", [{"top_p": 0.5, "top_k": 9}, pytest.param({"do_sample": False}, marks=pytest.mark.slow)]
)
def test_other_distributions_are_those_of_the_engine_in_process(options: dict[str, Any]) -> None:
    made, expected = sample(sharp_lm("llama"), options)
    assert made.completion.response.tolist() == expected.completion.response.tolist()
    assert made.sampling_logprobs is None


def test_forbidden_tokens_and_stop_strings() -> None:
    allowed = table("abcdefghij.", "kl.", "mnopa")
    made, expected = sample(tiny_lm(), {"eos_token_id": EOS}, allowed, ("gh",))
    assert spelled(made.completion) == spelled(expected.completion)
    assert spelled(made.completion)[:3] == ["defgh", "efgh", "."]
    assert made.finish_reasons == expected.finish_reasons


def test_what_it_cannot_do_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"method\.gen_kwargs\.repetition_penalty: sampler\.engine \(paged\)"):
        sample(tiny_lm(), {"repetition_penalty": 1.5})
    with pytest.raises(ConfigError, match="no encoder-decoders"):
        PagedEngine(tiny_lm("t5"), tiny_tokenizer())


SIZES: dict[str, Any] = {"vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
LATENT: dict[str, Any] = {
    "kv_lora_rank": 8,
    "q_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 6,
}
EXPERTS: dict[str, Any] = {
    "num_key_value_heads": 1,
    "intermediate_size_mlp": 8,
    "num_local_experts": 2,
    "attention_chunk_size": 4,
}
DEEPSEEK = DeepseekV3Config(**SIZES, **LATENT, intermediate_size=8)
LLAMA4 = Llama4TextConfig(**SIZES, **EXPERTS, head_dim=8, intermediate_size=8)


@pytest.mark.parametrize("config", [tiny_config("bloom"), tiny_config("falcon"), DEEPSEEK, LLAMA4], ids=type)
def test_families_that_it_would_not_read_rightly_are_refused(config: Any) -> None:
    said = rf"sampler\.engine \(paged\) does not serve the family {config.model_type}; use transformers or copy\."
    with pytest.raises(ConfigError, match=said):
        PagedEngine(AutoModelForCausalLM.from_config(config), tiny_tokenizer())


def test_a_run_is_that_of_the_engine_in_process(tmp_path: Path) -> None:
    found = []
    for engine in ("paged", "transformers"):
        options = {"train.total_steps": 2, "sampler.engine": engine, "sampler.batch_size": 2}
        trainer = make("PPOTrainer", tmp_path / engine, **options)
        trainer.learn()
        found.append({name: value for name, value in trainer.last_metrics.items() if "time/" not in name})
    assert found[0] == pytest.approx(found[1], abs=1e-4)


def test_a_failure_in_its_thread_ends_the_call() -> None:
    lm = tiny_lm()
    lm.lm_head.register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(SamplerError, match="division by zero"):
        sample(lm, {})
    assert torch.is_grad_enabled()
