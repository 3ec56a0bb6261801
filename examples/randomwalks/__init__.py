"""Shortest paths on a random directed graph: a task small enough to measure exactly what tuning does."""
