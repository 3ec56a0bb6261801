"""`python -m trlx_like.compat script.py ...` runs a program of trlX as it is: its `import trlx` gets this package."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import trlx_like.compat.trlx  # noqa: F401  # makes `import trlx` work
from trlx_like.errors import TrlxError


def main() -> None:
    """Run the script that the command line names, with the remaining arguments."""
    del sys.argv[0]
    if not sys.argv or not Path(sys.argv[0]).is_file():
        raise SystemExit("Give a script of trlX: python -m trlx_like.compat script.py ...")
    sys.path.insert(0, str(Path(sys.argv[0]).resolve().parent))
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    except TrlxError as error:
        raise SystemExit(str(error)) from None


if __name__ == "__main__":
    main()
