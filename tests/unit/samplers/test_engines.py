"""What the engine in process gives back: ids, where they end, and under which distribution they were drawn."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    GenerationConfig,
    LEDConfig,
    LogitsProcessorList,
    ModernBertDecoderConfig,
)

from tests.tiny import FAMILIES, SEQ2SEQ_FAMILIES, tiny_lm, tiny_tokenizer
from tests.unit.models.support import sharp_lm
from tests.unit.samplers.scripted import EOS, loaded_tokenizer, prompts, sampler, spelled, table, transformers_messages
from trlx_like.functional.draw import draw
from trlx_like.models.policy import LanguagePolicy
from trlx_like.samplers import drawing
from trlx_like.samplers.engines import ENGINES, TransformersEngine

PLAIN: dict[str, Any] = {"max_new_tokens": 8}


@pytest.mark.parametrize("pad", [True, False])
def test_the_first_eos_is_kept_and_nothing_after_it(pad: bool) -> None:
    # Without a pad token EOS pads, so that padding and the action look alike.
    tokenizer = loaded_tokenizer(pad)
    assert (tokenizer.pad_token_id == EOS) != pad
    out = sampler(table("abcd.", "xyx", tokenizer=tokenizer), tokenizer=tokenizer).sample(
        prompts(["c", "a", "xy", "d"], tokenizer), PLAIN
    )
    masks = [[1, 1, 0, 0, 0, 0, 0, 0], [1, 1, 1, 1, 0, 0, 0, 0], [1] * 8, [1, 0, 0, 0, 0, 0, 0, 0]]
    assert out.completion.mask.int().tolist() == masks
    assert out.outputs == ["d", "bcd", "xyxyxyxy", ""]
    assert out.finished == [True, True, False, True]
    assert out.finish_reasons == ["eos", "eos", "length", "eos"]
    lengths = out.completion.mask.sum(dim=1)
    last = out.completion.response.gather(1, lengths[:, None] - 1)[:, 0]
    assert (last == EOS).tolist() == [True, True, False, True]


def test_the_pad_token_is_an_action_like_others_where_it_is_sampled() -> None:
    allowed = table("ab.")
    allowed[3] = False
    allowed[3, 1] = True  # after "b" comes <pad>, and then EOS
    completion = sampler(allowed).sample(prompts(["a", "b"]), PLAIN).completion
    assert [ids[mask].tolist() for ids, mask in zip(completion.response, completion.mask, strict=True)] == [
        [3, 1, 0],
        [1, 0],
    ]


def test_no_wider_than_the_longest_response() -> None:
    completion = sampler(table("abcd.")).sample(prompts(["a", "c"]), PLAIN).completion
    assert completion.response.shape == completion.mask.shape == (2, 4)
    assert completion.prompt.tolist() == [[2], [4]] and completion.prompt_mask.all()


def recorded(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """Fills with the probabilities [B, V] that each token is drawn from."""
    found: list[Tensor] = []

    def seen(probabilities: Tensor, uniform: Tensor) -> Tensor:
        found.append(probabilities)
        return draw(probabilities, uniform)

    monkeypatch.setattr(drawing, "draw", seen)
    return found


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("family", FAMILIES + SEQ2SEQ_FAMILIES)
def test_what_is_scored_is_what_was_sampled_from(family: str, masked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    lm = sharp_lm(family)
    allowed = None
    if masked:
        allowed = torch.rand(32, 32, generator=torch.Generator().manual_seed(0)) < 0.5
        allowed[:, EOS] = True
    found = recorded(monkeypatch)
    torch.manual_seed(0)
    batch = prompts(["abc", "d", "efghij", "", "kl", "mn"])
    options = {"max_new_tokens": 12, "temperature": 0.7, "eos_token_id": [EOS, 5, 10, 15]}
    samples = sampler(allowed, lm=lm).sample(batch, options)
    completion = samples.completion
    lengths = completion.mask.sum(dim=1)
    assert lengths.min() < lengths.max()
    drawn = samples.sampling_logprobs
    assert drawn is not None and not drawn.is_inference()
    assert torch.isin(drawn[completion.mask], torch.cat(found).log()).all()
    scored = LanguagePolicy(lm, temperature=0.7, allowed=allowed)(completion).logprobs
    ratio = (scored - drawn)[completion.mask].exp()
    torch.testing.assert_close(ratio, torch.ones_like(ratio), rtol=0, atol=1e-5)
    assert torch.isfinite(scored).all()
    # A distribution without the temperature would be far away.
    hot = LanguagePolicy(lm, allowed=allowed)(completion).logprobs
    assert (hot - drawn)[completion.mask].abs().max() > 0.05


WARPED: list[dict[str, Any]] = [
    *({"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.2}, {"top_h": 0.4}, {"typical_p": 0.3}, {"epsilon_cutoff": 0.05}),
    {"eta_cutoff": 0.2, "top_k": 9, "top_p": 0.9, "temperature": 0.5},
]


@pytest.mark.parametrize("options", WARPED, ids=[next(iter(options)) for options in WARPED])
def test_other_distributions_are_those_of_transformers(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the first token is drawn from, against the processors that `generate` would make."""
    lm: Any = sharp_lm("llama")
    batch, found = prompts(["abc", "defg"]), recorded(monkeypatch)
    sampler(lm=lm).sample(batch, {"max_new_tokens": 1, **options})
    ids, mask = batch.tensors(1)
    config = GenerationConfig(**{"do_sample": True, "top_k": 0, **options})
    lm._prepare_special_tokens(config, device="cpu")
    theirs = lm._get_logits_processor(config, input_ids_seq_length=4, logits_processor=LogitsProcessorList())
    positions = (mask.long().cumsum(dim=1) - 1).clamp(min=0)
    scores = lm(ids, attention_mask=mask.long(), position_ids=positions).logits[:, -1]
    torch.testing.assert_close(found[0], theirs(ids, scores).softmax(dim=-1))
    assert bool((found[0] == 0).any())


@pytest.mark.parametrize("options", [{}, {"top_k": 20, "temperature": 2.0}], ids=["plain", "top_k"])
def test_a_sample_is_the_same_alone_and_in_a_batch(options: dict[str, Any]) -> None:
    """Of 32 with other lengths, in another place, engine calls of another size; another stream draws others."""
    texts = ["abcdefghij"[: 1 + number % 9] for number in range(32)]
    options = {"max_new_tokens": 6, "eos_token_id": [EOS, 5, 10], **options}
    made = sampler(lm=sharp_lm("gpt2"))
    together = made.sample(prompts(texts), options, 7).completion.split()
    other = made.sample(prompts(texts), options, 8).completion.split()
    made.batch_size = 5
    parts = made.sample(prompts(texts)[[31, *range(31)]], options, 7).completion.split()
    for number in (0, 8, 31):
        alone = made.sample(prompts(texts)[[number]], options, 7).completion.split()[0]
        assert alone.response.tolist() == together[number].response.tolist()
        assert alone.place is not None and int(alone.place) == number
    assert [row.response.tolist() for row in [*parts[1:], parts[0]]] == [row.response.tolist() for row in together]
    assert sum(a.response.tolist() != b.response.tolist() for a, b in zip(together, other, strict=True)) > 16


@pytest.mark.parametrize("family", ["llama", "t5"])
@pytest.mark.parametrize(
    "options",
    [{"no_repeat_ngram_size": 1}, {"encoder_repetition_penalty": 9.0}, {"encoder_no_repeat_ngram_size": 1}],
    ids=lambda options: next(iter(options)),
)
def test_padding_is_no_token_of_a_prompt(options: dict[str, Any], family: str) -> None:
    """The pad token is an EOS here, so that responses would end at other places."""
    lm = tiny_lm(family) if family == "t5" else sharp_lm(family)
    texts = ["a", "bcdefghij", "kl"]
    given = {"max_new_tokens": 12, "eos_token_id": [EOS, 5], **options}
    made = sampler(lm=lm, tokenizer=loaded_tokenizer(False))
    together = made.sample(prompts(texts * 8), given, 7).completion.split()
    alone = [made.sample(prompts(texts * 8)[[row]], given, 7).completion.split()[0] for row in range(24)]
    assert [row.response.tolist() for row in together] == [row.response.tolist() for row in alone]


def test_an_engine_without_keys_draws_from_seeded_generators() -> None:
    """Beams of transformers do so, too. What the rest of the process draws is not touched."""
    made = sampler(lm=sharp_lm("gpt2"))
    rows = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        expected = torch.rand(3)
        torch.manual_seed(seed)
        options = {"max_new_tokens": 6, "num_beams": 2, "do_sample": True, "temperature": 3.0}
        rows.append(made.sample(prompts(["ab", "c"]), options, 7).completion.response.tolist())
        assert torch.equal(torch.rand(3), expected)
    assert rows[0] == rows[1]
    assert rows[0] != made.sample(prompts(["ab", "c"]), options, 8).completion.response.tolist()


OWN: list[dict[str, Any]] = [
    {"top_k": 1},
    {"top_p": 0.1},
    {"temperature": 0.01, "do_sample": True},
    {"repetition_penalty": 50.0},
    {"no_repeat_ngram_size": 1},
    {"suppress_tokens": list(range(16))},
    {"min_p": 0.9, "do_sample": True},
    {"min_new_tokens": 8},
    {"eos_token_id": [5, 6, 7, 8]},
    {"forced_eos_token_id": 9},
    {"num_beams": 2},
]


@pytest.mark.parametrize("own", OWN, ids=[next(iter(own)) for own in OWN])
def test_the_models_own_generation_defaults_are_ignored(own: dict[str, Any]) -> None:
    outputs = []
    for defaults in ({}, own):
        lm = tiny_lm("llama", initializer_range=0.5)
        lm.generation_config = GenerationConfig(**defaults)
        before = lm.generation_config.to_dict()
        torch.manual_seed(1)
        completion = sampler(lm=lm).sample(prompts(["abc", "de"] * 4), {"max_new_tokens": 8}).completion
        outputs.append(completion.response.tolist())
        assert lm.generation_config.to_dict() == before and lm.config.pad_token_id == 1
    assert outputs[0] == outputs[1]
    lm = tiny_lm("llama", initializer_range=0.5)
    torch.manual_seed(1)
    asked = {name: value for name, value in own.items() if name != "num_beams"}
    given = sampler(lm=lm).sample(prompts(["abc", "de"] * 4), {"max_new_tokens": 8, **asked}).completion
    assert not asked or given.response.tolist() != outputs[0], "it would do nothing if it were followed"


@pytest.mark.parametrize("training", [True, False])
def test_the_model_is_left_as_it_was(training: bool) -> None:
    lm = tiny_lm("gpt2").train(training)
    generator = TransformersEngine(lm, tiny_tokenizer())
    defaults = lm.generation_config
    sampler(lm=lm).sample(prompts(["ab"]), PLAIN)
    assert lm.training == training and lm.generation_config is defaults and lm.config.pad_token_id == 1
    with pytest.raises(ValueError, match="max_new_tokens"):
        ids, mask = prompts(["ab"]).tensors(1)
        broken = GenerationConfig()
        broken.max_new_tokens = -1
        generator.generate(ids, mask, broken, [])
    assert lm.training == training and lm.generation_config is defaults and lm.config.pad_token_id == 1


IDS: dict[str, Any] = {"vocab_size": 32, "eos_token_id": 0, "bos_token_id": 0, "pad_token_id": 1}


@pytest.mark.parametrize("kind", ["modernbert", "led"])
def test_a_family_that_insists_on_its_pad_id_generates(kind: str) -> None:
    """ModernBERT's configuration takes no None for it, and LED's encoder pads its input to whole windows."""
    if kind == "led":
        sides = ("encoder_layers", "decoder_layers", "encoder_attention_heads", "decoder_attention_heads")
        sizes: Any = {**dict.fromkeys(sides, 2), "encoder_ffn_dim": 16, "decoder_ffn_dim": 16, "attention_window": 4}
        lm: Any = AutoModelForSeq2SeqLM.from_config(LEDConfig(d_model=16, decoder_start_token_id=1, **sizes, **IDS))
    else:
        sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
        lm = AutoModelForCausalLM.from_config(ModernBertDecoderConfig(**sizes, **IDS, cls_token_id=0, sep_token_id=0))
    lm.eval()
    samples = sampler(lm=lm).sample(prompts(["abc", "d", "efghij"]), PLAIN)
    scored, real = LanguagePolicy(lm)(samples.completion).logprobs, samples.completion.mask
    assert samples.sampling_logprobs is not None and lm.config.pad_token_id == 1
    torch.testing.assert_close(samples.sampling_logprobs[real], scored[real], rtol=0, atol=1e-5)


def test_the_head_gets_states_that_lie_together() -> None:
    lm: Any = tiny_lm("llama")
    seen: list[tuple[list[int], bool]] = []
    lm.lm_head.register_forward_hook(lambda _, args, __: seen.append((list(args[0].shape), args[0].is_contiguous())))
    mask = torch.tensor([[True] * 3, [False] * 2 + [True]])
    config = GenerationConfig(max_new_tokens=2, pad_token_id=1, eos_token_id=None)
    TransformersEngine(lm, loaded_tokenizer()).generate(torch.full((2, 3), 4), mask, config, [])
    assert [shape[:2] for shape, _ in seen] == [[2, 1], [2, 1]]  # of the prompts, too, the last position alone
    assert all(together for _, together in seen)


def test_dropout_is_off_while_it_generates() -> None:
    lm = tiny_lm("gpt2", resid_pdrop=0.9, embd_pdrop=0.9, initializer_range=0.5).train()
    greedy = {"max_new_tokens": 6, "do_sample": False}
    rows = [sampler(lm=lm).sample(prompts(["ab"]), greedy).completion.response.tolist() for _ in range(3)]
    assert (
        rows[0]
        == rows[1]
        == rows[2]
        == sampler(lm=lm.eval()).sample(prompts(["ab"]), greedy).completion.response.tolist()
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_prompts_without_padding_raise_no_warning_when_rows_end(family: str) -> None:
    # generate() drops a mask of ones; finished rows are then padded.
    with transformers_messages() as messages:
        completion = sampler(table("ab.", "xyx"), lm=tiny_lm(family)).sample(prompts(["a", "x"]), PLAIN).completion
    assert completion.mask.sum(dim=1).tolist() == [2, 8]
    assert messages == []


@pytest.mark.parametrize(
    "options",
    [
        {"do_sample": False},
        {"do_sample": False, "temperature": 0.7, "top_k": 0, "top_p": 0.9, "min_p": 0.1},
        {"do_sample": True, "temperature": 0.7, "top_k": 5},
        {"num_beams": 2, "do_sample": False},
    ],
    ids=str,
)
def test_options_raise_no_warnings(options: dict[str, Any], recwarn: pytest.WarningsRecorder) -> None:
    lm = tiny_lm()
    lm.generation_config = GenerationConfig(do_sample=True, temperature=0.5, top_p=0.5, top_k=3)
    with transformers_messages() as messages:
        sampler(lm=lm, stop=("zz",)).sample(prompts(["ab", "c"]), {**PLAIN, **options})
    assert messages == [] and not recwarn.list


@pytest.mark.parametrize("option", [{}, {"top_k": 3}, {"repetition_penalty": 1.5}, {"num_beams": 2}], ids=str)
def test_only_beams_are_left_to_generate_and_only_plain_sampling_has_log_probabilities(
    option: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = recorded(monkeypatch)
    options = {"max_new_tokens": 3, "eos_token_id": 31, **option}
    samples = sampler(lm=sharp_lm("gpt2")).sample(prompts(["ab", "c"]), options)
    assert len(found) == (0 if "num_beams" in option else 3)
    assert (samples.sampling_logprobs is None) == bool(option)


@pytest.mark.parametrize("family", FAMILIES)
def test_another_kind_of_cache_changes_nothing(family: str) -> None:
    lm, made = sharp_lm(family), []
    for option in ({}, {"cache_implementation": "static"}, {"cache_implementation": "dynamic"}, {"use_cache": False}):
        torch.manual_seed(2)
        options = {"max_new_tokens": 20, "eos_token_id": [EOS, 5], **option}
        made.append(sampler(lm=lm).sample(prompts(["ab", "cdefg", "h"]), options).completion.response.tolist())
    assert made[0] == made[1] == made[2] == made[3]


def test_greedy_is_the_likeliest_token() -> None:
    lm = sharp_lm("llama")
    completion = sampler(lm=lm).sample(prompts(["ab", "cde"]), {"max_new_tokens": 1, "do_sample": False}).completion
    for prompt, token in zip((["a", "b"], ["c", "d", "e"]), completion.response[:, 0], strict=True):
        ids = torch.tensor([tiny_tokenizer().convert_tokens_to_ids(prompt)])
        assert lm(ids).logits[0, -1].argmax() == token


STOPS: list[tuple[tuple[str, ...], list[str], list[str], list[bool]]] = [
    # stop, ids that are kept, text that is scored, finished
    ((), ["bcdefgh", "fgh.", "fgh.", "yxyxyxy"], ["bcdefgh", "fgh", "fgh", "yxyxyxy"], [False, True, True, False]),
    (("d",), ["bcd", "fgh.", "fgh.", "yxyxyxy"], ["bc", "fgh", "fgh", "yxyxyxy"], [True, True, True, False]),
    (("fg", "cde"), ["bcde", "fg", "fg", "yxyxyxy"], ["b", "", "", "yxyxyxy"], [True, True, True, False]),
    # Half of it in the prompt is no stop string.
    (("ef",), ["bcdef", "fgh.", "fgh.", "yxyxyxy"], ["bcd", "fgh", "fgh", "yxyxyxy"], [True, True, True, False]),
    (("de", "xyx"), ["bcde", "fgh.", "fgh.", "yxyx"], ["bc", "fgh", "fgh", "y"], [True] * 4),
    # Complete only with the last token that there is room for.
    (("gh", "xy"), ["bcdefgh", "fgh", "fgh", "yxy"], ["bcdef", "f", "f", "y"], [True] * 4),
    (
        ("<eos>",),
        ["bcdefgh", "fgh.", "fgh.", "yxyxyxy"],
        ["bcdefgh", "fgh", "fgh", "yxyxyxy"],
        [False, True, True, False],
    ),
]


@pytest.mark.parametrize("pad", [True, False])
@pytest.mark.parametrize(("stop", "ids", "texts", "finished"), STOPS, ids=[str(row[0]) for row in STOPS])
def test_stop_sequences(
    stop: tuple[str, ...], ids: list[str], texts: list[str], finished: list[bool], pad: bool
) -> None:
    tokenizer = loaded_tokenizer(pad)
    allowed = table("abcdefgh.", "xyx", tokenizer=tokenizer)
    batch = prompts(["a", "de", "e", "x"], tokenizer)
    out = sampler(allowed, tokenizer=tokenizer, stop=stop).sample(batch, {"max_new_tokens": 7})
    assert spelled(out.completion, tokenizer) == ids
    assert out.outputs == texts and out.finished == finished
    ends = ["eos" if spelling.endswith(".") else "stop" for spelling in ids]
    assert out.finish_reasons == [end if ended else "length" for end, ended in zip(ends, finished, strict=True)]
    assert out.samples == [p + o for p, o in zip(["a", "de", "e", "x"], texts, strict=True)]


@pytest.mark.parametrize("family", SEQ2SEQ_FAMILIES)
def test_a_decoder_begins_with_its_own_token(family: str) -> None:
    # <pad> is what these decoders begin with: after it comes "a" whatever the prompt; "d" would follow the prompt.
    allowed = table("abc", "cdef.")
    allowed[1] = False
    allowed[1, 2] = True
    lm, batch = tiny_lm(family), prompts(["c", "zzzzz"])
    out = sampler(allowed, lm=lm, separator="|").sample(batch, {"max_new_tokens": 4})
    assert spelled(out.completion) == ["abcd", "abcd"] and out.finished == [False, False]
    assert out.samples == ["c|abcd", "zzzzz|abcd"] and out.outputs == ["abcd", "abcd"] and out.prompts == ["c", "zzzzz"]
    longer = sampler(allowed, lm=lm, separator="|", stop=("de",)).sample(batch, {"max_new_tokens": 9})
    assert spelled(longer.completion) == ["abcde"] * 2 and longer.outputs == ["abc"] * 2 and all(longer.finished)
    whole = sampler(allowed, lm=lm, separator="|").sample(batch, {"max_new_tokens": 9})
    assert spelled(whole.completion) == ["abcdef."] * 2 and all(whole.finished)


def test_generation_ends_when_all_rows_have_stopped() -> None:
    lm = tiny_lm()
    steps = []
    handle = lm.register_forward_pre_hook(lambda *_: steps.append(1))
    sampler(table("abc", "cdefab"), lm=lm, stop=("d",)).sample(prompts(["a", "c"]), {"max_new_tokens": 30})
    handle.remove()
    assert len(steps) == 3


def test_a_long_stop_sequence_after_a_long_text() -> None:
    # The end of the text is all that is decoded at each step; it must reach back far enough.
    allowed = table("abcdefghijklmnopqrstuvwxyza")
    stop = "opqrstuvw"
    out = sampler(allowed, stop=(stop, "zz")).sample(prompts(["b"]), {"max_new_tokens": 40})
    assert out.outputs == ["cdefghijklmn"] and out.completion.mask.sum() == len("cdefghijklmn" + stop)


def test_the_engine_is_found_by_its_name() -> None:
    assert ENGINES.get("transformers") is TransformersEngine
