"""Records and shows the metrics and samples of a run: one protocol, and one file for each destination.

`metrics.jsonl`, `samples.jsonl`, `ledger.jsonl`, `report.html`, the audit and the console are always on;
`train.tracker` names others. Importing this package imports neither their libraries nor torch.
"""

from __future__ import annotations

from trlx_like.tracking.base import (
    EVALUATION as EVALUATION,
    IMAGE as IMAGE,
    TRACKERS as TRACKERS,
    TRAINING as TRAINING,
    RunInfo as RunInfo,
    Tracker as Tracker,
    Trackers as Trackers,
    make_trackers as make_trackers,
    register_tracker as register_tracker,
)
