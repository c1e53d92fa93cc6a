"""Importing the package is cheap, and its hooks are a small part of the imports they follow.

Hosts differ and are busy, so everything here is a ratio between processes of the same run, with room to spare. The
measured milliseconds are in benchmarks/results/import_cost.md.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess
from types import ModuleType

import pytest
from warm_python import TORCH

pytestmark = pytest.mark.unmeasured_children

BENCHMARK = Path(__file__).resolve().parents[2] / "benchmarks" / "loader" / "import_cost.py"


@pytest.fixture(scope="module")
def benchmark() -> ModuleType:
    spec = importlib.util.spec_from_file_location("benchmark_of_import_cost", BENCHMARK)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclasses look themselves up
    spec.loader.exec_module(module)
    return module


def test_import_loads_the_standard_library_and_wrapt_only(run_python: Callable[..., CompletedProcess[str]]) -> None:
    code = (
        "import json, sys; before = set(sys.modules); import megacpp_overlays;"
        "print(json.dumps(sorted({name.partition('.')[0] for name in set(sys.modules) - before})))"
    )
    loaded = set(json.loads(run_python(code).stdout))
    versions = (
        {"importlib_metadata", "lazy_importer", "zipp"} if importlib.util.find_spec("mamba_ssm") else set()
    )  # where a gate speaks, of these
    assert loaded - sys.stdlib_module_names - versions == {"megacpp_overlays", "wrapt"}


def test_import_makes_no_class_by_compiling_code_for_it(run_python: Callable[..., CompletedProcess[str]]) -> None:
    code = (
        "import sys, typing, megacpp_overlays; "
        "modules = [module for name, module in sys.modules.items() if name.startswith('megacpp_overlays')];"
        "made = [cls for module in modules for cls in vars(module).values() if isinstance(cls, type)];"
        "print('dataclasses' in sys.modules,"
        " *{cls.__name__ for cls in made if typing.NamedTuple in vars(cls).get('__orig_bases__', ())})"
    )
    assert run_python(code).stdout.split() == ["False"]


def test_no_kernel_imports_dynamo(run_python: Callable[..., CompletedProcess[str]]) -> None:
    """It takes seconds, and a process that compiles nothing needs none of it."""
    code = (
        "import importlib, pkgutil, sys, torch, megacpp_overlays.kernels as kernels\n"
        "assert 'torch._dynamo' not in sys.modules\n"
        "for each in pkgutil.walk_packages(kernels.__path__, 'megacpp_overlays.kernels.'):\n"
        "    importlib.import_module(each.name)\n"
        "    if 'torch._dynamo' in sys.modules: sys.exit(each.name)"
    )
    run_python(code, after=TORCH)


def test_import_adds_less_than_wrapt_does(benchmark: ModuleType) -> None:
    costs = benchmark.starts(5, [benchmark.BARE, benchmark.WRAPT, benchmark.OURS])
    bare, wrapt, ours = (costs[code].cpu for code in (benchmark.BARE, benchmark.WRAPT, benchmark.OURS))
    assert ours - wrapt < wrapt - bare


@pytest.mark.full
@pytest.mark.upstream
@pytest.mark.parametrize("target", ["megatron.core.transformer.module", "liger_kernel.ops.fused_linear_cross_entropy"])
def test_hook_is_a_small_part_of_the_import_of(target: str, benchmark: ModuleType) -> None:
    if importlib.util.find_spec(target.partition(".")[0]) is None:
        pytest.skip(f"{target} is not in this environment")
    seconds = benchmark.settle_once(target)
    assert seconds["decisions"]
    assert 0 < seconds["probe"] <= seconds["settle"]
    assert seconds["probe"] < 0.05 * (seconds["torch"] + seconds["import"])
    assert seconds["settle"] < 0.15 * (seconds["torch"] + seconds["import"])
