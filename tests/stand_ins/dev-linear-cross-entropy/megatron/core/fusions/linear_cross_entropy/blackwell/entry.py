"""Stand-in for the Blackwell entry of Megatron-LM dev: same names, signatures and behaviour, none of its code.

Its kernels are upstream's own business. What a test can see of them without their packages is that there are none.
"""


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
