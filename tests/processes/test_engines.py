"""Engines that people scale with: Ray's actors, torchrun that restarts, tracers around and inside of `run`.

The real ones, in a lane of their own (`locks/engines.in`), over the Liger release whose loss is broken.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from places import HANG_S, ROOT, SUPPORT

ENGINES = ROOT / ".envs/engines/bin"
PYTHON = str(ENGINES / "python")
OURS = ("-W", "ignore", "-m", "megacpp_overlays", "run")
LIGER = "liger-flce-none-backward"
SWITCH = "MEGACPP_OVERLAY_LIGER_FLCE_NONE_BACKWARD"

pytestmark = [
    pytest.mark.upstream,
    pytest.mark.unmeasured_children,
    pytest.mark.skipif(not ENGINES.exists(), reason="there is no environment engines: make setup"),
]


def clean(**variables: str) -> dict[str, str]:
    """Return an environment without this package's variables and with Ray's usage report switched off."""
    kept = {
        name: value for name, value in os.environ.items() if not name.startswith("MEGACPP_") and name != "PYTHONPATH"
    }
    quiet = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled", "OMP_NUM_THREADS": "1"}
    return {**kept, **quiet, "MEGACPP_OVERLAYS_LOG": "logging", **variables}


# --- Ray ---


def drive(plan: Mapping[str, Any], env: Mapping[str, str]) -> list[dict[str, Any]]:
    """Run the driver under `run`, and return the outcome of each group of actors."""
    driver = str(SUPPORT / "ray_driver.py")
    done = subprocess.run(
        [PYTHON, *OURS, driver, json.dumps(plan)],
        env=env,
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    """A folder with a name that is short enough for Ray's sockets."""
    path = Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp"))
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture(scope="module")
def of_its_own(folder: Path) -> list[dict[str, Any]]:
    """Groups of actors of a Ray that the driver starts: alike, one switched off, one with a path of its own."""
    plan = {
        "init": {"num_cpus": 4, "_temp_dir": str(folder / "own")},
        "groups": [
            {"actors": [{"env": {}}, {"env": {}}], "meets": True},
            {"actors": [{"env": {}}, {"env": {SWITCH: "off"}}], "meets": True},
            {"actors": [{"env": {"PYTHONPATH": "/nowhere"}}], "timeout": 5},
        ],
    }
    return drive(plan, clean())


@pytest.fixture(scope="module")
def started_before(folder: Path) -> Iterator[list[dict[str, Any]]]:
    """Groups of actors on a Ray cluster that was started earlier, without this package."""
    port = _free_port()
    words = ["start", "--head", "--block", "--disable-usage-stats", f"--port={port}", "--include-dashboard=false"]
    head = subprocess.Popen(
        [str(ENGINES / "ray"), *words, "--num-cpus=4", f"--temp-dir={folder / 'before'}"],
        env=clean(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    plan = {
        "init": {"address": f"127.0.0.1:{port}"},
        "groups": [
            {"actors": [{"env": {}}, {"env": {}, "handed": True}], "timeout": 5},
            {"actors": [{"env": {}, "handed": True}, {"env": {}, "handed": True}], "meets": True},
        ],
    }
    try:
        _await_port(port, head)
        yield drive(plan, clean())
    finally:
        os.killpg(head.pid, signal.SIGKILL)
        head.wait()


def _free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        port: int = listening.getsockname()[1]
        return port


def _await_port(port: int, head: subprocess.Popen[bytes]) -> None:
    while head.poll() is None:
        with socket.socket() as asking:
            asking.settimeout(1)
            if asking.connect_ex(("127.0.0.1", port)) == 0:
                return
    raise AssertionError(f"ray start ended with {head.returncode}")


@pytest.mark.full
def test_actors_of_a_driver_that_is_run_are_armed_before_their_first_line_and_agree(
    of_its_own: list[dict[str, Any]],
) -> None:
    alike = of_its_own[0]

    assert [each["armed"] for each in alike["seen"]] == [True, True]
    assert alike["receipts"] == 2
    assert [each["decision"] for each in alike["met"]] == ["active", "active"]
    assert len({each["fingerprint"] for each in alike["met"]}) == 1


@pytest.mark.full
def test_an_actor_with_an_overlay_off_is_named_by_its_driver_and_stops_all_ranks(
    of_its_own: list[dict[str, Any]],
) -> None:
    odd = of_its_own[1]

    assert f"off    {odd['seen'][1]['pid']} (ray::Actor)" in odd["demand"]
    assert all(
        each["error"].startswith("2 ranks do not run the same code: rank 0 against rank 1") for each in odd["met"]
    )


@pytest.mark.full
def test_an_actor_that_cannot_be_armed_is_named_before_step_1_with_a_remedy(of_its_own: list[dict[str, Any]]) -> None:
    (seen,), demand = of_its_own[2]["seen"], of_its_own[2]["demand"]

    assert not seen["armed"]
    assert demand.splitlines()[0] == "1 of 1 child processes gave no receipt within 5 s:"
    assert f"{seen['pid']} (ray::Actor): it was started with a PYTHONPATH of its own" in demand
    assert "hand it child_environment()" in demand


@pytest.mark.full
def test_actors_of_a_ray_that_was_there_are_not_armed_unless_they_are_handed_the_environment(
    started_before: list[dict[str, Any]],
) -> None:
    plain, handed = started_before[0]["seen"]
    demand = started_before[0]["demand"]

    assert (plain["armed"], handed["armed"]) == (False, True)
    assert demand.count("\n- ") == 1
    assert f"{plain['pid']} (ray::" in demand


@pytest.mark.full
def test_actors_that_are_handed_the_environment_agree(started_before: list[dict[str, Any]]) -> None:
    both = started_before[1]

    assert [each["armed"] for each in both["seen"]] == [True, True]
    assert both["receipts"] == 2
    assert [each["decision"] for each in both["met"]] == ["active", "active"]


# --- torchrun that restarts ---

RESTARTED = """
import json, os, sys
import torch.distributed
import liger_kernel.ops.fused_linear_cross_entropy as target

attempt, rank = os.environ["TORCHELASTIC_RESTART_COUNT"], int(os.environ["RANK"])
# A store for each start: in the one of torchrun ranks now and then find the addresses of those that have ended.
torch.distributed.init_process_group(
    "gloo", init_method=f"file://{os.path.abspath(__file__)}.{attempt}", rank=rank, world_size=2
)  # where ranks are compared
weight = torch.nn.Parameter(torch.ones(2))
optimizer = torch.optim.SGD([weight], lr=0.1)
weight.sum().backward()
optimizer.step()  # before which the audit is left
seam = "megacpp_overlays" in target.fused_linear_cross_entropy_backward.__code__.co_filename or any(
    hasattr(each, "__megacpp_seam__") for each in vars(target.LigerFusedLinearCrossEntropyFunction).values()
    for each in (getattr(each, "__func__", each),)
)
sys.stdout.write(f"{attempt} {rank} {'megacpp_overlays' in sys.modules} {seam}\\n")
sys.stdout.flush()
torch.distributed.barrier()
if attempt == "0" and rank == 1:
    os._exit(7)
torch.distributed.barrier()
"""


@pytest.mark.full
def test_ranks_that_torchrun_starts_again_are_armed_and_compared_again(tmp_path: Path) -> None:
    launcher = tmp_path / "launcher.py"
    launcher.write_text(RESTARTED)
    audit = tmp_path / "audit.json"
    elastic = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", "1")
    options = ("--audit", str(audit), "--verify-ranks", "--require", f"{LIGER}=active")

    done = subprocess.run(
        [PYTHON, *OURS, *options, "-W", "ignore", *elastic, str(launcher)],
        env=clean(),
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [f"{n} {rank} True True" for n in (0, 1) for rank in (0, 1)]
    assert json.loads(audit.read_text())["ranks"] == {"size": 2, "agreed": True}


# --- tracers ---

TRACED = """
import json, subprocess, sys
import megacpp_overlays
import liger_kernel.ops.fused_linear_cross_entropy

say = "import liger_kernel.ops.fused_linear_cross_entropy, sys; sys.stdin.read()"
with megacpp_overlays.reach_children(receipts=True) as children:
    child = subprocess.Popen([sys.executable, "-c", say], stdin=subprocess.PIPE)
    isolated = subprocess.Popen([sys.executable, "-I", "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
    told = children.demand([child], timeout=120)
    try:
        children.demand([isolated], timeout=2)
        named = ""
    except megacpp_overlays.ChildrenError as error:
        named = str(error)
    for each in (child, isolated):
        each.communicate()
audit = megacpp_overlays.audit()
decisions = {each["id"]: each["decision"] for each in audit.as_dict()["decisions"]}
print(json.dumps({"decision": decisions["liger-flce-none-backward"], "print": audit.fingerprint, "children": len(told), "named": named}))
"""


@pytest.fixture(scope="module")
def untraced(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The output of the launcher without a tracer."""
    return _traced([PYTHON, *OURS], tmp_path_factory.mktemp("untraced"))


@pytest.mark.full
@pytest.mark.parametrize("outside", [True, False], ids=["around run", "inside of run"])
@pytest.mark.parametrize("tool", ["opentelemetry-instrument", "ddtrace-run"])
def test_a_launcher_under_a_tracer_makes_the_same_decision(
    tool: str, outside: bool, untraced: dict[str, Any], tmp_path: Path
) -> None:
    tracer = str(ENGINES / tool)
    words = [tracer, PYTHON, *OURS] if outside else [PYTHON, *OURS, tracer, PYTHON]

    output = _traced(words, tmp_path)

    assert output == untraced
    assert (output["decision"], output["children"]) == ("active", 1)
    assert "-I" in output["named"]


def _traced(words: list[str], folder: Path) -> dict[str, Any]:
    launcher = folder / "launcher.py"
    launcher.write_text(TRACED)
    quiet = clean(
        DD_INSTRUMENTATION_TELEMETRY_ENABLED="false", DD_TRACE_ENABLED="true", DD_REMOTE_CONFIGURATION_ENABLED="0"
    )
    done = subprocess.run(
        [*words, str(launcher)], env=quiet, capture_output=True, text=True, timeout=HANG_S, check=False, cwd=folder
    )
    assert done.returncode == 0, done.stderr
    output: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    output["named"] = output["named"].partition(": ")[2] and "-I" * ("-I" in output["named"])
    return output
