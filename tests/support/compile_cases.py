"""Run in a fresh interpreter: how often compiled steps through the seams of overlays break and compile, as JSON.

    python compile_cases.py CASE ...

The upstream is the installed one, or the tree that is first on the path. MEGACPP_OVERLAYS decides whether overlays are
on. Each step is traced once whole, then run at several sizes, some twice, so that recompiling is counted too.
"""

from __future__ import annotations

import importlib
import json
import sys
import warnings
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import megacpp_overlays

# isort: split
import torch
import torch._dynamo
from fp8_dispatch import TraceableKernel

VARIANT = "megatron.core.transformer.experimental_attention_variant"
SIZES = (4, 6, 9, 6, 4)


class Case(NamedTuple):
    """A step through the public entry next to a seam, and its inputs at one size."""

    step: Callable[..., Any]
    inputs: Callable[[int], Sequence[Any]]
    dynamic: bool | None = None
    """False where torch 2.11 cannot trace upstream's own code with sizes that it does not know."""


def numbers(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Any:
    made = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)
    return made.requires_grad_()


def of_indexer(size: int) -> list[Any]:
    return [numbers(size, 2, 4, 8), numbers(size, 2, 4, seed=1), numbers(size, 2, 8, seed=2)]


def index_scores() -> Case:
    dsa = importlib.import_module(f"{VARIANT}.dsa")
    return Case(lambda q, weights, k: dsa._compute_index_scores(q, weights, k).exp(), of_indexer)


def indexer_loss() -> Case:
    dsa = importlib.import_module(f"{VARIANT}.dsa")
    alone = SimpleNamespace(tp=SimpleNamespace(size=lambda: 1))

    def step(q: Any, weights: Any, k: Any, query: Any, key: Any) -> Any:
        return 2 * dsa.FusedDSAIndexerLoss.apply(q, weights, k, query, key, 0.4, 3, 0.1, None, False, alone)[1]

    def inputs(size: int) -> list[Any]:
        return [*of_indexer(size), numbers(size, 2, 3, 5, seed=3).detach(), numbers(size, 2, 3, 5, seed=4).detach()]

    return Case(step, inputs, dynamic=False)


def context_parallel_lengths() -> Case:
    dsa = importlib.import_module(f"{VARIANT}.dsa")

    def step(x: Any) -> Any:
        length = x.shape[0]
        dsa._validate_nonpacked_cp_uniform_length(sq=length, skv=2 * length, cp_size=2, cp_group=None, device=x.device)
        return x.exp()

    return Case(step, lambda size: [numbers(size)])


def packed_lengths() -> Case:
    common = importlib.import_module("megatron.core.ssm.gated_delta_net.common")
    net = common._GDNBase.__new__(common._GDNBase)
    torch.nn.Module.__init__(net)

    def step(x: Any, lengths: Any) -> Any:
        return x.exp(), net._resolve_cu_seqlens(None, lengths, x.shape[0], "cu_seqlens_q", cp_size=1) + 1

    return Case(step, lambda size: [numbers(size), torch.tensor([0, 1, size], dtype=torch.int32)])


class NoKernel:
    """Stand-in for a Triton kernel, which takes a GPU. The counts do not depend on values."""

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return self.launch

    def launch(self, *args: Any, **kwargs: Any) -> None: ...


def sparse_mla(kernel: Any = TraceableKernel) -> Case:
    module = importlib.import_module(f"{VARIANT}.ops.tilelang_dsa")
    module.SparseMLA = kernel  # type: ignore[attr-defined]

    def step(query: Any, key: Any, indices: Any) -> Any:
        return module.fused_sparse_mla_absorbed(query, key, indices, softmax_scale=0.5, v_channels=512)

    def inputs(size: int) -> list[Any]:
        query, key = numbers(size, 2, 16, 576, dtype=torch.bfloat16), numbers(size, 2, 1, 576, dtype=torch.bfloat16)
        return [query, key, torch.zeros(2, size, 64, dtype=torch.int32)]

    return Case(step, inputs)


def sparse_mla_that_cannot_be_traced() -> Case:
    return sparse_mla(SimpleNamespace(apply=torch._dynamo.disable(TraceableKernel.apply)))


def token_losses() -> Case:
    liger = importlib.import_module("liger_kernel.ops.fused_linear_cross_entropy")
    liger.liger_cross_entropy_kernel = liger.element_mul_kernel = NoKernel()

    def step(x: Any, weight: Any, target: Any) -> Any:
        function = liger.LigerFusedLinearCrossEntropyFunction
        return 3 * function.apply(2 * x, weight, target, None, None, -100, 0.0, 0.0, "none")[0]

    def inputs(size: int) -> list[Any]:
        return [numbers(size, 8), numbers(16, 8, seed=1), torch.arange(size)]

    return Case(step, inputs)


def wrapped_module() -> Case:
    modules = importlib.import_module("megatron.core.transformer.module")
    utilities = importlib.import_module("megatron.core.pipeline_parallel.utils")
    utilities.is_pp_first_stage = utilities.is_pp_last_stage = lambda _: True
    modules.parallel_state.get_pipeline_model_parallel_group = lambda: None
    settings = SimpleNamespace(fp16=False, bf16=True, virtual_pipeline_model_parallel_size=None)
    wrapped = modules.Float16Module(settings, torch.nn.Linear(8, 8))
    return Case(lambda x: wrapped(x), lambda size: [numbers(size, 8)])


def scatter() -> Case:
    masking = importlib.import_module(f"{VARIANT}.dsa_masking")

    def step(mask: Any, indices: Any) -> Any:
        mask = mask.clone()
        masking.scatter_topk_into_index_mask(mask, indices)
        return mask

    return Case(step, lambda size: [torch.zeros(1, size, 4), torch.tensor([[[0, -1]]]).expand(1, size, 2)])


def query_positions() -> Case:
    layout = importlib.import_module(f"{VARIANT}.dsa_layout")

    def step(ids: Any) -> Any:
        return layout.extract_query_positions_from_position_ids(ids, ids.shape[1], ids.device) + 1

    return Case(step, lambda size: [torch.arange(size)[None].expand(2, size)])


CASES = {
    function.__name__: function
    for function in (
        index_scores,
        indexer_loss,
        context_parallel_lengths,
        packed_lengths,
        sparse_mla,
        sparse_mla_that_cannot_be_traced,
        token_losses,
        wrapped_module,
        scatter,
        query_positions,
    )
}


def counted(case: Case) -> dict[str, Any]:
    """Return graphs, breaks and compilations of a step."""
    counters = torch._dynamo.utils.counters
    torch._dynamo.reset()
    whole = torch._dynamo.explain(case.step)(*case.inputs(SIZES[0]))
    torch._dynamo.reset()
    counters.clear()
    compiled = torch.compile(case.step, backend="aot_eager", dynamic=case.dynamic)
    recompiled = []
    for size in SIZES:
        inputs = case.inputs(size)
        found = compiled(*inputs)
        for each in found if isinstance(found, tuple) else (found,):
            if each.requires_grad:
                each.float().sum().backward()
        recompiled.append(counters["stats"]["unique_graphs"])
    return {
        "graphs": whole.graph_count,
        "breaks": whole.graph_break_count,
        "why": sorted({str(each.reason).partition("\n")[0] for each in whole.break_reasons}),
        "unique graphs after each size": recompiled,
        "breaks at all sizes": sum(counters["graph_break"].values()),
    }


def main() -> None:
    warnings.simplefilter("ignore")
    report = {name: counted(CASES[name]()) for name in sys.argv[1:]}
    active = [record.overlay.id for record in megacpp_overlays.audit().records if record.decision.value == "active"]
    sys.stdout.write(json.dumps({**report, "active": active}) + "\n")


if __name__ == "__main__":
    main()
