"""`new-overlay`: its files run at once and install nothing. They become an overlay once each TODO is written."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from made_up import install_plugin
from places import HANG_S, ROOT

from megacpp_overlays.source import DirectoryTree
from megacpp_overlays.upkeep.new_overlay import files_of_overlay
from megacpp_overlays.upkeep.new_overlay.files_of_overlay import NewOverlay

BOUNDS = '''
def clip(values: list, low: int, high: int) -> list:
    """Return the values, none of them below `low` or above `high`."""
    return [min(max(value, low), high - 1) for value in values]
'''
TARGET = "cliplib.bounds:clip"
OBSERVED = """    clipped = module.clip([9], 0, 5)
    return Observation(broken=clipped != [5], seen=f"clip([9], 0, 5) is {clipped}")
"""
MEASURED = """    clipped = module.clip([9], 0, 5)
    return Behaviour(broken=clipped != [5], seen=f"clip([9], 0, 5) is {clipped}")
"""


class Scene:
    """A folder with a broken library, and commands that run in it with the library and the new plugin on the path."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "cliplib").mkdir()
        (folder / "cliplib" / "__init__.py").touch()
        (folder / "cliplib" / "bounds.py").write_text(BOUNDS)
        self.plugin = folder / "our-fixes"

    def run(self, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
        path = os.pathsep.join(map(str, (self.folder, self.plugin, ROOT)))
        return subprocess.run(
            [sys.executable, *words],
            env={**os.environ, "PYTHONPATH": path, **variables},
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=HANG_S,
            check=False,
        )

    def new(self, *words: str) -> subprocess.CompletedProcess[str]:
        return self.run("-m", "megacpp_overlays", "new-overlay", *words)

    def command(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Run a command with the plugin, which is installed as an entry point."""
        install_plugin(self.plugin, "our_fixes.clip_upper_bound:OVERLAY", "clip-upper-bound")
        return self.run("-m", "megacpp_overlays", *words, MEGACPP_OVERLAYS_PLUGINS="clip-upper-bound")

    def replace(self, file: str, old: str, new: str) -> None:
        path = self.plugin / file
        text = path.read_text()
        assert old in text
        path.write_text(text.replace(old, new))


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return Scene(tmp_path)


@pytest.fixture
def written(scene: Scene) -> Scene:
    done = scene.new("clip-upper-bound", TARGET, "--plugin", "our-fixes")
    assert done.returncode == 0, done.stderr
    return scene


def test_a_plugin_is_written_with_the_next_step(scene: Scene) -> None:
    done = scene.new("clip-upper-bound", TARGET, "--plugin", "our-fixes")

    found = sorted(str(path.relative_to(scene.plugin)) for path in scene.plugin.rglob("*") if path.is_file())
    assert found == [
        "our_fixes/__init__.py",
        "our_fixes/clip_upper_bound.py",
        "our_fixes/clip_upper_bound_probe.py",
        "packs/90-clip-upper-bound/README.md",
        "packs/90-clip-upper-bound/neighbours.py",
        "packs/90-clip-upper-bound/pack.toml",
        "packs/90-clip-upper-bound/reproduce.py",
        "pyproject.toml",
        "tests/test_clip_upper_bound.py",
    ]
    assert "next: write the places that say TODO, the reproducer first" in done.stdout
    assert 'clip-upper-bound = "our_fixes.clip_upper_bound:OVERLAY"' in (scene.plugin / "pyproject.toml").read_text()


def test_until_it_is_written_the_defect_is_recognised_and_nothing_is_installed(written: Scene) -> None:
    files = written.command("explain", "clip-upper-bound")
    audit = written.command("audit", "clip-upper-bound")

    assert "BROKEN, shape as-found" in " ".join(files.stdout.split())
    assert audit.returncode == 1
    assert "NotImplementedError: run cliplib.bounds on the smallest input that shows the defect" in " ".join(
        audit.stdout.split()
    )


def test_until_it_is_written_its_reproducer_says_that_it_is_not(written: Scene) -> None:
    done = written.command("repro", "90", "--packs", "our-fixes/packs")

    assert done.returncode == 3
    assert "BLOCKED: the case about cliplib.bounds is not written yet" in done.stdout


def test_the_written_files_become_an_overlay_whose_own_tests_pass(written: Scene) -> None:
    overlay, reproducer = "our_fixes/clip_upper_bound.py", "packs/90-clip-upper-bound/reproduce.py"
    text = (written.plugin / overlay).read_text()
    [refusal] = [line for line in text.splitlines(keepends=True) if "raise NotImplementedError" in line]
    written.replace(overlay, refusal, OBSERVED)
    written.replace(overlay, "def clip(*arguments: Any, **named: Any)", "def clip(values: Any, low: Any, high: Any)")
    written.replace(overlay, "original(*arguments, **named)", "original(values, low, high + 1)")
    text = (written.plugin / reproducer).read_text()
    [refusal] = [line for line in text.splitlines(keepends=True) if "raise Blocked" in line]
    written.replace(reproducer, refusal, MEASURED)

    audit = written.command("audit", "clip-upper-bound")
    repro = written.command("repro", "clip-upper-bound", "--packs", "our-fixes/packs")
    tests = written.run("-m", "pytest", "-q", "-p", "no:cacheprovider", "our-fixes/tests")

    assert audit.returncode == 0, audit.stdout
    assert "here       active on " in audit.stdout
    assert repro.returncode == 0, repro.stdout
    assert tests.returncode == 0, tests.stdout
    assert "3 passed" in tests.stdout


def test_a_second_overlay_of_a_package_leaves_its_project_file_alone(written: Scene) -> None:
    before = (written.plugin / "pyproject.toml").read_text()

    done = written.new("clip-lower-bound", TARGET, "--plugin", "our-fixes")

    assert done.returncode == 0, done.stderr
    assert (written.plugin / "pyproject.toml").read_text() == before
    assert (
        'add to [project.entry-points."megacpp_overlays.overlays"] of its pyproject.toml: clip-lower-bound = '
        in done.stdout
    )
    assert (written.plugin / "packs" / "91-clip-lower-bound").is_dir()


def test_nothing_is_overwritten(written: Scene) -> None:
    path = written.plugin / "our_fixes" / "clip_upper_bound.py"
    path.write_text("mine\n")

    done = written.new("clip-upper-bound", TARGET, "--plugin", "our-fixes")

    assert done.returncode == 5
    assert "our_fixes/clip_upper_bound.py is there already" in done.stderr
    assert path.read_text() == "mine\n"


@pytest.mark.parametrize(
    ("words", "said", "code"),
    [
        (["Clip_Bound", TARGET], "'Clip_Bound' is no id", 2),
        (["scheduler-restore", TARGET], "there is an overlay scheduler-restore already", 2),
        (["clip-bound", "cliplib.bounds.clip"], "MODULE:FUNCTION or MODULE:CLASS.METHOD is wanted", 5),
        (["clip-bound", "cliplib.nothing:clip"], "cliplib.nothing is not installed here", 5),
        (["clip-bound", "cliplib.bounds:clap"], "cliplib.bounds has no function clap", 5),
        (["clip-bound", TARGET, "--tree", "nowhere"], "--tree nowhere: there is no such folder", 2),
    ],
    ids=["id", "taken", "form", "module", "symbol", "tree"],
)
def test_wrong_arguments_are_refused_and_nothing_is_written(
    scene: Scene, words: list[str], said: str, code: int
) -> None:
    done = scene.new(*words, "--plugin", "our-fixes")

    assert (done.returncode, said in done.stderr) == (code, True), done.stderr
    assert not scene.plugin.exists()


def test_files_of_this_project_are_in_its_form(scene: Scene, tmp_path: Path) -> None:
    root = tmp_path / "checkout"
    (root / "packs" / "48-scheduler-restore").mkdir(parents=True)
    new = NewOverlay(
        id="clip-upper-bound", module="cliplib.bounds", symbol="clip", distribution="cliplib", date="2026-11-27"
    )

    found = files_of_overlay.in_project(new, DirectoryTree(scene.folder), root)
    for path, text in found.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    assert sorted(str(path.relative_to(root)) for path in found) == [
        "feature_probes/clip_upper_bound.py",
        "overlays/clip_upper_bound.py",
        "packs/49-clip-upper-bound/README.md",
        "packs/49-clip-upper-bound/neighbours.py",
        "packs/49-clip-upper-bound/pack.toml",
        "packs/49-clip-upper-bound/reproduce.py",
        "tests/overlays/test_clip_upper_bound.py",
    ]
    ruff = [str(Path(sys.executable).with_name("ruff")), "format", "--check", "--config", str(ROOT / "pyproject.toml")]
    done = subprocess.run([*ruff, str(root)], capture_output=True, text=True, timeout=HANG_S, check=False)
    assert done.returncode == 0, done.stdout


def test_the_pattern_is_the_code_without_parts_that_patterns_ignore(scene: Scene) -> None:
    source = DirectoryTree(scene.folder).module("cliplib.bounds")
    assert source is not None

    assert files_of_overlay.pattern_of(source, "clip") == (
        "def clip(values, low, high):\n    return [min(max(value, low), high - 1) for value in values]"
    )
