"""Options of the section `reward`."""

from __future__ import annotations

from trlx_like.config import RewardFnConfig


def test_options_of_rewards_that_do_nothing() -> None:
    assert RewardFnConfig(worker_memory=100, worker_start_limit=5.0, error_value=1.0).unused_options() == [
        *("worker_memory", "worker_start_limit", "error_value")
    ]
    assert RewardFnConfig(workers=1, worker_memory=100, on_error="value", error_value=1.0).unused_options() == []
    assert RewardFnConfig(error_value=1.0).inert() == ["error_value"]  # the former name
