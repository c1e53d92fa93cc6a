"""Megatron's offloaded optimizer after weights were loaded: does its next step start from them?

A real `DistributedOptimizer` with a real `HybridDeviceOptimizer` of one rank takes weights from the model as Megatron does where it loads no optimizer
state. Tensors say that they are on a GPU until they are asked for on the host.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import tempfile
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

from megacpp_overlays.repro import Behaviour, Blocked, Case, TargetAbsent

MODULE = "megatron.core.optimizer.distrib_optimizer"
HYBRID = "megatron.core.optimizer.cpu_offloading.hybrid_optimizer"
NAMES = ("first", "second")
AWARE: dict[str, Any] = {"use_precision_aware_optimizer": True}
RATE, WIDTH, LOADED, TOLERANCE = 0.125, 8, 1.0, 1e-3


def trained(load: Callable[[Any], None] | None = None, *, before: int = 0, after: int = 1, **settings: Any) -> dict[str, Any]:
    """Return parameters in bf16, what the optimizer steps from, and its moments, after weights were loaded between steps.

    Args:
        load: is given the optimizer once the weights are in the model; Megatron's own way by default.
        before: steps before weights are loaded.
        after: and after that.
        settings: of the optimizer.
    """
    import torch
    from megatron.core import parallel_state

    with tempfile.TemporaryDirectory() as folder, _as_if_on_gpu():
        torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=0, world_size=1)
        try:
            parallel_state.initialize_model_parallel()
            model, optimizer = _build(**settings)
            _step(model, optimizer, before)
            with torch.no_grad():
                for each in model.parameters():
                    each.fill_(LOADED)
            (load or reload)(optimizer)
            _step(model, optimizer, after)
        finally:
            parallel_state.destroy_model_parallel()
            torch.distributed.destroy_process_group()
    used = optimizer.optimizer
    inner = getattr(used, "param_to_inner_param", {})
    masters = [inner.get(each, each).tolist() for group in used.param_groups for each in group["params"]]
    states = [state for one in getattr(used, "sub_optimizers", [used]) for state in one.state.values()]
    found = {name: each.detach().tolist() for name, each in model.named_parameters()}
    moments = {name: [state[name].tolist() for state in states] for name in ("exp_avg", "exp_avg_sq")}
    return {**found, "masters": masters, **moments}


def reload(optimizer: Any) -> None:
    """Let an optimizer take its weights from the model, as Megatron does after it has loaded weights alone."""
    optimizer.reload_model_params()


def refreshes() -> bool:
    """Return whether the hybrid optimizer can refresh fp32 copies: 0.12 refreshes none, and takes no other step without Transformer Engine."""
    try:
        importlib.import_module(MODULE)
        hybrid: Any = importlib.import_module(HYBRID)
    except ModuleNotFoundError as error:
        raise TargetAbsent(f"there is no {error.name}") from error
    return hasattr(hybrid.HybridDeviceOptimizer, "update_fp32_param_by_new_param")


def _build(**settings: Any) -> tuple[Any, Any]:
    import torch
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.transformer.module import MegatronModule
    from megatron.core.transformer.transformer_config import TransformerConfig

    half = {"bf16": True, "params_dtype": torch.bfloat16}
    config = TransformerConfig(num_layers=1, hidden_size=WIDTH, num_attention_heads=1, **half)
    model = MegatronModule(config)
    for name in NAMES:
        setattr(model, name, torch.nn.Parameter(torch.linspace(5, 7, WIDTH).bfloat16()))
    parallel = DistributedDataParallelConfig(use_distributed_optimizer=True, grad_reduce_in_fp32=True)
    wrapped = DistributedDataParallel(config=config, ddp_config=parallel, module=model)
    offloaded = {"optimizer_cpu_offload": True, "optimizer_offload_fraction": 1.0, **settings}
    try:
        asked = OptimizerConfig(
            optimizer="adam", lr=RATE, weight_decay=0.0, clip_grad=0.0, use_distributed_optimizer=True, **half, **offloaded
        )
    except TypeError as error:  # 0.13 to 0.17 compare the version of Transformer Engine, which is not there
        raise Blocked(f"a precision-aware optimizer of this release asks for Transformer Engine: {error}") from error
    whole = get_megatron_optimizer(asked, [wrapped])
    return model, getattr(whole, "chained_optimizers", [whole])[0]


def _step(model: Any, optimizer: Any, times: int) -> None:
    for _ in range(times):
        for each in model.parameters():
            each.main_grad.fill_(1.0)
        optimizer.step()


@contextlib.contextmanager
def _as_if_on_gpu() -> Iterator[None]:
    """Let tensors of the CPU say that they are on a GPU unless they come from `.cpu()`, and have streams that do nothing."""
    import torch
    from torch.overrides import TorchFunctionMode

    host: dict[int, Any] = {}
    same = (torch.Tensor.detach, torch.Tensor.clone, torch.Tensor.float, torch.Tensor.pin_memory)

    class OnGpu(TorchFunctionMode):  # type: ignore[misc] # torch is not seen by the type checker
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            given = dict(kwargs or {}, **({"device": "cpu"} if "cuda" in str((kwargs or {}).get("device")) else {}))
            given.pop("pin_memory", None)
            if function == torch.Tensor.is_cuda.__get__:
                return id(args[0]) not in host
            found = args[0] if function is torch.Tensor.pin_memory else function(*args, **given)
            if function is torch.Tensor.cpu or (function in same and id(args[0]) in host):
                found = found.clone() if found is args[0] and function is torch.Tensor.cpu else found
                host[id(found)] = found
            return found.replace("torch.", "torch.cuda.") if isinstance(found, str) else found

    event = SimpleNamespace(wait=lambda *_: None, synchronize=lambda: None)
    stream = SimpleNamespace(wait_stream=lambda *_: None, record_event=lambda *_: event)
    instead = {
        "current_device": lambda: torch.device("cpu"),
        "synchronize": lambda *_: None,
        "stream": lambda _: contextlib.nullcontext(),
        **dict.fromkeys(("current_stream", "Stream"), lambda *_, **__: stream),
    }
    before = {name: getattr(torch.cuda, name) for name in instead}
    vars(torch.cuda).update(instead)
    try:
        with OnGpu():
            yield
    finally:
        vars(torch.cuda).update(before)


def _behaviour(**settings: Any) -> Behaviour:
    found = trained(**({} if refreshes() else AWARE), **settings)
    means = [sum(found[name]) / WIDTH for name in NAMES]
    seen = f"weights of 5 to 7, {LOADED} loaded, and a step of {RATE}: parameters are {means[0]:g} and {means[1]:g}"
    right = LOADED - RATE
    return Behaviour(broken=any(abs(each - right) > TOLERANCE for each in means), seen=f"{seen}, right {right}")


_case = functools.partial(Case, overlay="cpu-offload-reload", device="cpu", versions=("torch",))
CASES = (
    _case(name="offloaded-cpu", run=_behaviour),
    _case(name="half-offloaded-cpu", run=functools.partial(_behaviour, optimizer_offload_fraction=0.5)),
    _case(name="after-steps-cpu", run=functools.partial(_behaviour, before=3, overlap_cpu_optimizer_d2h_h2d=True)),
)
