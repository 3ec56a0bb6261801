"""The description that a package index shows."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
description = runpy.run_path(str(ROOT / "setup.py"), run_name="setup")["description"]
PAGE = "![A walk](docs/walk.svg) in [one file](configs/a.yml), [a paper](https://arxiv.org/abs/1), [below](#below)."


def test_without_an_address_the_text_of_relative_links_is_left() -> None:
    assert description(PAGE, None) == "A walk in one file, [a paper](https://arxiv.org/abs/1), [below](#below)."


def test_relative_links_become_absolute_under_the_address() -> None:
    assert description(PAGE, "https://example.org/source") == (
        "![A walk](https://example.org/source/docs/walk.svg) in [one file](https://example.org/source/configs/a.yml), "
        "[a paper](https://arxiv.org/abs/1), [below](#below)."
    )


def test_the_readme_of_the_package_has_no_relative_link() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    links = re.compile(r"\]\((?!https?:|#)")
    assert links.search(readme)
    assert not links.search(description(readme, None))
