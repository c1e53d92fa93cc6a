"""Importing the package costs nothing but a few hooks."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from importlib.util import find_spec

RunPython = Callable[..., subprocess.CompletedProcess[str]]

UPSTREAMS = {"torch", "triton", "megatron", "liger_kernel", "mamba_ssm", "transformer_engine", "tilelang", "numpy"}


def test_neither_torch_nor_any_upstream_is_imported(run_python: RunPython) -> None:
    done = run_python("import sys, megacpp_overlays; print(*{name.partition('.')[0] for name in sys.modules})")

    assert not UPSTREAMS & set(done.stdout.split())


def test_kernels_and_the_command_line_wait_until_they_are_needed(run_python: RunPython) -> None:
    done = run_python("import sys, megacpp_overlays; print(*sys.modules)")

    loaded = set(done.stdout.split())
    assert not {name for name in loaded if name.startswith(("megacpp_overlays.kernels.", "megacpp_overlays.cli"))}
    assert "importlib_metadata" not in loaded or find_spec(
        "mamba_ssm"
    )  # where a gate speaks, it says of which versions


def test_importing_twice_and_reloading_keep_one_session(run_python: RunPython) -> None:
    code = """
import importlib, sys
import megacpp_overlays
from megacpp_overlays.loader import session
first, finders = session.current(), len(sys.meta_path)
importlib.reload(megacpp_overlays)
assert session.current() is first
assert len(sys.meta_path) == finders
"""
    run_python(code)


def test_the_public_functions_speak_for_the_session_of_this_process(run_python: RunPython) -> None:
    code = """
import megacpp_overlays as m
assert m.audit().conflicts == ()
m.undo()
assert not {record.decision.value for record in m.audit().records} & {"active", "armed", "conflict"}
m.arm()
assert "armed" in {record.decision.value for record in m.audit().records}
"""
    run_python(code)


def test_dir_shows_public_names_and_no_internal_modules() -> None:
    import megacpp_overlays

    shown = [name for name in dir(megacpp_overlays) if not name.startswith("__")]

    assert shown == sorted(name for name in megacpp_overlays.__all__ if name != "__version__")
    assert all(hasattr(megacpp_overlays, name) for name in dir(megacpp_overlays))
