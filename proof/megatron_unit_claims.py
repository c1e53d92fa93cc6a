"""Claims about Megatron-LM's own unit tests under overlays."""

from __future__ import annotations

from collections import Counter

from claims import Claim, Found, Outcome, Verdict
from megatron_unit_ends import count, differences, ends
from megatron_unit_groups import GROUPS
from upstream_tests import WAYS

MOST = 4
"""Errors and names that are quoted."""
TITLES = {group.id: group.title for group in GROUPS}


def counted(found: Found, way: str, kind: str) -> int:
    """Return how many tests of all groups ended so."""
    return sum(count(ways[way], kind) for ways in found["groups"].values())


def kept(found: Found) -> Verdict:
    """Judge that no test is lost, and that in each group something really passes."""
    ended = differences(found)
    lost = [each.name for each in ended if each.is_lost]
    empty = [TITLES[group] for group, ways in found["groups"].items() if not ways["without"]["passed"]]
    figures = [
        f"{counted(found, 'without', 'passed')} pass without, {counted(found, 'with', 'passed')} with, in "
        f"{len(found['groups'])} groups; {counted(found, 'without', 'failed')} fail without and "
        f"{counted(found, 'without', 'skipped')} are skipped",
        f"lost: {_some(lost)}",
        f"repaired: {sum(each.is_repaired for each in ended)}",
        f"stock's own changes: {sum(each.is_of_stock for each in ended)}",
    ]
    if late := max(counted(found, way, "unreached") for way in WAYS):
        figures.append(f"not reached in the time limit or behind an end: {late}")
    if empty:
        figures.append(f"nothing passes in: {', '.join(empty)}")
    return Verdict.of("; ".join(figures), holds=bool(found["groups"]) and not lost and not empty)


def used(found: Found) -> Verdict:
    """Judge that these tests reach overlays, and that nothing is in conflict."""
    calls: Counter[str] = Counter()
    conflicts: set[str] = set()
    idle = []
    for group, ways in found["groups"].items():
        of_group = ways["with"].get("calls", {})
        calls.update(of_group)
        if not of_group:
            idle.append(TITLES[group])
        conflicts |= set(ways["with"].get("conflicts", ()))
    named = ", ".join(f"{name} {count} times" for name, count in calls.most_common())
    figure = (
        f"{len(calls)} overlays called: {named or 'none'}; groups that call none on this host: {'; '.join(idle) or 'none'}; "
        f"in conflict: {', '.join(sorted(conflicts)) or 'none'}"
    )
    return Verdict.of(figure, holds=bool(calls) and not conflicts)


def rest_is_upstreams(found: Found) -> Verdict:
    """Judge that every test that fails with overlays fails without them, with the same error."""
    ours = [each.name for each in differences(found) if each.is_lost or each.is_another_failure]
    if ours:
        return Verdict(Outcome.FAILS, f"{len(ours)} fail otherwise than without overlays: {_some(ours)}")
    errors = Counter(
        end.error for ways in found["groups"].values() for end in ends(ways["with"]).values() if end.kind == "failed"
    )
    if not errors:
        return Verdict(Outcome.HOLDS, "nothing fails")
    most = "; ".join(f"{error} ({count})" for error, count in errors.most_common(MOST))
    return Verdict(
        Outcome.UPSTREAM,
        f"{errors.total()} fail without overlays, too, with the same {len(errors)} errors, the most frequent: {most}",
    )


def _some(names: list[str]) -> str:
    """Return the first names, and how many more there are."""
    more = f" and {len(names) - MOST} more" if len(names) > MOST else ""
    return ", ".join(names[:MOST]) + more if names else "none"


CLAIMS = (
    Claim(
        "megatron-unit-tests-kept",
        "of Megatron-LM's own unit tests of what overlays replace, what passes without overlays passes with them",
        kept,
    ),
    Claim("megatron-unit-tests-used", "these unit tests call what overlays replace; no overlay is in conflict", used),
    Claim(
        "megatron-unit-tests-rest",
        "what of these unit tests fails with overlays is upstream's own failure on this host",
        rest_is_upstreams,
    ),
)
