"""Compare the outcomes of tests in both ways, test by test; tests of stock that end otherwise in a second run are flaky."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from claims import Found
from upstream_tests import WAYS

KNOWN = ("passed", "failed", "skipped")
"""Outcomes that pytest reports. In addition a test is unreached where time was over before it, cut where time was over in it, and
missing where its process did not collect it, or ended before it."""


@dataclass(frozen=True)
class End:
    """How a test ended."""

    kind: str
    error: str = ""


GONE = End("missing")


def ends(run: Found) -> dict[str, End]:
    """Return how each test of a run ended."""
    found = {name: End(kind) for kind in ("passed", "skipped") for name in names(run[kind])}
    found |= {name: End("failed", error) for error, files in run["failed"].items() for name in names(files)}
    in_time = run["stopped"] != "limit"  # only time excuses a test
    found |= dict.fromkeys(names(run["unreached"]), GONE if in_time else End("unreached"))
    return found if in_time or run["cut"] is None else {**found, run["cut"]: End("cut")}


def by_file(tests: Iterable[str]) -> dict[str, list[str]]:
    """Return the names of tests by their files, which receipts say once."""
    found: dict[str, list[str]] = {}
    for test in tests:
        file, _, name = test.partition("::")
        found.setdefault(file, []).append(name)
    return found


def names(files: Mapping[str, Sequence[str]]) -> list[str]:
    """Return the full names of tests that are kept by file."""
    return [f"{file}::{name}" for file, kept in files.items() for name in kept]


def count(run: Found, kind: str) -> int:
    """Return how many tests of a run are of a kind."""
    kept = run[kind].values()
    return sum(len(names(files)) for files in kept) if kind == "failed" else sum(map(len, kept))


def differing(ways: Found) -> list[str]:
    """Return the tests of a group that ended otherwise with overlays, of those that both ways had time for."""
    without, with_overlays = ends(ways["without"]), ends(ways["with"])
    found = []
    for name in without | with_overlays:
        stock, ours = without.get(name, GONE), with_overlays.get(name, GONE)
        if stock != ours and stock.kind not in ("unreached", "cut") and ours.kind != "unreached":
            found.append(name)
    return sorted(found)


@dataclass(frozen=True)
class Difference:
    """A test that ended otherwise with overlays, and how it ended when its whole group was run once more.

    All of the group is, because a test may rest on those before it.
    """

    name: str
    stock: End
    ours: End
    stock_again: End
    ours_again: End

    @property
    def is_of_stock(self) -> bool:
        """Whether the test ends differently in two runs without overlays."""
        return self.stock_again.kind in KNOWN and self.stock != self.stock_again

    @property
    def is_lost(self) -> bool:
        """Whether it passes without overlays, both times, and not with them.

        Where time was over in it, a slow host is no verdict: there its second run is.
        """
        if self.is_of_stock or self.stock.kind != "passed":
            return False
        return self.ours.kind != "cut" or self.ours_again.kind not in ("passed", "unreached")

    @property
    def is_repaired(self) -> bool:
        """Whether it fails without overlays and passes with them, both times."""
        fails = self.stock.kind == "failed" == self.stock_again.kind
        return fails and self.ours.kind == "passed" == self.ours_again.kind

    @property
    def is_another_failure(self) -> bool:
        """Whether it fails with overlays, and not as it does without."""
        return self.ours.kind == "failed" and self.stock.kind in ("failed", "skipped") and not self.is_of_stock


def differences(found: Found) -> list[Difference]:
    """Return the tests of all groups that ended differently."""
    gathered = []
    for group, ways in found["groups"].items():
        again = found["again"].get(group)
        first, second = ({way: ends(runs[way]) for way in WAYS} if runs else {} for runs in (ways, again))
        for name in differing(ways):
            of = [runs.get(way, {}).get(name, GONE) for runs in (first, second) for way in WAYS]
            gathered.append(Difference(name, *of))
    return gathered
