"""Stand-in for `megatron.core.models.common` of Megatron-LM dev: same names, signatures and behaviour, none of its code."""
