"""Stand-in for `megatron.core.transformer` of Megatron-LM dev: same names, signatures and behaviour, none of its code."""
