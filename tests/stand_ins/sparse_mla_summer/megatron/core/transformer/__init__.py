"""Stand-in for `megatron.core.transformer`: same names, signatures and behaviour, none of its code."""
