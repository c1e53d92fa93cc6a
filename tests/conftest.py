"""Fixtures of all tests: a clean environment, throw-away targets, and the wheels of real releases."""

from __future__ import annotations

import contextlib
import gc
import os
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import coverage
import distribution
import kept_answers
import passes_plugin
import pytest
import released_megatron
import seeds
import warm_python
from hypothesis import HealthCheck, settings
from made_up import BROKEN_TEXT, Upstream
from places import HANG_S, WHEELS, measure_no_child, measuring
from trees import STAND_INS

from megacpp_overlays.errors import SeamError
from megacpp_overlays.loader.session import Session
from megacpp_overlays.loader.settings import Settings
from megacpp_overlays.model import Overlay
from megacpp_overlays.variables import is_ours

# The time of an example depends on the load of the host and not on the code under test. A person's run looks for new
# examples each time; one of CI judges a commit, and must say the same of it twice.
settings.register_profile(
    "any host",
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    derandomize="CI" in os.environ,
)
settings.load_profile("any host")

MEASURED = {"cli", "loader", "processes", "repro", "source", "upkeep"}
"""Rooms whose tests start processes that run lines of the package which no other test runs.

The mark `unmeasured_children` takes out those that only repeat such lines. Copies of a process that has imported torch already,
see `warm_python.py`, are measured in every room.
"""


BEGAN = pytest.StashKey[float]()
"""When this run began, in seconds since the epoch."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add options for testing real source trees in addition to the stand-ins."""
    text = "a folder that holds the package folder of an upstream, such as a Megatron-LM checkout; may be repeated"
    parser.addoption("--upstream-tree", action="append", default=[], type=Path, metavar="PATH", help=text)
    passes_plugin.add_options(parser)


def pytest_configure(config: pytest.Config) -> None:
    """Measure no process that is started, but where `clean_environment` has it so; workers of pytest-xdist are measured."""
    config.stash[BEGAN] = time.time()
    config.pluginmanager.register(passes_plugin.plugin(config))
    if hasattr(config, "workerinput") or not config.getoption("numprocesses", None):
        measure_no_child()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Say which answers were derived anew: a commit without them makes every fresh clone derive them."""
    began = config.stash[BEGAN]
    derived = [each for each in kept_answers.DERIVED.glob("*.json") if each.stat().st_mtime >= began]
    if derived:
        terminalreporter.write_line(f"{len(derived)} answers of scripts were derived anew: `make answers` keeps them")


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Save the coverage of a worker before it says that it is done: ten seconds later it is killed, however busy the host is."""
    measured = coverage.Coverage.current()
    if measured is not None and hasattr(session.config, "workerinput"):
        measured.stop()
        measured.save()


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None]:
    """Collect without the garbage collector: nearly all that is made is kept. Then leave it out of the heap.

    The loader asks Python for the referrers of a function, which takes time in proportion to the heap. No upstream is imported yet.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.collect()
        gc.freeze()
        count, frozen = gc.get_freeze_count, gc.get_freeze_count()
        gc.get_freeze_count = lambda: max(count() - frozen, 0)  # the loader tells of a frozen heap


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let the first room and the longest files begin, and files follow each other that share processes with a release."""
    asking = {item.path for item in items if "megatron_says" in getattr(item, "fixturenames", ())}
    items.sort(key=lambda item: (distribution.turn(item.path), item.path not in asking))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Keep tests that share a long run with one worker, and no more than they."""
    return distribution.SharedRunScheduling(config, log) if config.getvalue("dist") == "loadfile" else None


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run a test that has the argument `tree` on every stand-in and every given tree."""
    if "tree" in metafunc.fixturenames:
        given = {f"upstream-{path.resolve().name}": path for path in _given_trees(metafunc.config)}
        trees = {**STAND_INS, **given}
        metafunc.parametrize("tree", list(trees.values()), ids=list(trees))


def _given_trees(config: pytest.Config) -> list[Path]:
    found: list[Path] = config.getoption("--upstream-tree")
    for path in found:
        if not path.is_dir():
            raise pytest.UsageError(f"--upstream-tree {path}: no such folder")
    return [path.resolve() for path in found]


@pytest.fixture(scope="session")
def upstream_trees(pytestconfig: pytest.Config) -> list[Path]:
    """Return the source trees that were given with `--upstream-tree`; without one, skip the test."""
    return _given_trees(pytestconfig) or pytest.skip("no --upstream-tree was given")


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a test that is marked `gpu` on a host without a GPU."""
    if item.get_closest_marker("gpu") is None:
        return
    import torch

    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef: pytest.FixtureDef[Any], request: pytest.FixtureRequest) -> Generator[None]:
    """Seed random numbers of a fixture by the fixture alone: the test that first asks for it differs from run to run."""
    with seeds.drawing(f"{fixturedef.baseid}::{fixturedef.argname}[{getattr(request, 'param_index', 0)}]"):
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Generator[None]:
    """Seed random numbers of a test by the test alone."""
    with seeds.drawing(pyfuncitem.nodeid):
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None]:
    """Trace no coverage while a test runs that is marked `unmeasured`: a loop over thousands of edits, mostly."""
    traced = coverage.Coverage.current() if item.get_closest_marker("unmeasured") else None
    if traced is not None:
        traced.stop()
    try:
        return (yield)
    finally:
        if traced is not None:
            traced.start()
            measure_no_child()  # starting sets the variable that has every child measured


@pytest.fixture(autouse=True)
def clean_environment(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test sees the switches of the shell that runs the suite; its processes are measured in the rooms that need it."""
    if request.path.parent.name in MEASURED and request.node.get_closest_marker("unmeasured_children") is None:
        for name, value in measuring().items():
            monkeypatch.setenv(name, value)
    for name in [name for name in os.environ if is_ours(name)]:
        monkeypatch.delenv(name)


@pytest.fixture(scope="module")
def small_calls() -> Iterator[None]:
    """Serve calls of every size by overlays that save memory: the tests check their results, not whether a call is worth it."""
    from megacpp_overlays.kernels import measured

    with measured.serving_calls_of_every_size():
        yield


@pytest.fixture(scope="session")
def grid_size(pytestconfig: pytest.Config) -> str:
    """Return which grid of cases scripts run in Triton's interpreter: `few`, a case for each path, or `all` in the full tests."""
    return "few" if "not full" in pytestconfig.getoption("markexpr") else "all"


@pytest.fixture
def one_day() -> None:
    """Wait past midnight UTC if it is near: a test that writes a date and reads it later must not run across midnight."""
    left = 86_400 - time.time() % 86_400
    if left < 120:
        time.sleep(left + 1)


@pytest.fixture(scope="session")
def wheel() -> Callable[[str, str], Path]:
    """Return the path of a release: `wheel("liger-kernel", "0.8.1")`."""

    def find(distribution: str, version: str) -> Path:
        name = distribution.replace("-", "_")
        found = sorted(WHEELS.glob(f"{name}-{version}-*.whl"))
        assert found, f"no wheel of {distribution} {version} in {WHEELS}: run `make wheels`"
        return found[0]

    return find


@pytest.fixture(scope="session")
def megatron_says(wheel: Callable[[str, str], Path]) -> Callable[..., Any]:
    """Return the answer of a script about a release: `megatron_says("0.19.2", SUPPORT / "facts.py")`; see `released_megatron`."""

    def ask(version: str, script: Path, *words: str | Path, **variables: str) -> Any:
        return released_megatron.said(wheel("megatron-core", version), script, *words, **variables)

    return ask


@pytest.fixture
def run_python() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run code in a fresh interpreter, with folders put first on its path and variables added.

    With modules in `after` it is a copy of an interpreter that has imported them, see `warm_python`.
    """

    def run(
        code: str,
        *folders: Path,
        check: bool = True,
        measured: bool = False,
        after: tuple[str, ...] = (),
        **variables: str,
    ) -> subprocess.CompletedProcess[str]:
        env = {**os.environ, **(measuring() if measured else {}), **variables}
        env["PYTHONPATH"] = os.pathsep.join([*map(str, folders), *filter(None, [env.get("PYTHONPATH")])])
        if after:
            env.setdefault(
                "OMP_NUM_THREADS", "1"
            )  # as nearly all that are copied: one process is copied for all of them
            done = warm_python.run(["-c", code], env, after=after, timeout=HANG_S)
        else:
            done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=HANG_S)
        assert not check or done.returncode == 0, f"exit {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done

    return run


@pytest.fixture
def upstream(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Upstream]:
    """A broken made-up upstream under a name that no other test uses; forgotten afterwards."""
    made = Upstream(f"upstream_{uuid.uuid4().hex}", tmp_path)
    made.write(BROKEN_TEXT)
    monkeypatch.syspath_prepend(tmp_path)
    yield made
    for name in [name for name in sys.modules if name.partition(".")[0] == made.name]:
        del sys.modules[name]


@pytest.fixture
def session() -> Iterator[Callable[..., Session]]:
    """Make sessions over given overlays and settings; each is undone and unhooked afterwards."""
    made: list[Session] = []

    def make(*overlays: Overlay, **settings: object) -> Session:
        made.append(Session(overlays, Settings(**settings)))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for each in made:
        each._hooks.close()
        with contextlib.suppress(SeamError):  # a test may have taken a seam over
            each.undo()
