"""`enable` arms every Python of an environment, however it is started, and `disable` takes that back: real processes all."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import enabled_environments
import pytest
from enabled_environments import TriedEnvironment
from places import HANG_S, ROOT

from megacpp_overlays import cli

PACKAGE = ROOT / "megacpp_overlays"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> TriedEnvironment:
    return enabled_environments.make(tmp_path_factory.mktemp("environment") / "venv")


@pytest.fixture
def environment(made: TriedEnvironment) -> Iterator[TriedEnvironment]:
    """An environment in which nothing is enabled."""
    yield made
    made.file.unlink(missing_ok=True)


@pytest.fixture
def enabled(environment: TriedEnvironment) -> TriedEnvironment:
    done = environment.command("enable")
    assert done.returncode == 0, done.stderr
    return environment


# --- enable, status, disable ----------------------------------------------------------------------------------


def test_an_environment_is_armed_from_enable_to_disable_and_then_as_it_was(environment: TriedEnvironment) -> None:
    before = sorted(environment.site.iterdir())
    assert not environment.is_armed()

    enabled = environment.command("enable")
    assert f"enabled: {environment.file} arms every Python of this environment with {PACKAGE}" in enabled.stdout
    assert environment.is_armed()

    disabled = environment.command("disable")
    assert disabled.stdout == f"disabled: {environment.file} is removed\n"
    assert not environment.is_armed()
    assert sorted(environment.site.iterdir()) == before


def test_status_starts_a_python_and_says_how_it_is_armed(environment: TriedEnvironment) -> None:
    nothing = environment.command("status")
    environment.command("enable")
    armed = environment.command("status")

    assert (nothing.returncode, nothing.stdout.splitlines()[1].partition(":")[0]) == (3, "not armed")
    assert armed.returncode == 0
    assert f"armed by file: {environment.file}; proved by starting `{environment.python} -I`" in armed.stdout


def test_a_second_enable_changes_nothing(enabled: TriedEnvironment) -> None:
    text = enabled.file.read_text()

    again = enabled.command("enable")

    assert again.stdout.startswith(f"enabled already: {enabled.file}")
    assert enabled.file.read_text() == text


def test_disable_where_nothing_is_enabled_says_where_it_looked(environment: TriedEnvironment) -> None:
    done = environment.command("disable")

    assert (done.returncode, done.stdout) == (0, f"there is no megacpp_overlays.pth in {environment.site}\n")


# --- however a Python is started ------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [(), ("-I",), ("-E",), ("-s",), ("-I", "-X", "dev", "-W", "error")], ids=" ".join)
def test_options_of_python_do_not_cancel_it(enabled: TriedEnvironment, options: tuple[str, ...]) -> None:
    assert enabled.is_armed(*options)


def test_without_site_packages_nothing_is_armed_and_nothing_ends(enabled: TriedEnvironment) -> None:
    assert not enabled.is_armed("-S")


def test_a_path_of_the_job_does_not_cancel_it(enabled: TriedEnvironment, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.is_customized = True\n")

    done = enabled.start(
        "-c", "import sys; print(sys.is_customized, 'megacpp_overlays' in sys.modules)", PYTHONPATH=str(tmp_path)
    )

    assert done.stdout == "True True\n", "the job's own start-up module runs as well"


def test_a_job_with_its_own_copy_of_this_package_gets_one_warning_that_it_is_not_used(
    enabled: TriedEnvironment, tmp_path: Path
) -> None:
    other = enabled_environments.other_copy(tmp_path)
    child = "import megacpp_overlays, subprocess, sys; print(megacpp_overlays.__file__, flush=True)"
    code = f"{child}; subprocess.run([sys.executable, '-c', {child!r}], check=True)"

    done = enabled.start("-c", code, PYTHONPATH=str(other))

    assert done.stdout.split() == [str(PACKAGE / "__init__.py")] * 2
    lines = done.stderr.splitlines()
    assert len(lines) == 1
    assert (
        f"WARNING PYTHONPATH leads to another copy of this package, {other / 'megacpp_overlays'}, which is not used"
        in lines[0]
    )


def test_switching_off_is_said(enabled: TriedEnvironment) -> None:
    done = enabled.start("-c", "pass", MEGACPP_OVERLAYS="off")

    assert done.stderr == "[megacpp_overlays] mode off; nothing is installed\n"


def test_a_path_file_that_is_executed_twice_arms_once(enabled: TriedEnvironment) -> None:
    """As `site` does in a virtual environment with the packages of the system."""
    code = f"import megacpp_overlays as first, site, sys; site.addsitedir({str(enabled.site)!r}); import megacpp_overlays; "

    done = enabled.start("-c", code + "print(first is megacpp_overlays)")

    assert (done.stdout, done.stderr) == ("True\n", "")


def test_with_run_and_the_start_up_folder_there_is_one_copy(enabled: TriedEnvironment) -> None:
    done = enabled.command("run", "-c", "import megacpp_overlays as m; print(m._startup_file)")

    assert (done.returncode, done.stdout, done.stderr) == (0, f"{enabled.file}\n", "")


@pytest.mark.parametrize("name", ["3.10", pytest.param("3.11", marks=pytest.mark.full), "3.13"])
def test_another_python_with_these_packages_on_its_path_is_left_alone(enabled: TriedEnvironment, name: str) -> None:
    python = ROOT / ".envs" / f"loader-{name}" / "bin" / "python"
    if not python.exists():
        pytest.skip(f"there is no .envs/loader-{name}: run `make setup`")
    env = {**os.environ, "PYTHONPATH": str(enabled.site)}

    done = subprocess.run(
        [str(python), "-c", enabled_environments.IS_ARMED], env=env, capture_output=True, text=True, timeout=HANG_S
    )

    assert (done.returncode, done.stdout, done.stderr) == (0, "False\n", "")


@pytest.mark.parametrize("name", ["3.10", pytest.param("3.11", marks=pytest.mark.full), "3.13"])
def test_an_environment_of_another_python_is_enabled_by_its_own(tmp_path: Path, name: str) -> None:
    python = ROOT / ".envs" / f"loader-{name}" / "bin" / "python"
    if not python.exists():
        pytest.skip(f"there is no .envs/loader-{name}: run `make setup`")
    made = enabled_environments.make(tmp_path / "venv", str(python))

    assert made.command("enable").returncode == 0
    assert made.is_armed("-I")


# --- it fails closed ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [(), ("-I",)], ids=["plain", "isolated"])
def test_a_wrong_setting_ends_the_process_before_its_first_line(
    enabled: TriedEnvironment, options: tuple[str, ...]
) -> None:
    done = enabled.start("-c", "print('trained')", options=options, MEGACPP_OVERLAYS="obsrve")

    assert (done.returncode, done.stdout) == (2, "")
    assert "SettingsError: MEGACPP_OVERLAYS=obsrve is not known; did you mean observe?" in done.stderr
    assert f"run `megacpp-overlays disable`, or delete {enabled.file}" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_wrong_setting_does_not_keep_disable_from_working(enabled: TriedEnvironment) -> None:
    done = enabled.command("disable", MEGACPP_OVERLAYS="obsrve")

    assert done.returncode == 0
    assert not enabled.file.exists()


def test_without_the_package_a_process_ends_and_names_the_file(enabled: TriedEnvironment) -> None:
    enabled.file.write_text(enabled.file.read_text().replace(str(PACKAGE), "/nowhere/megacpp_overlays"))

    done = enabled.start("-c", "print('trained')")

    assert (done.returncode, done.stdout) == (1, "")
    assert "No such file or directory: '/nowhere/megacpp_overlays/processes/startup/sitecustomize.py'" in done.stderr
    assert done.stderr.endswith(f"Install megacpp_overlays again, or delete {enabled.file}\n")


def test_enable_refuses_under_a_wrong_setting(environment: TriedEnvironment) -> None:
    done = environment.command("enable", MEGACPP_OVERLAYS_LOG_LEVEL="loud")

    assert done.returncode == 2
    assert not environment.file.exists()


def test_enable_takes_back_a_file_with_which_no_python_starts_armed(tmp_path: Path) -> None:
    environment = enabled_environments.make(tmp_path / "venv")
    (environment.site / "wrapt").unlink()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "wrapt").symlink_to(Path(sys.modules["wrapt"].__file__ or "").parent)

    done = environment.command("enable", PYTHONPATH=str(elsewhere))

    assert done.returncode == 5
    assert "so it was taken back" in done.stderr
    assert "No module named 'wrapt'" in done.stderr
    assert not environment.file.exists()


def test_enable_in_read_only_site_packages_says_so(environment: TriedEnvironment) -> None:
    environment.site.chmod(0o555)
    drop = ["setpriv", "--bounding-set=-dac_override,-dac_read_search", "--inh-caps=-dac_override,-dac_read_search"]
    words = [*(drop if os.geteuid() == 0 else []), str(environment.python), "-m", "megacpp_overlays", "enable"]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=HANG_S, check=False)
    finally:
        environment.site.chmod(0o755)

    assert done.returncode == 5
    assert f"{environment.file}: Permission denied; write it while the image is built" in done.stderr
    assert "megacpp-overlays env" in done.stderr, "the way out"
    assert not environment.file.exists()


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> TriedEnvironment:
    return enabled_environments.make_system_python(tmp_path_factory.mktemp("system") / "usr")


def test_a_python_that_other_programs_share_has_to_be_asked_for(system: TriedEnvironment) -> None:
    refused = system.command("enable")
    asked = system.command("enable", "--site")

    assert refused.returncode == 2
    assert "is in no virtual or conda environment" in refused.stderr
    assert "say --site to arm all of them" in refused.stderr
    assert asked.returncode == 0, asked.stderr
    assert system.is_armed("-I")


def test_a_conda_environment_is_an_environment(system: TriedEnvironment) -> None:
    (system.folder / "conda-meta").mkdir()
    try:
        assert system.command("enable").returncode == 0
    finally:
        (system.folder / "conda-meta").rmdir()


@pytest.mark.parametrize("armed", [True, False], ids=["with its packages", "on its own"])
def test_a_virtual_environment_on_the_python_of_an_image_is_armed_if_it_has_its_packages(
    system: TriedEnvironment, tmp_path: Path, armed: bool
) -> None:
    system.command("enable", "--site")
    options = ["--system-site-packages"] if armed else []
    done = system.start("-m", "venv", "--without-pip", *options, str(tmp_path / "venv"))
    assert done.returncode == 0, done.stderr

    assert TriedEnvironment(tmp_path / "venv").is_armed() is armed


# --- other commands that see the file ----------------------------------------------------------------------------------------


def test_drift_names_the_file_and_finds_one_that_was_edited(enabled: TriedEnvironment) -> None:
    as_written = json.loads(enabled.command("drift", "--json").stdout)
    enabled.file.write_text("import megacpp_overlays\n")
    edited = enabled.command("drift")

    file = {"file": str(enabled.file), "package": str(PACKAGE), "state": "tracked"}
    assert as_written["startup_files"] == [file]
    assert edited.returncode == 1
    assert f"start-up file: untracked: {enabled.file} arms every Python with no package; edited" in edited.stdout
    assert "next: write the start-up file anew with `megacpp-overlays enable`" in edited.stdout
    assert enabled.command("status").returncode == 1


def test_gates_wait_for_torch(enabled: TriedEnvironment, tmp_path: Path) -> None:
    """A tool such as an installer gets no warning about kernels; a process that imports torch gets it before its first compile."""
    (tmp_path / "tilelang").mkdir()
    for name in ("torch.py", "tilelang/__init__.py", "tilelang/language.py"):
        (tmp_path / name).touch()
    code = "from megacpp_overlays.loader.session import current as c; print(len(c().parts)); import torch; print(len(c().parts))"

    done = enabled.start("-c", code, PYTHONPATH=str(tmp_path))

    tool, with_torch = map(int, done.stdout.split())
    assert tool == 0 < with_torch


# --- a job shows that it was armed ----------------------------------------------------------------------------

TRAINS = """
import sys
sys.path.extend({path!r})
import torch
weight = torch.nn.Parameter(torch.ones(1))
weight.grad = torch.ones(1)
torch.optim.SGD([weight]).step()
print("trained")
"""


@pytest.mark.upstream
def test_a_requirement_of_the_image_ends_a_job_that_switches_overlays_off(enabled: TriedEnvironment) -> None:
    """In the image REQUIRE is a variable of every job, and it is checked though the job installs nothing."""
    code = TRAINS.format(path=[each for each in sys.path if each.endswith("site-packages")])
    require = {"MEGACPP_OVERLAYS_REQUIRE": "float16-fp32-exemption=armed"}

    as_it_is = enabled.start("-c", code, **require)
    switched_off = enabled.start("-c", code, MEGACPP_OVERLAYS="off", **require)

    assert (as_it_is.returncode, as_it_is.stdout) == (0, "trained\n"), as_it_is.stderr
    assert (switched_off.returncode, switched_off.stdout) == (1, "")
    assert "RequirementError: " in switched_off.stderr
    assert "float16-fp32-exemption has to be armed and is disabled: MEGACPP_OVERLAYS=off" in switched_off.stderr


# --- the other way: variables ---------------------------------------------------------------------------------


def test_lines_of_a_shell_arm_the_processes_started_after_them(environment: TriedEnvironment, tmp_path: Path) -> None:
    (tmp_path / "lines.sh").write_text(environment.command("env", "--sh", MEGACPP_OVERLAYS_LOG="./a 'b").stdout)
    script = f'. {tmp_path}/lines.sh; {environment.python} -c "{enabled_environments.IS_ARMED}"; echo $MEGACPP_OVERLAYS_LOG $PYTHONPATH'
    env = {"PATH": os.environ["PATH"], "PYTHONPATH": "/of/the/job"}

    done = subprocess.run(["sh", "-c", script], env=env, cwd=tmp_path, capture_output=True, text=True, timeout=HANG_S)

    armed, variables = done.stdout.splitlines()
    assert armed == "True"
    assert variables == f"./a 'b {PACKAGE / 'processes' / 'startup'}:/of/the/job", (
        "the old entries of PYTHONPATH stay, after ours"
    )


def test_forms_for_an_image_and_a_pod_say_the_same(environment: TriedEnvironment) -> None:
    said = {"MEGACPP_OVERLAYS_LOG": '/a/"$b"'}
    docker = environment.command("env", "--docker", **said).stdout
    pod = environment.command("env", "--k8s", **said).stdout

    assert docker.splitlines() == [
        r'ENV MEGACPP_OVERLAYS_LOG="/a/\"\$b\"" \ '.rstrip(),
        f'    PYTHONPATH="{PACKAGE}/processes/startup${{PYTHONPATH:+:$PYTHONPATH}}" \\',
        f'    MEGACPP_OVERLAYS_CHILDREN="cpython-{sys.version_info[0]}{sys.version_info[1]}:{environment.folder}"',
    ]
    assert pod.splitlines()[:2] == ["- name: MEGACPP_OVERLAYS_LOG", r'  value: "/a/\"$$b\""']
    assert [line.split()[-1] for line in pod.splitlines() if "- name" in line] == [
        "MEGACPP_OVERLAYS_LOG",
        "PYTHONPATH",
        "MEGACPP_OVERLAYS_CHILDREN",
    ]


def test_status_knows_an_environment_that_variables_arm(environment: TriedEnvironment) -> None:
    lines = environment.command("env", "--k8s").stdout.splitlines()
    names = [line.split()[-1] for line in lines[::2]]
    variables = {name: json.loads(line.partition("value: ")[2]) for name, line in zip(names, lines[1::2], strict=True)}

    done = environment.command("status", **variables)

    assert done.returncode == 0
    assert "armed by variables: PYTHONPATH and MEGACPP_OVERLAYS_CHILDREN" in done.stdout
    assert environment.is_armed(**variables)
    assert not environment.is_armed("-I", **variables), "which the file of `enable` survives"


PAGE = (ROOT / "docs" / "images.md").read_text()


def test_each_command_of_the_page_is_one_that_the_parser_takes() -> None:
    parser, _ = cli.parsers()
    found = re.findall(r"^(?:\$ |RUN )?(megacpp-overlays [^|`\n]+)$", PAGE, re.MULTILINE)
    commands = [each.strip() for line in found for each in line.split("&&")]
    assert len(commands) > 6
    for command in commands:
        words = shlex.split(command)[1:]
        parser.parse_args(words[: words.index(">")] if ">" in words else words)
