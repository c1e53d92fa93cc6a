"""Fully reshardable checkpoints of Megatron's DistributedOptimizer: is the state of each parameter under its own name?

A real DistributedOptimizer over real grad buffers with several buckets, padded at their ends, after two steps. What it hands
to a checkpoint under the name of a parameter is compared with the shard of the fp32 copy and of the moments that belong to
it. On a CPU, process groups are gloo, and tensors say that they are on a GPU: the constructor takes no others.
"""

from __future__ import annotations

import contextlib
import importlib
import tempfile
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

from megacpp_overlays.repro import Behaviour, Case, TargetAbsent

OPTIMIZER = "megatron.core.optimizer.distrib_optimizer"
SHAPES = ((61, 37), (45, 50), (9, 7), (70, 33), (31, 63), (64, 60))
"""Weights of linear layers, outputs first. None fills a bucket of 2000 elements without padding behind it."""


def _on_cpu() -> Behaviour:
    with _tensors_that_say_cuda():
        return _measure("cpu", ("gathered on the first rank",))


def _on_gpu() -> Behaviour:
    return _measure("cuda", ("gathered on the first rank", "gathered on all ranks"))


def _measure(device: str, ways: tuple[str, ...]) -> Behaviour:
    import torch

    optimizer_class = importlib.import_module(OPTIMIZER).DistributedOptimizer
    if not hasattr(optimizer_class, "sharded_param_state_fully_reshardable"):
        raise TargetAbsent("DistributedOptimizer has no fully reshardable format")
    from megatron.core import parallel_state

    with tempfile.TemporaryDirectory() as folder:
        backend = "gloo" if device == "cpu" else "nccl"
        torch.distributed.init_process_group(backend, init_method=f"file://{folder}/meeting", rank=0, world_size=1)
        try:
            parallel_state.initialize_model_parallel()
            model, data_parallel, optimizer = _build(device)
            for seed in (1, 2):
                _step(optimizer, seed)
            seen = [_wrong(model, optimizer, way == ways[0]) for way in ways]
        finally:
            torch.distributed.destroy_process_group()
    [buffer] = data_parallel.buffers
    lengths = ", ".join(f"{one.numel_unpadded} of {one.grad_data.numel()}" for one in buffer.buckets)
    words = "; ".join(f"{way}: {what}" for way, (_, what) in zip(ways, seen, strict=True))
    return Behaviour(broken=any(wrong for wrong, _ in seen), seen=f"buckets that use {lengths} elements; {words}")


def _build(device: str) -> tuple[Any, Any, Any]:
    import torch
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.transformer.module import Float16Module, MegatronModule
    from megatron.core.transformer.transformer_config import TransformerConfig

    half = {"bf16": True, "params_dtype": torch.bfloat16}
    config = TransformerConfig(num_layers=2, hidden_size=32, num_attention_heads=2, **half)
    generator = torch.Generator().manual_seed(23)
    model = MegatronModule(config)
    for number, (outputs, inputs) in enumerate(SHAPES):
        layer = torch.nn.Linear(inputs, outputs)
        layer.weight.data = torch.randn(outputs, inputs, generator=generator)
        layer.bias.data = torch.randn(outputs, generator=generator)
        setattr(model, f"layer{number}", layer)
    model.to(device)
    data_parallel = DistributedDataParallel(
        config=config,
        ddp_config=DistributedDataParallelConfig(
            grad_reduce_in_fp32=True, use_distributed_optimizer=True, overlap_grad_reduce=True, bucket_size=2000
        ),
        module=Float16Module(config, model),
    )
    settings = OptimizerConfig(optimizer="adam", lr=1e-2, use_distributed_optimizer=True, **half)
    whole = get_megatron_optimizer(settings, [data_parallel])
    return model, data_parallel, getattr(whole, "chained_optimizers", [whole])[0]


def _step(optimizer: Any, seed: int) -> None:
    import torch

    generator = torch.Generator().manual_seed(seed)
    for group in optimizer.optimizer.param_groups:
        for each in group["params"]:
            each.grad = torch.randn(each.shape, generator=generator).to(each.device)
    optimizer.optimizer.step()


def _wrong(model: Any, optimizer: Any, on_first_rank: bool) -> tuple[int, str]:
    """Return how many parameters are given the state of others, and that in words."""
    metadata = {
        "distrib_optim_sharding_type": "fully_reshardable",
        "distrib_optim_fully_reshardable_mem_efficient": on_first_rank,
    }
    state = optimizer.sharded_state_dict(model.sharded_state_dict(), metadata=metadata)["param_state"]
    given = {each.key: each.data.cpu().flatten() for entry in state.values() for each in entry.values()}
    names = {id(each): name for name, each in model.named_parameters()}
    wrong: list[str] = []
    elements = zeros = total = 0
    pairs = zip(optimizer.model_float16_groups, optimizer.shard_fp32_from_float16_groups, strict=True)
    for parameter, copy in ((one, own) for models, copies in pairs for one, own in zip(models, copies, strict=True)):
        moments = optimizer.optimizer.state[copy]
        name, others, cut = names[id(parameter)], 0, 0
        for key, own in (("param", copy), ("exp_avg", moments["exp_avg"]), ("exp_avg_sq", moments["exp_avg_sq"])):
            saved = given[f"optimizer.state.{key}.{name}"]
            unlike = saved != own.detach().cpu().flatten()
            others, cut = others + int(unlike.sum()), cut + int((unlike & (saved == 0)).sum())
            total += len(saved)
        elements, zeros, wrong = elements + others, zeros + cut, wrong + ([name] if others else [])
    words = f"{len(wrong)} of {len(names)} parameters wrong"
    words += f" ({elements} of {total} elements, {zeros} of them zeros), such as {wrong[-1]}" if wrong else ""
    return len(wrong), words


@contextlib.contextmanager
def _tensors_that_say_cuda() -> Iterator[None]:
    """Let tensors of the CPU say that they are on a GPU, and let what is meant for a GPU be made on the CPU."""
    import torch
    from torch.overrides import TorchFunctionMode

    class OnCpu(TorchFunctionMode):  # type: ignore[misc] # torch is not seen by the type checker
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = dict(kwargs or {})
            if str(kwargs.get("device", "")).startswith("cuda"):
                kwargs["device"] = "cpu"
            found = function(*args, **kwargs)
            if function is torch.Tensor.type and isinstance(found, str):
                return found.replace("torch.", "torch.cuda.")
            return found

    names = ("current_device", "current_stream", "synchronize")
    before = [getattr(torch.cuda, name) for name in names]
    torch.cuda.current_device = lambda: torch.device("cpu")
    torch.cuda.current_stream = lambda *_: SimpleNamespace(wait_stream=lambda *_: None)
    torch.cuda.synchronize = lambda *_: None
    try:
        with OnCpu():
            yield
    finally:
        for name, value in zip(names, before, strict=True):
            setattr(torch.cuda, name, value)


def _case(name: str, device: str, run: Any) -> Case:
    return Case(
        name=name,
        overlay="fully-reshardable-padding",
        device=device,
        versions=("torch",),
        run=run,
        targets=(OPTIMIZER,),
    )


CASES = (_case("buckets-cpu", "cpu", _on_cpu), _case("buckets-gpu", "cuda", _on_gpu))
