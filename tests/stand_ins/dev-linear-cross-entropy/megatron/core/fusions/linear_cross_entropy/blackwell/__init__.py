"""Stand-in for the Blackwell package of Megatron-LM dev: same names, signatures and behaviour, none of its code."""
