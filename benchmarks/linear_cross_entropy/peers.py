"""The peers that the benchmark of linear cross entropy races with, each imported from a folder of its own.

A folder is ROOT/PEER/site-packages, as unpack.py makes it; a peer without one is taken from the environment of this
Python. A peer that cannot be imported gives a reason, never an exception.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from linear_cross_entropy.work import Way, options, ours, plain
from torch.nn import functional

LIGER = "liger_kernel"
OVERLAY = "liger-flce-none-backward"
REDUCTIONS = ("none", "mean")
DISTRIBUTIONS = ("megatron-core", "cut-cross-entropy", "verl", "quack-kernels", "nvidia-cutlass-dsl")


class Absent(Exception):  # noqa: N818 - it is a state of affairs
    """A peer is not here; the message says why."""


def load(chosen: list[str], root: Path, device: str) -> tuple[list[Way], dict[str, str], dict[str, str]]:
    """Return the ways of the chosen peers and of ourselves, the absent peers with the reason, and versions.

    The order matters: liger-kernel 0.8.1 as it is comes before this package is imported, because afterwards it would
    be repaired; and of the two releases the one that was imported last stays importable, for its later imports.
    """
    ways: list[Way] = plain()
    absent: dict[str, str] = {}
    loaders: dict[str, Callable[[Path, str], list[Way]]] = {
        "megatron": _megatron,
        "torch": _torch,
        "liger-0.8.1": _liger_as_it_is,
        "ours": lambda _root, _device: ours(),
        "liger-overlay": _liger_with_overlay,
        "liger-0.8.5": _liger_newest,
        "liger-cute": _liger_cute,
        "cut-cross-entropy": _cut_cross_entropy,
        "verl": _verl,
        "quack": _quack,
    }
    for name, loader in loaders.items():
        if name not in chosen and name != "ours":
            continue
        try:
            ways += loader(root, device)
        except Exception as error:
            if name == "ours":
                raise
            absent[name] = reason(error)
    from megacpp_overlays.source import distributions

    versions = {name: distributions.version(name) or "not installed" for name in DISTRIBUTIONS}
    return ways, absent, versions


def reason(error: BaseException) -> str:
    """Return an error in one line."""
    words = " ".join(str(error).split())
    return words if isinstance(error, Absent) else f"{type(error).__name__}: {words[:300]}"


def _put_first(root: Path, *names: str) -> None:
    """Put the folders of a peer first on the path, and others of its packages out of the way."""
    for name in names:
        folder = root / name / "site-packages"
        if not folder.is_dir():
            continue
        if name.startswith("liger"):
            sys.path[:] = [each for each in sys.path if not (each.startswith(str(root)) and "/liger-" in each)]
        for each in (folder, folder / "nvidia_cutlass_dsl" / "dsl_packages"):
            if each.is_dir() and str(each) not in sys.path:
                sys.path.insert(0, str(each))
    importlib.invalidate_caches()


def _forget(package: str) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == package]:
        del sys.modules[name]


# --- Megatron and PyTorch --------------------------------------------------------------------------------------


def _megatron(root: Path, device: str) -> list[Way]:
    """Megatron's unfused path: logits of the output layer, then its vocabulary-parallel loss, on one rank."""
    _put_first(root, "megatron")
    loss = importlib.import_module("megatron.core.tensor_parallel.cross_entropy").vocab_parallel_cross_entropy
    distributed = torch.distributed
    if not distributed.is_initialized():
        backend = "gloo" if device == "cpu" else "nccl"
        distributed.init_process_group(backend, store=distributed.HashStore(), rank=0, world_size=1)
    group = distributed.group.WORLD

    def through(x: Any, weight: Any, target: Any) -> Any:
        logits = functional.linear(x, weight).unsqueeze(1)
        return loss(logits, target.unsqueeze(1), tp_group=group).squeeze(1)

    return [Way("Megatron, unfused", "peer", "none", through, options(loss, functional.linear))]


def _torch(_root: Path, _device: str) -> list[Way]:
    """PyTorch's own fused function, in releases that have it."""
    function = getattr(functional, "linear_cross_entropy", None)
    if function is None:
        raise Absent(f"torch {torch.__version__} has no linear_cross_entropy")

    def way(reduction: str) -> Way:
        def through(x: Any, weight: Any, target: Any) -> Any:
            return function(x, weight, target, reduction=reduction)

        return Way("PyTorch, fused", "peer", reduction, through, options(function))

    return [way(reduction) for reduction in REDUCTIONS]


# --- Liger -----------------------------------------------------------------------------------------------------


def _liger(root: Path, version: str, name: str) -> list[Way]:
    _forget(LIGER)
    _put_first(root, f"liger-{version}")
    if (found := importlib.metadata.version("liger-kernel")) != version:
        raise Absent(f"liger-kernel {version} is not here, only {found}")
    module = importlib.import_module("liger_kernel.transformers.fused_linear_cross_entropy")
    loss = module.LigerFusedLinearCrossEntropyLoss
    can = options(loss.__init__, loss.forward)

    def way(reduction: str) -> Way:
        fused = loss(reduction=reduction)
        return Way(name, "peer", reduction, lambda x, weight, target: fused(weight, x, target), can)

    return [way(reduction) for reduction in REDUCTIONS]


def _liger_as_it_is(root: Path, _device: str) -> list[Way]:
    """A module that stays among the imported ones would be repaired as soon as the overlays are armed."""
    try:
        return _liger(root, "0.8.1", "liger-kernel 0.8.1")
    finally:
        _forget(LIGER)


def _liger_with_overlay(root: Path, _device: str) -> list[Way]:
    import megacpp_overlays

    ways = _liger(root, "0.8.1", "liger-kernel 0.8.1 with the overlay")
    decided = [record for record in megacpp_overlays.audit().records if record.overlay.id == OVERLAY]
    if [record.decision.value for record in decided] != ["active"]:
        said = "; ".join(f"{each.decision.value}, {each.reason}" for each in decided)
        raise Absent(f"the overlay is not active: {said or 'overlays are off'}")
    return [way for way in ways if way.reduction == "none"]


def _liger_newest(root: Path, _device: str) -> list[Way]:
    ways = _liger(root, "0.8.5", "liger-kernel 0.8.5")
    function = importlib.import_module("liger_kernel.transformers.functional").liger_fused_linear_cross_entropy

    def wide(x: Any, weight: Any, target: Any) -> Any:
        return function(x, weight, target, reduction="none", chunk_mem_const=8)

    return [*ways, Way("liger-kernel 0.8.5, chunk_mem_const=8", "peer", "none", wide, options(function))]


def _liger_cute(root: Path, _device: str) -> list[Way]:
    """Liger's kernels for Hopper."""
    if LIGER not in sys.modules:
        _put_first(root, "liger-0.8.5")
    _put_first(root, "cute")
    _put_last(root, "cuda")
    module = importlib.import_module("liger_kernel.ops.cutedsl.ops.fused_linear_cross_entropy_sm90")
    function = module.liger_fused_linear_cross_entropy_sm90

    def way(reduction: str) -> Way:
        def through(x: Any, weight: Any, target: Any) -> Any:
            return function(x, weight, target, reduction=reduction)

        return Way("liger-kernel 0.8.5, CuTe SM90", "peer", reduction, through, options(function))

    return [way(reduction) for reduction in REDUCTIONS]


def _put_last(root: Path, name: str) -> None:
    """Offer a package that PyTorch may have brought along already, in the version that fits it."""
    folder = root / name / "site-packages"
    if folder.is_dir() and str(folder) not in sys.path:
        sys.path.append(str(folder))
    importlib.invalidate_caches()


# --- others ----------------------------------------------------------------------------------------------------


def _cut_cross_entropy(root: Path, _device: str) -> list[Way]:
    _put_first(root, "cut-cross-entropy")
    function = importlib.import_module("cut_cross_entropy").linear_cross_entropy
    can = options(function)

    def exact(x: Any, weight: Any, target: Any) -> Any:
        return function(x, weight, target, reduction="none", filter_eps=None)

    def filtered(x: Any, weight: Any, target: Any) -> Any:
        return function(x, weight, target, reduction="none")

    return [
        Way("cut-cross-entropy, exact", "peer", "none", exact, can),
        Way("cut-cross-entropy, filtered", "peer", "none", filtered, can),
    ]


def _verl(root: Path, device: str) -> list[Way]:
    """One folder of verl, which by itself needs three functions of a module that needs all the rest."""
    packages = root / "verl" / "site-packages" / "verl"
    if not packages.is_dir():
        raise Absent(f"there is no {packages.relative_to(root)} in the folder that --peers-at names")
    _put_first(root, "verl")
    for name, folder in (("verl", packages), ("verl.utils", packages / "utils")):
        package = types.ModuleType(name)
        package.__path__ = [str(folder)]
        sys.modules[name] = package
    stand_in = types.ModuleType("verl.utils.device")
    has_gpu = device != "cpu"
    stand_in.is_cuda_available = has_gpu
    stand_in.get_device_name = lambda: device
    stand_in.get_device_capability = lambda: torch.cuda.get_device_capability() if has_gpu else (0, 0)
    stand_in.get_torch_device = lambda: torch.cuda
    sys.modules[stand_in.__name__] = stand_in
    function = importlib.import_module("verl.utils.kernel.linear_cross_entropy").LinearCrossEntropy

    def through(x: Any, weight: Any, target: Any) -> Any:
        log_probability, _entropy = function.apply(x, weight, target, 1.0, "none", None)
        return -log_probability

    return [Way("verl", "peer", "none", through, options(function.forward))]


def _quack(root: Path, device: str) -> list[Way]:
    """Two functions: one that keeps the logits for any reduction, and one in chunks for the mean."""
    if device == "cpu":
        raise Absent("quack-kernels needs a GPU")
    _put_first(root, "cute", "quack")
    _put_last(root, "cuda")
    module = importlib.import_module("quack.linear_cross_entropy")
    whole, chunked = module.linear_cross_entropy_func, module.chunked_linear_cross_entropy

    def unfused(x: Any, weight: Any, target: Any) -> Any:
        return whole(x, weight, None, target, reduction="none", inplace_backward=True)

    def way(reduction: str) -> Way:
        def through(x: Any, weight: Any, target: Any) -> Any:
            return chunked(x, weight, target, reduction=reduction)

        return Way("quack-kernels, chunked", "peer", reduction, through, options(chunked))

    return [
        Way("quack-kernels, logits kept", "peer", "none", unfused, options(whole)),
        *(way(reduction) for reduction in REDUCTIONS),
    ]


PEERS = (
    "compile", "megatron", "torch", "liger-0.8.1", "liger-overlay", "liger-0.8.5", "liger-cute", "cut-cross-entropy",
    "verl", "quack",
)  # fmt: skip
"""Names for the command line; `compile` is made anew for each shape."""
