"""Stand-in for `megatron.core.models.mamba` of Megatron-LM dev: same names, signatures and behaviour, none of its code."""
