"""Fault injection: interrupt the loader at each of its lines, and print every wrong state that results.

The program takes the name of an error. It raises that at each line that no earlier scenario executed, and at every third of the
others; with `--few` at every sixteenth of these; with `--all` at each line in each scenario, the first and the last time. It needs
a process of its own, because the loader walks over the heap, which is small here.
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
    """Trace function that counts executions of each line of the loader, and raises an error before one of them."""

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
    """A made-up upstream with seams in a function and in a class, a module with an alias, and a session."""

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
        """Return the kinds of code that the names lead to: `seam`, `original` or both."""
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


# Scenarios. Each prepares a world, and returns the work to interrupt and the decision that the work leads to.


def arming_late(world: World) -> tuple[Callable[[], Any], Decision]:
    world.load()
    world.alias()
    return world.session.arm, Decision.ACTIVE


def arming_and_importing(world: World) -> tuple[Callable[[], Any], Decision]:
    def work() -> None:
        world.session.arm()
        world.load()

    return work, Decision.ACTIVE


def importing_before_declarations_are_loaded(world: World) -> tuple[Callable[[], Any], Decision]:
    """The first import of the target loads the declarations."""
    overlay = _overlay(world.upstream)
    registry.load = lambda _=(): registry.check([("made up", overlay)])
    world.session = Session(ListedDeclarations([overlay]), SILENT)

    def work() -> None:
        world.session.arm()
        world.load()

    return work, Decision.ACTIVE


class ListedDeclarations(Declarations):
    """Declarations that are listed and not loaded yet."""

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
        *(arming_late, arming_and_importing, importing_before_declarations_are_loaded),
        *(undoing, undoing_with_a_later_name, arming_again, reloading),
    )
}


Scenario = Callable[["World"], tuple[Callable[[], Any], Decision]]


def points(upstream: Upstream, scenario: Scenario, done: set[Place] | None, share: int = 1) -> list[tuple[Place, int]]:
    """Return the lines of a scenario at which to raise, each with the number of the execution.

    Args:
        upstream: the made-up package.
        scenario: the scenario to run.
        done: lines of earlier scenarios; one in three of them is chosen, and the new ones are added. None chooses every line,
            the first and the last time.
        share: one of so many chosen lines is returned.
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
    """Interrupt a scenario at each of some lines; yield a message for each wrong state."""
    for place, turn in where:
        world = World(upstream)
        work, wanted = scenario(world)
        with contextlib.suppress(error, SeamError, ActivationError):
            _run(work, Injector(error, place, turn))
        line = f"{Path(place[0].co_filename).name}:{place[1]}, time {turn}"
        yield from (f"{line}: {problem}" for problem in _problems(world, work, wanted))
        world.close()


def _problems(world: World, work: Callable[[], Any], wanted: Decision) -> Iterator[str]:
    yield from _wrong_states(world, "after it")
    try:
        work()
    except Exception as error:  # noqa: BLE001 - any error is reported
        yield f"cannot be repeated: {type(error).__name__}: {error}"
        return
    decision = yield from _wrong_states(world, "when repeated")
    if decision is not wanted:
        yield f"repeated it is {decision}: {world.session.audit().records[0].reason}"
    thread = threading.Thread(target=world.session.undo, daemon=True)
    thread.start()
    thread.join(60)
    if thread.is_alive():
        yield "another thread waits for ever"
        return
    decision = yield from _wrong_states(world, "when undone")
    if "seam" in world.live():
        yield f"a seam stays in: {decision}"


def _wrong_states(world: World, when: str) -> Iterator[str]:
    if not (records := world.session.audit().records):
        return None  # not armed yet
    (record,) = records
    live = world.live()
    if record.decision is Decision.ACTIVE and "original" in live:
        yield f"{when} active with the original live"
    if record.decision in {Decision.DISABLED, Decision.ARMED} and "seam" in live:
        yield f"{when} {record.decision.value} with a seam live"
    return record.decision


def main() -> None:
    """Interrupt the scenarios that were asked for, or all."""
    error, *words = sys.argv[1:]
    names = [word for word in words if word in SCENARIOS] or list(SCENARIOS)
    folder = tempfile.mkdtemp()
    sys.path.insert(0, folder)
    upstream = Upstream(NAME, Path(folder))
    upstream.write(BROKEN_TEXT)
    upstream.write("from .layers import double as twice\n", module="user")
    logging.getLogger("megacpp_overlays").addHandler(logging.NullHandler())
    World(upstream).session.arm()  # imports the modules that arming needs
    # The loader walks over the heap and over all modules, which is nine tenths of the time. Objects and modules that are
    # there now have no reference to upstream and are left out. The loader would refuse a frozen heap, so none is reported.
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
