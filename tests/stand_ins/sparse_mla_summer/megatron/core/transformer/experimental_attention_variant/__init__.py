"""Stand-in for `megatron.core.transformer.experimental_attention_variant`: same names, signatures and behaviour, none of its code."""
