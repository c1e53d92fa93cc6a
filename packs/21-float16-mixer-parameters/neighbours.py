"""Megatron's Mamba mixers where nothing must be kept in fp32: as they are built, all but two of their parameters when they are wrapped,
and mixers that were cast before."""

from __future__ import annotations

import contextlib
import importlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any

from megacpp_overlays.repro import Neighbour, TargetAbsent, beside

PACK = beside(__file__)
KEPT = "A_log", "D"
MOST = 500
"""Values of a tensor that are compared."""


def _built() -> Mapping[str, object]:
    """Return a mixer as it is built, and the next random number."""
    import torch

    return {**_parameters(_mixer()), "next random number": torch.rand(1)}


def _others() -> Mapping[str, object]:
    return _parameters(_wrapped(_mixer()), but=KEPT)


def _others_of_a_subclass() -> Mapping[str, object]:
    """Return the same for a class whose constructor calls the one of the mixer and does nothing else."""
    module: Any = importlib.import_module(PACK.MAMBA)

    class Mixer(module.MambaMixer):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)

    with _instead({"MambaMixer": Mixer}):
        return _parameters(_wrapped(_mixer()), but=KEPT)


def _cast_before() -> Mapping[str, object]:
    """Wrap a mixer that was cast to fp16 as a whole: upstream casts what it made in fp32, too.

    Raises:
        TargetAbsent: upstream leaves a parameter that is marked as it is, whatever its dtype.
    """
    if "keep_in_fp32" in inspect.getsource(importlib.import_module("megatron.core.transformer.module")):
        raise TargetAbsent("Float16Module casts nothing that has keep_in_fp32, whatever its dtype")
    return _parameters(_wrapped(_mixer().half()))


def _scanned() -> Mapping[str, object]:
    """Return what a mixer learns that is not wrapped, with a plain scan."""
    import torch

    from megacpp_overlays.kernels.mamba2 import packed_reference

    plain = {"mamba_split_conv1d_scan_combined": packed_reference.scan, "rearrange": _rearrange}
    with _instead({**plain, "MAMBA_HAS_STATE_DTYPE": False}):
        mixer = _mixer().float()
        mixer.use_mem_eff_path = True  # of all paths the one that scans at once
        row = torch.randn(6, 1, PACK.HIDDEN, generator=torch.Generator().manual_seed(3)).requires_grad_()
        output, _ = mixer(row)
        output.square().sum().backward()
    gradients = {f"gradient of {name}": getattr(mixer, name).grad for name in KEPT}
    return {"output": output, "gradient of the row": row.grad, **gradients}


def _rearrange(values: Any, pattern: str, **_: Any) -> Any:
    """Do what the mixer asks of einops: swap the first two axes of three, or drop the middle one."""
    return values.squeeze(1) if pattern == "d 1 w -> d w" else values.transpose(0, 1)


def _mixer() -> Any:
    """Return a mixer with a plain norm. Where mamba-ssm is not installed, Megatron's own is a mock that is built once."""
    import torch

    class Norm(torch.nn.Module):  # type: ignore[misc]
        def __init__(self, size: int, *, dtype: Any, **_: Any) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.linspace(0.5, 1.5, size).to(dtype))

        def forward(self, values: Any, *_: Any) -> Any:
            return values * self.weight

    with _instead({"ExtendedRMSNorm": Norm}):
        return PACK._build(PACK.MAMBA, "MambaMixer", KEPT, device="cpu")[0]


@contextlib.contextmanager
def _instead(ours: Mapping[str, Any]) -> Iterator[None]:
    """Let names of the module of mixers stand for something else."""
    names = vars(importlib.import_module(PACK.MAMBA))
    before = {name: names[name] for name in ours if name in names}
    names.update(ours)
    try:
        yield
    finally:
        for name in ours.keys() - before.keys():
            del names[name]
        names.update(before)


def _wrapped(mixer: Any) -> Any:
    from megatron.core.transformer.module import Float16Module

    Float16Module(SimpleNamespace(fp16=False, bf16=True, virtual_pipeline_model_parallel_size=None), mixer)
    return mixer


def _parameters(mixer: Any, but: tuple[str, ...] = ()) -> dict[str, Any]:
    """Return the first values of parameters and buffers, and how many bytes a value has."""
    found: dict[str, Any] = {}
    for name, each in (*mixer.named_parameters(), *mixer.named_buffers()):
        if name not in but:
            found |= {name: each.detach().flatten()[:MOST], f"bytes of {name}": each.element_size()}
    return found


def _neighbour(name: str, run: Callable[[], Mapping[str, object]]) -> Neighbour:
    return Neighbour(name=name, overlay="float16-mixer-parameters", run=run)


NEIGHBOURS = (
    _neighbour("built", _built),
    _neighbour("not-wrapped", _scanned),
    _neighbour("wrapped-others", _others),
    _neighbour("wrapped-others-of-a-subclass", _others_of_a_subclass),
    _neighbour("cast-before", _cast_before),
)
