"""Checks before the first step: real torch, in launchers that do not call this package."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from launchers import environment, launch, write
from made_up import Upstream

from megacpp_overlays import cli
from megacpp_overlays.cli.codes import ExitCode
from megacpp_overlays.cli.run import asked_of_us
from megacpp_overlays.errors import RanksError, RequirementError, SettingsError
from megacpp_overlays.loader.session import Session
from megacpp_overlays.loader.settings import Settings
from megacpp_overlays.processes import first_step

pytestmark = pytest.mark.upstream

RUN = ("-m", "megacpp_overlays", "run")
TORCHRUN = ("-W", "ignore", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")

TRAINS = """
import importlib, os, sys
import torch

layers = importlib.import_module(os.environ["NAME"] + ".layers")
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.AdamW(model.parameters())
for step in range(2):
    model(torch.full((1, 2), layers.double(1.0))).sum().backward()
    print("before step", step, flush=True)
    optimizer.step()
print("trained")
"""
RANKS = """
import importlib, json, os, sys
import torch
import torch.distributed
from torch.distributed import init_process_group

def say(*words):
    if os.environ["RANK"] == "0":
        audit = json.load(open(os.environ["MEGACPP_OVERLAYS_AUDIT"]))
        told = next(each["decision"] for each in audit["decisions"] if each["id"] == "double-fix")
        print(*words, told, audit["ranks"], flush=True)

init_process_group("gloo")
say("met")
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters())
importlib.import_module(os.environ["NAME"] + ".layers")
model(torch.ones(1, 2)).sum().backward()
optimizer.step()
say("made a step")
torch.distributed.destroy_process_group()
if os.environ["RANK"] == "1":
    sys.modules["megacpp_overlays"].undo()
init = f"file://{sys.argv[1]}/meet"
torch.distributed.init_process_group("gloo", init_method=init, rank=int(os.environ["RANK"]), world_size=2)
print("met again")
"""
COMPILED = """
import torch
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.AdamW(model.parameters())
step = torch.compile(lambda: optimizer.step(), backend="eager")
for _ in range(3):
    model(torch.ones(1, 2)).sum().backward()
    step()
print("trained")
"""


@pytest.fixture
def env(upstream: Upstream) -> dict[str, str]:
    return environment(upstream)


@pytest.fixture
def left(tmp_path: Path) -> Callable[[], dict[str, Any]]:
    return lambda: json.loads((tmp_path / "audit.json").read_text())


def decision(audit: dict[str, Any], overlay_id: str = "double-fix") -> str:
    return next(str(each["decision"]) for each in audit["decisions"] if each["id"] == overlay_id)


# --- the audit ---


CAUGHT = """
    try:
        optimizer.step()
    except Exception as error:
        print(type(error).__name__, error, sep=": ", flush=True)
        assert not optimizer.state, "it has made the step"
        os._exit(7)  # no handler of its end runs
"""


def test_a_launcher_writes_the_audit_of_its_imports_and_makes_no_step_without_a_required_decision(
    upstream: Upstream, env: dict[str, str], tmp_path: Path, left: Callable[[], dict[str, Any]]
) -> None:
    (tmp_path / "audit.json").write_text("of yesterday")
    stops = TRAINS.replace("    optimizer.step()", CAUGHT)
    asked = ("--audit", "audit.json", "--require", "double-fix=retired,absent")

    done = launch(*RUN, *asked, write(upstream, stops), env=env, cwd=tmp_path)

    step, said = done.stdout.splitlines()
    assert (done.returncode, step) == (7, "before step 0"), done.stderr
    assert said.startswith("RequirementError: double-fix has to be retired or absent and is active: ")
    assert decision(left()) == "active"
    assert "ranks" not in left()


IMPORTS = (
    "import importlib, os, subprocess, sys, torch\nlayers = importlib.import_module(os.environ['NAME'] + '.layers')\n"
)
HELPS = f"{IMPORTS}for _ in range(5): layers.double(1.0)"
CALLS = {
    "a run that forks": (
        f"{TRAINS}\nimport os\nif os.fork() == 0: sys.exit(0)\nos.wait()\nlayers.double(1.0)\n",  # the child leaves nothing
        3,
    ),
    "a run whose helper calls nothing": (
        f"{IMPORTS}layers.double(1)\nsubprocess.run([sys.executable, '-c', 'import torch'], check=True)",
        1,
    ),
    "a run that trains, and whose helper calls": (
        f"{TRAINS}\nimport subprocess\nsubprocess.run([sys.executable, '-c', {HELPS!r}], check=True)\nos._exit(0)\n",
        1,  # the audit is the one of its first step, or of the helper
    ),
}
"""Launchers, and the number of calls of the seam in the audit of each."""


@pytest.mark.full
@pytest.mark.parametrize("run", CALLS)
def test_the_audit_at_the_end_has_the_number_of_calls_of_each_seam_by_the_run_itself(
    upstream: Upstream, env: dict[str, str], tmp_path: Path, left: Callable[[], dict[str, Any]], run: str
) -> None:
    launcher, times = CALLS[run]

    done = launch(*RUN, "--audit", tmp_path / "audit.json", write(upstream, launcher), env=env)

    assert done.returncode == 0, done.stderr
    (part,) = [each for each in left()["decisions"] if each["id"] == "double-fix"]
    assert part["calls"] == {f"{upstream.name}.layers.double": times}
    assert part["version"] is not None


def test_a_hook_of_another_library_behind_ours_does_not_end_the_first_step(
    upstream: Upstream, env: dict[str, str], tmp_path: Path, left: Callable[[], dict[str, Any]]
) -> None:
    hooks = (
        "from torch.optim.optimizer import register_optimizer_step_pre_hook\n"
        "register_optimizer_step_pre_hook(lambda *_: print('theirs', flush=True))\n"
    )

    done = launch(*RUN, "--audit", tmp_path / "audit.json", write(upstream, hooks + TRAINS), env=env)

    steps = "".join(f"before step {step}\ntheirs\n" for step in range(2))
    assert (done.returncode, done.stdout) == (0, f"{steps}trained\n"), done.stderr
    assert decision(left()) == "active"


def test_a_launcher_that_ends_before_a_step_writes_its_armed_overlays(
    upstream: Upstream, env: dict[str, str], tmp_path: Path, left: Callable[[], dict[str, Any]]
) -> None:
    (tmp_path / "audit.json").write_text("of yesterday")

    launch(*RUN, "--audit", tmp_path / "audit.json", write(upstream, "raise SystemExit(3)"), env=env)

    assert decision(left()) == "armed"


def test_rank_0_of_a_run_without_steps_writes_its_audit_at_the_end(
    upstream: Upstream, env: dict[str, str], tmp_path: Path, left: Callable[[], dict[str, Any]]
) -> None:
    calls = "import importlib, os, torch\nlayers = importlib.import_module(os.environ['NAME'] + '.layers')\nlayers.double(1)"
    evaluates = "\n".join(
        [
            f"{calls}; layers.double(1)",
            "import subprocess, sys",
            f"rank_1 = subprocess.run([sys.executable, '-c', {calls!r}], env={{**os.environ, 'RANK': '1'}}, check=True)",
        ]
    )

    done = launch(*RUN, "--audit", tmp_path / "audit.json", write(upstream, evaluates), env={**env, "RANK": "0"})

    assert done.returncode == 0, done.stderr
    (part,) = [each for each in left()["decisions"] if each["id"] == "double-fix"]
    assert sum(part["calls"].values()) == 2


@pytest.mark.full
def test_an_audit_is_written_into_a_fifo_and_the_end_of_a_run_does_not_wait_for_it(
    upstream: Upstream, env: dict[str, str], tmp_path: Path
) -> None:
    evaluates = "import importlib, os, torch; importlib.import_module(os.environ['NAME'] + '.layers').double(1.0)"
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)

    done = launch(*RUN, "--audit", fifo, write(upstream, evaluates), env=env)

    assert done.returncode == 0, done.stderr
    assert fifo.is_fifo()
    with open(reader) as written:
        assert decision(json.load(written)) == "armed"


@pytest.mark.full
def test_a_compiled_step_leaves_it_too(
    upstream: Upstream, env: dict[str, str], tmp_path: Path, left: Callable[[], dict[str, Any]]
) -> None:
    found = "importlib.import_module(os.environ['NAME'] + '.layers')\n"

    done = launch(
        *RUN, "--audit", tmp_path / "audit.json", write(upstream, f"import importlib, os\n{found}{COMPILED}"), env=env
    )

    assert done.stdout == "trained\n", done.stderr
    assert decision(left()) == "active"


def test_a_file_that_cannot_be_written_is_found_before_the_launcher_starts(
    upstream: Upstream, env: dict[str, str], tmp_path: Path
) -> None:
    done = launch(*RUN, "--audit", tmp_path / "nowhere" / "audit.json", write(upstream, "print('ran')"), env=env)

    assert (done.returncode, done.stdout) == (ExitCode.NOT_CHECKED, "")
    assert f"{tmp_path}/nowhere/audit.json: No such file or directory" in done.stderr


# --- required decisions ---


@pytest.mark.full
def test_a_run_with_its_required_decisions_goes_on_even_if_the_file_cannot_be_written_any_more(
    upstream: Upstream, env: dict[str, str], tmp_path: Path
) -> None:
    folder = tmp_path / "gone"
    folder.mkdir()
    launcher = write(upstream, f"import shutil; shutil.rmtree({str(folder)!r})\n{TRAINS}")
    asked = ("--audit", folder / "audit.json", "--require=double-fix=active", "--require", "mtp-z-loss=armed,absent")

    done = launch(*RUN, *asked, launcher, env=env)

    assert (done.returncode, done.stdout) == (0, "before step 0\nbefore step 1\ntrained\n"), done.stderr
    assert f"{folder}/audit.json: the audit cannot be written: No such file or directory" in done.stderr


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (["--require"], 2, "--require: ID=DECISION is missing"),
        (["--audit="], 2, "--audit: FILE is missing"),
        (["--require", "double-fx=active"], 2, "there is no overlay double-fx; did you mean double-fix?"),
        (["--require", "double-fix=on"], 2, "double-fix=on: there is no decision 'on'"),
    ],
)
def test_wrong_options_are_refused_before_the_launcher_starts(
    upstream: Upstream, env: dict[str, str], words: list[str], code: int, says: str
) -> None:
    launcher = [] if words[-1] in {"--require", "--audit="} else [write(upstream, "print('ran')")]

    done = launch(*RUN, *words, *launcher, env=env)

    assert (done.returncode, done.stdout) == (code, "")
    assert says in " ".join(done.stderr.split())


def test_options_of_ours_are_in_front_of_those_of_python() -> None:
    asked, has_to_prove, rest = asked_of_us(
        ["--verify-ranks", "--require", "a=active", "-u", "x.py", "--audit", "its own"]
    )

    assert not has_to_prove
    assert asked_of_us(["--verify-ranks", "--witness", "x.py", "--witness"])[1:] == (True, ["x.py", "--witness"])
    assert asked == {"MEGACPP_OVERLAYS_VERIFY_RANKS": "on", "MEGACPP_OVERLAYS_REQUIRE": "a=active"}
    assert rest == ["-u", "x.py", "--audit", "its own"]
    with pytest.raises(RequirementError):
        asked_of_us(["--audit"])


def test_the_variables_say_the_same_and_are_checked_at_import() -> None:
    env = {"MEGACPP_OVERLAYS_VERIFY_RANKS": "ON", "MEGACPP_OVERLAYS_REQUIRE": "x=active  y=absent,retired"}

    found = Settings.from_env(env, {"x", "y"})

    assert found.verify_ranks
    assert [(each.id, each.decisions) for each in found.required] == [("x", ("active",)), ("y", ("absent", "retired"))]
    with pytest.raises(SettingsError, match="MEGACPP_OVERLAYS_REQUIRE: z=active: there is no overlay z"):
        Settings.from_env({"MEGACPP_OVERLAYS_REQUIRE": "z=active"}, {"x", "y"})
    with pytest.raises(SettingsError, match=r"MEGACPP_OVERLAYS_AUDIT=audit\.json is not an absolute path"):
        Settings.from_env({"MEGACPP_OVERLAYS_AUDIT": "audit.json"}, {"x"})


# --- ranks ---


def test_ranks_are_compared_where_a_group_is_made_and_audits_keep_that_and_ranks_that_differ_end_there(
    upstream: Upstream, env: dict[str, str], tmp_path: Path, left: Callable[[], dict[str, Any]]
) -> None:
    """Two groups, made by two names of one function; before the second one, rank 1 undoes its overlays."""
    options = ("--audit", tmp_path / "audit.json", "--verify-ranks")

    done = launch(*RUN, *options, *TORCHRUN, write(upstream, RANKS), tmp_path, env=env)

    agreed = {"size": 2, "agreed": True}
    assert done.stdout.splitlines() == [f"met armed {agreed}", f"made a step active {agreed}"], done.stderr
    assert done.returncode == 1
    assert done.stderr.count("RanksError: 2 ranks do not run the same code: rank 0 against rank 1") == 2
    assert left()["ranks"] == {"size": 2, "agreed": False}
    page = tmp_path / "run.html"
    assert cli.main(["audit", "--html", str(page), "--of", str(tmp_path / "audit.json")]) == 0
    assert "the 2 do not run the same code, or not all came" in page.read_text()


def test_a_package_that_comes_after_the_group_compares_at_once_and_lets_the_error_out(
    monkeypatch: pytest.MonkeyPatch, session: Callable[..., Session]
) -> None:
    torch = pytest.importorskip("torch")

    def differ(_: Session) -> Any:
        raise RanksError("2 ranks do not run the same code")

    monkeypatch.setattr(first_step.ranks, "verify", differ)
    for place in (torch.distributed, torch.distributed.distributed_c10d):
        monkeypatch.setattr(place, "init_process_group", place.init_process_group)  # as it was, afterwards
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    step = first_step.FirstStep(session(verify_ranks=True))

    with pytest.raises(RanksError):
        step.watch()

    step._hooks.close()


# --- the page of a written audit ---


def kept(tmp_path: Path, **more: object) -> Path:
    part = {"id": "double-fix", "target": "a:b", "decision": more.pop("decision", "active"), "variable": "V", "pack": 9}
    data = {"schema": 1, "version": "0.2.0", "mode": "auto", "fingerprint": "f" * 16, "decisions": [part], **more}
    path = tmp_path / "audit.json"
    path.write_text(json.dumps(data))
    return path


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"ranks": {"size": 8, "agreed": True}}, "all 8 run the same code"),
        ({"ranks": {"size": 8, "agreed": False}}, "the 8 do not run the same code, or not all came"),
        ({}, "not compared by what made this page"),
        ({"ranks": "yes"}, "not compared by what made this page"),
    ],
)
def test_the_page_says_whether_ranks_were_compared(tmp_path: Path, more: dict[str, object], says: str) -> None:
    code = cli.main(["audit", "--html", str(tmp_path / "x.html"), "--of", str(kept(tmp_path, **more))])

    assert code == ExitCode.CLEAN
    assert re.search(rf"<dt>Ranks</dt><dd>{says}", (tmp_path / "x.html").read_text())


def test_the_page_of_a_conflict_is_found(tmp_path: Path) -> None:
    of = kept(tmp_path, decision="conflict")

    assert cli.main(["audit", "--html", str(tmp_path / "x.html"), "--of", str(of)]) == ExitCode.FOUND


@pytest.mark.parametrize("words", [[], ["--html", "x.html", "--json"], ["--html", "x.html", "double-fix"]])
def test_the_page_of_a_file_goes_with_nothing_else(
    tmp_path: Path, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["audit", *words, "--of", str(kept(tmp_path))])

    assert ended.value.code == ExitCode.USAGE
    assert "--of is about the page of a kept audit" in capsys.readouterr().err


def test_a_file_that_is_no_audit_is_wrong_usage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "x.json").write_text("{}")

    with pytest.raises(SystemExit) as ended:
        cli.main(["audit", "--html", str(tmp_path / "x.html"), "--of", str(tmp_path / "x.json")])

    assert ended.value.code == ExitCode.USAGE
    assert "x.json has no audit" in capsys.readouterr().err
