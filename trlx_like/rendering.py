"""The templates of the package, which Jinja fills in: the model card with its picture, and the file for SLURM."""

from __future__ import annotations

import re
from typing import Any

LONGEST = 600
"""Most characters of a text in a block of code."""


def rendered(template: str, **values: Any) -> str:
    """Fill in a template of the folder `templates`, with `plain`, `code` and `fenced` as filters.

    Args:
        template: Name of the file. Values are escaped if it ends in .svg.
        **values: Every value that the template names.
    """
    from jinja2 import Environment, PackageLoader, StrictUndefined

    templates = Environment(
        loader=PackageLoader("trlx_like"),
        autoescape=lambda name: str(name).endswith(".svg"),
        undefined=StrictUndefined,
        trim_blocks=True,
        keep_trailing_newline=True,
    )
    templates.filters |= {"plain": _plain, "code": _code, "fenced": _fenced}
    return templates.get_template(template).render(values)


def _plain(text: Any) -> str:
    """Return a text on one line in which neither Markdown nor HTML has an effect."""
    return re.sub(r"([\\`*_\[\]|~<>&])", r"\\\1", " ".join(str(text).split()))


def _code(text: Any) -> str:
    """Return a text as code within a line or a cell of a table."""
    shown = " ".join(str(text).split()).replace("|", "\\|")
    ticks = "`" * (1 + max(map(len, re.findall("`+", shown)), default=0))
    return f"{ticks}{shown}{ticks}" if len(ticks) == 1 else f"{ticks} {shown} {ticks}"


def _fenced(text: Any, language: str = "text") -> str:
    """Return a text as a block of code, cut to `LONGEST` characters if it is a sample."""
    shown = str(text).replace("\x00", "")
    if language == "text" and len(shown) > LONGEST:
        shown = f"{shown[:LONGEST]} ... ({len(shown) - LONGEST} more characters)"
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", shown)), default=0))
    return f"{fence}{language}\n{shown.rstrip()}\n{fence}"
