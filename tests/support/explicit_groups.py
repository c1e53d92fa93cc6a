"""Run in a fresh interpreter: layers on tensor parallel groups of their own, with the overlay and without it; JSON.

    STATES="on off" python tests/support/explicit_groups.py FOLDER LAYOUTS...

The release is the one that is first on the path. Four ranks are forked, and meet in the folder as `forked_ranks` says. A layout says which
ranks form the default tensor parallel groups of the process. Layers are those of the cases of pack 44, also with sequence parallelism and
with fused down projections, and a prediction layer. They are built on pairs of ranks, and given other values on each pair. The results of a
rank are compared with its share of the results of the same layer on one rank with the values of its pair.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import megacpp_overlays

# isort: split
import torch
from forked_ranks import bits
from forked_ranks import on_ranks as forked
from places import ROOT
from shared_keys import apart, ranks_of

from megacpp_overlays.repro import neighbour

NEAR: Any = neighbour.load_file(ROOT / "packs/44-explicit-tp-groups/neighbours.py")
PACK = NEAR.PACK
ID = "explicit-tp-groups"
PREDICTION = "megatron.core.transformer.multi_token_prediction"
RANKS = 4
PAIRS = {"crossed": ([0, 2], [1, 3]), "default": ([0, 1], [2, 3]), "wide": ([0, 1], [2, 3]), "narrow": ([0, 1], [2, 3])}
DEFAULTS = {"crossed": 2, "default": 2, "wide": 4, "narrow": 1}
"""How many ranks that follow each other are a default group."""
FUSED = "linear_qkv_down_proj.weight"


@dataclasses.dataclass(frozen=True)
class Way:
    """A layer, and how it is built."""

    kind: str
    fused: bool = False
    sequence: bool = False


WAYS = {
    "cross attention": Way("cross"),
    "cross attention, sequence parallel": Way("cross", sequence=True),
    "latent attention": Way("latent"),
    "latent attention, sequence parallel": Way("latent", sequence=True),
    "latent attention, fused": Way("latent", fused=True),
    "latent attention, fused, sequence parallel": Way("latent", fused=True, sequence=True),
    "combined embeddings": Way("llava"),
    "predictions": Way("prediction"),
    "layers": Way("block"),
}


class Inner(torch.nn.Module):
    """A layer of a prediction head."""

    def __init__(self, **_: Any) -> None:
        super().__init__()
        self.layer_number = 1
        self.weight = torch.nn.Parameter(torch.ones(PACK.HIDDEN, PACK.HIDDEN))

    def forward(self, hidden_states: Any, **_: Any) -> Any:
        return (hidden_states @ self.weight).tanh(), None


class Norm(torch.nn.Module):
    """A norm without weights."""

    def __init__(self, **_: Any) -> None:
        super().__init__()

    def forward(self, values: Any) -> Any:
        return torch.nn.functional.layer_norm(values, values.shape[-1:])


class PredictionLayer(torch.nn.Module):
    """A real prediction layer that recomputes itself and distributes its saved activations."""

    def __init__(self, groups: dict[str, Any]) -> None:
        super().__init__()
        from megatron.core.tensor_parallel.layers import ColumnParallelLinear
        from megatron.core.transformer.transformer_config import TransformerConfig

        module = importlib.import_module(PREDICTION)
        config = TransformerConfig(
            **PACK._common(groups),
            mtp_num_layers=1,
            recompute_granularity="full",
            recompute_method="uniform",
            recompute_num_layers=1,
            distribute_saved_activations=True,
        )
        kind = module.MultiTokenPredictionLayerSubmodules
        inner = "mtp_model_layer" if "mtp_model_layer" in kind.__dataclass_fields__ else "transformer_layer"
        parts = kind(enorm=Norm, hnorm=Norm, eh_proj=ColumnParallelLinear, layer_norm=Norm, **{inner: Inner})
        self.head = module.MultiTokenPredictionLayer(config, parts, layer_number=1, **groups)
        self.train()

    def forward(self, values: Any) -> Any:
        tokens = torch.arange(PACK.TOKENS)[None]
        found, *_ = self.head(
            input_ids=tokens,
            position_ids=tokens,
            hidden_states=values,
            attention_mask=None,
            embedding=lambda input_ids, position_ids: values.detach() * 0.5,
        )
        return found


def fused(build: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return a builder of the pack's attention with one down projection for queries, keys and values."""
    module: Any = importlib.import_module(PACK.LATENT)
    parts_of = module.MLASelfAttentionSubmodules

    def parts(*, linear_q_down_proj: Any, linear_kv_down_proj: Any, **others: Any) -> Any:
        assert linear_q_down_proj is linear_kv_down_proj
        return parts_of(linear_qkv_down_proj=linear_q_down_proj, **others)

    def with_one(groups: Any) -> Any:
        ours = {"MLASelfAttention": module.FusedMLASelfAttention, "MLASelfAttentionSubmodules": parts}
        with mock.patch.multiple(module, **ours):
            return build(groups)

    return with_one


class OfPart(torch.nn.Module):
    """A layer that is given a rank's part of the sequence."""

    def __init__(self, layer: Any, group: Any) -> None:
        super().__init__()
        self.layer, self.group = layer, group

    def forward(self, values: Any) -> Any:
        return self.layer(values.chunk(self.group.size())[self.group.rank()])


def step(way: Way, group: Any, alone: Any, pair: int) -> dict[str, torch.Tensor]:
    """Run a layer forward and backward on the values of a pair; return its output and the gradients of parameters and inputs."""
    sequence = way.sequence and group.size() > 1
    common = PACK._common
    if way.kind == "prediction":
        build, is_cut = PredictionLayer, False
    else:
        build, _, is_cut = NEAR._layer(CASES[way.kind])
    with mock.patch.object(PACK, "_common", lambda groups: {**common(groups), "sequence_parallel": sequence}):
        layer = (fused(build) if way.fused else build)(PACK._groups(group, alone))
    layer = OfPart(layer, group) if sequence else layer
    found: dict[str, torch.Tensor] = PACK._step(layer, group, pair, is_cut=is_cut or sequence)
    return {name.removeprefix("layer."): each for name, each in found.items()} if sequence else found


CASES = {"cross": PACK._cross, "latent": PACK._latents, "llava": PACK._embeddings, "block": PACK._saved}


def axis_of(theirs: Callable[[str], int | None]) -> Callable[[str], int | None]:
    """Return a function from the name of a weight to the axis along which ranks share it, also for a prediction layer."""
    return lambda name: 0 if name.endswith("eh_proj.weight") else theirs(name)


def share_of(theirs: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that returns a rank's share of a weight; the parts of a fused weight are shared out separately."""

    def share(name: str, whole: torch.Tensor, group: Any, *, is_cut: bool) -> Any:
        if not name.endswith(FUSED):
            return theirs(name, whole, group, is_cut=is_cut)
        parts = whole.split([PACK.RANK, PACK.RANK + PACK.ROTARY])
        return torch.cat([theirs(name, each, group, is_cut=is_cut) for each in parts])

    return share


def expected(way: Way, name: str, true: torch.Tensor, group: Any) -> torch.Tensor:
    """Return a rank's share of the results of one rank."""
    if name == "hidden" and way.sequence:
        parts = [each if rank == group.rank() else each * 0 for rank, each in enumerate(true.chunk(group.size()))]
        return torch.cat(parts)
    found: torch.Tensor = PACK._share(name, true, group, is_cut=way.sequence or way.kind == "llava")
    return found


def compared(way: Way, group: Any, alone: Any, pair: int, true: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Return how far this rank's results are from its share of the results of one rank."""
    found = step(way, group, alone, pair)
    wanted = {name: expected(way, name, each, group) for name, each in true.items()}
    return {
        "output": apart(found["output"], wanted["output"]),
        "gradients": max(apart(found[name], wanted[name]) for name in wanted if name != "output"),
        "bits": bits(*found.values()),
    }


def on_rank(number: int, layout: str, names: list[str]) -> dict[str, Any]:
    """Return the measurements of one rank in a layout."""
    torch.set_num_threads(1)
    alone = [torch.distributed.new_group([each]) for each in range(RANKS)][number]
    pairs = PAIRS[layout]
    pair = next(index for index, ranks in enumerate(pairs) if number in ranks)
    with ranks_of(1):
        true = {name: step(WAYS[name], alone, alone, pair) for name in names}
    with ranks_of(DEFAULTS[layout]):
        from megatron.core import parallel_state

        made = [torch.distributed.new_group(ranks) for ranks in pairs]
        group = parallel_state.get_tensor_model_parallel_group() if layout == "default" else made[pair]
        report = {name: compared(WAYS[name], group, alone, pair, true[name]) for name in names}
        torch.distributed.barrier()
    return report


def names_for() -> list[str]:
    """Return the ways that a release can go."""
    latents, pictures, predictions = (PACK._imported(name) for name in (PACK.LATENT, PACK.LLAVA, PREDICTION))
    attention = getattr(latents, "FusedMLASelfAttention", None)
    code = attention and attention._qkv_down_projection
    layer = predictions.MultiTokenPredictionLayer
    forward, recomputed = (
        inspect.signature(each).parameters for each in (layer.forward, getattr(layer, "_checkpointed_forward", print))
    )
    can = {
        "fused": code is not None and "get_pg_size" in getattr(code, "__wrapped__", code).__code__.co_names,
        "llava": not {"pg_collection", "model_comm_pgs"}.isdisjoint(inspect.signature(pictures.LLaVAModel).parameters),
        "prediction": "tp_group" in inspect.getsource(layer.__init__)  # it has a group of its own
        and not (
            "padding_mask" in forward and "hidden_states" in recomputed and "padding_mask" not in recomputed
        ),  # 0.18 raises
    }
    return [name for name, way in WAYS.items() if can["fused"] or not way.fused if can.get(way.kind, True)]


def main() -> None:
    """Answer on standard output."""
    folder, *layouts = sys.argv[1:]
    torch.set_num_threads(1)
    for name in (PACK.UTILS, PACK.NUMBERS, PACK.ATTENTION, PACK.BLOCK):
        PACK._imported(name)
    names = names_for()
    vars(PACK).update(_axis=axis_of(PACK._axis), _share=share_of(PACK._share))
    records = [each for each in megacpp_overlays.audit().records if each.overlay.id == ID]
    report: dict[str, Any] = {
        "decisions": {each.overlay.target.module: [each.decision.value, each.reason] for each in records}
    }
    for state in os.environ.get("STATES", "on off").split():
        report[state] = {
            layout: forked(
                RANKS, Path(folder, f"{state}-{layout}"), lambda number, layout=layout: on_rank(number, layout, names)
            )
            for layout in layouts
        }
        if records:
            megacpp_overlays.undo(ID)
    sys.stdout.write(json.dumps(report))


if __name__ == "__main__":
    main()
