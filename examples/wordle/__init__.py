"""Wordle in letters, learned offline from a player who looks at the clues a third of the time."""
