"""Stand-in for `megatron.core`: same names, signatures and behaviour, none of its code."""
