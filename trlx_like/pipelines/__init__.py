"""Reading prompts, samples and preferences, and encoding them once as token ids."""
