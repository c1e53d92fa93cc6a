"""Stand-in for `tensor_parallel` of Megatron-LM dev: same names, signatures and behaviour, none of its code.

There is one rank.
"""

import torch


class ColumnParallelLinear(torch.nn.Module):
    """A linear layer, whose weight may be given with the call."""

    def __init__(self, input_size, output_size, *, config, init_method, skip_weight_param_allocation=False):
        super().__init__()
        self.config = config
        self.sequence_parallel = False
        self.tp_group = None
        self.weight = None
        if not skip_weight_param_allocation:
            self.weight = torch.nn.Parameter(init_method(torch.empty(output_size, input_size)))

    def forward(self, input_, weight=None, runtime_gather_output=None):
        """Return the product and no bias."""
        return input_ @ (self.weight if weight is None else weight).t(), None
