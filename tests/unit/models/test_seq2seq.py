"""What is particular to encoder-decoders: what is read where, what k top layers are, and what trlX's T5 lost."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import AutoModelForSeq2SeqLM, SwitchTransformersConfig, T5GemmaConfig

from tests.tiny import SEQ2SEQ_FAMILIES, tiny_lm
from tests.unit.models.support import batch_of_ids, plain_logprobs, rows_of_ids, sharp_lm, valued_policy
from trlx_like.data import Completion
from trlx_like.errors import ConfigError
from trlx_like.models.dropout import disable_dropout
from trlx_like.models.heads import SummaryHead
from trlx_like.models.layout import lm_head, run_base
from trlx_like.models.policy import LanguagePolicy
from trlx_like.models.top_blocks import TopBlocks
from trlx_like.models.value_head import AutoModelForCausalLMWithValueHead, AutoModelForSeq2SeqLMWithValueHead

families = pytest.mark.parametrize("family", SEQ2SEQ_FAMILIES)


def test_inputs_golden() -> None:
    # The prompts (5, 6) and (8), the second padded on the left; responses (7) and (9, 4). Decoders begin with 2.
    batch = Completion(
        torch.tensor([[5, 6], [3, 8]]),
        torch.tensor([[True, True], [False, True]]),
        torch.tensor([[7, 3], [9, 4]]),
        torch.tensor([[True, False], [True, True]]),
    )
    assert {name: value.tolist() for name, value in batch.inputs(2).items()} == {
        "input_ids": [[5, 6], [8, 3]],
        "attention_mask": [[1, 1], [1, 0]],
        "decoder_input_ids": [[2, 7, 3], [2, 9, 4]],
        "decoder_attention_mask": [[1, 1, 0], [1, 1, 1]],
    }
    assert batch.previous(2).tolist() == [[2, 7], [2, 9]]


@families
def test_heads_are_on_the_states_of_the_decoder(family: str) -> None:
    lm = sharp_lm(family)
    policy = valued_policy(lm)
    out = policy(batch_of_ids())
    assert out.heads["value"].shape == (3, 7)
    for i, row in enumerate(rows_of_ids()):
        decoder = torch.cat([torch.tensor([1]), row.response])[None]
        with torch.no_grad():
            plain = lm(input_ids=row.prompt[None], decoder_input_ids=decoder, output_hidden_states=True)
            states = policy.heads["value"](plain.decoder_hidden_states[-1][0])
        assert len(states) == len(row.response) + 1 and states.std() > 0.01
        torch.testing.assert_close(out.heads["value"][i, : len(states)], states, rtol=0, atol=1e-5)


@families
def test_the_head_alone_gives_the_logits_of_the_whole(family: str) -> None:
    # T5 with tied embeddings scales what goes into them, Bart adds a bias.
    lm: Any = sharp_lm(family)
    if family == "bart":
        torch.nn.init.normal_(lm.final_logits_bias)
    inputs = batch_of_ids().inputs(1)
    with torch.no_grad():
        hidden, _ = run_base(lm, inputs)
        logits = lm_head(lm)(hidden.flatten(0, 1)).unflatten(0, hidden.shape[:2])
        torch.testing.assert_close(logits, lm(**inputs).logits, rtol=0, atol=1e-5)


@pytest.mark.parametrize("family", ["t5", "mt5"])
@pytest.mark.parametrize("branch", [1, 2])
def test_the_reference_would_be_another_model_without_what_blocks_hand_on(family: str, branch: int) -> None:
    """T5's position bias is in its first block alone, which the reference does not have: trlX's starts without it."""
    lm = sharp_lm(family)
    top = TopBlocks(lm, branch).eval()
    with torch.no_grad():
        hidden, entering = run_base(lm, batch_of_ids().inputs(1), [branch])
        whole = top(entering[branch])
        assert torch.equal(whole, hidden)
        lost = entering[branch]
        lost.args = (*lost.args[:2], None, *lost.args[3:])
        assert (top(lost) - whole).abs().max() > 0.01


@families
@pytest.mark.parametrize("unfrozen", [-1, 0, 1, 3])
def test_the_reference_is_the_start_after_the_encoder_was_trained(family: str, unfrozen: int) -> None:
    policy = LanguagePolicy(sharp_lm(family), num_layers_unfrozen=unfrozen)
    start = copy.deepcopy(policy.lm)
    policy.add_reference()
    with torch.no_grad():
        for parameter in policy.lm.parameters():
            if parameter.requires_grad:
                parameter.mul_(1.1)
    out = policy(batch_of_ids(), reference=True)
    assert out.ref_logprobs is not None
    for i, row in enumerate(rows_of_ids()):
        expected = plain_logprobs(start, row).float()
        torch.testing.assert_close(out.ref_logprobs[i, : len(row.response)], expected, rtol=0, atol=1e-5)
    assert torch.equal(out.logprobs, out.ref_logprobs) == (unfrozen == 0)


@families
def test_logits_and_values_of_a_model_with_a_value_head(family: str, tmp_path: Any) -> None:
    lm: Any = sharp_lm(family)
    model = AutoModelForSeq2SeqLMWithValueHead.from_pretrained(lm)
    assert isinstance(model.v_head, SummaryHead)
    torch.nn.init.normal_(model.v_head.summary.weight)
    inputs = batch_of_ids().inputs(1)
    logits, loss, values = model(**inputs)
    torch.testing.assert_close(logits, lm(**inputs).logits, rtol=0, atol=1e-5)
    assert loss is None and values.shape == inputs["decoder_input_ids"].shape and values.std() > 0.05
    options = {"max_new_tokens": 4, "do_sample": False, "attention_mask": inputs["attention_mask"]}
    ids = inputs["input_ids"]
    assert torch.equal(model.generate(input_ids=ids, **options), lm.generate(input_ids=ids, **options))
    model.save_pretrained(tmp_path)
    labels = torch.tensor([[5, 6, 0], [7, 0, -100]])
    shifted = torch.tensor([[1, 5, 6], [1, 7, 0]])  # behind the start token
    with torch.no_grad():
        by_labels = model(inputs["input_ids"][:2], inputs["attention_mask"][:2], labels=labels)
        by_ids = model(inputs["input_ids"][:2], inputs["attention_mask"][:2], decoder_input_ids=shifted)
    torch.testing.assert_close(by_labels[0], by_ids[0])
    picked = by_ids[0].log_softmax(-1).gather(2, labels.clamp(min=0)[..., None])[..., 0]
    assert float(by_labels[1]) == pytest.approx(-float(picked[labels >= 0].mean()), abs=1e-5)
    again = AutoModelForSeq2SeqLMWithValueHead.from_pretrained(
        tmp_path, attn_implementation=lm.config._attn_implementation
    )
    for one, other in zip(again(**inputs)[::2], (logits, values), strict=True):
        assert torch.equal(one, other)
    assert torch.equal(
        AutoModelForSeq2SeqLM.from_pretrained(tmp_path).get_output_embeddings().weight,
        lm.get_output_embeddings().weight,
    )


def test_models_of_the_other_kind_are_refused() -> None:
    with pytest.raises(
        ConfigError, match="AutoModelForSeq2SeqLMWithValueHead: GPT2LMHeadModel is a model of the other"
    ):
        AutoModelForSeq2SeqLMWithValueHead(tiny_lm("gpt2"))
    with pytest.raises(ConfigError, match="CausalLMWithValueHead: T5ForConditionalGeneration is a model of the other"):
        AutoModelForCausalLMWithValueHead(tiny_lm("t5"))


_STACK = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}
_GEMMA: dict[str, Any] = {"vocab_size": 32, "num_hidden_layers": 3, "pad_token_id": 1, "eos_token_id": 0, **_STACK}
_SWITCH: dict[str, Any] = {"d_model": 16, "num_heads": 2, "d_kv": 8, "d_ff": 32, "num_layers": 3, "num_experts": 2}
_IDS: dict[str, Any] = {"vocab_size": 32, "pad_token_id": 1, "eos_token_id": 0, "decoder_start_token_id": 1}
OTHERS: dict[str, Callable[[], Any]] = {
    # A decoder that takes its first token for padding unless it is told, and a soft-cap after the head.
    "t5gemma": lambda: T5GemmaConfig(encoder=dict(_GEMMA), decoder=dict(_GEMMA), **_IDS),
    # A head that looks up what the experts said.
    "switch": lambda: SwitchTransformersConfig(
        num_sparse_encoder_layers=1, num_sparse_decoder_layers=1, **_SWITCH, **_IDS
    ),
}


@pytest.mark.parametrize("unfrozen", [-1, 1, 3])
@pytest.mark.parametrize("family", OTHERS)
def test_families_with_ways_of_their_own(family: str, unfrozen: int) -> None:
    torch.manual_seed(0)
    lm = AutoModelForSeq2SeqLM.from_config(OTHERS[family]()).eval()
    disable_dropout(lm)
    with torch.no_grad():
        for parameter in lm.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    policy = valued_policy(lm, num_layers_unfrozen=unfrozen, head_blocks={"value": 1})
    policy.add_reference()
    out = policy(batch_of_ids(), reference=True)
    assert torch.equal(out.logprobs, out.ref_logprobs)
    for i, row in enumerate(rows_of_ids()):
        expected = plain_logprobs(lm, row).float()
        torch.testing.assert_close(out.logprobs[i, : len(row.response)], expected, rtol=0, atol=1e-5)
