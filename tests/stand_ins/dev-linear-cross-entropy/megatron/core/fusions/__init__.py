"""Stand-in for `megatron.core.fusions` of Megatron-LM dev: same names, signatures and behaviour, none of its code."""
