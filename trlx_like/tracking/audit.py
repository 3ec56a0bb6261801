"""The audit of reward hacking: signals that a reward rises for a reason that nobody wanted.

It reads what every round logs, during the run (one warning a signal) and afterwards (`trlx-like audit`, the report). No
signal is a proof. Each compares the mean of the last rounds with the first round, in units of the run itself, so that
nothing has to be set for a task; where each bound comes from is in docs/audit.md.
"""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from trlx_like.errors import DataError
from trlx_like.tracking.base import RunInfo
from trlx_like.tracking.jsonl import read_row

logger = logging.getLogger(__name__)

ROUNDS = 5
"""Rounds before anything is judged."""
WINDOW = 3
"""Last rounds whose mean is judged: one odd round is no finding."""

SURPRISE = 2.5  # times what the reference finds its own outputs
CORRELATION, DRIFT, FACTOR = 0.9, 1.2, 3.0
SHARE = 1.25
COMMONEST = 0.7
ENTROPY, SPREAD = 0.1, 0.75
TRUNCATED, RISE = 0.5, 0.3

Row = Mapping[str, float]


@dataclass(frozen=True)
class Reading:
    """What a signal measures now, at the start, and its bound."""

    found: bool
    start: float
    now: float
    bound: str
    words: str  # the numbers in a sentence


@dataclass(frozen=True)
class Verdict:
    """A signal of a run."""

    name: str
    reading: Reading | None  # of the last rounds; None: the run does not log what it needs
    since: int | None  # the step at which it was first found
    advice: str

    @property
    def state(self) -> str:
        if self.since is not None:
            return f"found at step {self.since}"
        return "not measured" if self.reading is None else "clean"


class History:
    """The first round and the last ones of a run."""

    def __init__(self, weights: Sequence[float] | None = None) -> None:
        self.weights = weights  # of the reward's components, in their order
        self.first: Row = {}
        self.last: list[Row] = []
        self.count = 0

    def add(self, row: Row) -> None:
        self.first = self.first or row
        self.last = [*self.last, row][-WINDOW:]
        self.count += 1

    def start(self, name: str) -> float:
        """In the first round; NaN where it is not logged."""
        return self.first.get(name, math.nan)

    def now(self, name: str) -> float:
        """Mean over the last rounds; NaN where one of them has none."""
        return sum(row.get(name, math.nan) for row in self.last) / max(len(self.last), 1)

    def names(self, start: str, end: str) -> list[str]:
        return [name for name in self.first if name.startswith(start) and name.endswith(end)]


def reward_against_kl(history: History) -> Reading | None:
    """How surprising the outputs are to the reference, -log p = KL + entropy, in units of the entropy at the start."""
    kl, entropy, scale = "policy/kl_per_token", "policy/entropy", 1.0
    if math.isnan(history.start(kl)):  # Online DPO has both for whole responses
        kl, entropy = "objective/kl", "objective/entropy"
        length = "rollout/length_mean"
        scale = history.start(length) / (history.now(length) or math.nan)
    own = history.start(entropy)
    now = (history.now(kl) + history.now(entropy)) * scale / own if own else math.nan
    if math.isnan(now):
        return None
    parts = f"{kl} {history.now(kl):.2g}, {entropy} {history.now(entropy):.2g}"
    words = (
        f"the reference finds the outputs {now:.1f} times as surprising as its own ({parts}); rollout/score_mean went "
        f"from {_moved(history, 'rollout/score_mean')}"
    )
    return Reading(now >= SURPRISE, 1.0, now, f"{SURPRISE:g}", words)


def length_drift(history: History) -> Reading | None:
    """Length moves where the reward pays for length and for nothing else, or moves far."""
    name = "rollout/length_mean"
    start, now = history.start(name), history.now(name)
    if math.isnan(now) or not start:
        return None
    factor, correlation = now / start, history.now("rollout/length_reward_correlation")
    paid = factor if correlation > 0 else 1 / factor if factor else math.inf
    by_length = abs(correlation) >= CORRELATION and paid >= DRIFT
    far = not 1 / FACTOR < factor < FACTOR
    words = f"{name} went from {_moved(history, name)}"
    if not math.isnan(correlation):
        words += f", and within a round the reward has a correlation of {correlation:.2f} with length"
    bound = f"x {FACTOR:g}, or x {DRIFT:g} at a correlation of {CORRELATION:g}"
    return Reading(by_length or far, start, now, bound, words)


def one_component(history: History) -> Reading | None:
    """One of several rewards gains more than all of them together: the others pay for it."""
    names = history.names("rollout/reward/", "/mean")
    weights = history.weights if history.weights and len(history.weights) == len(names) else [1.0] * len(names)
    gains = {
        name: weight * (history.now(name) - history.start(name)) for name, weight in zip(names, weights, strict=True)
    }
    total = sum(gains.values())
    if len(names) < 2 or math.isnan(total):
        return None
    best = max(gains, key=gains.__getitem__)
    share = gains[best] / total if total > 0 else 0.0
    matters = gains[best] >= history.start("rollout/score_std") / 2  # not noise
    label = best.removeprefix("rollout/reward/").removesuffix("/mean")
    others = total - gains[best]
    words = f"{label} brought {gains[best]:+.2g} to a reward that moved by {total:+.2g}, the others {others:+.2g}"
    return Reading(share >= SHARE and matters, 0.0, share, f"{SHARE:g}", words)


def duplicate_outputs(history: History) -> Reading | None:
    """The same text for most prompts."""
    name = "rollout/top_output_fraction"
    start, now = history.start(name), history.now(name)
    if math.isnan(start) or math.isnan(now):
        return None
    words = f"one output makes up {now:.0%} of a round, over different prompts ({name}; {start:.0%} at the start)"
    return Reading(now >= COMMONEST and now >= 2 * start, start, now, f"{COMMONEST:g}", words)


def entropy_collapse(history: History) -> Reading | None:
    """Nothing is tried any more although outputs are still rewarded differently."""
    name, spread = "policy/entropy", "rollout/score_std"
    start, now = history.start(name), history.now(name)
    if math.isnan(now) or math.isnan(history.now(spread)) or not start:
        return None
    found = now <= ENTROPY * start and history.now(spread) >= SPREAD * history.start(spread)
    words = (
        f"{name} went from {_moved(history, name)} nats a token, and the rewards of a round differ as before: {spread} "
        f"from {_moved(history, spread)}"
        if found
        else f"{name} went from {_moved(history, name)} nats a token, {spread} from {_moved(history, spread)}"
    )
    return Reading(found, start, now, f"{ENTROPY:g} x start", words)


def truncated_outputs(history: History) -> Reading | None:
    """Outputs that do not end by themselves."""
    name = "rollout/finished_fraction"
    start, now = 1 - history.start(name), 1 - history.now(name)
    if math.isnan(now):
        return None
    words = f"{now:.0%} of the outputs are cut off at max_new_tokens ({start:.0%} at the start)"
    return Reading(now >= TRUNCATED and now >= start + RISE, start, now, f"{TRUNCATED:g}", words)


SIGNALS: dict[str, tuple[Callable[[History], Reading | None], str]] = {
    "reward against KL": (
        reward_against_kl,
        "read samples: this is text that the reference would not write. A KL penalty (method.init_kl_coef, beta), an "
        "earlier checkpoint, a reward model trained on such outputs.",
    ),
    "length drift": (
        length_drift,
        "compare the rewards of outputs of one length. A reward without what length explains, soft_punish_cache.",
    ),
    "one component": (
        one_component,
        "look at the samples' columns reward/<name>. Other reward.weights, or a bound on what a component can give.",
    ),
    "duplicate outputs": (
        duplicate_outputs,
        "read samples: does the output fit the prompt? A reward that knows the prompt, a KL penalty, an entropy bonus.",
    ),
    "entropy collapse": (
        entropy_collapse,
        "an entropy bonus (method.ent_coef), a KL penalty, a lower learning rate, a higher temperature.",
    ),
    "truncated outputs": (
        truncated_outputs,
        "method.missing_eos_penalty, mask_truncated_completions, a larger max_new_tokens, a reward that wants an end.",
    ),
}


def _moved(history: History, name: str) -> str:
    return f"{history.start(name):.3g} to {history.now(name):.3g}"


class Audit:
    """The verdict on a run, brought up to date round by round. weights: `reward.weights`."""

    def __init__(self, weights: Sequence[float] | None = None) -> None:
        self.history = History(weights)
        self.verdicts = {name: Verdict(name, None, None, advice) for name, (_, advice) in SIGNALS.items()}

    @property
    def rounds(self) -> int:
        return self.history.count

    @property
    def measured(self) -> bool:
        """Whether there is anything to judge by."""
        return any(verdict.reading is not None for verdict in self.verdicts.values())

    @property
    def found(self) -> list[Verdict]:
        return [verdict for verdict in self.verdicts.values() if verdict.since is not None]

    def add(self, metrics: Row, step: int) -> list[Verdict]:
        """Takes in what was logged at a step; returns the signals that it is the first to show."""
        if "rollout/score_mean" not in metrics:  # not the first step of a round
            return []
        self.history.add(metrics)
        fresh = []
        for name, (measure, _) in SIGNALS.items():
            verdict = self.verdicts[name]
            reading = measure(self.history) if self.rounds >= ROUNDS else None
            if reading is None:  # not in these rounds; the last reading stays
                continue
            first = reading.found and verdict.since is None
            self.verdicts[name] = replace(verdict, reading=reading, since=step if first else verdict.since)
            if first:
                fresh.append(self.verdicts[name])
        return fresh


def audit_rows(rows: Iterable[Mapping[str, Any]], weights: Sequence[float] | None = None) -> Audit:
    """The audit of the rows of a metrics.jsonl."""
    audit = Audit(weights)
    for row in rows:
        audit.add({name: number for name, value in row.items() if (number := _number(value)) is not None}, row["step"])
    return audit


def audit_run(run_dir: Path, last_step: int | None = None) -> Audit:
    """The audit of a run folder, up to a step. DataError if it holds no run."""
    file = run_dir / "metrics.jsonl"
    if not file.is_file():
        raise DataError(f"{run_dir} is not a run folder: it has no metrics.jsonl.")
    config = run_dir / "config.yml"
    with file.open("rb") as lines:
        rows = (row for line in lines if (row := read_row(line)) is not None)
        kept = (row for row in rows if last_step is None or row["step"] <= last_step)
        return audit_rows(kept, _weights(config.read_text(encoding="utf-8") if config.is_file() else ""))


def _weights(config: str) -> list[float] | None:
    try:
        read = yaml.safe_load(config)
    except yaml.YAMLError:
        return None
    return reward_weights(read if isinstance(read, dict) else {})


def reward_weights(config: Mapping[str, Any]) -> list[float] | None:
    """`reward.weights` of a configuration as a mapping."""
    section = config.get("reward")
    weights = section.get("weights") if isinstance(section, Mapping) else None
    return [float(weight) for weight in weights] if isinstance(weights, list) else None


def _number(value: Any) -> float | None:
    try:
        return float(value)
    except (TypeError, ValueError):
        return None


def findings(run_dir: Path) -> dict[str, Any] | None:
    """The audit as the report shows it; None for a run that cannot be judged."""
    audit = audit_run(run_dir) if (run_dir / "metrics.jsonl").is_file() else Audit()
    if not audit.measured:
        return None
    verdicts = [
        {
            "name": verdict.name,
            "state": verdict.state,
            "found": verdict.since is not None,
            "words": "" if verdict.reading is None else verdict.reading.words,
            "advice": verdict.advice,
        }
        for verdict in audit.verdicts.values()
    ]
    return {"rounds": audit.rounds, "found": len(audit.found), "verdicts": verdicts}


def show_audit(run_dir: Path) -> bool:
    """Prints the audit of a run folder; returns whether something is found.

    DataError if it holds no run, or one that cannot be judged.
    """
    from rich.console import Console
    from rich.table import Table

    audit = audit_run(run_dir)
    if audit.rounds < ROUNDS:
        raise DataError(
            f"{run_dir} has {audit.rounds} rounds of sampling; the audit needs {ROUNDS}. Offline trainers have none."
        )
    if not audit.measured:
        raise DataError(f"{run_dir} has rounds, but its trainer logs nothing that the audit goes by (docs/audit.md).")
    table = Table("signal", "verdict", show_lines=True)
    table.add_column("bound", max_width=20)
    table.add_column("what the last rounds show")
    for verdict in audit.verdicts.values():
        reading = verdict.reading
        cells = ("", "") if reading is None else (reading.bound, reading.words)
        style = "bold red" if verdict.since is not None else "dim" if reading is None else ""
        table.add_row(verdict.name, verdict.state, *cells, style=style)
    Console(width=None if sys.stdout.isatty() else 120).print(table)
    for verdict in audit.found:
        print(f"{verdict.name}: {verdict.advice}")
    names = ", ".join(verdict.name for verdict in audit.found)
    print(f"Found: {names}." if names else f"Nothing found in {audit.rounds} rounds.")
    return bool(names)


class AuditTracker:
    """Warns in the round in which a signal first shows, once a signal. A resumed run does not repeat what was said."""

    def __init__(self, run: RunInfo) -> None:
        weights = reward_weights(run.config)
        resumed = run.resume_step is not None and (run.directory / "metrics.jsonl").is_file()
        self._audit = audit_run(run.directory, run.resume_step) if resumed else Audit(weights)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        for verdict in self._audit.add(metrics, step):
            assert verdict.reading is not None
            logger.warning(
                "Audit, step %d, %s: %s. Try: %s", step, verdict.name, verdict.reading.words, verdict.advice.rstrip(".")
            )

    def log_table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], step: int) -> None:
        """Tables are not looked at."""

    def close(self) -> None:
        """Nothing is open."""
