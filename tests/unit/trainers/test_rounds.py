"""Loops that users write leave the same files as `learn`, and end where it ends."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.contract.recipes import PROMPTS, count_letters, make
from tests.contract.runs import rows
from trlx_like.errors import ConfigError, DataError
from trlx_like.trainers.ppo import PPOTrainer

LENGTH = {"train.total_steps": 6, "train.epochs": 100, "train.checkpoint_interval": 4}


def loop(trainer: Any, most: int = 100) -> list[dict[str, float]]:
    """The canonical loop: prompts, responses, scores, a step."""
    stats: list[dict[str, float]] = []
    while not trainer.finished and len(stats) < most:
        for batch in trainer.dataloader:
            responses = trainer.generate(batch["input_ids"])
            batch["response"] = trainer.decode(responses)
            stats.append(trainer.step(batch["input_ids"], responses, count_letters(batch["response"])))
    return stats


def test_a_loop_by_hand_writes_what_learn_writes(tmp_path: Path) -> None:
    """The first round of both is on the same prompts; files, metrics and checkpoints have the same names."""
    learned = make("PPOTrainer", tmp_path / "learned", **LENGTH)
    learned.learn()
    trainer = make("PPOTrainer", tmp_path / "by hand", **LENGTH)
    stats = loop(trainer)
    folders = [{path.name for path in (tmp_path / name).iterdir()} for name in ("learned", "by hand")]
    assert folders[0] == folders[1] >= {"metrics.jsonl", "samples.jsonl", "report.html", "ledger.jsonl", "checkpoint_4"}
    tables = [rows(tmp_path / name) for name in ("learned", "by hand")]
    assert [row["step"] for row in tables[0]] == [row["step"] for row in tables[1]]
    missing = {name for one, two in zip(*tables, strict=True) for name in set(one) - set(two)}
    assert not {name for name in missing if not name.startswith("time/")}, missing
    assert trainer.finished and trainer.progress.step == 6 and len(stats) == 2
    assert stats[0]["rollout/score_mean"] == tables[1][1]["rollout/score_mean"]
    with pytest.raises(ConfigError, match=r"step: training is complete after 6 steps \(train.total_steps: 6\)"):
        trainer.step(["ab"], [torch.tensor([3])], [1.0])


def test_a_loop_by_hand_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    first = make("PPOTrainer", tmp_path, **LENGTH)
    loop(first, most=1)
    first.close()
    del first
    gc.collect()
    again = make("PPOTrainer", tmp_path, **LENGTH, **{"train.resume_from_checkpoint": "auto"})
    responses = again.generate(["ab"])
    late = make("PPOTrainer", tmp_path, **LENGTH, **{"train.resume_from_checkpoint": "auto"})
    with pytest.raises(ConfigError, match="the run was resumed at step 4 only now.*call trainer.begin()"):
        late.step(["ab"], responses, [1.0])
    late.close()
    loop(again)
    steps = [row["step"] for row in rows(tmp_path)]
    assert steps == sorted(set(steps)) == list(range(7))


def test_a_step_reads_tokens_of_a_tool_and_does_not_train_on_them(tmp_path: Path) -> None:
    """By hand: gamma = lam = 1, no KL. An advantage of the policy's tokens is the score less the value of the state."""
    options = {"method.init_kl_coef": 0.0, "method.lam": 1.0, "method.whiten_advantages": False}
    trainer = make("PPOTrainer", tmp_path, **options, **{"method.cliprange_reward": None, "method.ppo_epochs": 1})
    answers = [torch.tensor([5, 6, 7, 8, 9]), torch.tensor([5, 6])]
    masks = [torch.tensor([1, 0, 0, 1, 0]), torch.tensor([1, 1])]
    stats = trainer.step(["ab", "c"], answers, [2.0, -1.0], response_masks=masks)
    tool, plain = sorted(trainer.store.elements, key=lambda element: -len(element.response))
    assert tool.own is not None and tool.own.tolist() == [True, False, False, True, False]
    assert tool.scores.tolist() == [0, 0, 0, 2.0, 0]  # the score is that of the policy's last token
    for element, score in ((tool, 2.0), (plain, -1.0)):
        expected = torch.where(element.own, score - element.old_values, 0)
        torch.testing.assert_close(element.advantages, expected, rtol=0, atol=1e-6)
    assert (tool.old_logprobs[~tool.own] == 0).all() and (tool.old_logprobs[tool.own] < 0).all()
    assert stats["policy/ratio_deviation"] < 1e-6 and stats["rollout/length_mean"] == 3.5
    batch = trainer.experience_class.collate([tool, plain])
    assert trainer.units(batch) == 4
    # Another answer of the tool changes what the policy reads, and so its probabilities after it.
    other = trainer.experience_class.collate([tool])
    other.response[0, 1:3] = torch.tensor([20, 21])
    with torch.no_grad():
        moved = trainer.model(other).logprobs[0] - trainer.model(trainer.experience_class.collate([tool])).logprobs[0]
    assert moved[0] == 0 and moved[3] != 0
    for wrong, words in (
        (masks[:1], "1 response_masks for 2 responses"),
        ([masks[0], torch.ones(3)], r"response_masks\[1\] has 3 entries for 2 tokens"),
        ([masks[0], torch.zeros(2)], r"response_masks\[1\] is 0 everywhere"),
    ):
        with pytest.raises(DataError, match=words):
            trainer.step(["ab", "c"], answers, [2.0, -1.0], response_masks=wrong)


def test_more_can_be_logged(tmp_path: Path) -> None:
    trainer = make("PPOTrainer", tmp_path, prompts=[{"prompt": text, "answer": text[:1]} for text in PROMPTS])
    batch = next(trainer.dataloader)
    assert batch["query"] == trainer.decode(batch["input_ids"]) and batch["answer"] == [q[:1] for q in batch["query"]]
    responses = trainer.generate(batch["input_ids"])
    stats = trainer.step(batch["input_ids"], responses, [1.0] * 5)
    batch["response"] = trainer.decode(responses)
    trainer.log_stats({**stats, "tool/calls": 3.0}, batch, [1.0] * 5, ["query", "response", "answer"])
    assert rows(tmp_path)[-1]["tool/calls"] == 3.0 and set(rows(tmp_path)[-1]) < {
        "tool/calls",
        "step",
        "time",
        "seconds",
    }
    with pytest.raises(ConfigError, match="log_stats: the batch has no 'calls'"):
        trainer.log_stats(stats, batch, [1.0] * 5, ["calls"])
    trainer.close()
    with pytest.raises(ConfigError, match="dataloader: there are no prompts"):
        _ = PPOTrainer(trainer.config).dataloader
