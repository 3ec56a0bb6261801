"""The sections of all methods, one per file. `config.registries.METHODS` finds them by name."""
