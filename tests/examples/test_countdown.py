"""The countdown example: how it reads expressions, its problems, its data, its scores and its tokens."""

from __future__ import annotations

import random
from itertools import product
from typing import Any

import pytest
from hypothesis import given, strategies as st

from examples import configurations, countdown
from examples.countdown import HELD_OUT, LONGEST, RIGHT, Problem, default_task, expressions, read


@pytest.mark.parametrize(
    ("expression", "value", "numbers"),
    [
        ("7", 7, [7]),
        ("12+3-5", 10, [12, 3, 5]),
        ("1-2-3", -4, [1, 2, 3]),  # from the left
        ("007+1", 8, [7, 1]),
    ],
)
def test_expressions_by_hand(expression: str, value: int, numbers: list[int]) -> None:
    assert read(expression) == (value, numbers)


@pytest.mark.parametrize(
    "text",
    ["", "+", "1+", "-1", "1++2", "1 + 2", "1_0", "0x1", "1.5", "(1)", "2*3", "2**9", "٣", "１", "1\n", "a", "exit()"]
    + ["__import__('os')", "1" * (LONGEST + 1), "(" * 10_000, "1+" * 10_000 + "1"],
)
def test_what_is_no_expression_is_none(text: str) -> None:
    assert read(text) is None


@given(st.text(alphabet="0123456789+-", max_size=LONGEST))
def test_what_is_read_is_what_python_makes_of_it(text: str) -> None:
    """Python also knows signs of single numbers, and no zeros at the front."""
    result = read(text)
    terms = text.replace("-", "+").split("+")
    assert (result is None) == (not all(terms))
    if result is not None and not any(term.startswith("0") and term != "0" for term in terms):
        assert set(text) <= set("0123456789+-")
        assert result[0] == eval(text, {"__builtins__": {}})  # digits and signs only, as checked


def test_scores_by_hand() -> None:
    problem = Problem((3, 5, 14), 6)
    assert problem.prompt == "3 5 14=6:"
    answers = {"14-5-3": 1.0, "14-3-5": 1.0, "14-5+3": 0.0, "6": 0.0, "3+3": 0.0, "14-5-3+0": 0.0, "no": 0.0, "": 0.0}
    assert {answer: problem.score(answer) for answer in answers} == answers
    assert Problem((2, 2, 5), 9).score("2+2+5") == 1 > Problem((2, 2, 5), 9).score("2+5+2-0")
    rows: dict[str, Any] = {"outputs": ["14-5-3", "3+5+14", "3+5"], "numbers": [[3, 5, 14]] * 3}
    assert countdown.reward_fn(**rows, target=[6] * 3) == [1, 0, 0]
    assert countdown.metric_fn(**rows) == {"valid": [1, 1, 0]}


def test_all_expressions_of_three_numbers() -> None:
    assert len(expressions([3, 5, 14])) == 6 * 4 and len(expressions([2, 2, 5])) == 3 * 4
    signed = {f"{a}{s}{b}{t}{c}" for a, b, c in [(2, 2, 5), (2, 5, 2), (5, 2, 2)] for s, t in product("+-", repeat=2)}
    assert set(expressions([2, 2, 5])) == signed


def test_problems_can_be_solved_and_what_is_held_out_is_no_prompt() -> None:
    task = default_task()
    assert len(task.held_out) == HELD_OUT and len(task.train) > 8 * HELD_OUT
    assert not {p["prompt"] for p in countdown.prompts()} & {p["prompt"] for p in countdown.eval_prompts()}
    for problem in random.Random(0).sample(task.train, 50) + task.held_out[:50]:
        assert all(problem.score(expression) == 1 for expression in task.solutions[problem])
        others = set(task.expressions[problem.numbers]) - set(task.solutions[problem])
        assert not any(problem.score(expression) for expression in others)
    drawn = [len(task.solutions[p]) / len(task.expressions[p.numbers]) for p in task.held_out]
    assert 0.15 < sum(drawn) / len(drawn) < 0.25  # of expressions drawn evenly


def test_the_examples_are_valid_and_half_of_them_wrong() -> None:
    task, rows = default_task(), countdown.samples()
    problems = {problem.prompt: problem for problem in task.train}
    scores = [problems[prompt].score(answer) for prompt, answer in rows]
    assert all(answer in task.expressions[problems[prompt].numbers] for prompt, answer in rows[:2000])
    # RIGHT are made to be; of the others one in five happens to be.
    assert sum(scores) / len(scores) == pytest.approx(RIGHT + (1 - RIGHT) * 0.2, abs=0.02)


def test_every_text_fits_the_tokenizer_and_the_model() -> None:
    tokenizer, config = countdown.tokenizer(), countdown.model_config()
    ids = tokenizer("3 5 14=6:").input_ids
    assert len(ids) == len("3 5 14=6:") and tokenizer.decode(ids) == "3 5 14=6:"
    assert config.vocab_size == len(tokenizer) and tokenizer.unk_token_id not in ids
    longest = max(len(p["prompt"]) for p in countdown.prompts() + countdown.eval_prompts())
    answer = max(len(expression) for row in default_task().expressions.values() for expression in row)
    for file, _ in countdown.METHODS.values():
        options = configurations.load(file)
        new_tokens = options.method.to_dict()["gen_kwargs"]["max_new_tokens"]
        assert new_tokens > answer
        assert longest + new_tokens <= options.train.seq_length <= config.n_positions


def test_every_method_is_what_it_is_called() -> None:
    """The command line changes the options of a file: the names must be options of its method."""
    for file, options in countdown.METHODS.values():
        config = configurations.load(file).evolve(method=options)
        assert all(getattr(config.method, name) == value for name, value in options.items())
