"""Stand-in for the Blackwell package of pull request 3345: same names, signatures and behaviour, none of its code."""
