"""Stand-in for megatron.core.transformer.enums: same names, signatures and behaviour, none of its code."""

import enum


class AttnMaskType(enum.Enum):
    """The one kind of mask that DSA takes."""

    causal = "causal"
