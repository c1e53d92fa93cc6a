"""Stand-in for `fp8_utils` of Megatron-LM dev: same names, signatures and behaviour, none of its code."""


def is_mxfp8_output_proj_active(config):
    """Return whether the output projection runs in MXFP8; without Transformer Engine it never does."""
    return False
