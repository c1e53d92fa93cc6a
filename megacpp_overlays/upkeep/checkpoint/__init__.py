"""Checks of a checkpoint on disk: whether it holds the state of each parameter under its own name."""
