"""Stand-in for `mamba_model` of Megatron-LM dev: same names, signatures and behaviour, none of its code."""

from megatron.core.models.hybrid.hybrid_model import HybridModel


class MambaModel(HybridModel):
    """The former name of the hybrid model."""
