"""Runs the trials of a sweep as processes `trlx-like train`, some at a time, and tells the study what comes of them.

One process asks and tells, so the journal has one writer. What has begun is in the journal and in the run folders: a
sweep that was killed goes on with the same command, and each run from its newest checkpoint.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from trlx_like.checkpoint.claim import RunFiles
from trlx_like.errors import ConfigError
from trlx_like.registry import nearest
from trlx_like.sweep.search import point_of
from trlx_like.sweep.spec import SweepConfig, setting
from trlx_like.tracking.folder import read_metrics

if TYPE_CHECKING:
    from optuna import Study, Trial

COMMAND = [sys.executable, "-m", "trlx_like", "train"]
POLL = 0.5
"""Seconds between two looks at the runs."""


@dataclass
class Job:
    """Hold a run of a trial: one seed of it, and its process once that has started."""

    trial: Trial
    point: dict[str, Any]
    seed: int
    slot: int = 0
    process: subprocess.Popen[bytes] | None = None
    stopped: bool = False


@dataclass
class Runner:
    """Train the trials of a study."""

    study: Study
    """As `open_study` returns it."""
    spec: SweepConfig
    """The sweep."""
    seeds: Sequence[int]
    """The seeds of each trial."""
    words: Sequence[str]
    """The arguments of `trlx-like train` for every run."""
    files: RunFiles
    """The folder of the sweep, open."""
    ended: Callable[[int], None]
    """Called when a trial has ended."""
    queue: deque[Job] = field(default_factory=deque)
    """Jobs that have not begun."""
    running: list[Job] = field(default_factory=list)
    """Jobs that are going on."""

    def run(self) -> None:
        """Run all trials that are left. If this process is asked to stop, the runs save, and end before it."""
        from trlx_like.distributed.launcher import handled, life_line

        self._take_up()
        with life_line() as (handles, variables), handled([signal.SIGTERM], _end):
            try:
                while self._fill(handles, variables) or self.running:
                    time.sleep(POLL)
                    for job in list(self.running):
                        self._look(job)
            finally:
                self._stop(self.running)

    def folder(self, job: Job) -> Path:
        """Return the run folder of a job."""
        return self.files.directory / f"{job.trial.number:03d}" / f"seed_{job.seed}"

    def _take_up(self) -> None:
        """Queue what is left of the trials that ran when the sweep was killed."""
        from optuna.trial import Trial, TrialState

        for frozen in self.study.get_trials(states=(TrialState.RUNNING,)):
            # Optuna has no public way back to a trial that asks and reports.
            self._queue_seeds(Trial(self.study, frozen._trial_id))

    def _queue_seeds(self, trial: Trial) -> None:
        """Queue the seeds of a trial that have no score; with halving, the first one alone until it has."""
        done, point = trial.user_attrs.get("scores", {}), point_of(trial, self.spec)
        left = [seed for seed in self.seeds if str(seed) not in done]
        if self.spec.halving and not done:
            left = left[:1]
        self.queue.extendleft(Job(trial, point, seed) for seed in reversed(left))

    def _fill(self, handles: tuple[int, ...], variables: dict[str, str]) -> bool:
        """Start runs until `parallel` of them are going on; return whether any was started."""
        from optuna.trial import TrialState

        started = False
        while len(self.running) < self.spec.parallel:
            if not self.queue:
                trials = self.study.get_trials(deepcopy=False)
                waiting = [trial for trial in trials if trial.state == TrialState.WAITING]
                if not (waiting if self.spec.search == "grid" else len(trials) < self.spec.trials):
                    break
                self._queue_seeds(self.study.ask())
            self._start(self.queue.popleft(), handles, variables)
            started = True
        return started

    def _start(self, job: Job, handles: tuple[int, ...], variables: dict[str, str]) -> None:
        folder = self.folder(job)
        self.files.claim([folder.parent.name])
        folder.parent.mkdir(exist_ok=True)
        while RunFiles(folder).in_use():  # its process ends soon, since the sweep that started it has
            time.sleep(POLL)
        own = {"train.seed": job.seed, "train.checkpoint_dir": str(folder), "train.resume_from_checkpoint": "auto"}
        own["train.push_to_hub"] = None
        changes = [word for name, value in (job.point | own).items() for word in ("--set", setting(name, value))]
        job.slot = min(set(range(self.spec.parallel)) - {other.slot for other in self.running})
        environment = {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // self.spec.parallel)), **os.environ}
        if self.spec.devices:
            environment["CUDA_VISIBLE_DEVICES"] = str(self.spec.devices[job.slot % len(self.spec.devices)])
        with folder.with_suffix(".log").open("ab") as log:
            job.process = subprocess.Popen(
                [*COMMAND, *changes, *self.words],
                env={**environment, **variables},
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # a Ctrl-C of the terminal is passed on once
                pass_fds=handles,
            )
        self.running.append(job)

    def _look(self, job: Job) -> None:
        """Judge a run that is going on, or take note of its end."""
        if job not in self.running:  # stopped with another seed of its trial
            return
        assert job.process is not None
        code = job.process.poll()
        if self.spec.halving and job.seed == self.seeds[0] and not job.stopped:
            known = self.study.get_trials(deepcopy=False)[job.trial.number].intermediate_values
            for step, value in self._evaluations(job):
                if step not in known and not job.stopped:
                    job.trial.report(value, step)
                    job.stopped = job.trial.should_prune()
            if job.stopped and code is None:
                job.process.terminate()
        if code is None:
            return
        self.running.remove(job)
        scores = [value for _, value in self._evaluations(job)]
        if job.stopped:
            self._end(job, "PRUNED")
        elif code or not scores:
            self._fail(job, code)
        else:
            done = {**job.trial.user_attrs.get("scores", {}), str(job.seed): scores[-1]}
            job.trial.set_user_attr("scores", done)
            if len(done) == len(self.seeds):
                self._end(job, "COMPLETE", median(done.values()))
            elif self.spec.halving and len(done) == 1:
                self._queue_seeds(job.trial)

    def _evaluations(self, job: Job) -> Iterator[tuple[int, float]]:
        for row in read_metrics(self.folder(job) / "metrics.jsonl"):
            if row is not None and abs(value := row[1].get(self.spec.metric, float("nan"))) < float("inf"):
                yield row[0], value

    def _fail(self, job: Job, code: int) -> None:
        """Note why a run has no score, and give up the other seeds of its trial."""
        log = self.folder(job).with_suffix(".log")
        # What follows the sentence of an error, such as the samples that it is about, is indented.
        lines = [line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line[:1].strip()]
        why = f"exit code {code}: {lines[-1] if lines else ''}" if code else f"it logged no finite {self.spec.metric}"
        job.trial.set_user_attr("error", f"seed {job.seed}: {why}"[:500])
        self._end(job, "FAIL")
        logged = {name for row in read_metrics(self.folder(job) / "metrics.jsonl") if row for name in row[1]}
        if (
            not code
            and self.spec.metric not in logged
            and not any(t.user_attrs.get("scores") for t in self.study.trials)
        ):
            close = nearest(self.spec.metric, logged)
            others = ", ".join(sorted(name for name in logged if name.startswith(("reward", "metrics/"))))
            raise ConfigError(
                f"metric ({self.spec.metric!r}): the first run has ended and logged no such metric. "
                f"{f'Did you mean {close}?' if close else f'It logged {others}.' if others else ''} Correct it, and "
                "remove the folder of the sweep or choose another one."
            )

    def _end(self, job: Job, state: str, value: float | None = None) -> None:
        from optuna.trial import TrialState

        others = [other for other in self.running if other.trial.number == job.trial.number]
        self._stop(others)
        self.running = [other for other in self.running if other not in others]
        self.queue = deque(other for other in self.queue if other.trial.number != job.trial.number)
        self.study.tell(job.trial.number, value, state=TrialState[state])
        self.ended(job.trial.number)

    def _stop(self, jobs: Sequence[Job]) -> None:
        """Ask runs to save and end, and wait until they have."""
        for job in jobs:
            if job.process is not None and job.process.poll() is None:
                job.process.terminate()
        for job in jobs:
            if job.process is not None:
                job.process.wait()


def _end(number: int, frame: Any) -> None:
    """End the program with the exit code of a signal."""
    raise SystemExit(128 + number)
