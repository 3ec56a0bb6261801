"""A rubric: what is asked, what becomes of the answers, and a run that it rewards; against a server on loopback."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.contract.recipes import make
from tests.unit.rewards.support import Server, score
from trlx_like.config import RewardFnConfig
from trlx_like.errors import ConfigError, RewardError
from trlx_like.rewards.make import check_reward, make_reward
from trlx_like.rewards.runner import RewardRunner

QUESTIONS = [
    {"name": "right", "ask": "Does it say {word}?", "weight": 2},
    {"name": "short", "ask": "Is it short?", "weight": -0.5},
]
GIVEN = {"samples": ["x"] * 3, "prompts": ["p", "{word}", "r"], "outputs": ["cat", "dogs and cats", "{answer}"]}
ROWS = [{"word": "cat"}, {"word": "cat"}, {"word": "dog"}]


def spec_of(server: Server, **options: Any) -> dict[str, Any]:
    url = {"url": server.url, "model": "judge"}
    return {"name": "rubric", **url, "retries": 0, "questions": QUESTIONS, **options}


def answer(text: str) -> str:
    """Answers as a model that thinks aloud."""
    output, question = text.partition("Answer:\n")[2].partition("\n\nQuestion:\n")[::2]
    asked = question.partition("\n")[0]
    if asked == "Is it short?":
        return "Let me count.\n**yes**." if len(output) < 5 else "No" if len(output) > 8 else "Maybe"
    return "Yes" if asked.split()[-1].rstrip("?") in output else "NO."


def test_the_reward_is_the_weighted_sum_of_the_questions(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    """The last question about the last output has no answer and adds nothing. Keys of prompts stand in questions."""
    server.reply = answer
    scores = score(RewardRunner(make_reward(spec_of(server, workers=1))), GIVEN, ROWS)
    assert scores.components == {"right": [1, 1, 0], "short": [1, 0, None]}
    assert scores.rewards == [1.5, 2, 0]
    texts = [request["messages"][0]["content"] for request in server.requests]
    assert texts[1] == (
        "Answer a question about an answer to a prompt.\n\nPrompt:\n{word}\n\nAnswer:\ndogs and cats\n\nQuestion:\n"
        "Does it say cat?\n\nReply with one word and nothing else: Yes or No."
    )
    assert len(texts) == 6 and "1 answers of reward_fn are neither No nor Yes, as is 'Maybe'" in caplog.text


def test_in_a_list_it_counts_with_the_weight_of_its_place(server: Server) -> None:
    """Here in a process of its own, as reward.workers has it."""
    server.reply = answer
    both = make_reward([spec_of(server), {"name": "length", "target": 1, "unit": "words"}], [10, 1])
    runner = RewardRunner(both, RewardFnConfig(workers=1))
    scores = score(runner, GIVEN, ROWS)
    runner.close()
    assert list(scores.components) == ["right", "short", "length"]
    assert scores.rewards == [15, 19, 0]


def test_a_key_that_no_prompt_has(server: Server) -> None:
    with pytest.raises(RewardError, match="right wants word, which is neither"):
        score(RewardRunner(make_reward(spec_of(server, questions=QUESTIONS[:1]))), GIVEN, [{}] * 3)
    assert not server.requests


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"questions": None}, r"^x\.questions \(None\) must be a list of mappings with name and ask"),
        ({"questions": []}, "must be a list"),
        ({"questions": [{"name": "a"}]}, "must be a list"),
        ({"questions": [{"name": "a", "ask": "b", "weigth": 2}]}, "must be a list"),
        ({"questions": [{"name": "a", "ask": "b", "weight": "2"}]}, "must be a list"),
        ({"url": "localhost"}, r"^x\.url \('localhost'\) must begin with http"),
        ({"timeout": 0}, r"^x\.timeout \(0\) must be above 0"),
        ({"temperature": 1}, "^x: rubric cannot be made of .*unexpected keyword argument 'temperature'"),
    ],
)
def test_what_is_no_rubric(options: dict[str, Any], message: str) -> None:
    spec = {"name": "rubric", "url": "http://localhost", "model": "m", "questions": QUESTIONS, **options}
    with pytest.raises(ConfigError, match=message):
        make_reward(spec, option="x")


def test_a_run_is_rewarded_by_it(server: Server, tmp_path: Path) -> None:
    server.reply = lambda text: "Yes" if "a" in text.partition("Answer:\n")[2].partition("\n\nQ")[0] else "No"
    spec = spec_of(server, questions=[{"name": "says_a", "ask": "Is there an a?"}])
    assert check_reward(spec, "data.reward_fn") == "says_a"
    trainer = make("RLOOTrainer", tmp_path, reward_fn=None, **{"data.reward_fn": spec, "train.total_steps": 1})
    metrics = trainer.learn()
    assert 0 <= metrics["rollout/reward/says_a/mean"] <= 1 and server.requests
    with pytest.raises(ConfigError, match=r"data\.reward_fn\.body\.api_key: looks like a secret"):
        make("RLOOTrainer", tmp_path, reward_fn=None, **{"data.reward_fn": {**spec, "body": {"api_key": "opensesame"}}})
