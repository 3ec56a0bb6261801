"""Build the documentation as a site: `python scripts/docs_site.py`, then open site/index.html.

mkdocs.yml names this file as its hook, which adds the pages at the root of the repository and the files that pages
link to. Pages are written to be read in the repository, with relative links. On the site README.md is the home page,
the other root pages are lower-case (`migrating.md`), and a link to a program leads to a copy of the program.
"""

from __future__ import annotations

import posixpath
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAGES = {
    "README.md": "index.md",
    "MIGRATING.md": "migrating.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
}
LINK = re.compile(r"(\]\()(?!\w+:|#)([^)#\s]+)")


def on_files(files: Any, config: Any) -> Any:
    """Add the root pages to the site.

    Args:
        files: what mkdocs found in docs/.
        config: the configuration of mkdocs.

    Returns:
        The same files with those added.
    """
    from mkdocs.structure.files import File

    for source, target in PAGES.items():
        files.append(File.generated(config, target, content=(ROOT / source).read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Point a page's relative links at the site's own copies.

    Args:
        markdown: the text of the page.
        page: the page, whose file says where it lies on the site.
        config: the configuration of mkdocs.
        files: the files of the site; files that the page links to are added.

    Returns:
        The text with its links rewritten.

    Raises:
        PluginError: A link leads to nothing in the repository.
    """
    from mkdocs.exceptions import PluginError
    from mkdocs.structure.files import File

    target = page.file.src_uri
    source = next((name for name, made in PAGES.items() if made == target), f"docs/{target}")

    def moved(link: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), link[2]))
        place = PAGES.get(path) or path.removeprefix("docs/")
        if place == path:  # neither a page nor below docs/
            if not (ROOT / path).is_file():
                raise PluginError(f"{source}: the link to {link[2]} must lead to a file.")
            place = f"files/{path}"
            if files.get_file_from_path(place) is None:
                files.append(File.generated(config, place, abs_src_path=str(ROOT / path)))
        return link[1] + posixpath.relpath(place, posixpath.dirname(target) or ".")

    return LINK.sub(moved, markdown)


if __name__ == "__main__":
    from environment import Environment, run

    sys.exit(run([Environment().ensure(["docs"]), "-m", "mkdocs", "build", "--strict"], NO_MKDOCS_2_WARNING="1"))
