"""Source checkouts and editable installs against their commit, in real repositories."""

from __future__ import annotations

import hashlib
import os
import py_compile
import shutil
import subprocess
import sys
import uuid
import venv
from collections.abc import Mapping
from pathlib import Path

import pytest
from drift_environments import install, installed_in, make_wheel, without_pythonpath
from made_up import Upstream
from places import ROOT
from repositories import commit_all, git

from megacpp_overlays.repro.git import GitError
from megacpp_overlays.upkeep.drift import checkouts, drift
from megacpp_overlays.upkeep.drift.drift import DriftState
from megacpp_overlays.upkeep.drift.records import Kind


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A repository with a package below `src`, committed."""
    folder = tmp_path / "checkout"
    package = folder / "src" / "lab_ops"
    (package / "inner").mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "scale.py").write_text("def scale(x):\n    return 2 * x\n")
    (package / "inner" / "__init__.py").write_text("")
    (package / "linked.py").symlink_to("scale.py")
    (folder / ".gitignore").write_text("*.so\n__pycache__/\n")
    (folder / "notes.txt").write_text("next to the package\n")
    commit_all(folder)
    return folder


def differences(folder: Path) -> Mapping[str, Kind]:
    base = folder / "src"
    return {each.file: each.kind for each in checkouts.compare([base / "lab_ops"], base).files.differences}


def test_a_work_tree_as_committed_is_clean_and_named_by_its_commit(checkout: Path) -> None:
    found = checkouts.compare([checkout / "src" / "lab_ops"], checkout / "src")

    assert found.commit == git(checkout, "rev-parse", "HEAD")
    assert found.top == checkout
    assert (found.files.checked, found.files.differences) == (4, ())


def test_modified_missing_and_untracked_files_of_the_package_are_named_and_no_others(checkout: Path) -> None:
    package = checkout / "src" / "lab_ops"
    (package / "scale.py").write_text("def scale(x):\n    return 3 * x\n")
    (package / "inner" / "__init__.py").unlink()
    (package / "hot" / "deep").mkdir(parents=True)
    (package / "hot" / "deep" / "fix.py").write_text("")
    (package / "built.so").write_text("the repository ignores it")
    (package / "old.pyc").write_text("bytecode that needs no source")
    (package / "older.pyo").write_text("bytecode that no Python reads")
    (checkout / "notes.txt").write_text("other notes\n")
    (checkout / "scratch.py").write_text("")

    assert differences(checkout) == {
        "lab_ops/hot/deep/fix.py": Kind.ADDED,
        "lab_ops/inner/__init__.py": Kind.MISSING,
        "lab_ops/old.pyc": Kind.ADDED,
        "lab_ops/scale.py": Kind.CHANGED,
    }


@pytest.mark.parametrize("how", ["staged", "assume-unchanged", "skip-worktree", "same size and time"])
def test_no_state_of_the_index_hides_a_change(checkout: Path, how: str) -> None:
    path = checkout / "src" / "lab_ops" / "scale.py"
    before = path.stat()
    if how in {"assume-unchanged", "skip-worktree"}:
        git(checkout, "update-index", f"--{how}", str(path))
    path.write_text("def scale(x):\n    return 3 * x\n")
    if how == "staged":
        git(checkout, "add", str(path))
    if how == "same size and time":
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))

    assert differences(checkout) == {"lab_ops/scale.py": Kind.CHANGED}


@pytest.mark.parametrize("where", ["info/exclude", "core.excludesFile", ".gitignore"])
def test_code_that_git_ignores_counts_as_added(checkout: Path, tmp_path: Path, where: str) -> None:
    package = checkout / "src" / "lab_ops"
    rules = {
        "info/exclude": checkout / ".git" / "info" / "exclude",
        "core.excludesFile": tmp_path / "rules",
        ".gitignore": checkout / ".gitignore",
    }[where]
    rules.write_text("hot*\n*.so\n__pycache__/\n")
    git(checkout, "config", "core.excludesFile", str(tmp_path / "rules"))
    (package / "hot.py").write_text("")
    (package / "hot_folder").mkdir()
    (package / "hot_folder" / "fix.py").write_text("")
    (package / "hot_link").symlink_to(tmp_path)
    (package / "built.so").write_text("built here")
    (package / "__pycache__").mkdir()
    py_compile.compile(str(package / "hot.py"), cfile=str(package / "__pycache__" / "hot.cpython-312.pyc"))
    mode = py_compile.PycInvalidationMode.UNCHECKED_HASH
    cached = package / "__pycache__" / "scale.cpython-312.pyc"
    py_compile.compile(str(package / "hot.py"), cfile=str(cached), invalidation_mode=mode)

    names = ("__pycache__/scale.cpython-312.pyc", "hot.py", "hot_folder/fix.py", "hot_link")
    assert differences(checkout) == {f"lab_ops/{name}": Kind.ADDED for name in names}


@pytest.mark.parametrize("where", ["info/attributes", "core.attributesFile", ".gitattributes"])
def test_no_filter_hides_a_change(checkout: Path, tmp_path: Path, where: str) -> None:
    rules = {
        "info/attributes": checkout / ".git" / "info" / "attributes",
        "core.attributesFile": tmp_path / "rules",
        ".gitattributes": checkout / ".gitattributes",
    }[where]
    rules.write_text("*.py filter=as-committed\n")
    git(checkout, "config", "core.attributesFile", str(tmp_path / "rules"))
    program = f"touch {tmp_path}/ran; git show HEAD:src/lab_ops/scale.py"
    git(checkout, "config", "filter.as-committed.clean", program)
    (checkout / "src" / "lab_ops" / "scale.py").write_text("def scale(x):\n    return 3 * x\n")

    assert differences(checkout)["lab_ops/scale.py"] is Kind.CHANGED
    assert not (tmp_path / "ran").exists()


def test_a_changed_submodule_is_named_and_its_filters_are_not_run(checkout: Path, tmp_path: Path) -> None:
    package, ran = checkout / "src" / "lab_ops", tmp_path / "ran"
    git(checkout, "-c", "protocol.file.allow=always", "submodule", "--quiet", "add", str(checkout), "src/lab_ops/third")
    git(checkout, "commit", "--quiet", "--message", "a submodule")
    assert differences(checkout) == {}
    git(package / "third", "config", "filter.a.clean", f"touch {ran}; cat")
    (package / "third" / ".gitattributes").write_text("* filter=a\n")
    (package / "third" / "notes.txt").write_text("another text\n")

    assert differences(checkout) == {"lab_ops/third": Kind.CHANGED}
    assert not ran.exists()


def test_converted_line_ends_and_large_files_are_no_change(checkout: Path) -> None:
    package = checkout / "src" / "lab_ops"
    content = b"a large table"
    oid = hashlib.sha256(content).hexdigest()
    pointer = f"version https://git-lfs.github.com/spec/v1\noid sha256:{oid}\nsize {len(content)}\n"
    (package / "table.bin").write_text(pointer)
    (checkout / "pointer").write_text(pointer)
    (checkout / ".gitattributes").write_text("*.bin filter=large\n")
    git(checkout, "add", "--all")
    git(checkout, "commit", "--quiet", "--message", "a large file")
    git(checkout, "config", "filter.large.clean", f"cat {checkout}/pointer")
    git(checkout, "config", "core.autocrlf", "true")
    (package / "table.bin").write_bytes(content)
    (package / "scale.py").write_bytes((package / "scale.py").read_bytes().replace(b"\n", b"\r\n"))

    assert differences(checkout) == {}
    (package / "table.bin").write_bytes(b"another table")
    assert differences(checkout) == {"lab_ops/table.bin": Kind.CHANGED}


def test_a_link_that_became_a_file_is_changed_and_a_mode_is_no_content(checkout: Path) -> None:
    package = checkout / "src" / "lab_ops"
    (package / "linked.py").unlink()
    (package / "linked.py").write_text("def scale(x):\n    return 2 * x\n")
    (package / "scale.py").chmod(0o755)

    assert differences(checkout) == {"lab_ops/linked.py": Kind.CHANGED}


def test_a_link_that_leads_out_of_a_checkout_is_named_and_its_target_is_not_read(
    checkout: Path, tmp_path: Path
) -> None:
    package = checkout / "src" / "lab_ops"
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "__init__.py").write_text("")  # as it is committed in the folder that is replaced
    (tmp_path / "outside" / "secret.py").write_text("token = 'hidden'\n")
    (package / "hot.py").symlink_to(tmp_path / "outside" / "secret.py")
    shutil.rmtree(package / "inner")
    (package / "inner").symlink_to(tmp_path / "outside")

    found = checkouts.compare([package], checkout / "src").files.differences

    assert {each.file: each.kind for each in found} == {
        "lab_ops/hot.py": Kind.ADDED,
        "lab_ops/inner": Kind.ADDED,
        "lab_ops/inner/__init__.py": Kind.MISSING,
    }
    written = {each.file: each.sha256 for each in found}
    assert written["lab_ops/hot.py"] == hashlib.sha256(os.fsencode(tmp_path / "outside" / "secret.py")).hexdigest()
    assert written["lab_ops/inner"] == hashlib.sha256(os.fsencode(tmp_path / "outside")).hexdigest()


def test_a_comparison_changes_nothing_in_the_repository(checkout: Path) -> None:
    (checkout / "src" / "lab_ops" / "scale.py").write_text("")
    index = (checkout / ".git" / "index").read_bytes()
    hook = checkout / ".git" / "hooks" / "post-index-change"
    hook.write_text(f"#!/bin/sh\ntouch {checkout}/hook-ran\n")
    hook.chmod(0o755)

    differences(checkout)

    assert (checkout / ".git" / "index").read_bytes() == index
    assert not (checkout / "hook-ran").exists()


def test_variables_of_a_hook_do_not_lead_to_another_repository(
    checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "file").write_text("")
    commit_all(tmp_path / "other")
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "other" / ".git"))

    assert differences(checkout) == {}


def test_a_folder_that_no_commit_has_is_no_checkout(checkout: Path, tmp_path: Path) -> None:
    ignored = checkout / "environment" / "lab_ops"  # as site-packages of an environment inside a checkout
    ignored.mkdir(parents=True)
    (ignored / "__init__.py").write_text("")
    (tmp_path / "nowhere").mkdir()

    with pytest.raises(GitError, match=r"is a work tree, but its commit has nothing of environment/lab_ops"):
        checkouts.compare([ignored], ignored.parent)
    with pytest.raises(GitError, match="git rev-parse: fatal: not a git repository"):
        checkouts.compare([tmp_path / "nowhere"], tmp_path / "nowhere")


def test_a_host_without_git_says_so(checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))

    with pytest.raises(GitError, match="git is not installed here"):
        differences(checkout)
    (tmp_path / "git").write_text("no program")
    with pytest.raises(GitError, match=r"git rev-parse did not answer: .*Permission denied"):
        differences(checkout)


# Distributions that the import system finds


def editable(checkout: Path, target: Path, *, top_level: bool = True) -> None:
    """Install a checkout as an editable install does: a path file, and a note of where it came from."""
    info = target / "lab_ops-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: lab-ops\nVersion: 1.0\n")
    (info / "RECORD").write_text("lab_ops-1.0.dist-info/RECORD,,\n")
    (info / "direct_url.json").write_text(f'{{"url": "{checkout.as_uri()}", "dir_info": {{"editable": true}}}}')
    if top_level:
        (info / "top_level.txt").write_text("lab_ops\n")


def test_an_editable_install_is_its_commit(checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    editable(checkout, tmp_path / "target")
    monkeypatch.syspath_prepend(checkout / "src")
    installed = installed_in(tmp_path / "target", monkeypatch)
    commit = git(checkout, "rev-parse", "HEAD")

    assert drift.examine(["lab-ops"], installed, ()).clean
    (checkout / "src" / "lab_ops" / "scale.py").write_text("")
    (row,) = drift.examine(["lab-ops"], installed, ()).rows

    assert row.where == f"commit {commit[:12]} of {checkout}"
    assert row.restore == f"git -C {checkout} stash --include-untracked"
    assert [(each.file, each.kind) for each in row.differences] == [("lab_ops/scale.py", Kind.CHANGED)]


def test_an_editable_install_that_names_no_package_is_compared_as_a_whole(
    checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    editable(checkout, tmp_path / "target", top_level=False)
    (checkout / "notes.txt").write_text("other notes\n")

    (row,) = drift.examine(["lab-ops"], installed_in(tmp_path / "target", monkeypatch), ()).rows

    assert [each.file for each in row.differences] == ["notes.txt"]


def test_a_checkout_with_its_metadata_next_to_it_is_its_commit(
    checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = checkout / "src" / "lab_ops.egg-info"
    info.mkdir()
    (info / "PKG-INFO").write_text("Metadata-Version: 2.1\nName: lab-ops\nVersion: 1.0\n")
    (info / "top_level.txt").write_text("lab_ops\n")
    installed = installed_in(checkout / "src", monkeypatch)

    (committed,) = drift.examine(["lab-ops"], installed, ()).rows
    (checkout / ".git").rename(tmp_path / "no longer a repository")
    (unknown,) = drift.examine(["lab-ops"], installed, ()).rows

    assert (committed.state, committed.where.partition(" ")[0]) == (DriftState.CLEAN, "commit")
    assert (unknown.state, unknown.unchecked) == (DriftState.UNCHECKED, ("it was installed without a RECORD",))


def test_a_release_and_a_checkout_that_shadows_it_are_both_compared(
    checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_wheel(tmp_path / "wheels", "lab_ops", "1.0", {"lab_ops/__init__.py": "", "lab_ops/scale.py": "S = 1\n"})
    install(tmp_path / "target", "lab_ops", find_links=tmp_path / "wheels")
    installed = installed_in(tmp_path / "target", monkeypatch)
    monkeypatch.syspath_prepend(checkout / "src")

    rows = drift.examine(["lab-ops"], installed, ()).rows

    assert [row.where.partition(" ")[0] for row in rows] == ["RECORD", "commit"]
    assert [row.state for row in rows] == [DriftState.CLEAN, DriftState.CLEAN]


def test_a_target_that_is_not_installed_is_found_where_it_is_imported_from(upstream: Upstream) -> None:
    upstream.write("def double(x):\n    return x\n")
    overlay = upstream.overlay()
    name = overlay.target.distribution.replace("_", "-")

    (before,) = drift.examine([name], {}, [overlay]).rows
    commit = commit_all(upstream.folder)
    (after,) = drift.examine([name], {}, [overlay]).rows

    assert before.state is DriftState.UNCHECKED
    assert (after.state, after.version, after.where) == (
        DriftState.CLEAN,
        None,
        f"commit {commit[:12]} of {upstream.folder.resolve()}",
    )
    assert upstream.name not in sys.modules


@pytest.fixture(scope="session")
def environment(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A real virtual environment with a real editable install of a real checkout; its Python, and the checkout."""
    folder = tmp_path_factory.mktemp("editable")
    name = f"lab_{uuid.uuid4().hex[:8]}"
    project = folder / "project"
    (project / name).mkdir(parents=True)
    (project / name / "__init__.py").write_text("X = 1\n")
    (project / "pyproject.toml").write_text(
        '[build-system]\nrequires = ["setuptools"]\nbuild-backend = "setuptools.build_meta"\n'
        f'[project]\nname = "{name}"\nversion = "1.0"\n[tool.setuptools]\npackages = ["{name}"]\n'
    )
    (project / ".gitignore").write_text("*.egg-info/\nbuild/\n")
    commit_all(project)
    venv.create(folder / "env", symlinks=True, with_pip=False, system_site_packages=False)
    python = folder / "env" / "bin" / "python"
    words = ["--quiet", "--no-deps", "--no-index", "--no-build-isolation", "--disable-pip-version-check"]
    library = subprocess.run(
        [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
        capture_output=True,
        text=True,
        check=True,
    )
    # The path file adds the environment of the tests, with setuptools and the run-time dependencies.
    site = Path(library.stdout.strip())
    (site / "tests.pth").write_text(f"{Path(pytest.__file__).parent.parent}\n{ROOT}\n")
    done = subprocess.run(
        [sys.executable, "-m", "pip", "--python", str(python), "install", *words, "--editable", str(project)],
        capture_output=True,
        text=True,
        check=False,
        env=without_pythonpath(),
    )
    assert done.returncode == 0, done.stderr
    return python, project


def test_a_real_editable_install_is_followed_to_its_work_tree(environment: tuple[Path, Path], tmp_path: Path) -> None:
    python, project = environment
    (package,) = (each for each in project.iterdir() if each.name.startswith("lab_") and each.suffix == "")

    def run() -> subprocess.CompletedProcess[str]:
        command = [str(python), "-m", "megacpp_overlays", "drift", "--distribution", package.name]
        env = {**without_pythonpath(), "MEGACPP_OVERLAYS_LOG": "logging"}
        return subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, check=False)

    clean = run()
    (package / "hot_fix.py").write_text("x = 1\n")
    dirty = run()
    (package / "hot_fix.py").unlink()

    commit = git(project, "rev-parse", "HEAD")
    assert (clean.returncode, clean.stderr) == (0, "")
    assert f"commit {commit[:12]} of {project}" in clean.stdout
    assert dirty.returncode == 1
    assert f"{package.name}/hot_fix.py added" in dirty.stdout
