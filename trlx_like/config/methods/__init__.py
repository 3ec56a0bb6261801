"""The methods' sections, one file each. They are found by name through `config.registries.METHODS`."""
