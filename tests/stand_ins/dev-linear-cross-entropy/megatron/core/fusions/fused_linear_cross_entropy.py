"""Stand-in for `fused_linear_cross_entropy` of Megatron-LM dev: same names, signatures and behaviour, none of its code.

The shape since 2025-12-05: the dispatcher knows Blackwell alone, and asks for the device at the first call.
"""

from functools import lru_cache

import torch


class Platform:
    """The one choice of kernels in a process. A failed choice leaves an instance that is not initialised."""

    _instance = None

    def __new__(cls):
        """Return the same instance every time."""
        cls._instance = cls._instance or object.__new__(cls)
        return cls._instance

    def __init__(self):
        if hasattr(self, "forward_func"):
            return
        assert torch.cuda.is_available(), "CUDA is not available"
        capability = torch.cuda.get_device_capability(torch.cuda.current_device())
        if capability[0] == 10:
            from megatron.core.fusions.linear_cross_entropy.blackwell import entry

            self.forward_func, self.backward_func = entry.forward, entry.backward
        else:
            raise ValueError(f"Unsupported architecture: {capability[0]}")
        self._initialized = True


@lru_cache(maxsize=1)
def _get_platform():
    return Platform()


class LinearCrossEntropy(torch.autograd.Function):
    """The loss of a linear layer, without its logits."""

    @staticmethod
    def forward(
        ctx,
        hidden,
        weight,
        labels,
        tp_group=None,
        reduction="mean",
        ignore_index=-100,
        sequence_parallel=False,
    ):
        """Return the loss of the chosen entry and keep what its backward pass takes."""
        with torch.cuda.nvtx.range("LinearCrossEntropy-forward"):
            loss, top, total, kept, ctx.rank, ctx.ranks, everything = _get_platform().forward_func(
                hidden, weight, labels, tp_group, reduction, ignore_index, sequence_parallel
            )
            ctx.save_for_backward(everything, weight, labels, top, total, kept)
            ctx.options = tp_group, reduction, ignore_index, sequence_parallel
        return loss

    @staticmethod
    def backward(ctx, dlogprobs):
        """Return the gradients for hidden states and weight."""
        with torch.cuda.nvtx.range("LinearCrossEntropy-backward"):
            global_hidden, weight, labels, maximum, accu, num_valid_tokens = ctx.saved_tensors
            tp_group, reduction, ignore_index, sequence_parallel = ctx.options
            tp_rank, tp_world_size = ctx.rank, ctx.ranks
            for_hidden, for_weight = _get_platform().backward_func(
                dlogprobs,
                global_hidden,
                weight,
                labels,
                maximum,
                accu,
                num_valid_tokens,
                reduction,
                ignore_index,
                tp_group,
                tp_rank,
                tp_world_size,
                sequence_parallel,
            )
        return for_hidden, for_weight, None, None, None, None, None


def linear_cross_entropy(
    hidden, weight, labels, tp_group=None, reduction="mean", ignore_index=-100, sequence_parallel=False
):
    """Return the loss of `hidden @ weight.T` for `labels`."""
    return LinearCrossEntropy.apply(hidden, weight, labels, tp_group, reduction, ignore_index, sequence_parallel)
