"""Padding masks of Megatron's MoE models: are tokens counted without padding, and does every stage have its ranks' part of the mask?

`expert-bias-cpu`: a real router counts tokens for the bias of its experts, with as many tokens as experts and with more.
`stages-cpu`: a real model of a stage that embeds nothing runs on two ranks of sequence parallelism, which are forked and meet with gloo; and
one that embeds, with tensor parallel ranks that are not the process's default group, cuts its mask.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import multiprocessing
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megacpp_overlays.repro import Behaviour, Case, TargetAbsent

ROUTER = "megatron.core.transformer.moe.router"
MODEL = "megatron.core.models.gpt.gpt_model"
RANKS, TOKENS, ROWS, EXPERTS, HIDDEN = 2, 8, 2, 4, 8
PADDED = (6, 3)
"""From which token on each row is padding."""


def _expert_bias() -> Behaviour:
    words, broken = [], False
    for tokens, each in zip((EXPERTS, EXPERTS + 2), _on_ranks(_counted, 1, ROUTER, "_apply_expert_bias")[0], strict=True):
        broken |= each["counted"] != each["right"]
        words.append(f"{tokens} tokens of {EXPERTS} experts: {each['counted']}")
    return Behaviour(broken=broken, seen=f"counts with two tokens and padding, {'; '.join(words)}")


def _stages() -> Behaviour:
    later, first = (_on_ranks(find, RANKS, MODEL, "_preprocess") for find in (_stage, _cut))
    own = TOKENS // RANKS
    right = [[places[own * rank :][:own] for places in _mask()] for rank in range(RANKS)]
    return Behaviour(
        broken=first != right or any(each["output"] != [own, ROWS, HIDDEN] for each in later),
        seen=f"{RANKS} ranks with {own} tokens each: a stage that embeds nothing: {later[0]['output']}; "
        f"one that embeds, in a group of their own: masks of {len(first[0][0])}",
    )


def _mask() -> list[list[bool]]:
    return [[place >= first for place in range(TOKENS)] for first in PADDED]


def _on_ranks(find: Callable[[], Any], ranks: int, module: str, method: str) -> list[Any]:
    """Return what each of so many ranks finds."""
    import inspect

    import torch  # noqa: F401 - once, before the forks

    owner = importlib.import_module(module)
    cls = getattr(owner, "TopKRouter" if module == ROUTER else "GPTModel")
    takes = inspect.signature(getattr(cls, method)).parameters if hasattr(cls, method) else {}
    if "padding_mask" not in takes:
        raise TargetAbsent(f"{cls.__name__} takes no padding mask")
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        processes = [context.Process(target=_rank, args=(find, rank, ranks, folder)) for rank in range(ranks)]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        return [json.loads(Path(folder, str(rank)).read_text()) for rank in range(ranks)]


def _rank(find: Callable[[], Any], rank: int, ranks: int, folder: str) -> None:
    import torch

    torch.set_num_threads(1)
    torch.cuda.current_device = lambda: "cpu"  # where Megatron puts what it makes
    if hasattr(torch.compiler, "set_stance"):
        torch.compiler.set_stance("force_eager")  # what is compiled is the same code
    utils: Any = importlib.import_module("megatron.core.transformer.moe.moe_utils")
    utils.te_general_gemm = getattr(utils, "te_general_gemm", None)  # 0.16 asks for it without Transformer Engine, too
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=ranks)
    Path(folder, str(rank)).write_text(json.dumps(find()))
    torch.distributed.destroy_process_group()


def _counted() -> list[dict[str, Any]]:
    """Return the counts of a router with as many tokens as experts and with two more, two of them no padding each time."""
    import torch

    module, config = importlib.import_module(ROUTER), _config(1, moe_router_enable_expert_bias=True)
    found = []
    for tokens in (EXPERTS, EXPERTS + 2):
        generator = torch.Generator().manual_seed(1)
        router = module.TopKRouter(config, _groups(1))
        with torch.no_grad():
            router.weight.copy_(torch.randn(router.weight.shape, generator=generator))
        states = torch.randn(tokens, 1, HIDDEN, generator=generator)
        mask = (torch.arange(tokens) > 1)[:, None]
        with torch.no_grad():
            _, chosen = router(states, mask)
        right = (chosen & ~mask).sum(0).tolist()
        try:
            router(states, mask)
        except RuntimeError as error:
            found.append({"right": right, "counted": str(error).splitlines()[0]})
            continue
        found.append({"right": right, "counted": [int(each) for each in router.local_tokens_per_expert]})
    return found


def _stage() -> dict[str, Any]:
    """Return the shape of what a stage behind the first makes of a shard, or its error."""
    import torch

    model = _model(_groups(RANKS), pre_process=False)
    model.set_input_tensor(torch.randn(TOKENS // RANKS, ROWS, HIDDEN).requires_grad_())
    try:
        output = model(input_ids=None, position_ids=None, attention_mask=None, padding_mask=torch.tensor(_mask()))
    except RuntimeError as error:
        return {"output": str(error)}
    return {"output": list(output.shape)}


def _cut() -> list[list[bool]]:
    """Return the mask that a stage which embeds prepares for its ranks, in a group that is not the default one."""
    import torch

    groups = _groups(1)
    groups.tp = torch.distributed.group.WORLD
    model = _model(groups, pre_process=True)
    ids = torch.zeros(ROWS, TOKENS, dtype=torch.int64)
    prepared = model._preprocess(ids, None, padding_mask=torch.tensor(_mask()))  # noqa: SLF001 - what forward asks first
    found: list[list[bool]] = prepared[5].tolist()
    return found


def _groups(tensor_parallel: int) -> Any:
    from megatron.core import parallel_state
    from megatron.core.process_groups_config import ProcessGroupCollection

    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=tensor_parallel)
    return ProcessGroupCollection.use_mpu_process_groups()


def _config(ranks: int, **asked: Any) -> Any:
    import torch
    from megatron.core.transformer.transformer_config import TransformerConfig

    return TransformerConfig(
        num_layers=1,
        hidden_size=HIDDEN,
        ffn_hidden_size=HIDDEN,
        moe_ffn_hidden_size=HIDDEN,
        num_attention_heads=RANKS,
        num_moe_experts=EXPERTS,
        moe_router_topk=2,
        moe_router_load_balancing_type="aux_loss",
        moe_router_score_function="sigmoid",
        moe_aux_loss_coeff=0.5,
        tensor_model_parallel_size=ranks,
        sequence_parallel=ranks > 1,
        pipeline_dtype=torch.float32,
        add_bias_linear=False,
        use_cpu_initialization=True,
        hidden_dropout=0.0,
        **asked,
    )


def _model(groups: Any, *, pre_process: bool) -> Any:
    """Return a model of one MoE layer without attention, which ends behind its layers."""
    from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
    from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

    get_cuda_rng_tracker().fork = lambda *_: contextlib.nullcontext()  # of GPUs alone
    experts = get_moe_module_spec(use_te=False, num_experts=EXPERTS, moe_grouped_gemm=False)
    parts = TransformerLayerSubmodules(mlp=experts, mlp_bda=get_bias_dropout_add)
    return importlib.import_module(MODEL).GPTModel(
        config=_config(RANKS),
        transformer_layer_spec=ModuleSpec(module=TransformerLayer, submodules=parts),
        vocab_size=16,
        max_sequence_length=TOKENS,
        pre_process=pre_process,
        post_process=False,
        position_embedding_type="none",
        pg_collection=groups,
    )


def _case(name: str, overlay: str, run: Callable[[], Behaviour], target: str) -> Case:
    return Case(name=name, overlay=overlay, device="cpu", versions=("torch",), run=run, targets=(target,))


CASES = (
    _case("expert-bias-cpu", "expert-bias-padding-mask", _expert_bias, ROUTER),
    _case("stages-cpu", "pipeline-padding-mask", _stages, MODEL),
)
