"""Learning curves of this project and of its peers on the same problems, from the same start."""
