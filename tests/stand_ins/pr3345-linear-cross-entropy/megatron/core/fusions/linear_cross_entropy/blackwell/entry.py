"""Stand-in for the Blackwell entry of pull request 3345: same names, signatures and behaviour, none of its code.

Its kernels are upstream's own business. As there, the functions exist only where the packages of the kernels do.
"""

import logging

try:
    import cuda.bindings.driver  # noqa: F401
    import cutlass.cute  # noqa: F401

    def forward(hidden, weight, labels, tp_group=None, reduction="mean", ignore_index=-100, sequence_parallel=False):
        """Return seven values, on a Blackwell GPU."""
        raise NotImplementedError("the Blackwell kernels are not part of the stand-in")

    def backward(
        dlogprobs,
        global_hidden,
        weight,
        labels,
        maximum,
        accu,
        num_valid_tokens,
        reduction="mean",
        ignore_index=-100,
        tp_group=None,
        tp_rank=0,
        tp_world_size=1,
        sequence_parallel=False,
    ):
        """Return two gradients, on a Blackwell GPU."""
        raise NotImplementedError("the Blackwell kernels are not part of the stand-in")

except ImportError:
    logging.getLogger(__name__).warning("Cutlass or CUDA bindings not found: there is no entry for Blackwell GPUs.")
