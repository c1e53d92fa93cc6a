"""An overlay that needs another one: in only while that one is in, or has nothing to repair."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
from made_up import BROKEN_TEXT, FIXED_TEXT, Upstream

from megacpp_overlays.errors import ActivationError, RegistryError
from megacpp_overlays.loader import registry
from megacpp_overlays.loader.session import Session
from megacpp_overlays.loader.settings import Mode
from megacpp_overlays.model import Decision, Evidence, Finding, Observation, Overlay, Record, Replacement, Verdict

SessionMaker = Callable[..., Session]

WRAPPER_TEXT = """
def wrap(x):
    return round(x)
"""


class Pair:
    """An upstream with two modules, and an overlay for each: `keep-bits` does harm without `double-fix`."""

    def __init__(self, upstream: Upstream) -> None:
        upstream.write(WRAPPER_TEXT, module="wrapper")
        self.upstream = upstream
        self.needed = upstream.overlay()
        self.dependent = upstream.overlay(
            id="keep-bits",
            target=self.needed.target._replace(module=f"{upstream.name}.wrapper", symbol="wrap"),
            probe=lambda _: Finding(verdict=Verdict.BROKEN, shape="rounds", evidence=(Evidence("rounds"),)),
            replacements={"rounds": (Replacement(symbol="wrap", make=lambda _original, _module: lambda x: x),)},
            witness=None,
            self_test=lambda module: Observation(broken=module.wrap(1.5) != 1.5, seen="it rounds"),
            needs=("double-fix",),
        )

    @property
    def overlays(self) -> tuple[Overlay, Overlay]:
        return self.dependent, self.needed

    def change(self, **fields: object) -> None:
        """Declare the needed overlay with other fields."""
        self.needed = self.upstream.overlay(**fields)

    def wrapper(self) -> Any:
        return self.upstream.load("wrapper")


@pytest.fixture
def pair(upstream: Upstream) -> Pair:
    return Pair(upstream)


def records(session: Session) -> dict[str, Record]:
    return {record.overlay.id: record for record in session.audit().records}


def decisions(session: Session) -> dict[str, str]:
    return {name: record.decision.value for name, record in records(session).items()}


ORDERS = pytest.mark.parametrize("order", [("wrapper", "layers"), ("layers", "wrapper")], ids=" then ".join)
"""Which target is imported first."""


@ORDERS
def test_both_are_in_where_both_can_be(pair: Pair, session: SessionMaker, order: tuple[str, str]) -> None:
    current = session(*pair.overlays)
    current.arm()
    first, second = (pair.upstream.load(name) for name in order)

    assert decisions(current) == {"keep-bits": "active", "double-fix": "active"}
    assert {first, second} == {pair.wrapper(), pair.upstream.load()}
    assert pair.wrapper().wrap(1.5) == 1.5


@ORDERS
def test_both_are_in_when_both_were_imported_before(pair: Pair, session: SessionMaker, order: tuple[str, str]) -> None:
    for name in order:
        pair.upstream.load(name)
    current = session(*pair.overlays)
    current.arm()

    assert decisions(current) == {"keep-bits": "active", "double-fix": "active"}


@pytest.mark.parametrize("text", [FIXED_TEXT, "x = 1\n"], ids=["right", "without it"])
@ORDERS
def test_it_is_in_where_upstream_needs_no_repair(
    pair: Pair, session: SessionMaker, order: tuple[str, str], text: str
) -> None:
    pair.upstream.write(text)
    current = session(*pair.overlays)
    current.arm()
    for name in order:
        pair.upstream.load(name)

    assert decisions(current)["keep-bits"] == "active"


@pytest.mark.parametrize("switched_off", [False, True])
def test_it_is_in_while_the_needed_overlay_waits_for_its_import(
    pair: Pair, session: SessionMaker, switched_off: bool
) -> None:
    """The needed overlay is probed for the decision that it would get: one that is off has nothing to repair in a repaired upstream."""
    if switched_off:
        pair.upstream.write(FIXED_TEXT)
    current = session(*pair.overlays, disabled=OFF if switched_off else frozenset())
    current.arm()
    pair.wrapper()

    assert decisions(current) == {"keep-bits": "active", "double-fix": "disabled" if switched_off else "armed"}


OFF = frozenset({"double-fix"})
UNKNOWN = BROKEN_TEXT.replace("return x + x + 1", "return 2 * x + 1")


@pytest.mark.parametrize("how", ["unknown", "unreadable", "off", "no seam"])
@ORDERS
def test_it_stays_out_where_the_other_one_cannot_help(
    pair: Pair, session: SessionMaker, order: tuple[str, str], how: str
) -> None:
    if how == "unknown":
        pair.upstream.write(UNKNOWN)
    elif how == "no seam":
        pair.change(replacements={"another": pair.needed.replacements["off-by-one"]})
    elif how == "unreadable":
        pair.change(probe=_unreadable)
    current = session(*pair.overlays, disabled=OFF if how == "off" else frozenset())
    current.arm()
    for name in order:
        pair.upstream.load(name)

    record = records(current)["keep-bits"]
    assert record.decision is Decision.CONFLICT
    assert record.reason.startswith("it needs double-fix, which is ")
    assert not record.seams
    assert pair.wrapper().wrap(1.5) == 2


def _unreadable(_: object) -> Finding:
    raise OSError("cannot be read")


@pytest.mark.parametrize("how", ["the self-test fails", "the witness disagrees", "falsely retired"])
def test_it_comes_out_when_the_other_one_turns_out_not_to_help(pair: Pair, session: SessionMaker, how: str) -> None:
    """The finding before an import may be right; only its effect after the import decides."""

    def wrong(_: ModuleType) -> Observation:
        return Observation(broken=True, seen="it is wrong when it runs")

    def fine(_: ModuleType) -> Observation:
        return Observation(broken=False, seen="it is right")

    if how == "the self-test fails":
        pair.change(self_test=wrong)
    elif how == "the witness disagrees":
        pair.change(witness=fine)
    else:
        pair.upstream.write(FIXED_TEXT)
        pair.change(witness=wrong)
    current = session(*pair.overlays)
    current.arm()
    wrapper = pair.wrapper()
    assert decisions(current)["keep-bits"] == "active"
    pair.upstream.load()

    found = records(current)
    assert found["double-fix"].decision is Decision.CONFLICT
    assert found["keep-bits"].decision is Decision.CONFLICT
    assert "it needs double-fix, which is conflict here: " in found["keep-bits"].reason
    assert wrapper.wrap(1.5) == 2


def test_under_strict_the_import_that_took_it_out_raises(pair: Pair, session: SessionMaker) -> None:
    pair.change(self_test=lambda _: Observation(broken=True, seen="it is wrong when it runs"))
    current = session(*pair.overlays, mode=Mode.STRICT)
    current.arm()
    wrapper = pair.wrapper()

    with pytest.raises(ActivationError, match="keep-bits"):
        pair.upstream.load()
    assert wrapper.wrap(1.5) == 2


def test_live_code_that_is_wrong_in_spite_of_the_other_one_keeps_it_out(pair: Pair, session: SessionMaker) -> None:
    right = True
    pair.change(self_test=lambda _: Observation(broken=not right, seen="it is wrong by now"))
    current = session(*pair.overlays)
    current.arm()
    pair.upstream.load()
    right = False
    pair.wrapper()

    record = records(current)["keep-bits"]
    assert record.decision is Decision.CONFLICT
    assert "does not help: it is wrong by now" in record.reason


@ORDERS
def test_undoing_the_needed_overlay_takes_it_out_and_arming_puts_both_in(
    pair: Pair, session: SessionMaker, order: tuple[str, str]
) -> None:
    current = session(*pair.overlays)
    current.arm()
    for name in order:
        pair.upstream.load(name)

    current.undo("double-fix")
    assert decisions(current) == {"keep-bits": "conflict", "double-fix": "disabled"}
    assert pair.wrapper().wrap(1.5) == 2

    current.arm()
    assert decisions(current) == {"keep-bits": "active", "double-fix": "active"}
    assert pair.wrapper().wrap(1.5) == 1.5


def test_undoing_a_needed_overlay_that_waits_takes_it_out_too(pair: Pair, session: SessionMaker) -> None:
    current = session(*pair.overlays)
    current.arm()
    wrapper = pair.wrapper()

    current.undo("double-fix")

    assert decisions(current) == {"keep-bits": "conflict", "double-fix": "disabled"}
    assert wrapper.wrap(1.5) == 2


@pytest.mark.parametrize("before", [None, "double-fix", "keep-bits"])
def test_undoing_everything_leaves_nothing_in_and_no_conflict(
    pair: Pair, session: SessionMaker, before: str | None
) -> None:
    current = session(*pair.overlays)
    current.arm()
    wrapper, layers = pair.wrapper(), pair.upstream.load()
    if before:
        current.undo(before)

    current.undo()

    assert decisions(current) == {"keep-bits": "disabled", "double-fix": "disabled"}
    assert (wrapper.wrap(1.5), layers.double(1)) == (2, 3)


def test_it_is_not_active_once_third_party_code_replaced_the_needed_seam(pair: Pair, session: SessionMaker) -> None:
    current = session(*pair.overlays)
    current.arm()
    pair.wrapper()
    pair.upstream.load().double = lambda x: x

    record = records(current)["keep-bits"]

    assert record.decision is Decision.CONFLICT
    assert "it needs double-fix, which is conflict here: " in record.reason
    assert "was replaced after us" in record.reason


def declared(*overlays: Overlay) -> list[tuple[str, object]]:
    return [(f"module {each.id}", each) for each in overlays]


def test_only_overlays_can_be_needed_and_not_in_a_circle(pair: Pair) -> None:
    turned = dataclasses.replace(pair.needed, needs=("keep-bits",))
    stray = dataclasses.replace(pair.dependent, needs=("no-such-fix",))
    text: Any = "double-fix"
    loose = dataclasses.replace(pair.dependent, needs=text)

    assert registry.check(declared(*pair.overlays))
    with pytest.raises(RegistryError, match="keep-bits needs itself"):
        registry.check(declared(pair.dependent, turned))
    with pytest.raises(RegistryError, match="needs no-such-fix, which is no overlay"):
        registry.check(declared(stray, pair.needed))
    with pytest.raises(RegistryError, match="is no tuple of ids"):
        registry.check(declared(loose, pair.needed))


def test_a_declaration_that_does_not_say_it_needs_nothing(upstream: Upstream) -> None:
    assert upstream.overlay().needs == ()
