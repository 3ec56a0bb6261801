"""Judges of all kinds: what they are asked, what comes of their answers, and answers of another form."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st

from tests.contract.recipes import NO_DROPOUT, PROMPTS, make
from tests.contract.runs import rows
from tests.tiny import tiny_config, tiny_tokenizer
from tests.unit.models.test_reward_model import sharp
from trlx_like.errors import ConfigError, RegistryError, RewardError
from trlx_like.rewards.judges import (
    JUDGES,
    GroupReward,
    RewardJudge,
    RewardModelJudge,
    WinRate,
    make_judge,
    register_judge,
)
from trlx_like.rewards.judging import judged


class Longer:
    """Prefers the longer of two; None where they are as long."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []

    def compare(self, prompts: list[str], pairs: list[tuple[str, str]], weight: Any = None) -> list[int | None]:
        self.calls.append({"prompts": prompts, "pairs": pairs, "weight": weight})
        return [None if len(a) == len(b) else int(len(b) > len(a)) for a, b in pairs]


class Shortest:
    """Ranks by length, the shortest first; no opinion on the empty text."""

    def rank(self, *, completions: list[list[str]], **_: Any) -> list[list[int | None]]:
        return [[len(text) or None for text in group] for group in completions]


class Polite:
    """Checks for a word that came with the prompt; no opinion without letters."""

    def check(self, *, completions: list[str], word: list[str], **_: Any) -> list[bool | None]:
        return [w in text if text else None for text, w in zip(completions, word, strict=True)]


def length(outputs: Sequence[str], **_: Any) -> list[float | None]:
    return [float(len(output)) if output else None for output in outputs]


def test_comparisons_become_shares_of_the_others_that_are_beaten() -> None:
    """Of lengths 1, 3, 3, 2: the first beats none of three, each of length 3 beats two and ties, the last one."""
    judge = Longer()
    scores = judged(judge, ["p", "q"], [["a", "bbb", "ccc", "dd"], ["x", "yy"]], [{"weight": 1}, {"weight": 2}])
    assert scores == [pytest.approx([0, 2.5 / 3, 2.5 / 3, 1 / 3]), [0.0, 1.0]]
    (call,) = judge.calls  # all comparisons at once, each pair one time
    assert call["prompts"] == ["p"] * 6 + ["q"]
    assert call["weight"] == [1] * 6 + [2]
    assert call["pairs"][:3] == [("a", "bbb"), ("a", "ccc"), ("a", "dd")]


def test_ranks_become_shares_too_and_what_has_no_place_is_left_out() -> None:
    """Shortest first: "a" beats the two others, which tie for the rest: half a win of two."""
    assert judged(Shortest(), ["p"], [["a", "bb", "", "cc"]]) == [[1.0, 0.25, None, 0.25]]


def test_checks_become_one_or_none() -> None:
    scores = judged(Polite(), ["p", "q"], [["please", "no"], ["thanks", ""]], [{"word": "please"}, {"word": "thanks"}])
    assert scores == [[1.0, 0.0], [1.0, None]]


def test_a_reward_function_is_a_judge() -> None:
    """By its reward, with prompt keys and tokenizer; equal rewards tie, and None has no opinion."""
    seen: dict[str, Any] = {}

    def weighed(samples: list[str], outputs: list[str], weight: list[float], tokenizer: Any) -> list[Any]:
        seen.update(samples=samples, weight=weight, tokenizer=tokenizer)
        return [None if not o else [w, len(o) - w] for o, w in zip(outputs, weight, strict=True)]

    groups = [["a", "bb", "cc", ""], ["x", "yyy"]]
    scores = judged(RewardJudge(weighed), ["p", "q"], groups, [{"weight": 1.0}, {"weight": 3.0}], "tokens")
    assert scores == [[0.0, 0.75, 0.75, None], [0.0, 1.0]]
    assert seen == {"samples": ["pa", "pbb", "pcc", "p", "qx", "qyyy"], "weight": [1.0] * 4 + [3.0] * 2} | {
        "tokenizer": "tokens"
    }


def test_a_reward_model_is_a_judge(tmp_path: Path) -> None:
    """Registered as reward_model; its order is that of the model's rewards."""
    sharp(tiny_config()).save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    judge = make_judge({"name": "reward_model", "model": str(tmp_path)})
    assert isinstance(judge, RewardModelJudge)
    group = ["abc", "a mat.", "zz top", "q"]
    rewards = judge.reward_fn(prompts=["the cat"] * 4, outputs=group)
    (scores,) = judged(judge, ["the cat"], [group])
    assert sorted(range(4), key=lambda i: rewards[i]) == sorted(range(4), key=lambda i: float(scores[i] or 0))
    assert sorted(float(score or 0) for score in scores) == pytest.approx([0, 1 / 3, 2 / 3, 1])
    with pytest.raises(ConfigError, match=r"judge: RewardModelJudge cannot be made of no options.*model"):
        make_judge("reward_model")


@given(st.lists(st.text("abc", max_size=5), min_size=2, max_size=6), st.randoms())
def test_shares_are_a_fair_count(group: list[str], random: Any) -> None:
    """In [0, 1], half of the comparisons in all, the same by comparing and by ranking, whatever the order."""
    (scores,) = judged(Longer(), ["p"], [group])
    (ranked,) = judged(RewardJudge(lambda outputs: [len(output) for output in outputs]), ["p"], [group])
    assert scores == pytest.approx(ranked)
    assert all(0 <= float(score or 0) <= 1 for score in scores)
    assert sum(float(score or 0) for score in scores) == pytest.approx(len(group) / 2)
    order = random.sample(range(len(group)), len(group))
    (shuffled,) = judged(Longer(), ["p"], [[group[place] for place in order]])
    assert shuffled == pytest.approx([scores[place] for place in order])


def test_groups_as_a_reward_function() -> None:
    scored = GroupReward(Polite(), 2)(
        samples=[],
        prompts=["p", "p", "q", "q"],
        outputs=["ab", "c", "", "d"],
        tokenizer=None,
        word=["a", "a", "d", "d"],
    )
    assert scored == [1.0, 0.0, None, 1.0]


# What stands for a judge.


def test_names_classes_functions_and_objects_stand_for_judges() -> None:
    judge: Any = Longer()
    assert make_judge(judge) is judge
    assert isinstance(make_judge("tests.unit.rewards.test_judges:Shortest"), Shortest)
    for spec in (length, "tests.unit.rewards.test_judges:length"):
        assert judged(make_judge(spec), ["p"], [["a", "bb"]]) == [[0.0, 1.0]]

    @register_judge("test-over")
    class Over:
        def __init__(self, least: int = 3) -> None:
            self.least = least

        def check(self, *, completions: list[str], **_: Any) -> list[bool]:
            return [len(text) >= self.least for text in completions]

    try:
        assert judged(make_judge("test-over"), ["p"], [["aa", "bbb"]]) == [[0.0, 1.0]]
        assert judged(make_judge({"name": "test-over", "least": 2}), ["p"], [["a", "bb"]]) == [[0.0, 1.0]]
        with pytest.raises(ConfigError, match=r"data\.judge: .*Over cannot be made of \{'most': 1\}"):
            make_judge({"name": "test-over", "most": 1}, "data.judge")
        with pytest.raises(RegistryError, match="judge: unknown judge 'test-oven'. Did you mean test-over?"):
            make_judge("test-oven")
    finally:
        del JUDGES._entries["test-over"]


@pytest.mark.parametrize("spec", [3, None, object(), Longer, ["a"]])
def test_what_is_no_judge_is_refused(spec: Any) -> None:
    with pytest.raises(ConfigError, match="judge must be an object with a method rank, compare or check, a reward fun"):
        make_judge(spec)


def test_a_mapping_needs_a_name() -> None:
    with pytest.raises(ConfigError, match=r"data\.judge: a mapping needs the registered name of a judge under 'name'"):
        make_judge({"model": "x"}, "data.judge")


# Answers of another form.


class Answers:
    """Says whatever it was made with."""

    def __init__(self, kind: str, answers: Any) -> None:
        setattr(self, kind, lambda prompts: answers)


@pytest.mark.parametrize(
    ("kind", "answers", "message"),
    [
        ("compare", [2], r"Answers.compare returned 2 for a pair; it must be 0, 1 or None"),
        ("compare", ["0"], r"Answers.compare returned '0' for a pair"),
        ("compare", [], r"Answers.compare returned 0 answers for 1 questions"),
        ("rank", [[1]], r"Answers.rank returned \[1\] for 2 completions; give each a place or None"),
        ("rank", [[1, float("nan")]], r"Answers.rank returned \[1, nan\] for 2 completions"),
        ("rank", [3], r"Answers.rank returned 3, which is no list of places"),
        ("check", [True, 7], r"Answers.check returned 7; it must be True, False or None"),
        ("check", None, r"Answers.check raised TypeError"),
    ],
)
def test_answers_of_another_form_are_refused(kind: str, answers: Any, message: str) -> None:
    with pytest.raises(RewardError, match=message):
        judged(Answers(kind, answers), ["p"], [["a", "b"]])


def test_a_judge_that_raises_or_wants_what_nobody_gave() -> None:
    class Broken:
        def compare(self, prompts: list[str]) -> list[int]:
            raise OSError("no network")

    class Wanting:
        def compare(self, prompts: list[str], answer: list[str]) -> list[int]:
            return [0 for _ in prompts]

    with pytest.raises(RewardError, match=r"Broken.compare raised OSError: no network\n  first prompt: 'p'"):
        judged(Broken(), ["p"], [["a", "b"]])
    with pytest.raises(
        RewardError, match=r"wants answer, which is neither prompts, pairs or tokenizer nor a key .*word"
    ):
        judged(Wanting(), ["p"], [["a", "b"]], [{"word": 1}])


def test_what_a_judge_does_to_its_arguments_stays_with_it() -> None:
    class Greedy:
        def rank(self, prompts: list[str], completions: list[list[str]]) -> list[list[int]]:
            prompts.clear()
            return [list(range(len(group))) if group.sort() is None else [] for group in completions]

    prompts, groups = ["p"], [["b", "a"]]
    judged(Greedy(), prompts, groups)
    assert (prompts, groups) == (["p"], [["b", "a"]])


# The win rate.


def test_the_win_rate_of_an_evaluation(tmp_path: Path) -> None:
    """For any trainer and judge: longer is better; each prompt has an empty, a very long and an equal reference."""

    class Fixed:
        def check(self, *, completions: list[str], **_: Any) -> list[bool]:
            return [text in ("good", "as good") for text in completions]

    prompts = [{"prompt": PROMPTS[0], "reference": ""}, {"prompt": PROMPTS[1], "reference": "z" * 100}]
    prompts += [{"prompt": PROMPTS[2], "reference": "z" * 100}]
    trainer = make(
        "SFTTrainer",
        tmp_path,
        eval_prompts=prompts,
        reward_fn=None,
        metric_fn=WinRate(Longer(), also=lambda outputs: {"seven": 7}),
        **{"train.total_steps": 1, "model.model_path": tiny_config(**NO_DROPOUT)},
    )
    trainer.learn()
    first = rows(tmp_path)[0]
    table = [row for row in rows(tmp_path, "samples.jsonl") if row["step"] == 0]
    assert [row["metrics/win_rate"] for row in table] == [1.0 if table[0]["output"] else 0.5, 0.0, 0.0]
    assert first["metrics/win_rate"] == pytest.approx(sum(row["metrics/win_rate"] for row in table) / 3)
    assert first["metrics/seven"] == 7
    rate = WinRate(Fixed(), key="answer")
    texts = {"samples": ["p"] * 3, "prompts": ["p"] * 3, "outputs": ["good", "good", "bad"]}
    assert rate(**texts, answer=["as good", "bad", "as good"]) == {"win_rate": [0.5, 1.0, 0.0]}


def test_a_prompt_without_a_reference_is_named() -> None:
    with pytest.raises(
        RewardError, match="WinRate needs text under 'reference' with every evaluation prompt, as with 'q'"
    ):
        WinRate(length)(samples=["pa", "qb"], prompts=["p", "q"], outputs=["a", "b"], reference=["c", None])
