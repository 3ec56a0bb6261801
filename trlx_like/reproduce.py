"""Run a run again from its folder alone, and tell where it first differs: `trlx-like reproduce RUN`."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

from trlx_like import api
from trlx_like.checkpoint import MANIFEST
from trlx_like.config import TRLConfig
from trlx_like.errors import DataError
from trlx_like.tracking.folder import read_rows
from trlx_like.trainers.callbacks import Callback
from trlx_like.trainers.provenance import FILE as RECORD
from trlx_like.trainers.run import HISTORY_FILE


class _StopAt(Callback):
    """Ends training after a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step(self, trainer: Any, metrics: Mapping[str, float]) -> bool:
        return bool(trainer.progress.step < self.step)


def reproduce(run: Path, step: int | None = None) -> tuple[str, bool]:
    """Run a run again in a temporary folder, and compare metrics and checkpoints.

    Data, functions and models are read from where config.yml names them, relative to the current folder.

    Args:
        run: The run folder.
        step: The step to run to; None: the last one in metrics.jsonl.

    Returns:
        A sentence with the first difference, or that there is none, and whether all is equal.

    Raises:
        DataError: If the folder does not hold what a repetition needs: options changed in the middle of the run, data
            came from Python, or several processes made it.
    """
    rows = _rows(run / "metrics.jsonl")
    if not rows:
        raise DataError(f"{run} is not a run folder: it has no metrics.jsonl with steps.")
    last = max(rows) if step is None else step
    if not 1 <= last <= max(rows):
        raise DataError(f"--step ({last}) must be from 1 to {max(rows)}, the last step of {run}.")
    _require_repeatable(run)
    config = TRLConfig.load_yaml(run / "config.yml")
    with tempfile.TemporaryDirectory(prefix="trlx_like-") as folder:
        again = Path(folder) / "run"
        repeated = config.elsewhere(again).evolve(train={"keep_checkpoints": None})
        trainer = api.make_trainer(repeated, callbacks=[_StopAt(last)])
        trainer.learn()
        difference = next(_differences(rows, _rows(again / "metrics.jsonl"), run, again, last), None)
        found = [difference] if difference else []
        if difference and (old := _record(run)) is not None:
            new = trainer.run.folder.made_with
            found += [
                f"{part}: {name} was {old[part].get(name)}, and is {new[part].get(name)} now"
                for part in ("data", "code", "versions")
                for name in dict.fromkeys([*old[part], *new[part]])
                if old[part].get(name) != new[part].get(name)
            ]
    same = f"{run} was run again to step {last}: all metrics and checkpoints are equal."
    return ("\n".join(found) if found else same), difference is None


def _require_repeatable(run: Path) -> None:
    """Raise DataError unless config.yml describes the whole run."""
    history = read_rows(run / HISTORY_FILE)
    for event in history:
        if event.get("changes"):
            options = ", ".join(change["option"] for change in event["changes"])
            raise DataError(
                f"{run}: {options} changed at step {event['step']}, so config.yml is not that of all steps."
            )
        if event.get("processes", 1) != 1:
            raise DataError(f"{run} was made by {event['processes']} processes, and reproduce starts one.")
    record = _record(run)
    known = TRLConfig.load_yaml(run / "config.yml").data.to_dict()
    known["eval_prompts"] = known["eval_prompts"] or known["prompts"]  # the first ones, if none are named
    given = [name for part in ("data", "code") for name in (record or {}).get(part, {}) if known.get(name) is None]
    if given:
        raise DataError(f"{run}: {', '.join(given)} came from Python and not from a file that config.yml names.")


def _differences(
    rows: Mapping[int, dict[str, Any]], again: Mapping[int, dict[str, Any]], run: Path, other: Path, last: int
) -> Iterator[str]:
    """Yield the differences up to a step. Times differ always; the last step of the repetition has an evaluation."""
    for step in (step for step in rows if step <= last):
        new = again.get(step, {})
        for name, value in rows[step].items():
            skipped = step == last and name not in new
            if not name.startswith("time/") and not skipped and json.dumps(value) != json.dumps(new.get(name)):
                yield f"step {step}: {name} was {value}, and is {new.get(name)} now."
    for old in sorted(run.glob("checkpoint_*")):
        if int(old.name.rpartition("_")[2]) <= last and (other / old.name).is_dir():
            before, after = (_files(folder) for folder in (old, other / old.name))
            for name in dict.fromkeys([*before, *after]):
                if before.get(name) != after.get(name):
                    yield f"{old.name}: {name} is not the same file."


def _files(checkpoint: Path) -> dict[str, Any]:
    """Return the files of a checkpoint by name, without the record of options, which names the folder's data."""
    files: dict[str, Any] = json.loads((checkpoint / MANIFEST).read_bytes())["files"]
    return {name: entry for name, entry in files.items() if name != RECORD}


def _record(run: Path) -> dict[str, Any] | None:
    """Return what the newest checkpoint was made with; None without a checkpoint."""
    for folder in sorted(run.glob("checkpoint_*"), reverse=True):
        if (folder / RECORD).is_file():
            return cast(dict[str, Any], json.loads((folder / RECORD).read_bytes()))
    return None


def _rows(file: Path) -> dict[int, dict[str, Any]]:
    """Return the rows of a metrics.jsonl by step. Rows of the same step are joined."""
    rows: dict[int, dict[str, Any]] = {}
    for row in read_rows(file):
        rows.setdefault(row["step"], {}).update(row)
    return rows
