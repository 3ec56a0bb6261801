"""`python -m trlx_like`: the command `trlx-like`."""

from trlx_like.cli import main

if __name__ == "__main__":
    main()
