"""Megatron's balancing losses of MoE routers under a padding mask, on two tensor parallel ranks: gradients as on one?

A real `TopKRouter` routes two rows of sixteen tokens on one rank, and then on two, which are forked, meet with gloo and
have half of the tokens each. Rows are padded at their ends, so that the second rank has fewer tokens that count. Losses
are taken for each token (`calculate_per_token_loss`), and nothing is learnt from but the balancing loss. Gradients are
summed over ranks, as Megatron does with those of a router under sequence parallelism.

What is learnt without a mask is shown beside it and not judged: in 0.17 and 0.18 that is half of what one rank learns.
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

MODULE = "megatron.core.transformer.moe.moe_utils"
ROUTER = "megatron.core.transformer.moe.router"
ROWS, TOKENS, HIDDEN, EXPERTS, RANKS = 2, 16, 8, 4, 2
PADDING = (6, 3)
"""At the end of each row."""
KINDS = ("aux_loss", "seq_aux_loss")
TOLERANCE = 1e-4
"""Relative. Ranks add in another order than one does: fp32 rounding, 1e-7."""


def _run() -> Behaviour:
    _prepare()
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        ranks = [context.Process(target=_on_rank, args=(rank, folder)) for rank in range(RANKS)]
        for each in ranks:
            each.start()
        for each in ranks:
            each.join()
        found = json.loads(Path(folder, "0").read_text())
    seen = [f"{kind}: {each['ratio']:.4f} times as large, {each['apart']:.1e} apart" for kind, each in found.items()]
    worst = max(each["apart"] for kind, each in found.items() if kind.endswith("padded"))
    return Behaviour(broken=worst > TOLERANCE, seen=f"gradients on {RANKS} ranks and on one, {'; '.join(seen)}")


def _on_rank(rank: int, folder: str) -> None:
    import torch
    from megatron.core import parallel_state

    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=RANKS)
    ways = [(kind, is_padded) for kind in KINDS for is_padded in (True, False)]
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=1)
    true = {way: _learnt(1, *way) for way in ways}
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=RANKS)
    report = {}
    for kind, is_padded in ways:
        found, expected = _learnt(RANKS, kind, is_padded), true[kind, is_padded]
        name = f"{kind}, {'padded' if is_padded else 'no mask'}"
        report[name] = {
            "ratio": float(found.norm() / expected.norm()),
            "apart": float((found - expected).norm() / expected.norm()),
        }
    Path(folder, str(rank)).write_text(json.dumps(report))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def _learnt(ranks: int, kind: str, is_padded: bool) -> Any:
    """Return what the weights of a router, [experts, hidden], learn from its balancing loss on all ranks."""
    import torch
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.transformer_config import TransformerConfig

    config = TransformerConfig(
        num_layers=1,
        hidden_size=HIDDEN,
        num_attention_heads=RANKS,
        num_moe_experts=EXPERTS,
        moe_router_topk=2,
        moe_router_load_balancing_type=kind,
        moe_aux_loss_coeff=0.5,
        calculate_per_token_loss=True,
        tensor_model_parallel_size=ranks,
        sequence_parallel=ranks > 1,
        add_bias_linear=False,
        use_cpu_initialization=True,
    )
    router = importlib.import_module(ROUTER).TopKRouter(config, ProcessGroupCollection.use_mpu_process_groups())
    router.set_layer_number(1)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        router.weight.copy_(torch.randn(EXPERTS, HIDDEN, generator=generator))
    tokens = torch.randn(TOKENS, ROWS, HIDDEN, generator=generator)
    mask = torch.stack([torch.arange(TOKENS) >= TOKENS - padding for padding in PADDING], dim=1)
    tokens, mask = (each.chunk(ranks)[torch.distributed.get_rank() % ranks] for each in (tokens, mask))
    probabilities, _ = router(tokens, padding_mask=mask) if is_padded else router(tokens)
    (probabilities * 0.0).sum().backward()
    if ranks > 1:
        torch.distributed.all_reduce(router.weight.grad)
    return router.weight.grad


def _prepare() -> None:
    """Import what ranks need before they are forked.

    Raises:
        TargetAbsent: no router counts tokens under a mask.
    """
    import torch

    warnings.simplefilter("ignore")
    torch.cuda.current_device = lambda: torch.device("cpu")
    try:
        module = importlib.import_module(MODULE)
        importlib.import_module(ROUTER)
    except ModuleNotFoundError as error:
        if not MODULE.startswith(str(error.name)):
            raise
        raise TargetAbsent(f"there is no {MODULE}") from error
    if not hasattr(module, "get_tokens_per_expert_and_token_count"):
        raise TargetAbsent("no router counts tokens under a padding mask")


CASES = (
    Case(
        name="masked-cpu",
        overlay="masked-aux-loss-tokens",
        device="cpu",
        versions=("torch",),
        run=_run,
        targets=(MODULE,),
    ),
)
