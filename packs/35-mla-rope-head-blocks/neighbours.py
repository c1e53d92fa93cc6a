"""Fused rotary embeddings of MLA that are right without the overlay: of heads that the block divides, of a block that holds all heads, of
packed sequences, of keys and values, and without gradients. The kernels are real, in Triton's interpreter."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from megacpp_overlays.repro import Neighbour, TargetAbsent, beside

PACK = beside(__file__)
TOKENS, PLAIN, ROTATED = 2, 4, 4
KEYS = (
    ("rotary_fwd_kv_kernel", "rotary_bwd_kv_kernel"),
    ("_mla_rope_fwd_kv_split_kernel", "_mla_rope_bwd_kv_split_kernel"),
)


class _Clock:
    """Stands for the clock of a tuner: the smallest of the blocks that it likes is the fastest."""

    def __init__(self, tuner: Any, likes: Callable[[int, int], bool]) -> None:
        vars(tuner).pop("_bench", None)  # of a clock that the case may have set
        self._tuner, self._bench, self._likes = tuner, tuner._bench, likes
        vars(tuner)["_bench"] = self

    def __call__(self, *args: Any, config: Any, **more: Any) -> list[float]:
        heads = dict(zip(self._tuner.arg_names, args, strict=False))["head_num"]
        block = config.kwargs["BLOCK_H"]

        def measured(kernel_call: Any, quantiles: Any) -> list[float]:
            kernel_call()
            return [float(block if self._likes(block, heads) else 1000)] * len(quantiles)

        vars(self._tuner)["do_bench"] = measured
        found: list[float] = self._bench(*args, config=config, **more)
        return found


def _halves(block: int, heads: int) -> bool:
    return block * 2 == heads


def _holds(block: int, heads: int) -> bool:
    return block >= heads


def _queries(
    heads: int, likes: Callable[[int, int], bool] = _halves, *, packed: bool = False, learns: bool = True
) -> Mapping[str, object]:
    """Return rotated queries and what those that were given learn.

    Args:
        heads: how many; no two neighbours have as many, because a tuner remembers them.
        likes: says which blocks are fast.
        packed: whether there are two sequences in a row.
        learns: whether there are gradients.
    """
    import torch

    module = PACK._module()
    for tuner in PACK._tuners(module):
        _Clock(tuner, likes)
    generator = torch.Generator().manual_seed(heads)
    cos, sin = _angles(generator)
    shape = (TOKENS, heads, PLAIN + ROTATED) if packed else (TOKENS, 1, heads, PLAIN + ROTATED)
    given, slope = (torch.randn(*shape, generator=generator) for _ in range(2))
    given.requires_grad_()
    ends = (torch.tensor([0, TOKENS // 2, TOKENS], dtype=torch.int32),) if packed else ()
    with torch.set_grad_enabled(learns):
        rotated = module.fused_apply_mla_rope_for_q(PACK._InFront.apply(given), cos, sin, PLAIN, ROTATED, *ends)
    if not learns:
        return {"queries": rotated}
    rotated.backward(PACK._in_front(slope))
    return {"queries": rotated, "gradient": given.grad}


def _keys(heads: int) -> Mapping[str, object]:
    """Return keys and values, and what those that were given learn; see `_queries`."""
    import torch

    module = PACK._module()
    tuners = next((each for each in KEYS if all(hasattr(module, one) for one in each)), None)
    if tuners is None or not hasattr(module, "fused_apply_mla_rope_for_kv"):
        raise TargetAbsent("there are no fused rotary kernels of keys")
    for name in tuners:
        _Clock(getattr(module, name), _halves)
    generator = torch.Generator().manual_seed(heads)
    cos, sin = _angles(generator)
    given = torch.randn(TOKENS, 1, heads, 2 * PLAIN, generator=generator).requires_grad_()
    rotary = torch.randn(TOKENS, 1, 1, ROTATED, generator=generator).requires_grad_()
    found = module.fused_apply_mla_rope_for_kv(given, rotary, cos, sin, ROTATED, PLAIN, PLAIN)
    slopes = [torch.randn(each.shape, generator=generator) for each in found]
    torch.autograd.backward(found, slopes)
    names = ("keys", "values", "gradient", "gradient of the rotary part")
    return dict(zip(names, (*found, given.grad, rotary.grad), strict=True))


def _angles(generator: Any) -> tuple[Any, Any]:
    import torch

    angle = torch.randn(TOKENS, ROTATED // 2, generator=generator).repeat(1, 2).view(TOKENS, 1, 1, ROTATED)
    return angle.cos().contiguous(), angle.sin().contiguous()


def _neighbour(name: str, run: Callable[..., Any], *asked: Any, **more: Any) -> Neighbour:
    return Neighbour(name=name, overlay="mla-rope-head-blocks", run=functools.partial(run, *asked, **more))


NEIGHBOURS = (
    _neighbour("block-divides-heads", _queries, 8),
    _neighbour("block-holds-heads", _queries, 5, _holds),
    _neighbour("packed", _queries, 4, packed=True),
    _neighbour("no-gradients", _queries, 2, learns=False),
    _neighbour("keys-and-values", _keys, 4),
)
