"""Example programs and their tasks. Start them with `python examples/NAME.py`, or `python -m examples.NAME`.

They start in any folder, and create their run folders below it.
"""
