"""Rollouts of some of the tokens only (top-k, top-p, min-p): they are trained on as they were sampled."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.contract.recipes import GENERATION, LORA, PROMPTS, SEQ2SEQ, make
from tests.contract.runs import rows
from tests.tiny import tiny_config
from tests.unit.models.support import plain_distributions
from trlx_like.data import Completion
from trlx_like.errors import ConfigError, DataError
from trlx_like.functional.choices import Choices, spans

WIDE = tiny_config(vocabulary=200, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, initializer_range=0.5)
"""A mask of its vocabulary has 7 words, so that small sets are lists and large ones masks."""
CUTS = [{"top_k": 5}, {"top_p": 0.6}, {"min_p": 0.2}, {"top_k": 40, "top_p": 0.95, "min_p": 0.001}]
GROUPS = {"method.num_prompts": 2, "method.num_generations": 2}
RUNS: dict[str, tuple[str, dict[str, Any]]] = {
    "ppo": ("PPOTrainer", {"method.num_value_layers_unfrozen": 1, "model.num_layers_unfrozen": 1}),
    "ppo, penalty in the loss": ("PPOTrainer", {"method.kl_in": "loss", "method.kl_penalty": "full"}),
    "ppo, adapter": ("PPOTrainer", {"model.peft_config": LORA, "sampler.engine": "copy"}),
    "ppo, encoder-decoder": ("PPOTrainer", SEQ2SEQ),
    "grpo": ("GRPOTrainer", GROUPS),
    "rloo": ("RLOOTrainer", {**GROUPS, "method.rollout_correction": "token"}),
    "online dpo": ("OnlineDPOTrainer", {"method.num_prompts": 4}),
}


def alternating(outputs: Sequence[str], **_: Any) -> list[float]:
    """A reward that differs between responses; most tokens of the wide model have no text."""
    return [float(row % 2) for row in range(len(outputs))]


def kept(logprobs: np.ndarray, options: dict[str, Any]) -> np.ndarray:
    """Which tokens can be drawn, by the definitions of top-k, top-p and min-p in this order. logprobs: float64 [V]"""
    order = np.argsort(-logprobs, kind="stable")
    if k := options.get("top_k"):
        order = order[:k]
    if p := options.get("top_p"):
        share = np.exp(logprobs[order]) / np.exp(logprobs[order]).sum()
        order = order[: int((share.cumsum() - share < p).sum())]  # up to the one that reaches p
    if m := options.get("min_p"):
        order = order[np.exp(logprobs[order] - logprobs[order[0]]) >= m]
    found = np.zeros(len(logprobs), dtype=bool)
    found[order] = True
    return found


@pytest.mark.parametrize("options", CUTS, ids=["top-k", "top-p", "min-p", "all three"])
def test_sets_and_scores_are_those_of_the_definitions(options: dict[str, Any], tmp_path: Path) -> None:
    """Each set against float64, and each log-probability under policy and reference against the sum over the set."""
    trainer = make("PPOTrainer", tmp_path, **{"model.model_path": WIDE, "method.gen_kwargs": {**GENERATION, **options}})
    trainer.make_experience()
    sizes, lists = [], 0
    for element in trainer.store.elements:
        row = type(element).collate([element])
        alone = Completion(row.prompt[0], row.prompt_mask[0], row.response[0], row.mask[0])
        logp = plain_distributions(trainer.model.lm, alone, 0.7)
        assert row.choices is not None and row.choice_sizes is not None
        places = spans(row.choices, row.choice_sizes)[0]
        sets = Choices(row.choices.flatten(), places).possible(places, 200).numpy()
        lists += int((row.choice_sizes < 7).sum())
        for at, of_token in enumerate(logp.double().numpy()):
            assert (sets[at] == kept(of_token, options)).all()
            sizes.append(int(sets[at].sum()))
            within = of_token[int(row.response[0, at])] - np.log(np.exp(of_token[sets[at]]).sum())
            assert float(row.old_logprobs[0, at]) == pytest.approx(within, abs=1e-5)
    assert 1 < np.mean(sizes) < 150 and lists
    if options == {"top_k": 5}:
        assert set(sizes) == {5} and lists == len(sizes)
    # At the start reference and policy are one, over the same sets: no divergence at all.
    assert trainer.kl_coef and all(torch.equal(e.ref_logprobs, e.old_logprobs) for e in trainer.store.elements)


@pytest.mark.parametrize("size", [None, 1])
@pytest.mark.parametrize("run", list(RUNS))
def test_fresh_experience_has_ratio_one(run: str, size: int | None, tmp_path: Path) -> None:
    name, changes = RUNS[run]
    cut = {"top_k": 12, "top_p": 0.9} if size else {"min_p": 0.3}
    model = {} if "encoder" in run else {"model.model_path": WIDE}
    changes = {**model, **changes, "method.gen_kwargs": {**GENERATION, **cut}, "train.minibatch_size": size}
    trainer = make(name, tmp_path, **changes, **{"train.total_steps": 3}, reward_fn=alternating)
    trainer.learn()
    table = rows(tmp_path)
    fresh = next(row for row in table if "rollout/score_mean" in row and "losses/total_loss" in row)
    if name == "OnlineDPOTrainer":  # at the start the policy is the reference: its loss is log 2 exactly
        assert fresh["losses/total_loss"] == pytest.approx(np.log(2), abs=1e-7) and fresh["policy/kl"] == 0
        assert table[-1]["policy/kl"] > 0
    else:
        assert fresh["policy/ratio_deviation"] < 1e-6
        assert max(row.get("policy/ratio_deviation", 0) for row in table) > 1e-4


def test_the_learner_computes_the_same_bits(tmp_path: Path) -> None:
    trainer = make(
        "PPOTrainer", tmp_path, **{"model.model_path": WIDE, "method.gen_kwargs": {**GENERATION, "top_p": 0.7}}
    )
    trainer.make_experience()
    batch = trainer.store.experience_class.collate(trainer.store.elements)
    old = {tuple(part.response.flatten().tolist()): out.logprobs for _, part, out in trainer.score_batch(batch, 2)}
    for _, part in batch.microbatches(2):
        assert torch.equal(trainer.model(part).logprobs, old[tuple(part.response.flatten().tolist())])


def test_without_the_sets_the_ratio_is_not_one(tmp_path: Path) -> None:
    """What the engine drew, scored over all tokens, is refused before it is learned from."""
    trainer = make("GRPOTrainer", tmp_path, **{"method.gen_kwargs": {**GENERATION, "top_k": 3}})
    trainer.make_experience()
    batch = trainer.store.experience_class.collate(trainer.store.elements)
    batch.choices = batch.choice_sizes = None
    ratio = (trainer.model(batch).logprobs - batch.old_logprobs)[batch.mask].exp()
    assert float(ratio.detach().max()) < 0.9
    with pytest.raises(DataError, match=r"method\.gen_kwargs\.top_k: the experience does not hold which tokens"):
        trainer.push_to_store(batch.split())


def test_an_engine_that_cannot_tell_is_refused_before_a_model_is_loaded(tmp_path: Path) -> None:
    engine = {"sampler.engine": "vllm", "sampler.kwargs": {"url": "http://localhost:1", "folder": str(tmp_path)}}
    with pytest.raises(ConfigError, match=r"^method\.gen_kwargs\.min_p: sampler\.engine \(vllm\) does not tell which"):
        make(
            "PPOTrainer",
            tmp_path,
            **engine,
            **{"method.gen_kwargs": {**GENERATION, "min_p": 0.1}, "model.model_path": "missing"},
        )


def test_imitation_is_of_text_and_needs_no_sets(tmp_path: Path) -> None:
    changes = {"method.gen_kwargs": {**GENERATION, "top_k": 3}, "train.total_steps": 2}
    trainer = make("RFTTrainer", tmp_path, prompts=PROMPTS, **changes)
    trainer.learn()
    assert all(element.choices is None for element in trainer.store.elements)
    assert rows(tmp_path)[-1]["losses/total_loss"] > 0
