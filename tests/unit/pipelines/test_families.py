"""Conversations under the chat templates of model families: which tokens there are, and which are learned."""

from __future__ import annotations

import json
import logging
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from tests.unit.pipelines.families import FAMILIES, family_tokenizer
from tests.unit.pipelines.templates import assistant, user
from trlx_like.errors import ConfigError, DataError
from trlx_like.pipelines.chat import common_options, encode_answer, encode_chat, encode_prompt
from trlx_like.pipelines.dialogues import Dialogue, encode_dialogues
from trlx_like.pipelines.preferences import encode_preferences
from trlx_like.pipelines.prompts import PromptPipeline

SYSTEM = {"role": "system", "content": "Be brief."}
TWO = [user("Hi"), assistant("Yo"), user("2+2?"), assistant("4")]

# What is written, with what is learned between « and ».
GOLDEN = {
    "qwen2": (
        "<|im_start|>system\nBe brief.<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n«Yo<|im_end|>»\n"
        "<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n«4<|im_end|>»\n"
    ),
    "llama3": (
        "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n«Yo<|eot_id|>»"
        "<|start_header_id|>user<|end_header_id|>\n\n2+2?<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n«4<|eot_id|>»"
    ),
    "mistral": "<s>[INST] Hi[/INST]« Yo</s>»[INST] 2+2?[/INST]« 4</s>»",
    "gemma": (  # EOS is another token than what ends a turn, so all that follows an answer is part of it
        "<bos><start_of_turn>user\nHi<end_of_turn>\n<start_of_turn>model\n«Yo<end_of_turn>\n»"
        "<start_of_turn>user\n2+2?<end_of_turn>\n<start_of_turn>model\n«4<end_of_turn>\n»"
    ),
    "phi3": (  # EOS at the end of the conversation only
        "<|system|>\nBe brief.<|end|>\n<|user|>\nHi<|end|>\n<|assistant|>\n«Yo<|end|>\n»"
        "<|user|>\n2+2?<|end|>\n<|assistant|>\n«4<|end|>\n<|endoftext|>»"
    ),
    "zephyr": (
        "<|system|>\nBe brief.</s>\n<|user|>\nHi</s>\n<|assistant|>\n«Yo</s>»\n"
        "<|user|>\n2+2?</s>\n<|assistant|>\n«4</s>»\n"
    ),
    "chatml": (
        "<|im_start|>system\nBe brief.<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n«Yo<|im_end|>»\n"
        "<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n«4<|im_end|>»\n"
    ),
    "alpaca": (
        "<s>Be brief.\n\n### Instruction:\nHi\n\n### Response:\n«Yo</s>»\n\n"
        "### Instruction:\n2+2?\n\n### Response:\n«4</s>»\n\n"
    ),
    "vicuna": "<s>Be brief. USER: Hi ASSISTANT:« Yo</s>»USER: 2+2? ASSISTANT:« 4</s>»",
    "qwen3": (  # only the last answer has a thought
        "<|im_start|>system\nBe brief.<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n«Yo<|im_end|>»\n"
        "<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n«<think>\n\n</think>\n\n4<|im_end|>»\n"
    ),
}
NO_SYSTEM = {"mistral", "gemma"}
STABLE = sorted(set(FAMILIES) - {"qwen3"})
HEADERS = {
    "qwen2": "<|im_start|>assistant\n",
    "llama3": "<|start_header_id|>assistant<|end_header_id|>\n\n",
    "mistral": "",
    "gemma": "<start_of_turn>model\n",
    "phi3": "<|assistant|>\n",
    "zephyr": "<|assistant|>\n",
    "chatml": "<|im_start|>assistant\n",
    "alpaca": "### Response:\n",
    "vicuna": "ASSISTANT:",
    "qwen3": "<|im_start|>assistant\n",
}


def conversation(family: str) -> list[dict[str, str]]:
    return TWO if family in NO_SYSTEM else [SYSTEM, *TWO]


def learned(dialogue: Dialogue, tokenizer: Any) -> str:
    """The text, with « before and » after what is learned."""
    text, before = "", False
    for token, output in zip(tokenizer.convert_ids_to_tokens(dialogue.ids), dialogue.is_output, strict=True):
        text += ("«" if output else "»") * (output != before) + token
        before = output
    return text + "»" * before


@pytest.mark.parametrize("family", STABLE)
def test_golden_by_prefix(family: str) -> None:
    tokenizer = family_tokenizer(family)
    assert learned(encode_chat(conversation(family), tokenizer), tokenizer) == GOLDEN[family]


@pytest.mark.parametrize("family", FAMILIES)
def test_golden_by_marks(family: str) -> None:
    tokenizer = family_tokenizer(family, marked=True)
    assert learned(encode_chat(conversation(family), tokenizer), tokenizer) == GOLDEN[family]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_prompt_ends_with_the_header_of_an_answer(family: str) -> None:
    tokenizer = family_tokenizer(family)
    asked = conversation(family)[:-1]
    prompt = encode_prompt(asked, tokenizer)
    whole = GOLDEN[family].replace("»", "").split("«")
    assert tokenizer.decode(prompt.ids) == "".join(whole[:2])
    assert tokenizer.decode(prompt.ids[len(prompt.ids) - prompt.header :]) == HEADERS[family]


WORDS = st.text("ab \n.", min_size=1, max_size=4).filter(lambda text: text == text.strip())


@settings(max_examples=80, deadline=None, derandomize=True)
@given(st.lists(st.tuples(WORDS, WORDS), min_size=1, max_size=3), st.sampled_from(STABLE), st.booleans())
def test_marks_and_prefix_agree(pairs: list[tuple[str, str]], family: str, system: bool) -> None:
    messages = [message for asked, said in pairs for message in (user(asked), assistant(said))]
    if system and family not in NO_SYSTEM:
        messages = [SYSTEM, *messages]
    by_prefix = encode_chat(messages, family_tokenizer(family))
    assert by_prefix == encode_chat(messages, family_tokenizer(family, marked=True))
    # Each answer follows what it would be generated after, and is learned with what ends it.
    tokenizer = family_tokenizer(family)
    text = learned(by_prefix, tokenizer)
    assert text.count("«") == len(pairs)
    for at in [at for at, message in enumerate(messages) if message["role"] == "assistant"]:
        prompt = encode_prompt(messages[:at], tokenizer).ids
        assert by_prefix.ids[: len(prompt)] == prompt and by_prefix.is_output[len(prompt)]
        assert not by_prefix.is_output[len(prompt) - 1]


@pytest.mark.parametrize("family", FAMILIES)
def test_bos_and_eos_are_never_doubled(family: str) -> None:
    """The tokenizers of six families add BOS by themselves; five templates write it, Zephyr's does not."""
    tokenizer, tokens = family_tokenizer(family), FAMILIES[family]
    assert (tokenizer("Hi").input_ids[0] == tokenizer.bos_token_id) == (tokens.bos is not None)
    dialogue = encode_chat(conversation(family)[:3] if family != "mistral" else TWO[:2], tokenizer)
    assert dialogue.ids.count(tokenizer.bos_token_id) == (tokens.bos is not None and family != "zephyr")
    # Answers that bring their own EOS, and prompts that were rendered before.
    ended = [*TWO[:1], assistant("Yo" + tokens.eos)]
    if family != "gemma":  # whose template writes no EOS
        assert encode_chat(ended, tokenizer) == encode_chat(TWO[:2], tokenizer)
        assert encode_answer(ended[:1], ended[1:], tokenizer) == encode_answer(TWO[:1], TWO[1:2], tokenizer)
    rendered: Any = tokenizer.apply_chat_template(TWO[:1], tokenize=False, add_generation_prompt=True)
    made = PromptPipeline([TWO[:1], rendered], 200, tokenizer)
    assert made.ids[0] == encode_prompt(TWO[:1], tokenizer).ids
    own = [tokenizer.bos_token_id] if family == "zephyr" else []  # plain text gets what the tokenizer adds to text
    assert made.ids[1] == own + made.ids[0]
    for ids in (dialogue.ids, *made.ids):
        assert not any(pair in ((e, e) for e in tokenizer.all_special_ids) for pair in pairwise(ids))


def test_an_eos_that_only_the_answer_brings_stays() -> None:
    tokenizer = family_tokenizer("gemma")
    dialogue = encode_chat([user("Hi"), assistant("Yo<eos>")], tokenizer)
    assert learned(dialogue, tokenizer).endswith("«Yo<eos>»<end_of_turn>\n")


# Templates that are not prefix-stable.


def test_thoughts_of_earlier_turns() -> None:
    """Qwen3 takes them out: refused by prefix, learned as the template writes it with marks; one answer is fine."""
    said = [user("Hi"), assistant("<think>\nhm\n</think>\n\nYo"), user("2+2?"), assistant("<think>\nso\n</think>\n\n4")]
    plain, marked = family_tokenizer("qwen3"), family_tokenizer("qwen3", marked=True)
    with pytest.raises(
        DataError, match=r"samples\[3\]: the chat template .* not prefix-stable: it writes message 1 .*"
    ):
        encode_chat(said, plain, place="samples[3]")
    text = learned(encode_chat(said, marked), marked)
    assert text.split("«")[1] == "Yo<|im_end|>»\n<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n"
    assert text.split("«")[2] == "<think>\nso\n</think>\n\n4<|im_end|>»\n"
    for tokenizer in (plain, marked):
        assert learned(encode_chat(said[:2], tokenizer), tokenizer).split("«")[1] == (
            "<think>\nhm\n</think>\n\nYo<|im_end|>»\n"
        )


def test_a_thought_that_the_header_opens_is_no_output() -> None:
    for marked in (False, True):
        tokenizer = family_tokenizer("qwen3", marked)
        dialogue = encode_chat(TWO[:2], tokenizer, enable_thinking=False)
        assert learned(dialogue, tokenizer).endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n«Yo<|im_end|>»\n")


def test_a_prompt_may_have_earlier_answers_whatever_the_template_does_to_them() -> None:
    tokenizer = family_tokenizer("qwen3")
    asked = [user("Hi"), assistant("<think>\nhm\n</think>\n\nYo"), user("2+2?")]
    assert "Yo<|im_end|>\n<|im_start|>user\n2+2?" in tokenizer.decode(PromptPipeline([asked], 200, tokenizer).ids[0])


def test_a_template_that_moves_the_system_prompt_is_refused() -> None:
    """Mistral writes it before the last question, and once it is answered not at all."""
    tokenizer = family_tokenizer("mistral")
    assert "Be brief.\n\nHi" in tokenizer.decode(encode_prompt([SYSTEM, *TWO[:1]], tokenizer).ids)
    with pytest.raises(DataError, match="not prefix-stable"):
        encode_chat([SYSTEM, *TWO[:2]], tokenizer)


def test_tokens_that_grow_together_at_the_border_are_refused() -> None:
    """The line break of the header and that of the answer are one token: not what would be generated."""
    with pytest.raises(DataError, match=r"not prefix-stable: it writes message 1 in other tokens"):
        encode_chat([user("Hi"), assistant("\nYo")], family_tokenizer("qwen2"))


@pytest.mark.parametrize(
    ("family", "messages", "message"),
    [
        ("gemma", [SYSTEM, *TWO], "refuses the messages: System role not supported"),
        ("mistral", [user("a"), user("b"), assistant("c")], "refuses the messages: conversation roles must alternate"),
        ("phi3", [user("a"), {"role": "assistant", "content": 5}], "refuses the messages: unsupported operand"),
    ],
)
def test_what_a_template_refuses_is_one_line_with_the_place(family: str, messages: list[Any], message: str) -> None:
    with pytest.raises(DataError, match=rf"^samples\[1\]: the chat template {message}") as error:
        encode_dialogues(["a", messages], family_tokenizer(family), 200)
    assert "\n" not in str(error.value)


def test_marks_around_nothing_are_an_error() -> None:
    tokenizer = family_tokenizer("qwen2")
    tokenizer.chat_template += "{% if never %}{% generation %}x{% endgeneration %}{% endif %}"
    with pytest.raises(DataError, match="has generation marks, but none around what is said here"):
        encode_chat(TWO, tokenizer)


def test_an_answer_ends_with_its_eos_also_where_that_is_not_marked() -> None:
    tokenizer = family_tokenizer("zephyr")
    tokenizer.chat_template = (
        "{% for m in messages %}<|{{ m.role }}|>\n{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
        "{% endgeneration %}{% else %}{{ m.content }}{% endif %}{{ eos_token }}\n{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
    )
    assert learned(encode_chat([SYSTEM, *TWO], tokenizer), tokenizer) == GOLDEN["zephyr"]


def test_where_turns_do_not_end_with_eos_the_log_says_so(caplog: pytest.LogCaptureFixture) -> None:
    told = r"writes the answer '.' as '.<end_of_turn>\n', which does not end with the tokenizer's EOS, '<eos>'"
    with caplog.at_level(logging.WARNING, "trlx_like"):
        PromptPipeline(["a", TWO[:1], TWO[:1]], 200, family_tokenizer("gemma"))
        assert [told in record.getMessage() for record in caplog.records] == [True]
        caplog.clear()
        tokenizer = family_tokenizer("gemma")
        encode_dialogues(["a", TWO, TWO], tokenizer, 200)
        encode_dialogues([TWO], tokenizer, 200)  # of the same run: it is said once
        assert [told in record.getMessage() for record in caplog.records] == [True]
        caplog.clear()
        tokenizer = family_tokenizer("gemma", eos="<end_of_turn>")
        (dialogue,) = encode_dialogues([TWO], tokenizer, 200)
        PromptPipeline([TWO[:1]], 200, tokenizer)
    assert not caplog.records
    assert learned(dialogue, tokenizer).endswith("«4<end_of_turn>»\n")


# Tools.


def get_weather(city: str) -> str:
    """
    Says what the weather is like.

    Args:
        city: Name of the city.
    """
    return city


WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Says what the weather is like.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "description": "Name of the city."}},
            "required": ["city"],
        },
        "return": {"type": "string"},
    },
}
CALL = {"type": "function", "function": {"name": "get_weather", "arguments": {"city": "Rome"}}}
CALLED: list[dict[str, Any]] = [
    user("Rome?"),
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": "21", "name": "get_weather"},
    assistant("21 degrees"),
]
SAID = {
    "qwen2": (
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call><|im_end|>',
        "<|im_end|>",
    ),
    "llama3": ('{"name": "get_weather", "parameters": {"city": "Rome"}}<|eot_id|>', "<|eot_id|>"),
    "mistral": ('[TOOL_CALLS] [{"arguments": {"city": "Rome"}, "name": "get_weather"}]</s>', "</s>"),
}


@pytest.mark.parametrize("marked", [False, True])
@pytest.mark.parametrize("family", SAID)
def test_calls_are_learned_and_what_tools_answer_is_not(family: str, marked: bool) -> None:
    tokenizer = family_tokenizer(family, marked)
    dialogue = encode_chat(CALLED, tokenizer, tools=[WEATHER])
    text = learned(dialogue, tokenizer)
    call, end = SAID[family]
    first, second = [part.split("»")[0] for part in text.split("«")[1:]]
    assert sorted(first) == sorted(call)  # the order of keys is the JSON filter's
    assert first.startswith(call[:12]) and first.endswith(end)
    assert second.strip() == "21 degrees" + end
    assert "get_weather" in text.split("«")[0] and "21" in text.split("»")[1].split("«")[0]


def test_tools_of_a_row_come_before_those_of_all() -> None:
    tokenizer = family_tokenizer("qwen2")
    other = {"type": "function", "function": {"name": "other", "parameters": {}}}
    everywhere = {"tools": [WEATHER]}
    rows: list[Any] = [{"prompt": TWO[:1]}, {"prompt": TWO[:1], "tools": [other]}, {"prompt": TWO[:1], "tools": []}]
    made = PromptPipeline([*rows, TWO[:1], "Hi"], 900, tokenizer, template=everywhere)
    names = [("get_weather" in text, '"other"' in text) for text in tokenizer.batch_decode(list(made.ids))]
    assert names == [(True, False), (False, True), (False, False), (True, False), (False, False)]
    samples = encode_dialogues([TWO, {"messages": TWO, "tools": [other]}], tokenizer, 900, template=everywhere)
    assert ["get_weather" in tokenizer.decode(sample.ids) for sample in samples] == [True, False]
    pair = {"prompt": TWO[:1], "chosen": TWO[1:2], "rejected": [assistant("No")]}
    pairs = encode_preferences([pair, {**pair, "tools": [other]}], tokenizer, max_length=900, template=everywhere)
    assert ["get_weather" in tokenizer.decode(pair.prompt) for pair in pairs] == [True, False]


def test_tools_as_text() -> None:
    tokenizer = family_tokenizer("llama3")
    rows = [{"messages": TWO, "tools": tools} for tools in ([WEATHER], json.dumps([WEATHER]))]
    first, second = encode_dialogues(rows, tokenizer, 900)
    assert first == second and "get_weather" in tokenizer.decode(first.ids)
    for wrong in ("get_weather", "{}"):
        with pytest.raises(DataError, match=r"^samples\[1\]: tools must be a list of JSON schemas, or such .* not '"):
            encode_dialogues([TWO, {"messages": TWO, "tools": wrong}], tokenizer, 900)


def test_functions_become_schemas() -> None:
    expected = {"tools": [WEATHER, WEATHER, WEATHER], "enable_thinking": False}
    named = f"{__file__}:get_weather"
    assert common_options({"tools": [get_weather, WEATHER, named], "enable_thinking": False}) == expected
    assert common_options({"extra": 1}) == {"extra": 1}

    def undocumented(city):  # type: ignore[no-untyped-def]
        return city

    with pytest.raises(
        ConfigError, match=r"^tokenizer\.chat_template_kwargs\.tools: 'undocumented' must be a function"
    ):
        common_options({"tools": [undocumented]})


# Truncation.


def test_a_prompt_that_is_cut_keeps_its_header_and_bos(caplog: pytest.LogCaptureFixture) -> None:
    """Of 27 tokens nine are lost: BOS, and the seven tokens of the header, stay whichever side is cut."""
    kept = {
        "left": "<bos>lo there<end_of_turn>\n<start_of_turn>model\n",
        "right": "<bos><start_of_turn>user\nHell<start_of_turn>model\n",
    }
    for side, text in kept.items():
        caplog.clear()
        tokenizer = family_tokenizer("gemma", eos="<end_of_turn>")
        tokenizer.truncation_side = side
        with caplog.at_level(logging.WARNING, "trlx_like"):
            made = PromptPipeline([[user("Hello there")]], 18, tokenizer)
        assert (len(made.ids[0]), tokenizer.decode(made.ids[0])) == (18, text)
        assert "1 of 1 prompts are longer than train.seq_length less max_new_tokens (18 tokens)" in caplog.text
