"""torch.compile with overlays: no graph stays that was traced through other code, and graphs break no more often than without overlays."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import warm_python
from made_up import BROKEN_TEXT, Upstream
from packaging.version import Version
from places import HANG_S, ROOT, SUPPORT
from releases import only
from traced_seams import TEXT, measured, overlay_at
from trees import STAND_INS

from megacpp_overlays.errors import SeamError
from megacpp_overlays.loader.session import Session
from megacpp_overlays.model import Decision, Observation
from megacpp_overlays.runtime import dynamo as graphs

torch = pytest.importorskip("torch")
dynamo = pytest.importorskip("torch._dynamo")

pytestmark = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch's own

SessionMaker = Callable[..., Session]


@dataclass(frozen=True)
class Place:
    """A kind of seam: the replaced symbol, a step that reaches it, and whether torch would go on with a stale graph of it."""

    symbol: str
    step: Callable[[ModuleType], Callable[[Any], Any]]
    stale: bool


OLDER_THAN_2_15 = Version(torch.__version__) < Version("2.15")
"""Whether it is a torch that does not notice a replaced class method, and that traces a wrapped module whole."""
LIGER_IS_BROKEN = Version(version("liger-kernel")) < Version("0.8.2")

PLACES = {
    "function": Place("scaled", lambda m: lambda x: m.scaled(x), stale=False),
    "static method": Place("Block.static", lambda m: lambda x: m.Block.static(x), stale=False),
    "class method": Place("Block.of_class", lambda m: lambda x: m.Block.of_class(x), stale=OLDER_THAN_2_15),
    "method": Place("Block.method", lambda m: _calling(m.Block().method), stale=True),
    "inherited method": Place("Block.method", lambda m: _calling(m.Heir().method), stale=True),
    "forward of a module": Place("Module.forward", lambda m: _calling(m.Module()), stale=True),
    "forward of an autograd function": Place("Plain.forward", lambda m: lambda x: m.Plain.apply(x), stale=False),
    "backward of an autograd function": Place("Plain.backward", lambda m: lambda x: m.Plain.apply(x), stale=False),
    "forward, with setup_context": Place(
        "WithContext.forward", lambda m: lambda x: m.WithContext.apply(x), stale=False
    ),
    "backward, with setup_context": Place(
        "WithContext.backward", lambda m: lambda x: m.WithContext.apply(x), stale=True
    ),
}

OFTEN = ("function", "class method", "method", "forward of an autograd function", "backward, with setup_context")
"""Places of every day: each way in which Dynamo inlines, and each that it would not notice by itself."""
each_place = pytest.mark.parametrize("place", only(PLACES.values(), [PLACES[each] for each in OFTEN]), ids=PLACES)


def _calling(bound: Any) -> Callable[[Any], Any]:
    """Return a step that looks the method up on its object each time, as training code does: a bound method would hold the original."""
    owner, name = getattr(bound, "__self__", bound), getattr(bound, "__name__", "__call__")
    return lambda x: getattr(owner, name)(x)


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    dynamo.reset()
    dynamo.utils.counters.clear()
    yield
    dynamo.reset()


@pytest.fixture
def traceable(upstream: Upstream) -> Upstream:
    upstream.write(TEXT)
    return upstream


# Graphs that were compiled before


@pytest.mark.unmeasured
@each_place
def test_a_compiled_step_follows_arming_undoing_and_arming_again(
    place: Place, traceable: Upstream, session: SessionMaker, capfd: pytest.CaptureFixture[str]
) -> None:
    current = session(overlay_at(traceable, place.symbol))
    step = place.step(traceable.load())
    whole = torch.compile(step, backend="eager", fullgraph=True)
    before = measured(whole)

    for change in (current.arm, current.undo, current.arm):
        change()
        assert measured(whole) == measured(step)
        assert (measured(step) != before) == (change == current.arm)
        assert "dropped 1 compiled graph of torch.compile, for the sake of double-fix" in capfd.readouterr().err


@each_place
def test_without_us_some_of_these_graphs_go_on_with_the_old_code(
    place: Place, traceable: Upstream, session: SessionMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graphs, "_drop", lambda _: None)
    step = place.step(traceable.load())
    whole = torch.compile(step, backend="eager", fullgraph=True)
    measured(whole)

    session(overlay_at(traceable, place.symbol)).arm()

    assert (measured(whole) != measured(step)) == place.stale


def test_nothing_happens_where_nothing_was_compiled(
    traceable: Upstream, session: SessionMaker, capfd: pytest.CaptureFixture[str]
) -> None:
    current = session(overlay_at(traceable, "Block.method"))
    traceable.load()

    current.arm()
    current.undo()

    assert "dropped" not in capfd.readouterr().err


def test_without_torch_nothing_of_it_is_imported(
    traceable: Upstream, run_python: Callable[..., Any], tmp_path: Path
) -> None:
    traceable.write(BROKEN_TEXT)
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import {traceable.module_name};"
        "import pathlib; from made_up import Upstream; from megacpp_overlays.loader.session import Session;"
        "from megacpp_overlays.loader.settings import Settings;"
        f"session = Session((Upstream({traceable.name!r}, pathlib.Path({str(tmp_path)!r})).overlay(),), Settings());"
        "session.arm(); session.undo(); session.arm(); assert not session.audit().conflicts;"
        "assert not [name for name in sys.modules if name.partition('.')[0] == 'torch']"
    )

    run_python(code, SUPPORT)


def test_importing_a_target_for_the_first_time_drops_nothing(
    traceable: Upstream, session: SessionMaker, capfd: pytest.CaptureFixture[str]
) -> None:
    other = torch.compile(lambda x: x + 1, backend="eager")
    other(torch.ones(1))
    kept = graphs.graphs()
    current = session(overlay_at(traceable, "Block.method"))
    current.arm()

    traceable.load()

    assert current.audit().records[0].decision is Decision.ACTIVE
    assert graphs.graphs() == kept > 0
    assert "dropped" not in capfd.readouterr().err


def test_graphs_that_a_witness_compiled_through_the_original_are_dropped_before_the_seam_goes_in(
    traceable: Upstream, session: SessionMaker
) -> None:
    traceable.write(
        TEXT + "block = Block()\n@torch.compile(backend='eager')\ndef entry(x):\n    return block.method(x)\n"
    )

    def through_the_entry(module: ModuleType) -> Observation:
        found = module.entry(torch.ones(1)).item()
        return Observation(broken=found != 20, seen=f"entry(1) = {found}")

    current = session(overlay_at(traceable, "Block.method", witness=through_the_entry, self_test=through_the_entry))
    current.arm()

    module = traceable.load()

    assert current.audit().records[0].decision is Decision.ACTIVE, current.audit().records[0].reason
    assert module.entry(torch.ones(1)).item() == 20


@pytest.mark.parametrize("late", [True, False])
def test_graphs_that_a_self_test_compiled_go_with_the_seam_that_failed_it(
    traceable: Upstream, session: SessionMaker, late: bool
) -> None:
    steps: list[Any] = []

    def compiles_and_fails(module: ModuleType) -> Observation:
        block = module.Block()
        steps.append(torch.compile(lambda x: block.method(x), backend="eager"))
        return Observation(broken=True, seen=f"{steps[0](torch.ones(1)).item()} is not the expected value")

    current = session(overlay_at(traceable, "Block.method", self_test=compiles_and_fails))
    for step in (traceable.load, current.arm) if late else (current.arm, traceable.load):
        step()

    record = current.audit().records[0]
    assert (record.decision, "20.0 is not the" in record.reason) == (Decision.CONFLICT, True)
    assert steps[0](torch.ones(1)).item() == 2


def test_a_second_session_that_adopts_a_seam_drops_nothing(
    traceable: Upstream, session: SessionMaker, capfd: pytest.CaptureFixture[str]
) -> None:
    session(overlay_at(traceable, "Block.method")).arm()
    block = traceable.load().Block()
    step = torch.compile(lambda x: block.method(x), backend="eager")
    assert step(torch.ones(1)).item() == 20

    session(overlay_at(traceable, "Block.method")).arm()

    assert "dropped" not in capfd.readouterr().err


def test_dropping_keeps_graphs_of_others(traceable: Upstream, session: SessionMaker) -> None:
    heard: list[object] = []
    dynamo.on_compile_start(heard.append)
    block = traceable.load().Block()
    step = torch.compile(lambda x: block.method(x), backend="eager")
    step(torch.ones(1))
    session(overlay_at(traceable, "Block.method")).arm()
    counted = dict(dynamo.utils.counters["frames"])

    step(torch.ones(1))

    assert len(heard) == 2
    assert dynamo.utils.counters["frames"] == {each: number + 1 for each, number in counted.items()}


def test_a_torch_that_keeps_its_graphs_elsewhere_is_reset_by_its_public_function(
    traceable: Upstream, session: SessionMaker, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    block = traceable.load().Block()
    step = torch.compile(lambda x: block.method(x), backend="eager")
    step(torch.ones(1))
    monkeypatch.delattr(dynamo.eval_frame, "_debug_get_cache_entry_list")

    session(overlay_at(traceable, "Block.method")).arm()

    assert step(torch.ones(1)).item() == 20
    assert "dropped all compiled graphs" in capfd.readouterr().err


# While something compiles


@pytest.fixture
def during(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[[Callable[[], object]], Any]]:
    """Compile a function that imports a module, which runs the given call. Imports run while Dynamo traces."""
    monkeypatch.syspath_prepend(tmp_path)

    def trace(call: Callable[[], object]) -> Any:
        (tmp_path / "called_at_import.py").write_text("import sys\nsys.call_now()\nTWO = 2\n")
        sys.call_now = call  # type: ignore[attr-defined]
        try:

            @torch.compile(backend="eager", fullgraph=True)
            def step(x: Any) -> Any:
                import called_at_import  # type: ignore[import-not-found]

                return x * called_at_import.TWO

            return step(torch.ones(1)).item()
        finally:
            del sys.call_now

    yield trace
    sys.modules.pop("called_at_import", None)


def test_a_target_that_is_imported_while_a_function_is_traced_is_repaired_and_breaks_no_graph(
    traceable: Upstream, session: SessionMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    current = session(overlay_at(traceable, "Block.method"))
    current.arm()
    name = traceable.module_name
    scope: dict[str, Any] = {}
    exec(f"def step(x):\n    from {name} import Block\n    return Block().method(x)", scope)

    result = torch.compile(scope["step"], backend="eager", fullgraph=True)(torch.ones(1))

    assert result.item() == 20
    assert current.audit().records[0].decision is Decision.ACTIVE


def test_arming_too_late_while_a_function_is_traced_is_refused(
    traceable: Upstream, session: SessionMaker, during: Callable[..., Any]
) -> None:
    current = session(overlay_at(traceable, "Block.method"))
    module = traceable.load()

    assert during(current.arm) == 2

    record = current.audit().records[0]
    assert record.decision is Decision.CONFLICT
    assert "torch.compile is tracing on this thread" in record.reason
    assert module.Block().method(1) == 2
    current.undo()
    current.arm()
    assert current.audit().records[0].decision is Decision.ACTIVE


def test_undoing_while_a_function_is_traced_is_refused_and_all_stays_in(
    traceable: Upstream, session: SessionMaker, during: Callable[..., Any]
) -> None:
    current = session(overlay_at(traceable, "Block.method"))
    current.arm()
    module = traceable.load()
    errors: list[SeamError] = []

    def undo() -> None:
        with pytest.raises(SeamError) as caught:
            current.undo()
        errors.append(caught.value)

    assert during(undo) == 2

    assert "torch.compile is tracing on this thread" in str(errors[0])
    assert current.audit().records[0].decision is Decision.ACTIVE
    assert module.Block().method(1) == 20


def test_undoing_and_arming_between_two_graphs_of_one_function_act_as_they_do_uncompiled(
    traceable: Upstream, session: SessionMaker
) -> None:
    current = session(overlay_at(traceable, "Block.method"))
    current.arm()
    block = traceable.load().Block()

    def step(x: Any) -> Any:
        first = block.method(x)
        current.undo()
        second = block.method(x)
        current.arm()
        return first, second, block.method(x)

    whole = torch.compile(step, backend="eager")
    for _ in range(2):
        assert [each.item() for each in whole(torch.ones(1))] == [20, 2, 20]


def test_compiled_code_calls_an_untraced_function_as_it_is() -> None:
    called: list[bool] = []

    def double(x: Any) -> Any:
        called.append(torch.compiler.is_compiling())
        return x * 2

    function = graphs.untraced(double)
    step = torch.compile(lambda x: function(x + 1), backend="eager")

    assert [step(torch.tensor(float(number))).item() for number in range(3)] == [2, 4, 6]
    assert called == [False] * 3


def test_an_untraced_function_does_not_import_dynamo(run_python: Callable[..., Any]) -> None:
    code = (
        "import sys; from megacpp_overlays.runtime.dynamo import untraced; assert untraced(lambda x: x + 1)(1) == 2;"
        "assert not [name for name in sys.modules if name.partition('.')[0] == 'torch']"
    )

    run_python(code, SUPPORT)


@pytest.mark.parametrize("inside", ["the backend", "a call"])
def test_another_thread_inside_of_torch_compile_is_left_its_graphs(
    inside: str, traceable: Upstream, session: SessionMaker
) -> None:
    current = session(overlay_at(traceable, "Block.method"))
    current.arm()
    block = traceable.load().Block()
    reached, go_on = threading.Event(), threading.Event()
    results: list[float] = []

    def wait() -> None:
        reached.set()
        assert go_on.wait(HANG_S)

    def backend(graph: Any, _: Any) -> Any:
        if inside == "the backend":
            wait()
        return graph.forward

    def step(x: Any) -> Any:
        if inside == "a call":
            dynamo.disable(wait)()
        return block.method(x)

    thread = threading.Thread(target=lambda: results.append(torch.compile(step, backend=backend)(torch.ones(1)).item()))
    thread.start()
    assert reached.wait(HANG_S)
    with pytest.raises(SeamError, match=r"another thread is inside of torch\.compile"):
        current.undo()
    go_on.set()
    thread.join(HANG_S)

    assert results == [20]
    assert current.audit().records[0].decision is Decision.ACTIVE
    current.undo()
    assert torch.compile(step, backend="eager")(torch.ones(1)).item() == 2


def test_other_threads_survive_that_graphs_come_and_go(traceable: Upstream, session: SessionMaker) -> None:
    current = session(overlay_at(traceable, "Block.method"))
    current.arm()
    block = traceable.load().Block()
    step = torch.compile(lambda x: block.method(x), backend="eager")
    stop = threading.Event()
    wrong: list[object] = []

    def work() -> None:
        try:
            while not stop.wait(0.01):
                if (found := step(torch.ones(1)).item()) not in {2, 20}:
                    wrong.append(found)
        except Exception as error:  # noqa: BLE001 - whatever it is, it is wrong
            wrong.append(error)

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    changed, limit = 0, time.monotonic() + HANG_S
    while changed < 8 and not wrong and time.monotonic() < limit:
        with contextlib.suppress(SeamError):  # a thread is inside of torch.compile
            current.undo()
            current.arm()
            changed += 1
    stop.set()
    for thread in threads:
        thread.join(HANG_S)

    assert wrong == []
    assert changed == 8


# The cache on disk

ON_DISK = """
import json, pathlib
import {module} as upstream
import torch
from made_up import Upstream
from traced_seams import measured, overlay_at
from megacpp_overlays.loader.session import Session
from megacpp_overlays.loader.settings import Settings

up = Upstream({name!r}, pathlib.Path({folder!r}))
session = Session((overlay_at(up, "Block.method"),), Settings())
if {on}:
    session.arm()
found = [measured(torch.compile(upstream.step)), measured(upstream.step)]
{save}
counters = torch._dynamo.utils.counters
hits = counters["aot_autograd"]["autograd_cache_hit"], counters["dynamo_cache"]["dynamo_cache_hit"]
print(json.dumps([*found, *hits, [record.decision.value for record in session.audit().records]]))
"""


@pytest.fixture
def runs_in_a_row(
    traceable: Upstream, tmp_path: Path, run_python: Callable[..., Any]
) -> Callable[..., list[tuple[Any, ...]]]:
    """Run processes that share one cache on disk, with the overlay on or off, and return the report of each."""

    traceable.write(f"{TEXT}\nblock = Block()\n\n\ndef step(x):\n    return block.method(x)\n")

    def run(*on: bool, save: str = "", **variables: str) -> list[tuple[Any, ...]]:
        about = {"module": traceable.module_name, "name": traceable.name, "folder": str(tmp_path)}
        found = []
        for each in on:
            code = ON_DISK.format(**about, on=each, save=save)
            # Trying each set of vector instructions would take most of the time.
            cache = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache"), "TORCHINDUCTOR_VEC_ISA_OK": "0", **variables}
            out = run_python(code, tmp_path, SUPPORT, after=warm_python.TORCH, **cache).stdout
            found.append(tuple(json.loads(out.splitlines()[-1])))
        return found

    return run


needs_a_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor needs a compiler")


@pytest.mark.full
@needs_a_compiler
def test_the_caches_of_inductor_and_autograd_tell_code_with_the_overlay_from_code_without(
    runs_in_a_row: Callable[..., list[tuple[Any, ...]]],
) -> None:
    off, on, off_again = runs_in_a_row(False, True, False)

    assert off[:2] == off_again[:2] == ([2, 2], [2, 2])
    assert on[:2] == ([20, 20], [20, 20])
    assert [each[2] for each in (off, on, off_again)] == [0, 0, 1]


@pytest.mark.full
@needs_a_compiler
def test_dynamos_own_cache_brings_back_stale_graphs_and_the_audit_calls_it_a_conflict(
    runs_in_a_row: Callable[..., list[tuple[Any, ...]]],
) -> None:
    save = "from torch._dynamo.precompile_context import PrecompileContext as p; p.save_to_dynamo_cache()"

    off, on = runs_in_a_row(False, True, save=save, TORCH_CACHING_PRECOMPILE="1")

    assert off[:2] == ([2, 2], [2, 2])
    assert on[:2] == ([2, 2], [20, 20])
    assert (on[3], on[4]) == (1, ["conflict"])


def test_the_conflict_with_dynamos_own_cache_says_how_to_end_it(traceable: Upstream, session: SessionMaker) -> None:
    current = session(overlay_at(traceable, "Block.method"))
    current.arm()
    traceable.load()

    with dynamo.config.patch(caching_precompile=True):
        record = current.audit().records[0]

    assert record.decision is Decision.CONFLICT
    assert "unset TORCH_CACHING_PRECOMPILE" in record.reason


# Graph breaks and recompiles


@dataclass(frozen=True)
class StepCount:
    """A step of `compile_cases.py`: its overlay, its graph breaks and its stand-in tree."""

    overlay: str
    breaks: int
    """Graph breaks of upstream's code, of which the overlay has as many."""
    stand_in: str | None = None


STEPS = {
    "index_scores": StepCount("dsa-indexer-streaming", breaks=0),
    "indexer_loss": StepCount("dsa-indexer-streaming", breaks=0),
    "context_parallel_lengths": StepCount("dsa-capture-gates", breaks=0),
    "query_positions": StepCount("dsa-capture-gates", breaks=2, stand_in="dsa-june"),
    "packed_lengths": StepCount("gdn-capture-gates", breaks=3),
    "sparse_mla": StepCount("fp8-quantized-unwrap", breaks=0),
    "sparse_mla_that_cannot_be_traced": StepCount("fp8-quantized-unwrap", breaks=1),
    "token_losses": StepCount("liger-flce-none-backward", breaks=4),
    "wrapped_module": StepCount("float16-fp32-exemption", breaks=0 if OLDER_THAN_2_15 else 4),
    "scatter": StepCount("dsa-branchless-scatter", breaks=1, stand_in="dsa-june"),
}
"""Two kinds are left out. Upstream's code of `hopper-flce-dispatch` raises on every device that it could be traced for
without a GPU. The seams of the other `float16-...` overlays are in code that saves checkpoints, which is never compiled."""
DAILY = ("packed_lengths", "sparse_mla", "token_losses")
"""A step with breaks, one without, and one whose seam Dynamo does not trace. The others are `full`."""
WITH_OVERLAYS = ("token_losses",)
"""Steps of the daily ones that are counted with overlays alone: upstream has many graphs, and none is of our code."""


@pytest.fixture(scope="module")
def chosen(grid_size: str) -> dict[str, StepCount]:
    return {step: about for step, about in STEPS.items() if grid_size == "all" or step in DAILY}


@pytest.fixture(scope="module")
def counts(chosen: dict[str, StepCount], grid_size: str) -> dict[str, dict[str, Any]]:
    """Return the report of each step without and with overlays; a process for each tree and each of the two."""
    folder = SUPPORT
    running = {}
    for stand_in, mode in itertools.product({about.stand_in for about in chosen.values()}, ("off", "auto")):
        path = [STAND_INS[stand_in], ROOT, folder] if stand_in else [ROOT, folder]
        ours = {"PYTHONPATH": os.pathsep.join(map(str, path)), "MEGACPP_OVERLAYS": mode, "OMP_NUM_THREADS": "1"}
        env = {**os.environ, **ours}
        left_out = WITH_OVERLAYS if mode == "off" and grid_size == "few" else ()
        steps = [step for step, about in chosen.items() if about.stand_in == stand_in and step not in left_out]
        command = ["-W", "ignore", folder / "compile_cases.py", *steps]
        running[stand_in, mode] = warm_python.start(command, env, after=warm_python.MEGATRON)
    found: dict[str, dict[str, Any]] = {"off": {"active": set()}, "auto": {"active": set()}}
    for (_, mode), process in running.items():
        out, _ = process.communicate(timeout=HANG_S)
        assert process.returncode == 0
        report = json.loads(out.splitlines()[-1])
        found[mode]["active"] |= set(report.pop("active"))
        found[mode] |= report
    return found


@pytest.mark.upstream
def test_each_of_these_overlays_was_off_in_the_one_and_active_in_the_other(
    chosen: dict[str, StepCount], counts: dict[str, dict[str, Any]]
) -> None:
    assert not counts["off"]["active"]
    upstream_is_right = set() if LIGER_IS_BROKEN else {"liger-flce-none-backward"}
    assert {about.overlay for about in chosen.values()} - upstream_is_right <= counts["auto"]["active"]


@pytest.mark.upstream
@pytest.mark.parametrize("step", only([step for step in STEPS if step not in ("scatter", "token_losses")], DAILY))
def test_a_step_breaks_and_compiles_as_often_with_the_overlay_as_without(
    step: str, counts: dict[str, dict[str, Any]]
) -> None:
    off, on = counts["off"][step], counts["auto"][step]

    assert on == off
    assert off["breaks"] == STEPS[step].breaks
    assert off["unique graphs after each size"][-1] > off["graphs"]  # or recompiling would not be counted


@pytest.mark.upstream
@pytest.mark.skipif(not LIGER_IS_BROKEN, reason="upstream is right in this environment")
def test_token_losses_break_once_with_the_overlay(counts: dict[str, dict[str, Any]]) -> None:
    """Dynamo does not trace our passes. The code before and after them is compiled, and once more with dynamic sizes."""
    on = counts["auto"]["token_losses"]

    assert on["breaks"] == 1
    assert on["unique graphs after each size"] == [2, 4, 4, 4, 4]


@pytest.mark.full
@pytest.mark.upstream
@pytest.mark.skipif(not LIGER_IS_BROKEN, reason="upstream is right in this environment")
def test_token_losses_break_at_every_read_from_the_host_without(counts: dict[str, dict[str, Any]]) -> None:
    assert counts["off"]["token_losses"]["breaks"] == STEPS["token_losses"].breaks


@pytest.mark.full
@pytest.mark.upstream
def test_the_scatter_is_traced_whole_with_the_overlay_and_not_at_all_without(counts: dict[str, dict[str, Any]]) -> None:
    """Upstream branches on values in a loop, so Dynamo gives up. Our loop is unrolled for each size."""
    off, on = counts["off"]["scatter"], counts["auto"]["scatter"]

    assert (off["breaks at all sizes"] > 0, on["breaks at all sizes"]) == (True, 0)
    assert off["unique graphs after each size"] == [1, 2, 2, 2, 2]  # of the step around it
    assert on["unique graphs after each size"] == [1, 2, 3, 3, 3]
