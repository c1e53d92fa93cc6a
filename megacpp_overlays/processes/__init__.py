"""Other processes: what one says of itself, how ranks and children are compared with it."""
