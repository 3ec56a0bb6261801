"""The bugs that scripts/mutation.py plants: which there are, that each is what it says, and where tests are found."""

from __future__ import annotations

from types import FunctionType
from typing import Any

from scripts.mutation import ROOT, TARGETS, belonging_tests, known_survivors, mutants_of, mutated

SOURCE = '''
"""A docstring with 1 + 1."""
LIMIT = 3

def clipped(x: float, low: float = 0) -> float:
    """Clip, not 2 + 2."""
    if x < low:
        raise ValueError("1 < 2")
    return min(x - 1, LIMIT)
'''


def made(number: int) -> Any:
    names: dict[str, Any] = {}
    exec(mutated(SOURCE, number, "toy.py"), names)
    assert isinstance(names["clipped"], FunctionType)
    return names["clipped"]


def test_mutants_by_hand() -> None:
    """Neither docstrings nor messages are mutated; what is outside a function's body says so."""
    found = [(mutant.where, mutant.change.partition(" in ")[0], mutant.function) for mutant in mutants_of(SOURCE)]
    assert found == [
        ("module", "3 -> 4", ""),
        ("clipped", "0 -> 1", ""),
        ("clipped", "if x < low: -> if not x < low:", "clipped"),
        ("clipped", "x < low -> x <= low", "clipped"),
        ("clipped", "min -> max", "clipped"),
        ("clipped", "x - 1 -> x + 1", "clipped"),
        ("clipped", "1 -> 2", "clipped"),
    ]
    results = [made(number)(9.5) if number != 2 else None for number in range(7)]
    assert results == [4, 3, None, 3, 8.5, 3, 3]
    assert made(5)(1.5) == 2.5 and made(6)(1.5) == -0.5


def test_every_target_has_its_tests_and_every_survivor_its_mutant_and_reason() -> None:
    for target in TARGETS:
        place = ROOT / target
        for file in place.rglob("*.py") if place.is_dir() else [place]:
            if file.name != "__init__.py":
                tests = belonging_tests(str(file.relative_to(ROOT / "trlx_like").with_suffix("")))
                assert tests and all((ROOT / test).is_file() for test in tests)
    for name, entries in known_survivors().items():
        mutants = {(mutant.where, mutant.change) for mutant in mutants_of((ROOT / name).read_text(encoding="utf-8"))}
        assert all((entry["where"], entry["change"]) in mutants and entry["reason"] for entry in entries)
