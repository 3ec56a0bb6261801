"""Trainers that are not part of the package, each in one file."""
