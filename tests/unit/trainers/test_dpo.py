"""DPOTrainer: its references, its data, its evaluation, and what it refuses."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.contract.recipes import LORA, NO_DROPOUT, PREFERENCES, make
from tests.contract.runs import rows
from tests.tiny import save_tiny, tiny_config, tiny_tokenizer
from tests.unit.trainers.test_dpo_losses import BETA, PLAIN, TEXTS, WHOLE, step
from trlx_like.config.methods.dpo import DPOConfig
from trlx_like.data import PreferenceExperience
from trlx_like.errors import ConfigError, DataError
from trlx_like.models.layout import blocks

# References.


def test_the_first_step_is_from_the_reference(tmp_path: Path) -> None:
    """Every reward is 0, so every margin is, and the loss is that of a coin."""
    trainer = make("DPOTrainer", tmp_path, **PLAIN, **{"train.total_steps": 1})
    trainer.learn()
    first = rows(tmp_path)[-1]
    assert first["losses/total_loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert first["rewards/chosen"] == pytest.approx(0, abs=1e-5)
    assert first["rewards/accuracies"] <= 1


def test_a_loaded_model_is_its_own_reference_whatever_is_on_disk(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    lm = AutoModelForCausalLM.from_pretrained(save_tiny(tmp_path / "model", **NO_DROPOUT))
    with torch.no_grad():
        for parameter in lm.parameters():
            parameter.mul_(1.5)
    for live in (True, False):
        changes = {"model.model_path": lm, "method.precompute_ref_log_probs": not live, "train.total_steps": 1}
        make("DPOTrainer", tmp_path / str(live), **PLAIN, **changes, **{"optimizer.kwargs": {"lr": 0.0}}).learn()
        first = rows(tmp_path / str(live))[-1]
        assert first["losses/total_loss"] == pytest.approx(math.log(2), abs=1e-6)


@pytest.mark.parametrize(
    ("trained", "other"),
    [({}, True), ({"model.num_layers_unfrozen": 1}, False), ({"model.peft_config": LORA}, True)],
    ids=["all", "top", "adapter"],
)
def test_a_precomputed_reference_is_the_frozen_one(trained: dict[str, Any], other: bool, tmp_path: Path) -> None:
    path = save_tiny(tmp_path / "other", seed=7) if other else None
    runs = []
    for precompute in (True, False):
        changes = {
            "method.precompute_ref_log_probs": precompute,
            "model.ref_model_path": path,
            **trained,
        }
        make("DPOTrainer", tmp_path / str(precompute), **PLAIN, **changes).learn()
        runs.append(rows(tmp_path / str(precompute)))
    for got, expected in zip(*runs, strict=True):
        if got["step"] == 1 and not other:  # which of two zeros is larger is for rounding to say
            expected["rewards/accuracies"] = got["rewards/accuracies"]
        assert got == pytest.approx(expected, abs=1e-4)
    assert (abs(runs[0][1]["rewards/chosen"]) > 1e-3) == other


PACKED: dict[str, dict[str, Any]] = {
    "precomputed": {"method.precompute_ref_log_probs": True},
    "live": {"method.precompute_ref_log_probs": False},
    "frozen blocks": {"model.num_layers_unfrozen": 1},
    "adapter": {"model.peft_config": LORA, "method.precompute_ref_log_probs": False},
    "checkpointing": {"backend.gradient_checkpointing": True, "method.precompute_ref_log_probs": False},
}


@pytest.mark.parametrize("changes", PACKED.values(), ids=PACKED)
def test_packed_pairs_learn_the_same_from_fewer_tokens(changes: dict[str, Any], tmp_path: Path) -> None:
    """Attention is taken to cost nothing, or it would be what matters with 16 hidden states.

    Attention's biases of keys have gradients that are rounding alone, which Adam would scale up without this eps.
    """
    steady = {"train.total_steps": 2, "optimizer.kwargs": {"lr": 3e-3, "eps": 1e-4}}
    losses, gradients, tokens = [], [], []
    for packs in (True, False):
        trainer = make("DPOTrainer", tmp_path / str(packs), **PLAIN, **WHOLE, **changes, **steady)
        assert trainer.model.compaction is not None
        if packs:
            assert trainer.model.compaction.longest == 64
        trainer.model.compaction = replace(trainer.model.compaction, share=False, hidden=10**6) if packs else None
        computed: list[int] = []
        blocks(trainer.model.lm)[-1].register_forward_hook(
            lambda _, args, output, computed=computed: computed.append(args[0].shape[0] * args[0].shape[1])
        )
        trainer.learn()
        steps = [row for row in rows(tmp_path / str(packs)) if "grad_norm" in row]
        losses.append([row["losses/total_loss"] for row in steps])
        gradients.append([row["grad_norm"] for row in steps])
        tokens.append(sum(computed))
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    assert gradients[0] == pytest.approx(gradients[1], rel=1e-5)
    assert tokens[0] < 0.8 * tokens[1]


@pytest.mark.parametrize("precompute", [True, None])
def test_no_second_model_stays_where_its_log_probabilities_are_known(precompute: bool | None, tmp_path: Path) -> None:
    changes = {"model.ref_model_path": save_tiny(tmp_path / "other"), "method.precompute_ref_log_probs": precompute}
    trainer = make("DPOTrainer", tmp_path / "run", **changes)
    trainer.make_experience()
    assert trainer.model.reference_modules() == []


@pytest.mark.parametrize("unfrozen", [-1, 1])
def test_a_reference_that_follows(unfrozen: int, tmp_path: Path) -> None:
    """Every second step it becomes the mixture; between them it stands still."""
    changes = {
        **PLAIN,
        "method.sync_ref_model": True,
        "method.ref_model_sync_steps": 2,
        "method.ref_model_mixup_alpha": 0.25,
        "model.num_layers_unfrozen": unfrozen,
    }
    trainer = make("DPOTrainer", tmp_path, **changes)
    trainer.make_experience()
    batch = PreferenceExperience.collate(trainer.store.elements)

    def reference() -> list[torch.Tensor]:
        return [own.clone() for own, _ in trainer.model._reference[0].weight_pairs(trainer.model.lm)]

    start = reference()
    for number in range(2):
        trainer.after_step(trainer.optimize(batch))
        policy = [twin.detach().clone() for _, twin in trainer.model._reference[0].weight_pairs(trainer.model.lm)]
        expected = [0.75 * a + 0.25 * b for a, b in zip(start, policy, strict=True)] if number else start
        for got, wanted in zip(reference(), expected, strict=True):
            torch.testing.assert_close(got, wanted)
    changed = [not torch.equal(a, b) for a, b in zip(start, policy, strict=True)]
    assert sum(changed) > 10 and len(changed) >= sum(1 for p in trainer.model.lm.parameters() if p.requires_grad)


def test_a_reference_of_another_kind_cannot_follow(tmp_path: Path) -> None:
    path = save_tiny(tmp_path / "other", layers=3)
    changes = {"method.sync_ref_model": True, "method.ref_model_sync_steps": 1, "model.ref_model_path": path}
    with pytest.raises(ConfigError, match=r"model.ref_model_path: a reference that follows the policy must be of its"):
        make("DPOTrainer", tmp_path / "run", **changes)


def test_without_a_reference_the_reward_is_the_log_probability(tmp_path: Path) -> None:
    trainer = make("DPOTrainer", tmp_path, **PLAIN, **WHOLE, **{"method.reference_free": True})
    metrics = step(trainer)
    assert metrics["rewards/chosen"] == pytest.approx(BETA * metrics["logps/chosen"], rel=1e-6)
    assert metrics["rewards/rejected"] == pytest.approx(BETA * metrics["logps/rejected"], rel=1e-6)


def test_dropout_is_off_unless_asked_for(tmp_path: Path) -> None:
    for asked in (False, True):
        changes = {"model.model_path": tiny_config(), "method.disable_dropout": not asked}
        trainer = make("DPOTrainer", tmp_path, **WHOLE, **changes)
        trainer.make_experience()
        batch = PreferenceExperience.collate(trainer.store.elements)
        trainer.model.train()
        assert (trainer.loss(batch).sums("pairs") == trainer.loss(batch).sums("pairs")) != asked


# Data and evaluation.


def test_what_it_says_about_its_data(tmp_path: Path) -> None:
    trainer = make("DPOTrainer", tmp_path)
    tokens = sum(len(text) + 1 for _, *completions in TEXTS for text in completions)
    assert trainer.make_experience() == {"data/pairs": 5.0, "data/tokens": float(tokens)}


def test_what_is_too_long_is_dropped_or_cut(tmp_path: Path) -> None:
    lengths = {"train.seq_length": 12, "method.gen_kwargs": {"max_new_tokens": 2}}
    dropped = make("DPOTrainer", tmp_path, **lengths, **{"method.too_long": "drop"})
    assert len(dropped.preferences) == 3
    start, end = (
        make("DPOTrainer", tmp_path, **lengths, **{"method.truncation_mode": mode, "method.max_prompt_length": 4})
        for mode in ("keep_start", "keep_end")
    )
    sides = [trainer.decode([torch.tensor(trainer.preferences[1].rejected)])[0] for trainer in (start, end)]
    assert sides == [" flew aw", " flew away"]
    assert len(start.preferences[1].prompt) == 4


def test_held_out_pairs_are_measured_as_those_of_training(tmp_path: Path) -> None:
    changes = {"train.batch_size": 4, "train.minibatch_size": 2, "train.eval_interval": 2}
    trainer = make("DPOTrainer", tmp_path, eval_preferences=PREFERENCES, **changes)
    trainer.learn()
    evaluated = [row for row in rows(tmp_path) if "eval/rewards/margins" in row]
    assert [row["step"] for row in evaluated] == [0, 2, 4, 6]
    assert evaluated[0]["eval/losses/sigmoid"] == pytest.approx(math.log(2), abs=1e-5)
    assert evaluated[-1]["eval/rewards/margins"] > evaluated[0]["eval/rewards/margins"]
    batch = PreferenceExperience.collate(trainer.store.elements)
    with torch.no_grad():
        output = trainer.loss(batch)
    counts = trainer.units(batch)
    assert counts["pairs"] == 5 and counts["tokens"] == counts["chosen_tokens"] + counts["rejected_tokens"]
    total = sum(float(value) / counts[unit] for unit, value in output.sums("pairs").items())
    assert evaluated[-1]["eval/losses/total_loss"] == pytest.approx(total, rel=1e-5)
    for name, metric in output.metrics.items():
        value, unit = metric if isinstance(metric, tuple) else (metric, "pairs")
        assert evaluated[-1][f"eval/{name}"] == pytest.approx(float(value) / counts[unit], rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("other", [True, False])
def test_the_samples_show_policy_and_reference_side_by_side(other: bool, tmp_path: Path) -> None:
    path = save_tiny(tmp_path / "other", seed=7) if other else None
    changes = {
        "method.generate_during_eval": True,
        "method.gen_kwargs": {"max_new_tokens": 6, "do_sample": False},
        "train.eval_interval": 3,
        "optimizer.kwargs": {"lr": 0.05},
        "model.ref_model_path": path,
    }
    make("DPOTrainer", tmp_path / "run", **changes).learn()
    shown = rows(tmp_path / "run", "samples.jsonl")
    steps = {number: [row for row in shown if row["step"] == number] for number in (0, 3, 6)}
    reference = [row["reference"] for row in steps[0]]
    assert len(reference) == 3 and any(reference)
    assert ([row["output"] for row in steps[0]] == reference) != other
    for number in (3, 6):
        assert [row["reference"] for row in steps[number]] == reference
        assert [row["output"] for row in steps[number]] != reference
    assert list(shown[0])[2:5] == ["prompt", "output", "reference"]


def test_rows_of_messages(tmp_path: Path) -> None:
    """By the chat template, with a prompt or with what both conversations begin with."""
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m['role'][0] }} {{ m['content'] }}{{ eos_token }}{% endfor %}"
        "{% if add_generation_prompt %}a {% endif %}"
    )
    asked = [{"role": "user", "content": "who"}]
    good, bad = ([{"role": "assistant", "content": text}] for text in ("me", "not me"))
    pairs = [
        {"prompt": asked, "chosen": good, "rejected": bad},
        {"chosen": asked + good, "rejected": asked + bad},
    ]
    changes = {"tokenizer.tokenizer_path": tokenizer, "train.total_steps": 2}
    trainer = make("DPOTrainer", tmp_path, preferences=pairs, **changes)
    first, second = trainer.preferences
    assert first == second
    assert tokenizer.decode(first.prompt) == "u who<eos>a "
    assert [tokenizer.decode(ids) for ids in (first.chosen, first.rejected)] == ["me<eos>", "not me<eos>"]
    assert trainer.learn()["rewards/margins"] > 0


def test_a_resumed_run_wants_the_same_pairs(tmp_path: Path) -> None:
    """Their log-probabilities under the reference are in the checkpoint; other pairs would go unread."""
    make("DPOTrainer", tmp_path, **{"train.total_steps": 2}).learn()
    others = [*PREFERENCES[:-1], ("abcdefg", "h", "x y")]
    forced = {"train.resume_from_checkpoint": "auto", "train.force_resume": True}
    resumed = make("DPOTrainer", tmp_path, preferences=others, **forced)
    with pytest.raises(DataError, match=r"preferences: the resumed run had 5 rows, which are not the 5 given now"):
        resumed.learn()
    resumed = make("DPOTrainer", tmp_path, eval_preferences=others, **forced)
    with pytest.raises(DataError, match=r"eval_preferences: the resumed run had 0 rows, which are not the 5 given"):
        resumed.learn()


def test_bad_rows_are_found_before_a_model_is_loaded(tmp_path: Path) -> None:
    bad = [*PREFERENCES, {"prompt": "a", "chosen": "b", "rejected": "b"}]
    missing = {"model.model_path": str(tmp_path / "nowhere")}
    with pytest.raises(DataError, match=r"^preferences\[5\]: chosen and rejected are the same"):
        make("DPOTrainer", tmp_path, preferences=bad, **missing)
    with pytest.raises(DataError, match=r"^eval_preferences\[5\]: chosen and rejected are the same"):
        make("DPOTrainer", tmp_path, eval_preferences=bad, **missing)


# Options that do not go together.


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"preferences": None}, r"DPOTrainer needs preferences: pass train\(preferences=...\) or set data.preferences"),
        ({"samples": ["a"]}, "DPOTrainer cannot use samples; it takes eval_preferences, eval_prompts, preferences"),
        ({"method.loss_type": "sigmoyd"}, "method.loss_type: must be one of sigmoid, hinge, .*, got 'sigmoyd'"),
        ({"method.loss_type": []}, "method.loss_type: must be one of sigmoid"),
        ({"method.loss_type": ["ipo", "ipo"]}, "method.loss_type: .*names a loss twice"),
        ({"method.loss_weights": [1.0]}, "method.loss_weights: has 1 weights for 2 losses"),
        ({"method.loss_weights": [0.0, 0.0]}, "method.loss_weights: .*must be at least 0, and not all 0"),
        ({"method.label_smoothing": 0.5}, "method.label_smoothing: must be a number of at least 0 below 0.5, got 0.5"),
        (
            {"method.loss_type": ["exo_pair", "sft"]},
            "method.label_smoothing: exo_pair is infinite without; set it above 0",
        ),
        (
            {"method.loss_type": ["hinge", "sft"], "method.label_smoothing": 0.1},
            "method.label_smoothing: hinge and sft know none; set it to 0, or use sigmoid, ",
        ),
        (
            {"method.loss_type": ["sigmoid", "apo_zero"], "method.f_divergence_type": "js_divergence"},
            "method.f_divergence_type: apo_zero knows only reverse_kl; use sigmoid",
        ),
        (
            {"method.loss_type": ["aot", "sft"], "method.use_weighting": True},
            "method.use_weighting: aot knows no weights",
        ),
        (
            {"method.loss_type": "sft", "method.loss_weights": None, "method.use_weighting": True},
            "method.use_weighting: sft has no pairs to weigh",
        ),
        ({"method.rpo_alpha": 1.0}, "method.rpo_alpha: adds the same term as loss_type sft"),
        (
            {"method.loss_type": ["aot", "sft"], "train.minibatch_size": 1},
            "train.minibatch_size: 1 cuts the batch that aot sorts as a whole; use null",
        ),
        (
            {"method.sync_ref_model": True, "method.precompute_ref_log_probs": True},
            "method.precompute_ref_log_probs: true does not go with method.sync_ref_model: the reference moves",
        ),
        (
            {"method.reference_free": True, "method.precompute_ref_log_probs": True},
            "method.precompute_ref_log_probs: true does not go with method.reference_free: there is no reference",
        ),
        (
            {"method.reference_free": True, "method.sync_ref_model": True},
            "method.sync_ref_model: true does not go with method.reference_free",
        ),
        (
            {"method.reference_free": True, "model.ref_model_path": "gpt2"},
            "method.reference_free: true does not go with model.ref_model_path",
        ),
        (
            {"method.sync_ref_model": True, "model.peft_config": {"peft_type": "LORA"}},
            "method.sync_ref_model: true does not go with model.peft_config",
        ),
        ({"model.num_layers_unfrozen": 0}, r"model.num_layers_unfrozen \(0\) leaves this trainer nothing to train"),
    ],
)
def test_what_it_cannot_work_with(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        make("DPOTrainer", tmp_path, **changes)


def test_options_that_do_nothing_are_named() -> None:
    idle: dict[str, Any] = {"f_alpha_divergence_coef": 0.2, "discopop_tau": 1.0, "ref_model_mixup_alpha": 1.0}
    assert DPOConfig(**idle, ref_model_sync_steps=2).unused_options() == [*idle, "ref_model_sync_steps"]
    used: dict[str, Any] = {"loss_type": "discopop", "f_divergence_type": "alpha_divergence", "sync_ref_model": True}
    assert DPOConfig(**idle, **used).unused_options() == []
