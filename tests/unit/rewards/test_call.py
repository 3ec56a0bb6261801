"""Calling the user's functions: with what they ask for, and never believing what they return."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from trlx_like.errors import RewardError
from trlx_like.rewards import call_metric, call_reward

TEXTS = {"samples": ["ab", "cde"], "prompts": ["a", "c"], "outputs": ["b", "de"]}
METADATA: list[dict[str, Any]] = [{"goal": 1, "level": "x"}, {"goal": 2}]
TOKENIZER = object()


def rewards_of(function: Callable[..., Any], lengths: list[int] | None = None) -> Any:
    return call_reward(function, TEXTS, METADATA, TOKENIZER, [1, 2] if lengths is None else lengths)


def returning(value: Any) -> Callable[..., Any]:
    def scorer(**_: Any) -> Any:
        return value

    return scorer


def test_a_function_gets_what_it_names() -> None:
    seen: list[Any] = []

    def some(outputs: Any, goal: Any, missing: Any = "default") -> list[float]:
        seen.append((outputs, goal, missing))
        return [0.0, 1.0]

    def everything(**given: Any) -> list[float]:
        seen.append(given)
        return [0.0, 1.0]

    def by_keyword(*, level: Any, tokenizer: Any) -> list[float]:
        seen.append((level, tokenizer))
        return [0.0, 1.0]

    for function in (some, everything, by_keyword):
        assert rewards_of(function) == [0.0, 1.0]
    assert seen == [
        (["b", "de"], [1, 2], "default"),
        {**TEXTS, "tokenizer": TOKENIZER, "goal": [1, 2], "level": ["x", None]},
        (["x", None], TOKENIZER),
    ]


class Scorer:
    def __call__(self, outputs: list[str]) -> list[float]:
        return [float(len(output)) for output in outputs]

    def method(self, prompts: list[str]) -> list[float]:
        return [1.0 for _ in prompts]


def test_objects_methods_partials_and_lambdas() -> None:
    assert rewards_of(Scorer()) == [1.0, 2.0]
    assert rewards_of(Scorer().method) == [1.0, 1.0]
    assert rewards_of(partial(lambda outputs, bonus: [bonus] * len(outputs), bonus=3)) == [3.0, 3.0]
    assert rewards_of(lambda samples: [len(sample) for sample in samples]) == [2.0, 3.0]


@pytest.mark.parametrize(
    ("returned", "rewards"),
    [
        ([1, 2.5], [1.0, 2.5]),
        ((True, False), [1.0, 0.0]),
        (np.array([1, 2]), [1.0, 2.0]),
        ([np.float32(0.5), torch.tensor(2.0)], [0.5, 2.0]),
        (torch.tensor([1.0, 2.0], requires_grad=True), [1.0, 2.0]),
        (torch.tensor([1.0, 2.0], dtype=torch.bfloat16), [1.0, 2.0]),
        (torch.tensor([[1.0], [2.0]]), [1.0, 2.0]),
        (np.array([[1.0], [2.0]]), [1.0, 2.0]),
        (deque([1, 2]), [1.0, 2.0]),
        (iter([1, 2]), [1.0, 2.0]),
        ([None, 1], [None, 1.0]),
        ([[0.5], [1, 2]], [[0.5], [1.0, 2.0]]),
        ([torch.tensor([0.5]), np.array([1.0])], [[0.5], [1.0]]),
        ([3, [1]], [3.0, [1.0]]),
    ],
    ids=lambda value: type(value).__name__,  # some values show their address, which differs between processes
)
def test_what_a_reward_function_may_return(returned: Any, rewards: Any) -> None:
    got = rewards_of(returning(returned))
    assert got == rewards
    assert all(type(entry) is float for value in got if value is not None for entry in np.atleast_1d(value).tolist())


@pytest.mark.parametrize(
    ("returned", "what"),
    [
        ([1.0], "returned 1 rewards for 2 samples, [1.0]; it must return one per sample."),
        ([1.0, 2.0, 3.0], "returned 3 rewards for 2 samples"),
        ([], "returned 0 rewards for 2 samples, []"),
    ],
)
def test_a_wrong_number_of_rewards(returned: Any, what: str) -> None:
    message = failure(returning(returned))
    assert what in message and "scorer" in message
    assert "prompt: 'a'\n  output: 'b'" in message


@pytest.mark.parametrize(
    ("returned", "what"),
    [
        (None, "returned a NoneType, None"),
        (1.5, "returned a float, 1.5"),
        (torch.tensor(1.5), "returned a Tensor, tensor(1.5"),
        ("ab", "returned a str, 'ab'"),
        ({"a": 1, "b": 2}, "returned a dict, {'a': 1, 'b': 2}"),
    ],
)
def test_no_list_at_all(returned: Any, what: str) -> None:
    message = failure(returning(returned))
    assert "scorer" in message and what in message and "must return a list with one entry a sample" in message


def test_rewards_with_a_dictionary_as_trl_has_them() -> None:
    message = failure(returning(([1.0, 2.0], {})))
    assert "scorer returned rewards and a dict, as for TRL's DDPO; return the rewards alone." in message


@pytest.mark.parametrize(
    ("value", "why"),
    [
        (math.nan, "a reward must be finite"),
        (math.inf, "a reward must be finite"),
        (-math.inf, "a reward must be finite"),
        (torch.tensor(math.nan), "a reward must be finite"),
        (10**400, "int too large"),
        ("0.5", "a str is not a number"),
        ({"score": 1}, "a dict is not a number"),
        (1 + 2j, "a complex is not a number"),
        ([1.0, math.nan], "a reward must be finite"),
        ([1.0, "2"], "a str is not a number"),
        ([1.0, None], "a NoneType is not a number"),
        ([[1.0], [2.0]], "a list is not a number"),
        ([], "needs at least one entry"),
        ([1.0, 2.0, 3.0], "3 per-token rewards for a response of 2 tokens"),
        (torch.ones(3), "3 per-token rewards for a response of 2 tokens"),
    ],
    ids=lambda value: repr(value)[:30],
)
def test_a_bad_value_is_shown_with_its_sample(value: Any, why: str) -> None:
    message = failure(returning([0.5, value]))
    assert "scorer" in message and "for sample 1" in message and why in message
    assert message.endswith("\n  prompt: 'c'\n  output: 'de'")
    assert repr(value)[:80] in message


def test_a_long_value_is_shortened() -> None:
    message = failure(returning([0.5, "x" * 5000]))
    assert "xxx..." in message and len(message) < 500


def test_an_exception_is_named_with_its_cause_and_a_sample() -> None:
    def broken(outputs: list[str]) -> list[float]:
        return [1 / 0 for _ in outputs]

    def broken_later(outputs: list[str]) -> Any:
        yield 1.0
        raise KeyError("lost")

    message = failure(broken)
    assert "broken raised ZeroDivisionError: division by zero" in message and "on 2 samples" in message
    assert message.endswith("\n  prompt: 'a'\n  output: 'b'")
    assert "broken_later raised KeyError: 'lost'" in failure(broken_later)
    with pytest.raises(RewardError) as caught:
        rewards_of(broken)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_a_builtin_that_says_nothing_of_its_arguments() -> None:
    assert "max raised TypeError" in failure(max)


def test_no_samples() -> None:
    none: dict[str, list[str]] = {name: [] for name in TEXTS}
    assert call_reward(lambda outputs: [len(output) for output in outputs], none, []) == []
    with pytest.raises(RewardError, match=r"scorer returned 1 rewards for 0 samples, \[1\.0\]; .* per sample\.$"):
        call_reward(returning([1.0]), none, [])


def test_interrupts_pass_through() -> None:
    def stop(**_: Any) -> Any:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        rewards_of(stop)


def test_an_argument_that_nobody_gives() -> None:
    message = failure(lambda outputs, target, goal: [0.0, 0.0])
    assert "wants target" in message and "a key of the prompts (goal, level)" in message
    with pytest.raises(RewardError, match=r"wants target.*they have none"):
        call_reward(lambda target: [0.0], {name: values[:1] for name, values in TEXTS.items()}, [{}])


def test_what_a_function_does_to_its_lists_does_no_harm() -> None:
    texts = {name: list(values) for name, values in TEXTS.items()}
    metadata = [dict(row) for row in METADATA]

    def greedy(samples: list[str], outputs: list[str], goal: list[int]) -> list[float]:
        samples.clear()
        outputs.sort(reverse=True)
        goal.append(9)
        return [0.0, 0.0]

    call_reward(greedy, texts, metadata)
    assert texts == TEXTS and metadata == METADATA


def test_lengths_are_checked_where_they_are_known() -> None:
    dense = returning([[1.0], [1.0, 2.0, 3.0]])
    assert rewards_of(dense, [1, 3]) == call_reward(dense, TEXTS, METADATA) == [[1.0], [1.0, 2.0, 3.0]]
    assert "2 per-token rewards for a response of 1 tokens" in failure(returning([[1.0, 2.0], 0.0]))


def metrics_of(value: Any) -> dict[str, list[float]]:
    def measure(outputs: list[str], goal: list[int]) -> Any:
        assert outputs == ["b", "de"] and goal == [1, 2]
        return value

    return call_metric(measure, TEXTS, METADATA, TOKENIZER)


@pytest.mark.parametrize(
    ("value", "numbers"),
    [
        ([1, 2], [1.0, 2.0]),
        (torch.tensor([1.0, 2.0]), [1.0, 2.0]),
        (np.array([1, 2]), [1.0, 2.0]),
        ({"x": 1, "y": 2}.values(), [1.0, 2.0]),
        (0.5, [0.5]),
        (True, [1.0]),
        (np.float64(0.5), [0.5]),
        (np.mean([1, 2]), [1.5]),
        (torch.tensor(0.5), [0.5]),
        ([0.5], [0.5]),
    ],
    ids=repr,
)
def test_what_a_metric_function_may_return(value: Any, numbers: list[float]) -> None:
    assert metrics_of({"length": value, "other": 1}) == {"length": numbers, "other": [1.0]}


@pytest.mark.parametrize(
    ("returned", "what"),
    [
        ([1.0, 2.0], "measure returned a list; a metric_fn returns a dict"),
        ({"length": [1, 2, 3]}, "measure: metric 'length' has 3 values for 2 samples"),
        ({"length": "ab"}, "metric 'length' is not made of numbers: a str is not a number"),
        ({"length": [1, None]}, "metric 'length' is not made of numbers: a NoneType is not a number"),
        ({"length": [[1], [2]]}, "metric 'length' is not made of numbers"),
    ],
)
def test_bad_metrics(returned: Any, what: str) -> None:
    with pytest.raises(RewardError) as caught:
        metrics_of(returned)
    assert what in str(caught.value)


def test_a_metric_function_that_raises() -> None:
    with pytest.raises(RewardError, match="raised ZeroDivisionError"):
        call_metric(lambda **_: 1 / 0, TEXTS, METADATA)


def failure(function: Callable[..., Any]) -> str:
    with pytest.raises(RewardError) as caught:
        rewards_of(function)
    return str(caught.value)
