"""Run in a fresh interpreter: gradients of MLA on tensor parallel ranks, with the overlay and without it, as JSON.

    python tests/support/shared_keys.py FOLDER RANKS...

The release is the one that is first on the path. Ranks are forked, and meet in the folder as `forked_ranks` says. Each way is a real
`MLASelfAttention`, or `FusedMLASelfAttention`, whose core is plain scaled products. It is compared with the same attention
on one rank, which every rank runs for itself. Then the ranks take a few steps, and replicas are compared.

Without Transformer Engine, as on the CPU, Megatron binds no replicated linear layer. So the one of its ModelOpt
specifications is bound here.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import json
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import megacpp_overlays

# isort: split
import torch
from forked_ranks import DEVICE, ON_CPU, bits
from forked_ranks import on_ranks as forked

MODULE = "megatron.core.transformer.multi_latent_attention"
ID = "mla-rope-key-gradient"
HIDDEN, HEADS, QUERY_RANK, LATENT, PLAIN, ROTARY, VALUE = 16, 4, 8, 8, 6, 4, 6
TOKENS, BATCH, STEPS, RATE = 8, 2, 3, 1e-3
REPLICATED = "linear_q_down_proj", "linear_kv_down_proj", "linear_qkv_down_proj"


@dataclasses.dataclass(frozen=True)
class Way:
    """Options of an attention; with `columns` ranks share the columns of down projections, else each has all of them."""

    columns: bool = False
    sequence: bool = False
    fused: bool = False
    query_rank: int | None = QUERY_RANK
    packed: bool = False
    yarn: bool = False


WAYS = {
    "replicated": Way(),
    "replicated, queries of full rank": Way(query_rank=None),
    "replicated, packed": Way(packed=True),
    "replicated, yarn": Way(yarn=True),
    "replicated, sequence parallel": Way(sequence=True),
    "columns": Way(columns=True),
    "columns, sequence parallel": Way(columns=True, sequence=True),
    "fused, replicated": Way(fused=True),
    "fused, columns": Way(fused=True, columns=True),
    "fused, columns, sequence parallel": Way(fused=True, columns=True, sequence=True),
}
RIGHT = "replicated, sequence parallel"
"""The way that is right upstream."""
ALONE = "one rank"
"""Key of a hash of the output and gradients that each rank computed alone."""
FEW = 2
FOUR = ("replicated", "replicated, sequence parallel", "columns", "columns, sequence parallel")


class Core(torch.nn.Module):
    """Causal scaled products: queries and keys [s, b, heads, d], values [s, b, heads, v], packed ones without b."""

    def __init__(self, softmax_scale: float | None = None, **_: Any) -> None:
        super().__init__()
        self.scale = softmax_scale

    def forward(self, query: Any, key: Any, value: Any, _mask: Any = None, **_more: Any) -> Any:
        packed = query.dim() == 3
        query, key, value = (each.unsqueeze(1) if packed else each for each in (query, key, value))
        scores = torch.einsum("sbhd,tbhd->bhst", query, key) * self.scale
        scores = scores.masked_fill(torch.ones_like(scores[0, 0]).triu(1).bool(), -torch.inf)
        found = torch.einsum("bhst,tbhv->sbhv", scores.softmax(-1), value).flatten(2)
        return found[:, 0] if packed else found


def make(module: ModuleType, way: Way, ranks: int, *, norm: Any = None, qk_layernorm: bool = False) -> Any:
    """Build an attention on the current tensor parallel groups, without norms or with some; its weights are set later."""
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.identity_op import IdentityOp
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.transformer_config import MLATransformerConfig

    class Up(ColumnParallelLinear):  # type: ignore[misc]
        """Makes its input contiguous: without a norm it is a view, which NCCL refuses to gather."""

        def forward(self, given: torch.Tensor, *args: Any, **more: Any) -> Any:
            return super().forward(given.contiguous(), *args, **more)

    down = ColumnParallelLinear if way.columns else module.Linear
    config = MLATransformerConfig(
        num_layers=1,
        hidden_size=HIDDEN,
        num_attention_heads=HEADS,
        q_lora_rank=way.query_rank,
        kv_lora_rank=LATENT,
        qk_head_dim=PLAIN,
        qk_pos_emb_head_dim=ROTARY,
        v_head_dim=VALUE,
        rope_type="yarn" if way.yarn else "rope",
        add_bias_linear=False,
        tensor_model_parallel_size=ranks,
        sequence_parallel=way.sequence and ranks > 1,
        use_cpu_initialization=True,
        apply_rope_fusion=False,
        qk_layernorm=qk_layernorm,
        **({"transformer_impl": "local"} if hasattr(MLATransformerConfig, "transformer_impl") else {}),
    )
    downs = {"linear_qkv_down_proj": down} if way.fused else {"linear_q_down_proj": down, "linear_kv_down_proj": down}
    submodules = module.MLASelfAttentionSubmodules(
        linear_q_proj=ColumnParallelLinear,
        linear_q_up_proj=Up,
        linear_kv_up_proj=Up,
        core_attention=ModuleSpec(module=Core),
        linear_proj=RowParallelLinear,
        q_layernorm=norm or IdentityOp,
        kv_layernorm=norm or IdentityOp,
        **downs,
    )
    cls = module.FusedMLASelfAttention if way.fused else module.MLASelfAttention
    return cls(config, submodules, layer_number=1).to(DEVICE)


def whole_weights(way: Way) -> dict[str, torch.Tensor]:
    """Return the whole weights, by the names of the attention that is not fused."""
    sizes = {
        "linear_kv_down_proj": (LATENT + ROTARY, HIDDEN),
        "linear_kv_up_proj": (HEADS * (PLAIN + VALUE), LATENT),
        "linear_proj": (HIDDEN, HEADS * VALUE),
    }
    if way.query_rank is None:
        sizes["linear_q_proj"] = (HEADS * (PLAIN + ROTARY), HIDDEN)
    else:
        sizes |= {
            "linear_q_down_proj": (QUERY_RANK, HIDDEN),
            "linear_q_up_proj": (HEADS * (PLAIN + ROTARY), QUERY_RANK),
        }
    generator = torch.Generator().manual_seed(25)
    return {name: torch.randn(*sizes[name], generator=generator) * 0.4 for name in sorted(sizes)}


def share(name: str, whole: torch.Tensor, way: Way, ranks: int, rank: int) -> torch.Tensor:
    """Return the part of a weight that a rank has."""
    if name in REPLICATED and not way.columns:
        return whole
    return whole.chunk(ranks, dim=1 if name == "linear_proj" else 0)[rank]


def held(whole: dict[str, torch.Tensor], way: Way, ranks: int, rank: int) -> dict[str, torch.Tensor]:
    """Return the parts of all weights that a rank has, by the names of its parameters."""
    found = {name: share(name, each, way, ranks, rank) for name, each in whole.items()}
    if way.fused:
        found["linear_qkv_down_proj"] = torch.cat([found.pop(each) for each in REPLICATED[:2]])
    return found


def fill(attention: Any, weights: dict[str, torch.Tensor]) -> None:
    parameters = {name.removesuffix(".weight"): each for name, each in attention.named_parameters()}
    assert parameters.keys() == weights.keys(), (parameters.keys(), weights.keys())
    with torch.no_grad():
        for name, each in parameters.items():
            each.copy_(weights[name])


def step(attention: Any, way: Way, group: Any = None) -> dict[str, torch.Tensor]:
    """Run an attention forwards and backwards, and return its output and gradients, those of parts of the sequence summed."""
    from megatron.core.packed_seq_params import PackedSeqParams

    generator = torch.Generator().manual_seed(26)
    shape = (TOKENS, 1 if way.packed else BATCH, HIDDEN)
    hidden, weights = (torch.randn(*shape, generator=generator).to(DEVICE) for _ in range(2))
    is_split = group is not None and way.sequence
    if is_split:
        hidden, weights = (each.chunk(group.size())[group.rank()] for each in (hidden, weights))
    hidden = hidden.clone().requires_grad_()
    bounds = torch.tensor([0, TOKENS], dtype=torch.int32, device=DEVICE)
    packed = {"qkv_format": "thd", "cu_seqlens_q": bounds, "cu_seqlens_kv": bounds}
    packed |= {"max_seqlen_q": TOKENS, "max_seqlen_kv": TOKENS}
    more = {"packed_seq_params": PackedSeqParams(**packed)} if way.packed else {}
    attention.zero_grad()
    output, _ = attention(hidden, None, **more)
    (output * weights).sum().backward()
    found = {"output": output.detach(), "hidden": hidden.grad}
    for name, each in attention.named_parameters():
        slope = each.grad
        if is_split and getattr(each, "sequence_parallel", False):  # as upstream's finalize_model_grads
            torch.distributed.all_reduce(slope, group=group)
        found[name.removesuffix(".weight")] = slope.clone()
    if is_split:
        for name in ("output", "hidden"):
            parts = [torch.empty_like(found[name]) for _ in range(group.size())]
            torch.distributed.all_gather(parts, found[name].contiguous(), group=group)
            found[name] = torch.cat(parts)
    return found


def compared(module: ModuleType, way: Way, ranks: int, true: dict[str, torch.Tensor], group: Any) -> dict[str, Any]:
    """Compare the gradients of this rank with those on one rank, and its replicas with those of the others after some steps."""
    attention = make(module, way, ranks)
    rank = torch.distributed.get_rank()
    fill(attention, held(whole_weights(way), way, ranks, rank))
    found = step(attention, way, group)
    ends = {name: true[name] for name in ("output", "hidden")}
    weights = {name: each for name, each in true.items() if name not in ends}
    expected = {**ends, **held(weights, way, ranks, rank)}
    down = "linear_qkv_down_proj" if way.fused else "linear_kv_down_proj"
    return {
        "down apart": apart(found[down], expected[down]),
        "others apart": max(apart(found[name], expected[name]) for name in expected.keys() - {down, "hidden"}),
        "hidden apart": apart(found["hidden"], expected["hidden"]),
        "bits": bits(*found.values()),
        "output bits": bits(found["output"]),
        "replicas apart": 0.0 if way.columns else drift(attention, way, group, down),
    }


def drift(attention: Any, way: Way, group: Any, down: str) -> float:
    """Return how far replicas of a down projection are from each other after some steps, of the largest weight."""
    optimizer = torch.optim.SGD(attention.parameters(), lr=RATE)
    for _ in range(STEPS):
        for name, each in step(attention, way, group).items():
            if name not in {"output", "hidden"}:
                attention.get_parameter(f"{name}.weight").grad = each
        optimizer.step()
    mine = attention.get_parameter(f"{down}.weight").detach()
    all_of_them = [torch.empty_like(mine) for _ in range(group.size())]
    torch.distributed.all_gather(all_of_them, mine, group=group)
    return max(apart(each, all_of_them[0]) for each in all_of_them)


def apart(found: torch.Tensor, true: torch.Tensor) -> float:
    """Return the largest difference, of the largest value."""
    return float((found - true).abs().max() / true.abs().max())


def alone(module: ModuleType, way: Way) -> dict[str, torch.Tensor]:
    """Return the output and gradients of the attention that is not fused, on one rank."""
    way = dataclasses.replace(way, fused=False, sequence=False)
    attention = make(module, way, 1)
    fill(attention, whole_weights(way))
    return step(attention, way)


@contextlib.contextmanager
def ranks_of(ranks: int) -> Iterator[None]:
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel(tensor_model_parallel_size=ranks)
    try:
        yield
    finally:
        parallel_state.destroy_model_parallel()


def on_rank(module: ModuleType, ranks: int, names: list[str]) -> dict[str, Any]:
    """Return the measurements of one of several ranks."""
    from megatron.core import parallel_state

    torch.set_num_threads(1)
    with ranks_of(1):
        true = {name: alone(module, WAYS[name]) for name in names}
    with ranks_of(ranks):
        group = parallel_state.get_tensor_model_parallel_group()
        report: dict[str, Any] = {name: compared(module, WAYS[name], ranks, true[name], group) for name in names}
    torch.distributed.barrier()
    return report | {ALONE: bits(*true[names[0]].values())}


def on_ranks(module: ModuleType, ranks: int, names: list[str], folder: Path) -> list[Any]:
    """Return the measurements of each forked rank."""
    return forked(ranks, folder, lambda _: on_rank(module, ranks, names))


def prepare() -> ModuleType:
    """Return the module, with Megatron's replicated linear layer bound in it, and rotary tables made on the CPU."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    importlib.import_module("torch._dynamo")  # each rank would import it for its optimizer
    if ON_CPU:
        torch.cuda.current_device = lambda: torch.device("cpu")
    module = importlib.import_module(MODULE)
    module.Linear = importlib.import_module("megatron.core.post_training.modelopt.layers").Linear
    if not isinstance(module.TELinear, type):
        module.HAVE_TE = False  # 0.16.1 has a mock in place of the class, and says that it has it
    return module


def names_for(module: ModuleType, ranks: int) -> list[str]:
    """Return the ways of a release: fused ones where it has the class, and with the down projections that this shares or not."""
    names = tuple(WAYS) if ranks == FEW else FOUR
    fused = getattr(module, "FusedMLASelfAttention", None)
    code = fused and fused._qkv_down_projection
    shares = code is not None and "get_pg_size" in getattr(code, "__wrapped__", code).__code__.co_names
    return [name for name in names if not WAYS[name].fused or (fused is not None and WAYS[name].columns == shares)]


def main() -> None:
    """Print the report as JSON."""
    folder, *numbers = sys.argv[1:]
    module = prepare()
    record = next(each for each in megacpp_overlays.audit().records if each.overlay.id == ID)
    report: dict[str, Any] = {"decision": record.decision.value, "reason": record.reason}
    for state in ("on", "off"):
        report[state] = {
            each: on_ranks(module, int(each), names_for(module, int(each)), Path(folder, f"{state}-{each}"))
            for each in numbers
        }
        megacpp_overlays.undo()
    sys.stdout.write(json.dumps(report))


if __name__ == "__main__":
    main()
