"""What only renames: programs and files of other libraries come in here, and the names of this package go out."""
