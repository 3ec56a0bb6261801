"""RFT: when the pool grows, what is chosen from it, and what the loss is on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.contract.recipes import GENERATION, PROMPTS, make
from tests.contract.runs import rows
from trlx_like.config.methods.rft import RFTConfig
from trlx_like.data import Completion
from trlx_like.data.pool import ScoredResponse
from trlx_like.errors import ConfigError
from trlx_like.trainers.rft import RFTTrainer


class Record:
    """A reward function that keeps what it was called with: so many points a sample as it has letters."""

    def __init__(self, abstain: str = "none of them") -> None:
        self.calls: list[dict[str, Any]] = []
        self.abstain = abstain

    def __call__(self, **given: Any) -> list[float | None]:
        self.calls.append(given)
        pairs = zip(given["prompts"], given["outputs"], strict=True)
        return [None if prompt == self.abstain else float(len(output)) for prompt, output in pairs]


def of_round(trainer: RFTTrainer, number: int) -> dict[str, float]:
    """Metrics of making the experience of a round."""
    trainer.progress.round = number
    trainer.store.clear()
    return trainer.make_experience()


def test_every_prompt_is_answered_as_often_as_asked_for(tmp_path: Path) -> None:
    """Five prompts three times, in chunks of seven; the answers to a prompt come together."""
    record = Record()
    prompts = [{"prompt": text, "weight": len(text)} for text in PROMPTS]
    trainer = make("RFTTrainer", tmp_path, reward_fn=record, prompts=prompts)
    trainer.make_experience()
    assert [len(call["outputs"]) for call in record.calls] == [7, 7, 1]
    assert [prompt for call in record.calls for prompt in call["prompts"]] == [p for p in PROMPTS for _ in range(3)]
    for call in record.calls:
        assert set(call) == {"samples", "prompts", "outputs", "tokenizer", "weight"}
        assert call["weight"] == [len(prompt) for prompt in call["prompts"]]
        assert call["tokenizer"] is trainer.tokenizer
    assert [len(of_prompt) for of_prompt in trainer.pool.scores()] == [3] * 5


def test_the_pool_grows_every_so_many_rounds_and_the_percentile_rises_between(tmp_path: Path) -> None:
    """Epochs are rounds: six of them, of which the pool grows in the first, third and fifth."""
    make("RFTTrainer", tmp_path, **{"train.epochs": 6, "train.total_steps": 1000}).learn()
    rounds = [row for row in rows(tmp_path) if "pool/percentile" in row]
    assert [row["pool/percentile"] for row in rounds] == pytest.approx([0.3, 0.6] * 3)
    assert [row["pool/responses"] for row in rounds] == [15, 15, 30, 30, 45, 45]
    assert ["rollout/score_mean" in row for row in rounds] == [True, False] * 3
    # A round is one pass: so many steps as there are batches of three, and total_steps was not reached.
    steps = [int(row["step"]) for row in rounds] + [rows(tmp_path)[-1]["step"] + 1]
    assert [after - before for before, after in zip(steps, steps[1:], strict=False)] == [
        -(-int(row["pool/selected"]) // 3) for row in rounds
    ]


def test_total_steps_end_a_round_early(tmp_path: Path) -> None:
    trainer = make("RFTTrainer", tmp_path, **{"train.epochs": 100, "train.total_steps": 2})
    trainer.learn()
    assert (trainer.progress.step, trainer.progress.round, trainer.progress.position) == (2, 1, 2)


def test_what_is_chosen_by_hand(tmp_path: Path) -> None:
    """Two prompts with known scores: the .3 quantile of 0, 1, 2, 3 is .9, that of 10, 10, 10 is 10."""
    trainer = make("RFTTrainer", tmp_path)
    first, second = [2, 3], [4]
    trainer.pool.extend([ScoredResponse(first, [5, score], f"d{score}", float(score)) for score in (0, 1, 2, 3)])
    trainer.pool.extend([ScoredResponse(second, [9, 9, 0], "hh", 10.0)] * 3)
    metrics = trainer.select(0)
    pairs = [(element.prompt.tolist(), element.response.tolist()) for element in trainer.store.elements]
    assert pairs == [(first, [5, 1]), (first, [5, 2]), (first, [5, 3]), (second, [9, 9, 0])]
    assert metrics == pytest.approx(
        {
            "pool/percentile": 0.3,
            "pool/responses": 7,
            "pool/score_mean": 36 / 7,
            "pool/threshold_mean": (0.901 + 9.999) / 2,
            "pool/threshold_min": 0.901,
            "pool/threshold_max": 9.999,
            "pool/kept_fraction": 6 / 7,
            "pool/kept_score_mean": 36 / 6,
            "pool/kept_prompts": 1,
            "pool/selected": 4,
        }
    )


def test_prompts_whose_best_is_the_worst_of_all_are_left_out(tmp_path: Path) -> None:
    trainer = make("RFTTrainer", tmp_path)
    rows = [([2], [5], 0.0), ([2], [6], 0.0), ([3], [5], 1.0), ([3], [6], 0.0)]
    trainer.pool.extend([ScoredResponse(prompt, response, str(response), score) for prompt, response, score in rows])
    assert trainer.select(1)["pool/kept_prompts"] == 0.5
    assert [element.prompt.tolist() for element in trainer.store.elements] == [[3]]


def test_what_was_sampled_is_what_is_trained_on(tmp_path: Path) -> None:
    """The ids themselves, the EOS with them: not those of the text made from them."""
    sampled: list[tuple[list[int], list[int]]] = []
    trainer = make("RFTTrainer", tmp_path, **{"method.start_percentile": 0.0})
    sample = trainer.sampler.sample

    def watch(*args: Any, **options: Any) -> Any:
        samples = sample(*args, **options)
        sampled.extend((e.prompt.tolist(), e.response.tolist()) for e in samples.completion.split())
        return samples

    trainer.sampler.sample = watch
    metrics = {**trainer.make_experience(), **trainer.rollouts.metrics()}
    stored = [(element.prompt.tolist(), element.response.tolist()) for element in trainer.store.elements]
    assert all(pair in sampled for pair in stored)
    texts = [(tuple(prompt), trainer.decode([torch.tensor(response)])[0]) for prompt, response in stored]
    assert len(set(texts)) == len(stored) == metrics["pool/selected"]
    assert metrics["rollout/length_mean"] == sum(len(response) for _, response in sampled) / 15


def test_the_loss_is_on_responses_only(tmp_path: Path) -> None:
    """Hugging Face's own loss with labels of -100 on prompts and padding; the log-probabilities are those at
    temperature 1, whatever was sampled at."""
    trainer = make("RFTTrainer", tmp_path, **{"method.gen_kwargs": {**GENERATION, "temperature": 0.3}})
    trainer.make_experience()
    batch = Completion.collate(trainer.store.elements)
    labels = torch.where(batch.mask, batch.response, -100)
    labels = torch.cat([torch.full_like(batch.prompt, -100), labels], dim=1)
    with torch.no_grad():
        expected = float(trainer.model.lm.eval()(**batch.inputs(), labels=labels).loss)
        got = float(trainer.loss(batch).loss) / trainer.units(batch)
    assert got == pytest.approx(expected, abs=1e-6)
    assert trainer.units(batch) == sum(len(element.response) for element in trainer.store.elements)


def test_nan_in_padding_changes_nothing(tmp_path: Path) -> None:
    """Whatever ids padding holds."""
    trainer = make("RFTTrainer", tmp_path)
    trainer.make_experience()
    batch = Completion.collate(trainer.store.elements)
    assert not batch.mask.all()
    with torch.no_grad():
        expected = trainer.loss(batch).loss
        batch.response = torch.where(batch.mask, batch.response, 17)
        torch.testing.assert_close(trainer.loss(batch).loss, expected, rtol=0, atol=0)


def test_a_reward_may_abstain(tmp_path: Path) -> None:
    trainer = make("RFTTrainer", tmp_path, reward_fn=Record(abstain="ab"))
    trainer.make_experience()
    assert len(trainer.pool) == 12
    texts = trainer.decode([element.prompt for element in trainer.store.elements])
    assert set(texts) == set(PROMPTS) - {"ab"}


def test_token_rewards_count_as_their_sum(tmp_path: Path) -> None:
    def dense(output_ids: list[list[int]]) -> list[list[float]]:
        return [[0.25, 0.5, *[0.0] * len(ids)][: len(ids)] for ids in output_ids]

    trainer = make("RFTTrainer", tmp_path, reward_fn=dense, **{"method.gen_kwargs": {**GENERATION, "eos_token_id": 0}})
    trainer.make_experience()
    assert {score for of_prompt in trainer.pool.scores() for score in of_prompt.tolist()} <= {0.25, 0.75}


def test_a_prompt_that_is_given_twice_has_one_pool(tmp_path: Path) -> None:
    trainer = make("RFTTrainer", tmp_path, prompts=["ab", "cd", "ab"])
    trainer.make_experience()
    assert [len(of_prompt) for of_prompt in trainer.pool.scores()] == [6, 3]


def test_a_growth_that_fails_leaves_the_pool_as_it_was(tmp_path: Path) -> None:
    trainer = make("RFTTrainer", tmp_path)
    of_round(trainer, 0)
    before = trainer.pool.scores()
    trainer.reward_fn = lambda outputs: [1.0] * len(outputs) if len(outputs) == 7 else 1 / 0
    with pytest.raises(Exception, match="ZeroDivisionError"):
        of_round(trainer, 2)
    assert all(torch.equal(one, other) for one, other in zip(trainer.pool.scores(), before, strict=True))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"start_percentile": 0.99}, r"method.start_percentile: 0.99 must be at most method.end_percentile \(0.95\)"),
        ({"start_percentile": 1.1}, "method.start_percentile: must be a number from 0 to 1, got 1.1"),
        ({"n_improve_steps": 0}, "method.n_improve_steps: must be a whole number of at least 1, got 0"),
        (
            {"gen_kwargs": {"max_new_tokens": 4, "do_sample": False}},
            "method.gen_kwargs.do_sample: false makes method.n_generations_per_prompt .32. equal",
        ),
        ({"gen_kwargs": {"max_new_tokens": 4, "top_k": [1, 2]}}, r"top_k: \[1, 2\] is a sweep"),
    ],
)
def test_options_that_cannot_be_meant(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        RFTConfig(**options)


def test_options_that_are_fine() -> None:
    """Any way to sample: the loss does not compare with it. With one step the end of the schedule means nothing."""
    assert RFTConfig(gen_kwargs={"max_new_tokens": 4, "top_p": 0.9, "repetition_penalty": 1.2}).unused_options() == []
    assert RFTConfig(n_improve_steps=1, start_percentile=0.99, end_percentile=0.5).unused_options() == [
        "end_percentile"
    ]
