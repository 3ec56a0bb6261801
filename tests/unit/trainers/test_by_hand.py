"""Loops by hand: one query alone, several, and what is neither."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.contract.recipes import GENERATION, SEQ2SEQ, make
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


def test_no_queries_have_no_responses(trainer: PPOTrainer) -> None:
    assert trainer.generate([]) == trainer.generate_eval([]) == []


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


@pytest.mark.parametrize("configured", [True, False], ids=["configured", "asked for"])
def test_a_step_knows_which_tokens_could_be_drawn(configured: bool, tmp_path: Path) -> None:
    options = {"top_k": 4, "temperature": 0.7}
    gen_kwargs = {**GENERATION, **(options if configured else {})}
    trainer = make("PPOTrainer", tmp_path, **{"method.gen_kwargs": gen_kwargs, "method.ppo_epochs": 1})
    queries = ["ab", "the cats", "zz top"]
    responses = trainer.generate(queries, **({} if configured else options))
    with pytest.raises(DataError, match=r"responses\[2\] was not sampled by trainer.generate"):
        trainer.step(queries, [*responses[:2], responses[2].add(1) % 30], [1.0, 0.0, 0.5])
    first = trainer.step(queries, responses, [1.0, 0.0, 0.5])
    assert all(element.choices is not None for element in trainer.store.elements) and not trainer.by_hand.sampled
    assert first["policy/ratio_deviation"] < 1e-6
    if configured:  # what an older policy has sampled is not fresh
        with pytest.raises(DataError, match=r"responses\[0\] was not sampled"):
            trainer.step(queries, responses, [1.0, 0.0, 0.5])


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {"temperature": 0.3},
            "responses[1] was sampled with temperature: 0.3, and the loss takes log-probabilities at ",
        ),
        ({"do_sample": False}, "responses[1] was sampled with do_sample: False, and"),
        ({"temperature": 0.7, "top_k": None}, ""),
    ],
)
def test_a_step_on_text_of_another_distribution_warns(
    options: dict[str, Any], said: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = make("PPOTrainer", tmp_path, **{"method.ppo_epochs": 1})
    for _ in range(2):
        responses = [trainer.generate("ab")[0], *trainer.generate(["zz", "ab"], **options)]
        trainer.generate_eval("b", temperature=0.1)
        assert not caplog.records
        trainer.step(["ab", "zz", "ab"], responses, [1.0, 0.0, 0.5])
        found = [record.getMessage() for record in caplog.records if "was sampled with" in record.getMessage()]
        assert [said in message for message in found] == ([True] if said else [])
        caplog.clear()
        said = ""  # once


def test_the_temperature_of_the_configuration_is_that_of_the_loss(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = make("PPOTrainer", tmp_path, **{"method.gen_kwargs": {**GENERATION, "temperature": 0.5}})
    trainer.step(["ab"], trainer.generate(["ab"]), [1.0])
    assert "was sampled with" not in caplog.text
    trainer.step(["ab"], trainer.generate(["ab"], temperature=1.0), [1.0])
    assert "was sampled with temperature: 1.0, and the loss takes log-probabilities at temperature 0.5" in caplog.text


def test_generating_for_evaluation_forgets_nothing(tmp_path: Path) -> None:
    trainer = make("PPOTrainer", tmp_path, **{"method.gen_kwargs": {**GENERATION, "top_k": 4}})
    responses = trainer.generate(["ab"])
    trainer.generate_eval(["ab"])
    assert trainer.step(["ab"], responses, [1.0])["rollout/score_mean"] == 1.0


def test_steps_of_an_encoder_decoder(tmp_path: Path) -> None:
    """A query is read by the encoder; the second token of the second response is that of a tool."""
    trainer = make("PPOTrainer", tmp_path, **SEQ2SEQ, **{"method.ppo_epochs": 1, "train.batch_size": 2})
    queries = [torch.tensor(trainer.by_hand.ids(text)) for text in ("ab", "the cats")]
    responses = trainer.generate(queries, max_new_tokens=3, eos_token_id=None)
    assert [response.shape for response in responses] == [(3,), (3,)]
    masks = [torch.ones(3), torch.tensor([1, 0, 1])]
    stats = trainer.step(queries, [responses[0].tolist(), responses[1]], [1.0, 0.0], response_masks=masks)
    assert stats["policy/ratio_deviation"] < 1e-6 and stats["policy/kl"] == 0 and stats["rollout/score_mean"] == 0.5
    assert trainer.units(trainer.experience_class.collate(trainer.store.elements)) == 5
    whole = trainer.generate(["ab"], max_new_tokens=4, do_sample=False)
    assert torch.equal(whole[0], trainer.generate("ab", max_new_tokens=4, do_sample=False)[0])


def test_a_size_of_batches_is_no_option_of_one_call(trainer: PPOTrainer) -> None:
    with pytest.raises(ConfigError, match="batch_size: is not an option of text generation"):
        trainer.generate(["ab"], batch_size=2)


def test_several_responses_in_one_tensor_are_refused(tmp_path: Path) -> None:
    trainer = make("PPOTrainer", tmp_path)
    with pytest.raises(DataError, match=r"responses\[0\] has the shape \[2, 3\]; give \[R\] each"):
        trainer.step(["ab"], [torch.zeros(2, 3).long()], [1.0])
    with pytest.raises(DataError, match=r"step: scores\[1\] is nan; a score must be finite"):
        trainer.step(["ab", "b"], [torch.tensor([3])] * 2, [1.0, float("nan")])
    assert not trainer.progress.round
