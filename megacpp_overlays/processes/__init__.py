"""Other processes: the statement of a process, and its comparison with those of ranks and children."""
