"""Benchmarks of speed and memory. Run one with `python -m benchmarks.<name>`."""
