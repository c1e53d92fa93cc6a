"""Neighbour cases: calls without the defect, whose result must be the same with the overlay.

`packs/NN-slug/neighbours.py` declares `NEIGHBOURS`, a tuple of neighbours, in a file of its own, because receipts bind
`reproduce.py` byte for byte. They run after a case of the same overlay, in the same two processes: without the overlay,
and with every overlay. A neighbour neither uses the overlay nor judges: it returns numbers, which are compared.
"""

from __future__ import annotations

import importlib.util
import itertools
import math
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from megacpp_overlays.repro.case import CPU, Blocked, Case, PackError, TargetAbsent

FILE = "neighbours.py"
MOST = 100_000
"""Limit on the numbers of one neighbour: a report keeps all of them."""
_NAME = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")

Numbers = Mapping[str, Sequence[float]]
"""Numbers by name, such as `loss` or `gradient of weight`."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Neighbour:
    """A call without the defect, whose numbers an overlay must not change.

    Raises:
        ValueError: a field has a value that is not allowed.
    """

    name: str
    """Lower-case words joined by hyphens, unique in its pack: the difference from the defect, such as `no-mask`."""
    overlay: str
    """Id of the overlay."""
    run: Callable[[], Mapping[str, object]]
    """Returns tensors, sequences of numbers, or numbers, by name. Raises Blocked where this host cannot run it, and
    TargetAbsent where this upstream has no such call."""
    rounding: float = 0.0
    """Largest difference that is allowed, relative to the largest number of the same name; 0 allows none."""
    why_rounding: str = ""
    """The sum that the overlay takes in another order; required with `rounding`."""
    after: str = ""
    """Name of the case after which it runs, in the same processes; by default the overlay's first case on a CPU."""

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise ValueError(f"neighbour {self.name!r} is not lower-case words joined by hyphens")
        if not 0 <= self.rounding < 1:
            raise ValueError(f"neighbour {self.name}: rounding {self.rounding} is not between 0 and 1")
        if bool(self.rounding) is not bool(self.why_rounding):
            raise ValueError(f"neighbour {self.name}: it has both, rounding and why_rounding, or neither")


@dataclass(frozen=True, slots=True, kw_only=True)
class NeighbourResult:
    """Result of a neighbour in one process."""

    numbers: Numbers | None
    """None where it was not measured."""
    why_not: str = ""
    """Why it was not measured."""
    failed: bool = False
    """Whether it ended in an error other than Blocked or TargetAbsent."""


def load(pack: Path) -> tuple[Neighbour, ...]:
    """Return the neighbours of a pack; none where it has no such file.

    Raises:
        PackError: the file cannot be executed, or declares no valid NEIGHBOURS.
    """
    path = pack / FILE
    if not path.is_file():
        return ()
    where = f"{pack.name}/{FILE}"
    try:
        module = load_file(path)
    except Exception as error:
        raise PackError(f"{where} cannot be loaded: {type(error).__name__}: {error}") from error
    found = getattr(module, "NEIGHBOURS", None)
    if not isinstance(found, tuple) or not found or not all(isinstance(each, Neighbour) for each in found):
        raise PackError(f"{where} declares no NEIGHBOURS, a tuple of Neighbour")
    if len({each.name for each in found}) < len(found):
        raise PackError(f"{where} declares two neighbours of one name")
    return found


def of(case: Case, cases: Sequence[Case], pack: Path) -> tuple[Neighbour, ...]:
    """Return the neighbours of a pack that run in the processes of a case.

    Raises:
        PackError: see `load`.
    """
    first = next((each.name for each in cases if (each.overlay, each.device) == (case.overlay, CPU)), None)
    found = [each for each in load(pack) if each.overlay == case.overlay]
    if strange := [each.after for each in found if each.after and each.after not in {one.name for one in cases}]:
        raise PackError(f"{pack.name}/{FILE}: there is no case {strange[0]}")
    return tuple(each for each in found if (each.after or first) == case.name)


def load_file(path: Path) -> ModuleType:
    """Execute a file of a pack under a name of its own, and return it as a module.

    Raises:
        Exception: the file raises it.
    """
    name = _module_name(path)
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise PackError(f"there is no {path.parent.name}/{path.name}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # classes in the file look up their module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _module_name(path: Path) -> str:
    return "megacpp_pack_" + re.sub(r"\W", "_", f"{path.parent.name}_{path.stem}")


def beside(file: str) -> Any:
    """Return the module of the `reproduce.py` in the folder of a file, for the helpers that build upstream objects."""
    path = Path(file).with_name("reproduce.py")
    loaded = sys.modules.get(_module_name(path))
    return loaded if loaded is not None and loaded.__file__ == str(path) else load_file(path)


def measured(neighbour: Neighbour) -> NeighbourResult:
    """Run a neighbour; return its result, an error included."""
    try:
        numbers = {name: list(flat(value)) for name, value in neighbour.run().items()}
    except (Blocked, TargetAbsent) as reason:
        return NeighbourResult(numbers=None, why_not=str(reason))
    except Exception as error:  # noqa: BLE001 - upstream code may fail in any way
        traceback.print_exc()
        return NeighbourResult(numbers=None, why_not=f"{type(error).__name__}: {error}", failed=True)
    if not numbers or not all(numbers.values()):
        return NeighbourResult(numbers=None, why_not="it returned no numbers", failed=True)
    if (count := sum(map(len, numbers.values()))) > MOST:
        return NeighbourResult(numbers=None, why_not=f"it returned {count} numbers, more than {MOST}", failed=True)
    return NeighbourResult(numbers=numbers)


def flat(value: Any) -> Iterator[float]:
    """Yield the numbers of a tensor, a sequence or a number, in order."""
    if hasattr(value, "detach"):
        value = value.detach().cpu().double().flatten().tolist()
    if isinstance(value, str | bytes):
        raise TypeError(f"{value!r} is no number")
    if isinstance(value, int | float):
        yield float(value)
    else:
        for each in value:
            yield from flat(each)


def problem(neighbour: Neighbour, without: NeighbourResult | None, with_all: NeighbourResult | None) -> str | None:
    """Describe a neighbour that fails; None where it passes, or cannot run on this host or upstream.

    Args:
        neighbour: the one that was run.
        without: its result without overlays; None where it was not run.
        with_all: its result with overlays; None where it was not run.
    """
    if without is None or with_all is None:
        side = "without" if without is None else "with"
        return f"neighbour {neighbour.name} was not run {side} the overlay"
    if without.failed:
        return f"neighbour {neighbour.name} without the overlay: {without.why_not}"
    apart = difference(neighbour, without, with_all)
    return None if apart is None else f"neighbour {neighbour.name} is not the same: {apart}"


def difference(neighbour: Neighbour, without: NeighbourResult, with_all: NeighbourResult) -> str | None:
    """Describe how numbers differ with overlays; None where they do not, or were not measured without overlays."""
    if without.numbers is None:
        return None
    if with_all.numbers is None:
        return f"it ends with the overlay: {with_all.why_not}"
    if without.numbers.keys() != with_all.numbers.keys():
        return "other numbers with the overlay: " + ", ".join(sorted(without.numbers.keys() ^ with_all.numbers.keys()))
    for name, stock in without.numbers.items():
        ours = with_all.numbers[name]
        if len(stock) != len(ours):
            return f"{name}: {len(stock)} numbers without the overlay, {len(ours)} with it"
        apart = _apart(stock, ours)
        if apart > neighbour.rounding:
            allowed = f"{neighbour.rounding:.0e}" if neighbour.rounding else "nothing"
            return f"{name}: {apart:.1e} of the largest value apart, and {allowed} is allowed"
    return None


def _apart(stock: Sequence[float], ours: Sequence[float]) -> float:
    """Return the largest difference, relative to the largest stock number; 0 where all are the same."""
    pairs = [(one, other) for one, other in zip(stock, ours, strict=True) if not _same(one, other)]
    if not pairs:
        return 0.0
    if not all(map(math.isfinite, itertools.chain.from_iterable(pairs))):
        return math.inf
    largest = max((abs(each) for each in stock if math.isfinite(each)), default=0.0)
    apart = max(abs(one - other) for one, other in pairs)
    return apart / largest if largest else math.inf


def _same(one: float, other: float) -> bool:
    return one == other or (math.isnan(one) and math.isnan(other))
