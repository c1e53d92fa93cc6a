"""Megatron's multi-latent attention on two tensor parallel ranks: do down projections get the gradient that one rank gives them?

A real `MLASelfAttention` with plain scaled products for its core runs forwards and backwards on one rank, and then on two, which
are forked and meet with gloo. Compared is the gradient of `linear_kv_down_proj.weight`: where each rank has all of it,
which then also takes a few steps and is compared with its replica, and where each has half of its columns, without
sequence parallelism and with it. The replicated linear layer is the one that Megatron's specifications for ModelOpt take;
without Transformer Engine the module binds none, so it is bound here.
"""

from __future__ import annotations

import importlib
import json
import multiprocessing
import tempfile
import warnings
from pathlib import Path
from typing import Any

from megacpp_overlays.repro import Behaviour, Case, TargetAbsent

MODULE = "megatron.core.transformer.multi_latent_attention"
LAYERS = "megatron.core.post_training.modelopt.layers"
HIDDEN, HEADS, RANK, PLAIN, ROTARY = 16, 4, 8, 6, 4
TOKENS, STEPS, RATE = 8, 5, 1e-3
RANKS = 2
DOWN = "linear_kv_down_proj"
TOLERANCE = 1e-4
"""Relative, of the largest value. Ranks add in another order than one does: fp32 rounding, 1e-7."""


def _replicas() -> Behaviour:
    [found] = _on_ranks([(False, False)])
    drift = max(each["drift"] for each in found)
    broken, seen = _said(found)
    return Behaviour(
        broken=broken or drift > TOLERANCE, seen=f"{seen}; replicas are {drift:.1e} apart after {STEPS} steps"
    )


def _columns() -> Behaviour:
    plain, parts = (_said(each) for each in _on_ranks([(True, False), (True, True)]))
    return Behaviour(
        broken=plain[0] or parts[0], seen=f"cut by columns, {plain[1]}; with sequence parallelism, {parts[1]}"
    )


def _said(found: list[Any]) -> tuple[bool, str]:
    worst = [each["apart"] for each in found]
    shown = " and ".join(f"{each:.1e}" for each in worst)
    return max(worst) > TOLERANCE, f"gradients of {DOWN} are {shown} of their largest value apart from those on one rank"


def _on_ranks(ways: list[tuple[bool, bool]]) -> list[list[Any]]:
    """Return for each way, of columns and of sequence parallelism, what each rank found."""
    module = _module()
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        ranks = [context.Process(target=_on_rank, args=(module, ways, rank, folder)) for rank in range(RANKS)]
        for each in ranks:
            each.start()
        for each in ranks:
            each.join()
        found = [json.loads(Path(folder, str(rank)).read_text()) for rank in range(RANKS)]
    return [list(each) for each in zip(*found, strict=True)]


def _on_rank(module: Any, ways: list[tuple[bool, bool]], rank: int, folder: str) -> None:
    import torch
    from megatron.core import parallel_state

    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=RANKS)
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=1)
    true = {columns: _gradients(_build(module, columns=columns, parts=False, ranks=1)) for columns, _ in ways}
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=RANKS)
    report = []
    for columns, parts in ways:
        attention = _build(module, columns=columns, parts=parts, ranks=RANKS)
        found = _gradients(attention)[DOWN]
        expected = true[columns][DOWN]
        report.append(
            {
                "apart": _apart(found, expected.chunk(RANKS)[rank] if columns else expected),
                "drift": 0.0 if columns else _drift(attention),
            }
        )
    Path(folder, str(rank)).write_text(json.dumps(report))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def _drift(attention: Any) -> float:
    """Take some steps, and return how far replicas are from each other then."""
    import torch

    optimizer = torch.optim.SGD(attention.parameters(), lr=RATE)
    for _ in range(STEPS):
        _gradients(attention)
        optimizer.step()
    mine = attention.linear_kv_down_proj.weight.detach()
    both = [torch.empty_like(mine) for _ in range(RANKS)]
    torch.distributed.all_gather(both, mine)
    return _apart(both[0], both[1])


def _apart(found: Any, true: Any) -> float:
    return float((found - true).abs().max() / true.abs().max())


def _gradients(attention: Any) -> dict[str, Any]:
    """Run forwards and backwards, and return the gradient of each weight; a rank of a sequence has its part of it."""
    import torch

    generator = torch.Generator().manual_seed(2)
    hidden, weights = (torch.randn(TOKENS, 1, HIDDEN, generator=generator) for _ in range(2))
    if attention.config.sequence_parallel:
        hidden, weights = (each.chunk(RANKS)[torch.distributed.get_rank()] for each in (hidden, weights))
    attention.zero_grad()
    output, _ = attention(hidden, None)
    (output * weights).sum().backward()
    return {name.removesuffix(".weight"): each.grad.clone() for name, each in attention.named_parameters()}


def _build(module: Any, *, columns: bool, parts: bool, ranks: int) -> Any:
    """Return an attention that has its share of the same weights, whatever the number of ranks."""
    import torch
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.identity_op import IdentityOp
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.transformer_config import MLATransformerConfig

    class Core(torch.nn.Module):  # type: ignore[misc]
        def __init__(self, softmax_scale: float, **_: Any) -> None:
            super().__init__()
            self.scale = softmax_scale

        def forward(self, query: Any, key: Any, value: Any, _mask: Any, **_: Any) -> Any:
            scores = torch.einsum("sbhd,tbhd->bhst", query, key) * self.scale
            scores = scores.masked_fill(torch.ones(scores.shape[-2:]).triu(1).bool(), -torch.inf)
            return torch.einsum("bhst,tbhv->sbhv", scores.softmax(-1), value).flatten(2)

    down = ColumnParallelLinear if columns else module.Linear
    config = MLATransformerConfig(
        num_layers=1,
        hidden_size=HIDDEN,
        num_attention_heads=HEADS,
        q_lora_rank=RANK,
        kv_lora_rank=RANK,
        qk_head_dim=PLAIN,
        qk_pos_emb_head_dim=ROTARY,
        v_head_dim=PLAIN,
        rope_type="rope",
        apply_rope_fusion=False,
        add_bias_linear=False,
        tensor_model_parallel_size=ranks,
        sequence_parallel=parts,
        use_cpu_initialization=True,
        **({"transformer_impl": "local"} if hasattr(MLATransformerConfig, "transformer_impl") else {}),
    )
    submodules = module.MLASelfAttentionSubmodules(
        linear_q_proj=ColumnParallelLinear,
        linear_q_down_proj=down,
        linear_q_up_proj=ColumnParallelLinear,
        linear_kv_down_proj=down,
        linear_kv_up_proj=ColumnParallelLinear,
        core_attention=ModuleSpec(module=Core),
        linear_proj=RowParallelLinear,
        q_layernorm=IdentityOp,
        kv_layernorm=IdentityOp,
    )
    attention = module.MLASelfAttention(config, submodules, layer_number=1)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, each in sorted(attention.named_parameters()):
            axis = int(name == "linear_proj.weight")
            shares = 1 if "down" in name and not columns else ranks
            shape = [size * (shares if number == axis else 1) for number, size in enumerate(each.shape)]
            whole = torch.randn(*shape, generator=generator) * 0.4
            each.copy_(whole.chunk(shares, axis)[torch.distributed.get_rank() % shares])
    return attention


def _module() -> Any:
    """Return the module of the attention, its tables made on the CPU.

    Raises:
        TargetAbsent: there is none.
    """
    import torch

    warnings.simplefilter("ignore")
    torch.cuda.current_device = lambda: torch.device("cpu")
    try:
        module: Any = importlib.import_module(MODULE)
    except ModuleNotFoundError as error:
        if not MODULE.startswith(str(error.name)):
            raise
        raise TargetAbsent(f"there is no {MODULE}") from error
    if not isinstance(getattr(module, "TELinear", None), type):
        module.Linear = importlib.import_module(LAYERS).Linear
        module.HAVE_TE = False  # 0.16.1 says that it has Transformer Engine's layers, and has mocks
    return module


def _case(name: str, run: Any) -> Case:
    return Case(
        name=name,
        overlay="mla-rope-key-gradient",
        device="cpu",
        versions=("torch",),
        run=run,
        targets=(MODULE,),
    )


CASES = (_case("replicas-cpu", _replicas), _case("columns-cpu", _columns))
