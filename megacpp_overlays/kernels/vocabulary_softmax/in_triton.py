"""The two passes of `vocabulary_softmax` in Triton, in float32 arithmetic.

Any CUDA device of capability 8 and above, and CPU tensors in the Triton interpreter.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from megacpp_overlays.kernels.masked_products.launches import Launches
from megacpp_overlays.kernels.masked_products.panels import Panels
from megacpp_overlays.kernels.masked_products.panels_triton import panel_group
from megacpp_overlays.kernels.masked_products.row_counts import ROW_ALIGNMENT
from megacpp_overlays.kernels.masked_products.token_selection import Selection
from megacpp_overlays.kernels.vocabulary_softmax.numbers import OF_OTHERS, Coefficients, Statistics

# Widths, in classes, that were fastest on an H200 with bfloat16 logits; on an H100 for selected rows.
_READ = 2048
_READ_SELECTED = 1024
_WRITE = 1024
_WRITE_WIDE_ROWS = 8192
_WIDE_ROW = 1 << 15
_TOKENS = 512
"""Tokens of one program where there is one number for each."""
_WARPS_OF_A_GROUP = 132 * 64
"""At most, over a group of panels: most groups may be empty, and empty programs take time, too.

As many as the multiprocessors of an H200 run at one time, with as many registers as that leaves to a thread.
"""
_WARPS = 2 * _WARPS_OF_A_GROUP
"""At most, over other rows of which only the device knows how many there are; so many are quicker where there is work."""
_REGISTERS = 32


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
    if logits.shape[0] == 0:
        return
    if selection is not None and first:
        _fill(statistics, selection)
    _statistics_launches(
        logits, labels, first_class, statistics, first, bias, class_weight, softcap, selection, logits.shape[1]
    )(0)


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
) -> Launches:
    """See `vocabulary_softmax.add_panel_statistics`."""
    _fill(statistics, selection)
    return _statistics_launches(
        logits, labels, first_class, statistics, False, bias, class_weight, softcap, selection, panels.classes, panels
    )


def _fill(statistics: Statistics, selection: Selection) -> None:
    """Give every token the numbers of one that is not selected."""
    tokens = statistics.maximum.shape[0]
    _others[(triton.cdiv(tokens, _TOKENS),)](
        *statistics, selection.count, *OF_OTHERS, tokens,
        HAS_SPREAD=statistics.spread_logits is not None, BLOCK=_TOKENS, num_warps=4,
    )  # fmt: skip


def _statistics_launches(
    logits: torch.Tensor,
    labels: torch.Tensor,
    first_class: int,
    statistics: Statistics,
    first: bool,
    bias: torch.Tensor | None,
    class_weight: torch.Tensor | None,
    softcap: float | None,
    selection: Selection | None,
    classes: int,
    panels: Panels | None = None,
) -> Launches:
    tokens, width = logits.shape
    block = min(_READ if selection is None else _READ_SELECTED, _power_of_two(width))
    warps = max(1, min(8, block // 256))
    programs = _programs(tokens, selection, panels, warps)
    arguments = {
        "logits": logits, "stride": logits.stride(0), "labels": labels,
        **statistics._asdict(), "bias": bias, "class_weight": class_weight,
        **_chosen(selection), **_cut(panels, classes),
        "programs": programs, "tokens": tokens, "first_class": first_class, "classes": classes, "softcap": softcap or 0.0,
        "HAS_SELECTION": selection is not None, "HAS_PANELS": panels is not None, "ROW_ALIGNMENT": ROW_ALIGNMENT,
        "EVEN": classes % 16 == 0, "HAS_SPREAD": statistics.spread_logits is not None, "HAS_BIAS": bias is not None,
        "HAS_CLASS_WEIGHT": class_weight is not None, "HAS_SOFTCAP": softcap is not None,
        "FIRST": first, "LOWEST": torch.finfo(torch.float32).min, "BLOCK": block,
    }  # fmt: skip
    return _launches(_statistics, (programs, 1), arguments, logits.device, selection, warps)


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
    if logits.shape[0]:
        _gradient_launches(
            logits, labels, first_class, coefficients, bias, class_weight, softcap, out, selection, logits.shape[1]
        )(0)


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
) -> Launches:
    """See `vocabulary_softmax.panel_gradients`."""
    return _gradient_launches(
        logits, labels, first_class, coefficients, bias, class_weight, softcap, out, selection, panels.classes, panels
    )


def _gradient_launches(
    logits: torch.Tensor,
    labels: torch.Tensor,
    first_class: int,
    coefficients: Coefficients,
    bias: torch.Tensor | None,
    class_weight: torch.Tensor | None,
    softcap: float | None,
    out: torch.Tensor,
    selection: Selection | None,
    classes: int,
    panels: Panels | None = None,
) -> Launches:
    tokens, width = logits.shape
    # A narrower element lands where another thread still has to read, so there a row belongs to one program.
    narrows = out.element_size() != logits.element_size()
    # With the registers that rows of a selection have, wide blocks would keep numbers in memory.
    wide = narrows or (width > _WIDE_ROW and selection is None)
    block = min(_WRITE_WIDE_ROWS if wide else _WRITE, _power_of_two(width))
    blocks = triton.cdiv(width, block)
    across = 1 if narrows else blocks
    warps = max(1, min(16 if narrows else 8, block // 256))
    programs = _programs(tokens, selection, panels, warps * across)
    arguments = {
        "logits": logits, "logits_stride": logits.stride(0), "labels": labels,
        **coefficients._asdict(), "bias": bias, "class_weight": class_weight, "out": out, "out_stride": out.stride(0),
        **_chosen(selection), **_cut(panels, classes),
        "programs": programs, "tokens": tokens, "first_class": first_class, "classes": classes, "softcap": softcap or 0.0,
        "HAS_SELECTION": selection is not None, "HAS_PANELS": panels is not None, "ROW_ALIGNMENT": ROW_ALIGNMENT,
        "EVEN": classes % 16 == 0, "HAS_SPREAD": coefficients.of_spread is not None, "HAS_BIAS": bias is not None,
        "HAS_CLASS_WEIGHT": class_weight is not None, "HAS_SOFTCAP": softcap is not None,
        "BLOCKS": blocks if narrows else 1, "BLOCK": block,
    }  # fmt: skip
    return _launches(_gradient, (programs, across), arguments, logits.device, selection, warps)


def _programs(tokens: int, selection: Selection | None, panels: Panels | None, warps: int) -> int:
    """Return for how many rows at a time so many warps each are launched."""
    if selection is None:
        return tokens
    most = _WARPS_OF_A_GROUP if panels is not None and panels.group_limit > 1 else _WARPS
    return min(tokens, max(1, most // warps))


def _launches(
    kernel: Any,
    grid: tuple[int, int],
    arguments: dict[str, Any],
    device: torch.device,
    selection: Selection | None,
    warps: int,
) -> Launches:
    # Not early: a pass gains less by it than it loses by running at the same time as the product ahead.
    if selection is None:
        return Launches(kernel, grid, "group", arguments, device, num_warps=warps)
    return Launches(kernel, grid, "group", arguments, device, num_warps=warps, maxnreg=_REGISTERS)


def _chosen(selection: Selection | None) -> dict[str, torch.Tensor | None]:
    if selection is None:
        return {"order": None, "count": None}
    return {"order": selection.order, "count": selection.count}


def _cut(panels: Panels | None, classes: int) -> dict[str, torch.Tensor | int | None]:
    if panels is None:
        return {"planned_rows": None, "width": classes, "panels": 1, "group_limit": 1}
    return panels.arguments


def plain_losses(statistics: Statistics, labels: torch.Tensor, ignore_index: int) -> torch.Tensor:
    """See `vocabulary_softmax.plain_losses`."""
    maximum, accumulate, label_logit, _ = statistics
    losses = torch.empty_like(maximum)
    if tokens := labels.shape[0]:
        _losses[(triton.cdiv(tokens, _TOKENS),)](
            maximum, accumulate, label_logit, labels, ignore_index, losses, tokens, BLOCK=_TOKENS, num_warps=4
        )
    return losses


def plain_coefficients(
    statistics: Statistics, labels: torch.Tensor, ignore_index: int, gradient: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `vocabulary_softmax.plain_coefficients`; returns the log-sum-exp and the scale of each token."""
    maximum, accumulate, *_ = statistics
    lse, scale = torch.empty_like(maximum), torch.empty_like(maximum)
    if tokens := labels.shape[0]:
        _coefficients[(triton.cdiv(tokens, _TOKENS),)](
            maximum, accumulate, labels, ignore_index, gradient, gradient.stride(0), lse, scale, tokens,
            BLOCK=_TOKENS, num_warps=4,
        )  # fmt: skip
    return lse, scale


def _power_of_two(classes: int) -> int:
    return 1 << max(classes - 1, 0).bit_length()


@triton.jit
def _capped(values, softcap):  # type: ignore[no-untyped-def]
    # tanh by hand: the interpreter has none. The exponential of a negative number cannot overflow.
    ratio = values / softcap
    small = tl.exp(-2.0 * tl.abs(ratio))
    size = (1.0 - small) / (1.0 + small)
    return softcap * tl.where(ratio < 0.0, -size, size)


# `first_class` differs from block to block; compiling anew for a round number would cost more than it gains.
@triton.jit(do_not_specialize=["programs", "tokens", "first_class", "panels", "group_limit", "group"])  # type: ignore[untyped-decorator]
def _statistics(  # type: ignore[no-untyped-def]
    logits,
    stride,
    labels,
    maximum,
    accumulate,
    label_logit,
    spread_logits,
    bias,
    class_weight,
    order,
    count,
    planned_rows,
    width,
    panels,
    group_limit,
    programs,
    tokens,
    first_class,
    classes,
    softcap,
    group,
    HAS_SELECTION: tl.constexpr,
    HAS_PANELS: tl.constexpr,
    ROW_ALIGNMENT: tl.constexpr,
    EVEN: tl.constexpr,
    HAS_SPREAD: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_CLASS_WEIGHT: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    FIRST: tl.constexpr,
    LOWEST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    if HAS_PANELS:
        first, here, height = panel_group(planned_rows, tokens, panels, group_limit, group, ROW_ALIGNMENT)
        start = first * width
        fresh = tl.where(first + here == panels, 1 << 30, 0)
        for row in range(tl.program_id(0), tl.where(here > 0, tl.load(count), 0), programs):
            _statistics_of_row(
                logits + tl.cast(row, tl.int64) * stride, tl.load(order + row), labels, maximum, accumulate, label_logit,
                spread_logits, bias, class_weight, first_class + start, start, tl.minimum(classes - start, here * width),
                width, height.to(tl.int64) * stride, softcap, fresh,
                EVEN, HAS_SPREAD, HAS_BIAS, HAS_CLASS_WEIGHT, HAS_SOFTCAP, LOWEST, BLOCK,
            )  # fmt: skip
    elif HAS_SELECTION:
        for row in range(tl.program_id(0), tl.load(count), programs):
            _statistics_of_row(
                logits + tl.cast(row, tl.int64) * stride, tl.load(order + row), labels, maximum, accumulate, label_logit,
                spread_logits, bias, class_weight, first_class, 0, classes, classes, 0, softcap, FIRST << 30,
                EVEN, HAS_SPREAD, HAS_BIAS, HAS_CLASS_WEIGHT, HAS_SOFTCAP, LOWEST, BLOCK,
            )  # fmt: skip
    else:
        row = tl.program_id(0).to(tl.int64)  # a block may have more than 2**31 elements
        _statistics_of_row(
            logits + row * stride, row, labels, maximum, accumulate, label_logit,
            spread_logits, bias, class_weight, first_class, 0, classes, classes, 0, softcap, FIRST << 30,
            EVEN, HAS_SPREAD, HAS_BIAS, HAS_CLASS_WEIGHT, HAS_SOFTCAP, LOWEST, BLOCK,
        )  # fmt: skip


@triton.jit  # type: ignore[untyped-decorator]
def _statistics_of_row(  # type: ignore[no-untyped-def]
    logits,
    row,
    labels,
    maximum,
    accumulate,
    label_logit,
    spread_logits,
    bias,
    class_weight,
    first_class,
    offset,
    classes,
    width,
    apart,
    softcap,
    fresh,
    EVEN: tl.constexpr,
    HAS_SPREAD: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_CLASS_WEIGHT: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    LOWEST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # Every lane has running numbers of its own, which meet once, after the last class: a reduction over the program
    # for each part of the row costs as much as reading it. A row has a part in each panel. Tokens before `fresh` have
    # no numbers yet.
    highest = tl.full((BLOCK,), LOWEST, tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    spread = tl.zeros((BLOCK,), tl.float32)
    for panel in range(tl.cdiv(classes, width)):
        part, begin = logits + panel * apart, panel * width
        columns = tl.minimum(classes - begin, width)
        if EVEN:
            columns = tl.multiple_of(columns, 16)
        for start in range(0, columns, BLOCK):
            column = start + tl.arange(0, BLOCK)
            inside = column < columns
            values = tl.load(part + column, mask=inside, other=float("-inf")).to(tl.float32)
            if HAS_BIAS:
                values += tl.load(bias + offset + begin + column, mask=inside, other=0.0).to(tl.float32)
            if HAS_SOFTCAP:
                values = tl.where(inside, _capped(values, softcap), float("-inf"))
            # One exponential a value: of the sum's two terms, the one with the higher logit is multiplied by 1.
            ratio = tl.exp(-tl.abs(values - highest))
            total = tl.where(values > highest, total * ratio + 1.0, total + ratio)
            highest = tl.maximum(highest, values)
            if HAS_SPREAD:
                if HAS_CLASS_WEIGHT:
                    values *= tl.load(class_weight + offset + begin + column, mask=inside, other=0.0).to(tl.float32)
                spread += tl.where(inside, values, 0.0)
    before = tl.load(maximum + row, mask=row >= fresh, other=LOWEST)
    total_before = tl.load(accumulate + row, mask=row >= fresh, other=0.0)
    above = tl.maximum(before, tl.max(highest, axis=0))
    total_here = tl.sum(total * tl.exp(highest - above), axis=0)
    tl.store(accumulate + row, total_before * tl.exp(before - above) + total_here)
    tl.store(maximum + row, above)
    if HAS_SPREAD:
        spread_before = tl.load(spread_logits + row, mask=row >= fresh, other=0.0)
        tl.store(spread_logits + row, spread_before + tl.sum(spread, axis=0))
    column = tl.load(labels + row).to(tl.int64) - first_class
    here = (column >= 0) & (column < classes)
    panel = column // width
    own = tl.load(logits + panel * apart + (column - panel * width), mask=here, other=0.0).to(tl.float32)
    if HAS_BIAS:
        own += tl.load(bias + offset + column, mask=here, other=0.0).to(tl.float32)
    if HAS_SOFTCAP:
        own = _capped(own, softcap)
    tl.store(label_logit + row, own, mask=here | (row < fresh))


@triton.jit(do_not_specialize=["programs", "tokens", "first_class", "panels", "group_limit", "group"])  # type: ignore[untyped-decorator]
def _gradient(  # type: ignore[no-untyped-def]
    logits,
    logits_stride,
    labels,
    lse,
    of_probability,
    of_label,
    of_spread,
    bias,
    class_weight,
    out,
    out_stride,
    order,
    count,
    planned_rows,
    width,
    panels,
    group_limit,
    programs,
    tokens,
    first_class,
    classes,
    softcap,
    group,
    HAS_SELECTION: tl.constexpr,
    HAS_PANELS: tl.constexpr,
    ROW_ALIGNMENT: tl.constexpr,
    EVEN: tl.constexpr,
    HAS_SPREAD: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_CLASS_WEIGHT: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # Tokens that are not selected have coefficients of 0, and so their rows become zeros.
    if HAS_PANELS:
        first, here, height = panel_group(planned_rows, tokens, panels, group_limit, group, ROW_ALIGNMENT)
        selected = tl.load(count)
        end = tl.minimum(tl.maximum(tl.cdiv(selected, ROW_ALIGNMENT), 1) * ROW_ALIGNMENT, tokens)
        here = tl.where(selected < 0, 0, here)
        for each in range(tl.program_id(0), here * end, programs):
            panel = each // end
            row = each - panel * end
            at = (panel * height + row).to(tl.int64)
            start = (first + panel) * width
            columns = tl.minimum(classes - start, width)
            stored = tl.minimum(tl.cdiv(columns, ROW_ALIGNMENT) * ROW_ALIGNMENT, width)  # products go on in zeros
            if EVEN:
                columns = tl.multiple_of(columns, 16)
            stored = tl.multiple_of(stored, 16)
            _gradient_of_row(
                logits + at * logits_stride, tl.load(order + row), labels, lse, of_probability, of_label, of_spread, bias,
                class_weight, out + at * out_stride, first_class + start, start, columns, stored, softcap,
                HAS_SPREAD, HAS_BIAS, HAS_CLASS_WEIGHT, HAS_SOFTCAP, BLOCKS, BLOCK,
            )  # fmt: skip
    elif HAS_SELECTION:
        selected = tl.load(count)
        end = tl.minimum(tl.maximum(tl.cdiv(selected, ROW_ALIGNMENT), 1) * ROW_ALIGNMENT, tokens)
        for row in range(tl.program_id(0), tl.where(selected < 0, 0, end), programs):
            _gradient_of_row(
                logits + tl.cast(row, tl.int64) * logits_stride, tl.load(order + row), labels, lse, of_probability,
                of_label, of_spread, bias, class_weight, out + tl.cast(row, tl.int64) * out_stride,
                first_class, 0, classes, classes, softcap,
                HAS_SPREAD, HAS_BIAS, HAS_CLASS_WEIGHT, HAS_SOFTCAP, BLOCKS, BLOCK,
            )  # fmt: skip
    else:
        row = tl.program_id(0).to(tl.int64)
        _gradient_of_row(
            logits + row * logits_stride, row, labels, lse, of_probability,
            of_label, of_spread, bias, class_weight, out + row * out_stride,
            first_class, 0, classes, classes, softcap,
            HAS_SPREAD, HAS_BIAS, HAS_CLASS_WEIGHT, HAS_SOFTCAP, BLOCKS, BLOCK,
        )  # fmt: skip


@triton.jit  # type: ignore[untyped-decorator]
def _gradient_of_row(  # type: ignore[no-untyped-def]
    logits,
    row,
    labels,
    lse,
    of_probability,
    of_label,
    of_spread,
    bias,
    class_weight,
    out,
    first_class,
    offset,
    classes,
    stored,
    softcap,
    HAS_SPREAD: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_CLASS_WEIGHT: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    own = tl.load(labels + row).to(tl.int64) - first_class
    sum_of_row = tl.load(lse + row)
    probability_factor = tl.load(of_probability + row)
    label_factor = tl.load(of_label + row)
    dead = (probability_factor == 0.0) & (label_factor == 0.0)
    spread_factor = 0.0
    if HAS_SPREAD:
        spread_factor = tl.load(of_spread + row)
        dead = dead & (spread_factor == 0.0)
    # The logits of a token without a gradient are not read. A limit and not a second condition, because the interpreter of
    # Triton 3.9 turns a condition that is not about a block into a number.
    read = tl.where(dead, 0, classes)
    for each in range(BLOCKS):
        column = (tl.program_id(1) + each) * BLOCK + tl.arange(0, BLOCK)
        inside = column < classes
        values = tl.load(logits + column, mask=column < read, other=0.0).to(tl.float32)
        if HAS_BIAS:
            values += tl.load(bias + offset + column, mask=inside, other=0.0).to(tl.float32)
        if HAS_SOFTCAP:
            values = _capped(values, softcap)
        gradient = probability_factor * tl.exp(values - sum_of_row)
        if HAS_SPREAD:
            if HAS_CLASS_WEIGHT:
                gradient -= spread_factor * tl.load(class_weight + offset + column, mask=inside, other=0.0).to(
                    tl.float32
                )
            else:
                gradient -= spread_factor
        gradient -= tl.where(column == own, label_factor, 0.0)
        if HAS_SOFTCAP:
            ratio = values / softcap
            gradient *= 1.0 - ratio * ratio
        gradient = tl.where(dead, 0.0, gradient)
        gradient = tl.where(inside, gradient, 0.0)
        if BLOCKS > 1 or out.dtype.element_ty.primitive_bitwidth != logits.dtype.element_ty.primitive_bitwidth:
            tl.debug_barrier()  # every thread has read this part of the row
        tl.store(out + column, gradient.to(out.dtype.element_ty), mask=column < stored)


@triton.jit  # type: ignore[untyped-decorator]
def _others(  # type: ignore[no-untyped-def]
    maximum, accumulate, label_logit, spread_logits, count,
    of_maximum, of_accumulate, of_label_logit, of_spread_logits, tokens, HAS_SPREAD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = row < tl.where(tl.load(count) < 0, 0, tokens)
    nothing = tl.zeros((BLOCK,), tl.float32)
    tl.store(maximum + row, nothing + of_maximum, mask=inside)
    tl.store(accumulate + row, nothing + of_accumulate, mask=inside)
    tl.store(label_logit + row, nothing + of_label_logit, mask=inside)
    if HAS_SPREAD:
        tl.store(spread_logits + row, nothing + of_spread_logits, mask=inside)


@triton.jit(do_not_specialize=["ignore_index"])  # type: ignore[untyped-decorator]
def _losses(  # type: ignore[no-untyped-def]
    maximum, accumulate, label_logit, labels, ignore_index, losses, tokens, BLOCK: tl.constexpr
):
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = row < tokens
    lse = tl.load(maximum + row, mask=inside, other=0.0) + tl.log(tl.load(accumulate + row, mask=inside, other=1.0))
    loss = lse - tl.load(label_logit + row, mask=inside, other=0.0)
    alive = tl.load(labels + row, mask=inside, other=0) != ignore_index
    tl.store(losses + row, tl.where(alive, loss, 0.0), mask=inside)


@triton.jit(do_not_specialize=["ignore_index"])  # type: ignore[untyped-decorator]
def _coefficients(  # type: ignore[no-untyped-def]
    maximum, accumulate, labels, ignore_index, gradient, stride, lse, scale, tokens, BLOCK: tl.constexpr
):
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = row < tokens
    total = tl.load(accumulate + row, mask=inside, other=1.0)
    tl.store(lse + row, tl.load(maximum + row, mask=inside, other=0.0) + tl.log(total), mask=inside)
    alive = tl.load(labels + row, mask=inside, other=0) != ignore_index
    arrived = tl.load(gradient + row.to(tl.int64) * stride, mask=inside, other=0.0).to(tl.float32)
    tl.store(scale + row, tl.where(alive, arrived, 0.0), mask=inside)
