"""Stand-in for `megatron.core.fusions` of pull request 3345: same names, signatures and behaviour, none of its code."""
