"""Messages to ids: what the assistant said is found, and templates that would have it learnt wrongly are refused."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from tests.tiny import tiny_tokenizer
from tests.unit.pipelines.templates import (
    CHATML,
    FORGETFUL,
    HEADLESS,
    LLAMA,
    assistant,
    chat_tokenizer,
    shown,
    user,
)
from trlx_like.errors import DataError
from trlx_like.pipelines.chat import encode_answer, encode_chat, encode_prompt
from trlx_like.pipelines.dialogues import Dialogue, encode_dialogues
from trlx_like.pipelines.prompts import PromptPipeline

TWO = [user("a"), assistant("bc"), user("d"), assistant("e")]


def marked(dialogue: Dialogue, tokenizer: Any) -> str:
    """The text with the outputs in brackets, one pair a token."""
    return "".join(
        f"[{token}]" if output else token
        for token, output in zip(tokenizer.convert_ids_to_tokens(dialogue.ids), dialogue.is_output, strict=True)
    )


def test_chatml_golden() -> None:
    tokenizer = chat_tokenizer(CHATML)
    # The space after <eos> is the template's, not the assistant's.
    wanted = "<|user|>a<eos> <|assistant|>[b][c][<eos>] <|user|>d<eos> <|assistant|>[e][<eos>] "
    assert marked(encode_chat(TWO, tokenizer), tokenizer) == wanted
    system = [{"role": "system", "content": "z"}, user("a")]
    prompt = encode_prompt(system, tokenizer)
    assert shown(tokenizer, prompt.ids) == "<|system|>z<eos> <|user|>a<eos> <|assistant|>"
    assert shown(tokenizer, prompt.ids[-prompt.header :]) == "<|assistant|>"
    assert marked(encode_chat(system, tokenizer), tokenizer) == "<|system|>z<eos> <|user|>a<eos> "


def test_llama_golden_with_one_bos() -> None:
    tokenizer = chat_tokenizer(LLAMA, bos=True)
    assert tokenizer("a").input_ids[0] == tokenizer.bos_token_id
    wanted = "<bos><|user|>a<|assistant|>[b][c][<eos>]<|user|>d<|assistant|>[e][<eos>]"
    assert marked(encode_chat(TWO, tokenizer), tokenizer) == wanted


def test_no_eos_where_the_template_writes_none() -> None:
    tokenizer = chat_tokenizer(CHATML.replace("<eos>", "."))
    wanted = "<|user|>a. <|assistant|>[b][c][.][ ]<|user|>d. <|assistant|>[e][.][ ]"
    assert marked(encode_chat(TWO, tokenizer), tokenizer) == wanted


def test_options_reach_the_template() -> None:
    tokenizer = chat_tokenizer("{% if tools %}{{ tools[0].name }}{% endif %}{{ extra }}" + CHATML)
    dialogue = encode_chat(TWO[:2], tokenizer, tools=[{"name": "x"}], extra="y")
    assert marked(dialogue, tokenizer) == "xy<|user|>a<eos> <|assistant|>[b][c][<eos>] "
    assert encode_chat(TWO, chat_tokenizer(None), chat_template=CHATML) == encode_chat(TWO, chat_tokenizer(CHATML))


def test_a_forgetful_template_is_refused_only_where_it_forgets() -> None:
    tokenizer = chat_tokenizer(FORGETFUL)
    assert marked(encode_chat(TWO[:2], tokenizer), tokenizer) == "<|user|>a<eos><|assistant|>[z][z][b][c][<eos>]"
    with pytest.raises(DataError, match=r"^samples\[4\]: the chat template of .* not prefix-stable.* message 1 in"):
        encode_chat(TWO, tokenizer, place="samples[4]")
    with pytest.raises(DataError, match="not prefix-stable"):
        encode_chat(TWO[:2], chat_tokenizer(HEADLESS))


def test_an_answer_begins_where_its_prompt_ends() -> None:
    tokenizer = chat_tokenizer(CHATML)
    answer = encode_answer(TWO[:1], TWO[1:], tokenizer)
    assert shown(tokenizer, answer.prompt.ids) == "<|user|>a<eos> <|assistant|>"
    assert shown(tokenizer, answer.prompt.ids[-answer.prompt.header :]) == "<|assistant|>"
    # What the user says in between is no output.
    assert (
        marked(Dialogue(answer.ids, answer.assistant_mask), tokenizer)
        == "[b][c][<eos>] <|user|>d<eos> <|assistant|>[e][<eos>]"
    )
    # The last answer may be written otherwise, as long as it begins with what it is generated after.
    assert shown(tokenizer, encode_answer(TWO[:3], TWO[3:], chat_tokenizer(FORGETFUL)).ids) == "zze<eos>"
    with pytest.raises(DataError, match=r"message 1 in other tokens"):
        encode_answer(TWO[:1], TWO[1:], chat_tokenizer(FORGETFUL))
    with pytest.raises(DataError, match=r"rows\[2\]: the chat template"):
        encode_answer(TWO[:1], TWO[1:2], chat_tokenizer(HEADLESS), place="rows[2]")


@pytest.mark.parametrize(
    ("messages", "template", "message"),
    [
        ([], CHATML, r"m\[0\] must be a list of messages, not \[\]"),
        ("abc", CHATML, r"m\[0\] must be a list of messages, not 'abc'"),
        (["a"], CHATML, r"m\[0\] must be a list of messages"),
        ([user("a"), "b"], CHATML, r"m\[0\]: message 1 must have a role and content"),
        ([{"content": "a"}], CHATML, r"m\[0\]: message 0 must have a role and content"),
        ([user("a"), {"role": "assistant"}], CHATML, r"m\[0\]: message 1 \(assistant\) has no content"),
        ([user("a"), assistant(None)], CHATML, r"m\[0\]: message 1 \(assistant\) has no content"),  # type: ignore[arg-type]
        ([assistant("a")], CHATML, r"m\[0\] begins with an assistant message"),
        ([user("a"), user("b")], LLAMA, r"m\[0\]: the chat template refuses the messages: roles must alternate"),
        ([user("a")], "{{ 1 / 0 }}", r"m\[0\]: the chat template refuses the messages: division by zero"),
        ([user("a")], "{{ range(10 ** 9) }}", r"m\[0\]: the chat template refuses the messages: Range too big"),
        ([user("a")], "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "refuses the messages: maximum recursion"),
        (TWO, None, r"m\[0\] has messages, but the tokenizer has no chat template"),
    ],
)
def test_errors_name_the_place(messages: Any, template: str | None, message: str) -> None:
    with pytest.raises(DataError, match=message) as error:
        encode_chat(messages, chat_tokenizer(template), place="m[0]")
    assert "\n" not in str(error.value)


def test_a_prompt_cannot_end_with_an_answer() -> None:
    with pytest.raises(DataError, match=r"prompts\[1\] ends with an assistant message"):
        PromptPipeline(["a", TWO], 20, chat_tokenizer(CHATML))


WORDS = st.text("abc", min_size=1, max_size=3)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.lists(st.tuples(WORDS, WORDS), min_size=1, max_size=4), st.sampled_from([CHATML, LLAMA]))
def test_outputs_are_the_answers_and_what_ends_them(pairs: list[tuple[str, str]], template: str) -> None:
    tokenizer = chat_tokenizer(template, bos=template is LLAMA)
    messages = [message for asked, said in pairs for message in (user(asked), assistant(said))]
    before = copy.deepcopy(messages)
    dialogue = encode_chat(messages, tokenizer)
    assert messages == before
    assert dialogue.ids == tokenizer.apply_chat_template(messages, return_dict=False)
    said = [token for token, output in zip(dialogue.ids, dialogue.is_output, strict=True) if output]
    assert shown(tokenizer, said) == "".join(f"{answer}<eos>" for _, answer in pairs)


# The pipelines take messages wherever they take text.


def test_dialogues_take_messages() -> None:
    tokenizer = chat_tokenizer(CHATML)
    chat = encode_chat(TWO, tokenizer)
    samples = [TWO, {"messages": TWO, "source": "x"}, "ab", ("a", "b")]
    encoded = encode_dialogues(samples, tokenizer, 40)
    assert encoded[:2] == [chat, chat]
    assert encoded[2:] == encode_dialogues(samples[2:], tokenizer, 40)
    tools = chat_tokenizer("{% for t in tools %}{{ t.name }}{% endfor %}{{ extra }}" + CHATML)
    row = {"messages": TWO, "tools": [{"name": "x"}], "chat_template_kwargs": {"extra": "y"}}
    (with_tools,) = encode_dialogues([row], tools, 40)
    assert shown(tools, with_tools.ids).startswith("xy<|user|>a<eos>")


def test_dialogues_name_the_row_of_messages_they_cannot_use() -> None:
    with pytest.raises(DataError, match=r"samples\[1\] has no assistant message"):
        encode_dialogues(["a", [user("a")]], chat_tokenizer(CHATML), 40)
    with pytest.raises(DataError, match=r"samples\[1\] has messages, but the tokenizer has no chat template"):
        encode_dialogues(["a", TWO], tiny_tokenizer(), 40)
    with pytest.raises(DataError, match=r"samples\[0\]: no output is left within train\.seq_length \(4 tokens\)"):
        encode_dialogues([TWO], chat_tokenizer(CHATML), 4)


def test_prompts_take_messages() -> None:
    tokenizer = chat_tokenizer(CHATML)
    made = PromptPipeline(["ab", [user("c")], {"prompt": [user("d")], "goal": 1}, "b"], 20, tokenizer)
    assert [shown(tokenizer, ids) for ids in made.ids] == [
        "ab",
        "<|user|>c<eos> <|assistant|>",
        "<|user|>d<eos> <|assistant|>",
        "b",
    ]
    assert made.metadata == [{}, {"messages": [user("c")]}, {"messages": [user("d")], "goal": 1}, {}]


def test_prompts_of_messages_have_one_bos_and_see_tools() -> None:
    tokenizer = chat_tokenizer(LLAMA, bos=True)
    made = PromptPipeline([[user("c")], "d"], 20, tokenizer)
    assert [shown(tokenizer, ids) for ids in made.ids] == ["<bos><|user|>c<|assistant|>", "<bos>d"]
    tokenizer = chat_tokenizer("{% for t in tools %}{{ t.name }}{% endfor %}" + CHATML)
    made = PromptPipeline([{"prompt": [user("c")], "tools": [{"name": "x"}]}], 20, tokenizer)
    assert shown(tokenizer, made.ids[0]).startswith("x<|user|>")
    assert made.metadata == [{"messages": [user("c")], "tools": [{"name": "x"}]}]
