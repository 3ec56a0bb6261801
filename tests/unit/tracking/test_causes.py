"""Causes why a reward does not rise: each by hand at its bound, and quiet once the reward has risen."""

from __future__ import annotations

import math
from typing import Any

import pytest

from trlx_like.config.registries import METHODS, method_class
from trlx_like.config.yaml_source import packaged
from trlx_like.tracking.audit import Audit
from trlx_like.tracking.causes import CAUSES

FLAT = {
    "rollout/samples": 100.0,
    "rollout/score_mean": 0.5,
    "rollout/score_std": 0.5,
    "rollout/finished_fraction": 1.0,
    "policy/entropy": 1.0,
    "policy/kl_per_token": 0.01,
    "policy/kl_coef": 0.001,
    "policy/approx_kl": 0.0,
    "policy/clip_fraction": 0.0,
    "values/error": 0.0199,
    "returns/std": 0.1,
    "learning_rate": 1e-3,
}
GROUPS = {"rollout/zero_std_fraction": 0.95}
STEP = {"policy/approx_kl": 0.02, "policy/clip_fraction": 0.1, "learning_rate": 1e-3}


def verdicts(
    last: dict[str, float],
    step: dict[str, float] | None = None,
    rounds: int = 12,
    method: Any = None,
    optimizer: str = "adamw",
    **first: float,
) -> dict[str, str]:
    """The states of the causes in a run of two steps a round: `first` in all rounds, `last` from the second on."""
    audit = Audit({"method": method, "optimizer": {"name": optimizer}} if method or optimizer != "adamw" else None)
    for number in range(rounds):
        audit.add({**FLAT, **first, **(last if number else {})}, 2 * number + 1)
        audit.add({**STEP, **(step or {})}, 2 * number + 2)
    return {name: audit.verdicts[name].state for name in CAUSES}


def found(*arguments: Any, **named: Any) -> dict[str, str]:
    return {name: state for name, state in verdicts(*arguments, **named).items() if state.startswith("found")}


def test_a_run_that_only_stays_where_it_is_has_none() -> None:
    assert set(verdicts({}).values()) == {"clean"}


# What only just is no cause, and what only just is one, from the fifth round on unless it says otherwise.
BOUNDS: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    (
        "responses cut",
        {"rollout/finished_fraction": 0.11, **GROUPS},
        {"rollout/finished_fraction": 0.09, **GROUPS},
    ),
    ("equal scores", {"rollout/zero_std_fraction": 0.89}, {"rollout/zero_std_fraction": 0.91}),
    ("equal scores", {"rollout/ties": 8.0, "rollout/pairs": 1.0}, {"rollout/ties": 9.0, "rollout/pairs": 1.0}),
    ("no entropy", {"policy/entropy": 0.031}, {"policy/entropy": 0.029}),
]


@pytest.mark.parametrize(("name", "clean", "bad"), BOUNDS)
def test_what_holds_from_the_first_round_on(name: str, clean: dict[str, Any], bad: dict[str, Any]) -> None:
    assert name not in found({}, **clean)
    assert found({}, **bad)[name] == "found at step 9"
    good = {
        "rollout/finished_fraction": 1.0,
        "rollout/zero_std_fraction": 0.0,
        "rollout/ties": 0.0,
        "policy/entropy": 1.0,
    }
    assert name not in found(bad, **{**bad, **{column: good[column] for column in bad if column in good}})


def test_scores_that_are_all_the_same() -> None:
    """Without groups only a deviation of 0 says it, and nothing explains a mean that moves then but the prompts."""
    assert list(found({}, **{"rollout/score_std": 0.0})) == ["equal scores"]
    assert found({}, **{"rollout/score_std": 0.01}) == {}


@pytest.mark.parametrize(
    ("clean", "bad"),
    [
        ({"learning_rate": 0.009}, {"learning_rate": 0.011}),
        ({"policy/kl_per_token": 0.49}, {"policy/kl_per_token": 0.51}),
        ({"policy/entropy": 0.34}, {"policy/entropy": 0.32}),
        ({"policy/entropy": 2.9}, {"policy/entropy": 3.1}),
        # the standard error of the difference: sqrt(.25 / 100 + .25 / 300) = .0577, times 4 = .231
        ({"rollout/score_mean": 0.28}, {"rollout/score_mean": 0.26}),
    ],
)
def test_too_large_steps(clean: dict[str, float], bad: dict[str, float]) -> None:
    assert found(clean) == {} and found(bad) == {"too large steps": "found at step 9"}


def test_a_learning_rate_says_how_far_weights_move_with_optimizers_like_adam_alone() -> None:
    large, small = {"learning_rate": 0.1}, {"policy/kl_per_token": math.nan, "learning_rate": 9e-6}
    for name in ("paged_adamw_8bit", "lion_8bit", "RMSprop"):
        assert list(found(large, optimizer=name)) == ["too large steps"]
        assert list(found({}, {"learning_rate": 9e-6}, 10, None, name, **small)) == ["too small steps"]
    assert found(large, optimizer="sgd") == {}
    assert verdicts({}, {}, 10, None, "sgd", **small)["too small steps"] == "not measured"
    assert list(found({}, {}, 10, None, "sgd", **{"policy/kl_per_token": 9e-5})) == ["too small steps"]


def test_steps_within_a_round_count_once_the_round_is_complete() -> None:
    """The mean over both steps of a round: (0 + .38) / 2 = .19 and (0 + .42) / 2 = .21."""
    assert found({}, {"policy/approx_kl": 0.38}) == {}
    assert found({}, {"policy/approx_kl": 0.42}) == {"too large steps": "found at step 9"}
    assert found({}, {"policy/clip_fraction": 0.98}) == {}
    assert found({"policy/clip_fraction": 0.02}, {"policy/clip_fraction": 1.0})["clipped"] == "found at step 9"


def test_a_clip_of_two_sides_is_their_sum() -> None:
    sides = {"policy/clip_fraction": math.nan, "policy/clip_fraction_low": 0.3, "policy/clip_fraction_high": 0.19}
    assert found(sides, sides) == {}
    more = {**sides, "policy/clip_fraction_high": 0.21}
    assert found({}, more, **more) == {"clipped": "found at step 9"}


def test_a_heavy_kl_weight_is_measured_in_deviations_of_the_scores() -> None:
    """A deviation of .5: 4 times that is 2. Scores that are scaled to a deviation of 1 bear 4."""
    assert found({"policy/kl_coef": 1.9}) == {} and list(found({"policy/kl_coef": 2.1})) == ["heavy KL"]
    scaled = {"scale_reward": "running"}
    assert found({"policy/kl_coef": 3.9}, method=scaled) == {}
    assert list(found({"policy/kl_coef": 4.1}, method=scaled)) == ["heavy KL"]
    rloo = {"num_generations": 8, "kl_in": "reward"}
    assert found({}, method={**rloo, "beta": 1.9}) == {} and "heavy KL" in found({}, method={**rloo, "beta": 2.1})
    grpo = {"num_generations": 8, "kl_in": "loss", "scale_rewards": "group"}
    assert found({}, method={**grpo, "beta": 3.9}) == {} and "heavy KL" in found({}, method={**grpo, "beta": 4.1})
    assert found({}, method={**grpo, "beta": "much"}) == {}
    round_scaled = {**rloo, "scale_rewards": "batch"}
    assert found({}, method={**round_scaled, "beta": 3.9}) == {}
    assert "heavy KL" in found({}, method={**round_scaled, "beta": 4.1})


@pytest.mark.parametrize(
    ("name", "last"),
    [
        ("blind value function", {"values/error": 0.0201}),
        ("too small steps", {"policy/kl_per_token": 9e-5}),
        # without a KL: 2 steps x 10 rounds x 1e-5 = 2e-4, and 19 steps by the first of the tenth
        ("too small steps", {"policy/kl_per_token": math.nan, "learning_rate": 9e-6}),
    ],
)
def test_what_healthy_runs_begin_with_needs_ten_rounds(name: str, last: dict[str, float]) -> None:
    step = {"learning_rate": last.get("learning_rate", 1e-3)}
    assert found({}, step, rounds=9, **last) == {}
    assert found({}, step, rounds=10, **last) == {name: "found at step 19"}


def test_a_reward_that_has_risen_is_not_held_up_by_anything() -> None:
    """Two standard errors of the difference are .115."""
    signs = {"policy/kl_coef": 9.0, "policy/kl_per_token": 2.0, "values/error": 9.0}
    assert found({**signs, "rollout/score_mean": 0.62}) == {}
    assert set(found({**signs, "rollout/score_mean": 0.61})) == {"too large steps", "heavy KL", "blind value function"}


def test_without_scores_nothing_is_judged() -> None:
    assert set(verdicts({"rollout/score_mean": math.nan}).values()) == {"not measured"}


def test_the_first_finding_is_told_with_its_numbers_and_what_to_try() -> None:
    audit = Audit({"method": method_class("PPOConfig")().to_dict()})
    for number in range(5):
        said = audit.add({**FLAT, "policy/kl_coef": 3.0}, number)
    (verdict,) = said
    assert verdict.words == (
        "the reward does not rise (rollout/score_mean went from 0.5 to 0.5): a KL weight of 3 allows a gain of about "
        "0.17 standard deviations of the scores"
    )
    assert verdict.advice == "a smaller KL weight (method.init_kl_coef)."


def test_a_reward_that_rises_within_its_noise_is_told_as_that() -> None:
    audit = Audit({"method": method_class("PPOConfig")().to_dict()})
    for number in range(5):
        said = audit.add({**FLAT, "policy/kl_coef": 3.0, "rollout/score_mean": 0.5 + 0.02 * number}, number)
    assert "the reward does not rise more than by chance (rollout/score_mean went from 0.5 to 0.56)" in said[0].words


def test_every_option_of_a_remedy_exists() -> None:
    remedies = packaged("tracking/remedies.yml")
    named = {option for name in CAUSES for options in remedies[name].values() for option in (options or "").split()}
    of_methods = {f"method.{option}" for name in METHODS.names() for option in method_class(name)().to_dict()}
    others = {"optimizer.kwargs", "model.num_layers_unfrozen", "train.total_steps"}
    assert named - of_methods == others
