"""The packs of this repository: their statements about themselves hold, and those that run on a CPU print their sentinels."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import pytest
from packaging.version import Version
from places import HANG_S, ROOT
from unpacked import unpacked

from megacpp_overlays.loader import registry, retired
from megacpp_overlays.repro import inventory, manifest, receipts

PACKS = inventory.list_packs(inventory.own_folder())
OVERLAYS = registry.load()
REPRODUCED = [pack for pack in PACKS if pack.reproducer.is_file()]

each_reproducer = pytest.mark.parametrize("pack", REPRODUCED, ids=lambda pack: pack.name)


def test_every_overlay_has_a_case_in_the_pack_of_its_number() -> None:
    measured = {case.overlay for pack in REPRODUCED for case in inventory.load_cases(pack.reproducer)}

    assert {overlay.id for overlay in OVERLAYS} - measured == set()


@each_reproducer
def test_cases_are_about_overlays_of_their_own_pack(pack: inventory.Pack) -> None:
    numbers = {overlay.id: overlay.pack for overlay in (*OVERLAYS, *retired.read())}
    cases = inventory.load_cases(pack.reproducer)

    assert {numbers[case.overlay] for case in cases if case.overlay} <= {pack.number}
    assert all(case.overlay or case.claim for case in cases)


def test_reproducers_can_be_listed_without_importing_an_upstream() -> None:
    code = (
        "import sys\n"
        "from megacpp_overlays.repro import inventory\n"
        "for pack in inventory.list_packs(inventory.own_folder()):\n"
        "    if pack.reproducer.is_file(): inventory.load_cases(pack.reproducer)\n"
        "loaded = {'torch', 'triton', 'megatron', 'liger_kernel', 'transformer_engine', 'mamba_ssm'} & set(sys.modules)\n"
        "assert not loaded, loaded"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "PYTHONPATH": str(ROOT)})


def test_importing_the_package_imports_no_part_of_this() -> None:
    code = (
        "import sys, megacpp_overlays\n"
        "ours = [name for name in sys.modules if name.startswith(('megacpp_overlays.repro', 'megacpp_overlays.packs'))]\n"
        "assert not ours, ours"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "PYTHONPATH": str(ROOT)})


def test_the_manifest_is_in_step_and_every_claim_has_a_kept_log() -> None:
    folder = inventory.own_folder()

    assert [*manifest.problems(folder, OVERLAYS), *receipts.problems(folder)] == []


# Run for real


def repro(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "megacpp_overlays", "repro", *arguments]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=HANG_S)
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def sentinels(text: str) -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = re.findall(r"^([A-Z_]+): .* \(case (\S+)\)$", text, re.MULTILINE)
    return found


@pytest.mark.full
@pytest.mark.upstream
def test_pack_09_reproduces_the_defect_of_the_installed_release_and_validates_the_overlay() -> None:
    installed = version("liger-kernel")
    done = repro("9", "--case", "interpreter")

    said = ("BUG_REPRODUCED", "FIX_VALIDATED") if Version(installed) < Version("0.8.2") else ("BUG_NOT_PRESENT",)
    assert sentinels(done.stdout) == [(each, "interpreter") for each in said]
    assert re.match(rf"host: .*liger-kernel {re.escape(installed)}, .*torch 2\.", done.stdout)


@pytest.mark.full
@pytest.mark.upstream
def test_pack_09_finds_no_defect_in_a_fixed_release(wheel: Callable[[str, str], Path], tmp_path: Path) -> None:
    done = repro("9", "--case", "interpreter", "--tree", str(unpacked(wheel("liger-kernel", "0.8.5"))))

    assert sentinels(done.stdout) == [("BUG_NOT_PRESENT", "interpreter")]
    assert re.match(r"host: .*liger-kernel from --tree, .* \| tree: liger_kernel [0-9a-f]{12}\n", done.stdout)
    assert str(tmp_path) not in done.stdout


@pytest.mark.full
@pytest.mark.upstream
def test_pack_16_shows_rounded_parameters_and_misnamed_state_and_validates_both_overlays() -> None:
    done = repro("16", "--case", "mamba3-cpu", "--case", "state-names-cpu")

    assert sentinels(done.stdout) == [
        (sentinel, case)
        for case in ("mamba3-cpu", "state-names-cpu")
        for sentinel in ("BUG_REPRODUCED", "FIX_VALIDATED")
    ]


@pytest.fixture(scope="module")
def older(wheel: Callable[[str, str], Path]) -> Path:
    """Megatron-core 0.16.1."""
    return unpacked(wheel("megatron-core", "0.16.1"))


@pytest.mark.full
@pytest.mark.upstream
def test_pack_16_reproduces_the_defect_of_an_older_release_from_its_tree(older: Path) -> None:

    done = repro("16", "--case", "state-names-cpu", "--tree", str(older))

    assert sentinels(done.stdout) == [("BUG_REPRODUCED", "state-names-cpu"), ("FIX_VALIDATED", "state-names-cpu")]
    assert "megatron-core from --tree" in done.stdout


BOTH_OF_PACK_12 = [
    (sentinel, case)
    for case in ("scores-cpu", "indexer-loss-cpu")
    for sentinel in ("BUG_REPRODUCED", "MEMORY_SAVE_VERIFIED")
]


@pytest.mark.full
@pytest.mark.upstream
def test_pack_12_counts_four_axis_tensors_and_verifies_that_the_overlay_needs_none() -> None:
    done = repro("12", "--case", "scores-cpu", "--case", "indexer-loss-cpu")

    assert sentinels(done.stdout) == BOTH_OF_PACK_12
    assert "with ReLU 3 in the forward and 11 in the backward pass" in done.stdout


@pytest.mark.full
@pytest.mark.upstream
def test_pack_12_does_so_in_a_release_whose_loss_goes_through_autograd(older: Path) -> None:

    done = repro("12", "--case", "scores-cpu", "--case", "indexer-loss-cpu", "--tree", str(older))

    assert sentinels(done.stdout) == BOTH_OF_PACK_12
