"""A short run of each kind of case; `python -m tests.fuzz` is the long one."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fuzz.__main__ import tried
from tests.fuzz.cases import CASES


@pytest.mark.parametrize("name", CASES)
def test_no_case_ends_in_a_traceback(name: str, tmp_path: Path) -> None:
    assert tried(name, tmp_path, examples=15, seed=0) >= 15


def test_a_finding_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(folder: Path, drawn: object) -> int:
        raise KeyError("unhandled")

    monkeypatch.setitem(CASES, "wrong", (CASES["yaml text"][0], wrong))
    with pytest.raises(KeyError, match="unhandled"):
        tried("wrong", tmp_path, examples=5, seed=0)
