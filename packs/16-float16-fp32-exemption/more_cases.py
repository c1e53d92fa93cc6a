"""Checkpoints of Megatron's DistributedOptimizer on two ranks of a CPU: is the state of fp32 parameters beside bf16 ones saved and loaded?

This is `distributed-gpu` of `reproduce.py` without a GPU. A model with bf16 and fp32 parameters takes three steps, its sharded state in the
default format is handed to a fresh model, and both take one more step. Two ranks are forked, meet with gloo, and each has a part of every
buffer. What a rank hands to a checkpoint is read back by name, and no file is written.

The inner optimizer is Adam in plain arithmetic, with the state that the `FusedAdam` of Apex and Transformer Engine have: releases up to 0.15
cannot save that of torch's own. Tensors say that they are on a GPU, because Megatron's constructor takes no others.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from megacpp_overlays.repro import Behaviour, Blocked, Case, TargetAbsent, beside, on_ranks

PACK = beside(__file__)
OPTIMIZER = "megatron.core.optimizer.distrib_optimizer"
UPSTREAM = ("megatron.core.dist_checkpointing", "megatron.core.distributed", OPTIMIZER)
MOMENTS = ("exp_avg", "exp_avg_sq")
RANKS = 2


def _distributed() -> Behaviour:
    warnings.simplefilter("ignore")
    # 0.15 compiles something for a GPU as it is imported, and asks for which.
    os.environ.setdefault("TORCH_CUDA_ARCH_LIST", "9.0")
    for name in UPSTREAM:
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as error:  # noqa: PERF203 - there are three
            if not name.startswith(str(error.name)):
                raise
            raise TargetAbsent(f"there is no {name}") from error
    if not hasattr(importlib.import_module(OPTIMIZER).DistributedOptimizer, "sharded_param_state_dp_reshardable"):
        raise Blocked(
            "up to 0.14 entries of a checkpoint have no names of their own; distributed-gpu goes through files"
        )
    adam = {"Adam": _adam(), "USING_PYTORCH_OPTIMIZER": False, "HAVE_APEX_OR_TE": True}
    for name in (OPTIMIZER.rpartition(".")[0], OPTIMIZER):
        vars(importlib.import_module(name)).update(adam)
    with tempfile.TemporaryDirectory() as folder:
        on_ranks(RANKS, lambda rank: _on_rank(Path(folder, str(rank))))
        found = [json.loads(Path(folder, str(rank)).read_text()) for rank in range(RANKS)]
    seen = "; ".join(f"rank {rank}: {each['seen']}" for rank, each in enumerate(found))
    losses = ", ".join(f"{loss:.4f}" for loss in found[0]["losses"])
    return Behaviour(
        broken=any(each["broken"] for each in found),
        seen=f"DistributedOptimizer on {RANKS} ranks, losses {losses}: {seen}",
    )


def _on_rank(answer: Path) -> Mapping[str, object]:
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel()
    with _tensors_that_say_cuda():
        saved, fresh = (PACK._Training(seed, distributed=True) for seed in (1, 11))
        losses = [saved.step(seed) for seed in range(3)]
        fresh.step(90)
        is_broken, seen = _handed_over(saved, fresh)
    answer.write_text(json.dumps({"losses": losses, "broken": is_broken, "seen": seen}))
    return {}


def _handed_over(saved: Any, fresh: Any) -> tuple[bool, str]:
    """Return whether the state of this rank is lost between two models, and that in words."""
    before, parameters = saved.states(), saved.values()
    error, entries = "", 0
    try:
        state = saved.sharded(is_loading=False)
        stored = {PACK._identity(entry): PACK._value(entry) for entry in PACK._entries(state)}
        entries = len(stored)
        read = PACK._read_back(fresh.sharded(is_loading=True), state, stored)
        fresh.inner.load_state_dict(read["model"])
        fresh.optimizer.load_state_dict(read["optimizer"])
    except Exception as raised:  # noqa: BLE001 - however saving or loading fails is what is measured
        error = f"no checkpoint: {PACK._first_line(raised)}"
    if _is_so_anywhere(bool(error)):
        return bool(error), error or "its own state is handed on"
    wrong = {
        "changed by saving": PACK._differences(before, saved.states()),
        "lost by loading": PACK._differences({**before, **parameters}, {**fresh.states(), **fresh.values()}),
    }
    saved.step(9), fresh.step(9)
    wrong["different after one more step"] = PACK._differences(saved.values(), fresh.values())
    bad = [f"{len(names)} {how}, such as {names[0]}" for how, names in wrong.items() if names]
    good = f"{len(before)} states and {len(parameters)} parameters bit-equal through {entries} entries, and after one more step"
    return bool(bad), "; ".join(bad) or good


def _is_so_anywhere(here: bool) -> bool:
    """Return whether something is so on any rank: a step is one of all ranks."""
    import torch

    count = torch.tensor([int(here)])
    torch.distributed.all_reduce(count)
    return bool(count.item())


def _adam() -> Any:
    import torch

    class FusedAdam(torch.optim.Optimizer):  # type: ignore[misc] # torch is not seen by the type checker
        """Adam whose moments are state of a parameter, and whose count of steps is that of a group."""

        def __init__(self, params: Any, lr: float, betas: Any, eps: float, weight_decay: float, **_: Any) -> None:
            super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

        def step(self, closure: Any = None) -> None:
            with torch.no_grad():
                for group in self.param_groups:
                    self._step(group)

        def _step(self, group: Any) -> None:
            group["step"] = group.get("step", 0) + 1
            first, second = (1 - beta ** group["step"] for beta in group["betas"])
            for each in group["params"]:
                state = self.state[each]
                for key, gradient, beta in zip(MOMENTS, (each.grad, each.grad.square()), group["betas"], strict=True):
                    state.setdefault(key, torch.zeros_like(each)).lerp_(gradient, 1 - beta)
                size = (state["exp_avg_sq"] / second).sqrt() + group["eps"]
                each.mul_(1 - group["lr"] * group["weight_decay"])
                each.addcdiv_(state["exp_avg"] / first, size, value=-group["lr"])

    return FusedAdam


@contextlib.contextmanager
def _tensors_that_say_cuda() -> Iterator[None]:
    """Let tensors of the CPU say that they are on a GPU, and let those meant for a GPU be made on the CPU; a rank ends with it."""
    import torch
    from torch.overrides import TorchFunctionMode

    def is_cuda(given: Any) -> bool:
        return isinstance(given, str | torch.device) and str(given).startswith("cuda")

    class OnCpu(TorchFunctionMode):  # type: ignore[misc] # torch is not seen by the type checker
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if function is torch.Tensor.cuda:
                return args[0]
            args = tuple("cpu" if is_cuda(each) else each for each in args)
            named = {name: "cpu" if is_cuda(each) else each for name, each in (kwargs or {}).items()}
            found = function(*args, **named)
            if function is torch.Tensor.type and isinstance(found, str):
                return found.replace("torch.", "torch.cuda.")
            return found

    torch.cuda.current_device = lambda: torch.device("cpu")
    torch.cuda.current_stream = lambda *_: SimpleNamespace(wait_stream=lambda *_: None, synchronize=lambda: None)
    torch.cuda.synchronize = lambda *_: None
    with OnCpu():
        yield


CASES = (
    Case(
        name="distributed-cpu",
        overlay="float16-distributed-order",
        device="cpu",
        versions=("megatron-core", "torch"),
        run=_distributed,
    ),
)
