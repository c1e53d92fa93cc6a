"""Stand-in for `megatron.core.transformer.experimental_attention_variant.ops`: same names, signatures and behaviour, none of its code."""
