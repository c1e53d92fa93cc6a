"""Exemption of declared fp32 parameters from the cast of `Float16Module`.

Mamba-3 creates `dt_bias`, `D`, `B_bias`, `C_bias` and the `mimo_*` parameters in fp32, and its kernels read them as
fp32. Megatron casts them with everything else; restoring fp32 afterwards restores the dtype, not the bits. So an
exempt parameter is never cast: while upstream's constructor runs it is out of the module tree, and then the same
object is back in the same place. Nothing runs per forward or per step.

`megacpp_overlays.fp32_marks` decides by parameter identity which parameters are exempt, so that every registration of a
tied parameter is exempt. A parameter that is not fp32 at that moment is left to upstream. Everything else, every buffer
included, goes through upstream's cast unchanged. On a Megatron that honours marks the overlay only sets them.

Neighbours:
    Transformer Engine replaces `torch.nn.Module.half` and `.bfloat16`; the seam is on `Float16Module` and delegates
    to whichever is there.
    Both mixed-precision optimizers train such a model, and neither can checkpoint it in any release up to 0.19.2:
    see the overlays `float16-optimizer-state-ids` and `float16-distributed-order`. This one goes in only where each of them
    is in or has nothing to repair: upstream's rounding is a lesser harm than state that is saved under wrong names.
    CPU offload (`HybridDeviceOptimizer`) refuses native fp32 parameters up to 0.19.2: a ValueError when it is built
    inside `DistributedOptimizer`, a KeyError when it loads state. Switch this overlay off to offload.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

from megacpp_overlays import fp32_marks
from megacpp_overlays.feature_probes.float16_fp32_exemption import BLANKET_CAST, MARKS_HONOURED, TARGET, probe
from megacpp_overlays.model import Observation, Overlay, Replacement, Thread

Registration = tuple[Any, str, Any]
"""A module, the name under which it registers a parameter, and that parameter."""


def exempt_registrations(module: Any) -> list[Registration]:
    """Return every registration of an exempt parameter in a module tree.

    Raises:
        OverlayError: a class declares a parameter that an instance does not have.
    """
    import torch

    if not isinstance(module, torch.nn.Module):
        return []
    owners = list(module.modules())
    every = [(owner, name, parameter) for owner in owners for name, parameter in _parameters(owner).items()]
    declared = {id(owner): fp32_marks.declared_names(owner) for owner in owners}
    exempt = {
        id(parameter)
        for owner, name, parameter in every
        if parameter is not None
        and parameter.dtype is torch.float32
        and (name in declared[id(owner)] or getattr(parameter, fp32_marks.MARK, False))
    }
    return [registration for registration in every if id(registration[2]) in exempt]


def _keep_out_of_the_cast(original: Callable[..., Any], _module: ModuleType) -> Callable[..., Any]:
    def __init__(self: Any, config: Any, module: Any, **more: Any) -> None:  # noqa: N807 - it becomes a constructor
        with _out_of_reach(module, exempt_registrations(module)):
            original(self, config, module, **more)

    return __init__


def _mark_before_the_cast(original: Callable[..., Any], _module: ModuleType) -> Callable[..., Any]:
    def __init__(self: Any, config: Any, module: Any, **more: Any) -> None:  # noqa: N807 - it becomes a constructor
        for _, _, parameter in exempt_registrations(module):
            fp32_marks.keep_in_fp32(parameter)
        original(self, config, module, **more)

    return __init__


@contextlib.contextmanager
def _out_of_reach(root: Any, registrations: list[Registration]) -> Iterator[None]:
    """Take parameters out of their modules; put the same objects back, in the same order, whatever happens."""
    if not registrations:
        yield
        return
    with contextlib.ExitStack() as putting_back:
        if _casts_plainly(root):
            for owner, name, parameter in registrations:
                # None is a legal entry, which `_apply` skips; the key stays, and with it the order.
                putting_back.callback(_parameters(owner).__setitem__, name, parameter)
                _parameters(owner)[name] = None
        else:
            # Somewhere in the tree a cast of its own may look at any parameter, so all of them must be there.
            kept = {
                id(tensor): tensor for item in registrations for tensor in (item[2], item[2].grad) if tensor is not None
            }
            for owner in {id(owner): owner for owner, _, _ in registrations}.values():
                putting_back.enter_context(_apply_except(owner, kept))
        yield


def _casts_plainly(root: Any) -> bool:
    """Return whether every module of a tree is cast by torch's own methods."""
    import torch

    base = torch.nn.Module
    own_cast = type(root).half is not base.half or type(root).bfloat16 is not base.bfloat16
    return not own_cast and all(
        type(module)._apply is base._apply and "_apply" not in vars(module)  # noqa: SLF001
        for module in root.modules()
    )


@contextlib.contextmanager
def _apply_except(owner: Any, kept: dict[int, Any]) -> Iterator[None]:
    """Make one module's `_apply` pass by some tensors, given by id."""
    attributes = vars(owner)
    own = attributes.get("_apply")
    original = owner._apply  # noqa: SLF001 - the method that every cast of torch goes through

    @functools.wraps(original)
    def _apply(function: Callable[[Any], Any], *args: Any, **kwargs: Any) -> Any:
        return original(lambda tensor: tensor if id(tensor) in kept else function(tensor), *args, **kwargs)

    attributes["_apply"] = _apply
    try:
        yield
    finally:
        attributes.pop("_apply")
        if own is not None:
            attributes["_apply"] = own


def _parameters(owner: Any) -> dict[str, Any]:
    # The public ways to replace an entry run registration hooks, which may replace the parameter.
    return owner._parameters  # type: ignore[no-any-return]  # noqa: SLF001


def observe(module: ModuleType) -> Observation:
    """Wrap a tiny model on the CPU: are a declared and a marked parameter kept, bit by bit, and the third cast?

    Source of the value: 1 + 2**-23 is the first fp32 number after 1; bf16 and fp16 round it to 1.
    """
    import torch

    @fp32_marks.keeps_in_fp32("declared")
    class Tiny(torch.nn.Module):  # type: ignore[misc]  # torch is not typed here
        def __init__(self) -> None:
            super().__init__()
            for name in ("declared", "marked", "ordinary"):
                value = torch.tensor([1 + 2**-23], dtype=torch.float32, device="cpu")
                self.register_parameter(name, torch.nn.Parameter(value))

    config = SimpleNamespace(fp16=False, bf16=True, virtual_pipeline_model_parallel_size=None)
    model = Tiny()
    fp32_marks.keep_in_fp32(model.marked)
    before = dict(model.named_parameters())
    module.Float16Module(config, model)
    after = dict(model.named_parameters())
    if list(after) != list(before) or after["ordinary"].dtype is not torch.bfloat16:
        return Observation(broken=True, seen="the cast itself does not work")
    lost = [name for name in ("declared", "marked") if not _untouched(before[name], after[name])]
    seen = (
        f"bf16 loses the bits of a {' and a '.join(lost)} fp32 parameter" if lost else "fp32 parameters keep their bits"
    )
    return Observation(broken=bool(lost), seen=seen)


def _untouched(before: Any, after: Any) -> bool:
    import torch

    return after is before and after.dtype is torch.float32 and after.item() == 1 + 2**-23


OVERLAY = Overlay(
    id="float16-fp32-exemption",
    pack=16,
    title="Float16Module leaves declared fp32 parameters alone",
    target=TARGET,
    probe=probe,
    replacements={
        BLANKET_CAST: (Replacement(symbol="Float16Module.__init__", make=_keep_out_of_the_cast),),
        MARKS_HONOURED: (Replacement(symbol="Float16Module.__init__", make=_mark_before_the_cast),),
    },
    unsupported={},
    witness=observe,
    self_test=observe,
    opt_in=False,
    needs=("float16-optimizer-state-ids", "float16-distributed-order"),
    symptoms=(
        "fp32 parameters become bf16",
        "Mamba-3 kernel complains of the dtype of its parameters",
        "A_log, D or dt_bias are bf16 and lose precision",
    ),
    concerns="half",
    breaks="Mamba-3's fp32 parameters are rounded to half precision when the model is wrapped; its kernels want fp32",
    brief="fp32 parameters that are rounded",
    until="Float16Module honours their marks",
    retire_when="Float16Module honours keep_in_fp32 marks and mamba-ssm's Mamba3 sets them on its fp32 parameters",
    threads=(
        Thread(repository="NVIDIA/Megatron-LM", number=5929, state="merged to main 2026-08-10, unreleased"),
        Thread(repository="NVIDIA/Megatron-LM", number=5308, state="merged to dev 2026-07-09"),
        Thread(repository="NVIDIA/Megatron-LM", number=6172, state="merged to dev 2026-08-02"),
        Thread(repository="NVIDIA/Megatron-LM", number=5038, state="not merged on 2026-05-28, not checked since"),
    ),
    last_validated="2026-11-21, H200, torch 2.11.0+cu130, megatron-core 0.19.2: training, a checkpoint round trip, and the "
    "real Mamba3 of mamba-ssm 2.3.2.post1, MIMO with tilelang 0.1.8; "
    "2026-11-20, x86-64 without GPU, torch 2.11.0: megatron-core 0.14.0, 0.16.1, 0.17.1, 0.19.2, main d98e8a64dd and "
    "dev d48bd6be0a loaded, 0.13.0 to 0.19.2 read",
)
