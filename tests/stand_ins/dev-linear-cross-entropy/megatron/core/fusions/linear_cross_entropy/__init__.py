"""Stand-in for `megatron.core.fusions.linear_cross_entropy` of Megatron-LM dev: same names, signatures and behaviour, none of its code."""
