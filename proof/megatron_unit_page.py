"""The section of a proof's page about Megatron-LM's own unit tests."""

from __future__ import annotations

from claims import Found
from megatron_unit_claims import TITLES
from megatron_unit_ends import count, differences
from megatron_unit_groups import FOLDER, GROUPS, LEFT_OUT
from report import table
from upstream_tests import WAYS

KINDS = ("passed", "failed", "skipped")


def section(found: Found) -> list[str]:
    """Return the lines of the section."""
    rows = [
        [TITLES[group], way, *(str(count(ways[way], kind)) for kind in KINDS), _stopped(ways[way])]
        for group, ways in found["groups"].items()
        for way in WAYS
    ]
    ended = differences(found)
    return [
        "## Megatron-LM's own unit tests",
        "",
        f"Those in `{FOLDER}` of the code that overlays replace, as they are, in a world of {_world(found)}; those that want more ranks, Transformer Engine,",
        "mamba-ssm or another package that is not here fail or are skipped, with overlays and without. Groups that differ are run once",
        f"more: differences of stock between both runs are its own. A group begins no test after {found['limit_s']:.0f} s.",
        "",
        *table(["group", "overlays", *KINDS, "ended"], rows),
        "",
        "Repaired by overlays:",
        "",
        *_listed([each.name for each in ended if each.is_repaired]),
        "",
        "Tests that end differently in two runs without overlays:",
        "",
        *_listed([each.name for each in ended if each.is_of_stock]),
        "",
        "Could not be collected on this host, in both ways unless it says otherwise:",
        "",
        *_left_out(found),
        "",
        "The files of each group, and the overlays that they are about:",
        "",
        *(
            f"- {group.title}: {', '.join(f'`{each}`' for each in group.files)}; {', '.join(group.of)}"
            + "".join(f"; without `{each.rpartition('::')[2]}`: {LEFT_OUT}" for each in group.but)
            for group in GROUPS
            if group.id in found["groups"]
        ),
    ]


def _world(found: Found) -> str:
    ranks = found.get("ranks", 1)
    return "one rank" if ranks == 1 else f"{ranks} ranks, of which the first says how a test ended"


def _stopped(run: Found) -> str:
    if run["stopped"] is None:
        return "all"
    how = "at the time limit" if run["stopped"] == "limit" else f"by {run['stopped']}"
    where = f" in `{_short(run['cut'])}`" if run["cut"] else ""
    return f"{how}{where}, {count(run, 'unreached')} not reached"


def _listed(names: list[str]) -> list[str]:
    return [f"- `{_short(name)}`" for name in names] or ["- none"]


def _left_out(found: Found) -> list[str]:
    """Return a line for each file, and one way where the other has it."""
    seen: dict[tuple[str, str], list[str]] = {}
    for ways in found["groups"].values():
        for way in WAYS:
            for name, why in ways[way]["left_out"].items():
                seen.setdefault((name, why), []).append(way)
    lines = []
    for (name, why), ways_of in sorted(seen.items()):
        only = "" if len(ways_of) == len(WAYS) else f", only {ways_of[0]} overlays"
        lines.append(f"- `{_short(name)}`: {why}{only}")
    return lines or ["- none"]


def _short(name: str) -> str:
    return name.removeprefix(f"{FOLDER}/")
