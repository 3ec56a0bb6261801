"""The tables of samples: which rows of a round there are, and what stands in their columns."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.contract.recipes import GENERATION, PROMPTS, count_letters, make
from tests.contract.runs import StopAfter, rows, run_until_stopped
from trlx_like.rewards.weighted import WeightedRewards

EVERY = {"train.log_samples_interval": 1}
ONE_ROUND = {"train.epochs": 1, "train.total_steps": 100}
ONLINE = ("PPOTrainer", "GRPOTrainer", "RLOOTrainer", "OnlineDPOTrainer", "RFTTrainer")


def tables(folder: Path, name: str = "training") -> list[dict[str, Any]]:
    return [row for row in rows(folder, "samples.jsonl") if row["table"] == name]


def by_group(table: Sequence[dict[str, Any]]) -> dict[int, list[dict[str, Any]]]:
    groups: dict[int, list[dict[str, Any]]] = {}
    for row in table:
        groups.setdefault(row["group"], []).append(row)
    return groups


@pytest.mark.parametrize("name", ONLINE)
def test_every_online_trainer_shows_its_samples(name: str, tmp_path: Path) -> None:
    trainer = make(name, tmp_path, **ONE_ROUND, **{"train.log_samples": 2})
    trainer.learn()
    table = tables(tmp_path)
    assert {row["step"] for row in table} == {1}
    size = {"PPOTrainer": 1}.get(name, 3)
    assert len(table) == 2 * size
    if size > 1:
        groups = by_group(table)
        assert list(groups) == [0, 1] and [len(group) for group in groups.values()] == [size, size]
        assert all(len({row["prompt"] for row in group}) == 1 for group in groups.values())
    for row in table:
        assert row["prompt"] in PROMPTS
        assert row["reward"] == pytest.approx(count_letters([row["output"]])[0])
        assert row["finish_reason"] == "eos" or row["length"] == GENERATION["max_new_tokens"]
        assert list(row)[-2:] == ["length", "finish_reason"]
        assert ("kl" in row) == (name != "RFTTrainer")


def test_ppo_by_hand(tmp_path: Path) -> None:
    """All of a round, in its order: the mean advantage of a response and its k3 estimate of the KL, from the store."""
    trainer = make("PPOTrainer", tmp_path, **ONE_ROUND, **{"train.log_samples": 9, "method.kl_penalty": "kl"})
    trainer.learn()
    table = tables(tmp_path)
    assert len(table) == len(trainer.store) == 5
    for row, element in zip(table, trainer.store.elements, strict=True):
        assert row["prompt"] == trainer.tokenizer.decode(element.prompt)
        d = (element.old_logprobs - element.ref_logprobs).double()
        assert row["kl"] == pytest.approx(float(((-d).exp() - 1 + d).sum()), abs=1e-6)
        assert row["advantage"] == pytest.approx(float(element.advantages.sum()) / len(element.response))
        assert row["length"] == len(element.response)


def test_the_advantages_of_a_group_are_seen_together(tmp_path: Path) -> None:
    """RLOO by hand: a score less the mean of the two others, less the same of the KL penalty, which is 0 at first."""
    trainer = make("RLOOTrainer", tmp_path, **ONE_ROUND)
    trainer.learn()
    groups = by_group(tables(tmp_path))
    assert len(groups) == 2
    for group in groups.values():
        scores = [row["reward"] for row in group]
        for row in group:
            assert row["advantage"] == pytest.approx(row["reward"] - (sum(scores) - row["reward"]) / 2, abs=1e-5)
            assert row["kl"] == pytest.approx(0, abs=1e-6)


def test_responses_that_are_left_out_have_no_advantage(tmp_path: Path) -> None:
    """Of five prompts one has scores that differ; of the abstained one there is no reward either."""

    def reward(prompts: Sequence[str], outputs: Sequence[str], **_: Any) -> list[float | None]:
        seen: dict[str, int] = {}
        given: list[float | None] = []
        for prompt in prompts:
            place = seen[prompt] = seen.get(prompt, -1) + 1
            given.append({"ab": [1.0, 2.0, None][place % 3]}.get(prompt, 0.5))
        return given

    options = {"method.max_sampling_attempts": 1, "method.num_prompts": 5, "train.log_samples": 5, "method.beta": 0.0}
    make("GRPOTrainer", tmp_path, reward_fn=reward, **ONE_ROUND, **options).learn()
    table = tables(tmp_path)
    assert len(table) == 15 and all("kl" not in row for row in table)
    told = [(row["reward"], row["advantage"]) for row in table if row["prompt"] == "ab"]
    assert told == [(1.0, pytest.approx(-0.5)), (2.0, pytest.approx(0.5)), (None, None)]
    assert {(row["reward"], row["advantage"]) for row in table if row["prompt"] != "ab"} == {(0.5, None)}


def test_online_dpo_says_which_responses_are_a_pair(tmp_path: Path) -> None:
    trainer = make("OnlineDPOTrainer", tmp_path, **ONE_ROUND, **{"train.log_samples": 7})
    before = [parameter.clone() for parameter in trainer.model.parameters()]
    trainer.learn()
    pairs = 0
    for group in by_group(tables(tmp_path)).values():
        scores = [row["reward"] for row in group]
        roles = {row["pair"]: row["reward"] for row in group}
        if max(scores) == min(scores):
            assert roles == {None: scores[0]}
            continue
        pairs += 1
        assert (roles["chosen"], roles["rejected"]) == (max(scores), min(scores))
        assert [row["pair"] for row in group].count("chosen") == 1
    assert pairs == len(trainer.store)
    assert all(row["kl"] == pytest.approx(0, abs=1e-6) for row in tables(tmp_path))  # the policy is its reference
    assert any(not torch.equal(*pair) for pair in zip(before, trainer.model.parameters(), strict=True))


def test_the_divergence_of_online_dpo_by_hand(tmp_path: Path) -> None:
    trainer = make("OnlineDPOTrainer", tmp_path, **{"train.total_steps": 6, "optimizer.kwargs": {"lr": 0.03}})
    trainer.learn()
    pairs = trainer.experience_class.collate(trainer.store.elements).completions()
    found = trainer.divergence(pairs.split())
    out = trainer.model(pairs, reference=True)
    d = (out.logprobs - out.ref_logprobs).detach().double()
    assert found == pytest.approx((((-d).exp() - 1 + d) * pairs.mask).sum(dim=1).tolist(), rel=1e-4)
    assert min(found) > 1e-4


@pytest.mark.parametrize("name", ["PPOTrainer", "OnlineDPOTrainer"])
def test_what_is_shown_does_not_change_the_run(name: str, tmp_path: Path) -> None:
    for number in (0, 3):
        make(name, tmp_path / str(number), **{"train.log_samples": number}).learn()
    assert not tables(tmp_path / "0") and tables(tmp_path / "3")
    assert rows(tmp_path / "0") == rows(tmp_path / "3")


def test_a_resumed_run_has_the_rows_of_each_round_once(tmp_path: Path) -> None:
    whole = make("PPOTrainer", tmp_path / "whole", **EVERY)
    whole.learn()
    run_until_stopped(make("PPOTrainer", tmp_path / "parts", callbacks=[StopAfter(4)], **EVERY))
    make("PPOTrainer", tmp_path / "parts", **EVERY, **{"train.resume_from_checkpoint": "auto"}).learn()
    assert tables(tmp_path / "parts") == tables(tmp_path / "whole")
    assert len({row["step"] for row in tables(tmp_path / "whole")}) == 2


def test_rounds_in_quick_succession_are_not_all_shown(tmp_path: Path) -> None:
    """A round is a step: those before steps 1, 4 and 7 are, also where a run was stopped in between."""
    options = {"method.num_prompts": 3, "train.epochs": 8, "train.log_samples_interval": 3}
    make("OnlineDPOTrainer", tmp_path / "whole", **options).learn()
    assert {row["step"] for row in tables(tmp_path / "whole")} == {1, 4, 7}
    run_until_stopped(make("OnlineDPOTrainer", tmp_path / "parts", callbacks=[StopAfter(5)], **options))
    make("OnlineDPOTrainer", tmp_path / "parts", **options, **{"train.resume_from_checkpoint": "auto"}).learn()
    assert tables(tmp_path / "parts") == tables(tmp_path / "whole")


def test_evaluations_say_how_responses_end_and_what_they_got(tmp_path: Path) -> None:
    make("PPOTrainer", tmp_path, stop_sequences=["a"], **ONE_ROUND).learn()
    table = tables(tmp_path, "samples")
    assert {row["finish_reason"] for row in table} <= {"eos", "stop", "length"}
    assert list(table[0]) == [
        *("step", "table", "prompt", "output", "reward", "metrics/length", "length", "finish_reason")
    ]
    assert all("a" not in row["output"] for row in table)


def test_trackers_that_have_tables_get_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    make("GRPOTrainer", tmp_path, **ONE_ROUND, **{"train.tracker": ["tensorboard", "wandb"]}).learn()
    wandb.teardown()
    events = accumulator.EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    text = events.Tensors("training/text_summary")[-1].tensor_proto.string_val[0].decode()
    assert text.startswith("| group | prompt | output | reward | advantage | kl | length | finish_reason |\n")
    assert text.count("\n") == 1 + len(tables(tmp_path)) == 1 + 2 * 3
    [file] = (tmp_path / "wandb").glob("offline-run-*/files/media/table/training_*.table.json")
    table = json.loads(file.read_text())
    assert table["columns"] == ["group", "prompt", "output", "reward", "advantage", "kl", "length", "finish_reason"]
    assert [row[2] for row in table["data"]] == [row["output"] for row in tables(tmp_path)]


@pytest.mark.parametrize("name", ["PPOTrainer", "GRPOTrainer"])
def test_each_part_of_a_reward_has_a_column(name: str, tmp_path: Path) -> None:
    """Also of the samples that one of the functions abstains from."""

    def letters(outputs: Sequence[str], **_: Any) -> list[float]:
        return [float(output.count("a")) for output in outputs]

    def brief(outputs: Sequence[str], **_: Any) -> list[float | None]:
        return [None if place % 2 else 0.25 for place in range(len(outputs))]

    reward = WeightedRewards([letters, brief], [1.0, 2.0])
    make(name, tmp_path, reward_fn=reward, **ONE_ROUND).learn()
    found = [*tables(tmp_path), *tables(tmp_path, "samples")]
    assert {row["reward/brief"] for row in found} == {None, 0.25}
    for row in found:
        assert row["reward/letters"] == row["output"].count("a")
        assert row["reward"] == pytest.approx(row["reward/letters"] + 2 * (row["reward/brief"] or 0))
        assert list(row).index("reward/brief") == list(row).index("reward") + 2
