"""The gradient is that of the global batch, however it is cut, padded and scaled."""

from __future__ import annotations

from typing import Any

import pytest

from tests.contract.recipes import checks, kinds

# The steps here are refused, so the optimiser never gets to the first.
pytestmark = pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")


@pytest.mark.parametrize(("name", "changes"), kinds().values(), ids=kinds())
def test_gradients(name: str, changes: dict[str, Any]) -> None:
    checks(name, **changes).gradients()
