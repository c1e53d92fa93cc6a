"""Processes of cases are copies of a fork server, and run as a Python of their own would."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from places import HANG_S, ROOT
from running import demand_end

from megacpp_overlays.loader import registry
from megacpp_overlays.repro.forked import NO_GPU, PRELOADED, ForkServers

ENVIRONMENT = {
    **{name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
    "PYTHONPATH": str(ROOT),
    **NO_GPU,
}


@pytest.fixture(scope="module")
def servers() -> Iterator[ForkServers]:
    with ForkServers() as found:
        yield found


def run(
    servers: ForkServers,
    code: str,
    folder: Path,
    *arguments: str,
    timeout: float = HANG_S,
    loaded: Sequence[str] = (),
    bare: bool = False,
    **variables: str,
) -> tuple[str | None, str]:
    """Run a module with this code; return how it ended, in words, and its output."""
    folder.joinpath("job.py").write_text(code)
    output = folder / "output"
    environment = {**ENVIRONMENT, **variables}
    ended = servers.run(
        ["job", *arguments],
        folder=folder,
        environment=environment,
        output=output,
        timeout=timeout,
        loaded=loaded,
        bare=bare,
    )
    return ended, output.read_text()


@pytest.mark.parametrize(
    ("code", "says"),
    [
        ("pass", None),
        ("raise SystemExit(3)", "ended with exit code 3"),
        ("raise SystemExit('no')", "ended with exit code 1"),
        ("1 / 0", "ended with exit code 1"),
        ("import os; os._exit(4)", "ended with exit code 4"),
        ("import os; os.kill(os.getpid(), 9)", "was killed by signal 9 (Killed)"),
    ],
)
def test_how_it_ended_is_said_in_words(servers: ForkServers, code: str, says: str | None, tmp_path: Path) -> None:
    assert run(servers, code, tmp_path)[0] == says


def test_it_has_the_words_the_folder_and_the_variables_of_its_job(servers: ForkServers, tmp_path: Path) -> None:
    code = (
        "import json, os, sys\n"
        "print(json.dumps([__name__, sys.argv[1:], os.getcwd(), os.environ['MEGACPP_OVERLAYS'], sys.path[0]]))\n"
        "print(os.getpgrp() == os.getpid(), 'torch' in sys.modules, 'megacpp_overlays' in sys.modules)\n"
        "print('to its error', file=sys.stderr)\n"
    )

    ended, text = run(servers, code, tmp_path, "one", "two", MEGACPP_OVERLAYS="off")

    first, *others = text.splitlines()
    assert ended is None
    assert json.loads(first) == ["__main__", ["one", "two"], str(tmp_path), "off", str(tmp_path)]
    assert sorted(others) == ["True True False", "to its error"]


def test_one_job_leaves_nothing_to_the_next(servers: ForkServers, tmp_path: Path) -> None:
    run(servers, "import os, torch; os.environ['LEFT'] = '1'; torch.left = True", tmp_path)

    assert run(servers, "import os, torch; print('LEFT' in os.environ, hasattr(torch, 'left'))", tmp_path)[1] == (
        "False False\n"
    )


def test_the_error_of_a_job_is_in_its_output(servers: ForkServers, tmp_path: Path) -> None:
    assert "ZeroDivisionError" in run(servers, "1 / 0", tmp_path)[1]


def test_its_child_processes_end_with_it(servers: ForkServers, tmp_path: Path) -> None:
    code = (
        "import subprocess, sys\nprint(subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']).pid)\n"
    )

    ended, text = run(servers, code, tmp_path)

    assert ended is None
    demand_end(int(text))


def test_one_that_takes_too_long_is_ended(servers: ForkServers, tmp_path: Path) -> None:
    code = "import os, time; print(os.getpid(), flush=True); time.sleep(600)"

    ended, text = run(servers, code, tmp_path, timeout=3)

    assert ended == "took more than 3 seconds"
    demand_end(int(text))


def test_jobs_run_side_by_side(servers: ForkServers, tmp_path: Path) -> None:
    """Each job waits for the other: the server neither waits for a job nor mixes up their outputs."""
    from concurrent.futures import ThreadPoolExecutor

    code = (
        "import pathlib, sys, time\n"
        "mine, other = sys.argv[1:]\n"
        "pathlib.Path('..', mine).touch()\n"
        "while not pathlib.Path('..', other).exists():\n    time.sleep(0.01)\n"
        "print(mine)\n"
    )
    folders = [tmp_path / "a", tmp_path / "b"]
    for each in folders:
        each.mkdir()

    with ThreadPoolExecutor() as pool:
        found = pool.map(lambda pair: run(servers, code, pair[0], *pair[1]), zip(folders, ["xy", "yx"], strict=True))

    assert list(found) == [(None, "x\n"), (None, "y\n")]


def test_code_that_is_compiled_on_a_gpu_runs_as_written_on_a_cpu(servers: ForkServers, tmp_path: Path) -> None:
    code = (
        "import torch\n"
        "def backend(graph, inputs):\n    print('compiled')\n    return graph\n"
        "function = torch.compile(lambda x: x + 1, backend=backend)\n"
        "print(function(torch.zeros(1)).item())\n"
    )

    assert run(servers, code, tmp_path)[1] == "1.0\n"
    assert run(servers, code, tmp_path, CUDA_VISIBLE_DEVICES="0")[1] == "compiled\n1.0\n"
    assert run(servers, code, tmp_path, bare=True)[1] == "compiled\n1.0\n"


def test_no_target_of_an_overlay_is_imported_before_the_job(servers: ForkServers, tmp_path: Path) -> None:
    """Its seams would come too late."""
    about = [part.target for part in registry.load() if part.installs]
    targets = {each.module: each.distribution in PRELOADED for each in about}
    assert set(targets.values()) == {True, False}

    for names, bare in ({each for each, preloaded in targets.items() if not preloaded}, False), ({*targets}, True):
        found = run(servers, f"import sys\nprint(*({names!r} & sys.modules.keys()))\n", tmp_path, bare=bare)
        assert found == (None, "\n")


def test_modules_that_a_job_names_are_imported_before_it_as_far_as_possible(
    servers: ForkServers, tmp_path: Path
) -> None:
    (tmp_path / "broken_here.py").write_text("raise OSError('no driver')")
    code = "import sys\nprint('wave' in sys.modules, 'broken_here' in sys.modules)\n"
    environment = {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}

    assert run(servers, code, tmp_path, loaded=("broken_here", "wave"), **environment) == (None, "True False\n")
    assert run(servers, code, tmp_path, **environment) == (None, "False False\n")


def test_a_copy_that_was_armed_before_has_the_settings_of_its_job(servers: ForkServers, tmp_path: Path) -> None:
    code = (
        "import sys\nbefore = 'megacpp_overlays' in sys.modules\nimport megacpp_overlays\n"
        "print(before, megacpp_overlays.audit().mode)\n"
    )

    for mode in ("strict", "off"):
        found = run(servers, code, tmp_path, loaded=("megacpp_overlays",), MEGACPP_OVERLAYS=mode)
        assert found[0] is None
        assert found[1].splitlines()[-1] == f"True {mode}"


def test_a_module_that_starts_a_thread_is_not_imported_before(servers: ForkServers, tmp_path: Path) -> None:
    (tmp_path / "threaded.py").write_text(
        "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()"
    )
    code = "import sys\nprint('threaded' in sys.modules, 'torch' in sys.modules)\n"

    found = run(servers, code, tmp_path, loaded=("threaded",), PYTHONPATH=os.pathsep.join([str(tmp_path), str(ROOT)]))

    assert found == (None, "False True\n")


def test_where_the_start_of_python_arms_each_job_has_a_python_of_its_own(tmp_path: Path) -> None:
    """A copy would have the settings of the server, whatever its variables say."""
    (tmp_path / "startup").mkdir()
    (tmp_path / "startup" / "sitecustomize.py").write_text("import megacpp_overlays\n")
    code = "import sys, megacpp_overlays\nprint('torch' in sys.modules, megacpp_overlays.audit().mode)\n"
    path = os.pathsep.join([str(tmp_path / "startup"), str(ROOT)])

    with ForkServers() as servers:
        found = [run(servers, code, tmp_path, PYTHONPATH=path, MEGACPP_OVERLAYS=mode) for mode in ("off", "auto")]

    assert [(ended, text.splitlines()[-1]) for ended, text in found] == [(None, "False off"), (None, "False auto")]


def test_a_job_ends_with_the_process_that_asked_for_it(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text("import os, time; print(os.getpid(), flush=True); time.sleep(600)")
    code = (
        "import os, sys\nfrom pathlib import Path\n"
        "from megacpp_overlays.repro.forked import ForkServers\n"
        "folder = Path(sys.argv[1])\n"
        "with ForkServers() as servers:\n"
        "    servers.run(['job'], folder=folder, environment=dict(os.environ), output=folder / 'output', timeout=600)\n"
    )
    asking = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], env=ENVIRONMENT)
    output, ends = tmp_path / "output", time.monotonic() + HANG_S
    while not (output.exists() and output.read_text().endswith("\n")) and time.monotonic() < ends:
        time.sleep(0.05)

    asking.send_signal(signal.SIGKILL)
    asking.wait(HANG_S)

    demand_end(int(output.read_text()))
