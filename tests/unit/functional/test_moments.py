"""Running mean and spread."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from tests.unit.functional import reference_numpy as reference
from tests.unit.functional.properties import NUMBERS, QUICK
from trlx_like.functional.masked import masked_stats
from trlx_like.functional.moments import RunningMoments


def update(moments: RunningMoments, values: list[float], mask: list[bool] | None = None) -> None:
    real = torch.tensor([True] * len(values) if mask is None else mask, dtype=torch.bool)
    count, mean, m2 = masked_stats(torch.tensor(values, dtype=torch.float64), real)
    moments.update(count.item(), mean.item(), m2.item())


def test_golden() -> None:
    # {2, 4} then {6} and one abstention: mean 4, m2 8, variance 8 / 2 = 4, std 2.
    moments = RunningMoments()
    update(moments, [2.0, 4.0])
    assert (moments.mean, moments.var, moments.std) == (3, 2, math.sqrt(2))
    update(moments, [6.0, float("nan")], [True, False])
    assert (moments.count, moments.mean, moments.var, moments.std) == (3, 4, 4, 2)


@pytest.mark.parametrize("values", [[], [5.0], [0.1, 0.1, 0.1], [0.0, 0.0]])
def test_std_is_one_while_there_is_no_spread(values: list[float]) -> None:
    moments = RunningMoments()
    update(moments, values)
    assert moments.std == 1
    assert math.isfinite(moments.var)


def test_rounding_of_equal_float32_scores_is_no_spread() -> None:
    moments = RunningMoments()
    count, mean, m2 = masked_stats(torch.full((999,), 0.7), torch.ones(999, dtype=torch.bool))
    moments.update(count.item(), mean.item(), m2.item())
    assert moments.std == 1


@QUICK
@given(st.lists(st.lists(NUMBERS, max_size=6), min_size=1, max_size=4))
def test_batches_are_the_whole(groups: list[list[float]]) -> None:
    moments = RunningMoments()
    for group in groups:
        update(moments, group)
    expected = reference.stats([v for group in groups for v in group])
    np.testing.assert_allclose([moments.count, moments.mean, moments.m2], expected, atol=1e-12)


def test_state_survives_json() -> None:
    moments, restored = RunningMoments(), RunningMoments()
    update(moments, [0.1, 0.7, -2.3])
    restored.load_state_dict(json.loads(json.dumps(moments.state_dict())))
    for each in (moments, restored):
        update(each, [1.9])
    assert restored.state_dict() == moments.state_dict()
    assert restored.std == moments.std
