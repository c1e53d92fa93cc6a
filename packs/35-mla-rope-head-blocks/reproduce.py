"""Megatron's fused rotary embedding of MLA queries: is it right whichever block of heads its tuner takes?

Upstream's public function rotates queries of three and of twenty heads, forward and backward, and is compared with PyTorch. Which
block is the fastest is a matter of the GPU, so a stand-in for the clock says that of 2 and 16 heads; the kernels are real, in Triton's
interpreter. On a GPU the clock is real, too, and so are the widths of a head.

Queries lie in front of a spare token, for what is written behind them.
"""

from __future__ import annotations

import importlib
from typing import Any, NamedTuple

from megacpp_overlays.repro import Behaviour, Case, TargetAbsent

MODULE = "megatron.core.fusions.fused_mla_yarn_rope_apply"
KERNELS = (
    ("rotary_fwd_q_kernel", "rotary_bwd_q_kernel"),
    ("_mla_rope_fwd_inplace_kernel", "_mla_rope_bwd_inplace_kernel"),
)
HEADS = (3, 20)


class Queries(NamedTuple):
    """What is rotated: tokens of a sequence, channels of a head that stay and that are rotated, device and dtype."""

    tokens: int
    plain: int
    rotated: int
    device: str
    dtype: str
    rounding: float


SMALL = Queries(6, 8, 8, "cpu", "float32", 0.02)
REAL = Queries(4096, 128, 64, "cuda", "bfloat16", 0.1)


def _interpreted() -> Behaviour:
    module = _module()
    for tuner in _tuners(module):
        _Clock(tuner)
    return _behaviour(module, SMALL)


def _on_a_gpu() -> Behaviour:
    return _behaviour(_module(), REAL)


def _module() -> Any:
    try:
        return importlib.import_module(MODULE)
    except ModuleNotFoundError as error:
        raise TargetAbsent("there are no fused rotary kernels of MLA") from error


def _tuners(module: Any) -> tuple[Any, ...]:
    return next(
        tuple(getattr(module, each) for each in names) for names in KERNELS if all(hasattr(module, each) for each in names)
    )


class _Clock:
    """Stands for the clock of a tuner: of the blocks that are smaller than the heads, the largest one is the fastest."""

    def __init__(self, tuner: Any) -> None:
        self._tuner, self._bench = tuner, tuner._bench  # noqa: SLF001 - the one place that knows what is measured
        vars(tuner)["_bench"] = self

    def __call__(self, *args: Any, config: Any, **more: Any) -> list[float]:
        heads = dict(zip(self._tuner.arg_names, args, strict=False))["head_num"]
        block = config.kwargs["BLOCK_H"]

        def measured(kernel_call: Any, quantiles: Any) -> list[float]:
            kernel_call()
            return [1 / block if block < heads else 1.0] * len(quantiles)

        vars(self._tuner)["do_bench"] = measured
        found: list[float] = self._bench(*args, config=config, **more)
        return found


def _behaviour(module: Any, queries: Queries) -> Behaviour:
    found = {heads: _wrong(module, queries, heads) for heads in HEADS}
    words = [
        f"{heads} heads: {forward} of {queries.tokens * heads * queries.rotated} numbers wrong, and {backward} of the gradient"
        for heads, (forward, backward) in found.items()
    ]
    return Behaviour(broken=any(sum(each) for each in found.values()), seen="; ".join(words))


def _wrong(module: Any, queries: Queries, heads: int) -> tuple[int, int]:
    """Return how many numbers are wrong after the forward and after the backward pass."""
    import torch

    generator = torch.Generator().manual_seed(heads)
    tokens, channels = queries.tokens, queries.plain + queries.rotated

    def made(*shape: int) -> Any:
        return torch.randn(*shape, generator=generator).to(queries.device)

    angle = made(tokens, queries.rotated // 2).repeat(1, 2)
    cos, sin = (each.contiguous().view(tokens, 1, 1, queries.rotated) for each in (angle.cos(), angle.sin()))
    given, above = (made(tokens + 1, 1, heads, channels).to(getattr(torch, queries.dtype))[:tokens] for _ in range(2))
    leaf = given.float().requires_grad_()
    right = _rotated(leaf, cos, sin, queries.plain)
    right.backward(above.float())

    leaves = given.requires_grad_()
    rotated = module.fused_apply_mla_rope_for_q(_InFront.apply(leaves), cos, sin, queries.plain, queries.rotated)
    forward = int(((rotated - right).abs() > queries.rounding).sum())
    rotated.backward(_in_front(above))
    return forward, int(((leaves.grad - leaf.grad).abs() > queries.rounding).sum())


def _rotated(queries: Any, cos: Any, sin: Any, plain: int) -> Any:
    """Return what the function is to compute, in plain PyTorch."""
    import torch

    left, right = queries[..., plain::2], queries[..., plain + 1 :: 2]
    half = cos.shape[-1] // 2
    return torch.cat(
        [
            queries[..., :plain],
            left * cos[..., :half] - right * sin[..., :half],
            right * cos[..., half:] + left * sin[..., half:],
        ],
        dim=-1,
    )


def _in_front(tensor: Any) -> Any:
    """Return a copy with room for another token behind it."""
    spare = tensor.new_zeros(tensor.size(0) + 1, *tensor.shape[1:])
    spare[:-1] = tensor.detach()
    return spare[:-1]


def _make_in_front() -> Any:
    import torch

    class InFront(torch.autograd.Function):  # type: ignore[misc]
        """A copy with room behind it, which upstream may write to."""

        @staticmethod
        def forward(_ctx: Any, tensor: Any) -> Any:
            return _in_front(tensor)

        @staticmethod
        def backward(_ctx: Any, gradient: Any) -> Any:
            return gradient

    return InFront


class _InFront:
    """See `_make_in_front`; torch is imported by the cases alone."""

    @staticmethod
    def apply(tensor: Any) -> Any:
        return _make_in_front().apply(tensor)


CASES = (
    Case(
        name="interpreted-cpu",
        overlay="mla-rope-head-blocks",
        device="cpu",
        versions=("torch", "triton"),
        run=_interpreted,
        environment={"TRITON_INTERPRET": "1"},
        targets=(MODULE,),
    ),
    Case(
        name="gpu",
        overlay="mla-rope-head-blocks",
        device="cuda",
        versions=("torch", "triton"),
        run=_on_a_gpu,
        environment={"TRITON_INTERPRET": "0"},
        targets=(MODULE,),
    ),
)
