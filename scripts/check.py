"""`python scripts/check.py`: lint, format, types and the site, as a merge needs them. `--fix` mends what ruff can."""

from __future__ import annotations

import argparse
import sys

from environment import TEST_EXTRAS, Environment, run, say


def main(arguments: list[str]) -> int:
    """0 if all are content, 1 otherwise. All run, so that one look shows everything."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fix", action="store_true", help="mend what ruff can mend, and format")
    fix = parser.parse_args(arguments).fix
    python = Environment().ensure(TEST_EXTRAS)
    commands = [
        ["ruff", "check", *(["--fix"] if fix else [])],
        ["ruff", "format", *([] if fix else ["--check"])],
        ["mypy"],
        ["mypy", "tests"],  # by itself: tests import scripts as a package, which run as files
        ["mkdocs", "build", "--strict"],  # links, pages and the reference; --quiet would hide what --strict counts
    ]
    failed = []
    for command in commands:
        say("$ " + " ".join(command))
        if run([python, "-m", *command]):
            failed.append(" ".join(command))
    if failed:
        say("Not content: " + ", ".join(failed) + ".")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
