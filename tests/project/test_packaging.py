"""However the project is installed, the same modules import and site-packages gains one name.

Everything here builds and installs for real, without a network: setuptools and the run-time dependencies come from
the environment that runs the tests.
"""

from __future__ import annotations

import configparser
import email
import email.message
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest
import tomllib
from packaging.requirements import Requirement
from places import HANG_S, ROOT

from megacpp_overlays.cli import commands
from megacpp_overlays.loader import statement
from megacpp_overlays.version import NEWEST_PYTHON

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PACKAGES = PROJECT["tool"]["setuptools"]["packages"]
FOLDERS = PROJECT["tool"]["setuptools"]["package-dir"]

DEPENDENCIES = ["setuptools", *PROJECT["project"]["dependencies"]]

USE = f"""
import importlib, pathlib, sys
for name in {sorted(PACKAGES)!r}:
    module = importlib.import_module(name)
    print(name, pathlib.Path(module.__file__).resolve())
import megacpp_overlays
assert megacpp_overlays.audit().records is not None
assert "torch" not in sys.modules
"""


def run(*command: str | Path, cwd: Path, code: int = 0, **variables: str) -> str:
    """Run a command that must end so, without anything that this test run has put into the environment."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "COVERAGE", "PIP_"))}
    done = subprocess.run(
        list(map(str, command)), cwd=cwd, env={**env, **variables}, capture_output=True, text=True, timeout=HANG_S
    )
    assert done.returncode == code, f"{command} exits {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@dataclass(frozen=True)
class Venv:
    """A fresh environment that sees the dependencies of the project and nothing else."""

    folder: Path

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"

    @property
    def site_packages(self) -> Path:
        return self.folder / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"

    def pip_install(self, *requirements: str | Path, **variables: str) -> set[str]:
        """Install from local files and return the names that site-packages gained."""
        before = set(os.listdir(self.site_packages))
        pip = (sys.executable, "-m", "pip", "--isolated", "--disable-pip-version-check", "--python", self.python)
        options = ("--no-deps", "--no-index", "--no-build-isolation", "--no-cache-dir", "--quiet")
        run(*pip, "install", *options, *requirements, cwd=self.folder, **variables)
        return set(os.listdir(self.site_packages)) - before


@pytest.fixture(scope="module")
def dependencies(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with links to the run-time and build-time dependencies, without the project and without torch."""
    folder = tmp_path_factory.mktemp("dependencies")
    for distribution in closure(DEPENDENCIES):
        assert distribution.files is not None
        tops = {file.parts[0] for file in distribution.files if file.parts[0] not in {"..", "__pycache__"}}
        for top in tops:
            (folder / top).symlink_to(Path(str(distribution.locate_file(top))))
    return folder


def closure(requirements: list[str]) -> list[importlib.metadata.Distribution]:
    """Return the installed distributions that meet the requirements, and their own requirements, recursively."""
    found: dict[str, importlib.metadata.Distribution] = {}
    waiting = [Requirement(line) for line in requirements]
    while waiting:
        required = waiting.pop()
        if required.name in found or (required.marker and not required.marker.evaluate({"extra": ""})):
            continue
        found[required.name] = importlib.metadata.distribution(required.name)
        waiting += [Requirement(line) for line in found[required.name].requires or []]
    return list(found.values())


@pytest.fixture
def venv(tmp_path: Path, dependencies: Path) -> Venv:
    made = Venv(tmp_path / "venv")
    run(sys.executable, "-m", "venv", "--without-pip", made.folder, cwd=tmp_path)
    (made.site_packages / "dependencies.pth").write_text(f"{dependencies}\n")
    return made


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A git repository with one commit of the files as they are now, as a stranger clones it."""
    folder = tmp_path_factory.mktemp("git") / "checkout"
    if (ROOT / ".git").exists():
        listed = run("git", "ls-files", "--cached", "--others", "--exclude-standard", "-z", cwd=ROOT).split("\0")
        names = [name for name in listed if name and (ROOT / name).exists(follow_symlinks=False)]
    else:
        pytest.skip("not a git checkout: it cannot be installed from git")
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, folder / name, follow_symlinks=False)
    who = ("-c", "user.name=tests", "-c", "user.email=tests@example.invalid", "-c", "commit.gpgsign=false")
    run("git", "init", "--quiet", cwd=folder)
    run("git", "add", "--all", cwd=folder)
    run("git", *who, "commit", "--quiet", "--message", "as it is", cwd=folder)
    return folder


@pytest.fixture(scope="module")
def built(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist, and the wheel that was built from the sdist."""
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, cwd=checkout)
    return folder


@pytest.fixture(scope="module")
def wheel_file(built: Path) -> Path:
    return next(built.glob("*.whl"))


@pytest.fixture(scope="module")
def sdist_file(built: Path) -> Path:
    return next(built.glob("*.tar.gz"))


def modules_used_from(venv: Venv, neutral: Path, **variables: str) -> dict[str, Path]:
    """Import every package of the project in a fresh process and return where each one came from."""
    neutral.mkdir()
    lines = run(venv.python, "-c", USE, cwd=neutral, MEGACPP_OVERLAYS_LOG="logging", **variables).splitlines()
    return {name: Path(path) for name, path in (line.split(" ", 1) for line in lines)}


def assert_console_script_runs(venv: Venv) -> None:
    version = PROJECT_VERSION
    assert version in run(venv.folder / "bin" / "megacpp-overlays", "--version", cwd=venv.folder)


def version_in_the_tree() -> str:
    found = re.search(r'VERSION = "(.+)"', (ROOT / "megacpp_overlays" / "version.py").read_text())
    assert found is not None
    return found[1]


PROJECT_VERSION = version_in_the_tree()
DIST_INFO = f"megacpp_overlays-{PROJECT_VERSION}.dist-info"


def test_the_advice_for_a_missing_extra_names_the_packages_of_the_extra() -> None:
    declared = {each.partition(";")[0] for each in PROJECT["project"]["optional-dependencies"]["upkeep"]}

    assert set(commands.EXTRA.values()) == declared


def test_package_list_names_every_folder_with_code() -> None:
    found = set()
    for package in (name for name in FOLDERS if name in PACKAGES):
        top = ROOT / FOLDERS[package]
        for folder, folders, files in os.walk(top, followlinks=False):
            # A pack's folder is data, and `startup` is found by its path.
            folders[:] = [name for name in folders if name.isidentifier() and name != "startup"]
            if any(file.endswith(".py") for file in files):
                found.add(".".join((package, *Path(folder).relative_to(top).parts)))
    assert sorted(PACKAGES) == sorted(found)


def test_links_lead_to_the_folders_of_the_map() -> None:
    for package, folder in FOLDERS.items():
        as_path = ROOT / package.replace(".", "/")
        assert as_path.resolve() == ROOT / folder
        if "." in package:
            assert as_path.is_symlink()
            assert not as_path.readlink().is_absolute()


@pytest.mark.parametrize("kind", ["wheel", pytest.param("sdist", marks=pytest.mark.full)])
def test_built_file_installs_one_name(kind: str, wheel_file: Path, sdist_file: Path, venv: Venv) -> None:
    gained = venv.pip_install({"wheel": wheel_file, "sdist": sdist_file}[kind])
    assert gained == {"megacpp_overlays", DIST_INFO}
    used = modules_used_from(venv, venv.folder / "neutral")
    assert used.keys() == set(PACKAGES)
    assert all(path.is_relative_to(venv.site_packages / "megacpp_overlays") for path in used.values())
    assert_console_script_runs(venv)


@pytest.mark.full
def test_editable_install_adds_no_package_and_reads_the_checkout(checkout: Path, venv: Venv) -> None:
    gained = venv.pip_install("--editable", checkout)
    finder = f"__editable___megacpp_overlays_{PROJECT_VERSION.replace('.', '_')}_finder.py"
    pth = f"__editable__.megacpp_overlays-{PROJECT_VERSION}.pth"
    assert gained - {"__pycache__"} == {finder, pth, DIST_INFO}
    used = modules_used_from(venv, venv.folder / "neutral")
    assert used.keys() == set(PACKAGES)
    assert all(path.is_relative_to(checkout) for path in used.values())
    assert_console_script_runs(venv)
    for generic in ("overlays", "feature_probes", "tests"):
        code = f"import importlib.util; assert importlib.util.find_spec({generic!r}) is None"
        run(venv.python, "-c", code, cwd=venv.folder)


@pytest.mark.full
@pytest.mark.parametrize("links", ["true", "false"], ids=["links as links", "links as text files"])
def test_git_install_works(links: str, checkout: Path, venv: Venv) -> None:
    config = {"GIT_CONFIG_COUNT": "1", "GIT_CONFIG_KEY_0": "core.symlinks", "GIT_CONFIG_VALUE_0": links}
    gained = venv.pip_install(f"git+file://{checkout}", **config)
    assert gained == {"megacpp_overlays", DIST_INFO}
    assert modules_used_from(venv, venv.folder / "neutral").keys() == set(PACKAGES)
    assert_console_script_runs(venv)


def test_bare_checkout_on_the_path_works(checkout: Path, venv: Venv) -> None:
    used = modules_used_from(venv, venv.folder / "neutral", PYTHONPATH=str(checkout))
    assert used.keys() == set(PACKAGES)
    assert all(path.is_relative_to(checkout) for path in used.values())
    run(venv.python, "-m", "megacpp_overlays", "--version", cwd=venv.folder, PYTHONPATH=str(checkout))


def test_wheel_holds_every_module_of_the_tree_and_nothing_else(wheel_file: Path) -> None:
    with zipfile.ZipFile(wheel_file) as archive:
        names = {name for name in archive.namelist() if not name.startswith(DIST_INFO)}
    in_tree = set()
    for package in PACKAGES:
        folder = ROOT / package.replace(".", "/")
        in_tree |= {f"{package.replace('.', '/')}/{file.name}" for file in folder.glob("*.py")}
    for package, globs in PROJECT["tool"]["setuptools"]["package-data"].items():
        folder = ROOT / FOLDERS.get(package, package.replace(".", "/"))
        for glob in globs:
            data = list(folder.glob(glob))
            assert data, f"{package} names {glob}, and nothing is there"
            in_tree |= {f"{package.replace('.', '/')}/{file.relative_to(folder)}" for file in data}
    assert names == in_tree


def test_ranks_with_the_wheel_and_ranks_with_the_checkout_compare_equal(wheel_file: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel_file) as archive:
        archive.extractall(tmp_path)

    assert statement.package_sha256(tmp_path / "megacpp_overlays") == statement.package_sha256()


def test_check_wheel_contents_agrees(wheel_file: Path, tmp_path: Path) -> None:
    tool = Path(sys.executable).with_name("check-wheel-contents")
    if not tool.exists():
        pytest.skip("check-wheel-contents is not in this environment")
    assert "OK" in run(tool, "--config", ROOT / "pyproject.toml", wheel_file, cwd=tmp_path)


def metadata_of(wheel_file: Path) -> email.message.Message:
    with zipfile.ZipFile(wheel_file) as archive:
        return email.message_from_bytes(archive.read(f"{DIST_INFO}/METADATA"))


def test_metadata_says_licence_python_and_exactly_three_dependencies(wheel_file: Path) -> None:
    metadata = metadata_of(wheel_file)
    assert metadata["Version"] == PROJECT_VERSION
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata.get_all("License-File") == ["LICENSE"]
    assert metadata["Requires-Python"] == ">=3.10"
    required = [Requirement(line) for line in metadata.get_all("Requires-Dist") or []]
    at_run_time = [each.name for each in required if each.marker is None or "extra" not in str(each.marker)]
    assert sorted(at_run_time) == ["importlib-metadata", "packaging", "wrapt"]
    assert metadata.get_all("Provides-Extra") == ["upkeep"]


def test_every_python_of_the_classifiers_is_one_that_tests_run_on_and_the_newest_is_the_one_that_the_log_names() -> (
    None
):
    metadata = (ROOT / "pyproject.toml").read_text()
    named = re.findall(r"Programming Language :: Python :: (3\.[0-9]+)", metadata)
    loaders = re.search(r"^LOADER_PYTHONS := (.+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert loaders is not None

    assert {*named} == {*loaders[1].split(), "3.12"}
    assert named[-1] == ".".join(map(str, NEWEST_PYTHON))
    assert f"with Python {named[0]} to {named[-1]}" in (ROOT / "README.md").read_text()


def test_wheel_has_one_console_script(wheel_file: Path) -> None:
    scripts = configparser.ConfigParser()
    with zipfile.ZipFile(wheel_file) as archive:
        scripts.read_string(archive.read(f"{DIST_INFO}/entry_points.txt").decode())
    assert dict(scripts["console_scripts"]) == {"megacpp-overlays": "megacpp_overlays.cli:main"}


def test_sdist_can_be_audited_and_tested(sdist_file: Path) -> None:
    with tarfile.open(sdist_file) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    wanted = {"README.md", "RETIREMENT.md", "CHANGELOG.md", "LICENSE", "Makefile", "pyproject.toml"}
    wanted |= {f"{top}/{file.name}" for top in ("overlays", "feature_probes") for file in (ROOT / top).glob("*.py")}
    wanted |= {"CONTRIBUTING.md", "SECURITY.md", "properdocs.yml", "docs/write-an-overlay.md", "scripts/site.sh"}
    wanted |= {"tests/conftest.py", "tests/project/test_packaging.py", "locks/dev.txt"}
    assert wanted - names == set()


LOCKS = sorted((ROOT / "locks").glob("*.txt"))


@pytest.mark.parametrize("lock", LOCKS, ids=lambda path: path.stem)
def test_lock_pins_and_hashes_every_file_and_names_no_registry(lock: Path) -> None:
    text = lock.read_text()
    assert "://" not in text
    assert "index-url" not in text
    joined = text.replace("\\\n", " ")
    lines = [line for line in joined.splitlines() if line and not line.startswith("#")]
    assert lines
    for line in lines:
        assert re.match(r"[a-z0-9-]+==\S+ ", line), line
        assert re.search(r"--hash=sha256:[0-9a-f]{64}", line), line


@pytest.mark.parametrize("environment", ["loader-3.10", "loader-3.11", "loader-3.13", "loader-oldest"])
def test_loader_works_without_torch_on(environment: str, tmp_path: Path) -> None:
    python = ROOT / ".envs" / environment / "bin" / "python"
    if not python.exists():
        pytest.skip(f"there is no environment {environment}: `make setup` makes it where the machine has that Python")
    code = (
        "import sys, megacpp_overlays;"
        "assert all(r.decision.value == 'absent' or r.overlay.off_by_default for r in megacpp_overlays.audit().records), megacpp_overlays.audit();"
        "assert 'torch' not in sys.modules"
    )
    run(python, "-W", "error", "-c", code, cwd=tmp_path, PYTHONPATH=str(ROOT))
    audit = ("-W", "error", "-m", "megacpp_overlays", "audit")
    listed = run(python, *audit, cwd=tmp_path, code=3, PYTHONPATH=str(ROOT))  # there is no launcher's package here
    assert "absent" in listed.lower()
