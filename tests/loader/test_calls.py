"""Used, not only active: an audit tells how often each seam was called."""

from __future__ import annotations

import inspect
import json
import os
import pickle
import traceback
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
from made_up import Upstream

from megacpp_overlays.loader import lines
from megacpp_overlays.loader.audit import Audit
from megacpp_overlays.loader.session import Session
from megacpp_overlays.loader.settings import LogForm
from megacpp_overlays.model import Decision, Observation, Overlay, Record, Replacement

SessionMaker = Callable[..., Session]


def less_one(original: Callable[..., Any], _: ModuleType) -> Callable[..., Any]:
    def seam(*given: Any, **named: Any) -> Any:
        return original(*given, **named) - 1

    return seam


def calls(audit: Audit) -> dict[str, int]:
    """Return the calls by the last part of the name of the seam."""
    return {name.rpartition(".")[2]: count for record in audit.records for name, count in record.calls}


def overlay_of(upstream: Upstream, *symbols: str, **changes: Any) -> Any:
    replacements = {"off-by-one": tuple(Replacement(symbol=each, make=less_one) for each in symbols)}
    return upstream.overlay(**{"replacements": replacements, **changes})


def test_an_audit_counts_the_calls_since_it_was_put_in_and_not_those_of_its_own_checks(
    upstream: Upstream, session: SessionMaker
) -> None:
    current = session(upstream.overlay())
    current.arm()
    module = upstream.load()  # witness and self-test call it

    assert calls(current.audit()) == {"double": 0}
    assert [module.double(each) for each in (1, 2, 3)] == [2, 4, 6]
    assert calls(current.audit()) == {"double": 3}
    assert calls(current.audit(deep=True)) == {"double": 3}


def test_each_kind_of_seam_counts_and_keeps_its_kind(upstream: Upstream, session: SessionMaker) -> None:
    named = ("double", "Layer.static", "Layer.size", "Layer.forward")
    works = Observation(broken=False, seen="works")
    current = session(overlay_of(upstream, *named, self_test=lambda _: works))
    current.arm()
    module = upstream.load()
    layer = module.Child()  # inherits the seams

    assert (module.Layer.static(3), layer.static(x=3), layer.size, layer.forward(1)) == (3, 3, 0, 2)
    assert calls(current.audit()) == {"static": 2, "size": 1, "forward": 1, "double": 1}


def test_a_seam_keeps_the_name_the_signature_and_the_place_of_the_function_that_it_replaces(
    upstream: Upstream, session: SessionMaker
) -> None:
    current = session(overlay_of(upstream, "double"))
    current.arm()
    module = upstream.load()

    assert (module.double.__name__, str(inspect.signature(module.double))) == ("double", "(x)")
    assert module.double.__code__.co_filename == __file__  # the file of the seam's author
    assert pickle.loads(pickle.dumps(module.double)) is module.double
    with pytest.raises(TypeError) as raised:
        module.double(None)
    files = [frame.filename for frame in traceback.extract_tb(raised.value.__traceback__)]
    assert files == [__file__, __file__, __file__, module.__file__]  # this test, the seam twice, upstream


def test_attributes_that_the_maker_sets_on_a_seam_are_there_for_callers(
    upstream: Upstream, session: SessionMaker
) -> None:
    def marked(original: Callable[..., Any], module: ModuleType) -> Callable[..., Any]:
        seam = less_one(original, module)
        vars(seam)["cache_clear"] = lambda: "cleared"
        return seam

    replacements = {"off-by-one": (Replacement(symbol="double", make=marked),)}
    current = session(upstream.overlay(replacements=replacements))
    current.arm()

    assert upstream.load().double.cache_clear() == "cleared"


def test_calls_of_a_reinstalled_seam_are_counted_anew(upstream: Upstream, session: SessionMaker) -> None:
    current = session(upstream.overlay())
    current.arm()
    module = upstream.load()
    held = module.double  # so it is the same function afterwards
    held(1)

    current.undo()
    assert module.double(1) == 3
    assert calls(current.audit()) == {}
    current.arm()
    assert module.double is held
    held(1)

    assert calls(current.audit()) == {"double": 1}


def test_a_second_session_sees_the_same_count(upstream: Upstream, session: SessionMaker) -> None:
    first, second = session(upstream.overlay()), session(upstream.overlay())
    first.arm()
    module = upstream.load()
    module.double(1)

    second.arm()

    assert calls(first.audit()) == calls(second.audit()) == {"double": 1}


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no processes of this kind here")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_forked_child_begins_at_nothing(upstream: Upstream, session: SessionMaker) -> None:
    current = session(upstream.overlay())
    current.arm()
    module = upstream.load()
    module.double(1)

    child = os.fork()
    if child == 0:
        os._exit(calls(current.audit())["double"])

    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert calls(current.audit()) == {"double": 1}


# --- the count in audits and logs ---


def test_an_audit_shows_calls_once_any_seam_was_called(upstream: Upstream, session: SessionMaker) -> None:
    other = upstream.overlay(id="other-fix", pack=98, replacements={"off-by-one": (Replacement(symbol="Layer.static", make=less_one),)}, witness=None, self_test=lambda _: Observation(broken=False, seen="works"))  # fmt: skip
    current = session(upstream.overlay(), other)
    current.arm()
    module = upstream.load()
    before = str(current.audit())
    for each in range(1200):
        module.double(each)

    after = str(current.audit())

    assert "called" not in before
    assert after.count("; called 1,200 times") == after.count("; not called so far") == 1


def test_the_count_is_in_the_json_of_an_audit_and_in_no_fingerprint(upstream: Upstream, session: SessionMaker) -> None:
    current = session(upstream.overlay())
    current.arm()
    module = upstream.load()
    before = current.audit()
    module.double(1)

    after = current.audit()

    assert after.as_dict()["decisions"][0]["calls"] == {f"{upstream.module_name}.double": 1}
    assert after.fingerprint == before.fingerprint


WORKS = Observation(broken=False, seen="works")


def static_fix(upstream: Upstream, id: str, pack: int) -> Overlay:
    """Return an overlay whose seam is its own and works; nothing calls it."""
    static = {"off-by-one": (Replacement(symbol="Layer.static", make=less_one),)}
    return upstream.overlay(id=id, pack=pack, replacements=static, witness=None, self_test=lambda _: WORKS)


@pytest.fixture
def last_line(capfd: pytest.CaptureFixture[str]) -> Callable[[], str]:
    return lambda: capfd.readouterr().err.splitlines()[-1]


def test_the_end_of_a_run_names_active_overlays_that_were_never_called(
    upstream: Upstream, session: SessionMaker, last_line: Callable[[], str]
) -> None:
    current = session(upstream.overlay(), static_fix(upstream, "unused-fix", 98))
    current.arm()
    upstream.load().double(1)

    current.count_at_exit()

    assert last_line().endswith("); active and never called: unused-fix")


def test_the_end_of_a_run_that_called_nothing_names_that_too(
    upstream: Upstream, session: SessionMaker, last_line: Callable[[], str]
) -> None:
    current = session(upstream.overlay())
    current.arm()
    upstream.load()

    current.count_at_exit()

    assert last_line().endswith("); active and never called: double-fix")


def test_overlays_that_were_never_called_have_a_line_after_an_audit_and_none_if_all_were_called(
    upstream: Upstream, session: SessionMaker, capfd: pytest.CaptureFixture[str]
) -> None:
    current = session(upstream.overlay())
    current.arm()
    module = upstream.load()
    current.log.count(current.audit())
    capfd.readouterr()

    current.count_at_exit()
    assert capfd.readouterr().err == "[megacpp_overlays] active and never called: double-fix\n"
    module.double(1)
    current.count_at_exit()
    assert capfd.readouterr().err == ""


def test_overlays_that_were_never_called_are_in_the_json_of_a_log(
    upstream: Upstream, session: SessionMaker, capfd: pytest.CaptureFixture[str]
) -> None:
    current = session(upstream.overlay(), log=LogForm.JSON)
    current.arm()
    upstream.load()

    current.count_at_exit()
    count = json.loads(capfd.readouterr().err.splitlines()[-1])
    current.count_at_exit()
    again = json.loads(capfd.readouterr().err.splitlines()[-1])

    assert (count["event"], count["active"], count["never_called"]) == ("count", ["double-fix"], ["double-fix"])
    assert (again["event"], again["never_called"]) == ("never called", ["double-fix"])


@pytest.mark.parametrize(
    ("never", "others", "says"),
    [
        (0, 3, ""),
        (3, 0, "fix-0, fix-1, fix-2"),
        (3, 4, "fix-0, fix-1, fix-2"),
        (40, 0, "all 40"),
        (40, 1, "fix-0, fix-1 and 38 more"),
    ],
)
def test_the_end_of_a_run_is_one_short_line_for_any_number_of_uncalled_overlays(
    upstream: Upstream, never: int, others: int, says: str
) -> None:
    records = [
        Record(
            overlay=upstream.overlay(id=f"fix-{number}", pack=number),
            decision=Decision.ACTIVE,
            reason="",
            calls=(("double", 0), ("Layer.size", 0 if number < never else 1)),
        )
        for number in range(never + others)
    ]

    assert lines.unused(records) == (f"active and never called: {says}" if says else "")


def test_an_overlay_that_is_not_active_has_no_calls(upstream: Upstream, session: SessionMaker) -> None:
    current = session(upstream.overlay(self_test=lambda _: Observation(broken=True, seen="still wrong")))
    current.arm()
    upstream.load().double(1)

    (record,) = current.audit().records

    assert (record.decision, record.calls) == (Decision.CONFLICT, ())


# --- torch.compile ---


@pytest.fixture
def compiled() -> Iterator[Any]:
    torch = pytest.importorskip("torch")
    dynamo = pytest.importorskip("torch._dynamo")
    dynamo.reset()
    dynamo.utils.counters.clear()
    yield torch
    dynamo.reset()


def test_a_compiled_graph_counts_when_it_is_traced_and_has_nothing_of_it_inside(
    compiled: Any, upstream: Upstream, session: SessionMaker
) -> None:
    current = session(upstream.overlay())
    current.arm()
    module = upstream.load()
    graphs: list[Any] = []

    def kept(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    def step(x: Any) -> Any:
        return module.double(module.double(x))

    whole = compiled.compile(step, backend=kept, fullgraph=True)
    for _ in range(5):
        assert whole(compiled.ones(2)).tolist() == [4, 4]

    assert calls(current.audit()) == {"double": 2}
    (graph,) = graphs
    operations = [node.target.__name__ for node in graph.graph.nodes if node.op == "call_function"]
    assert operations == ["add", "add", "sub"] * 2


def test_each_seam_has_code_of_its_own_so_that_none_uses_up_the_graphs_of_another(
    compiled: Any, upstream: Upstream, session: SessionMaker
) -> None:
    works = Observation(broken=False, seen="works")
    current = session(overlay_of(upstream, "double", "Layer.static", self_test=lambda _: works))
    current.arm()
    module = upstream.load()

    assert module.double.__code__ is not module.Layer.static.__code__
    whole = compiled.compile(module.double, backend="eager", fullgraph=True)
    assert whole(compiled.ones(2)).tolist() == [2, 2]
