"""Stand-in for the Hopper package of pull request 3345: same names, signatures and behaviour, none of its code."""
