"""Other libraries on the same work: environments, programs, and what both sides of a comparison share."""
