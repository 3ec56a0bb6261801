"""Why a reward does not rise: what each cause leaves in the metrics of a run, its bound, and possible remedies.

A cause is found only while the mean score of the last rounds is not above that of the first round by two standard
errors. The causes are in the order in which one explains the next: without a spread of the scores nothing else matters,
and a policy that has broken down leaves signs of its own. docs/audit.md says what was planted to find the bounds.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from trlx_like.tracking.signals import RISEN, History, Reading

PATIENCE = 10
"""Rounds before a cause is named that healthy runs show at their beginning too."""

# The bounds of the causes, in their order; docs/audit.md explains each.
CUT = 0.1
SAME = 0.9
SETTLED = 0.03
STRIDE, STEEP, FAR, FLIPPED, FALLEN = 0.01, 0.2, 0.5, 3.0, -4.0
HEAVY = 4.0
CLIPPED = 0.5
STILL, TRAVEL = 1e-4, 2e-4
BLIND = 2.0

Finding = tuple[bool, float, str, str]
"""Whether a cause shows, its value (NaN: not measured), its bound, and what was measured in words."""


def responses_cut(history: History) -> Finding:
    """Find rounds in which nearly all responses are cut, and the scores do not differ."""
    name = "rollout/finished_fraction"
    ended, (same, _) = history.now(name), _alike(history)
    shown = ended <= CUT and history.start(name) <= CUT and same
    words = f"{1 - ended:.0%} of the responses are cut at max_new_tokens, and their scores do not differ"
    return shown, 1 - ended, f"{1 - CUT:g}, with equal scores", words


def equal_scores(history: History) -> Finding:
    """Find rounds whose scores are all the same, or the same for all responses to a prompt."""
    same, (name, now) = _alike(history)
    return same, now, "all the same", f"what is compared has the same scores ({name} {now:.3g}), so nothing is better"


def no_entropy(history: History) -> Finding:
    """Find a policy that has hardly any choice from the first round on."""
    name = "policy/entropy"
    start, now = history.start(name), history.now(name)
    return (
        start <= SETTLED and now <= SETTLED,
        now,
        f"{SETTLED:g}",
        f"{name} is {now:.2g} nats per token from the start",
    )


def too_large_steps(history: History) -> Finding:
    """Find a policy that moves fast, and to no avail."""
    rate, near = history.now("learning_rate"), history.over_steps("policy/approx_kl")
    far, entropy = history.now("policy/kl_per_token"), history.now("policy/entropy")
    start = history.start("policy/entropy")
    flipped = start > SETTLED and not start / FLIPPED < entropy < start * FLIPPED
    signs = {
        f"the learning rate is {rate:.2g}, as large as weights are": history.unit_steps and rate >= STRIDE,
        f"policy/approx_kl is {near:.2g} nats per token within a round": near >= STEEP,
        f"policy/kl_per_token is {far:.2g}": far >= FAR,
        history.moved("policy/entropy"): flipped and not math.isnan(entropy),
        f"the score fell by {-history.gain():.1f} standard errors": history.gain() <= FALLEN,
    }
    shown = [words for words, holds in signs.items() if holds]
    return bool(shown), rate, "moves without a gain", "; ".join(shown) or f"the learning rate is {rate:.2g}"


def heavy_kl(history: History) -> Finding:
    """Find a KL weight that outweighs the scores.

    The best policy is proportional to p exp(score / beta) for a reference p (Ziegler et al. 2019, arXiv:1909.08593,
    sec. 2.1). So at a large beta the mean score can gain about Var(score) / beta: a quarter of the deviation of the
    scores if beta is four times that deviation.
    """
    method, spread = history.method, history.now("rollout/group_std")
    spread = history.now("rollout/score_std") if math.isnan(spread) else spread
    beta = method.get("beta") if "num_generations" in method else history.now("policy/kl_coef")
    beta = float(beta) if isinstance(beta, int | float) else math.nan
    scaled = method.get("scale_rewards", "none") != "none" or method.get("scale_reward")
    value = beta if scaled else beta / (spread or math.nan)
    words = f"a KL weight of {beta:.2g} allows a gain of about {1 / value if value else math.inf:.2g}"
    return value >= HEAVY, value, f"{HEAVY:g} deviations", f"{words} standard deviations of the scores"


def clipped(history: History) -> Finding:
    """Find rounds in which most tokens have left the clip range."""
    now = history.over_steps("policy/clip_fraction")
    if math.isnan(now):
        now = history.over_steps("policy/clip_fraction_low") + history.over_steps("policy/clip_fraction_high")
    return now >= CLIPPED, now, f"{CLIPPED:g}", f"{now:.0%} of the tokens of a round's steps are clipped"


def blind_value(history: History) -> Finding:
    """Find values that are further from the returns than the mean of the returns is."""
    error, deviation = history.now("values/error"), history.now("returns/std")
    value = error / (deviation * deviation or math.nan)
    words = f"the value function is worse than a constant: values/error {error:.2g}, returns/std {deviation:.2g}"
    return value >= BLIND and history.count >= PATIENCE, value, f"{BLIND:g} variances", words


def too_small_steps(history: History) -> Finding:
    """Find a policy that stays where it is."""
    moved, rate = history.now("policy/kl_per_token"), history.now("learning_rate")
    still = history.travel <= TRAVEL if math.isnan(moved) else moved <= STILL
    words = f"the policy hardly moves: policy/kl_per_token {moved:.2g}, " if not math.isnan(moved) else ""
    words += f"the learning rate is {rate:.2g}"
    if history.unit_steps:
        words += f", and all steps together move a weight by at most about {history.travel:.1g}"
    value = history.travel if math.isnan(moved) else moved
    return still and history.count >= PATIENCE, value, f"KL {STILL:g}, or {TRAVEL:g}", words


def _alike(history: History) -> tuple[bool, tuple[str, float]]:
    """Return whether scores of the first and of the last rounds do not differ, and the metric that says so."""
    pairs, ties = history.now("rollout/pairs"), history.now("rollout/ties")
    if not math.isnan(ties):
        first = history.start("rollout/ties") >= SAME * (history.start("rollout/ties") + history.start("rollout/pairs"))
        return first and ties >= SAME * (ties + pairs) > 0, ("rollout/ties", ties)
    name = "rollout/zero_std_fraction"
    if not math.isnan(now := history.now(name)):
        return now >= SAME and history.start(name) >= SAME, (name, now)
    name = "rollout/score_std"
    return history.now(name) == 0 and history.start(name) == 0, (name, history.now(name))


_CAUSES: dict[str, Callable[[History], Finding]] = {
    "no entropy": no_entropy,
    "responses cut": responses_cut,
    "equal scores": equal_scores,
    "too large steps": too_large_steps,
    "heavy KL": heavy_kl,
    "clipped": clipped,
    "too small steps": too_small_steps,
    "blind value function": blind_value,
}


def _measured(find: Callable[[History], Finding]) -> Callable[[History], Reading]:
    """Turn a finding into a reading that counts only while the reward has not risen."""

    def measure(history: History) -> Reading:
        shown, value, bound, words = find(history)
        gain = history.gain()  # NaN without scores: then nothing is judged
        found = shown and gain < RISEN
        noise = " more than by chance" if gain > 0 else ""
        still = f"the reward does not rise{noise} ({history.moved('rollout/score_mean')}): "
        return Reading(found, math.nan if math.isnan(gain) else value, bound, still * found + words)

    return measure


CAUSES = {name: _measured(find) for name, find in _CAUSES.items()}
