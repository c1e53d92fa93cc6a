"""A checkout of Megatron-LM that the user gives: its version and commit, and a copy of it to launch from.

Nothing is written into the checkout: Megatron compiles a module into its own folder before the first step.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import shutil
import subprocess
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from processes import ProofError

LAUNCHER = "pretrain_hybrid.py"
NEEDED = (LAUNCHER, "hybrid_builders.py", "model_provider.py", "megatron/core/package_info.py", "megatron/training")
TESTS = "tests/unit_tests/transformer/experimental_attention_variant"
HELPERS = "megatron/core/datasets/helpers"
WAY_OUT = "give a checkout of https://github.com/NVIDIA/Megatron-LM, such as one of the tag core_v0.19.0"


@dataclass(frozen=True)
class Checkout:
    """A copy of a checkout, ready to be launched from."""

    folder: Path
    version: str
    """Of its megatron.core, as its package says."""
    commit: str
    """Of its files, or a hash of its launcher and its core where git does not know it."""
    launcher_sha256: str


def copied(given: Path, folder: Path) -> Checkout:
    """Copy the files that a launch needs from a checkout into an empty folder, and compile the module that Megatron would compile.

    Raises:
        ProofError: it is no checkout with this launcher, or there is no C++ compiler for its module.
    """
    if missing := [name for name in NEEDED if not (given / name).exists()]:
        raise ProofError(f"{given} has no {', '.join(missing)}: {WAY_OUT}")
    for path in given.glob("*.py"):
        shutil.copy(path, folder)
    shutil.copytree(given / "megatron", folder / "megatron", ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    if (given / TESTS).is_dir():
        shutil.copytree(
            given / "tests", folder / "tests", ignore=shutil.ignore_patterns("__pycache__", "functional_tests")
        )
    _compile(folder / HELPERS)
    launcher = (given / LAUNCHER).read_bytes()
    return Checkout(folder, _version(given), _commit(given), hashlib.sha256(launcher).hexdigest())


def ready_for_tests(folder: Path, given: Path) -> None:
    """Let the unit tests of a copy be collected here.

    Raises:
        ProofError: the checkout has none.
    """
    if not (folder / TESTS).is_dir():
        raise ProofError(f"{given} has no {TESTS}: {WAY_OUT}")
    (folder / "pytest.ini").write_text(
        "[pytest]\n"
    )  # neither their settings nor those of a checkout around this folder
    if importlib.util.find_spec("requests") is None:
        (folder / "requests.py").write_text("")  # their conftest fetches data with it, which these tests do without


def _compile(stem: Path) -> None:
    """Compile the index builder of datasets as Megatron's Makefile does, for the Python that is launched."""
    torch = importlib.util.find_spec("torch")
    if torch is None or torch.origin is None:
        raise ProofError(
            "there is no torch to launch Megatron with: `make proof-cpu` sets up .envs/proof, which has it"
        )
    made = stem.with_name(f"{stem.name}_cpp{sysconfig.get_config_var('EXT_SUFFIX')}")
    folders = [Path(torch.origin).parent / "include", sysconfig.get_path("include")]  # torch brings pybind11's headers
    command = ["c++", "-O3", "-shared", "-std=c++17", "-fPIC", *(f"-I{each}" for each in folders)]
    try:
        done = subprocess.run([*command, f"{stem}.cpp", "-o", str(made)], capture_output=True, text=True, check=False)
    except FileNotFoundError as error:
        raise ProofError(f"there is no c++ on PATH to compile {stem.name}.cpp of Megatron: install one") from error
    (stem.parent / "Makefile").write_text(
        "default:\n"
    )  # it would compile for the python3 on PATH, which can be another
    if done.returncode:
        raise ProofError(f"{stem.name}.cpp of Megatron does not compile:\n{done.stderr[-2000:]}")


def _version(given: Path) -> str:
    """Return the version that `package_info.py` puts together, read without running it."""
    parts: dict[str, object] = {}
    for node in ast.parse((given / "megatron/core/package_info.py").read_text()).body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
            parts |= {each.id: node.value.value for each in node.targets if isinstance(each, ast.Name)}
    return ".".join(str(parts.get(name, "?")) for name in ("MAJOR", "MINOR", "PATCH")) + str(
        parts.get("PRE_RELEASE", "")
    )


def _commit(given: Path) -> str:
    try:
        found = subprocess.run(
            ["git", "-C", str(given), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"],  # noqa: S607
            capture_output=True,
            text=True,
            check=False,
        )
    except FileNotFoundError:
        found = None
    top = None if found is None or found.returncode else found.stdout.strip()
    return top if top and (given / ".git").exists() else f"no commit; SHA-256 of its Python files {_digest(given)}"


def _digest(given: Path) -> str:
    """Return a hash of every Python file that is copied, with its path."""
    files = [*given.glob("*.py"), *(given / "megatron").rglob("*.py")]
    found = hashlib.sha256()
    for path in sorted(files):
        found.update(f"{path.relative_to(given)}\0".encode() + path.read_bytes() + b"\0")
    return found.hexdigest()
