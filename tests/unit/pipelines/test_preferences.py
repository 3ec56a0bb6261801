"""Preferences to ids: explicit and implicit prompts, text and messages, what is cut, and each bad row by its number."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st

from tests.tiny import tiny_tokenizer
from tests.unit.pipelines.templates import CHATML, FORGETFUL, HEADLESS, LLAMA, assistant, chat_tokenizer, shown, user
from tests.unit.pipelines.test_tokens import with_bos
from trlx_like.errors import DataError
from trlx_like.pipelines.preferences import Preference, encode_preferences
from trlx_like.pipelines.truncation import Lost

EOS, A, B, C, D, E = 0, 2, 3, 4, 5, 6


def encoded(*rows: Any, tokenizer: Any = None, max_length: int = 20, **options: Any) -> list[Preference]:
    return list(encode_preferences(list(rows), tokenizer or tiny_tokenizer(), max_length=max_length, **options))


def row(chosen: Any, rejected: Any, **more: Any) -> dict[str, Any]:
    return {"chosen": chosen, "rejected": rejected, **more}


def test_an_explicit_prompt() -> None:
    wanted = Preference([A, B], [C, EOS], [D, A, EOS])
    assert encoded(row("c", "da", prompt="ab"), ("ab", "c", "da"), ["ab", "c", "da"]) == [wanted] * 3
    # What the answers share stays theirs, and other columns are nobody's business.
    assert encoded(row("cd", "ce", prompt="a", id=3)) == [Preference([A], [C, D, EOS], [C, E, EOS])]
    # Without BOS, EOS is what an empty prompt is made of.
    assert encoded(("", "a", "b")) == [Preference([EOS], [A, EOS], [B, EOS])]


def test_an_implicit_prompt_is_what_both_begin_with() -> None:
    assert encoded(row("abc", "abd")) == [Preference([A, B], [C, EOS], [D, EOS])]
    assert encoded(row("abc", "abd", prompt=None)) == encoded(row("abc", "abd"))
    # Both keep a token: the shorter one its EOS.
    assert encoded(row("ab", "abc")) == [Preference([A, B], [EOS], [C, EOS])]
    # Nothing in common: an empty prompt.
    assert encoded(row("ab", "ba")) == [Preference([EOS], [A, B, EOS], [B, A, EOS])]


def test_token_ids_of_trl_are_taken_as_they_are() -> None:
    """Without EOS, without padding, and before the text that they were made of."""
    old = {"input_ids_chosen": [A, B, C, EOS], "input_ids_rejected": torch.tensor([A, B, D])}
    masks = {"attention_mask_chosen": [1, 1, 1, 0], "attention_mask_rejected": torch.tensor([1, 1, 1])}
    expected = Preference([A, B], [C], [D], margin=0.5)
    assert encoded({**old, **masks, "margin": 0.5, "prompt": "e", "chosen": "ee", "rejected": "d"}) == [expected]
    new = {"prompt_ids": [A], "chosen_ids": [B, C], "rejected_ids": [B, D]}
    assert encoded(new) == encoded(new, seq2seq=False) == [Preference([A], [B, C], [B, D])]
    with pytest.raises(DataError, match=r"^preferences\[0\]: the token id 999 is none of the \d+ of the tokenizer"):
        encoded({**new, "chosen_ids": [B, 999]})
    with pytest.raises(DataError, match=r"^preferences\[0\]: 'rejected' missing"):
        encoded({"chosen_ids": [B]})


def test_special_tokens_come_once() -> None:
    bos = with_bos()
    assert bos.bos_token_id == 2 and bos("a").input_ids == [2, 3]  # letters begin at 3 here
    assert encoded(("a", "b", "c<eos>"), tokenizer=bos) == [Preference([2, 3], [4, EOS], [5, EOS])]
    assert encoded(row("<bos>ab", "ac<eos>"), tokenizer=bos) == [Preference([2, 3], [4, EOS], [5, EOS])]
    assert encoded(row("ab", "ba"), tokenizer=bos) == [Preference([2], [3, 4, EOS], [4, 3, EOS])]
    assert encoded(row("ab", "ba"), tokenizer=with_bos(adds=False)) == encoded(row("ab", "ba"), tokenizer=bos)


def test_margins() -> None:
    margins = [encoded(row("a", "b", margin=value))[0].margin for value in (1, -0.5, "2.5", None)]
    assert margins == [1.0, -0.5, 2.5, 0.0] and encoded(row("a", "b"))[0].margin == 0.0


ASKED = [user("a"), assistant("b"), user("c")]


@pytest.mark.parametrize(
    "given_row",
    [
        row([*ASKED, assistant("d")], [*ASKED, assistant("e")]),
        row([*ASKED, assistant("d")], [*ASKED, assistant("e")], prompt=ASKED),
        row([assistant("d")], [assistant("e")], prompt=ASKED),
        (ASKED, [assistant("d")], [*ASKED, assistant("e")]),
        row([*ASKED, assistant("d")], [*ASKED, assistant("e")], prompt="a"),
    ],
)
@pytest.mark.parametrize("template", [CHATML, LLAMA])
def test_messages(given_row: Any, template: str) -> None:
    tokenizer = chat_tokenizer(template, bos=template is LLAMA)
    (preference,) = encoded(given_row, tokenizer=tokenizer, max_length=40)
    prompt = tokenizer.apply_chat_template(ASKED, add_generation_prompt=True, return_dict=False)
    assert preference.prompt == prompt
    assert (shown(tokenizer, preference.chosen), shown(tokenizer, preference.rejected)) == ("d<eos>", "e<eos>")


def test_messages_of_which_one_goes_on() -> None:
    tokenizer = chat_tokenizer(CHATML)
    (preference,) = encoded(
        row([user("a"), assistant("b"), user("c"), assistant("d")], [user("a"), assistant("b")]),
        tokenizer=tokenizer,
        max_length=40,
    )
    assert shown(tokenizer, preference.prompt) == "<|user|>a<eos> <|assistant|>"
    assert shown(tokenizer, preference.chosen) == "b<eos> <|user|>c<eos> <|assistant|>d<eos>"
    assert shown(tokenizer, preference.rejected) == "b<eos>"
    # b <eos> _ <|user|> c <eos> _ <|assistant|> d <eos>: of the chosen one the user said six tokens.
    assert (preference.chosen_mask, preference.rejected_mask) == ([True] * 2 + [False] * 6 + [True] * 2, [True] * 2)


def test_a_prompt_of_messages_keeps_its_header_when_it_is_cut() -> None:
    """`<|user|>abc<eos>_<|assistant|>` in four tokens: three from the side that stays, and the header."""
    for side, kept in (("right", "<|user|>ab<|assistant|>"), ("left", "c<eos> <|assistant|>")):
        tokenizer = chat_tokenizer(CHATML)
        tokenizer.truncation_side = side
        (cut,) = encoded(
            row([assistant("d")], [assistant("e")], prompt=[user("abc")]), tokenizer=tokenizer, max_prompt_length=4
        )
        assert (shown(tokenizer, cut.prompt), cut.lost) == (kept, Lost(prompt=3))


def test_what_others_say_is_cut_with_the_answer_and_is_not_all_that_is_left() -> None:
    """The prompt has five tokens; the chosen answer ten (two, six of others, two), the rejected one two."""
    goes_on = row([user("a"), assistant("b"), user("c"), assistant("d")], [user("a"), assistant("b")])
    tokenizer = chat_tokenizer(CHATML)
    (start,) = encoded(goes_on, tokenizer=tokenizer, max_length=9)
    assert (start.chosen_mask, start.rejected_mask) == ([True, True, False, False], [True, True])
    assert start.lost == Lost(output=6)
    (end,) = encoded(goes_on, tokenizer=tokenizer, max_length=5, truncation="keep_end")
    assert (end.chosen_mask, end.rejected_mask) == ([False] * 2 + [True] * 2, [True] * 2) and end.lost == Lost(4, 6)
    with pytest.raises(DataError, match="nothing is left of the answers"):
        encoded(
            row([user("a"), assistant("b"), user("c")], [user("a"), assistant("d")]),
            tokenizer=tokenizer,
            max_length=4,
            truncation="keep_end",
        )


def test_tools_reach_the_template() -> None:
    tokenizer = chat_tokenizer("{% for t in tools %}{{ t.name }}{% endfor %}" + CHATML)
    (preference,) = encoded(
        row([assistant("d")], [assistant("e")], prompt=[user("a")], tools=[{"name": "x"}]), tokenizer=tokenizer
    )
    assert shown(tokenizer, preference.prompt) == "x<|user|>a<eos> <|assistant|>"


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "preferences is empty"),
        ("abc", "preferences is a string; give a list"),
        ([("a", "b", "c"), 3], r"preferences\[1\] is a int; give a dict with 'chosen' and 'rejected', or \(prompt"),
        ([("a", "b")], r"preferences\[0\] is a tuple"),
        ([{"prompt": "a", "chosen": "b"}], r"preferences\[0\]: 'rejected' missing; the row has 'prompt', 'chosen'"),
        ([{"text": "a"}], r"preferences\[0\]: 'chosen' and 'rejected' missing"),
        ([row("a", None)], r"preferences\[0\]: 'rejected' missing"),
        ([row("a", "b"), row("", "b")], r"preferences\[1\]: chosen is empty"),
        ([("a", "b", "")], r"preferences\[0\]: rejected is empty"),
        ([row("ab", "ab")], r"preferences\[0\]: chosen and rejected are the same; there is nothing to prefer"),
        ([("a", "b", "b<eos>")], r"preferences\[0\]: chosen and rejected are the same; there is nothing"),
        (
            [row("a", 3)],
            r"preferences\[0\]: all must be strings, or all lists of messages, not chosen a str, rejected a",
        ),
        ([row("a", [user("a")])], r"preferences\[0\]: all must be strings"),
        (
            [row([user("a"), assistant("b")], [user("a"), assistant("c")], prompt="z")],
            r"preferences\[0\]: all must be strings.* prompt a str, chosen a list",
        ),
        ([row("a", "b", prompt=7)], r"preferences\[0\]: all must be strings.* prompt a int"),
        ([row("a", "b", margin=math.nan)], r"preferences\[0\]: margin must be a finite number, not nan"),
        ([row("a", "b", margin=True)], r"preferences\[0\]: margin must be a finite number, not True"),
        ([row("a", "b", margin="much")], r"preferences\[0\]: margin must be a finite number, not 'much'"),
        ([("abcdefgh", "a", "b")], r"preferences\[0\]: nothing is left of the answers within max_length \(8 tokens\)"),
        ([("a", "bcdefghi", "bcdefghj")], r"preferences\[0\]: chosen and rejected are the same within max_length"),
    ],
)
def test_errors_name_the_row(rows: Any, message: str) -> None:
    with pytest.raises(DataError, match=message) as error:
        encode_preferences(rows, tiny_tokenizer(), max_length=8)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("given_row", "template", "message"),
    [
        (row([user("a")], [user("b")]), CHATML, "must begin with an assistant message.* chosen goes on with 'user'"),
        (row([*ASKED, assistant("d")], [user("z"), assistant("d")]), CHATML, "must begin with an assistant message"),
        (row(ASKED, [*ASKED, assistant("d")], prompt=ASKED), CHATML, "chosen is empty after the prompt"),
        (row([*ASKED, assistant("d")], [*ASKED, assistant("d")]), CHATML, "chosen and rejected are the same"),
        (row([assistant("d")], [assistant("e")]), CHATML, "begins with an assistant message"),
        (row([user("a"), assistant("d")], [user("a"), assistant("e")]), HEADLESS, "not prefix-stable"),
        (row([user("a"), assistant("d")], [user("a"), assistant("e")]), None, "has no chat template"),
        (row([user("a"), user("b"), assistant("d")], [user("a"), user("b"), assistant("e")]), LLAMA, "alternate"),
    ],
)
def test_errors_about_messages_name_the_row(given_row: Any, template: str | None, message: str) -> None:
    good = ("a", "b", "c")
    with pytest.raises(DataError, match=rf"preferences\[1\].*{message}"):
        encoded(good, given_row, tokenizer=chat_tokenizer(template), max_length=40)


def test_a_forgetful_template_serves_where_only_the_last_turn_is_an_answer() -> None:
    tokenizer = chat_tokenizer(FORGETFUL)
    (preference,) = encoded(row([*ASKED, assistant("d")], [*ASKED, assistant("e")]), tokenizer=tokenizer)
    assert shown(tokenizer, preference.prompt) == "<|user|>a<eos><|assistant|>b<eos><|user|>c<eos><|assistant|>"
    assert shown(tokenizer, preference.chosen) == "zzd<eos>"


def test_all_dropped() -> None:
    with pytest.raises(DataError, match=r"all 2 rows are longer than max_length \(3 tokens\)"):
        encoded(("ab", "c", "d"), ("a", "bc", "d"), max_length=3, too_long="drop")


TEXT = st.text("ab", max_size=6)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(TEXT, TEXT, TEXT, st.booleans(), st.integers(1, 8), st.sampled_from(["keep_start", "keep_end"]))
def test_properties(prompt: str, chosen: str, rejected: str, explicit: bool, longest: int, truncation: Any) -> None:
    tokenizer = with_bos()
    values = row(chosen, rejected, prompt=prompt) if explicit else row(prompt + chosen, prompt + rejected)
    before = copy.deepcopy(values)
    try:
        (whole,) = encoded(values, tokenizer=tokenizer, max_length=99)
    except DataError:
        assert not values["chosen"] or not values["rejected"] or values["chosen"] == values["rejected"]
        return
    assert values == before
    # Nothing is lost or made up, whatever is called the prompt.
    for answer, text in ((whole.chosen, chosen), (whole.rejected, rejected)):
        assert shown(tokenizer, whole.prompt + answer) == f"<bos>{prompt}{text}<eos>"
        assert answer.count(EOS) == 1
    if not explicit:
        assert whole.chosen[0] != whole.rejected[0] or min(len(whole.chosen), len(whole.rejected)) == 1
    try:
        (cut,) = encoded(values, tokenizer=tokenizer, max_length=longest, truncation=truncation)
    except DataError as error:
        assert "within max_length" in str(error)
        return
    assert cut.prompt[0] == tokenizer.bos_token_id and cut.chosen and cut.rejected
    assert len(cut.prompt) + max(len(cut.chosen), len(cut.rejected)) <= longest
    whole_pairs = [(cut.chosen, whole.chosen), (cut.rejected, whole.rejected)]
    if truncation == "keep_start":
        assert cut.prompt == whole.prompt and all(long[: len(short)] == short for short, long in whole_pairs)
    else:
        assert all(long[-len(short) :] == short for short, long in whole_pairs)


def test_preferences_of_an_encoder_decoder() -> None:
    tokenizer = tiny_tokenizer(ends=True)
    options: dict[str, Any] = {"max_length": 20, "seq2seq": True}
    (row,) = encode_preferences([{"prompt": "ab", "chosen": "c", "rejected": "d"}], tokenizer, **options)
    assert (row.prompt, row.chosen, row.rejected) == ([2, 3, 0], [4, 0], [5, 0])
    with pytest.raises(DataError, match=r"preferences\[0\]: 'prompt' is missing; model.model_arch_type: seq2seq has"):
        encode_preferences([{"chosen": "c", "rejected": "d"}], tokenizer, **options)
