"""The description of the package for an index: README.md with links that hold outside the repository.

All other metadata is in pyproject.toml. Relative links become absolute under `project.urls.Source`; while the project
has no such address their text alone is left.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from urllib.parse import urljoin

from setuptools import setup

ROOT = Path(__file__).resolve().parent
LINK = re.compile(r"(!?)\[([^]]*)\]\((?!\w+:|#)([^)\s]+)\)")


def description(readme: str, source: str | None) -> str:
    """Replace the relative links of a page.

    Args:
        readme: the page as Markdown.
        source: the address under which the files of the repository are found, or None.

    Returns:
        The page without relative links.
    """

    def absolute(link: re.Match[str]) -> str:
        picture, text, path = link.groups()
        if source is None:
            return text
        return f"{picture}[{text}]({urljoin(source.rstrip('/') + '/', path)})"

    return LINK.sub(absolute, readme)


if __name__ == "__main__":
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    setup(
        long_description=description(readme, project.get("urls", {}).get("Source")),
        long_description_content_type="text/markdown",
    )
