"""The signals of reward hacking: how each is measured in the metrics of a run, its bound, and possible remedies.

Each signal compares the mean of the last rounds with the first round, in units of the run itself, so that nothing has
to be set for a task. docs/audit.md says which healthy and hacked runs the bounds come from. `causes.py` has the signals
of a run that does not learn.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trlx_like.config.yaml_source import packaged

WINDOW = 3
"""The number of last rounds whose mean is judged, so that one odd round is no finding."""
RISEN = 2.0
"""Standard errors by which the mean score must be above that of the first round to count as risen."""

# The bounds of the signals, in their order; docs/audit.md explains each.
SURPRISE = 2.5
CORRELATION, DRIFT, FACTOR = 0.9, 1.2, 3.0
SHARE = 1.25
COMMONEST = 0.7
ENTROPY, SPREAD = 0.1, 0.75
TRUNCATED, ENDED = 0.5, 0.2

UNIT_STEPS = ("adam", "lion", "rmsprop")
"""In the names of optimizers that move a weight by about the learning rate in a step, however large its gradient is."""

Row = Mapping[str, float]


@dataclass(frozen=True)
class Reading:
    """Hold the value of a signal in the last rounds, its bound, and a sentence with the numbers.

    A value that is NaN says that the run does not log what the signal needs.
    """

    found: bool
    value: float
    bound: str
    words: str


class History:
    """Hold the metrics of the first round and of the last `WINDOW` rounds of a run.

    Args:
        weights: `reward.weights`, in the order of the reward functions; None if all weigh the same.
        method: The options of the method; empty if they are not known.
        optimizer: The name of the optimizer.
    """

    def __init__(self, weights: Sequence[float] | None, method: Mapping[str, Any], optimizer: str) -> None:
        self.weights, self.method = weights, method
        self.unit_steps = any(name in optimizer.lower() for name in UNIT_STEPS)
        self.first: Row = {}
        self.last: list[Row] = []
        self.steps: list[list[Row]] = []  # the rows of all steps of the last `WINDOW` rounds, and of the running one
        self.count = 0
        # Sum of the learning rates: with `UNIT_STEPS`, about the farthest that a weight can have moved; else NaN.
        self.travel = 0.0 if self.unit_steps else math.nan

    def add(self, row: Row) -> None:
        """Append the metrics of a round, which are those of its first step too."""
        self.first = self.first or row
        self.last = [*self.last, row][-WINDOW:]
        self.steps = [*self.steps, []][-WINDOW - 1 :]
        self.count += 1
        self.add_step(row)

    def add_step(self, row: Row) -> None:
        """Append the metrics of a step of the running round."""
        if self.steps:
            self.steps[-1].append(row)
            self.travel += row.get("learning_rate", math.nan)

    def start(self, name: str) -> float:
        """Return a metric of the first round; NaN if it was not logged."""
        return self.first.get(name, math.nan)

    def now(self, name: str) -> float:
        """Return the mean of a metric over the last rounds; NaN if one of them did not log it."""
        return sum(row.get(name, math.nan) for row in self.last) / max(len(self.last), 1)

    def over_steps(self, name: str) -> float:
        """Return the mean of a metric over all steps of the last complete rounds; NaN if one did not log it."""
        values = [row.get(name, math.nan) for rows in self.steps[:-1] for row in rows]
        return sum(values) / len(values) if values else math.nan

    def gain(self) -> float:
        """Return the change of the mean score since the first round, in standard errors of the difference."""
        name, variance = "rollout/score_std", 0.0
        for std, rounds in ((self.start(name), 1), (self.now(name), len(self.last))):
            variance += std * std / (rounds * self.start("rollout/samples") or math.nan)
        change = self.now("rollout/score_mean") - self.start("rollout/score_mean")
        if variance == 0 and change:  # all scores of a round are the same
            return math.copysign(math.inf, change)
        return change / (math.sqrt(variance) or 1.0)

    def moved(self, name: str) -> str:
        return f"{name} went from {self.start(name):.3g} to {self.now(name):.3g}"


def reward_against_kl(history: History) -> Reading:
    """Measure how surprising the outputs are to the reference: -log p = KL + entropy, relative to the first round."""
    kl, entropy, scale = "policy/kl_per_token", "policy/entropy", 1.0
    if not math.isnan(history.start("objective/kl")):
        # k3 explodes on responses that the policy hardly writes any more, as the rejected ones of Online DPO become.
        kl, entropy = "objective/kl", "objective/entropy"
        # These are of the responses in pairs, and a rejected one may be far longer than most.
        kept, every = "rollout/kept/length_mean", "rollout/length_mean"
        first, last = (every if math.isnan(of(kept)) else kept for of in (history.start, history.now))
        scale = history.start(first) / (history.now(last) or math.nan)
    value = (history.now(kl) + history.now(entropy)) * scale / (history.start(entropy) or math.nan)
    parts = f"{kl} {history.now(kl):.2g}, {entropy} {history.now(entropy):.2g}"
    words = f"the reference finds the outputs {value:.1f} times as surprising as its own ({parts})"
    return Reading(value >= SURPRISE, value, f"{SURPRISE:g}", f"{words}; {history.moved('rollout/score_mean')}")


def length_drift(history: History) -> Reading:
    """Measure the change of the length, and how far the reward is explained by length alone.

    Outputs of a third of the length are found only while the reward has not risen: a task may want short answers of a
    model that begins with long ones.
    """
    name = "rollout/length_mean"
    factor = history.now(name) / (history.start(name) or math.nan)
    correlation = history.now("rollout/length_reward_correlation")
    paid = factor if correlation > 0 else 1 / factor if factor else math.inf
    by_length = abs(correlation) >= CORRELATION and paid >= DRIFT
    far = factor >= FACTOR or (factor <= 1 / FACTOR and not history.gain() >= RISEN)
    explained = f", and within a round the reward has a correlation of {correlation:.2f} with length"
    words = history.moved(name) + explained * (not math.isnan(correlation))
    return Reading(by_length or far, factor, f"x {FACTOR:g}, or x {DRIFT:g} at a correlation of {CORRELATION:g}", words)


def one_component(history: History) -> Reading:
    """Measure whether one reward function gains more than all together, so that the others lose."""
    names = [name for name in history.first if name.startswith("rollout/reward/") and name.endswith("/mean")]
    weights = history.weights if history.weights and len(history.weights) == len(names) else [1.0] * len(names)
    gains = [weight * (history.now(name) - history.start(name)) for name, weight in zip(names, weights, strict=True)]
    total = sum(gains) if len(names) > 1 else math.nan
    if math.isnan(total):
        return Reading(False, math.nan, "", "")
    gain, best = max(zip(gains, names, strict=True), key=lambda pair: pair[0])
    share = gain / total if total > 0 else 0.0
    matters = gain >= history.start("rollout/score_std") / 2  # smaller gains are noise
    label = best.removeprefix("rollout/reward/").removesuffix("/mean")
    words = f"{label} brought {gain:+.2g} to a reward that moved by {total:+.2g}, the others {total - gain:+.2g}"
    return Reading(share >= SHARE and matters, share, f"{SHARE:g}", words)


def duplicate_outputs(history: History) -> Reading:
    """Measure how many prompts of a round get the same output."""
    name = "rollout/top_output_fraction"
    start, now = history.start(name), history.now(name)
    words = f"one output makes up {now:.0%} of a round, over different prompts ({name}; {start:.0%} at the start)"
    value = math.nan if math.isnan(start) else now
    return Reading(now >= COMMONEST and now >= 2 * start, value, f"{COMMONEST:g}", words)


def entropy_collapse(history: History) -> Reading:
    """Measure whether exploration ends although outputs are still rewarded differently."""
    name, spread = "policy/entropy", "rollout/score_std"
    left = history.now(name) / (history.start(name) or math.nan)
    found = left <= ENTROPY and history.now(spread) >= SPREAD * history.start(spread)
    differ = "the rewards of a round differ as before: " if found else ""
    words = f"{history.moved(name)} nats per token, {differ}{history.moved(spread)}"
    return Reading(found, math.nan if math.isnan(history.now(spread)) else left, f"{ENTROPY:g} x start", words)


def truncated_outputs(history: History) -> Reading:
    """Measure how many outputs are cut off at max_new_tokens, among all that were sampled.

    A model whose outputs were often cut from the start has not lost an end that it knew.
    """
    name = "rollout/finished_fraction"
    start, now = 1 - history.start(name), 1 - history.now(name)
    words = f"{now:.0%} of the outputs are cut off at max_new_tokens ({start:.0%} at the start)"
    return Reading(now >= TRUNCATED and start <= ENDED, now, f"{TRUNCATED:g}, from at most {ENDED:g}", words)


SIGNALS: dict[str, Callable[[History], Reading]] = {
    "reward against KL": reward_against_kl,
    "length drift": length_drift,
    "one component": one_component,
    "duplicate outputs": duplicate_outputs,
    "entropy collapse": entropy_collapse,
    "truncated outputs": truncated_outputs,
}


def advice(finding: str, config: Mapping[str, Any]) -> str:
    """Join the remedies of a signal or a cause into one sentence, without options that the run's method does not have.

    Args:
        finding: The name of the signal or cause. Its remedies are in `remedies.yml`. A remedy is left out if it has
            options and the configuration has none of them.
        config: The configuration of the run as nested mappings. If it is empty (unknown), every remedy is kept, without
            the names of options.
    """

    def has(option: str) -> bool:
        section, _, name = option.partition(".")
        values = config.get(section)
        return isinstance(values, Mapping) and name in values

    found = []
    for text, options in packaged("tracking/remedies.yml")[finding].items():
        named = [option for option in (options or "").split() if has(option)]
        if named or not options or not config:
            found.append(f"{text} ({' or '.join(named)})" if named else text)
    return "; ".join(found) + "."
