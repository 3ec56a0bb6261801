"""The contract covers every trainer: one without a recipe is a failure here, not a gap nobody sees."""

from __future__ import annotations

from tests.contract.recipes import RECIPES
from trlx_like.config import TRAINERS


def test_every_registered_trainer_has_a_recipe() -> None:
    ours = [name for name in TRAINERS.names() if TRAINERS.get(name).__module__.startswith("trlx_like.")]
    assert sorted(RECIPES) == sorted(ours), "add the new trainer to tests/contract/recipes.py"
