"""The library of reward functions, by name and with options as a YAML file gives them."""

from __future__ import annotations

from typing import Any

import pytest

from trlx_like.errors import ConfigError, RewardError
from trlx_like.rewards.call import call_reward
from trlx_like.rewards.library import FUNCTIONS, named_reward
from trlx_like.rewards.make import check_reward, make_reward

SCHEMA = {"type": "object", "required": ["a"], "properties": {"a": {"type": "integer"}}}


def rewards(outputs: list[str], *, ids: list[list[int]] | None = None, keys: Any = (), **spec: Any) -> list[Any]:
    columns: dict[str, Any] = {"samples": outputs, "prompts": outputs, "outputs": outputs}
    if ids is not None:
        columns["output_ids"] = ids
    return call_reward(make_reward(spec), columns, list(keys) or [{} for _ in outputs])


def references(*values: Any) -> list[dict[str, Any]]:
    return [{"reference": value} for value in values]


def test_exact_match() -> None:
    keys = references("Paris", "Paris", "Paris", None)
    assert rewards([" paris\n", "It is Paris", "Rome", "x"], keys=keys, name="exact_match") == [1, 0, 0, None]
    assert rewards(["paris", "Paris"], keys=keys[:2], name="exact_match", case=True) == [0, 1]
    outputs = ["<a>Rome</a><a>Paris</a>", "Paris"]
    assert rewards(outputs, keys=keys[:2], name="exact_match", extract="<a>(.*?)</a>") == [1, 0]
    assert rewards(["b"], keys=[{"answer": "b"}], name="exact_match", column="answer") == [1]
    with pytest.raises(RewardError, match=r"exact_match wants reference, which is .* \(answer\)"):
        rewards(["b"], keys=[{"answer": "b"}], name="exact_match")


def test_forms() -> None:
    assert rewards(["so\n#### 7", "7"], name="regex_match", pattern=r"#### \d+$") == [1, 0]
    assert rewards(["7\n", "so 7"], name="regex_match", pattern=r"\d+", whole=True) == [1, 0]
    good = "<think>\na\n</think> <answer>b</answer>\n"
    wrong = ["<answer>b</answer><think>a</think>", good + "c", good + good, "<think>a<answer>b</answer>"]
    assert rewards([good, *wrong], name="tags", names=["think", "answer"]) == [1, 0, 0, 0, 0]
    pytest.importorskip("jsonschema")
    outputs = ['{"a": 1}', 'Here:\n```json\n{"a": 2}\n```\nthat is it', '{"a": "b"}', "{a}", "[" * 100000]
    assert rewards(outputs, name="json_valid") == [1, 1, 1, 0, 0]
    assert rewards(["NaN", "[-Infinity]"], name="json_valid") == [0, 0]
    assert rewards(outputs, name="json_valid", schema=SCHEMA) == [1, 1, 0, 0, 0]


def test_lengths() -> None:
    ids = [[1] * count for count in (2, 6, 8, 9, 10, 11)]
    outputs = ["a"] * 6
    assert rewards(outputs, ids=ids, name="length", cap=10, cache=4) == [0, 0, -0.5, -0.75, -1, -1]
    assert rewards(outputs, ids=ids, name="length", cap=10) == [0, 0, 0, 0, 0, -1]
    assert rewards(["a b", "a", "a b c d e"], name="length", target=2, unit="words") == [0, -0.5, -1]
    assert rewards(["a b", "abcdef"], name="length", cap=3, unit="characters") == [0, -1]
    assert rewards(["a b c", "a b c a b c", "a a a a a a", "a"], name="repetition") == [0, -0.25, -0.75, 0]


def test_code_that_passes_its_tests() -> None:
    outputs = [
        "```python\ndef f(x):\n    return x + 1\n```",
        "def f(x): return x",
        "raise SystemExit(0)",
        "import os; os._exit(0)",
        "import socket; socket.socket()",
        "while True: pass",
        "x = bytearray(10**9)\ndef f(x): return x + 1",
    ]
    keys = [{"tests": ["assert f(1) == 2", "assert f(0) == 0"]}, *[{"tests": "assert f(1) == 2"}] * 6]
    assert rewards(outputs, keys=keys, name="passes_tests", seconds=1.0) == [0.5, 0, 0, 0, 0, 0, 0]


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"name": "len"}, r"data.reward_fn.name \('len'\) must be rubric or one of exact_match, numeric_match"),
        ({}, r"data.reward_fn.name \(None\) must be rubric or one of"),
        ({"name": "tags"}, "data.reward_fn: tags has the options names, not none"),
        ({"name": "tags", "names": ["a"], "order": 1}, "data.reward_fn: tags has the options names, not names, order"),
        ({"name": "regex_match", "pattern": "("}, r"data.reward_fn.pattern \('\('\) is no regular expression"),
        ({"name": "length"}, "data.reward_fn: length needs a target or a cap above 0"),
        ({"name": "length", "target": 3, "cache": 1}, "data.reward_fn: length needs a target or a cap above 0"),
        ({"name": "length", "cap": 3, "unit": "lines"}, r"data.reward_fn.unit \('lines'\) must be 'tokens', 'words'"),
        ({"name": "length", "cap": 0}, r"data.reward_fn.cap \(0\) must be a whole number of at least 1 or null"),
        ({"name": "tags", "names": "think"}, r"data.reward_fn.names \('think'\) must be a list of texts"),
        ({"name": "json_valid", "schema": {"type": "any"}}, "data.reward_fn.schema is no JSON schema"),
    ],
)
def test_mistakes_are_found_before_the_run(spec: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_reward(spec, "data.reward_fn")


def test_several_in_a_list_have_their_names() -> None:
    several = make_reward([{"name": "repetition"}, {"name": "length", "cap": 3}], [1.0, 0.5])
    assert getattr(several, "names") == ["repetition", "length"]  # noqa: B009
    assert named_reward({"name": "repetition"}).label in FUNCTIONS
