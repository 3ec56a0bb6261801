"""Programs that run, and their tasks. `python PATH/examples/NAME.py` works from any folder; runs go below that folder.

`python -m examples.NAME` works from the repository's root only, where Python finds this package.
"""
