"""mamba-ssm 2.3.2.post1, imported where neither it nor TileLang is installed.

It is published as source alone, and its package imports transformers and compiled kernels of Mamba-1; here only the
modules of Mamba-3 MIMO are imported. Their kernels are defined and never compiled: a function that is replaced before it runs
needs no TileLang, only a module of that name.
"""

from __future__ import annotations

import contextlib
import importlib
import shutil
import sys
from collections.abc import Callable, Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from installed import tree_of

from megacpp_overlays.kernels.mamba3 import mimo_reference as reference

PACKAGE = "mamba_ssm.ops.tilelang.mamba3"
ENTRY, PLAIN, VARLEN = f"{PACKAGE}.mamba3_mimo", f"{PACKAGE}.mamba3_mimo_bwd", f"{PACKAGE}.mamba3_mimo_bwd_varlen"

STAND_INS = {
    "tilelang/__init__.py": """
        class PassConfigKey:
            TL_DISABLE_TMA_LOWER = TL_DISABLE_WARP_SPECIALIZED = TL_ENABLE_FAST_MATH = "a key"

        def jit(**_):
            return lambda function: function
    """,
    "tilelang/language.py": "dynamic = str",
    "tilelang/autotuner.py": "autotune = None",
    "tilelang/profiler.py": "do_bench = None",
    "einops.py": "rearrange = repeat = None",
}
"""The names that the modules of Mamba-3 MIMO take from TileLang and einops while they are imported."""


def unpack(folder: Path) -> Path:
    """Copy the release, which a lane built from its hashed source, into a folder; return the folder."""
    skipped = shutil.ignore_patterns("__pycache__")
    shutil.copytree(
        tree_of("mamba3-pinned").root / "mamba_ssm", folder / "mamba_ssm", dirs_exist_ok=True, ignore=skipped
    )
    return folder


def add_stand_ins(folder: Path) -> Path:
    """Write modules with the names that are imported and nothing in them; return the folder."""
    import textwrap

    for name, text in STAND_INS.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(textwrap.dedent(text))
    return folder


IMPORT = f"""
import importlib, sys, types
package = sys.modules["mamba_ssm"] = types.ModuleType("mamba_ssm")
package.__path__ = [folder + "/mamba_ssm" for folder in sys.path]
def load(name): return importlib.import_module(f"{PACKAGE}.{{name}}")
"""
"""The first code of a fresh interpreter, with a folder of `unpack` and one of `add_stand_ins` on its path."""


@contextlib.contextmanager
def imported(release: Path, stand_ins: Path) -> Iterator[Callable[[str], ModuleType]]:
    """Let modules of the release be imported in this process; forget them afterwards."""
    ours = {"mamba_ssm", "tilelang", "einops"}

    def taken() -> dict[str, ModuleType]:
        return {name: module for name, module in sys.modules.items() if name.partition(".")[0] in ours}

    before = taken()
    for name in before:
        del sys.modules[name]
    sys.path.insert(0, str(stand_ins))
    package = sys.modules["mamba_ssm"] = ModuleType("mamba_ssm")
    package.__path__ = [str(release / "mamba_ssm")]
    package.__spec__ = ModuleSpec("mamba_ssm", None, is_package=True)
    package.__spec__.submodule_search_locations = package.__path__
    try:
        yield importlib.import_module
    finally:
        sys.path.remove(str(stand_ins))
        for name in taken():
            del sys.modules[name]
        sys.modules.update(before)


# The rest of a layer in PyTorch, so that a whole forward and backward pass runs without a GPU


def replace_kernels(entry: ModuleType) -> None:
    """Give a loaded `mamba3_mimo` and the modules behind it our kernels in the place of theirs."""
    for name in (PLAIN, VARLEN):
        for symbol, kernel in reference.kernels().items():
            if hasattr(sys.modules[name], symbol):
                setattr(sys.modules[name], symbol, kernel)
    for suffix in ("", "_varlen"):
        setattr(entry, f"compute_dacs_segsum_triton{suffix}", lambda adt, *_, **__: (adt, adt, adt))
        setattr(entry, f"mamba_mimo_forward{suffix}", _forward)
    vars(entry).update(angle_dt_fwd=_rotate, angle_dt_bwd=_rotate_back)


def _rotate(angles: Any, dt: Any, *, cu_seqlens: Any, **_: Any) -> tuple[Any, None]:
    return reference.cumulative_angles(angles.double(), dt.double(), cu_seqlens).to(angles.dtype), None


def _rotate_back(*, grad_out: Any, angle: Any, dt: Any, cu_seqlens: Any, **_: Any) -> tuple[Any, Any, None]:
    leaves = [each.detach().double().requires_grad_() for each in (angle, dt)]
    with torch.enable_grad():
        rotations = reference.cumulative_angles(*leaves, cu_seqlens)
        found = torch.autograd.grad(rotations, leaves, grad_out.double())
    return found[0].to(angle.dtype), found[1].to(dt.dtype), None


def _forward(*tensors: Any, cu_seqlens: Any = None, **_: Any) -> tuple[Any, None, None]:
    q, k, v, q_bias, k_bias, mimo_v, mimo_o, z, d, mimo_z, angles, adt, _, dt, trap, _ = tensors
    given = reference.Inputs(q, k, v, adt, dt, trap, q_bias, k_bias, mimo_v, mimo_z, mimo_o, angles, d, z)
    wide = reference.Inputs(*(None if each is None else each.double() for each in given))
    return reference.forward(wide, cu_seqlens).to(v.dtype), None, None
