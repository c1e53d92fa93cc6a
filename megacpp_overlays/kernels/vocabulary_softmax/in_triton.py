"""The two passes of `vocabulary_softmax` in Triton, in float32 arithmetic.

Any CUDA device of capability 8 and above, and CPU tensors in the Triton interpreter.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from megacpp_overlays.kernels.masked_products.token_selection import WHOLE, Selection
from megacpp_overlays.kernels.vocabulary_softmax.numbers import OF_OTHERS, Coefficients, Statistics

# Widths, in classes, that were fastest on an H200 with bfloat16 logits.
_READ = 2048
_WRITE = 1024
_WRITE_WIDE_ROWS = 8192
_WIDE_ROW = 1 << 15
_TOKENS = 512
"""Tokens of one program where there is one number for each."""
_PROGRAMS = 4096
"""At most, over rows of which only the device knows how many there are: one that finds nothing to do takes its time, too."""


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
    tokens, classes = logits.shape
    if tokens == 0:
        return
    maximum, accumulate, label_logit, spread_logits = statistics
    block = min(_READ, _power_of_two(classes))
    if selection is not None and first:
        for each, other in zip(statistics, OF_OTHERS, strict=True):
            if each is not None:
                each.fill_(other)
    programs = tokens if selection is None else min(tokens, _PROGRAMS)
    _statistics[(programs,)](
        logits,
        logits.stride(0),
        labels,
        maximum,
        accumulate,
        label_logit,
        spread_logits,
        bias,
        class_weight,
        selection and selection.order,
        selection and selection.count,
        programs,
        first_class,
        classes,
        softcap or 0.0,
        HAS_SELECTION=selection is not None,
        HAS_SPREAD=spread_logits is not None,
        HAS_BIAS=bias is not None,
        HAS_CLASS_WEIGHT=class_weight is not None,
        HAS_SOFTCAP=softcap is not None,
        FIRST=first,
        LOWEST=torch.finfo(torch.float32).min,
        BLOCK=block,
        num_warps=max(1, min(8, block // 256)),
    )


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
    tokens, classes = logits.shape
    if tokens == 0:
        return
    lse, of_probability, of_label, of_spread = coefficients
    # A narrower element lands where another thread still has to read, so there a row belongs to one program.
    narrows = out.element_size() != logits.element_size()
    block = min(_WRITE_WIDE_ROWS if narrows or classes > _WIDE_ROW else _WRITE, _power_of_two(classes))
    blocks = triton.cdiv(classes, block)
    across = 1 if narrows else blocks
    programs = tokens if selection is None else min(tokens, max(1, _PROGRAMS // across))
    _gradient[(programs, across)](
        logits,
        logits.stride(0),
        labels,
        lse,
        of_probability,
        of_label,
        of_spread,
        bias,
        class_weight,
        out,
        out.stride(0),
        selection and selection.order,
        selection and selection.count,
        programs,
        tokens,
        first_class,
        classes,
        softcap or 0.0,
        HAS_SELECTION=selection is not None,
        WHOLE=WHOLE,
        HAS_SPREAD=of_spread is not None,
        HAS_BIAS=bias is not None,
        HAS_CLASS_WEIGHT=class_weight is not None,
        HAS_SOFTCAP=softcap is not None,
        BLOCKS=blocks if narrows else 1,
        BLOCK=block,
        num_warps=max(1, min(16 if narrows else 8, block // 256)),
    )


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
@triton.jit(do_not_specialize=["programs", "first_class"])  # type: ignore[untyped-decorator]
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
    programs,
    first_class,
    classes,
    softcap,
    HAS_SELECTION: tl.constexpr,
    HAS_SPREAD: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_CLASS_WEIGHT: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    FIRST: tl.constexpr,
    LOWEST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    if HAS_SELECTION:
        for row in range(tl.program_id(0), tl.load(count), programs):
            _statistics_of_row(
                logits + tl.cast(row, tl.int64) * stride, tl.load(order + row), labels, maximum, accumulate, label_logit,
                spread_logits, bias, class_weight, first_class, classes, softcap,
                HAS_SPREAD, HAS_BIAS, HAS_CLASS_WEIGHT, HAS_SOFTCAP, FIRST, LOWEST, BLOCK,
            )  # fmt: skip
    else:
        row = tl.program_id(0).to(tl.int64)  # a block may have more than 2**31 elements
        _statistics_of_row(
            logits + row * stride, row, labels, maximum, accumulate, label_logit,
            spread_logits, bias, class_weight, first_class, classes, softcap,
            HAS_SPREAD, HAS_BIAS, HAS_CLASS_WEIGHT, HAS_SOFTCAP, FIRST, LOWEST, BLOCK,
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
    classes,
    softcap,
    HAS_SPREAD: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_CLASS_WEIGHT: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    FIRST: tl.constexpr,
    LOWEST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # Every lane has running numbers of its own, which meet once, after the last class: a reduction over the program
    # for each part of the row costs as much as reading it.
    highest = tl.full((BLOCK,), LOWEST, tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    spread = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, classes, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < classes
        values = tl.load(logits + column, mask=inside, other=float("-inf")).to(tl.float32)
        if HAS_BIAS:
            values += tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
        if HAS_SOFTCAP:
            values = tl.where(inside, _capped(values, softcap), float("-inf"))
        # One exponential a value: of the sum's two terms, the one with the higher logit is multiplied by 1.
        ratio = tl.exp(-tl.abs(values - highest))
        total = tl.where(values > highest, total * ratio + 1.0, total + ratio)
        highest = tl.maximum(highest, values)
        if HAS_SPREAD:
            if HAS_CLASS_WEIGHT:
                values *= tl.load(class_weight + column, mask=inside, other=0.0).to(tl.float32)
            spread += tl.where(inside, values, 0.0)
    before, total_before, spread_before = LOWEST, 0.0, 0.0
    if not FIRST:
        before, total_before = tl.load(maximum + row), tl.load(accumulate + row)
        if HAS_SPREAD:
            spread_before = tl.load(spread_logits + row)
    above = tl.maximum(before, tl.max(highest, axis=0))
    total_here = tl.sum(total * tl.exp(highest - above), axis=0)
    tl.store(accumulate + row, total_before * tl.exp(before - above) + total_here)
    tl.store(maximum + row, above)
    if HAS_SPREAD:
        tl.store(spread_logits + row, spread_before + tl.sum(spread, axis=0))
    column = tl.load(labels + row).to(tl.int64) - first_class
    here = (column >= 0) & (column < classes)
    own = tl.load(logits + column, mask=here, other=0.0).to(tl.float32)
    if HAS_BIAS:
        own += tl.load(bias + column, mask=here, other=0.0).to(tl.float32)
    if HAS_SOFTCAP:
        own = _capped(own, softcap)
    tl.store(label_logit + row, own, mask=here | FIRST)


@triton.jit(do_not_specialize=["programs", "tokens", "first_class"])  # type: ignore[untyped-decorator]
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
    programs,
    tokens,
    first_class,
    classes,
    softcap,
    HAS_SELECTION: tl.constexpr,
    WHOLE: tl.constexpr,
    HAS_SPREAD: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_CLASS_WEIGHT: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    if HAS_SELECTION:
        # Tokens that are not selected have coefficients of 0, and so their rows become zeros.
        end = tl.minimum(tl.maximum(tl.cdiv(tl.load(count), WHOLE), 1) * WHOLE, tokens)
        for row in range(tl.program_id(0), end, programs):
            _gradient_of_row(
                logits + tl.cast(row, tl.int64) * logits_stride, tl.load(order + row), labels, lse, of_probability,
                of_label, of_spread, bias, class_weight, out + tl.cast(row, tl.int64) * out_stride,
                first_class, classes, softcap,
                HAS_SPREAD, HAS_BIAS, HAS_CLASS_WEIGHT, HAS_SOFTCAP, BLOCKS, BLOCK,
            )  # fmt: skip
    else:
        row = tl.program_id(0).to(tl.int64)
        _gradient_of_row(
            logits + row * logits_stride, row, labels, lse, of_probability,
            of_label, of_spread, bias, class_weight, out + row * out_stride,
            first_class, classes, softcap,
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
    classes,
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
    # What a token without a gradient says is not even read. A limit and no second condition, as the interpreter of Triton 3.9
    # makes a number of one that is not about a block.
    read = tl.where(dead, 0, classes)
    for each in range(BLOCKS):
        column = (tl.program_id(1) + each) * BLOCK + tl.arange(0, BLOCK)
        inside = column < classes
        values = tl.load(logits + column, mask=column < read, other=0.0).to(tl.float32)
        if HAS_BIAS:
            values += tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
        if HAS_SOFTCAP:
            values = _capped(values, softcap)
        gradient = probability_factor * tl.exp(values - sum_of_row)
        if HAS_SPREAD:
            if HAS_CLASS_WEIGHT:
                gradient -= spread_factor * tl.load(class_weight + column, mask=inside, other=0.0).to(tl.float32)
            else:
                gradient -= spread_factor
        gradient -= tl.where(column == own, label_factor, 0.0)
        if HAS_SOFTCAP:
            ratio = values / softcap
            gradient *= 1.0 - ratio * ratio
        gradient = tl.where(dead, 0.0, gradient)
        if BLOCKS > 1 or out.dtype.element_ty.primitive_bitwidth != logits.dtype.element_ty.primitive_bitwidth:
            tl.debug_barrier()  # every thread has read this part of the row
        tl.store(out + column, gradient.to(out.dtype.element_ty), mask=inside)


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
