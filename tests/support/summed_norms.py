"""Run in a fresh interpreter: gradients of norms on tensor parallel ranks, with the overlays and without them; JSON.

    python tests/support/summed_norms.py FOLDER RANKS...

The release is the one that is first on the path. Ranks are forked, meet in the folder and have their tensors as
`forked_ranks` says. Each way is a real `MLASelfAttention` or `FusedMLASelfAttention`, a real `SelfAttention` with norms of
its heads, or a real `GatedDeltaNet`, and is compared with the same layer on one rank, which every rank runs for itself. Its
gradients are finalized by the real `finalize_model_grads`, where a few ways have them as data parallelism does, in `main_grad`.

Sharing of rotary keys is another defect, whose overlay stays on: without it gradients of down projections would differ for that.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import json
import sys
import warnings
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import megacpp_overlays

# isort: split
import shared_keys
import torch
from forked_ranks import DEVICE, ON_CPU, bits
from forked_ranks import on_ranks as forked
from shared_keys import HEADS, HIDDEN, LATENT, ROTARY, Core, apart, ranks_of

ID = "tp-norm-gradients"
FINALIZER = "megatron.core.distributed.finalize_model_grads"
ATTENTION = "megatron.core.transformer.multi_latent_attention"
NET = "megatron.core.ssm.gated_delta_net"
LAYERS = "megatron.core.post_training.modelopt.layers"
WIDTH = 6
TOKENS, BATCH, STEPS, RATE = 8, 2, 3, 1e-3


@dataclasses.dataclass(frozen=True)
class Way:
    """A layer, and the treatment of its gradients."""

    kind: str = "latent"
    columns: bool = True
    fused: bool = False
    sequence: bool = False
    main: bool = False
    averaged: bool = False
    named: bool = True
    """Whether `qk_layernorm` is set."""


WAYS = {
    "latent queries": Way(),
    "latent queries, replicated": Way(columns=False),
    "latent queries, fused": Way(fused=True),
    "latent queries, fused and replicated": Way(fused=True, columns=False),
    "latent queries, main_grad": Way(main=True),
    "latent queries, averaged": Way(averaged=True),
    "latent queries, sequence parallel": Way(sequence=True),
    "latent queries, replicated, sequence parallel": Way(columns=False, sequence=True),
    "heads": Way(kind="heads"),
    "heads, main_grad": Way(kind="heads", main=True),
    "outputs": Way(kind="net", named=False),
    "outputs beside norms of queries": Way(kind="net"),
    "outputs, main_grad": Way(kind="net", named=False, main=True),
    "outputs, sequence parallel": Way(kind="net", named=False, sequence=True),
}
FEW = 2
FEW_WAYS = ("latent queries", "latent queries, sequence parallel", "heads", "outputs", "outputs, sequence parallel")
"""The ways of more ranks than a few."""


class Norm(torch.nn.Module):
    """RMSNorm whose weight says, as Transformer Engine's does, whether its input is a part of the sequence."""

    def __init__(self, *, config: Any, hidden_size: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.eps, self.weight = eps, torch.nn.Parameter(torch.ones(hidden_size))
        self.weight.sequence_parallel = config.sequence_parallel

    def forward(self, values: Any) -> Any:
        return values * (values.square().mean(-1, keepdim=True) + self.eps).rsqrt() * self.weight


class Chunk(torch.nn.Module):
    """A chunk of a model whose data parallel ranks are one."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.layer, self.config = layer, layer.config
        self.ddp_config = SimpleNamespace(use_megatron_fsdp=False, use_custom_fsdp=False)

    def finish_grad_sync(self, **_: Any) -> None:
        """Nothing is left to do."""


def common(way: Way, ranks: int) -> dict[str, Any]:
    return {
        "num_layers": 1,
        "hidden_size": HIDDEN,
        "num_attention_heads": HEADS,
        "qk_layernorm": way.named,
        "add_bias_linear": False,
        "attention_dropout": 0.0,
        "tensor_model_parallel_size": ranks,
        "sequence_parallel": way.sequence and ranks > 1,
        "use_cpu_initialization": True,
    }


def latent(way: Way, ranks: int) -> Any:
    asked = shared_keys.Way(columns=way.columns, sequence=way.sequence, fused=way.fused)
    return shared_keys.make(importlib.import_module(ATTENTION), asked, ranks, norm=Norm, qk_layernorm=way.named)


def heads(way: Way, ranks: int) -> Any:
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
    from megatron.core.transformer.transformer_config import TransformerConfig

    class ScaledCore(Core):
        def __init__(self, **_: Any) -> None:
            super().__init__(softmax_scale=0.5)

    submodules = SelfAttentionSubmodules(
        linear_qkv=ColumnParallelLinear,
        core_attention=ScaledCore,
        linear_proj=RowParallelLinear,
        q_layernorm=Norm,
        k_layernorm=Norm,
    )
    return SelfAttention(TransformerConfig(**common(way, ranks)), submodules, layer_number=1)


def net(way: Way, ranks: int) -> Any:
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.transformer_config import TransformerConfig

    module = importlib.import_module(NET)
    config = TransformerConfig(
        **common(way, ranks),
        linear_conv_kernel_dim=2,
        linear_key_head_dim=WIDTH,
        linear_value_head_dim=WIDTH,
        linear_num_key_heads=HEADS,
        linear_num_value_heads=HEADS,
        activation_func=torch.nn.functional.silu,
        deterministic_mode=True,
        experimental_attention_variant="gated_delta_net",
        linear_attention_freq=1,
        transformer_impl="local",
    )
    parts = with_nets().GatedDeltaNetSubmodules(in_proj=ColumnParallelLinear, out_norm=Norm, out_proj=RowParallelLinear)
    groups = ProcessGroupCollection.use_mpu_process_groups(required_pgs=["tp", "cp"])
    return module.GatedDeltaNet(config, parts, layer_number=1, pg_collection=groups)


BUILDERS = {"latent": latent, "heads": heads, "net": net}


def built(way: Way, ranks: int) -> Any:
    """Return a layer that has its share of the same weights, whatever the number of ranks."""
    layer = BUILDERS[way.kind](way, ranks)
    generator = torch.Generator().manual_seed(42)
    with torch.no_grad():
        for name, each in sorted(layer.named_parameters(), key=lambda found: found[0]):
            axis = int(name in {"linear_proj.weight", "out_proj.weight"})
            is_whole = "norm" in name or ("down" in name and not way.columns)
            shares = 1 if is_whole else ranks
            shape = [size * (shares if number == axis else 1) for number, size in enumerate(each.shape)]
            whole = torch.randn(*shape, generator=generator) * 0.4 + ("norm" in name)
            rank = torch.distributed.get_rank() % shares
            parts = whole.split(fused(name, whole.shape[0]))
            each.copy_(torch.cat([part.chunk(shares, axis)[rank] for part in parts]))
            if way.averaged and name.startswith("q_layernorm"):
                each.average_gradients_across_tp_domain = True
    return layer.to(DEVICE)


def fused(name: str, size: int) -> list[int]:
    """Return the sizes of the parts that are fused in a weight; each part is shared out separately."""
    wide = HEADS * WIDTH
    return {
        "linear_qkv_down_proj.weight": [LATENT, LATENT + ROTARY],
        "in_proj.weight": [wide] * 4 + [HEADS] * 2,
        "conv1d.weight": [wide] * 3,
    }.get(name, [size])


def step(layer: Any, way: Way, ranks: int) -> dict[str, torch.Tensor]:
    """Run a layer forwards and backwards, finalize its gradients, and return them."""
    generator = torch.Generator().manual_seed(43)
    given = [torch.randn(TOKENS, BATCH, HIDDEN, generator=generator).to(DEVICE) for _ in range(2)]
    if way.sequence and ranks > 1:
        given = [each.chunk(ranks)[torch.distributed.get_rank()] for each in given]
    hidden, weights = given
    layer.zero_grad()
    output, _ = layer(hidden, None)
    (output * weights).sum().backward()
    for each in layer.parameters():
        if way.main:
            each.main_grad, each.grad = each.grad.double(), None
    importlib.import_module(FINALIZER).finalize_model_grads([Chunk(layer)])
    return {name: (each.main_grad if way.main else each.grad).clone() for name, each in layer.named_parameters()}


def compared(way: Way, ranks: int, true: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Return this rank's gradient of each norm, relative to that of one rank, and whether replicas agree after some steps."""
    layer = built(way, ranks)
    found = step(layer, way, ranks)
    norms = [name for name in found if "norm" in name]
    report: dict[str, Any] = {name: measured(found[name], true[name]) for name in norms}
    report["others"] = bits(*(each for name, each in found.items() if "norm" not in name))
    report["all"] = bits(*found.values())
    report["one rank"] = bits(*true.values())
    report["drift"] = drift(layer, way, ranks, norms) if way.kind == "net" and not way.main else 0.0
    return report


def measured(found: torch.Tensor, true: torch.Tensor) -> dict[str, float]:
    """Return how many times the true gradient another is along it, and how far away it is."""
    return {"times": float((found * true).sum() / true.square().sum()), "apart": apart(found, true)}


def drift(layer: Any, way: Way, ranks: int, names: list[str]) -> float:
    """Return how far replicas of norms are from each other after some steps, of the largest weight."""
    optimizer = torch.optim.SGD(layer.parameters(), lr=RATE)
    for _ in range(STEPS):
        step(layer, way, ranks)
        optimizer.step()
    distances = []
    for name in names:
        mine = layer.get_parameter(name).detach()
        replicas = [torch.empty_like(mine) for _ in range(ranks)]
        torch.distributed.all_gather(replicas, mine)
        distances += [apart(each, replicas[0]) for each in replicas]
    return max(distances)


def on_rank(ranks: int, names: list[str]) -> dict[str, Any]:
    """Return the measurements of one of several ranks."""
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    torch.set_num_threads(1)
    get_cuda_rng_tracker().fork = lambda *_: contextlib.nullcontext()  # of GPUs alone
    with averages_on_gloo() if ON_CPU else contextlib.nullcontext():
        with ranks_of(1):
            true = {name: step(built(WAYS[name], 1), WAYS[name], 1) for name in names}
        with ranks_of(ranks):
            return {name: compared(WAYS[name], ranks, true[name]) for name in names}


@contextlib.contextmanager
def averages_on_gloo() -> Any:
    """Let gloo, which only adds up, average as upstream asks."""
    upstream = torch.distributed.all_reduce

    def all_reduce(values: Any, op: Any = torch.distributed.ReduceOp.SUM, group: Any = None, **more: Any) -> Any:
        if op != torch.distributed.ReduceOp.AVG:
            return upstream(values, op=op, group=group, **more)
        upstream(values, group=group)
        return values.div_(torch.distributed.get_world_size(group))

    torch.distributed.all_reduce = all_reduce
    yield
    torch.distributed.all_reduce = upstream


def with_nets() -> ModuleType:
    """Return the module that has the parts of a delta net, with one of Flash Linear Attention's functions written out.

    Raises:
        ModuleNotFoundError: there is none.
    """
    try:
        module = importlib.import_module(f"{NET}.common")
    except ModuleNotFoundError:
        module = importlib.import_module(NET)
    vars(module).update(HAVE_FLA=True, l2norm=torch.nn.functional.normalize)
    return module


def names_for(module: Any) -> list[str]:
    """Return the ways that a release can go."""
    fused_class = getattr(module, "FusedMLASelfAttention", None)
    code = fused_class and fused_class._qkv_down_projection
    shares = code is not None and "get_pg_size" in getattr(code, "__wrapped__", code).__code__.co_names
    try:
        with_nets()
        has_nets = True
    except ModuleNotFoundError:
        has_nets = False

    def goes(way: Way) -> bool:
        if way.kind == "net":
            return has_nets
        if way.averaged:
            return hasattr(importlib.import_module(FINALIZER), "_allreduce_non_tensor_model_parallel_grads")  # no 0.12
        if way.fused:
            return fused_class is not None and way.columns == shares
        return way.kind == "heads" or way.columns or hasattr(module, "Linear")

    return [name for name, way in WAYS.items() if goes(way)]


def prepare() -> Any:
    """Return the module of the attention, with Megatron's replicated linear layer bound in it where it takes one."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    if ON_CPU:
        torch.cuda.current_device = lambda: torch.device("cpu")
    importlib.import_module("torch._dynamo")  # each rank would import it for its optimizer
    importlib.import_module(FINALIZER)
    module = importlib.import_module(ATTENTION)
    if hasattr(module, "TELinear") and not isinstance(module.TELinear, type):
        vars(module).update(Linear=importlib.import_module(LAYERS).Linear, HAVE_TE=False)  # 0.16.1 has mocks
    return module


def main() -> None:
    """Answer on standard output."""
    folder, *numbers = sys.argv[1:]
    names = names_for(prepare())
    few = [name for name in names if name in FEW_WAYS]
    record = next(each for each in megacpp_overlays.audit().records if each.overlay.id == ID)
    report: dict[str, Any] = {"decision": record.decision.value, "reason": record.reason}
    for state in ("on", "off"):
        report[state] = {
            number: forked(
                int(number),
                Path(folder, f"{state}-{number}"),
                lambda _, ranks=int(number): on_rank(ranks, names if ranks == FEW else few),
            )
            for number in numbers
        }
        megacpp_overlays.undo()
    sys.stdout.write(json.dumps(report))


if __name__ == "__main__":
    main()
