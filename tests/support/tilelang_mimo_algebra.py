"""The sums of the Mamba-3 MIMO backward as its kernels write them, in float64 and one head at a time.

The reproducer of pack 17 has the same sums as gradients of the forward pass, in a derivation independent of this one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor


class _Chunk(NamedTuple):
    """Tensors of one chunk of one head; the first axis has steps, the second ranks."""

    query: Tensor
    key: Tensor
    turned_query: Tensor
    turned_key: Tensor
    scale: Tensor
    gamma: Tensor
    up: Tensor
    """Values for each rank."""
    gradient: Tensor
    """Of the output of each rank, before the gate."""
    ungated: Tensor
    """Gradient of the gated output of each rank."""
    gate: Tensor
    z: Tensor
    start: Tensor
    """Logarithm of the decay from the beginning of the chunk; `end`: to its end; `between`: [later, earlier]."""
    end: Tensor
    between: Tensor


def sums(given: Mapping[str, Tensor], chunk: int) -> dict[str, Tensor]:
    """Return the sums by the names that the kernels give them."""
    exact = {name: value.double() for name, value in given.items()}
    batch, steps, heads, head = exact["v"].shape
    ranks, state = exact["q"].shape[2], exact["q"].shape[-1]
    chunks = steps // chunk

    def zeros(*shape: int) -> Tensor:
        return torch.zeros(batch, heads, *shape, dtype=torch.double)

    found = {name: zeros(steps) for name in ("DDA_CS", "DDA_CS_REV", "DDA", "DGAMMA_DIAG", "DFACTOR")}
    found |= {"DSSDA": zeros(chunks, chunk, chunk), "DD": zeros(), "DMIMO_Z": zeros(ranks, head)}
    for b in range(batch):
        for h in range(heads):
            states = [torch.zeros(state, head, dtype=torch.double)]
            for number in range(chunks):
                part = _prepared(exact, b, h, number, chunk)
                found["DMIMO_Z"][b, h] += _gate_gradient(part, states[-1], exact["D"][h])
                left = part.turned_key * (part.scale * part.end.exp())[:, None, None]
                states.append(states[-1] * part.start[-1].exp() + torch.einsum("crn,crp->np", left, part.up))
            after = torch.zeros(state, head, dtype=torch.double)  # gradient of the state at the end of a chunk
            for number in reversed(range(chunks)):
                part, here = _prepared(exact, b, h, number, chunk), slice(number * chunk, (number + 1) * chunk)
                for name, value in _sums_of(part, states[number], after).items():
                    if name == "DD":
                        found[name][b, h] += value
                    elif name == "DSSDA":
                        found[name][b, h, number] = value
                    else:
                        found[name][b, h, here] = value
                read = part.gradient * part.start.exp()[:, None, None]
                after = after * part.start[-1].exp() + torch.einsum("crn,crp->np", part.turned_query, read)
    return found


def _prepared(exact: Mapping[str, Tensor], b: int, h: int, number: int, chunk: int) -> _Chunk:
    here = slice(number * chunk, (number + 1) * chunk)
    group = h * exact["q"].shape[3] // exact["v"].shape[2]
    query, key = (exact[name][b, here, :, group] + exact[f"{name}_bias"][h] for name in ("q", "k"))
    angles = exact["angles"][b, here, h][:, None]
    weight, step = exact["trap"][b, h].sigmoid(), exact["dt"][b, h]
    gamma = step * weight
    later = torch.zeros_like(gamma)
    later[:-1] = step[1:] * (1 - weight[1:])
    z = exact["z"][b, here, h][:, None]
    gate = z * exact["mimo_z"][h]
    ungated = exact["dout"][b, here, h][:, None] * exact["mimo_o"][h]
    return _Chunk(
        query=query,
        key=key,
        turned_query=_turned(query, angles),
        turned_key=_turned(key, angles),
        scale=(gamma + later)[here],
        gamma=gamma[here],
        up=exact["v"][b, here, h][:, None] * exact["mimo_v"][h],
        gradient=ungated * gate * gate.sigmoid(),
        ungated=ungated,
        gate=gate,
        z=z,
        start=exact["dA_cs"][b, h, here],
        end=exact["dA_cs_rev"][b, h, here],
        between=exact["segsum"][b, h, number],
    )


def _turned(value: Tensor, angles: Tensor) -> Tensor:
    width, half = angles.shape[-1], value.shape[-1] // 2
    turned = value.clone()
    turned[..., :width] = angles.cos() * value[..., :width] - angles.sin() * value[..., half : half + width]
    turned[..., half : half + width] = (
        angles.sin() * value[..., :width] + angles.cos() * value[..., half : half + width]
    )
    return turned


def _sums_of(part: _Chunk, state: Tensor, after: Tensor) -> dict[str, Tensor]:
    """Return the sums of one chunk, given the state before it and the gradient of the state after it."""
    scaled = part.turned_key * part.scale[:, None, None]
    from_state = torch.einsum("crp,np->crn", part.up, after)
    own = torch.einsum("crp,csp->crs", part.gradient, part.up)
    weights = torch.einsum("isp,jrp->isjr", part.up, part.gradient)
    products = torch.einsum("isn,jrn->isjr", scaled, part.turned_query)
    decay = part.between.exp().T.triu(1)
    key_gradient = from_state * part.end.exp()[:, None, None]
    key_gradient = key_gradient + torch.einsum("isjr,ij,jrn->isn", weights, decay, part.turned_query)
    query_gradient = torch.einsum("crp,np->crn", part.gradient, state)
    return {
        "DD": (part.gradient * part.up).sum(),
        "DGAMMA_DIAG": (torch.einsum("crn,csn->crs", part.query, part.key) * own).sum((1, 2)),
        "DDA_CS_REV": (scaled * from_state).sum((1, 2)),
        "DSSDA": (products * weights).sum((1, 3)),
        "DFACTOR": (part.turned_key * key_gradient).sum((1, 2)),
        "DDA": (state * after).sum() * part.start[-1].exp(),
        "DDA_CS": (part.turned_query * query_gradient).sum((1, 2)),
    }


def _gate_gradient(part: _Chunk, state: Tensor, skip: Tensor) -> Tensor:
    scaled = part.turned_key * part.scale[:, None, None]
    output = torch.einsum("crn,np->crp", part.turned_query, state) * part.start.exp()[:, None, None]
    weights = torch.einsum("irn,jsn,ij->irjs", part.turned_query, scaled, part.between.exp().tril(-1))
    output = output + torch.einsum("irjs,jsp->irp", weights, part.up)
    own = torch.einsum("crn,csn->crs", part.query, part.key) * part.gamma[:, None, None]
    output = output + torch.einsum("crs,csp->crp", own, part.up) + skip * part.up
    sigmoid = part.gate.sigmoid()
    return (part.ungated * output * sigmoid * (1 + part.gate * (1 - sigmoid)) * part.z).sum(0)
