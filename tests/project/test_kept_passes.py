"""Kept passes: the tests of a file run again exactly where something that they are made of has changed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import kept_answers
import kept_passes
import pytest
from places import SUPPORT

CONFTEST = """
from pathlib import Path
import places
places.ROOT = Path(__file__).parents[1]
places.SUPPORT = places.ROOT / "tests/support"
import passes_plugin

def pytest_addoption(parser):
    parser.addoption("--upstream-tree", action="append", default=[])
    passes_plugin.add_options(parser)

def pytest_configure(config):
    config.pluginmanager.register(passes_plugin.plugin(config))
"""
TEST = """
from pathlib import Path
import cases
import pytest

def imports():
    from megacpp_overlays.overlays import scale_pad
    from megacpp_overlays.runtime import used

CODE = "from megacpp_overlays.runtime import started"

def test_one():
    assert Path(__file__).with_name("numbers.txt").read_text() == "1"

def test_two():
    pass

@pytest.mark.full
def test_weekly():
    raise AssertionError
"""
FILES = {
    "pyproject.toml": "[tool.pytest.ini_options]\nmarkers = ['full']",
    "locks/dev.txt": "",
    "megacpp_overlays/__init__.py": "import megacpp_overlays.loader",
    "megacpp_overlays/loader.py": "",
    "megacpp_overlays/runtime/__init__.py": "",
    "megacpp_overlays/runtime/used.py": "",
    "megacpp_overlays/runtime/started.py": "",
    "megacpp_overlays/runtime/other.py": "",
    "megacpp_overlays/kernels/__init__.py": "",
    "megacpp_overlays/kernels/sums.py": "",
    "megacpp_overlays/kernels/other.py": "",
    "megacpp_overlays/overlays/__init__.py": "",
    "megacpp_overlays/overlays/scale_pad.py": "from megacpp_overlays.feature_probes import scale_pad\nimport megacpp_overlays.kernels.sums",
    "megacpp_overlays/overlays/by_id.py": "",
    "megacpp_overlays/overlays/other.py": "",
    "megacpp_overlays/feature_probes/__init__.py": "",
    "megacpp_overlays/feature_probes/scale_pad.py": "",
    "megacpp_overlays/feature_probes/other.py": "",
    "packs/01-scale-pad/reproduce.py": "OVERLAY = 'scale-pad'",
    "packs/01-scale-pad/pack.toml": "",
    "packs/02-other/reproduce.py": "OVERLAY = 'other'",
    "tests/conftest.py": CONFTEST,
    "tests/stand_ins/tree/module.py": "",
    "tests/support/cases.py": "SWITCHED = 'MEGACPP_OVERLAY_BY_ID'",
    "tests/support/stranger.py": "",
    "tests/support/warm_server.py": "",
    "tests/overlays/test_scale_pad.py": TEST,
    "tests/overlays/numbers.txt": "1",
    "tests/overlays/test_all.py": "def test_it():\n    pass",
    "tests/loader/test_loader.py": "def test_it():\n    pass\n\ndef imports():\n    import megacpp_overlays.overlays.scale_pad",
    "README.md": "",
}
FILE = "tests/overlays/test_scale_pad.py"
OUTSIDE = {
    "megacpp_overlays/runtime/other.py",
    "megacpp_overlays/kernels/other.py",
    "megacpp_overlays/overlays/other.py",
    "megacpp_overlays/feature_probes/other.py",
    "packs/02-other/reproduce.py",
    "tests/support/stranger.py",
    "tests/overlays/numbers.txt",
    "tests/overlays/test_all.py",
    "tests/loader/test_loader.py",
    "README.md",
}
"""Files that a run has to see opened before the key of the file has them, and those that it never has."""


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    for module in (kept_answers, kept_passes):
        monkeypatch.setattr(module, "ROOT", tmp_path)
    monkeypatch.setattr(kept_answers, "SUPPORT", tmp_path / "tests/support")
    return tmp_path


def forget() -> None:
    for each in [*vars(kept_answers).values(), *vars(kept_passes).values()]:
        if hasattr(each, "cache_clear"):
            each.cache_clear()


@pytest.fixture(autouse=True)
def _nothing_remembered() -> None:
    forget()


def key(*opened: str) -> str:
    forget()
    return kept_passes.key_of(FILE, opened)


@pytest.mark.parametrize("name", FILES)
def test_the_key_changes_with_these_files_and_with_no_other(checkout: Path, name: str) -> None:
    before = key()
    (checkout / name).write_text(FILES[name] + "\n# edited")

    assert (key() == before) is (name in OUTSIDE)


def test_a_file_that_its_tests_opened_is_part_of_the_key(checkout: Path) -> None:
    before = key("tests/overlays/numbers.txt")
    (checkout / "tests/overlays/numbers.txt").write_text("2")

    assert key("tests/overlays/numbers.txt") != before


@pytest.mark.parametrize("name", ["nvidia-smi", ".envs/te/.ready"])
def test_a_host_that_skips_fewer_tests_has_another_key(
    checkout: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(checkout))
    before = key()
    (checkout / name).parent.mkdir(parents=True, exist_ok=True)
    (checkout / name).touch(mode=0o755)

    assert key() != before


def test_a_file_in_overlays_or_kernels_is_kept_if_it_names_its_subject(checkout: Path) -> None:
    named = {name for name in FILES if Path(name).name.startswith("test_") and kept_passes.can_be_kept(name)}

    assert named == {FILE}


def pytest_in(checkout: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", "-m", "pytest", "-p", "no:cacheprovider", "-q", "-m", "not full", *words]
    env = {**os.environ, "PYTHONPATH": f"{SUPPORT}:{SUPPORT.parents[1]}:{checkout}/tests/support"}
    return subprocess.run(command, cwd=checkout, env=env, capture_output=True, text=True, check=False)


def test_a_passed_file_is_left_out_until_one_of_its_inputs_changes(checkout: Path) -> None:
    first = pytest_in(checkout, "--keep", "-n", "2")
    again = pytest_in(checkout, "--kept", "-n", "2")
    listed = pytest_in(checkout, "--kept", "--collect-only")
    (checkout / "tests/overlays/numbers.txt").write_text("2")
    changed = pytest_in(checkout, "--kept")

    assert "4 passed" in first.stdout, first.stdout + first.stderr
    assert json.loads((checkout / "tests/answers/passed.json").read_text())[FILE]["tests"] == 2
    assert "2 passed" in again.stdout, again.stdout + again.stderr
    assert "2 tests of 1 files did not run" in again.stdout
    assert "deselected" not in listed.stdout, "a file that is kept was imported"
    assert "1 failed, 3 passed" in changed.stdout, changed.stdout + changed.stderr


def test_a_file_with_a_test_that_fails_is_not_kept(checkout: Path) -> None:
    (checkout / "tests/overlays/numbers.txt").write_text("2")

    pytest_in(checkout, "--keep")

    assert json.loads((checkout / "tests/answers/passed.json").read_text()) == {}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--keep", f"{FILE}::test_one"), "whole files"),
        (("--keep", "-x", "-k", "one"), "whole files"),
        (("--kept", "-m", ""), "give -m 'not full'"),
    ],
)
def test_a_run_of_other_tests_than_those_that_are_kept_is_refused(
    checkout: Path, words: tuple[str, ...], said: str
) -> None:
    done = pytest_in(checkout, *words)

    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert said in done.stderr
    assert not (checkout / "tests/answers/passed.json").exists()


def test_with_a_tree_of_upstream_every_file_runs(checkout: Path) -> None:
    pytest_in(checkout, "--keep")

    done = pytest_in(checkout, "--kept", "--upstream-tree", ".")

    assert "4 passed" in done.stdout, done.stdout + done.stderr
