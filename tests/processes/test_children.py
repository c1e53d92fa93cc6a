"""Child processes of a launcher end in the same state, however they are started. Also a plugin, end to end."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from launchers import environment, launch, write
from made_up import Upstream
from places import ROOT
from releases import only

import megacpp_overlays
from megacpp_overlays.errors import ChildrenError, SettingsError
from megacpp_overlays.loader.settings import this_environment
from megacpp_overlays.processes import children

PYTHONS = {name: ROOT / ".envs" / f"loader-{name}" / "bin" / "python" for name in ("3.10", "3.11", "3.13")}

LAUNCHER = """
import megacpp_overlays
import importlib, json, multiprocessing, sys

NAME = sys.argv[1]
METHODS = ("fork", "spawn", "forkserver")

def state(_=None):
    module = importlib.import_module(NAME + ".layers")
    decision = [record.decision.value for record in megacpp_overlays.audit().records if record.overlay.id == "double-fix"]
    return [module.double(1), module.double.__wrapped__(1), *decision]

def children():
    pools = {method: multiprocessing.get_context(method).Pool(1) for method in METHODS}
    found = {method: pool.apply(state) for method, pool in pools.items()}
    # A function that a seam replaced travels by reference and arrives as the seam of the other side.
    for method, pool in pools.items():
        found[method] += [pool.apply(importlib.import_module(NAME + ".layers").double, (1,))]
        pool.terminate()
    return found

if __name__ == "__main__":
    armed = children()
    print(json.dumps({"parent": state(), "armed": armed, "imported": children()}))
"""


@pytest.fixture
def env(upstream: Upstream) -> dict[str, str]:
    return environment(upstream, MEGACPP_OVERLAYS_LOG="logging")


def said(done: subprocess.CompletedProcess[str]) -> object:
    """Return the last line that a launcher printed, parsed as JSON."""
    assert done.returncode == 0, f"exit {done.returncode}\n{done.stdout}\n{done.stderr}"
    return json.loads(done.stdout.splitlines()[-1])


# --- a launcher that imports this package in its first line ---------------------------------------------------


def test_a_child_ends_in_the_state_of_its_parent_whether_that_is_armed_or_has_imported_the_target(
    upstream: Upstream, env: dict[str, str]
) -> None:
    done = launch(write(upstream, LAUNCHER), upstream.name, env=env)

    children = {method: [2, 3, "active", 2] for method in ("fork", "spawn", "forkserver")}
    assert said(done) == {"parent": [2, 3, "active"], "armed": children, "imported": children}


# --- every kind of child, with and without reaching it --------------------------------------------------------

KINDS = """
import concurrent.futures, importlib, json, multiprocessing, os, subprocess, sys

LAYERS = os.environ["NAME"] + ".layers"
BY_HAND = "import importlib, os; print(importlib.import_module(os.environ['NAME'] + '.layers').double(1))"

def state(*_):
    return importlib.import_module(LAYERS).double(1)

def run(*command, **options):
    done = subprocess.run(command, capture_output=True, text=True, **options)
    return int(done.stdout.split()[0])

def pool(method, preload=()):
    context = multiprocessing.get_context(method)
    with context.Pool(1) as workers:
        return workers.apply(state)

def executor():
    with concurrent.futures.ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as workers:
        return workers.submit(state).result()

def by_posix_spawn():
    read, write = os.pipe()
    os.posix_spawn(sys.executable, [sys.executable, "-c", BY_HAND], os.environ, file_actions=[(os.POSIX_SPAWN_DUP2, write, 1)])
    os.close(write)
    return int(os.read(read, 9))

def main():
    import megacpp_overlays
    if sys.argv[1] == "reached":
        megacpp_overlays.reach_children()
    if sys.argv[2] == "preloaded":
        multiprocessing.get_context("forkserver").set_forkserver_preload([LAYERS])
    own = {name: os.environ[name] for name in ("NAME", "PATH", "MEGACPP_OVERLAYS_PLUGINS", "MEGACPP_OVERLAYS_LOG")}
    own["PYTHONPATH"] = os.environ["PLAIN_PATH"]
    handed = {**own, **megacpp_overlays.child_environment()}
    kinds = {
        "fork": lambda: pool("fork"),
        "spawn": lambda: pool("spawn"),
        "forkserver": lambda: pool("forkserver"),
        "executor": executor,
        "subprocess": lambda: run(sys.executable, "-c", BY_HAND),
        "posix_spawn": by_posix_spawn,
        "shell": lambda: run("sh", "-c", "exec \\"$0\\" -c \\"$1\\"", sys.executable, BY_HAND),
        "grandchild": lambda: run(sys.executable, "-c", "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1]])", BY_HAND),
        "environment of its own": lambda: run(sys.executable, "-c", BY_HAND, env=own),
        "handed child_environment()": lambda: run(sys.executable, "-c", BY_HAND, env=handed),
        "-S": lambda: run(sys.executable, "-S", "-c", BY_HAND),
        "-I": lambda: run(sys.executable, "-I", "-c", "import sys; sys.path[:0] = sys.argv[1].split(':'); " + BY_HAND, own["PYTHONPATH"]),
    }
    print(json.dumps({kind: kinds[kind]() for kind in sys.argv[3:] or kinds}))

if __name__ == "__main__":
    main()
"""

BROKEN, REPAIRED = 3, 2
BY_ITSELF = {"fork", "handed child_environment()"}
NEVER = {"environment of its own", "-S", "-I"}


@pytest.mark.parametrize("preload", [pytest.param("preloaded", marks=pytest.mark.full), "not preloaded"])
@pytest.mark.parametrize("reach", ["reached", "left alone"])
def test_each_kind_of_child_runs_repaired_or_stock_code(
    upstream: Upstream, env: dict[str, str], reach: str, preload: str
) -> None:
    launcher = write(upstream, KINDS)

    found = said(launch(launcher, reach, preload, env={**env, "PLAIN_PATH": env["PYTHONPATH"]}))

    assert isinstance(found, dict)
    repaired = found.keys() - NEVER if reach == "reached" else BY_ITSELF
    assert found == {kind: REPAIRED if kind in repaired else BROKEN for kind in found}
    assert len(found) == 12


@pytest.mark.parametrize(
    "kinds", [pytest.param((), marks=pytest.mark.full), ("spawn", "grandchild", "-S")], ids=["all", "few"]
)
def test_run_reaches_the_same_children_as_reach_children(
    upstream: Upstream, env: dict[str, str], kinds: tuple[str, ...]
) -> None:
    launcher = write(upstream, KINDS)
    env = {**env, "PLAIN_PATH": env["PYTHONPATH"]}

    found = said(launch("-m", "megacpp_overlays", "run", launcher, "left alone", "not preloaded", *kinds, env=env))

    assert isinstance(found, dict)
    assert {kind for kind in found if found[kind] == BROKEN} == (NEVER & {*kinds} if kinds else NEVER)


TORCH = """
import importlib, json, multiprocessing, os, sys, warnings

LAYERS = os.environ["NAME"] + ".layers"

class Samples:
    def __len__(self):
        return 2

    def __getitem__(self, at):
        return importlib.import_module(LAYERS).double(1)

def load(context):
    from torch.utils.data import DataLoader
    return [int(batch) for batch in DataLoader(Samples(), batch_size=1, num_workers=1, multiprocessing_context=context)]

def report(_, queue):
    queue.put(importlib.import_module(LAYERS).double(1))

def spawned():
    import torch.multiprocessing as mp
    queue = mp.get_context("spawn").SimpleQueue()
    mp.spawn(report, args=(queue,), nprocs=1)
    return queue.get()

def inductor():
    from torch._inductor.compile_worker.subproc_pool import SubprocKind, SubprocPool
    pool = SubprocPool(1, kind=SubprocKind.FORK)
    try:
        return pool.submit(inductor_job.work).result(60)
    finally:
        pool.shutdown()

if __name__ == "__main__":
    import inductor_job, megacpp_overlays
    left_alone = {"fork": load("fork"), "spawn": load("spawn"), "mp.spawn": spawned(), "inductor": inductor()}
    megacpp_overlays.reach_children()
    print(json.dumps([left_alone, {"spawn": load("spawn"), "mp.spawn": spawned(), "inductor": inductor()}]))
"""
INDUCTOR_JOB = """
import importlib, os

def work():
    return importlib.import_module(os.environ["NAME"] + ".layers").double(1)
"""


@pytest.mark.full
@pytest.mark.upstream
def test_workers_of_torch_are_reached_like_any_other(upstream: Upstream, env: dict[str, str]) -> None:
    pytest.importorskip("torch")
    write(upstream, INDUCTOR_JOB, "inductor_job")

    left_alone, reached = said(launch("-W", "ignore", write(upstream, TORCH), env=env))  # type: ignore[misc]

    assert left_alone == {"fork": [REPAIRED] * 2, "spawn": [BROKEN] * 2, "mp.spawn": BROKEN, "inductor": BROKEN}
    assert reached == {"spawn": [REPAIRED] * 2, "mp.spawn": REPAIRED, "inductor": REPAIRED}


# --- the environment ------------------------------------------------------------------------------------------


ENTRIES = st.lists(st.text("ab/. ", max_size=4), max_size=5)


@given(before=ENTRIES, after=ENTRIES)
def test_the_path_begins_with_the_startup_folder_once_and_keeps_the_rest(before: list[str], after: list[str]) -> None:
    for middle in ([], [children.STARTUP]):
        value = os.pathsep.join([*before, *middle, *after])
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("PYTHONPATH", value)
            made = megacpp_overlays.child_environment()["PYTHONPATH"]
            patch.setenv("PYTHONPATH", made)
            again = megacpp_overlays.child_environment()["PYTHONPATH"]

        rest = [*before, *after] if value else []
        assert made.split(os.pathsep) == [children.STARTUP, *rest]
        assert again == made


def test_the_variables_carry_every_setting_of_ours_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONPATH", raising=False)
    monkeypatch.setenv("MEGACPP_OVERLAYS", "observe")
    monkeypatch.setenv("MEGACPP_LINEAR_CE_LOGITS", "keep")
    monkeypatch.setenv("MEGACPP_REQUIRE_BROWSER", "1")

    assert megacpp_overlays.child_environment() == {
        "MEGACPP_OVERLAYS": "observe",
        "MEGACPP_LINEAR_CE_LOGITS": "keep",
        "MEGACPP_OVERLAYS_CHILDREN": this_environment(),
        "PYTHONPATH": children.STARTUP,
    }


def test_a_folder_that_a_path_cannot_hold_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(children, "STARTUP", "/opt/a:b/startup")

    with pytest.raises(ChildrenError, match="PYTHONPATH cannot lead to it: move it"):
        megacpp_overlays.child_environment()


@pytest.mark.parametrize("path", [None, "", "/a:/b", f"/a:{children.STARTUP}"])
def test_closing_puts_the_environment_back(monkeypatch: pytest.MonkeyPatch, path: str | None) -> None:
    monkeypatch.delenv("PYTHONPATH", raising=False)
    if path is not None:
        monkeypatch.setenv("PYTHONPATH", path)
    before, entries = dict(os.environ), list(sys.path)

    with megacpp_overlays.reach_children() as reached:
        assert os.environ["PYTHONPATH"].startswith(children.STARTUP)
        assert sys.path[1] == children.STARTUP
    reached.close()

    assert (dict(os.environ), sys.path) == (before, entries)


def test_closing_keeps_a_later_change_of_pythonpath(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/a")
    reached = megacpp_overlays.reach_children()
    monkeypatch.setenv("PYTHONPATH", f"/new:{os.environ['PYTHONPATH']}")

    reached.close()

    assert os.environ["PYTHONPATH"] == "/new:/a"
    assert "MEGACPP_OVERLAYS_CHILDREN" not in os.environ


@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=["first first", "last first"])
def test_handles_may_close_in_any_order(order: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/a")
    before, entries = dict(os.environ), list(sys.path)
    handles = [megacpp_overlays.reach_children(), megacpp_overlays.reach_children()]

    handles[order[0]].close()
    assert os.environ["PYTHONPATH"] == f"{children.STARTUP}:/a"
    handles[order[1]].close()

    assert (dict(os.environ), sys.path) == (before, entries)


# --- the start-up file ------------------------------------------------------------------------------------


def test_any_python_can_read_the_startup_file() -> None:
    ast.parse(Path(children.STARTUP, "sitecustomize.py").read_text(), feature_version=(3, 6))


STARTS = "import sys; print('megacpp_overlays' in sys.modules, 'sitecustomize' in sys.modules, sys.path[1:])"
COUNTS = "import os\nos.environ['RUNS'] = os.environ.get('RUNS', '') + 'once '\n"
LOOKS = "import os, sitecustomize; print(os.environ['RUNS'], sitecustomize.__file__)"


def test_a_python_without_a_sitecustomize_of_its_own_still_has_none(env: dict[str, str]) -> None:
    script = ("-c", "try:\n import sitecustomize\nexcept ModuleNotFoundError as error: print(error)")
    if launch(*script, env=env).stdout != "No module named 'sitecustomize'\n":
        pytest.skip("this Python has one")

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", env["PYTHONPATH"])
        armed = {**env, **megacpp_overlays.child_environment()}

    assert launch(*script, env=armed).stdout == launch(*script, env=env).stdout
    assert launch("-c", STARTS, env=armed).stdout.startswith("True False")


@pytest.mark.parametrize("environment_is", ["this", "another"])
def test_in_a_working_folder_that_was_deleted_the_sitecustomize_that_was_there_runs_as_well(
    upstream: Upstream, env: dict[str, str], tmp_path: Path, environment_is: str
) -> None:
    """With a relative entry on the path a newer Python does not start at all there."""
    python = PYTHONS["3.10"]
    if not python.exists():
        pytest.skip("no Python 3.10 here")
    prefix = python.parent.parent.resolve()
    (upstream.folder / "sitecustomize.py").write_text(COUNTS)
    (tmp_path / "gone").mkdir()
    path = os.pathsep.join([children.STARTUP, "relative", env["PYTHONPATH"]])
    name = f"cpython-310:{prefix}" if environment_is == "this" else "cpython-399:/elsewhere"

    done = subprocess.run(
        ["sh", "-c", 'rmdir ../gone && exec "$0" -c "import os; print(os.environ[\'RUNS\'])"', python],
        cwd=tmp_path / "gone",
        env={**env, "PYTHONPATH": path, "MEGACPP_OVERLAYS_CHILDREN": name},
        capture_output=True,
        text=True,
        check=False,
    )

    assert (done.returncode, done.stdout, done.stderr) == (0, "once \n", "")


@pytest.mark.parametrize("environment_is", ["this", "another"])
@pytest.mark.parametrize("text", [COUNTS, f"{COUNTS}1 / 0\n", f"{COUNTS}import no_such_module\n"])
def test_the_sitecustomize_that_was_there_runs_once_and_fails_as_it_did(
    upstream: Upstream, env: dict[str, str], text: str, environment_is: str
) -> None:
    (upstream.folder / "sitecustomize.py").write_text(text)
    plain = launch("-c", "import os; print(os.environ['RUNS'])", env=env)
    name = this_environment() if environment_is == "this" else "cpython-399:/elsewhere"
    path = os.pathsep.join([children.STARTUP, env["PYTHONPATH"]])
    env = {**env, "PYTHONPATH": path, "MEGACPP_OVERLAYS_CHILDREN": name}

    done = launch("-c", "import os; print(os.environ['RUNS'])", env=env)

    assert plain.stdout == "once \n"
    assert (done.returncode, done.stdout, done.stderr) == (plain.returncode, plain.stdout, plain.stderr)
    if text == COUNTS:
        assert launch("-c", LOOKS, env=env).stdout == f"once  {upstream.folder}/sitecustomize.py\n"


def test_another_environment_is_left_alone(upstream: Upstream, env: dict[str, str], tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "other"], check=True)
    python = tmp_path / "other" / "bin" / "python"
    [packages] = (tmp_path / "other" / "lib").glob("python*/site-packages")
    (packages / "sitecustomize.py").write_text(COUNTS)
    script = "import os, sys; print(os.environ['RUNS'], sys.path[1:], 'megacpp_overlays' in sys.modules)"
    launcher = f"""
import megacpp_overlays, subprocess, sys
reached = megacpp_overlays.reach_children()
done = subprocess.run([{str(python)!r}, "-c", {script!r}], capture_output=True, text=True)
print(done.stdout, done.stderr, done.returncode)
"""
    plain = subprocess.run([python, "-c", script], env=env, capture_output=True, text=True, check=True)

    done = launch(write(upstream, launcher), env=env)

    assert plain.stdout.startswith("once ")
    assert plain.stdout.endswith("False\n")
    assert done.stdout == f"{plain.stdout}  0\n"


@pytest.mark.full
@pytest.mark.parametrize("version", PYTHONS)
def test_every_python_that_the_package_supports_arms(version: str, env: dict[str, str], upstream: Upstream) -> None:
    python = PYTHONS[version]
    if not python.exists():
        pytest.skip(f"no Python {version} here")
    launcher = write(upstream, KINDS)
    env = {**env, "PLAIN_PATH": env["PYTHONPATH"]}

    done = subprocess.run(
        [python, "-m", "megacpp_overlays", "run", launcher, "left alone", "not preloaded"],
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )

    found = said(done)
    assert isinstance(found, dict)
    assert {kind for kind in found if found[kind] == BROKEN} == NEVER


@pytest.mark.parametrize(
    ("variable", "value", "code", "says"),
    [
        ("MEGACPP_OVERLAYS", "atuo", 2, "SettingsError: MEGACPP_OVERLAYS=atuo is not known; did you mean auto"),
        ("MEGACPP_OVERLAYS_RECEIPTS", "receipts", 2, "is not an absolute path, and children may start in any folder"),
        ("DAMAGED", "yes", 1, "RegistryError: plugin double cannot be loaded"),
    ],
)
def test_a_python_that_cannot_be_armed_ends_at_once_and_says_how_to_go_on(
    upstream: Upstream, env: dict[str, str], variable: str, value: str, code: int, says: str
) -> None:
    env = {**env, "PYTHONPATH": f"{children.STARTUP}:{env['PYTHONPATH']}", variable: value}
    env["MEGACPP_OVERLAYS_CHILDREN"] = this_environment()
    if variable == "DAMAGED":
        upstream.write("1 / 0", module="plugin")

    done = launch("-c", "print('ran')", env=env)

    assert (done.returncode, done.stdout) == (code, "")
    assert says in done.stderr
    assert "unset MEGACPP_OVERLAYS_CHILDREN to start it without overlays" in done.stderr
    del env["MEGACPP_OVERLAYS_CHILDREN"]
    assert launch("-c", "print('ran')", env=env).stdout == "ran\n"


@pytest.mark.parametrize("is_child", [True, False])
def test_a_child_that_may_not_write_receipts_works_on_and_says_so_while_who_asks_for_them_is_stopped(
    env: dict[str, str], is_child: bool
) -> None:
    """A child may run as another user, or in another container; the parent learns of it when it demands the receipt."""
    env = {**env, "PYTHONPATH": f"{children.STARTUP}:{env['PYTHONPATH']}", "MEGACPP_OVERLAYS_RECEIPTS": "/dev/null/x"}
    if is_child:
        env["MEGACPP_OVERLAYS_CHILDREN"] = this_environment()

    done = launch("-c", "import megacpp_overlays; print('ran')", env=env)

    assert done.stdout == ("ran\n" if is_child else "")
    assert (done.returncode == 0) is is_child
    assert "name a folder that this process may write, or unset it" in done.stderr


@pytest.mark.parametrize("when", ["after", "during"])
def test_the_folder_of_a_closed_handle_stays_removed_when_a_child_writes_its_receipt(
    env: dict[str, str], tmp_path: Path, when: str
) -> None:
    """The child writes after the folder was removed, or when its files are deleted and the folder itself is next."""
    launcher = tmp_path / "closes.py"
    launcher.write_text(CLOSES)

    done = launch(str(launcher), when, env=env)

    assert done.returncode == 0, done.stderr
    assert said(done) == {"gave": True, "left": [], "warnings": [""]}


# --- receipts -------------------------------------------------------------------------------------------------

CLOSES = """
import glob, io, json, logging, multiprocessing, os, sys
import megacpp_overlays

def wait(pipe):
    warned = logging.StreamHandler(io.StringIO())
    warned.setLevel(logging.WARNING)
    logging.getLogger("megacpp_overlays").addHandler(warned)
    pipe.recv()
    megacpp_overlays.undo()  # writes a receipt, as every change of a decision does
    pipe.send(warned.stream.getvalue())

if __name__ == "__main__":
    here, there = multiprocessing.Pipe()
    handle = megacpp_overlays.reach_children(receipts=True)
    child = multiprocessing.get_context("spawn").Process(target=wait, args=(there,))
    child.start()
    gave, folder = len(handle.demand([child], timeout=3600)) == 1, handle.folder
    warnings = []

    def child_writes():
        if not warnings:
            here.send("go on")
            warnings.append(here.recv())

    remove = os.rmdir

    def child_writes_first(*arguments, **options):
        child_writes()
        return remove(*arguments, **options)

    if sys.argv[1] == "during":
        os.rmdir = child_writes_first
    handle.close()
    os.rmdir = remove
    child_writes()
    child.join()
    print(json.dumps({"gave": gave, "left": glob.glob(f"{folder}*"), "warnings": warnings}))
"""

RECEIPTS = """
import importlib, json, multiprocessing, os, signal, subprocess, sys, time
import megacpp_overlays
from megacpp_overlays.errors import ChildrenError

LAYERS = os.environ["NAME"] + ".layers"

def use():
    return importlib.import_module(LAYERS)

def wait(*_):
    time.sleep(600)

def use_and_wait(ready=None):
    use()
    if ready:
        ready.set()
    wait()

def child(method, work=wait, *arguments):
    process = multiprocessing.get_context(method).Process(target=work, args=arguments, name="reader", daemon=True)
    process.start()
    return process

def using(method):
    ready = multiprocessing.get_context(method).Event()
    process = child(method, use_and_wait, ready)
    assert ready.wait(3600)
    return process

def ended(process):
    process.wait()
    return process

def demanded(*arguments):
    return reached.demand(*arguments, timeout=3600)

def refused(*arguments, **options):
    try:
        reached.demand(*arguments, **{"timeout": 3600, **options})
    except ChildrenError as error:
        return str(error)

def state(receipt):
    decisions = [d["decision"] for d in receipt.statement["decisions"] if d["id"] == "double-fix"]
    return [receipt.started, *decisions]

SLEEP = [sys.executable, "-c", "import time; time.sleep(600)"]
"""


def receipts(upstream: Upstream, env: dict[str, str], body: str, *words: str, **variables: str) -> object:
    """Run a launcher with this body, which prints facts about its children; return its output, parsed as JSON."""
    body = textwrap.indent(textwrap.dedent(body), "    ")
    launcher = write(upstream, f"{RECEIPTS}\nif __name__ == '__main__':\n{body}\n")
    return said(launch(launcher, *words, env={**env, **variables}))


def test_every_live_child_gives_a_receipt_and_renews_it_with_each_decision(
    upstream: Upstream, env: dict[str, str]
) -> None:
    body = """
    reached = megacpp_overlays.reach_children(receipts=True)
    early = [child("fork"), child("spawn"), child("forkserver"), using("spawn"), using("forkserver")]
    use()
    processes = [*early, using("fork")]
    given = {receipt.pid: state(receipt) for receipt in demanded()}
    print(json.dumps([given[process.pid] for process in processes]))
    """

    assert receipts(upstream, env, body) == [
        ["fork", "armed"],
        ["exec", "armed"],
        ["fork", "armed"],
        ["exec", "active"],
        ["fork", "active"],
        ["fork", "active"],
    ]


def test_any_process_can_be_asked_by_its_object_or_its_number(upstream: Upstream, env: dict[str, str]) -> None:
    body = """
    reached = megacpp_overlays.reach_children(receipts=sys.argv[1])
    first, second, third = child("spawn"), subprocess.Popen(SLEEP), subprocess.Popen(["sh", "-c", "exec \\"$@\\"", "sh", *SLEEP])
    given = demanded([first, second, third.pid])
    assert [receipt.pid for receipt in given] == [first.pid, second.pid, third.pid]
    assert {receipt.ppid for receipt in given} == {os.getpid()}
    ended = subprocess.Popen([sys.executable, "-c", "pass"])
    ended.wait()
    assert demanded([ended])[0].pid == ended.pid
    second.kill(), third.kill()
    print(json.dumps([[receipt.pid for receipt in given], [r.pid for r in reached.receipts()], ended.pid]))
    """

    asked, reported, ended = receipts(upstream, env, body, str(upstream.folder / "receipts"))  # type: ignore[misc]

    # The resource tracker of `multiprocessing` is a Python, too.
    assert {*asked, ended} <= set(reported)
    assert reported == sorted(reported)
    assert len(list((upstream.folder / "receipts").glob("*.json"))) > len(reported) - 1


SILENT = {
    "subprocess.Popen([sys.executable, '-I', *SLEEP[1:]])": "or was started with -I, -E or -S",
    "subprocess.Popen(['sleep', '600'])": "it is no Python of this environment",
    "subprocess.Popen(SLEEP, env={})": "started without MEGACPP_OVERLAYS_CHILDREN",
    "subprocess.Popen(SLEEP, env={**os.environ, 'PYTHONPATH': '/x'})": "a PYTHONPATH of its own",
    "early": "(a fork server?) that was; start it after reach_children()",
    "ended(subprocess.Popen(['sh', '-c', 'exit 3']))": "it has ended with 3",
    "subprocess.Popen(['sleep', '600'], preexec_fn=lambda: None)": "it is no Python of this environment",
    "2**22 + 1": "(no such process): it has ended",
}
"""Children that give no receipt, and the reason that the error gives for each."""


def test_a_silent_child_is_named_with_the_reason(upstream: Upstream, env: dict[str, str]) -> None:
    body = f"""
    early = child("forkserver")
    reached = megacpp_overlays.reach_children(receipts=True)
    processes = [eval(start) for start in {[*SILENT]!r}]
    text = refused(processes, timeout=0.5)
    for process in processes:
        if isinstance(process, subprocess.Popen):
            process.kill(), process.wait()
    print(json.dumps([text, [getattr(process, "pid", process) for process in processes]]))
    """

    text, pids = receipts(upstream, env, body)  # type: ignore[misc]

    head, *lines = text.splitlines()
    assert head == "8 of 8 child processes gave no receipt within 0.5 s:"
    for (start, says), pid, line in zip(SILENT.items(), pids, lines, strict=True):
        assert line.startswith(f"- {pid} ("), start
        assert says in line, start


def test_a_receipt_of_another_process_with_the_same_number_does_not_count(
    upstream: Upstream, env: dict[str, str]
) -> None:
    body = """
    reached = megacpp_overlays.reach_children(receipts=True)
    [genuine] = demanded([child("spawn")])
    silent = subprocess.Popen(["sleep", "600"])
    for image in (genuine.image, 0):  # which says nothing: what has ended has no image any more
        forged = genuine._replace(pid=silent.pid, image=image)
        (reached.folder / f"{forged.pid}-{forged.start}-{forged.image}.json").write_text(json.dumps(forged._asdict()))
    (reached.folder / f"{forged.pid}-1-1.json").write_text("[")
    (reached.folder / f"{forged.pid}-2-2.json").write_text('{"pid": 1}')
    text = refused([silent], timeout=0.2)
    silent.kill(), silent.wait()
    print(json.dumps(text))
    """

    assert "gave no receipt" in str(receipts(upstream, env, body))


EDIT = """
text = open(sys.modules[LAYERS].__file__).read()
open(sys.modules[LAYERS].__file__, "w").write(text.replace("CALLS = []", "CALLS = [1]"))
"""
CHANGES = {
    "switch": ("os.environ['MEGACPP_OVERLAY_DOUBLE_FIX'] = 'off'", ("double-fix", "switch")),
    "mode": ("os.environ['MEGACPP_OVERLAYS'] = 'observe'", ("megacpp_overlays", "mode")),
    "plugins": ("os.environ['MEGACPP_OVERLAYS_PLUGINS'] = ''", ("double-fix", "declared")),
    "kernel": ("os.environ['MEGACPP_LINEAR_CE_LOGITS'] = 'keep'", ("megacpp_overlays", "MEGACPP_LINEAR_CE_LOGITS")),
    "source": (EDIT, ("double-fix", "source_sha256")),
    "undone": ("megacpp_overlays.undo()", ("double-fix", "decision")),
}
"""Changes after which a child differs from its parent, and the row of the table that shows each."""


@pytest.mark.parametrize(
    ("changes", "work"),
    only(
        [(("switch", "source", "undone"), "wait"), ((*CHANGES,), "wait"), ((*CHANGES,), "use")],
        [(("switch", "source", "undone"), "wait")],
    ),
    ids=["few", "all", "all in use"],
)
def test_a_child_that_runs_other_code_is_refused(
    upstream: Upstream, env: dict[str, str], changes: tuple[str, ...], work: str
) -> None:
    """Apply each change in turn, start a child with it, then restore the state before the change."""
    body = f"""
    reached = megacpp_overlays.reach_children(receipts=True)
    use()
    good = using("spawn")
    variables, file = dict(os.environ), sys.modules[LAYERS].__file__
    written, told = open(file).read(), []
    for change in {[CHANGES[each][0] for each in changes]!r}:
        assert len(demanded()) == 1
        exec(change)
        odd = {"child" if work == "wait" else "using"}("spawn")
        told.append([odd.pid, refused()])
        odd.kill(), odd.join()
        os.environ.clear(), os.environ.update(variables)
        open(file, "w").write(written)
    print(json.dumps([os.getpid(), told]))
    """

    parent, reported = receipts(upstream, env, body)  # type: ignore[misc]

    for change, (odd, text) in zip(changes, reported, strict=True):
        if change == "source" and work == "wait":
            assert text is None  # it has not imported the edited file, and may never
            continue
        assert text.startswith("Child processes do not run the code of this process:\n"), change
        assert re.search(rf"^{' +'.join(CHANGES[change][1])} ", text, re.MULTILINE), change
        assert "\nWhat to do:\n- " in text
        if change == "undone":
            assert re.search(rf"disabled \(undone in this process\) +this process \({parent}\)", text)
            assert "switch it off with its variable instead" in text
        else:
            assert f" {odd} (reader)\n" in text


@pytest.mark.parametrize(
    ("mode", "decision"),
    only([("auto", "armed"), ("observe", "armed"), ("off", "disabled")], [("auto", "armed")]),
)
def test_a_parent_that_waits_agrees_with_a_child_that_has_imported_it(
    upstream: Upstream, env: dict[str, str], mode: str, decision: str
) -> None:
    body = """
    reached = megacpp_overlays.reach_children(receipts=True)
    using("spawn"), child("spawn")
    print(json.dumps([len(demanded()), [d.decision.value for d in megacpp_overlays.audit().records if d.overlay.id == "double-fix"]]))
    """

    assert receipts(upstream, env, body, MEGACPP_OVERLAYS=mode) == [2, [decision]]


def test_children_agree_with_each_other_even_where_their_parent_waits(upstream: Upstream, env: dict[str, str]) -> None:
    body = """
    reached = megacpp_overlays.reach_children(receipts=True)
    using("spawn")
    import importlib.util
    file = importlib.util.find_spec(LAYERS).origin
    open(file, "a").write("OTHER = 1")
    using("spawn")
    print(json.dumps(refused()))
    """

    assert re.search("double-fix +source_sha256 ", str(receipts(upstream, env, body)))


def test_workers_give_receipts_under_run_when_the_environment_asks(upstream: Upstream, env: dict[str, str]) -> None:
    folder = upstream.folder / "kept"
    launcher = write(upstream, "import subprocess, sys; subprocess.run([sys.executable, '-c', 'pass'], check=True)")

    done = launch("-m", "megacpp_overlays", "run", launcher, env={**env, "MEGACPP_OVERLAYS_RECEIPTS": str(folder)})

    assert done.returncode == 0, done.stderr
    reported = [json.loads(path.read_text()) for path in folder.glob("*.json")]
    assert {receipt["program"] for receipt in reported} >= {str(launcher), "-c"}
    assert all(receipt["statement"]["mode"] == "auto" for receipt in reported)


def test_a_fresh_folder_goes_with_its_handle_and_a_named_one_stays(upstream: Upstream, env: dict[str, str]) -> None:
    body = """
    with megacpp_overlays.reach_children(receipts=True) as reached:
        pass
    named = megacpp_overlays.reach_children(receipts=sys.argv[1])
    left = megacpp_overlays.reach_children(receipts=True)
    if os.fork() == 0:
        sys.exit()  # a forked process that ends in its own way must not take the folder of its parent
    os.wait()
    assert left.folder.exists()
    named.close()
    print(json.dumps([reached.folder.exists(), named.folder.exists(), str(left.folder)]))
    """

    gone, stays, left = receipts(upstream, env, body, str(upstream.folder / "named"))  # type: ignore[misc]

    assert (gone, stays, Path(left).exists()) == (False, True, False)


def test_a_folder_that_cannot_be_written_is_refused_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    before = dict(os.environ)

    with pytest.raises(SettingsError, match=r"cannot be written: .*; name a folder that this process may write"):
        megacpp_overlays.reach_children(receipts=tmp_path / "file" / "receipts")

    assert dict(os.environ) == before


def test_a_folder_is_made_for_this_user_alone_and_so_are_receipts(tmp_path: Path) -> None:
    with megacpp_overlays.reach_children(receipts=tmp_path / "receipts") as reached:
        assert reached.folder is not None
        [receipt] = reached.folder.iterdir()

    assert [oct(path.stat().st_mode & 0o777) for path in (reached.folder, receipt)] == ["0o700", "0o600"]


@pytest.mark.parametrize(
    ("mode", "user", "says"), [(0o777, 0, "others may write into it"), (0o700, 1, "belongs to user")]
)
def test_a_folder_that_another_user_can_write_to_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: int, user: int, says: str
) -> None:
    """Else they could give receipts for a child, and have our drafts written through their links."""
    folder = tmp_path / "receipts"
    folder.mkdir()
    folder.chmod(mode)
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + user)

    with pytest.raises(SettingsError, match=says):
        megacpp_overlays.reach_children(receipts=folder)

    assert list(folder.iterdir()) == []


def test_a_receipt_replaces_a_link_and_writes_nothing_through_it(tmp_path: Path) -> None:
    folder, precious = tmp_path / "receipts", tmp_path / "precious"
    precious.write_text("mine")
    with megacpp_overlays.reach_children(receipts=folder):
        [receipt] = folder.iterdir()
    receipt.unlink()
    receipt.symlink_to(precious)
    receipt.with_suffix(".new").symlink_to(precious)  # where a draft could be foreseen

    with megacpp_overlays.reach_children(receipts=folder):
        assert json.loads(receipt.read_text())["pid"] == os.getpid()

    assert precious.read_text() == "mine"


@pytest.fixture
def silent(tmp_path: Path) -> Iterator[tuple[children.Children, subprocess.Popen[bytes], dict[str, Any]]]:
    """A folder for receipts, a child that gives none, and the receipt that would be accepted for it."""
    process = subprocess.Popen(["sleep", "600"])
    with megacpp_overlays.reach_children(receipts=tmp_path / "receipts") as reached:
        [ours] = (tmp_path / "receipts").iterdir()
        yield (
            reached,
            process,
            {**json.loads(ours.read_text()), "pid": process.pid, "image": 0, "start": started(process)},
        )
    process.kill()
    process.wait()


def started(process: subprocess.Popen[bytes]) -> int:
    return int(Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[19])


def test_a_receipt_of_this_user_is_believed_and_one_of_another_is_not(
    silent: tuple[children.Children, subprocess.Popen[bytes], dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    reached, process, receipt = silent
    (reached._receipts_folder() / f"{process.pid}-1-0.json").write_text(json.dumps(receipt))
    assert [each.pid for each in reached.demand([process])] == [process.pid]
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)

    with pytest.raises(ChildrenError, match="gave no receipt"):
        reached.demand([process], timeout=0)


WRONG: tuple[Any, ...] = (
    {"statement": None},
    {"statement": {}},
    {"statement": {"mode": [], "off": [], "decisions": []}},
    {"statement": {"mode": "auto", "off": [], "decisions": [None]}},
    {"statement": {"mode": "auto", "off": [], "decisions": [{"id": []}]}},
    {"given": "today"},
    {"given": float("nan")},
    {"start": "1"},
    {"host": 1},
    {"more": 1},
    "[" * 100_000,
    '"' + "x" * (1 << 20) + '"',
)
"""Receipts with a wrong field, and files that are no receipts."""


def test_files_that_are_no_receipts_are_ignored(
    silent: tuple[children.Children, subprocess.Popen[bytes], dict[str, Any]], tmp_path: Path
) -> None:
    reached, process, receipt = silent
    path = reached._receipts_folder()
    for number, wrong in enumerate(WRONG):
        text = wrong if isinstance(wrong, str) else json.dumps({**receipt, **wrong})
        (path / f"{process.pid}-{number}-0.json").write_text(text)
    os.mkfifo(path / f"{process.pid}-100-0.json")
    (path / f"{process.pid}-101-0.json").symlink_to("/dev/zero")
    (tmp_path / "elsewhere").write_text(json.dumps(receipt))
    (path / f"{process.pid}-102-0.json").symlink_to(tmp_path / "elsewhere")

    with pytest.raises(ChildrenError, match="gave no receipt"):
        reached.demand([process], timeout=0)


def test_a_folder_that_is_lost_later_does_not_stop_the_work(upstream: Upstream, env: dict[str, str]) -> None:
    body = """
    import shutil
    reached = megacpp_overlays.reach_children(receipts=sys.argv[1])
    shutil.rmtree(sys.argv[1])
    open(sys.argv[1], "w").close()
    use()
    print(json.dumps(importlib.import_module(LAYERS).double(1)))
    """
    env = {**env, "MEGACPP_OVERLAYS_LOG": "stderr"}

    assert receipts(upstream, env, body, str(upstream.folder / "lost")) == REPAIRED


def test_without_receipts_there_is_nothing_to_demand() -> None:
    with megacpp_overlays.reach_children() as reached:
        for ask in (reached.receipts, reached.demand):
            with pytest.raises(ChildrenError, match=r"call reach_children\(receipts=True\)"):
                ask()


def test_a_process_that_was_not_started_cannot_be_asked(tmp_path: Path) -> None:
    import multiprocessing

    with (
        megacpp_overlays.reach_children(receipts=tmp_path) as reached,
        pytest.raises(ChildrenError, match="has not been started"),
    ):
        reached.demand([multiprocessing.Process(target=print)])
