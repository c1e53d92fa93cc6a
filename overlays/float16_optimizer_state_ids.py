"""Numbers of parameters in the sharded state of `Float16OptimizerWithFloat16Params`, as its inner optimizer counts them.

With `float16-fp32-exemption` a model has bf16 and native fp32 parameters, and up to 0.19.2 its
state is then mapped to the wrong parameters: saving a checkpoint usually fails (ValueError, KeyError or
AssertionError), and where the last parameters have no state yet it is written under the names of others. A
checkpoint that was written so cannot be recognised and is not repaired.

While upstream's method runs it sees float16 groups that hold the model-side parameter of every parameter of the
inner optimizer, in its order; afterwards the fp32 copies that do not exist are dropped. The saved layout is the one of
main. A group of native fp32 parameters only has one entry that is not written, a replica of another group's, where
main has an empty list that it cannot load again. Where every parameter of the inner optimizer is an fp32 copy, upstream is called untouched. A frozen parameter
in a group needs an entry in the model's sharded state, as one with state does; without it upstream raises KeyError.

Seen from here and left alone: `FP32Optimizer` walks the inner optimizer and is right. `HybridDeviceOptimizer` (CPU
offload) raises a KeyError when it loads state of a native fp32 parameter up to 0.19.2 (fixed by the same pull
request), and inside `DistributedOptimizer` it refuses such parameters when it is built: it fails loudly, so do not
combine CPU offload with fp32 parameters.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

from megacpp_overlays.feature_probes.float16_optimizer_state_ids import FLOAT16_IDS, TARGET, probe
from megacpp_overlays.model import Observation, Overlay, Replacement, Thread

_COPIES = "fp32_from_fp16_params"


def _with_one_numbering(original: Callable[..., Any], _module: ModuleType) -> Callable[..., Any]:
    def sharded_state_dict(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.is_stub_optimizer:
            return original(self, *args, **kwargs)
        model_side = {
            id(copy): parameter
            for parameters, copies in zip(self.float16_groups, self.fp32_from_float16_groups, strict=True)
            for parameter, copy in zip(parameters, copies, strict=True)
        }
        inner = [list(group["params"]) for group in self.optimizer.param_groups]
        if all(id(parameter) in model_side for group in inner for parameter in group):
            return original(self, *args, **kwargs)
        groups = self.float16_groups, self.fp32_from_float16_groups
        self.float16_groups = [[model_side.get(id(each), each) for each in group] for group in inner]
        self.fp32_from_float16_groups = inner
        try:
            state = original(self, *args, **kwargs)
        finally:
            self.float16_groups, self.fp32_from_float16_groups = groups
        copies = [
            [entry for entry, parameter in zip(entries, group, strict=True) if id(parameter) in model_side]
            for entries, group in zip(state[_COPIES], inner, strict=True)
        ]
        filler = next((_replica(each) for own in copies for each in own), None)
        state[_COPIES] = [
            own or ([filler] if filler else every[:1]) for own, every in zip(copies, state[_COPIES], strict=True)
        ]
        return state

    return sharded_state_dict


def _replica(entry: Any) -> Any:
    """Return an entry as a replica, which is not written, for a group without copies.

    Loading cannot merge an empty list with its neighbours, so such a group has one entry. There is no copy to read it into. An
    entry of the group's own must not be written: where layers are stacked under one name, it is a part of that tensor.
    """
    first, *others = entry.replica_id if isinstance(entry.replica_id, tuple) else (entry.replica_id,)
    number = (first + 1, *others)
    return dataclasses.replace(entry, replica_id=number if isinstance(entry.replica_id, tuple) else number[0])


def observe(module: ModuleType) -> Observation:
    """Ask for the sharded state of a bf16, an fp32 and a bf16 parameter on the CPU, the last one without state.

    The constructor takes CUDA tensors only, so the instance is built without it.
    """
    import torch
    from megatron.core.dist_checkpointing.mapping import ShardedTensor

    def parameter(dtype: Any) -> Any:
        return torch.nn.Parameter(torch.zeros(2, dtype=dtype, device="cpu"))

    first, native, last = (parameter(dtype) for dtype in (torch.bfloat16, torch.float32, torch.bfloat16))
    copies = [each.detach().clone().float() for each in (first, last)]
    inner = torch.optim.SGD([copies[0], native, copies[1]], lr=0.0)
    for each in (copies[0], native):
        inner.state[each] = {"momentum_buffer": torch.zeros(2, dtype=torch.float32, device="cpu")}
    cls = module.Float16OptimizerWithFloat16Params
    optimizer = object.__new__(cls)
    vars(optimizer).update(
        optimizer=inner,
        config=SimpleNamespace(fp16=False, bf16=True),
        grad_scaler=None,
        init_state_fn=None,
        is_stub_optimizer=False,
        float16_groups=[[first, last]],
        fp32_from_float16_groups=[copies],
        fp32_from_fp32_groups=[[native]],
    )
    names = {"first": first, "native": native, "last": last}
    model = {name: ShardedTensor.from_rank_offsets(name, each) for name, each in names.items()}
    state = optimizer.sharded_state_dict(model)
    moments = {number: entry["momentum_buffer"].key for number, entry in state["optimizer"]["state"].items()}
    fp32_copies = [[entry.key for entry in group] for group in state[_COPIES]]
    prefix = "optimizer.state"
    right = moments == {0: f"{prefix}.momentum_buffer.first", 1: f"{prefix}.momentum_buffer.native"}
    right = right and fp32_copies == [[f"{prefix}.fp32_param.first", f"{prefix}.fp32_param.last"]]
    named = ", ".join(moments.values()).replace(f"{prefix}.", "")
    return Observation(broken=not right, seen=f"the state of `first` and `native` is saved as {named}")


OVERLAY = Overlay(
    id="float16-optimizer-state-ids",
    pack=16,
    title="Sharded state of Float16OptimizerWithFloat16Params is numbered like its inner optimizer",
    target=TARGET,
    probe=probe,
    replacements={
        FLOAT16_IDS: (
            Replacement(symbol="Float16OptimizerWithFloat16Params.sharded_state_dict", make=_with_one_numbering),
        ),
    },
    unsupported={},
    witness=observe,
    self_test=observe,
    opt_in=False,
    symptoms=(
        "loading optimizer state fails with fp32 and bf16 parameters mixed",
        "loss jumps after resume with fp32 parameters in a bf16 model",
        "moments of Adam belong to other parameters after resume",
    ),
    concerns="half",
    breaks="a checkpoint of a model with fp32 and half-precision parameters fails or mixes up their optimizer state",
    brief="optimizer state under wrong ids",
    until="ids follow the inner optimizer",
    retire_when="sharded_state_dict gives ids in the order of the inner optimizer's parameter groups",
    threads=(Thread(repository="NVIDIA/Megatron-LM", number=5929, state="merged to main 2026-08-10, unreleased"),),
    last_validated="2026-11-21, H200, torch 2.11.0+cu130, megatron-core 0.19.2: training and a checkpoint round trip; "
    "2026-11-20, x86-64 without GPU, torch 2.11.0: megatron-core 0.14.0, 0.16.1, 0.17.1, 0.19.2, main d98e8a64dd and "
    "dev d48bd6be0a loaded, 0.13.0 to 0.19.2 read",
)
