"""`megacpp-overlays wave plan`: which ready packs would be sent together, when and how, and what the others lack."""

from __future__ import annotations

import argparse
import datetime
import json
from pathlib import Path

from megacpp_overlays.cli.codes import ExitCode
from megacpp_overlays.cli.commands import Subparsers, add
from megacpp_overlays.loader import session
from megacpp_overlays.loader.rendering import aligned
from megacpp_overlays.repro import inventory
from megacpp_overlays.upkeep.filing import filing, standing, waves
from megacpp_overlays.upkeep.filing.standing import PackStatus

_TEXT = "Plan waves: two to four ready packs for one repository each, some days apart. Nothing is sent."
_EXAMPLES = ("wave plan", "wave plan --start 2026-12-01 --pause 3")
_CODES = {
    ExitCode.CLEAN: "planned",
    ExitCode.FOUND: "no pack is ready",
    ExitCode.MISSING_EXTRA: "the extra `upkeep` is not installed",
}


def add_to(commands: Subparsers) -> None:
    """Add the command to the parser."""
    parser = add(commands, "wave", _TEXT, examples=_EXAMPLES, codes=_CODES)
    what = parser.add_subparsers(metavar="what", required=True)
    plan = what.add_parser("plan", help=_TEXT, description=_TEXT)
    plan.add_argument("--start", metavar="DATE", type=datetime.date.fromisoformat, help="first wave (default today)")
    plan.add_argument(
        "--pause", metavar="DAYS", type=int, choices=waves.PAUSES, default=2, help="between waves: 2 (default) or 3"
    )
    plan.add_argument("--packs", metavar="FOLDER", type=Path, help="where the packs are, if not in the package")
    plan.add_argument("--json", action="store_true", help="for machines")
    plan.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> bool:
    """Print the plan; there is always one, also where nothing is ready."""
    packs = standing.of_all(arguments.packs or inventory.own_folder(), session.current().overlays)
    start = arguments.start or datetime.datetime.now(datetime.timezone.utc).date()
    ready = [each for each in packs if each.is_ready and filing.of(each).way is not filing.Way.UNKNOWN]
    plan = waves.plan(
        (
            waves.ReadyPack(number=each.number, repository=each.entry["repository"], priority=each.entry["priority"])
            for each in ready
        ),
        start,
        arguments.pause,
    )
    others = [(each, plan.waiting.get(each.number)) for each in packs if each.number not in _sent(plan)]
    if arguments.json:
        print(json.dumps(_as_data(packs, plan, others), indent=2))
        return True
    by_number = {each.number: each for each in packs}
    for turn, wave in enumerate(plan.waves, 1):
        print(f"wave {turn}: {wave.date}, {wave.repository}")
        rows = [(f"  {number:02}", *_row(by_number[number])) for number in wave.numbers]
        print("\n".join(aligned(("  pack", "priority", "how", "title"), rows)), end="\n\n")
    if not plan.waves:
        print(f"no wave: {len(ready)} of {len(packs)} packs are ready, and a wave is two to four for one repository\n")
    if others:
        print("not in a wave:")
        for each, waits in others:
            print(f"  {each.number:02} {each.entry['title']}")
            for reason in _reasons(each, waits):
                print(f"     {reason}")
    if plan.waves:
        print("\nnext, for each on its day: megacpp-overlays pack check NN, then a person sends it")
    else:
        print("\nnext: megacpp-overlays pack list")
    return True


def _sent(plan: waves.Plan) -> set[int]:
    return {number for wave in plan.waves for number in wave.numbers}


def _row(pack: PackStatus) -> tuple[str, str, str]:
    return pack.entry["priority"], str(filing.of(pack)), pack.entry["title"]


def _reasons(pack: PackStatus, waits: str | None) -> list[str]:
    if waits:
        return [waits]
    if pack.is_ready:
        return [f"how to file it is {filing.of(pack)}"]
    return [pack.settled] if pack.settled else [f"lacks {each}" for each in pack.lacks]


def _as_data(
    packs: tuple[PackStatus, ...], plan: waves.Plan, others: list[tuple[PackStatus, str | None]]
) -> dict[str, object]:
    by_number = {each.number: each for each in packs}
    return {
        "waves": [
            {
                "date": wave.date.isoformat(),
                "repository": wave.repository,
                "packs": [
                    {
                        "number": number,
                        "priority": by_number[number].entry["priority"],
                        "how": str(filing.of(by_number[number])),
                        "title": by_number[number].entry["title"],
                    }
                    for number in wave.numbers
                ],
            }
            for wave in plan.waves
        ],
        "others": [
            {"number": each.number, "title": each.entry["title"], "reasons": _reasons(each, waits)}
            for each, waits in others
        ],
    }
