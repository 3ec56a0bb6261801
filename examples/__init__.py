"""Example programs and their tasks. Start them with `python examples/NAME.py`, or `python -m examples.NAME`.

Run folders are created below the current folder. Most configurations name files relative to the repository's root, so
start the programs there.
"""
