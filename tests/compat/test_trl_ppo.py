"""Programs of TRL 0.7's pages run with the import changed."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.contract.runs import rows
from tests.distributed.ranks import on_ranks
from tests.tiny import save_tiny, tiny_lm, tiny_tokenizer
from tests.unit.models.support import sharp_lm
from tests.unit.models.test_reward_adapter import reward_model, with_policy_adapter
from trlx_like import default_ppo_config
from trlx_like.compat.trl import (
    AutoModelForCausalLMWithValueHead,
    LengthSampler,
    PPOConfig,
    PPOTrainer,
    create_reference_model,
    set_seed,
)
from trlx_like.errors import ConfigError, DataError

SMALL: dict[str, Any] = {"max_new_tokens": 6, "batch_size": 4, "mini_batch_size": 2, "ppo_epochs": 2}


@pytest.fixture
def folder(tmp_path: Path) -> str:
    return save_tiny(tmp_path / "gpt2")


def test_the_quick_start(folder: str, tmp_path: Path) -> None:
    model = AutoModelForCausalLMWithValueHead.from_pretrained(folder)
    ref_model = AutoModelForCausalLMWithValueHead.from_pretrained(folder)
    tokenizer = tiny_tokenizer()
    config = PPOConfig(**{**SMALL, "batch_size": 1, "mini_batch_size": 1, "output_dir": str(tmp_path / "run")})
    trainer = PPOTrainer(config, model, ref_model, tokenizer)
    query = tokenizer.encode("this morning i went", return_tensors="pt")
    options: dict[str, Any] = {
        "min_length": -1,
        "top_k": 0.0,
        "top_p": 1.0,
        "do_sample": True,
        "pad_token_id": 0,
        "max_new_tokens": 5,
    }
    response = trainer.generate(list(query), return_prompt=False, **options)
    stats = trainer.step([query[0]], [response[0]], [torch.tensor(1.0)])
    assert stats["policy/kl"] == 0 and stats["rollout/score_mean"] == 1.0
    held = trainer.model.reference_modules()
    assert held == [ref_model.pretrained_model] and trainer.model.lm is model.pretrained_model
    assert trainer.generate(query[0]).shape[0] == 1 and trainer.config.train.seq_length == 64  # of the model
    whole = trainer.generate(query[0])[0]
    assert torch.equal(whole[: query.shape[1]], query[0]) and len(whole) > query.shape[1]
    trainer.close()


def test_the_policy_scores_with_the_reward_adapter_of_the_model(tmp_path: Path) -> None:
    """One model is policy, reference, value and reward, and training leaves the rewards as they are."""
    lm, ids = sharp_lm("gpt2"), torch.tensor([[5, 6, 7, 8]])
    expected = float(reward_model(lm, "gpt2", tmp_path / "reward")(input_ids=ids).logits.detach())
    model = with_policy_adapter(lm, "gpt2")
    model.add_and_load_reward_modeling_adapter(tmp_path / "reward")
    trainer = PPOTrainer(PPOConfig(**{**SMALL, "output_dir": str(tmp_path / "run")}), model, None, tiny_tokenizer())
    policy: Any = trainer.accelerator.unwrap_model(trainer.model)
    queries = [torch.tensor([3, 4])] * 4
    for _ in range(2):
        assert float(policy.compute_reward_score(input_ids=ids)[:, -1, 0]) == pytest.approx(expected, abs=1e-5)
        responses = trainer.generate(queries, return_prompt=False)
        trainer.step(queries, responses, [1.0, 0.0, 1.0, 0.0])
    trainer.close()


def test_the_value_head_of_the_model_is_trained_further(folder: str, tmp_path: Path) -> None:
    """Also one that TRL has saved; an exported model has it again."""
    model = AutoModelForCausalLMWithValueHead.from_pretrained(folder)
    with torch.no_grad():
        model.v_head.summary.weight.fill_(0.25)
    model.save_pretrained(tmp_path / "saved")
    loaded = AutoModelForCausalLMWithValueHead.from_pretrained(tmp_path / "saved")
    trainer = PPOTrainer(PPOConfig(**{**SMALL, "output_dir": str(tmp_path / "run")}), loaded, None, tiny_tokenizer())
    queries = [torch.tensor([3, 4])] * 4
    responses = trainer.generate(queries, return_prompt=False)
    weight = trainer.model.heads["value"].summary.weight
    assert weight is loaded.v_head.summary.weight and bool((weight == 0.25).all())
    trainer.step(queries, responses, [1.0, 0.0, 1.0, 0.0])
    assert bool((weight != 0.25).all())
    trainer.save_pretrained(tmp_path / "out")
    again = AutoModelForCausalLMWithValueHead.from_pretrained(tmp_path / "out")
    assert torch.equal(again.v_head.summary.weight, weight)
    trainer.close()


def test_the_canonical_loop(folder: str, tmp_path: Path) -> None:
    """Data set, collator, a sampler of lengths, rewards, `log_stats`; the loop of TRL's sentiment example."""
    tokenizer = tiny_tokenizer()
    texts = ["ab", "the cat", "zz top", "a", "b", "c d", "the", "dog", "e"]
    dataset = [{"query": text, "input_ids": torch.tensor(tokenizer.encode(text))} for text in texts]

    def collator(data: list[dict[str, Any]]) -> dict[str, list[Any]]:
        return {key: [d[key] for d in data] for key in data[0]}

    model = AutoModelForCausalLMWithValueHead.from_pretrained(folder)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02, betas=(0.8, 0.9))
    config = PPOConfig(**SMALL, learning_rate=1.41e-5, steps=4, adap_kl_ctrl=False, output_dir=str(tmp_path / "run"))
    trainer = PPOTrainer(
        config,
        model,
        create_reference_model(model),
        tokenizer,
        dataset=dataset,
        data_collator=collator,
        optimizer=optimizer,
        lr_scheduler=torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5),
    )
    lengths = LengthSampler(2, 6)
    seen, scores = [], []
    for _ in range(2):
        for batch in trainer.dataloader:
            queries = batch["input_ids"]
            responses = trainer.generate(queries, return_prompt=False, length_sampler=lengths, top_p=0.9)
            assert all(2 <= len(r) <= 5 or r[-1] == tokenizer.eos_token_id for r in responses)
            batch["response"] = [tokenizer.decode(r.squeeze()) for r in responses]
            rewards = [torch.tensor(float(text.count("a"))) for text in batch["response"]]
            stats = trainer.step(queries, responses, rewards)
            trainer.log_stats(stats, batch, rewards)
            seen += batch["query"]
            scores.append(float(sum(rewards)))
    assert len(seen) == 16 and len(set(seen)) > 4
    assert trainer.finished and trainer.progress.step == 4 * 2 * 2  # rounds, passes, batches of two
    (group,) = trainer.optimizer.param_groups
    assert trainer.optimizer.optimizer is optimizer and group["lr"] == 0.02 / 4  # after 4 rounds
    rates = [row["learning_rate"] for row in rows(tmp_path / "run")]
    assert rates == [0.02] * 8 + [0.01] * 8
    assert [row["step"] for row in rows(tmp_path / "run")] == list(range(1, 17)) and trainer.kl_coef == 0.2
    assert (tmp_path / "run" / "report.html").is_file() and (tmp_path / "run" / "checkpoint_16").is_dir()


def test_a_schedule_goes_on_once_a_round_that_ends_early_too(folder: str, tmp_path: Path) -> None:
    model = AutoModelForCausalLMWithValueHead.from_pretrained(folder)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    early = {"early_stopping": True, "target_kl": 1e-9, "output_dir": str(tmp_path / "run")}
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    trainer = PPOTrainer(
        PPOConfig(**{**SMALL, **early}), model, None, tiny_tokenizer(), optimizer=optimizer, lr_scheduler=schedule
    )
    queries = [torch.tensor([3, 4])] * 4
    for rate in (0.5, 0.25):
        trainer.step(queries, trainer.generate(queries, return_prompt=False), [1.0, 0.0, 1.0, 0.0])
        assert optimizer.param_groups[0]["lr"] == rate and trainer.optimisation.scheduler is schedule
    assert trainer.progress.step < 8
    trainer.close()


def test_the_mappings_for_accelerate() -> None:
    kwargs: dict[str, Any] = {
        "log_with": "wandb",
        "tracker_kwargs": {"wandb": {"notes": "a try", "api_key": "0123"}},
        "accelerator_kwargs": {"mixed_precision": "bf16"},
        "project_kwargs": {"logging_dir": "logs", "total_limit": 2},
    }
    config = PPOConfig(**kwargs).config("gpt2")
    assert (config.backend.mixed_precision, config.train.logging_dir, config.train.keep_checkpoints) == (
        "bf16",
        "logs",
        2,
    )
    assert config.recorded()["train"]["tracker_kwargs"] == {"wandb": {"notes": "a try", "api_key": "<redacted>"}}


def test_set_seed() -> None:
    drawn = []
    for _ in range(2):
        set_seed(3)
        drawn.append((random.random(), np.random.rand(), float(torch.rand(()))))
    assert drawn[0] == drawn[1]


def stepped(rank: int, folder: Path) -> tuple[list[int], dict[str, float]]:
    config = PPOConfig(**{**SMALL, "steps": 1, "output_dir": str(folder)})
    dataset = [{"query": text} for text in "abcdefghi"]
    trainer = PPOTrainer(config, tiny_lm(), None, tiny_tokenizer(), dataset=dataset)
    (batch,) = trainer.dataloader
    stats = trainer.step(batch["query"], [torch.tensor([4, 5])] * 4, [float(rank)] * 4)
    return [len(batch["query"]), trainer.config.train.batch_size, trainer.progress.step], stats


def test_sizes_count_the_samples_of_each_process(tmp_path: Path) -> None:
    """As in TRL: a batch of 4 on each of two processes, in steps of 2 on each."""
    for counts, stats in on_ranks(stepped, tmp_path):
        assert counts == [4, 4, 2 * 2] and stats["rollout/score_mean"] == 0.5


def test_what_cannot_be_followed_is_said(folder: str, tmp_path: Path) -> None:
    for options, words in (
        ({"forward_size": 3}, r"PPOConfig.forward_size \(3\): is unknown"),
        ({"save_steps": 3}, r"PPOConfig.save_steps \(3\): here this is train.checkpoint_interval"),
        (
            {"accelerator_kwargs": {"cpu": True}},
            "PPOConfig.accelerator_kwargs: 'cpu' is not followed; mixed_precision,",
        ),
    ):
        with pytest.raises(ConfigError, match=words):
            PPOConfig(**options)
    PPOConfig(tracker_kwargs={}, optimize_cuda_cache=True)
    with pytest.raises(ConfigError, match=r"PPOConfig.learning_ratee \(0\): is unknown"):
        PPOConfig(learning_ratee=0)
    with pytest.raises(
        ConfigError, match=r"model.model_path: is a AutoModelForCausalLMWithValueHead, .* .pretrained_m"
    ):
        default_ppo_config().evolve(model={"model_path": AutoModelForCausalLMWithValueHead(tiny_lm())})
    lm = tiny_lm()
    options = {**SMALL, "output_dir": str(tmp_path / "run")}
    with pytest.raises(ConfigError, match="scheduler.name: must be a registered name or a schedule of torch"):
        PPOTrainer(PPOConfig(**options), lm, lr_scheduler=object())
    with pytest.raises(ConfigError, match="model.ref_model_path: is the model that is trained"):
        PPOTrainer(PPOConfig(**options), lm, lm, tiny_tokenizer())
    trainer = PPOTrainer(PPOConfig(**options), lm, None, tiny_tokenizer(), dataset=[{"text": "a"}], num_shared_layers=1)
    assert trainer.model.num_layers_unfrozen == 1
    with pytest.raises(DataError, match="dataset has the columns text; it needs query or input_ids"):
        list(trainer.dataloader)
    with pytest.raises(DataError, match="step: 1 queries; PPOConfig.batch_size says 4"):
        trainer.step([torch.tensor([3])], [torch.tensor([4])], [1.0])
    with pytest.raises(ConfigError, match="generate_ref_response"):
        trainer.generate(torch.tensor([3]), generate_ref_response=True)
    trainer.close()
