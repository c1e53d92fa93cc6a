"""Rows that multi-token prediction rolls rightly without the overlay: not packed, packed without padding, padded by nothing, and shared
by context parallel ranks."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from megacpp_overlays.repro import Neighbour, beside, on_ranks

PACK = beside(__file__)
BOUNDS = (0, *PACK.ENDS)


def _not_packed() -> Mapping[str, object]:
    return _rolled(None)


def _not_padded() -> Mapping[str, object]:
    params = _params(cu_seqlens_q=BOUNDS, cu_seqlens_kv=BOUNDS)
    return {**_rolled(params), "boundaries": params.cu_seqlens_q}


def _padded_by_nothing() -> Mapping[str, object]:
    """Roll a row whose padded boundaries are given and are the others: first as equal numbers, then as the same tensor."""
    params = _params(cu_seqlens_q=BOUNDS, cu_seqlens_q_padded=BOUNDS)
    equal = _rolled(params)
    params.cu_seqlens_q_padded = params.cu_seqlens_q
    return {**equal, **{f"{what}, the same tensor": each for what, each in _rolled(params).items()}}


def _rows_by_position() -> Mapping[str, object]:
    """Roll two rows of the same documents, which a caller gives by position."""
    import torch

    module = PACK._module()
    rows = torch.randn(2, 3, BOUNDS[-1], generator=torch.Generator().manual_seed(24)).requires_grad_()
    given = [rows] if _takes_lists(module) else rows
    rolled = module.roll_tensor(given, -1, -1, None, _params(cu_seqlens_q=BOUNDS))[0]
    rolled.square().sum().backward()
    return {"rows": rolled, "gradients": rows.grad}


def _ranks() -> Mapping[str, object]:
    """Roll labels, which are integers, and their mask, without padding and without gradients, on context parallel ranks."""
    module = PACK._module()

    def on_rank(rank: int) -> Mapping[str, Any]:
        import torch

        found: dict[str, Any] = {}
        for what, row in (("labels", PACK._labels()), ("mask", PACK._mask())):
            with torch.no_grad():
                mine, group = row[:, PACK._share(rank)], torch.distributed.group.WORLD
                rolled, total = _roll(module, mine, _params(cu_seqlens_q=BOUNDS), group)
            found |= {what: rolled, **{f"{name} of {what}": each for name, each in total.items()}}
        return found

    return on_ranks(PACK.RANKS, on_rank)


def _rolled(params: Any) -> Mapping[str, Any]:
    """Return numbers that were rolled, their sum, and the gradients of those that they were made of."""
    import torch

    generator = torch.Generator().manual_seed(24)
    values, weights = (torch.randn(1, BOUNDS[-1], generator=generator) for _ in range(2))
    rolled, total = _roll(PACK._module(), values.requires_grad_(), params, None)
    (rolled * weights).sum().backward()
    return {"row": rolled, "gradients": values.grad, **total}


def _roll(module: Any, values: Any, params: Any, group: Any) -> tuple[Any, dict[str, Any]]:
    """Return a row that was rolled, and its sum, which a function that takes lists does not return."""
    if _takes_lists(module):
        return module.roll_tensor([values], cp_group=group, packed_seq_params=params)[0], {}
    rolled, total = module.roll_tensor(values, cp_group=group, packed_seq_params=params)
    return rolled, {"sum": total}


def _takes_lists(module: Any) -> bool:
    """Return whether the function takes and returns lists, as on dev since 2026-08-10."""
    return "tensors" in inspect.signature(module.roll_tensor).parameters


def _params(**bounds: tuple[int, ...]) -> Any:
    import torch
    from megatron.core.packed_seq_params import PackedSeqParams

    given = {name: torch.tensor(each, dtype=torch.int32, device="cpu") for name, each in bounds.items()}
    return PackedSeqParams(qkv_format="thd", **given)


def _neighbour(name: str, run: Callable[[], Mapping[str, object]]) -> Neighbour:
    return Neighbour(name=name, overlay="mtp-roll-padded-boundaries", run=run)


NEIGHBOURS = (
    _neighbour("not-packed", _not_packed),
    _neighbour("not-padded", _not_padded),
    _neighbour("padded-by-nothing", _padded_by_nothing),
    _neighbour("rows-by-position", _rows_by_position),
    _neighbour("two-ranks-not-padded", _ranks),
)
