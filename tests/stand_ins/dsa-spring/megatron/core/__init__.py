"""Stand-in for a package of Megatron-LM: nothing but the way to the modules below."""
