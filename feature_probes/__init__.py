"""The probes: one module per target question, standard library only."""
