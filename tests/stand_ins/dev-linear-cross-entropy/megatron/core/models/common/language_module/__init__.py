"""Stand-in for `megatron.core.models.common.language_module` of Megatron-LM dev: same names, signatures and behaviour, none of its code."""
