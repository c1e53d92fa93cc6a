"""The two passes of `vocabulary_softmax` in plain PyTorch: any device, any floating dtype."""

from __future__ import annotations

from collections.abc import Callable

import torch

from megacpp_overlays.kernels.masked_products.panels import Panels
from megacpp_overlays.kernels.masked_products.row_counts import aligned_rows
from megacpp_overlays.kernels.masked_products.token_selection import Selection
from megacpp_overlays.kernels.vocabulary_softmax.numbers import OF_OTHERS, Coefficients, Statistics


def add_statistics(
    logits: torch.Tensor,
    labels: torch.Tensor,
    first_class: int,
    statistics: Statistics,
    first: bool,
    bias: torch.Tensor | None,
    class_weight: torch.Tensor | None,
    softcap: float | None,
    selection: Selection | None = None,
) -> None:
    """See `vocabulary_softmax.add_statistics`."""
    if selection is not None:
        if (count := int(selection.count)) < 0:
            return
        chosen = selection.order[:count]
        part = Statistics(*(None if each is None else each[chosen] for each in statistics))
        rows = logits[: len(chosen)]
        add_statistics(rows, labels[chosen], first_class, part, first, bias, class_weight, softcap)
        for each, found, other in zip(statistics, part, OF_OTHERS, strict=True):
            if each is not None and found is not None:
                if first:
                    each.fill_(other)
                each[chosen] = found
        return
    maximum, accumulate, label_logit, spread_logits = statistics
    if first:
        # Finite, so that no difference of two maxima is undefined.
        maximum.fill_(torch.finfo(maximum.dtype).min)
        for each in (accumulate, label_logit, spread_logits):
            if each is not None:
                each.zero_()
    values = _values(logits, bias, softcap, maximum.dtype)
    highest = torch.maximum(maximum, values.amax(dim=1))
    accumulate.mul_(torch.exp(maximum - highest)).add_(torch.exp(values - highest.unsqueeze(1)).sum(dim=1))
    maximum.copy_(highest)
    if spread_logits is not None:
        spread_logits.add_((values if class_weight is None else values * class_weight.to(values.dtype)).sum(dim=1))
    column, here = _own_column(labels, first_class, logits.shape[1])
    label_logit.copy_(torch.where(here, values.gather(1, column.unsqueeze(1)).squeeze(1), label_logit))


def logits_gradient(
    logits: torch.Tensor,
    labels: torch.Tensor,
    first_class: int,
    coefficients: Coefficients,
    bias: torch.Tensor | None,
    class_weight: torch.Tensor | None,
    softcap: float | None,
    out: torch.Tensor,
    selection: Selection | None = None,
) -> None:
    """See `vocabulary_softmax.logits_gradient`."""
    if selection is not None:
        if (count := int(selection.count)) < 0:
            return
        chosen = selection.order[:count]
        own, rows = Coefficients(*(None if each is None else each[chosen] for each in coefficients)), len(chosen)
        logits_gradient(logits[:rows], labels[chosen], first_class, own, bias, class_weight, softcap, out[:rows])
        out[rows : aligned_rows(rows)].zero_()
        return
    lse, of_probability, of_label = (each.unsqueeze(1) for each in coefficients[:3])
    values = _values(logits, bias, softcap, lse.dtype)
    gradient = of_probability * torch.exp(values - lse)
    dead = (of_probability == 0) & (of_label == 0)
    if coefficients.of_spread is not None:
        of_spread = coefficients.of_spread.unsqueeze(1)
        gradient.sub_(of_spread if class_weight is None else of_spread * class_weight.to(values.dtype))
        dead &= of_spread == 0
    column, here = _own_column(labels, first_class, logits.shape[1])
    column = column.unsqueeze(1)
    # One column a row, so nothing collides: unlike scatter_add_, this is deterministic on every device.
    own = gradient.gather(1, column) - torch.where(here.unsqueeze(1), of_label, 0)
    gradient.scatter_(1, column, own)
    if softcap is not None:
        gradient.mul_(1 - (values / softcap).square())
    out.copy_(gradient.masked_fill_(dead, 0))


def add_panel_statistics(
    logits: torch.Tensor,
    labels: torch.Tensor,
    first_class: int,
    statistics: Statistics,
    bias: torch.Tensor | None,
    class_weight: torch.Tensor | None,
    softcap: float | None,
    selection: Selection,
    panels: Panels,
) -> Callable[[int], None]:
    """See `vocabulary_softmax.add_panel_statistics`."""

    def add(group: int) -> None:
        first = panels.is_last_group(group)
        for rows, classes in panels.slices(group):
            part = logits[rows, : classes.stop - classes.start]
            add_statistics(
                part, labels, first_class + classes.start, statistics, first, *_of(classes, bias, class_weight), softcap,
                selection,
            )  # fmt: skip
            first = False

    return add


def panel_gradients(
    logits: torch.Tensor,
    labels: torch.Tensor,
    first_class: int,
    coefficients: Coefficients,
    bias: torch.Tensor | None,
    class_weight: torch.Tensor | None,
    softcap: float | None,
    out: torch.Tensor,
    selection: Selection,
    panels: Panels,
) -> Callable[[int], None]:
    """See `vocabulary_softmax.panel_gradients`."""

    def write(group: int) -> None:
        for rows, classes in panels.slices(group):
            width = classes.stop - classes.start
            logits_gradient(
                logits[rows, :width], labels, first_class + classes.start, coefficients,
                *_of(classes, bias, class_weight), softcap, out[rows, :width], selection,
            )  # fmt: skip

    return write


def _of(
    classes: slice, bias: torch.Tensor | None, class_weight: torch.Tensor | None
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    return None if bias is None else bias[classes], None if class_weight is None else class_weight[classes]


def plain_losses(statistics: Statistics, labels: torch.Tensor, ignore_index: int) -> torch.Tensor:
    """See `vocabulary_softmax.plain_losses`."""
    return torch.where(labels != ignore_index, statistics.lse - statistics.label_logit, 0.0)


def plain_coefficients(
    statistics: Statistics, labels: torch.Tensor, ignore_index: int, gradient: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `vocabulary_softmax.plain_coefficients`; returns the log-sum-exp and the scale of each token."""
    lse = statistics.lse
    return lse, torch.where(labels != ignore_index, gradient.to(lse.dtype), 0.0)


def _values(logits: torch.Tensor, bias: torch.Tensor | None, softcap: float | None, wide: torch.dtype) -> torch.Tensor:
    values = logits.to(wide)
    if bias is not None:
        values = values + bias.to(wide)
    if softcap is not None:
        values = softcap * torch.tanh(values / softcap)
    return values


def _own_column(labels: torch.Tensor, first_class: int, classes: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the column of each token's label, 0 where it is not in this block, and whether it is in it."""
    column = labels.to(torch.int64) - first_class
    here = (column >= 0) & (column < classes)
    return torch.where(here, column, 0), here
