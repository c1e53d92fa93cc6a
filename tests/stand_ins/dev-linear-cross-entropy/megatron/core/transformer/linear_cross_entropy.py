"""Stand-in for `linear_cross_entropy` of Megatron-LM dev: same names, signatures and behaviour, none of its code."""

from megatron.core import tensor_parallel
from megatron.core.fusions.fused_linear_cross_entropy import linear_cross_entropy


class LinearCrossEntropyModule(tensor_parallel.ColumnParallelLinear):
    """A linear layer that can be asked for the cross entropy of what it would return."""

    def forward(
        self,
        input_,
        weight=None,
        runtime_gather_output=None,
        output_cross_entropy_loss=False,
        labels=None,
        reduction="none",
        ignore_index=-100,
    ):
        """Return the loss of each label, as (batch, sequence), or what a linear layer returns."""
        if not output_cross_entropy_loss:
            return super().forward(input_, weight, runtime_gather_output)
        weight = self.weight if weight is None else weight
        return self._compute_linear_and_cross_entropy_loss(input_, weight, labels, reduction, ignore_index)

    def _compute_linear_and_cross_entropy_loss(self, hidden, weight, labels=None, reduction="none", ignore_index=-100):
        columns = labels.t().contiguous()
        losses = linear_cross_entropy(
            hidden, weight, columns, reduction=reduction, ignore_index=ignore_index, tp_group=self.tp_group
        )
        return losses.reshape(columns.shape).t().contiguous() if reduction == "none" else losses
