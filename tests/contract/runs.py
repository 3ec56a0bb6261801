"""Runs of trainers, and what of two runs must be the same."""

from __future__ import annotations

from trlx_like.testing.compare import (
    StopAfter as StopAfter,
    assert_same as assert_same,
    assert_same_run as assert_same_run,
    rows as rows,
    run_until_stopped as run_until_stopped,
    state_of as state_of,
)
