"""Stand-in for the package `megatron.core` of a source tree: same names, signatures and behaviour, none of its code."""
