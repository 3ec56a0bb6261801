"""Evaluation: what is generated, scored and shown, for one setting or a sweep of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.contract.recipes import GENERATION, PROMPTS, count_letters, ingredients, lengths, make
from tests.contract.runs import rows
from trlx_like import PPOTrainer
from trlx_like.api import make_trainer
from trlx_like.errors import ConfigError, DataError
from trlx_like.pipelines.prompts import PromptPipeline
from trlx_like.trainers.evaluation import combinations

ONE_STEP = {"train.total_steps": 1, "train.eval_interval": 1}


def test_every_combination_of_the_swept_options() -> None:
    options = {"temperature": [0.5, 1.0], "max_new_tokens": 3, "min_p": [0.1, 0.2], "eos_token_id": [1, 2]}
    fixed = {"max_new_tokens": 3, "eos_token_id": [1, 2]}  # a list of ends is one value
    assert list(combinations(options)) == [
        (f"@temperature={t}@min_p={p}", {"temperature": t, "min_p": p, **fixed}) for t in (0.5, 1.0) for p in (0.1, 0.2)
    ]
    assert list(combinations(fixed)) == [("", fixed)]


def test_numbers_and_table_by_hand(tmp_path: Path) -> None:
    """Rewards 1, 2 and 6: mean 3, deviation of the three sqrt((4 + 1 + 9) / 3). A metric of its own for each."""

    def reward(prompts: Sequence[str], **_: Any) -> list[float]:
        return [{"ab": 1.0, "the cats": 2.0, "b": 6.0}[prompt] for prompt in prompts]

    def metric(prompts: Sequence[str], **_: Any) -> dict[str, Any]:
        return {"letters": [len(prompt) for prompt in prompts], "version": 7}

    prompts = ["ab", "the cats", "b"]
    trainer = make("SFTTrainer", tmp_path, eval_prompts=prompts, reward_fn=reward, metric_fn=metric, **ONE_STEP)
    trainer.learn()
    first = rows(tmp_path)[0]
    assert first["reward/mean"] == 3.0
    assert first["reward/std"] == pytest.approx((14 / 3) ** 0.5)
    assert first["metrics/letters"] == pytest.approx((2 + 8 + 1) / 3)
    assert first["metrics/version"] == 7
    table = [row for row in rows(tmp_path, "samples.jsonl") if row["step"] == 0]
    assert [row["prompt"] for row in table] == prompts
    assert [row["reward"] for row in table] == [1.0, 2.0, 6.0]
    assert [row["metrics/letters"] for row in table] == [2, 8, 1]
    assert {row["table"] for row in table} == {"samples"}
    lengths_seen = [row["length"] for row in table]
    assert first["generation/length"] == pytest.approx(sum(lengths_seen) / 3)
    assert all(row["finish_reason"] == "eos" or row["length"] == GENERATION["max_new_tokens"] for row in table)


def test_a_sweep_has_a_metric_and_rows_for_each_setting(tmp_path: Path) -> None:
    sweep = {**GENERATION, "max_new_tokens": [1, 4], "temperature": [0.7, 1.5]}
    trainer = make(
        "SFTTrainer", tmp_path, **ONE_STEP, **{"method.gen_kwargs": sweep, "train.best_metric": "reward/mean"}
    )
    trainer.learn()
    first = rows(tmp_path)[0]
    names = [f"@max_new_tokens={n}@temperature={t}" for n in (1, 4) for t in (0.7, 1.5)]
    assert {name.removeprefix("reward/mean") for name in first if name.startswith("reward/mean")} == set(names)
    assert first["generation/length@max_new_tokens=1@temperature=0.7"] == 1.0
    table = [row for row in rows(tmp_path, "samples.jsonl") if row["step"] == 0]
    assert [row["sweep"] for row in table] == [name[1:] for name in names for _ in range(3)]
    best = max(value for row in rows(tmp_path) for key, value in row.items() if key.startswith("reward/mean"))
    assert trainer.progress.best == best
    assert trainer.max_prompt_length == 20 - 4
    assert {len(response) for response in trainer.generate_eval(["ab"] * 4)} == {1}  # the first of each sweep


@pytest.mark.parametrize("name", ["SFTTrainer", "OnlineDPOTrainer"])
def test_several_sets_have_metrics_of_their_own(name: str, tmp_path: Path) -> None:
    """Rewards 1 and 2 in one set and 6 in another: means 1.5 and 6, and 3 over all."""

    def reward(prompts: Sequence[str], **_: Any) -> list[float]:
        return [{"ab": 1.0, "the cats": 2.0, "b": 6.0}.get(prompt, 0.0) for prompt in prompts]

    sets = {"easy": ["ab", "the cats"], "hard": ["b"]}
    make(name, tmp_path, eval_prompts=sets, reward_fn=reward, judge=None, **ONE_STEP).learn()
    first = rows(tmp_path)[0]
    assert [first[f"reward/mean{suffix}"] for suffix in ("", "@easy", "@hard")] == [3.0, 1.5, 6.0]
    assert first["reward/std@easy"] == 0.5 and first["generation/length@hard"] > 0
    table = [row for row in rows(tmp_path, "samples.jsonl") if row["step"] == 0 and row["table"] == "samples"]
    assert [(row["set"], row["prompt"]) for row in table] == [("easy", "ab"), ("easy", "the cats"), ("hard", "b")]


@pytest.mark.parametrize("given", [True, False], ids=["replaced", "added"])
def test_pipelines_are_replaced_as_in_trlx(given: bool, tmp_path: Path) -> None:
    """Those of the constructor are replaced; without any, these are the prompts."""
    config, arguments = ingredients("PPOTrainer", tmp_path, **{"train.total_steps": 1})
    bare = {"reward_fn": arguments["reward_fn"], "stop_sequences": None}
    trainer: Any = make_trainer(config, **arguments) if given else PPOTrainer(config, **bare)
    trainer.add_prompt_pipeline(PromptPipeline(["zz"] * 3, 8, trainer.tokenizer))
    trainer.add_eval_pipeline(PromptPipeline(["b"] * 2, 8, trainer.tokenizer))
    trainer.learn()
    assert {trainer.decode([element.prompt])[0] for element in trainer.store.elements} == {"zz"}
    samples = rows(tmp_path, "samples.jsonl")
    assert [row["prompt"] for row in samples if row["table"] == "samples" and row["step"] == 1] == ["b", "b"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"eval_prompts": {"easy": []}}, r"eval_prompts\['easy'\] is empty"),
        ({"eval_prompts": {"easy": "ab"}}, r"eval_prompts\['easy'\] is a string; give a list"),
        ({"prompts": {"easy": ["ab"]}}, "prompts is a dict; give a list of rows"),
    ],
)
def test_sets_that_are_none(arguments: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=message):
        make("PPOTrainer", tmp_path, **arguments)


def test_samples_that_the_reward_abstains_from_do_not_count(tmp_path: Path) -> None:
    def reward(outputs: Sequence[str], **_: Any) -> list[float | None]:
        return [4.0, *([None] * (len(outputs) - 1))]

    trainer = make("SFTTrainer", tmp_path, reward_fn=reward, **ONE_STEP)
    trainer.learn()
    assert rows(tmp_path)[0]["reward/mean"] == 4.0
    assert [row["reward"] for row in rows(tmp_path, "samples.jsonl")][:3] == [4.0, None, None]


def test_when_it_abstains_from_all_there_is_no_mean_and_no_best(tmp_path: Path) -> None:
    trainer = make("SFTTrainer", tmp_path, reward_fn=lambda outputs: [None] * len(outputs), **ONE_STEP)
    trainer.learn()
    assert rows(tmp_path)[0]["reward/mean"] == "NaN"
    assert trainer.progress.best is None


def test_dense_rewards_count_as_their_sum(tmp_path: Path) -> None:
    trainer = make("SFTTrainer", tmp_path, reward_fn=lambda outputs: [[(0, 1, 0.5)]] * len(outputs), **ONE_STEP)
    trainer.learn()
    assert rows(tmp_path)[0]["reward/mean"] == 0.5


def test_without_prompts_for_it_the_first_training_prompts_are_used(tmp_path: Path) -> None:
    make("PPOTrainer", tmp_path, **ONE_STEP).learn()  # a batch of three
    assert [row["prompt"] for row in rows(tmp_path, "samples.jsonl")][:3] == PROMPTS[:3]


def test_prompts_beyond_the_sampler_batch_keep_their_order(tmp_path: Path) -> None:
    trainer = make("SFTTrainer", tmp_path, eval_prompts=PROMPTS, **ONE_STEP, **{"sampler.batch_size": 2})
    trainer.learn()
    assert [row["prompt"] for row in rows(tmp_path, "samples.jsonl")][:5] == PROMPTS


def test_an_unknown_best_metric_is_refused_with_those_there_are(tmp_path: Path) -> None:
    trainer = make("SFTTrainer", tmp_path, metric_fn=lengths, **ONE_STEP, **{"train.best_metric": "accuracy"})
    with pytest.raises(ConfigError, match=r"train.best_metric \('accuracy'\) is not reported.*metrics/length"):
        trainer.learn()


def test_metadata_reaches_the_reward_of_an_evaluation(tmp_path: Path) -> None:
    def reward(outputs: Sequence[str], bonus: Sequence[float], **_: Any) -> list[float]:
        return [b + 0 * c for b, c in zip(bonus, count_letters(outputs), strict=True)]

    prompts = [{"prompt": "ab", "bonus": 1.0}, {"prompt": "b", "bonus": 3.0}]
    make("SFTTrainer", tmp_path, eval_prompts=prompts, reward_fn=reward, **ONE_STEP).learn()
    assert rows(tmp_path)[0]["reward/mean"] == 2.0
    assert prompts[0] == {"prompt": "ab", "bonus": 1.0}
