"""The reproducers of packs 8, 13 and 17 to 20: how they read generated source, and their references."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import tilelang_mimo_algebra as algebra
import tilelang_sources as generated
from places import HANG_S, ROOT

from megacpp_overlays.repro import inventory

torch = pytest.importorskip("torch")


def reproducer(number: int) -> ModuleType:
    path = inventory.find(inventory.own_folder(), number).reproducer
    cases = inventory.load_cases(path)
    return sys.modules[cases[0].run.__module__]


MIMO, GROUPED, SISO = reproducer(17), reproducer(18), reproducer(19)


# How many values go into a sum


@pytest.mark.parametrize(("source", "values"), [(generated.ADDED_TOO_OFTEN, 1024), (generated.RIGHT, 32)])
def test_the_values_of_a_sum_are_the_additions_of_a_thread_times_the_threads(source: str, values: int) -> None:
    (found,) = GROUPED.sums(source)

    assert (found.name, found.threads, found.values) == ("sums", 32, values)


def test_sums_over_several_groups_of_threads_and_without_a_loop_are_counted_and_others_are_left_out() -> None:
    found = {each.name: each.values for each in GROUPED.sums(generated.TWO_SUMS)}

    assert found == {"first": 8 * 2 * 4 * 4, "second": 2 * 16}


def test_a_sum_that_is_written_twice_is_two_sums() -> None:
    found = GROUPED.sums(generated.RIGHT * 2)

    assert [each.values for each in found] == [32, 32]


@pytest.mark.parametrize("name", ["sums", "_closed", "Sum"])
def test_both_packs_count_in_the_same_way(name: str) -> None:
    def code(module: ModuleType) -> list[str]:
        lines = inspect.getsource(getattr(module, name)).splitlines()
        return [line.split("; 1 where")[0].rstrip('"').rstrip(".") for line in lines if '"""Take a sum' not in line]

    assert code(MIMO) == code(GROUPED)


# References of the Mamba-3 kernels


def test_the_sums_of_the_mimo_backward_are_gradients_of_its_forward() -> None:
    given = MIMO.inputs("cpu", batch=1, steps=3 * MIMO.CHUNK, heads=2, groups=1, state=16)

    written, right = algebra.sums(given, MIMO.CHUNK), MIMO.reference(given)

    for name, (one, other) in MIMO.compare(written, right).items():
        assert float((one - other).norm()) <= 1e-12 * float(other.norm()), name


@pytest.mark.parametrize("name", ["DDA_CS_REV", "DFACTOR", "DSSDA", "DD"])
def test_a_value_that_is_added_twice_is_seen(name: str) -> None:
    given = MIMO.inputs("cpu", batch=1, steps=2 * MIMO.CHUNK, heads=2, groups=2, state=16)
    written, right = algebra.sums(given, MIMO.CHUNK), MIMO.reference(given)

    written[name] = 2 * written[name]
    one, other = MIMO.compare(written, right)[name]

    assert float((one * other).sum() / (other * other).sum()) == pytest.approx(2)


def test_the_siso_reference_reads_the_state_as_the_sum_over_all_earlier_steps() -> None:
    given = SISO.inputs("cpu", batch=1, steps=12, heads=2, groups=1, state=8, head=4)
    exact = {name: value.double() for name, value in given.items()}
    plain_q, plain_k = (exact[name].repeat_interleave(2, dim=2) + exact[f"{name}_bias"] for name in ("Q", "K"))
    q, k = SISO._turned(plain_q, exact["Angles"]), SISO._turned(plain_k, exact["Angles"])
    weight = exact["Trap"].sigmoid()
    right = torch.zeros_like(exact["V"])
    for step in range(12):
        for earlier in range(step + 1):
            decay = exact["ADT"][..., earlier + 1 : step + 1].sum(-1).exp()
            factor = exact["DT"][..., earlier] * weight[..., earlier]
            if earlier < step:
                factor = factor + exact["DT"][..., earlier + 1] * (1 - weight[..., earlier + 1])
            product = (q[:, step] * k[:, earlier]).sum(-1) * decay * factor
            right[:, step] += product[..., None] * exact["V"][:, earlier]
        right[:, step] += exact["D"][:, None] * exact["V"][:, step]

    right = right * exact["Z"] * exact["Z"].sigmoid()

    assert float((SISO.reference(given) - right).norm()) <= 1e-12 * float(right.norm())


# Choices of a tuner


def kernel(*, pruned: bool) -> SimpleNamespace:
    configs = [SimpleNamespace(num_stages=stages) for stages in (1, 2, 3)]

    def prune(given: list[SimpleNamespace], named: dict[str, SimpleNamespace]) -> list[SimpleNamespace]:
        major, _ = torch.cuda.get_device_capability(named["Q"].device)
        return [each for each in given if each.num_stages == 1] if major in {10, 12} else given

    return SimpleNamespace(configs=configs, early_config_prune=prune if pruned else None)


@pytest.mark.parametrize(
    ("pruned", "capability", "stages"), [(False, (10, 0), 3), (True, (10, 3), 1), (True, (12, 0), 1), (True, (9, 0), 3)]
)
def test_a_tuner_is_asked_as_on_a_device_of_that_capability(
    pruned: bool, capability: tuple[int, int], stages: int
) -> None:
    real = torch.cuda.get_device_capability

    found = SISO._candidates(kernel(pruned=pruned), capability)

    assert len(found) == stages
    assert torch.cuda.get_device_capability is real


# Importing Megatron, in a process of its own

COMMON = "megatron/core/ssm/ops/gdp/common.py"
REACHES = "megatron/core/inference/contexts/dynamic_context.py"
ASKS = "import torch\nIS_NVIDIA_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] >= 9\n"
WAITS = "import torch\ndef is_hopper():\n    return torch.cuda.get_device_capability()[0] >= 9\n"
BY_CONTEXTS = "from megatron.core.ssm.ops.gdp.common import *\n"


@pytest.mark.parametrize(
    ("files", "says"),
    [
        ({COMMON: ASKS, REACHES: BY_CONTEXTS}, "BUG_REPRODUCED: importing megatron.core asked a device 1 times"),
        pytest.param(
            {COMMON: ASKS},
            "BUG_REPRODUCED: importing megatron.core.ssm.ops.gdp.common asked a device 1 times",
            marks=pytest.mark.full,
        ),
        # No probe knows this repair: its behaviour is right, and the gate says only that it looks repaired.
        pytest.param(
            {COMMON: WAITS, REACHES: BY_CONTEXTS},
            "FAILED: the probe says UNRECOGNISED, the behaviour is not broken: importing megatron.core and",
            marks=pytest.mark.full,
        ),
        pytest.param(
            {REACHES: ""},
            "BUG_NOT_PRESENT: the combination is absent: importing megatron.core asked nothing",
            marks=pytest.mark.full,
        ),
    ],
    ids=["with-the-package", "with-hybrid-models", "when-called", "no-such-module"],
)
def test_the_import_of_a_made_up_megatron_agrees_with_the_gate(
    tmp_path: Path, files: dict[str, str], says: str
) -> None:
    for name, text in {REACHES: "", **files}.items():
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        for folder in file.relative_to(tmp_path / "megatron").parents:
            (tmp_path / "megatron" / folder / "__init__.py").touch()
    (tmp_path / "megatron" / "__init__.py").unlink()
    (tmp_path / "megatron/core/__init__.py").write_text("import megatron.core.inference.contexts.dynamic_context\n")

    ended = repro("20", "--case", "import-cpu", "--tree", str(tmp_path))

    assert says in ended.stdout, ended.stdout
    assert ended.returncode == says.startswith("FAILED")


# With the TileLang that is installed

QUICK = [("8", "three-axes"), ("13", "spread-row"), ("17", "flattened-product"), ("18", "grouped-sum-source")]


@pytest.mark.upstream
@pytest.mark.skipif(find_spec("tilelang") is None, reason="tilelang is not installed")
@pytest.mark.parametrize(("pack", "case"), QUICK)
def test_a_trigger_and_the_gate_agree_about_the_tilelang_that_is_here(pack: str, case: str) -> None:
    ended = repro(pack, "--case", case)

    assert ended.returncode in {0, 3}, ended.stdout


def repro(*arguments: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MEGACPP_")}
    command = [sys.executable, "-W", "ignore", "-m", "megacpp_overlays", "repro", *arguments]
    return subprocess.run(
        command,
        env={**environment, "PYTHONPATH": path, "MEGACPP_OVERLAYS_LOG": "logging"},
        capture_output=True,
        text=True,
        check=False,
        timeout=HANG_S,
    )
