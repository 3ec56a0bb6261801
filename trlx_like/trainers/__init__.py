"""The loop, and one file an algorithm."""
