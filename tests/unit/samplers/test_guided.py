"""Guided decoding draws from top-k of log pi + beta (min target Q - V), then temperature, in every family."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import PreTrainedModel

from tests.tiny import FAMILIES, ODD_FAMILIES, SEQ2SEQ_FAMILIES, tiny_tokenizer
from tests.unit.functional import q_learning_numpy as reference
from tests.unit.models.support import sharp_lm
from tests.unit.samplers.scripted import EOS, prompts, spelled, table
from trlx_like.data import Completion
from trlx_like.functional import draw as drawing
from trlx_like.models.heads import ILQLHeads
from trlx_like.models.layout import decoder_start, hidden_size, run_base, use_eager_attention_if_biased, vocabulary_size
from trlx_like.models.saved_heads import HEADS_FILE
from trlx_like.samplers.guided import (
    AutoModelForCausalLMWithILQLHeads,
    AutoModelForSeq2SeqLMWithILQLHeads,
    GuidedEngine,
    load_ilql_heads,
)
from trlx_like.samplers.text import TextSampler


def sharp_heads(lm: PreTrainedModel, two_qs: bool = True) -> ILQLHeads:
    """Heads that have something to say, the targets something else than the Qs."""
    torch.manual_seed(5)
    heads = ILQLHeads(hidden_size(lm), vocabulary_size(lm), two_qs).requires_grad_(False)
    for parameter in heads.parameters():
        parameter.add_(0.3 * torch.randn_like(parameter))
    return heads


def guided_sampler(lm: PreTrainedModel, allowed: Any = None) -> TextSampler:
    return TextSampler(GuidedEngine(lm, tiny_tokenizer(), allowed, heads=sharp_heads(lm)), tiny_tokenizer())


@pytest.mark.parametrize("family", [*FAMILIES, *ODD_FAMILIES, *SEQ2SEQ_FAMILIES])
def test_every_token_is_drawn_from_the_guided_distribution(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The probabilities that generate() draws from, against one unpadded row without cache and a float64 twin."""
    lm = sharp_lm(family)
    beta, top_k, temperature = 3.0, 4, 0.6
    drawn: list[torch.Tensor] = []

    def draw(probabilities: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
        drawn.append(probabilities)
        return drawing.draw(probabilities, uniform)

    monkeypatch.setattr("trlx_like.samplers.drawing.draw", draw)
    options = {"max_new_tokens": 3, "beta": beta, "top_k": top_k, "temperature": temperature, "eos_token_id": None}
    generator = GuidedEngine(lm, tiny_tokenizer(), heads=sharp_heads(lm))
    completion = TextSampler(generator, tiny_tokenizer()).sample(prompts(["ab", "cdefg"]), options).completion
    assert drawn
    start = decoder_start(lm)
    use_eager_attention_if_biased(
        lm
    )  # generated token by token, under fused attention; the whole rows below are without
    for row, element in enumerate(completion.split()):
        for step in range(len(element.response)):
            before = Completion(element.prompt, element.prompt_mask, element.response[:step], element.mask[:step])
            inputs = Completion.collate([before]).inputs(start)
            with torch.no_grad():
                logits = lm(**inputs).logits[0, -1].double().numpy()
                state = run_base(lm, inputs)[0][0, -1]
                q = torch.minimum(*(target(state) for target in generator.heads.targets)).double().numpy()
                value = float(generator.heads.value(state))
            expected = reference.guided(logits, q, value, beta, top_k, temperature)
            torch.testing.assert_close(
                drawn[step][row].double(), torch.tensor(expected, dtype=torch.float64), atol=2e-4, rtol=0
            )


def test_beta_0_is_the_model_itself_and_beta_is_not() -> None:
    lm = sharp_lm("gpt2")
    sample = guided_sampler(lm).sample
    plain = TextSampler(GuidedEngine(lm, tiny_tokenizer(), heads=sharp_heads(lm)), tiny_tokenizer())
    greedy: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": 31}
    without = plain.sample(prompts(["ab", "c"]), greedy).outputs
    assert sample(prompts(["ab", "c"]), {**greedy, "beta": 0}).outputs == without
    assert sample(prompts(["ab", "c"]), {**greedy, "beta": 50.0}).outputs != without


def test_forbidden_tokens_stay_forbidden_whatever_their_value() -> None:
    allowed = table("abcd.", "xyx")
    completion = guided_sampler(sharp_lm("gpt2"), allowed).sample(
        prompts(["a", "c"]), {"max_new_tokens": 8, "beta": 1000.0}
    )
    assert spelled(completion.completion) == ["bcd.", "d."]


def test_nothing_is_left_behind_on_the_model() -> None:
    lm = sharp_lm("gpt2")
    guided_sampler(lm).sample(prompts(["ab"]), {"max_new_tokens": 2, "beta": 2.0})
    assert not any(module._forward_hooks for module in lm.modules())


@pytest.mark.parametrize("two_qs", [True, False])
def test_the_model_with_heads_is_read_from_a_folder(tmp_path: Path, two_qs: bool) -> None:
    lm = sharp_lm("gpt2")
    heads = sharp_heads(lm, two_qs)
    lm.save_pretrained(tmp_path)
    save_file({f"heads.ilql.{name}": value for name, value in heads.state_dict().items()}, tmp_path / HEADS_FILE)
    model = AutoModelForCausalLMWithILQLHeads.from_pretrained(tmp_path)
    for name, value in model.ilql_heads.state_dict().items():
        assert torch.equal(value, heads.state_dict()[name])
    batch = prompts(["ab", "ef"])
    ids, _ = batch.tensors(EOS)
    options: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": 31}
    generator = GuidedEngine(lm, tiny_tokenizer(), heads=heads)
    expected = TextSampler(generator, tiny_tokenizer()).sample(batch, {**options, "beta": 7.0}).completion
    got = model.generate(ids, beta=7.0, pad_token_id=1, **options)
    assert torch.equal(got[:, ids.shape[1] :], expected.response)


@pytest.mark.parametrize("family", ["gpt2", "t5"])
def test_a_base_model_gets_new_heads(family: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """What comes out of forward is what the parts compute, also at chosen positions; saved, it is read again."""
    lm = sharp_lm(family)
    lm.save_pretrained(tmp_path / "base")
    assert load_ilql_heads(tmp_path / "base") is None
    kind: Any = AutoModelForSeq2SeqLMWithILQLHeads if family == "t5" else AutoModelForCausalLMWithILQLHeads
    model = kind.from_pretrained(tmp_path / "base", two_qs=False, attn_implementation=lm.config._attn_implementation)
    assert "no ILQL heads were saved with the model; new ones are made" in caplog.text
    assert len(kind.from_config(lm.config).ilql_heads.qs) == 2
    ids = torch.tensor([[3, 4, 5, 6], [7, 8, 9, 3]])
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    decoder = {"decoder_input_ids": ids, "decoder_attention_mask": torch.ones_like(ids)} if family == "t5" else {}
    states, actions = torch.tensor([[0, 3], [1, 2]]), torch.tensor([[2], [0]])
    with torch.no_grad():
        logits, qs, targets, values, _ = model(**inputs, **decoder, states_ixs=states, actions_ixs=actions)
        hidden = run_base(lm, {**inputs, **decoder})[0]
        torch.testing.assert_close(logits, lm(**inputs, **decoder).logits)
        assert len(qs) == len(targets) == 1 and torch.equal(qs[0], targets[0])
        torch.testing.assert_close(values[1, 0, 0], model.ilql_heads.value(hidden[1, 1]))
        torch.testing.assert_close(qs[0][0, 0], model.ilql_heads.qs[0](hidden[0, 2]))
        everywhere = model(**inputs, **decoder)
    assert values.shape == (2, 2, 1) and everywhere[3].shape == (2, 4, 1) and everywhere[1][0].shape[:2] == (2, 4)
    model.save_pretrained(tmp_path / "saved")
    caplog.clear()
    again = kind.from_pretrained(tmp_path / "saved", attn_implementation=lm.config._attn_implementation)
    assert caplog.text == "" and again.base_model is again.pretrained_model
    for one, two in zip(again.state_dict().items(), model.state_dict().items(), strict=True):
        assert one[0] == two[0] and torch.equal(one[1], two[1])
