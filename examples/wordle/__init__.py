"""Wordle in letters, learned offline from a player that uses the clues a third of the time."""
