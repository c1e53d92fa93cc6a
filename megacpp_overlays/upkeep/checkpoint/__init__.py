"""Whether a checkpoint on disk holds the state of each parameter under its own name, told from its files alone."""
