"""The browser in which the tests run the script of the report, if this machine has one."""

from __future__ import annotations

import shutil

NAMES = ("chromium", "chromium-browser", "google-chrome")
MISSING = "chromium not found: the script of the report is NOT tested (apt: chromium)"


def find_chromium() -> str | None:
    """Return the path of an installed Chromium, or None."""
    return next(filter(None, map(shutil.which, NAMES)), None)
