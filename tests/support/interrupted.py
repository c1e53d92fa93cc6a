"""Interrupt the loader at every line, and say what is then not true.

Run as a program with the name of an error, it raises that at every line that a scenario executes and none before it did, and
at every third of the others; with `--few` at a sixteenth of these, chosen by where they stand; with `--all` at each line in each
scenario, the first and the last time. A process of its own, because the loader walks over the heap, which is small here.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import logging
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import CodeType, FrameType, ModuleType
from typing import Any

from made_up import BROKEN_TEXT, Upstream

import megacpp_overlays.loader
import megacpp_overlays.runtime
from megacpp_overlays.errors import ActivationError, SeamError
from megacpp_overlays.loader import aliases, declarations, registry
from megacpp_overlays.loader.declarations import Declarations
from megacpp_overlays.loader.session import Session
from megacpp_overlays.loader.settings import LogForm, Settings
from megacpp_overlays.model import Decision, Erratum, Observation, Overlay, Replacement

FOLDERS = tuple(str(Path(package.__path__[0])) for package in (megacpp_overlays.loader, megacpp_overlays.runtime))
NAME = "interrupted_upstream"
ERRORS = {"KeyboardInterrupt": KeyboardInterrupt, "MemoryError": MemoryError}
SILENT = Settings(log=LogForm.LOGGING)


Place = tuple[CodeType, int]
"""A function and a line of it."""


class Injector:
    """Counts how often each line of the loader is executed, and raises an error before one of them is."""

    def __init__(self, error: type[BaseException] = Exception, place: Place | None = None, turn: int = 0) -> None:
        self.error, self.place, self.turn = error, place, turn
        self.seen: Counter[Place] = Counter()

    def __call__(self, frame: FrameType, event: str, _: Any) -> Any:
        code = frame.f_code
        if self.place is None:
            return self.line if code.co_filename.startswith(FOLDERS) else None
        return self.line if code is self.place[0] else None

    def line(self, frame: FrameType, event: str, _: Any) -> Any:
        if event == "line":
            here = (frame.f_code, frame.f_lineno)
            self.seen[here] += 1
            if here == self.place and self.seen[here] == self.turn:
                raise self.error
        return self.line


class World:
    """A made-up upstream with a seam in a function and one in a class, a module that borrows, and a session."""

    def __init__(self, upstream: Upstream) -> None:
        self.upstream = upstream
        for name in [name for name in sys.modules if name.partition(".")[0] == NAME]:
            del sys.modules[name]
        self.session = Session([_overlay(upstream)], SILENT)

    def load(self) -> ModuleType:
        return self.upstream.load()

    def alias(self) -> None:
        self.upstream.load("user")

    def live(self) -> set[str]:
        """Return which code each name leads to."""
        layers, user = (sys.modules.get(f"{NAME}.{name}") for name in ("layers", "user"))
        found = set()
        if layers is not None and hasattr(layers, "Layer"):
            found.add("seam" if layers.double(1) == 2 else "original")
            found.add("seam" if layers.Layer.static(1) == 1 else "original")
        if user is not None and hasattr(user, "twice"):
            found.add("seam" if user.twice(1) == 2 else "original")
        return found

    def close(self) -> None:
        self.session._hooks.close()


def _overlay(upstream: Upstream) -> Overlay:
    def less(original: Callable[..., Any], _: ModuleType) -> Callable[..., Any]:
        return lambda *args: original(*args) - 1

    return upstream.overlay(
        replacements={"off-by-one": (Replacement("double", less), Replacement("Layer.static", less))},
        self_test=lambda module: Observation(broken=module.double(1) != 2, seen="double(1)"),
    )


# What is interrupted. Each scenario prepares a world and returns what to do in it, and the decision that this leads to.


def arming_late(world: World) -> tuple[Callable[[], Any], Decision]:
    world.load()
    world.alias()
    return world.session.arm, Decision.ACTIVE


def arming_and_importing(world: World) -> tuple[Callable[[], Any], Decision]:
    def work() -> None:
        world.session.arm()
        world.load()

    return work, Decision.ACTIVE


def importing_what_nobody_declared_yet(world: World) -> tuple[Callable[[], Any], Decision]:
    """The first import of a target loads the declarations."""
    overlay = _overlay(world.upstream)
    registry.load = lambda _=(): registry.check([("made up", overlay)])
    world.session = Session(Waiting([overlay]), SILENT)

    def work() -> None:
        world.session.arm()
        world.load()

    return work, Decision.ACTIVE


class Waiting(Declarations):
    """Declarations of which only the list is there."""

    def __init__(self, errata: Sequence[Erratum]) -> None:
        self.listed, self.are_loaded = declarations.listed(errata), False


def undoing(world: World) -> tuple[Callable[[], Any], Decision]:
    arming_late(world)[0]()
    return world.session.undo, Decision.DISABLED


def undoing_with_a_later_name(world: World) -> tuple[Callable[[], Any], Decision]:
    arming_and_importing(world)[0]()
    world.alias()
    return world.session.undo, Decision.DISABLED


def arming_again(world: World) -> tuple[Callable[[], Any], Decision]:
    undoing(world)[0]()
    return world.session.arm, Decision.ACTIVE


def reloading(world: World) -> tuple[Callable[[], Any], Decision]:
    arming_and_importing(world)[0]()

    def work() -> None:
        importlib.reload(world.load())
        world.session.arm()

    return work, Decision.ACTIVE


SCENARIOS = {
    each.__name__: each
    for each in (
        *(arming_late, arming_and_importing, importing_what_nobody_declared_yet),
        *(undoing, undoing_with_a_later_name, arming_again, reloading),
    )
}


Scenario = Callable[["World"], tuple[Callable[[], Any], Decision]]


def points(upstream: Upstream, scenario: Scenario, done: set[Place] | None, share: int = 1) -> list[tuple[Place, int]]:
    """Return the lines of a scenario at which to raise, and the how many-th time that it comes there.

    Args:
        upstream: what it is about.
        scenario: what is done to it.
        done: lines of earlier scenarios, of which one in three is enough, and to which these are added; None is every line
            the first and the last time.
        share: of how many lines one is taken.
    """
    world, injector = World(upstream), Injector()
    work, _ = scenario(world)
    _run(work, injector)
    world.close()
    if done is not None:
        chosen = [place for number, place in enumerate(injector.seen) if place not in done or number % 3 == 0]
        done.update(injector.seen)
        return [(place, 1) for place in chosen[::share]]
    return [(place, turn) for place, count in injector.seen.items() for turn in {1, count}]


def _run(work: Callable[[], Any], injector: Injector) -> None:
    sys.settrace(injector)
    try:
        work()
    finally:
        sys.settrace(None)


def problems(
    upstream: Upstream, scenario: Scenario, error: type[BaseException], where: list[tuple[Place, int]]
) -> Iterator[str]:
    """Interrupt a scenario at each of some lines; yield what is not as it should be afterwards."""
    for place, turn in where:
        world = World(upstream)
        work, wanted = scenario(world)
        with contextlib.suppress(error, SeamError, ActivationError):
            _run(work, Injector(error, place, turn))
        line = f"{Path(place[0].co_filename).name}:{place[1]}, time {turn}"
        yield from (f"{line}: {problem}" for problem in _problems(world, work, wanted))
        world.close()


def _problems(world: World, work: Callable[[], Any], wanted: Decision) -> Iterator[str]:
    yield from _untrue(world, "after it")
    try:
        work()
    except Exception as error:  # noqa: BLE001 - whatever it is, it is told
        yield f"cannot be repeated: {type(error).__name__}: {error}"
        return
    decision = yield from _untrue(world, "when repeated")
    if decision is not wanted:
        yield f"repeated it is {decision}: {world.session.audit().records[0].reason}"
    thread = threading.Thread(target=world.session.undo, daemon=True)
    thread.start()
    thread.join(60)
    if thread.is_alive():
        yield "another thread waits for ever"
        return
    decision = yield from _untrue(world, "when undone")
    if "seam" in world.live():
        yield f"a seam stays in: {decision}"


def _untrue(world: World, when: str) -> Iterator[str]:
    if not (records := world.session.audit().records):
        return None  # nothing is known before it was armed
    (record,) = records
    live = world.live()
    if record.decision is Decision.ACTIVE and "original" in live:
        yield f"{when} active with the original live"
    if record.decision in {Decision.DISABLED, Decision.ARMED} and "seam" in live:
        yield f"{when} {record.decision.value} with a seam live"
    return record.decision


def main() -> None:
    """Interrupt what was asked for."""
    error, *words = sys.argv[1:]
    names = [word for word in words if word in SCENARIOS] or list(SCENARIOS)
    folder = tempfile.mkdtemp()
    sys.path.insert(0, folder)
    upstream = Upstream(NAME, Path(folder))
    upstream.write(BROKEN_TEXT)
    upstream.write("from .layers import double as twice\n", module="user")
    logging.getLogger("megacpp_overlays").addHandler(logging.NullHandler())
    World(upstream).session.arm()  # imports what arming imports
    # The loader walks over the heap and over all modules. What is there now knows nothing of upstream, and is left out: it
    # is nine tenths of the time. A heap that is frozen would be refused.
    gc.collect()
    gc.freeze()
    gc.get_freeze_count = lambda: 0
    aliases._modules = lambda: [each for name, each in sys.modules.items() if name.partition(".")[0] == NAME]
    done: set[Place] | None = None if "--all" in words else set()
    share = 16 if "--few" in words else 1
    for name in names:
        where = points(upstream, SCENARIOS[name], done, share)
        sys.stdout.write(f"{name}: {error} at {len(where)} points\n")
        for problem in problems(upstream, SCENARIOS[name], ERRORS[error], where):
            sys.stdout.write(f"  {problem}\n")


if __name__ == "__main__":
    main()
