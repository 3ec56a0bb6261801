"""The training loop, its parts, and one file per algorithm."""
