"""Each form in which data is published, with rows as published, cut short."""

from __future__ import annotations

from typing import Any

import pytest

from trlx_like.errors import DataError
from trlx_like.pipelines.forms import as_preference, as_prompt, as_sample, paired, reward_of

GSM8K = {"question": "How many clips?", "answer": "48+24 = <<48+24=72>>72\n#### 72"}
MATH = {"problem": "Find $x$.", "level": "Level 5", "type": "Algebra", "solution": "$\\boxed{2}$"}
ALPACA = {"instruction": "Name the odd one.", "input": "Twitter, Telegram", "output": "Telegram", "text": "Below is"}
NO_INPUT = {"instruction": "Give three tips.", "input": "", "output": "1. Eat."}
DOLLY = {"instruction": "When?", "context": "In 2000.", "response": "2000", "category": "closed_qa"}
SHAREGPT: dict[str, Any] = {
    "id": "QWJhYvA_0",
    "system": "Be brief.",
    "conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}],
}
HI = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
HELLO = {"role": "assistant", "content": "Hello"}
NO = {"role": "assistant", "content": "No"}
SHAREGPT_PAIR = {
    "conversations": SHAREGPT["conversations"][:1],
    "chosen": {"from": "gpt", "value": "Hello"},
    "rejected": {"from": "gpt", "value": "No"},
}
ASKED = "\n\nHuman: Hi\n\nAssistant: Yes?\n\nHuman: Where?\n\nAssistant:"
HH = {"chosen": f"{ASKED} I don't know.", "rejected": f"{ASKED} I won't say."}
BINARIZED = {
    "prompt": "Hi",
    "prompt_id": "f0e3",
    "chosen": [{"content": "Hi", "role": "user"}, {"content": "Hello", "role": "assistant"}],
    "rejected": [{"content": "Hi", "role": "user"}, {"content": "No", "role": "assistant"}],
    "messages": [{"content": "Hi", "role": "user"}, {"content": "Hello", "role": "assistant"}],
    "score_chosen": 8.5,
    "score_rejected": 7.0,
}
ANSWERS = {name: BINARIZED[name] for name in ("chosen", "rejected")}
ULTRAFEEDBACK = {
    "source": "evol_instruct",
    "instruction": "Hi",
    "models": ["a", "b", "c"],
    "completions": [
        {"model": "a", "response": "fair", "overall_score": 6.5},
        {"model": "b", "response": "good", "overall_score": 8.0},
        {"model": "c", "response": "bad", "overall_score": 2.0},
    ],
    "correct_answers": ["None"],
}
ORCA = {"system": "", "question": "Hi", "chosen": "Hello", "rejected": "No"}
KTO = [
    {"prompt": "Hi", "completion": "Hello", "label": True},
    {"prompt": "Hi", "completion": "No", "label": False},
    {"prompt": "Bye", "completion": "See you", "label": True},
]
IMDB = {"text": "I rented this film.", "label": 0}


@pytest.mark.parametrize(
    ("row", "prompt"),
    [
        ("Hi", "Hi"),
        (IMDB, {"prompt": "I rented this film.", "label": 0}),
        (GSM8K, {"prompt": "How many clips?", "answer": GSM8K["answer"]}),
        (MATH, {"prompt": "Find $x$.", "level": "Level 5", "type": "Algebra", "solution": MATH["solution"]}),
        (NO_INPUT, {"prompt": "Give three tips.", "output": "1. Eat."}),
        (SHAREGPT, {"prompt": HI, "reference": "Hello", "id": "QWJhYvA_0", "system": "Be brief."}),
        ({"messages": [*HI, HELLO]}, {"prompt": HI, "reference": "Hello"}),
        ({"messages": HI}, {"prompt": HI}),
        (HH, {"prompt": ASKED, "chosen": " I don't know.", "rejected": " I won't say."}),
        (BINARIZED, BINARIZED),
        ({**ANSWERS, "text": None}, {**ANSWERS, "text": None, "prompt": HI[1:]}),
        ({"prompt": None, "text": "Hi"}, {"prompt": "Hi"}),
        ({"caption": "a cat"}, {"caption": "a cat"}),
        ({"prompt": "Hi", "system_prompt": "Be brief."}, {"prompt": "Be brief.\n\nHi", "system_prompt": "Be brief."}),
        ({"prompt": HI[1:], "system": "Be brief."}, {"prompt": HI, "system": "Be brief."}),
        ({"prompt": HI, "system": "Be brief."}, {"prompt": HI, "system": "Be brief."}),
        ({"messages": [*HI[1:], HELLO], "system": ""}, {"prompt": HI[1:], "reference": "Hello", "system": ""}),
    ],
)
def test_prompts(row: Any, prompt: Any) -> None:
    assert as_prompt(row) == prompt
    assert as_prompt(as_prompt(row)) == prompt  # the system prompt is not put before it twice


@pytest.mark.parametrize(
    ("row", "sample"),
    [
        (IMDB, "I rented this film."),
        (GSM8K, ("How many clips?", GSM8K["answer"])),
        ({"answer": "2", **MATH}, ("Find $x$.", "$\\boxed{2}$")),  # as MATH-500
        (ALPACA, ("Name the odd one.\n\nTwitter, Telegram", "Telegram")),
        (NO_INPUT, ("Give three tips.", "1. Eat.")),
        (DOLLY, ("When?\n\nIn 2000.", "2000")),
        (SHAREGPT, [*HI, HELLO]),
        (BINARIZED, BINARIZED["messages"]),
        ({"prompt": HI, "completion": [HELLO]}, [*HI, HELLO]),
        ({"prompt": HI, "completion": "Hello"}, [*HI, HELLO]),
        ({"prompt": "Hi", "completion": [HELLO]}, [*HI[1:], HELLO]),
        ({"prompt": "Hi", "completion": [HELLO], "system": "Be brief."}, [*HI, HELLO]),
        ({**ALPACA, "system": "Be brief."}, ("Be brief.\n\nName the odd one.\n\nTwitter, Telegram", "Telegram")),
        (KTO[0], ("Hi", "Hello")),
        ({"prompt": "Hi", "output": "Hello", "messages": None}, ("Hi", "Hello")),  # columns of a mixture of tables
    ],
)
def test_samples(row: Any, sample: Any) -> None:
    read = as_sample(row)
    if isinstance(sample, tuple):
        assert (read["prompt"], read["output"]) == sample
    else:
        assert (read["messages"] if isinstance(sample, list) else read) == sample


@pytest.mark.parametrize(
    ("row", "prompt", "chosen", "rejected"),
    [
        (HH, ASKED, " I don't know.", " I won't say."),
        (BINARIZED, None, BINARIZED["chosen"], BINARIZED["rejected"]),
        ({**ANSWERS, "system": "Be brief."}, None, [*HI, HELLO], [*HI, NO]),
        ({**BINARIZED, "prompt": "Hi\n", "system": "Be brief."}, None, [*HI, HELLO], [*HI, NO]),
        ({"prompt": "Hi", "chosen": [HELLO], "rejected": [NO]}, HI[1:], [HELLO], [NO]),
        ({"prompt": HI, "chosen": "Hello", "rejected": "No"}, HI, [HELLO], [NO]),
        ({**SHAREGPT_PAIR, "system": "Be brief."}, HI, [HELLO], [NO]),
        ({**SHAREGPT_PAIR, "chosen": "Hello", "rejected": "No"}, HI[1:], [HELLO], [NO]),
        ({**SHAREGPT_PAIR, "conversations": SHAREGPT["conversations"]}, HI[1:], [HELLO], [NO]),
        (ULTRAFEEDBACK, "Hi", "good", "bad"),
        (ORCA, "Hi", "Hello", "No"),
        ({**ORCA, "system": "Be kind."}, "Be kind.\n\nHi", "Hello", "No"),
        ({"chosen": "one", "rejected": "two"}, None, "one", "two"),
    ],
)
def test_preferences(row: Any, prompt: Any, chosen: Any, rejected: Any) -> None:
    read = as_preference(row)
    assert (read.get("prompt"), read["chosen"], read["rejected"]) == (prompt, chosen, rejected)


def test_labels_make_pairs_of_the_answers_to_one_prompt() -> None:
    assert paired(KTO, "preferences") == [{"prompt": "Hi", "chosen": "Hello", "rejected": "No"}]
    for yes, no in (("True", "False"), (1, 0), ("1", "0")):  # of a csv, and of tables without true and false
        rows = [{**row, "label": yes if row["label"] else no} for row in KTO]
        assert paired(rows, "preferences") == paired(KTO, "preferences")
    assert paired([BINARIZED], "preferences") == [BINARIZED]
    unasked = [{**row, "prompt": ""} for row in KTO]
    assert paired(unasked, "preferences") == [{"prompt": "", "chosen": "Hello", "rejected": "No"}]
    with pytest.raises(DataError, match="preferences has labels, but no prompt has two answers"):
        paired(KTO[1:], "preferences")
    with pytest.raises(DataError, match=r"preferences\[0\] has a label, so it needs a prompt and a completion"):
        paired([IMDB], "preferences")


def test_labelled_answers_of_messages_are_paired_with_their_tools() -> None:
    hi: list[Any] = [{"role": "user", "content": "Hi"}]
    right: dict[str, Any] = {"prompt": hi, "completion": [HELLO], "label": True}
    wrong: dict[str, Any] = {"prompt": hi, "completion": [NO], "label": False}
    pair = {"prompt": hi, "chosen": [HELLO], "rejected": [NO]}
    assert paired([right, wrong], "preferences") == [pair]
    assert paired([{**right, "completion": "Hello"}, wrong], "preferences") == [pair]
    whole = [{"messages": [*hi, row["completion"][0]], "label": row["label"]} for row in (right, wrong)]
    assert paired(whole, "preferences") == [pair]
    led = [{**row, "system": "Be brief."} for row in (wrong, right)]
    assert paired(led, "preferences") == [{**pair, "prompt": HI}]
    about = {"tools": [{"name": "search"}], "chat_template_kwargs": {"thinking": False}}
    rows = [{**right, **about}, wrong, {**wrong, "tools": []}, {**wrong, **about}]
    assert paired(rows, "preferences") == [{**pair, **about}]  # an answer without the tool is no alternative
    for row in ({"prompt": hi, "label": True}, {"messages": hi, "label": True}):
        with pytest.raises(DataError, match=r"preferences\[0\] has a label, so it needs a prompt and a completion"):
            paired([row], "preferences")


def test_rewards_in_the_rows_of_samples() -> None:
    rows = [*KTO[:2], {"text": "a", "reward": -0.5}, {"text": "a", "score": "3"}, IMDB, {**IMDB, "label": 4}, "text"]
    assert [reward_of(row) for row in rows] == [1.0, 0.0, -0.5, 3.0, 0.0, None, None]
    assert reward_of({"text": "a", "reward": ""}) == ""  # of a csv; `check_rewards` names the row
