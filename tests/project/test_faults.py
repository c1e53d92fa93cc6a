"""The table of planted faults, and the script that plants them and reports the faults that no test noticed."""

from __future__ import annotations

import ast
import importlib.util
import os
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from made_up_checkout import Checkout, copy_checkout
from places import HANG_S, ROOT

SCRIPT = ROOT / "scripts" / "plant_faults.py"
KINDS = (
    "probe",
    "seam",
    "self-test",
    "witness",
    "kernel in PyTorch",
    "kernel in Triton",
    "loader",
    "settings",
    "audit",
    "processes",
    "source",
    "command line",
    "repro",
    "upkeep",
    "generated page",
    "packaging",
    "lock",
    "manifest",
    "known findings",
    "matrix.json",
)
"""Parts of the project that have at least one fault; a kind may say more behind a colon."""
FEWEST = 40


def loaded() -> ModuleType:
    """Return the script as a module."""
    spec = importlib.util.spec_from_file_location("plant_faults", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where its data classes look for their annotations
    spec.loader.exec_module(module)
    return module


plant_faults: Any = loaded()
FAULTS = plant_faults.read(plant_faults.TABLE)
each_fault = pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.id)


def functions(path: str) -> dict[str, ast.FunctionDef]:
    """Return the functions of a file of tests."""
    return {node.name: node for node in ast.parse((ROOT / path).read_text()).body if isinstance(node, ast.FunctionDef)}


def marks(path: str, name: str) -> set[str]:
    """Return which marks a function of tests has, or its whole file; those of single parameters are not meant."""
    of_file = [
        ast.unparse(each)
        for node in ast.parse((ROOT / path).read_text()).body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark"
        for each in (node.value.elts if isinstance(node.value, ast.List | ast.Tuple) else [node.value])
    ]
    own = map(ast.unparse, functions(path)[name].decorator_list)
    return {each.removeprefix("pytest.mark.") for each in (*of_file, *own)}


@each_fault
def test_a_fault_fits_its_file(fault: Any) -> None:
    text = (ROOT / fault.file).read_bytes().decode()

    assert fault.planted(text) != text
    if fault.file.endswith(".py"):
        ast.parse(fault.planted(text))  # no fault of the language: any test would notice that


@each_fault
def test_faults_are_noticed_by_tests_without_the_mark_full(fault: Any) -> None:
    assert bool(fault.caught_by) != bool(fault.command)
    for node_id in fault.caught_by:
        path, _, name = node_id.partition("::")
        name = name.partition("[")[0]
        assert name in functions(path), f"{path} has no {name}"
        assert marks(path, name).isdisjoint({"full", "gpu"}), f"{name} is not part of `make test`"


def test_there_are_faults_of_every_kind() -> None:
    kinds = {fault.kind.partition(":")[0] for fault in FAULTS}

    assert [kind for kind in KINDS if kind not in kinds] == []
    assert len(FAULTS) >= FEWEST
    assert [name for name, times in Counter(fault.id for fault in FAULTS).items() if times > 1] == []


# The script


DOUBLE = "def double(x):\n    return 2 * x\n\n\ndef half(x):\n    return x / 2\n"
TEST = """
import double
import pytest

def test_double():
    assert double.double(3) == 6

@pytest.mark.full
def test_half():
    assert double.half(6) == 3
"""
TABLE = """
[[fault]]
id = "triples"
kind = "made up"
file = "double.py"
old = "2 * x"
new = "3 * x"
caught_by = ["test_double.py::test_double"]

[[fault]]
id = "thirds"
kind = "made up"
file = "double.py"
old = "x / 2"
new = "x / 3"
caught_by = ["test_double.py"]

[[fault]]
id = "cannot-be-imported"
kind = "made up"
file = "double.py"
old = "def double(x):"
new = "def double(x:"
caught_by = ["test_double.py"]

[[fault]]
id = "cannot-be-imported-and-says-so"
kind = "made up"
file = "double.py"
old = "def double(x):"
new = "def double(x:"
caught_by = ["test_double.py"]
breaks_import = true

[[fault]]
id = "by-a-command"
kind = "made up"
file = "double.py"
old = "x / 2"
new = "x / 3"
command = "grep -q 'x / 2' double.py"

[[fault]]
id = "only-of-the-full-run"
kind = "made up"
file = "double.py"
old = "x / 2"
new = "x / 3"
caught_by = ["test_double.py::test_half"]
"""


@pytest.fixture
def made_up(tmp_path: Path) -> Iterator[Checkout]:
    """A checkout of one function with a table of faults; it is as it was committed afterwards."""
    checkout = Checkout(tmp_path / "made-up")
    checkout.write(
        {
            "double.py": DOUBLE,
            "test_double.py": TEST,
            "pytest.ini": "[pytest]\nmarkers =\n    full\n    gpu\n",
            "conftest.py": "def pytest_addoption(parser):\n    parser.addoption('--kept', action='store_true')\n",
            ".gitignore": "/.venv\n__pycache__\n",
            "tests/faults.toml": TABLE,
            "scripts/plant_faults.py": SCRIPT.read_text(),
        }
    )
    checkout.git("init", "-q")
    checkout.commit()
    (checkout.root / ".venv").symlink_to(ROOT / ".venv")
    yield checkout
    assert checkout.status == set()


def planted(checkout: Checkout, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "scripts/plant_faults.py", *words]
    environment = {**os.environ, **variables}
    return subprocess.run(
        command, cwd=checkout.root, env=environment, capture_output=True, text=True, timeout=HANG_S, check=False
    )


def test_a_noticed_fault_is_a_row_with_its_test_and_an_unnoticed_one_fails(made_up: Checkout, tmp_path: Path) -> None:
    before = (made_up.root / "double.py").stat().st_mtime_ns
    chosen = [word for name in ("triples", "thirds", "by-a-command") for word in ("--only", name)]
    done = planted(made_up, *chosen, "--write", str(tmp_path / "table.md"))

    assert done.returncode == 1
    first, second, third = done.stdout.splitlines()[2:]
    assert first.startswith("| triples | made up | `test_double.py::test_double` | ")
    assert second.startswith("| thirds | made up | **nothing** (exit 0) | ")
    assert third.startswith("| by-a-command | made up | `grep -q 'x / 2' double.py` | ")
    assert "nothing notices thirds" in done.stderr
    assert "2 of 3 faults noticed" in done.stderr
    assert (tmp_path / "table.md").read_text() == done.stdout
    assert (made_up.root / "double.py").stat().st_mtime_ns == before


def test_where_everything_is_noticed_it_is_content(made_up: Checkout) -> None:
    assert planted(made_up, "--only", "by-a-command").returncode == 0


@pytest.mark.full
def test_tests_that_cannot_be_collected_notice_nothing_unless_that_is_said(made_up: Checkout) -> None:
    done = planted(made_up, "--only", "cannot-be-imported")

    assert done.returncode == 1
    assert "| cannot-be-imported | made up | **nothing** (exit 2) |" in done.stdout
    assert planted(made_up, "--only", "cannot-be-imported-and-says-so").returncode == 0


@pytest.mark.full
def test_a_test_that_is_not_of_every_day_is_refused(made_up: Checkout) -> None:
    done = planted(made_up, "--only", "only-of-the-full-run")

    assert done.returncode == 1
    assert "red without a fault" in done.stderr
    assert "1 deselected" in done.stderr


def test_work_that_is_not_committed_is_refused_and_kept(made_up: Checkout) -> None:
    file = made_up.root / "double.py"
    file.write_text(DOUBLE + "# not committed\n")
    done = planted(made_up, "--only", "triples")

    assert done.returncode == 1
    assert done.stderr == "triples: double.py is not as it was committed\n"
    assert file.read_text() == DOUBLE + "# not committed\n"
    file.write_text(DOUBLE)


def test_a_fault_that_is_not_there_is_refused(made_up: Checkout) -> None:
    done = planted(made_up, "--only", "triples", "--only", "quadruples")

    assert done.returncode == 1
    assert done.stderr == "there is no fault quadruples\n"


def test_who_stops_it_finds_the_file_as_it_was(made_up: Checkout) -> None:
    began = made_up.root / "began"
    made_up.write({"wait.sh": "grep -q 'x / 2' double.py || { touch began; sleep 600; }\n"})
    made_up.write({"tests/faults.toml": TABLE.replace("grep -q 'x / 2' double.py", "sh wait.sh")})
    made_up.commit()
    command = [sys.executable, "scripts/plant_faults.py", "--only", "by-a-command"]
    process = subprocess.Popen(command, cwd=made_up.root, stdout=subprocess.DEVNULL)
    while not began.exists():
        assert process.poll() is None
        time.sleep(0.01)
    assert made_up.status == {"M double.py", "?? began"}

    process.terminate()

    assert process.wait(HANG_S) == 128 + 15
    began.unlink()


@pytest.mark.full
def test_two_faults_of_this_project_are_noticed(tmp_path: Path) -> None:
    """In a copy: other tests run in the checkout meanwhile."""
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    copy = Checkout(tmp_path / "copy")
    copy_checkout(ROOT, copy.root)
    copy.git("init", "-q")
    copy.commit()
    (copy.root / ".venv").symlink_to(ROOT / ".venv")
    chosen = [fault.id for fault in FAULTS if fault.kind in {"settings", "loader: decision"}][:2]
    done = planted(copy, *(word for name in chosen for word in ("--only", name)), PYTHONPATH=str(copy.root))

    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 of 2 faults noticed" in done.stderr
    assert copy.status == {"?? .venv"}
    shutil.rmtree(copy.root)
