"""What changes while a trainer trains is in its checkpoints, or `trlx_like.testing` says why not."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.contract.recipes import OF_THEIR_OWN, RECIPES, checks, few, scenarios
from trlx_like.config import TRAINERS


@pytest.mark.parametrize("scenario", few(scenarios(), kept=(*RECIPES, *OF_THEIR_OWN)))
def test_everything_that_changes_is_saved(scenario: str) -> None:
    name, changes = scenarios()[scenario]
    checks(name, **changes).state()


@pytest.mark.parametrize(
    "name",
    [name if name in ("SFTTrainer", "PPOTrainer") else pytest.param(name, marks=pytest.mark.slow) for name in RECIPES],
)
def test_a_counter_that_nobody_registered_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Forgetful(TRAINERS.get(name)):  # type: ignore[misc]
        """Counts in three places that no checkpoint holds."""

        def build(self, tokenizer: Any = None) -> None:
            super().build(tokenizer)
            self.calls, self.nested, self.average = 0, {"deep": [0.0]}, torch.zeros(2)

        def after_step(self, metrics: dict[str, float]) -> None:
            super().after_step(metrics)
            self.calls += 1
            self.nested["deep"][0] += 0.5
            self.average += 1

    monkeypatch.setattr(TRAINERS, "get", lambda _: Forgetful)
    forgetful = checks(name)
    assert forgetful.unsaved() == {".calls", ".nested.deep.0", ".average"}
    with pytest.raises(
        AssertionError, match=r"\.average, \.calls, \.nested\.deep\.0 of the trainer changes in training"
    ):
        forgetful.state()
    forgetful.not_state = {".calls", ".nested", ".average"}
    forgetful.state()
