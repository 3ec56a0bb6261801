"""Each trainer reaches a threshold on a toy that takes seconds, from several seeds."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import tiny_pipelines
from tests.contract.recipes import PROMPTS, SEQ2SEQ, few, make
from tests.contract.runs import rows
from trlx_like.rewards.images import brightness

# One seed here; `python scripts/test.py --slow tests/learning` runs the others.
SEEDS = [1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (2, 3, 4, 5))]
pytestmark = [pytest.mark.learning, pytest.mark.parametrize("seed", SEEDS)]


def share_of_a(outputs: Sequence[str], **_: Any) -> list[float]:
    """1 for "aaaa"; an untrained model has one letter in thirty right."""
    return [output.count("a") / 4 for output in outputs]


# An evaluation has 20 responses to each prompt: of the 20 letters of a single one to each, two may be wrong by chance.
SCORED: dict[str, Any] = {"reward_fn": share_of_a, "metric_fn": None, "eval_prompts": PROMPTS * 20}


@pytest.mark.parametrize("model", [{}, pytest.param(SEQ2SEQ, marks=pytest.mark.slow)], ids=["causal", "seq2seq"])
def test_ppo_learns_to_say_a_letter(seed: int, model: dict[str, Any], tmp_path: Path) -> None:
    """Within 120 steps on 960 responses."""
    changes = {
        **{"train.seed": seed, "train.batch_size": 16, "train.total_steps": 120, "train.epochs": 100},
        **{"method.num_rollouts": 32, "method.chunk_size": 32, "method.init_kl_coef": 0.01, "method.ent_coef": 0.01},
        **{
            "method.gen_kwargs": {"max_new_tokens": 4, "eos_token_id": 0, "temperature": 1.0},
            "optimizer.kwargs": {"lr": 0.006},
        },
    }
    trainer = make("PPOTrainer", tmp_path, **SCORED, **model, **changes)
    metrics = trainer.learn()
    first = rows(tmp_path)[1]
    assert first["rollout/score_mean"] < 0.2
    assert metrics["rollout/score_mean"] > 0.9
    assert metrics["reward/mean"] > 0.9
    assert metrics["values/explained_variance"] > first["values/explained_variance"]


GROUP_METHODS: dict[str, tuple[str, dict[str, Any]]] = {
    "grpo": ("GRPOTrainer", {"method.beta": 0.01, "method.scale_rewards": "group"}),
    "grpo, top-p": (
        "GRPOTrainer",
        {
            **{"method.beta": 0.01, "method.scale_rewards": "group"},
            "method.gen_kwargs": {"max_new_tokens": 4, "eos_token_id": 0, "top_p": 0.9},
        },
    ),
    "rloo": ("RLOOTrainer", {"method.beta": 0.01}),
    # Without KL: of equal scores it is all that is left to be whitened, and leads away (docs/algorithms/rloo.md).
    "reinforce++": ("RLOOTrainer", {"method.beta": 0.0, "method.baseline": "batch", "method.loss_type": "dapo"}),
}


@pytest.mark.parametrize("kind", few(GROUP_METHODS, kept=("grpo", "rloo")))
def test_groups_learn_to_say_a_letter(kind: str, seed: int, tmp_path: Path) -> None:
    """Within 120 steps, on 8 responses to each of 4 prompts a round."""
    trainer_name, options = GROUP_METHODS[kind]
    changes = {
        **{"train.seed": seed, "train.batch_size": 16, "train.total_steps": 120, "train.epochs": 100},
        **{"method.num_prompts": 4, "method.num_generations": 8, "method.chunk_size": 4},
        **{
            "method.gen_kwargs": {"max_new_tokens": 4, "eos_token_id": 0, "temperature": 1.0},
            "optimizer.kwargs": {"lr": 0.003},
        },
        **options,
    }
    trainer = make(trainer_name, tmp_path, **SCORED, **changes)
    metrics = trainer.learn()
    assert rows(tmp_path)[1]["rollout/score_mean"] < 0.2
    assert metrics["rollout/score_mean"] > 0.9
    assert metrics["reward/mean"] > 0.9


def test_sft_learns_a_sentence(seed: int, tmp_path: Path) -> None:
    """Greedily it then completes every prompt as it was told."""
    sentence = " is here"
    changes = {
        **{"train.seed": seed, "train.batch_size": 5, "train.total_steps": 80, "train.epochs": 100},
        **{
            "optimizer.kwargs": {"lr": 0.02},
            "method.gen_kwargs": {"max_new_tokens": 9, "eos_token_id": 0, "do_sample": False},
        },
    }
    samples = [(prompt, sentence) for prompt in PROMPTS]
    trainer = make("SFTTrainer", tmp_path, samples=samples, reward_fn=None, **changes)
    losses = [row["losses/total_loss"] for row in (trainer.learn(), *rows(tmp_path)[1:2])]
    assert losses[0] < 0.1 < 3 < losses[1]
    with torch.no_grad():
        assert trainer.decode(trainer.generate_eval(PROMPTS)) == [sentence] * len(PROMPTS)


def test_rft_learns_to_say_a_letter(seed: int, tmp_path: Path) -> None:
    """By imitating the best of 32 responses to each of five prompts, which are made anew every other round."""
    changes = {
        **{"train.seed": seed, "train.batch_size": 8, "train.total_steps": 1000, "train.epochs": 24},
        **{"method.n_generations_per_prompt": 32, "method.start_percentile": 0.9, "method.chunk_size": 80},
        **{
            "method.gen_kwargs": {"max_new_tokens": 4, "eos_token_id": 0, "temperature": 1.0},
            "optimizer.kwargs": {"lr": 0.02},
        },
    }
    trainer = make("RFTTrainer", tmp_path, reward_fn=share_of_a, metric_fn=None, **changes)
    metrics = trainer.learn()
    first = rows(tmp_path)[1]
    assert first["rollout/score_mean"] < 0.2
    assert metrics["rollout/score_mean"] > 0.9
    assert metrics["reward/mean"] > 0.9
    assert trainer.progress.round == 24


def test_ilql_writes_the_best_of_what_it_has_read(seed: int, tmp_path: Path) -> None:
    """Of all strings of four a's and b's, rewarded for a's, it writes "aaaa"; imitation writes any of them."""
    outputs = ["".join(letters) for letters in product("ab", repeat=4)]
    options = {"max_new_tokens": 4, "eos_token_id": 0, "beta": [0, 30]}
    changes = {
        **{"train.seed": seed, "train.batch_size": 16, "train.total_steps": 150, "train.epochs": 300},
        **{"method.alpha": 0.3, "method.steps_for_target_q_sync": 2, "method.tau": 0.9, "method.beta": 0.0},
        # At a rate that stays at .01 the last step is one in sixteen times a bad one, depending on the last bits.
        **{"method.gen_kwargs": options, "optimizer.kwargs": {"lr": 0.01}, "scheduler.name": "cosine"},
    }
    data = {"samples": [("c", output) for output in outputs], "rewards": share_of_a(outputs)}
    trainer = make("ILQLTrainer", tmp_path, **data, eval_prompts=["c"] * 32, reward_fn=share_of_a, **changes)
    metrics = trainer.learn()
    assert rows(tmp_path)[0]["reward/mean@beta=30"] < 0.2
    assert metrics["reward/mean@beta=30"] > 0.95 > 0.7 > metrics["reward/mean@beta=0"] > 0.3


def test_dpo_recovers_a_known_order(seed: int, tmp_path: Path) -> None:
    """A judge prefers ab to cde and cde to f as if each were better by 1.5; so are then their rewards."""
    wins = {("ab", "cde"): 16, ("cde", "f"): 16, ("ab", "f"): 19}  # of 20: 20 sigmoid(1.5), 20 sigmoid(3)
    preferences = [
        ("best: ", *(pair if verdict < won else pair[::-1])) for pair, won in wins.items() for verdict in range(20)
    ]
    changes = {
        **{"train.seed": seed, "train.batch_size": 60, "train.total_steps": 60, "train.epochs": 100},
        **{"method.loss_type": "sigmoid", "method.loss_weights": None, "optimizer.kwargs": {"lr": 0.01}},
    }
    trainer = make(
        "DPOTrainer",
        tmp_path,
        preferences=preferences,
        eval_preferences=[("best: ", "ab", "cde"), ("best: ", "cde", "f")],
        eval_prompts=None,
        reward_fn=None,
        **changes,
    )
    metrics = trainer.learn()
    first = rows(tmp_path)[0]
    assert abs(first["eval/rewards/margins"]) < 1e-4
    assert metrics["eval/rewards/accuracies"] == 1
    assert abs(metrics["eval/rewards/margins"] - 1.45) < 0.15


@pytest.mark.parametrize(
    "divergence", ["reverse_kl", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("forward_kl", "jsd"))]
)
def test_distillation_learns_what_the_teacher_does(seed: int, divergence: str, tmp_path: Path) -> None:
    """The teacher has learned to say "aaaa"; an untrained student does so too after 60 steps on its own responses."""
    training = {"train.seed": seed, "train.batch_size": 16, "train.epochs": 100, "optimizer.kwargs": {"lr": 0.01}}
    training["scheduler.name"] = "cosine"
    options = {"method.gen_kwargs": {"max_new_tokens": 4, "eos_token_id": 0}}
    samples = {"samples": [(prompt, "aaaa") for prompt in PROMPTS * 4], "reward_fn": share_of_a}
    samples["eval_prompts"] = PROMPTS * 2
    teacher = make("SFTTrainer", tmp_path / "teacher", **samples, **training, **options, **{"train.total_steps": 100})
    taught = teacher.learn()["reward/mean"]
    student = {"model.ref_model_path": teacher.model.lm, "train.total_steps": 60, "method.divergence": divergence}
    given = {"reward_fn": share_of_a, "eval_prompts": PROMPTS, "metric_fn": None, "method.num_rollouts": 16}
    metrics = make("DistillTrainer", tmp_path / "student", **given, **training, **options, **student).learn()
    first = rows(tmp_path / "student")
    assert first[0]["reward/mean"] < 0.2 and taught > 0.9
    assert metrics["reward/mean"] > 0.95
    assert metrics["losses/total_loss"] < 0.2 * first[1]["losses/total_loss"]


# ipo wants best and worst 1 / (2 beta) nats apart and no further; "aaaa" is 14 nats away from a policy without a clue.
def test_kto_recovers_a_known_order(seed: int, tmp_path: Path) -> None:
    """Of 40 times each, ab was liked 35 times, cde 20 times and f 5 times."""
    liked = {"ab": 35, "cde": 20, "f": 5}
    samples = [("best: ", word) for word in liked for _ in range(40)]
    labels = [time < count for count in liked.values() for time in range(40)]
    changes = {
        **{"train.seed": seed, "train.batch_size": 120, "train.total_steps": 60, "train.epochs": 100},
        **{"method.desirable_weight": 1.0, "optimizer.kwargs": {"lr": 0.01}},
    }
    given = {"samples": samples, "rewards": labels, "eval_prompts": None, "reward_fn": None}
    trainer = make("KTOTrainer", tmp_path, **given, **changes)
    assert abs(rows(tmp_path)[0]["kl"] if trainer.learn() else 1.0) < 1e-6  # the policy is its own reference
    words = trainer.experience_class.collate([trainer.store.elements[row] for row in (0, 40, 80)])
    with torch.no_grad():
        best, middle, worst = (0.5 * trainer.log_ratios(words)).tolist()
    assert best > 1 and best > middle > worst and worst < -1


@pytest.mark.parametrize(("loss", "beta"), [("sigmoid", 0.1), pytest.param("ipo", 0.02, marks=pytest.mark.slow)])
def test_online_dpo_learns_to_say_a_letter(seed: int, loss: str, beta: float, tmp_path: Path) -> None:
    """From the order of four responses to each of sixteen prompts a step, within 80 steps."""
    changes = {
        **{"train.seed": seed, "train.batch_size": 16, "train.total_steps": 80, "train.epochs": 200},
        **{"method.num_prompts": 16, "method.chunk_size": 16, "method.n_generations_per_prompt": 4},
        **{
            "method.gen_kwargs": {"max_new_tokens": 4, "eos_token_id": 0, "temperature": 1.0},
            "method.beta": beta,
            "method.loss_type": loss,
            "optimizer.kwargs": {"lr": 0.006},
        },
    }
    given = {"judge": share_of_a, "reward_fn": share_of_a, "eval_prompts": PROMPTS * 4}
    metrics = make("OnlineDPOTrainer", tmp_path, metric_fn=None, **given, **changes).learn()
    assert rows(tmp_path)[0]["reward/mean"] < 0.2
    assert metrics["reward/mean"] > 0.9
    assert metrics["rollout/score_mean"] == pytest.approx(0.5)  # the share of the others that each beats


def test_ddpo_learns_to_draw_white(seed: int, tmp_path: Path) -> None:
    """Pixels in four steps from noise, within 40 rounds of 32 images."""
    pipeline = tiny_pipelines.sd()
    pipeline.register_modules(vae=None, unet=tiny_pipelines.unet(channels=1))
    changes = {
        **{"train.seed": seed, "train.batch_size": 32, "train.total_steps": 40, "train.epochs": 40},
        **{"train.eval_interval": 40, "train.minibatch_size": 32, "optimizer.kwargs": {"lr": 0.01}},
        **{"method.num_samples": 32, "method.chunk_size": 32, "method.num_inference_steps": 4},
        **{"method.inner_epochs": 1, "method.guidance_scale": 1.0, "method.cliprange": 1e-4, "method.adv_clip": 5.0},
        **{"method.advantages": "round", "model.model_path": pipeline},
    }
    given: dict[str, Any] = {"reward_fn": brightness, "metric_fn": None, "eval_prompts": ["a", "b"] * 16}
    metrics = make("DDPOTrainer", tmp_path, prompts=["a", "b"], **given, **changes).learn()
    assert abs(rows(tmp_path)[0]["reward/mean"] - 0.5) < 0.1
    assert metrics["reward/mean"] > 0.85
