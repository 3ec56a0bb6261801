"""Data on its way in: prompts, dialogues, files, and the token ids that are made of them once."""
