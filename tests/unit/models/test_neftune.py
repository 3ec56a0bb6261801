"""NEFTune's noise: its size, what it depends on, and that only training has it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.contract.recipes import make
from tests.distributed.ranks import on_ranks
from tests.tiny import tiny_lm
from trlx_like import default_sft_config
from trlx_like.errors import ConfigError
from trlx_like.models.neftune import noisy_embeddings
from trlx_like.trainers.sft import SFTExperience

ROWS = [[3, 4, 5, 6, 7, 8, 9, 10], [3, 4, 6], [5] * 5]


def batch_of(rows: list[list[int]]) -> SFTExperience:
    tensors = [torch.tensor(row) for row in rows]
    real = [torch.ones_like(row).bool() for row in tensors]
    return SFTExperience.collate(
        [SFTExperience(i[:1], r[:1], i[1:], r[1:], r[1:]) for i, r in zip(tensors, real, strict=True)]
    )


def noise(rows: list[list[int]], alpha: float, stream: int) -> tuple[Tensor, Tensor]:
    """What is added to the embeddings of a batch [B, T, H], and which tokens are real [B, T]."""
    lm, batch = tiny_lm(), batch_of(rows)
    inputs = batch.inputs()
    plain = lm.get_input_embeddings()(inputs["input_ids"])
    with noisy_embeddings(lm, batch, alpha, stream):
        noisy = lm.get_input_embeddings()(inputs["input_ids"])
    assert torch.equal(lm.get_input_embeddings()(inputs["input_ids"]), plain)
    return (noisy - plain).detach(), inputs["attention_mask"].bool()


def test_the_noise_is_uniform_up_to_its_limit() -> None:
    """alpha / sqrt(L H): 5 / sqrt(40 x 16) = 0.1976 of 40 tokens, and 5 / sqrt(25 x 16) = 0.25 of 25 and padding."""
    added, _ = noise([[3] * 40, [4] * 25], 5.0, 11)
    assert added.shape[-1] == 16
    for row, (tokens, limit) in enumerate([(40, 0.1976), (25, 0.25)]):
        own = added[row, :tokens]
        assert 0.9 * limit < float(own.abs().max()) <= limit + 1e-4
        assert float(own.std()) == pytest.approx(limit / 3**0.5, rel=0.12) and abs(float(own.mean())) < 0.1 * limit


def test_the_noise_of_a_token_follows_from_the_tokens_before_it_and_the_stream() -> None:
    together, real = noise(ROWS, 5.0, 11)
    for row, ids in enumerate(ROWS):
        alone, _ = noise([ids], 5.0, 11)
        torch.testing.assert_close(alone[0], together[row][real[row]], rtol=0, atol=1e-6)
    unit = [together[row] * len(ids) ** 0.5 for row, ids in enumerate(ROWS)]
    torch.testing.assert_close(unit[0][:2], unit[1][:2])  # both begin with 3, 4
    assert float((unit[0][2] - unit[1][2]).abs().max()) > 0.1
    assert float((unit[2][0] - unit[2][1]).abs().max()) > 0.1  # the same token again
    assert float((noise(ROWS, 5.0, 12)[0] - together).abs().max()) > 0.1


def gradients(trainer: Any, batch: SFTExperience) -> dict[str, Tensor]:
    """Of the first step on a batch, which is refused."""
    seen: dict[str, Tensor] = {}

    def look(metrics: dict[str, float]) -> bool:
        seen.update((name, p.grad.clone()) for name, p in trainer.model.named_parameters() if p.grad is not None)
        return False

    trainer.accept, trainer.progress.step = look, 0
    trainer.optimize(batch)
    return seen


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")  # the steps are refused
def test_only_training_has_noise_which_microbatches_do_not_change(tmp_path: Path) -> None:
    changes = {"train.max_grad_norm": None, "train.batch_size": 5}
    trainer, plain = (make("SFTTrainer", tmp_path, **changes, **{"method.neftune_noise_alpha": a}) for a in (5.0, None))
    trainer.make_experience()
    batch = SFTExperience.collate(trainer.store.elements)
    trainer.model.eval()
    plain.model.eval()
    assert trainer.loss(batch).loss == plain.loss(batch).loss
    whole, without = gradients(trainer, batch), gradients(plain, batch)
    assert max(float((whole[name] - without[name]).abs().max()) for name in whole) > 1e-3
    trainer.config.train.minibatch_size = 2
    for name, gradient in gradients(trainer, batch).items():
        torch.testing.assert_close(gradient, whole[name], rtol=0, atol=1e-6)


def tuned(rank: int, folder: Path) -> dict[str, float]:
    """The metrics of a run with noise on its held-out sets, of which one process has nothing of the first."""
    sets = {"eval_samples": {"a": ["ab cd"], "b": ["the cat", "zz"]}}
    changes = {"train.batch_size": 4, "train.total_steps": 4, "method.neftune_noise_alpha": 5.0}
    trainer = make("SFTTrainer", folder, **changes, **sets, samples=["ab cd", "the cat sat", "a", "zz top."])
    trainer.learn()
    return {name: value for name, value in trainer.last_metrics.items() if name.startswith(("eval/", "losses/"))}


def test_two_processes_are_the_run_of_one(tmp_path: Path) -> None:
    alone = tuned(0, tmp_path / "one")
    assert {"eval/perplexity@a", "eval/losses/total_loss@b", "eval/losses/total_loss"} <= set(alone)
    for together in on_ranks(tuned, tmp_path / "two"):
        assert together == pytest.approx(alone, abs=1e-5)


def test_frozen_blocks_run_in_each_step(tmp_path: Path) -> None:
    changes = {"model.num_layers_unfrozen": 1}
    kept, trainer = (make("SFTTrainer", tmp_path, **changes, **{"method.neftune_noise_alpha": a}) for a in (None, 5.0))
    assert kept.model.trunk is not None and trainer.model.trunk is None


def test_an_encoder_decoder_is_refused() -> None:
    with pytest.raises(ConfigError, match="method.neftune_noise_alpha: is for causal models"):
        default_sft_config().evolve(model={"model_arch_type": "seq2seq"}, method={"neftune_noise_alpha": 5.0})
