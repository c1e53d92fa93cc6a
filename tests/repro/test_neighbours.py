"""Neighbour cases: calls close to a defect, measured without an overlay and with it; their numbers must be the same."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest
from made_environments import install_here
from made_up import BROKEN_TEXT

from megacpp_overlays.loader import registry
from megacpp_overlays.repro import Behaviour, Blocked, Case, Neighbour, TargetAbsent, inventory, neighbour, runner
from megacpp_overlays.repro.case import PackError
from megacpp_overlays.repro.neighbour import NeighbourResult
from megacpp_overlays.repro.transcript import Transcript

DECLARATION = """
from megacpp_overlays.repro import Neighbour
NEIGHBOURS = ({},)
"""
ONE = 'Neighbour(name="{}", overlay="double-fix", run=lambda: {{"numbers": [1.0]}})'


def made(name: str = "no-mask", *, overlay: str = "double-fix", rounding: float = 0.0, after: str = "") -> Neighbour:
    why = "sums in another order" if rounding else ""
    return Neighbour(name=name, overlay=overlay, run=dict, rounding=rounding, why_rounding=why, after=after)


def case(name: str, *, overlay: str = "double-fix", device: str = "cpu") -> Case:
    return Case(
        name=name, overlay=overlay, device=device, versions=(), run=lambda: Behaviour(broken=True, seen="numbers")
    )


# Declarations


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"name": "No mask"}, "neighbour 'No mask' is not lower-case words joined by hyphens"),
        ({"name": "no-mask-"}, "is not lower-case words"),
        ({"name": ""}, "is not lower-case words"),
        ({"rounding": -1e-6, "why_rounding": "sums"}, "neighbour no-mask: rounding -1e-06 is not between 0 and 1"),
        ({"rounding": 1.0, "why_rounding": "sums"}, "rounding 1.0 is not between 0 and 1"),
        ({"rounding": math.nan, "why_rounding": "sums"}, "rounding nan is not between 0 and 1"),
        ({"rounding": 1e-6}, "it has both, rounding and why_rounding, or neither"),
        ({"why_rounding": "sums"}, "it has both, rounding and why_rounding, or neither"),
    ],
)
def test_a_neighbour_that_cannot_be_meant_is_refused(fields: Mapping[str, object], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        Neighbour(**{"name": "no-mask", "overlay": "double-fix", "run": dict, **fields})  # type: ignore[arg-type]


# Files


def test_a_pack_without_such_a_file_has_no_neighbours(tmp_path: Path) -> None:
    assert neighbour.load(tmp_path) == ()


def test_neighbours_are_those_that_the_file_declares_in_its_order(tmp_path: Path) -> None:
    (tmp_path / neighbour.FILE).write_text(DECLARATION.format(f"{ONE.format('b')}, {ONE.format('a')}"))

    assert [each.name for each in neighbour.load(tmp_path)] == ["b", "a"]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("1 / 0", "cannot be loaded: ZeroDivisionError: division by zero"),
        ("import nowhere_to_be_found", "cannot be loaded: ModuleNotFoundError"),
        ('raise ValueError("no name")', "cannot be loaded: ValueError: no name"),
        ("", "declares no NEIGHBOURS, a tuple of Neighbour"),
        ("NEIGHBOURS = ()", "declares no NEIGHBOURS"),
        ("NEIGHBOURS = (1,)", "declares no NEIGHBOURS"),
        (DECLARATION.format(ONE.format("a")).replace("(N", "[N").replace(",)", "]"), "declares no NEIGHBOURS"),
        (DECLARATION.format(f"{ONE.format('a')}, {ONE.format('a')}"), "declares two neighbours of one name"),
    ],
    ids=["fails", "imports nothing", "refuses", "empty", "none", "no neighbours", "a list", "one name twice"],
)
def test_a_file_that_declares_none_is_refused_under_the_name_of_its_pack(tmp_path: Path, text: str, says: str) -> None:
    pack = tmp_path / "99-double"
    pack.mkdir()
    (pack / neighbour.FILE).write_text(text)

    with pytest.raises(PackError, match=rf"^99-double/neighbours\.py {says}"):
        neighbour.load(pack)


def test_a_file_that_fails_leaves_no_module(tmp_path: Path) -> None:
    (tmp_path / neighbour.FILE).write_text("1 / 0")
    before = sys.modules.keys() - set()

    with pytest.raises(PackError):
        neighbour.load(tmp_path)

    assert sys.modules.keys() == before


def test_neighbours_build_with_the_reproducer_of_their_folder_which_is_executed_once(tmp_path: Path) -> None:
    (tmp_path / "reproduce.py").write_text("MADE = []")
    file = str(tmp_path / neighbour.FILE)

    neighbour.beside(file).MADE.append(1)

    assert neighbour.beside(file).MADE == [1]


def test_reproducers_of_two_folders_are_two_modules(tmp_path: Path) -> None:
    for folder in ("one", "other"):
        pack = tmp_path / folder / "99-double"
        pack.mkdir(parents=True)
        (pack / "reproduce.py").write_text(f"FOLDER = {folder!r}")

    found = [neighbour.beside(str(tmp_path / each / "99-double" / neighbour.FILE)) for each in ("one", "other")]

    assert [each.FOLDER for each in found] == ["one", "other"]


# Cases


CASES = (case("gpu", device="cuda"), case("first"), case("second"), case("elsewhere", overlay="treble-fix"))


@pytest.mark.parametrize(
    ("after", "runs_after"),
    [("", ["first"]), ("second", ["second"]), ("gpu", ["gpu"])],
    ids=["the first case on a CPU", "a case by name", "a case on a GPU by name"],
)
def test_a_neighbour_runs_after_one_case(
    after: str, runs_after: Sequence[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(neighbour, "load", lambda _: (made(after=after),))

    assert [each.name for each in CASES if neighbour.of(each, CASES, tmp_path)] == runs_after


def test_a_neighbour_runs_after_cases_of_its_own_overlay_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = made("own", overlay="treble-fix")
    monkeypatch.setattr(neighbour, "load", lambda _: (made("other"), own, made("third", after="elsewhere")))

    assert {each.name: neighbour.of(each, CASES, tmp_path) for each in CASES[2:]} == {"second": (), "elsewhere": (own,)}


def test_without_a_case_on_a_cpu_a_neighbour_runs_where_it_says_so_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(neighbour, "load", lambda _: (made("unsaid"), made("said", after="gpu")))

    assert [each.name for each in neighbour.of(CASES[0], CASES[:1], tmp_path)] == ["said"]


def test_a_neighbour_after_a_case_that_is_not_there_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(neighbour, "load", lambda _: (made(after="third"),))

    with pytest.raises(PackError, match=rf"^{tmp_path.name}/neighbours\.py: there is no case third$"):
        neighbour.of(CASES[1], CASES, tmp_path)


# Measurements


class Tensor:
    """Numbers as a tensor of torch gives them away."""

    def __init__(self, *values: float) -> None:
        self.values = list(values)

    def __getattr__(self, _: str) -> Callable[[], Tensor]:
        return lambda: self

    def tolist(self) -> list[float]:
        return self.values


@pytest.mark.parametrize(
    ("value", "numbers"),
    [
        (1.5, [1.5]),
        (True, [1.0]),
        ([1, [2, (3.5,)]], [1.0, 2.0, 3.5]),
        (Tensor(1.0, math.inf), [1.0, math.inf]),
        ([Tensor(1.0), 2], [1.0, 2.0]),
        ((each for each in (1, 2)), [1.0, 2.0]),
    ],
    ids=["a number", "a truth", "sequences in sequences", "a tensor", "tensors in a sequence", "a generator"],
)
def test_returned_values_become_numbers_in_order(value: object, numbers: Sequence[float]) -> None:
    assert measure(lambda: {"loss": value}) == NeighbourResult(numbers={"loss": numbers})


def raising(error: Exception) -> Callable[[], Mapping[str, object]]:
    def run() -> Mapping[str, object]:
        raise error

    return run


@pytest.mark.parametrize("error", [Blocked("no such device"), TargetAbsent("no such call")])
def test_a_host_or_an_upstream_that_cannot_is_no_failure(error: Exception) -> None:
    assert measure(raising(error)) == NeighbourResult(numbers=None, why_not=str(error))


@pytest.mark.parametrize(
    ("run", "says"),
    [
        (raising(RuntimeError("of upstream")), "RuntimeError: of upstream"),
        (lambda: {"loss": "words"}, ""),
        (lambda: {"loss": None}, "TypeError: 'NoneType' object is not iterable"),
        (lambda: None, "AttributeError: "),
        (dict, "it returned no numbers"),
        (lambda: {"loss": [1.0], "gradient": []}, "it returned no numbers"),
        (lambda: {"loss": [0] * 60_000, "slope": [0] * 40_001}, "it returned 100001 numbers, more than 100000"),
    ],
    ids=["an error", "words", "none", "no mapping", "nothing", "nothing of one name", "too many"],
)
def test_any_other_outcome_is_a_failure(run: Callable[[], Mapping[str, object]], says: str) -> None:
    found = measure(run)

    assert (found.numbers, found.failed) == (None, True)
    assert found.why_not.startswith(says)


def measure(run: Callable[[], Mapping[str, object]]) -> NeighbourResult:
    return neighbour.measured(Neighbour(name="no-mask", overlay="double-fix", run=run))


# Comparisons


@pytest.mark.parametrize(
    ("stock", "ours"),
    [
        ([1.0, -2.5], [1.0, -2.5]),
        ([math.nan, math.inf, -math.inf], [math.nan, math.inf, -math.inf]),
        ([0.0], [-0.0]),
    ],
    ids=["numbers", "no numbers and infinities", "zeros of both signs"],
)
def test_the_same_numbers_are_the_same(stock: Sequence[float], ours: Sequence[float]) -> None:
    assert difference({"loss": stock}, {"loss": ours}) is None


@pytest.mark.parametrize(
    ("stock", "ours", "says"),
    [
        ([1.0, 2.0], [1.0, 2.0 + 2**-51], "loss: 2.2e-16 of the largest value apart, and nothing is allowed"),
        ([4.0, 1.0], [4.0, 3.0], "loss: 5.0e-01 of the largest value apart"),
        ([0.0], [1e-30], "loss: inf of the largest value apart"),
        ([1.0], [math.nan], "loss: inf of the largest value apart"),
        ([math.nan], [1.0], "loss: inf of the largest value apart"),
        ([math.inf], [-math.inf], "loss: inf of the largest value apart"),
        ([1.0, 2.0], [1.0], "loss: 2 numbers without the overlay, 1 with it"),
    ],
    ids=["a bit", "the largest distance", "no zero", "becomes nan", "was nan", "another infinity", "fewer"],
)
def test_other_numbers_are_reported_by_name(stock: Sequence[float], ours: Sequence[float], says: str) -> None:
    found = difference({"right": [1.0], "loss": stock}, {"right": [1.0], "loss": ours})

    assert found is not None
    assert found.startswith(says)


def test_a_name_of_one_side_alone_is_a_difference() -> None:
    found = difference({"loss": [1.0], "slope": [1.0]}, {"loss": [1.0], "bias": [1.0]})

    assert found == "other numbers with the overlay: bias, slope"


@pytest.mark.parametrize(("apart", "is_allowed"), [(0.9e-6, True), (1.1e-6, False)])
def test_rounding_is_measured_by_the_largest_number_of_its_name(apart: float, is_allowed: bool) -> None:
    stock = {"loss": [8.0, 0.0], "slope": [1e9]}

    found = difference(stock, {"loss": [8.0, 8.0 * apart], "slope": [1e9]}, rounding=1e-6)

    assert found == (None if is_allowed else "loss: 1.1e-06 of the largest value apart, and 1e-06 is allowed")


@pytest.mark.parametrize(("stock", "ours"), [([math.inf, 1.0], [1.0, 1.0]), ([1.0], [math.nan]), ([0.0], [1e-9])])
def test_rounding_allows_neither_infinities_nor_changes_of_zeros(stock: Sequence[float], ours: Sequence[float]) -> None:
    assert difference({"loss": stock}, {"loss": ours}, rounding=0.5) is not None


def test_infinities_are_no_measure_of_rounding() -> None:
    found = difference({"loss": [math.inf, 1.0]}, {"loss": [math.inf, 2.0]}, rounding=0.5)

    assert found == "loss: 1.0e+00 of the largest value apart, and 5e-01 is allowed"


def test_an_error_only_with_the_overlay_is_a_difference() -> None:
    right, ended = NeighbourResult(numbers={"loss": [1.0]}), NeighbourResult(numbers=None, why_not="no such call")

    assert neighbour.difference(made(), right, ended) == "it ends with the overlay: no such call"
    assert neighbour.difference(made(), ended, right) is None


def difference(
    stock: Mapping[str, Sequence[float]], ours: Mapping[str, Sequence[float]], *, rounding: float = 0.0
) -> str | None:
    return neighbour.difference(made(rounding=rounding), NeighbourResult(numbers=stock), NeighbourResult(numbers=ours))


# The whole way, in processes


REPRODUCER = """
from megacpp_overlays.repro import Behaviour, Case

def measure():
    return Behaviour(broken=double(1) != 2, seen=f"double(1) = {double(1)}")

def double(x):
    from made_target import layers
    return layers.double(x)

CASES = (Case(name="double", overlay="double-fix", device="cpu", versions=(), run=measure),)
"""
NEIGHBOURS = """
from megacpp_overlays.repro import Blocked, Neighbour, TargetAbsent, beside

double = beside(__file__).double

def static():
    from made_target import layers
    return {"static": layers.Layer.static(1)}

def absent():
    raise TargetAbsent("there is no treble")

def failing():
    raise RuntimeError("of upstream")

def failing_with_the_overlay():
    return {"share": [1 / (double(5) - 10)]}

def neighbour(name, run, **rounding):
    return Neighbour(name=name, overlay="double-fix", run=run, **rounding)

NEIGHBOURS = (
    neighbour("static", static),
    neighbour("nearly", lambda: {"double": double(5)}, rounding=0.1, why_rounding="it subtracts one"),
    neighbour("absent", absent),
    neighbour("seam", lambda: {"double": [double(5), double(6)]}),
    neighbour("failing", failing),
    neighbour("ending", failing_with_the_overlay),
)
"""


def test_a_run_says_of_each_neighbour_whether_it_is_the_same_and_fails_where_one_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_here(tmp_path, monkeypatch, BROKEN_TEXT)
    pack = tmp_path / "packs" / "99-double"
    pack.mkdir(parents=True)
    (pack / "reproduce.py").write_text(REPRODUCER)
    (pack / "neighbours.py").write_text(NEIGHBOURS)
    job = runner.Job(
        reproducer=pack / "reproduce.py",
        cases=inventory.load_cases(pack / "reproduce.py"),
        overlays=registry.load(["double"]),
        command="megacpp-overlays repro 99",
        timeout=60.0,
    )
    transcript = Transcript([], lambda _: None)

    _, code = runner.run(job, transcript)

    lines = [line for line in transcript.text.splitlines() if not line.startswith("    |")]
    assert [line for line in lines if line.startswith("  neighbour")] == [
        "  neighbour static: the same bits, 1 numbers",
        "  neighbour nearly: the same but for rounding (it subtracts one), 1 numbers",
        "  neighbour absent: not measured: there is no treble",
    ]
    assert [line for line in lines if line.endswith("(case double)")] == [
        "BUG_REPRODUCED: double(1) = 3 (case double)",
        "FIX_VALIDATED: double(1) = 2 (case double)",
        "FAILED: neighbour seam is not the same: double: 7.7e-02 of the largest value apart, and nothing is allowed (case double)",
        "FAILED: neighbour failing without the overlay: RuntimeError: of upstream (case double)",
        "FAILED: neighbour ending is not the same: it ends with the overlay: ZeroDivisionError: division by zero (case double)",
    ]
    assert code == 1
