"""ReMax as a plugin: held to the promises of every trainer, with its baseline counted by hand, and learning."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from examples.plugins.remax import ReMaxTrainer
from trlx_like.testing import GENERATION, PROMPTS, TrainerChecks, count_letters, tiny_run

METHOD = {"num_rollouts": 5, "chunk_size": 2, "gen_kwargs": GENERATION}
GIVEN: dict[str, Any] = {"prompts": PROMPTS, "reward_fn": count_letters}

pytestmark = pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")


@pytest.fixture(scope="module")
def checks() -> TrainerChecks:
    return TrainerChecks(ReMaxTrainer, tiny_run(ReMaxTrainer, METHOD), **GIVEN)


@pytest.mark.parametrize("check", ["gradients", "resume", "state", "run_on_processes", "abstaining_on_one"])
def test_the_promises(check: str, checks: TrainerChecks) -> None:
    getattr(checks, check)()


@pytest.mark.slow
@pytest.mark.parametrize("check", ["seed", "export", "processes"])
def test_more_promises(check: str, checks: TrainerChecks) -> None:
    getattr(checks, check)()


def test_the_baseline_is_the_reward_of_the_greedy_response(checks: TrainerChecks) -> None:
    """Generated once more by hand, one prompt at a time."""
    trainer = checks.make("baseline")
    seen: dict[str, float] = {}

    def watched(prompts: Sequence[str], outputs: Sequence[str], **_: Any) -> list[float]:
        rewards = count_letters(outputs)
        seen.update(zip(prompts, rewards, strict=True)) if len(seen) < 5 else None
        return rewards

    trainer.reward_fn = watched
    metrics = trainer.make_experience()
    greedy = {
        prompt: count_letters(trainer.decode(trainer.generate([prompt], do_sample=False)))[0] for prompt in PROMPTS
    }
    for element in trainer.store.elements:
        prompt = trainer.decode([element.prompt])[0]
        assert element.advantage.item() == pytest.approx(seen[prompt] - greedy[prompt], abs=1e-6)
    assert metrics["rollout/greedy_score_mean"] == pytest.approx(sum(greedy.values()) / 5)


@pytest.mark.learning
def test_it_learns_to_say_a_letter() -> None:
    def share_of_a(outputs: Sequence[str], **_: Any) -> list[float]:
        return [output.count("a") / 6 for output in outputs]

    method = {"num_rollouts": 32, "gen_kwargs": {"max_new_tokens": 6}}
    train = {"total_steps": 40, "epochs": 40, "batch_size": 32}
    config = tiny_run(ReMaxTrainer, method, train=train, optimizer={"kwargs": {"lr": 0.01}})
    trainer = TrainerChecks(ReMaxTrainer, config, prompts=["b", "c", "d", "e"] * 8, reward_fn=share_of_a).run(
        "learning"
    )
    assert trainer.last_metrics["reward/mean"] > 0.6  # .03 by chance
