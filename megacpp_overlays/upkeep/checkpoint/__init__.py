"""The check that a checkpoint on disk holds the state of each parameter under its own name, from its files alone."""
