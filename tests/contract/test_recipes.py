"""The contract covers every trainer: one without a recipe is a failure here, not a gap nobody sees."""

from __future__ import annotations

import pytest

from tests.contract.recipes import RECIPES
from trlx_like.algorithms import ALGORITHMS


@pytest.mark.parametrize("trainer", [row.trainer for row in ALGORITHMS])
def test_an_algorithm_has_a_recipe(trainer: str) -> None:
    assert trainer in RECIPES, f"add {trainer} to tests/contract/recipes.py"


def test_a_recipe_is_of_an_algorithm() -> None:
    assert set(RECIPES) <= {row.trainer for row in ALGORITHMS}
