"""A throw-away checkout of this package with one made-up overlay, `double-fix`, and lanes that have its upstream.

Everything is real: a git repository, hashed locks, an environment for each lane with the upstream installed in it, and
a reproducer. The loader is a copy of the one that is tested; its own overlays are left out, to keep it quick.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
import textwrap
import venv
from dataclasses import dataclass
from pathlib import Path

from made_up import BROKEN_TEXT, FIXED_TEXT
from places import ROOT

ID, VARIABLE, UPSTREAM = "double-fix", "MEGACPP_OVERLAY_DOUBLE_FIX", "made-target"
TEXTS = {"1.0": BROKEN_TEXT, "2.0": FIXED_TEXT, "3.0": BROKEN_TEXT.replace("def double", "def twice")}
"""The module of each release: broken, fixed, and without the function."""

PROBE = '''
"""What `double` returns."""

from __future__ import annotations

import ast

from megacpp_overlays.model import Body, Evidence, Finding, Proof, Verdict
from megacpp_overlays.source.trees import SourceTree


def probe(tree: SourceTree) -> Finding:
    """BROKEN when `double` adds one."""
    source = tree.module("made_target.layers")
    function = source.function("double") if source else None
    if function is None:
        return Finding(verdict=Verdict.ABSENT, shape=None, evidence=(Evidence(seen="no double"),))
    body = ast.unparse(function.body[-1])
    seen = (Evidence(seen=body),)
    if body.endswith("+ 1"):
        return Finding(verdict=Verdict.BROKEN, shape="off-by-one", evidence=seen)
    repair = (Body("made_target.layers", "double"),)
    return Finding(verdict=Verdict.FIXED, shape=None, evidence=seen, repair=repair, proof=Proof.READ)
'''
OVERLAY = '''
"""Doubles without adding one."""

from __future__ import annotations

from megacpp_overlays.feature_probes import double_fix as feature
from megacpp_overlays.kernels import doubling
from megacpp_overlays.model import Observation, Overlay, Replacement, Target, Thread


def _look(module):
    return Observation(broken=module.double(1) != 2, seen=f"double(1) = {module.double(1)}")


OVERLAY = Overlay(
    id="double-fix",
    pack=99,
    title="double without adding one",
    target=Target(distribution="made-target", module="made_target.layers", symbol="double"),
    probe=feature.probe,
    replacements={"off-by-one": (Replacement(symbol="double", make=lambda original, _: doubling.without_one(original)),)},
    unsupported={},
    witness=_look,
    self_test=_look,
    opt_in=False,
    breaks='every "double" is one too large',
    retire_when="every supported made-target doubles without adding one",
    threads=(Thread(repository="made/up", number=7, state="merged 2026-01-02, in 2.0"),),
    last_validated="never: it is made up",
)
'''
KERNEL = '''
"""Used by one overlay alone."""


def without_one(original):
    """Take one off."""
    return lambda x: original(x) - 1
'''
REPRODUCER = """
from megacpp_overlays.repro import Behaviour, Blocked, Case, TargetAbsent


def measure():
    from made_target import layers

    if not hasattr(layers, "double"):
        raise TargetAbsent("no double")
    return Behaviour(broken=layers.double(1) != 2, seen=f"double(1) = {layers.double(1)}")


CASES = (
    Case(name="double", overlay="double-fix", device="cpu", versions=(), run=measure),
    Case(name="double-on-gpu", overlay="double-fix", device="cuda", versions=(), run=measure),
)
"""
NOTES = """# Pack 99: double adds one

| | |
|---|---|
| Class | overlay |
| Lifecycle state | draft |
| Overlay | `double-fix` |

## Testing evidence
`tests/test_double_fix.py`
"""
README = """# Made up

## What is in it

| overlay | what it repairs |
|---|---|
| `double-fix` | double adds one |
| `other-fix` | something else |

## Use

`MEGACPP_OVERLAY_DOUBLE_FIX=off` switches it off.
"""
CHANGELOG = "# Changelog\n\n## [Unreleased]\n\n### Added\n\n- Something.\n\n## [0.1.0]\n\n- The start.\n"
TREE = {
    "overlays/__init__.py": '"""Overlays."""\n',
    "overlays/double_fix.py": OVERLAY,
    "feature_probes/__init__.py": '"""Probes."""\n',
    "feature_probes/double_fix.py": PROBE,
    "megacpp_overlays/kernels/doubling.py": KERNEL,
    "packs/99-double/reproduce.py": REPRODUCER,
    "packs/99-double/README.md": NOTES,
    "tests/test_double_fix.py": "from megacpp_overlays.overlays import double_fix\n",
    "tests/gpu/test_double_fix_on_gpu.py": "",
    "tests/test_all.py": 'IDS = {"double-fix"}\n',
    "README.md": README,
    "CHANGELOG.md": CHANGELOG,
    ".gitignore": "/.envs/\n__pycache__/\n",
}
THREADS = '{"threads": [{"repository": "made/up", "number": 7, "state": "merged", "checked": "2026-01-03"}]}\n'


@dataclass(frozen=True)
class Checkout:
    """The checkout, by its folder."""

    root: Path

    def write(self, files: dict[str, str]) -> None:
        """Write files, without the indentation and the first blank line that they have in a test."""
        for name, text in files.items():
            path = self.root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(textwrap.dedent(text).lstrip("\n"))

    def lane(self, name: str, release: str, *, environment: bool = True, other: str = "") -> Path:
        """Write the lock of a lane, and make an environment with a release of the upstream in it."""
        digest = hashlib.sha256(f"{release}{other}".encode()).hexdigest()
        lock = self.root / "locks" / f"{name}.txt"
        lock.parent.mkdir(exist_ok=True)
        lock.write_text(f"# lane: {name}\n{UPSTREAM}=={release} --hash=sha256:{digest}\n")
        if environment:
            make_environment(self.root / ".envs" / name, release)
        return lock

    def run(self, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run a command of the checkout's own package."""
        return self.python("-m", "megacpp_overlays", *arguments, **variables)

    def python(self, *arguments: str, interpreter: str = "", **variables: str) -> subprocess.CompletedProcess[str]:
        """Run an interpreter with the checkout's package on its path."""
        environment = {**os.environ, "PYTHONPATH": str(self.root), **variables}
        command = [interpreter or sys.executable, *arguments]
        return subprocess.run(command, cwd=self.root, env=environment, capture_output=True, text=True, check=False)

    def git(self, *arguments: str) -> str:
        """Run git with a placeholder identity."""
        command = ["git", "-c", "user.name=Nobody", "-c", "user.email=nobody@example.com", *arguments]
        done = subprocess.run(command, cwd=self.root, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def commit(self) -> None:
        """Commit everything."""
        self.git("add", "-A")
        self.git("commit", "-q", "--allow-empty", "-m", "as it is")

    @property
    def status(self) -> set[str]:
        """The files that differ from the commit, each with git's letter: `M README.md`."""
        lines = self.git("status", "--porcelain", "--untracked-files=all").splitlines()
        return {f"{line[:2].strip()} {line[3:]}" for line in lines}

    def interpreter(self, lane: str) -> str:
        """The interpreter of a lane's environment."""
        return str(self.root / ".envs" / lane / "bin" / "python")


def make_environment(folder: Path, release: str) -> None:
    """Make an environment with a release of the upstream, and the run-time dependencies of this package."""
    venv.create(folder, symlinks=True, with_pip=False)
    site = Path(sysconfig.get_path("purelib", "venv", {"base": str(folder), "platbase": str(folder)}))
    # The interpreter of the tests has the run-time dependencies.
    (site / "dependencies.pth").write_text("\n".join({sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}))
    package = site / "made_target"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "layers.py").write_text(TEXTS[release])
    metadata = site / f"made_target-{release}.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {UPSTREAM}\nVersion: {release}\n")


def make(root: Path) -> Checkout:
    """Make the checkout, without lanes and not committed."""
    made = Checkout(root)
    ignored = shutil.ignore_patterns("__pycache__", "overlays", "feature_probes", "packs", "kernels")
    shutil.copytree(ROOT / "megacpp_overlays", root / "megacpp_overlays", ignore=ignored)
    for name in ("overlays", "feature_probes", "packs"):
        (root / "megacpp_overlays" / name).symlink_to(Path("..", name))
    (root / "packs").mkdir()
    for name in ("__init__.py", "manifest.schema.json"):
        shutil.copy(ROOT / "packs" / name, root / "packs" / name)
    (root / "packs" / "threads.json").write_text(THREADS)
    made.write(TREE | {"megacpp_overlays/kernels/__init__.py": '"""Kernels."""\n'})
    (root / "megacpp_overlays" / "loader" / "retired.json").write_text("[]\n")
    made.git("init", "-q", "-b", "main")
    for arguments in (["ledger", "--write", "RETIREMENT.md"], ["receipts", "--sync"]):
        done = made.run(*arguments)
        assert done.returncode == 0, done.stderr
    return made


def copy_checkout(root: Path, to: Path) -> None:
    """Copy the files of a checkout that git tracks or would add, as they are on disk."""
    listed = Checkout(root).git("ls-files", "-z", "--cached", "--others", "--exclude-standard").split("\0")[:-1]
    for name in listed:
        if (source := root / name).is_symlink() or source.is_file():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, to / name, follow_symlinks=False)
