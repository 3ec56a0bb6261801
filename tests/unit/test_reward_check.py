"""Fourteen planted bugs of reward functions, and two functions that are right."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from tests.unit.cli_support import ppo_file, run
from trlx_like.api import read_config
from trlx_like.errors import ConfigError
from trlx_like.reward_check import check_rewards_of, reward_check
from trlx_like.rewards.call import run_calls
from trlx_like.rewards.outcome import Call, Outcome

PROMPTS = ["How much is 3+4? ", "How much is 2+2? "]
ANSWERS = ["7", "4"]
OUTPUTS = ["It is 7.", "maybe 5 or so", "I would say 8 in all", "7", "4", "It is 4, I think.", "5", "2 and 2 make 22"]


def rows() -> list[dict[str, Any]]:
    return [
        {
            "prompts": PROMPTS[n // 4],
            "outputs": text,
            "samples": PROMPTS[n // 4] + text,
            "output_ids": list(range(len(text))),
            "length": len(text),
            "metadata": {"answer": ANSWERS[n // 4]},
        }
        for n, text in enumerate(OUTPUTS)
    ]


def found(function: Callable[..., Any]) -> list[str]:
    def score(some: Any) -> list[Outcome]:
        columns = {name: [row[name] for row in some] for name in ("prompts", "outputs", "samples")}
        return run_calls([Call(function, columns, [row["metadata"] for row in some])])[0]

    lines = check_rewards_of(score, rows(), 4, lambda text: list(range(len(text))))
    return [line.removeprefix("PROBLEM: ") for line in lines if line.startswith("PROBLEM: ")]


def right(outputs: list[str], answer: list[str]) -> list[float]:
    words = [output.replace(".", " ").replace(",", " ").split() for output in outputs]
    return [float(wanted in found) for found, wanted in zip(words, answer, strict=True)]


def brief_and_right(outputs: list[str], answer: list[str]) -> list[float]:
    good = right(outputs, answer)
    return [reward - min(len(output), 100) / 1000 for reward, output in zip(good, outputs, strict=True)]


@pytest.mark.parametrize("function", [right, brief_and_right])
def test_a_right_function_has_no_problem(function: Callable[..., Any]) -> None:
    assert found(function) == []


counter = count()
BUGS: dict[str, tuple[Callable[..., Any], str]] = {
    "constant": (lambda outputs: [1.0] * len(outputs), "all outputs of a prompt get the same reward"),
    "of the prompt": (lambda prompts: [float("3" in p) for p in prompts], "all outputs of a prompt get the same"),
    "random": (lambda outputs: [random.random() for _ in outputs], "a second call gives the same outputs other"),
    "state": (lambda outputs: [len(o) + next(counter) for o in outputs], "a second call gives the same outputs other"),
    "sorted": (lambda outputs: sorted(float(len(o)) for o in outputs), "the order of the batch changes rewards"),
    "one answer for all": (
        lambda outputs, answer: right(outputs, [answer[0]] * len(outputs)),
        "the order of the batch changes rewards",
    ),
    "relative to the batch": (
        lambda outputs, answer: [r - sum(right(outputs, answer)) / len(outputs) for r in right(outputs, answer)],
        "an output alone gets another reward than in a batch",
    ),
    "empty": (lambda outputs: [float(o.split()[-1] == "7") for o in outputs], "on an empty output: "),
    "foreign": (lambda outputs: [len(o.encode("ascii")) / 99 for o in outputs], "on Japanese and Russian: "),
    "not finite": (lambda outputs: [1 / len(o) if o else float("nan") for o in outputs], "on an empty output: "),
    "one missing": (lambda outputs: [1.0 for _ in outputs[1:]], "on outputs of the model: "),
    "the wrong sign": (lambda outputs, answer: [-r for r in right(outputs, answer)], "gibberish gets"),
    "the more the better": (lambda outputs: [len(o.split()) / 10 for o in outputs], "one word 60 times gets 6, "),
    "large": (lambda outputs, answer: [1e6 * r for r in right(outputs, answer)], "rewards up to 1e+06 are large"),
}


@pytest.mark.parametrize("bug", BUGS)
def test_planted_bugs_are_found(bug: str) -> None:
    function, sentence = BUGS[bug]
    assert any(sentence in problem for problem in found(function)), found(function)


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    file = ppo_file(tmp_path)
    (tmp_path / "constant.py").write_text("def reward(outputs):\n    return [0.5] * len(outputs)\n")
    result = run("test-reward", file, "--set", "data.reward_fn=constant.py:reward")
    report = result.stdout
    assert result.exit_code == 1 and report.startswith("16 outputs, ") and report.endswith("\n1 problem\n")
    assert "PROBLEM: all outputs of a prompt get the same reward" in report
    assert not (tmp_path / "run").exists()
    with pytest.raises(ConfigError, match="test-reward needs data.reward_fn"):
        reward_check(read_config(file, overrides=["data.reward_fn=null"]))
