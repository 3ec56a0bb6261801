"""Models: loading and saving, scoring of sampled text, heads on hidden states, and the frozen reference."""
