"""Loops by hand: one query alone, several, and what is neither."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.contract.recipes import make
from trlx_like.errors import ConfigError, DataError

PPOTrainer = Any


@pytest.fixture(scope="module")
def trainer(tmp_path_factory: pytest.TempPathFactory) -> PPOTrainer:
    return make("PPOTrainer", tmp_path_factory.mktemp("run"), **{"train.total_steps": 3, "train.epochs": 100})


def test_one_query_alone_has_one_response(trainer: PPOTrainer) -> None:
    options = {"max_new_tokens": 3, "eos_token_id": None, "do_sample": False}
    ids = torch.tensor(trainer.by_hand.ids("the cat"))
    [expected] = trainer.generate(["the cat"], **options)
    for query in ("the cat", ids):
        response = trainer.generate(query, **options)
        assert response.shape == (1, 3) and torch.equal(response[0], expected)
        assert torch.equal(trainer.generate_eval(query, **options), response)
    rows = trainer.generate(torch.stack([ids, ids]), **options)
    assert len(rows) == 2 and torch.equal(rows[1], expected)


def test_queries_that_are_none_are_refused(trainer: PPOTrainer) -> None:
    with pytest.raises(DataError, match="A query must be text, a tensor of token ids or a list of messages, not 3"):
        trainer.generate([3, 4, 5])


def test_responses_of_single_queries_are_stepped_on_and_total_steps_ends_the_loop(trainer: PPOTrainer) -> None:
    """A batch of 3 and two passes are two steps a round, so that the second round ends in its first step."""
    responses = [trainer.generate(query) for query in ("ab", "b", "zz")]
    assert all(response.dim() == 2 for response in responses)
    steps = []
    while not trainer.finished:
        trainer.step(["ab", "b", "zz"], responses, [1.0, 0.0, 0.5])
        steps.append(trainer.progress.step)
    assert steps == [2, 3]
    with pytest.raises(
        ConfigError, match=r"step: training is complete after 3 steps \(train.total_steps: 3\) and 2 rounds"
    ):
        trainer.step(["ab"], responses[:1], [1.0])


def test_several_responses_in_one_tensor_are_refused(tmp_path: Path) -> None:
    trainer = make("PPOTrainer", tmp_path)
    with pytest.raises(DataError, match=r"responses\[0\] has the shape \[2, 3\]; give \[R\] each"):
        trainer.step(["ab"], [torch.zeros(2, 3).long()], [1.0])
