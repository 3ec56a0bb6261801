"""What we measure, and how to measure it again: `python -m benchmarks.<name>`."""
