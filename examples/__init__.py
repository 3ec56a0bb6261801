"""Programs that run, and their tasks. Start them from the folder above: `python -m examples.<name>`."""
