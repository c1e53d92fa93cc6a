"""Positions of optimizer state in `DistributedOptimizer` for groups with fp32 and half precision parameters.

Training is right without this overlay; saving is not. With a group of both kinds, as `float16-fp32-exemption`
leaves it, the default sharded format fails with an AssertionError, and formats that gather by parameter can store the
state of one parameter under the name of another. Loading fails as well: the shard of an fp32 parameter is a view
that autograd tracks, and state is copied into it in place.

There are two seams around upstream's own code. After construction the positions are recorded again, in the order in
which the groups were installed. State is restored without autograd. Where a group holds one kind only, the
positions equal those of upstream. A checkpoint that was written with mixed-up state is not repaired.

Not covered: CPU offload. `HybridDeviceOptimizer` refuses the view ("can't optimize a non-leaf Tensor") when the
optimizer is built, which is loud. Transformer Engine's precision-aware optimizer with fp32 parameters: not checked.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

from megacpp_overlays.feature_probes.float16_distributed_order import STALE_ORDER, TARGET, probe
from megacpp_overlays.model import Observation, Overlay, Replacement, Thread


def _record_again(original: Callable[..., Any], _module: ModuleType) -> Callable[..., Any]:
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807 - it becomes a constructor
        original(self, *args, **kwargs)
        # A stub and Megatron-FSDP return before there are groups.
        if "model_fp32_groups" in vars(self):
            record_positions(self)

    return __init__


def record_positions(optimizer: Any) -> None:
    """Set the position of every parameter to the one that it has in its installed group: fp32 first, then float16."""
    groups = zip(optimizer.model_fp32_groups, optimizer.model_float16_groups, strict=True)
    for group_index, (native, float16) in enumerate(groups):
        for position, parameter in enumerate([*native, *float16]):
            optimizer.model_param_group_index_map[parameter] = (group_index, position)


def _restore_without_autograd(original: Callable[..., Any], _module: ModuleType) -> Callable[..., Any]:
    import torch

    def _set_main_param_and_optimizer_states(self: Any, *args: Any, **kwargs: Any) -> Any:
        with torch.no_grad():
            return original(self, *args, **kwargs)

    return _set_main_param_and_optimizer_states


def observe(module: ModuleType) -> Observation:
    """Restore the state of an fp32 parameter, next to a half-precision one, on the CPU.

    The constructor needs grad buffers and CUDA tensors, so its last step is set up by hand: the shard of the fp32
    parameter is a tracked view, as upstream makes it.
    """
    import torch

    native = torch.nn.Parameter(torch.zeros(2, dtype=torch.float32, device="cpu"))
    shard = native.view(-1)[0:2]
    optimizer = object.__new__(module.DistributedOptimizer)
    vars(optimizer).update(
        config=SimpleNamespace(use_precision_aware_optimizer_no_fp8_or_ds_fp8=False),
        ddp_config=SimpleNamespace(use_custom_fsdp=False, use_megatron_fsdp=False),
        optimizer=SimpleNamespace(param_groups=[{"params": [shard]}], state={shard: {}}),
        model_param_group_index_map={native: (0, 0)},
    )
    restore = optimizer._set_main_param_and_optimizer_states
    try:
        restore(native, {"param": torch.ones(2, dtype=torch.float32, device="cpu")})
    except RuntimeError as error:
        return Observation(broken=True, seen=f"the state of an fp32 parameter cannot be restored: {error}")
    restored = native.detach().tolist() == [1.0, 1.0]
    return Observation(broken=not restored, seen="the state of an fp32 parameter is restored")


OVERLAY = Overlay(
    id="float16-distributed-order",
    pack=16,
    title="DistributedOptimizer finds the state of mixed fp32 and half-precision groups",
    target=TARGET,
    probe=probe,
    replacements={
        STALE_ORDER: (
            Replacement(symbol="DistributedOptimizer.__init__", make=_record_again),
            Replacement(
                symbol="DistributedOptimizer._set_main_param_and_optimizer_states", make=_restore_without_autograd
            ),
        ),
    },
    unsupported={},
    witness=observe,
    self_test=observe,
    opt_in=False,
    symptoms=(
        "KeyError or shape mismatch when the distributed optimizer saves or loads",
        "loss jumps after resume with fp32 parameters in a bf16 model",
        "optimizer state is mixed up after loading a checkpoint",
    ),
    concerns="half and distributed_optimizer",
    breaks="the distributed optimizer fails to save or load, or mixes up, the state of fp32 parameters",
    brief="optimizer state of mixed fp32 groups",
    until="DistributedOptimizer keeps positions",
    retire_when="DistributedOptimizer records positions after it builds its groups and restores state without autograd",
    threads=(
        Thread(repository="NVIDIA/Megatron-LM", number=2777, state="open when last seen"),
        Thread(repository="NVIDIA/Megatron-LM", number=2872, state="open when last seen"),
        Thread(repository="NVIDIA/Megatron-LM", number=5835, state="merged to dev 2026-07-18"),
    ),
    last_validated="2026-11-21, H200, torch 2.11.0+cu130, megatron-core 0.19.2: training and a checkpoint round trip; "
    "2026-11-20, x86-64 without GPU, torch 2.11.0: megatron-core 0.14.0, 0.16.1, 0.17.1, 0.19.2, main d98e8a64dd and "
    "dev d48bd6be0a loaded, 0.13.0 to 0.19.2 read",
)
