"""Rehearse weekly commits of Megatron-LM's branches as they would have been met, and write `proof/results/weekly-trees.json` and its page.

rehearse_weeks.py REPOSITORY [--weeks 26] [--witness 4]

REPOSITORY is a clone of Megatron-LM; a bare one will do. For each commit there are two decisions: one with all that is known, and one
with the knowledge of its day, which is every release that was out and no head of a branch. Nothing of upstream is imported for that. With
`--witness` so many commits of each branch, evenly spaced, are then put on the path of a lane's Python, where `megacpp-overlays rehearse` runs
the reproducers of the unproved overlays: about three minutes for each.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tarfile
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from io import BytesIO
from pathlib import Path
from typing import NamedTuple

from probe_commits import branch_commits

from megacpp_overlays.loader import contract, registry
from megacpp_overlays.loader.probing import examine
from megacpp_overlays.model import Erratum, Finding, Verdict
from megacpp_overlays.repro import git
from megacpp_overlays.source import knowledge
from megacpp_overlays.source.trees import CachedTree, SourceTree
from megacpp_overlays.upkeep.matrix import matrix, matrix_trees

ROOT = Path(__file__).resolve().parents[1]
PYTHON = ROOT / ".envs" / "mamba3-pinned" / "bin" / "python"
RESULTS = ROOT / "proof" / "results" / "weekly-trees.json"
BRANCHES = ("main", "dev")
RELEASED = {
    "0.15.3": "2026-02-06",
    "0.16.0": "2026-02-26",
    "0.16.1": "2026-03-20",
    "0.17.0": "2026-04-16",
    "0.17.1": "2026-05-28",
    "0.18.1": "2026-06-22",
    "0.18.2": "2026-07-21",
    "0.19.0": "2026-08-19",
}
"""Releases by the day on which their wheels were made."""
ACTIVE, UNPROVED, CONFLICT, WRONG, UNKNOWN = "active", "unproved", "conflict", "wrong", "not known"
OUT = ("retired", "absent")
"""Decisions by which nothing is installed because nothing is wrong."""
WORST_FIRST = (WRONG, CONFLICT, UNKNOWN, UNPROVED, ACTIVE)


class Week(NamedTuple):
    """A commit, and the decision of its day about each overlay that it needs."""

    branch: str
    commit: str
    day: str
    until: str
    """The newest release that was out."""
    overlays: dict[str, str]
    proved: dict[str, list[str]] = {}  # noqa: RUF012 - of a tuple, and never written to
    """Of some weeks, for each overlay the decision with all that is known, and that on the day once `witness` has run."""


def main() -> int:
    """Rehearse, write the results and their page; return 1 where something is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("repository", type=Path)
    parser.add_argument("--weeks", type=int, default=26, help="how many weekly commits of each branch (default: 26)")
    parser.add_argument("--witness", type=int, default=0, help="how many commits of each branch to prove (default: 0)")
    given = parser.parse_args()
    parts = [each for each in registry.load() if each.target.distribution == "megatron-core" and each.repairs]
    found = []
    for name, commit in branch_commits(given.repository, BRANCHES, given.weeks):
        day = git.run(given.repository, "log", "-1", "--format=%cs", commit).strip()
        print(f"{name} {commit[:10]}", file=sys.stderr, flush=True)
        with ExitStack() as stack:
            tree = matrix_trees.open_tree(f"{given.repository}@{commit}", matrix.packages(parts), stack)
            said = rehearse(parts, CachedTree(tree.files), known_on(day))
        found.append(Week(name.partition(" ")[0], commit[:10], day, known_on(day), said))
    for number in sampled(found, given.witness):
        found[number] = found[number]._replace(proved=prove(given.repository, found[number]))
    RESULTS.write_text(json.dumps([each._asdict() for each in found], indent=1) + "\n")
    RESULTS.with_suffix(".md").write_text("\n".join(page(found)) + "\n")
    print(RESULTS.with_suffix(".md").read_text())
    return int(any(WRONG in each.overlays.values() for each in found))


def sampled(found: Sequence[Week], count: int) -> list[int]:
    """Return the places of so many commits of each branch, evenly spaced between its newest and its oldest."""
    chosen: list[int] = []
    for branch in BRANCHES:
        places = [number for number, each in enumerate(found) if each.branch == branch]
        chosen += [places[(2 * step + 1) * len(places) // (2 * count)] for step in range(count)]
    return chosen


def prove(repository: Path, week: Week) -> dict[str, list[str]]:
    """Return the output of `megacpp-overlays rehearse` about a commit: decisions with all that is known, and after `witness` on its day."""
    print(f"witness: {week.branch} {week.commit}", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory() as folder:
        content = git.content(repository, "archive", "--format=tar", week.commit, "megatron")
        with tarfile.open(fileobj=BytesIO(content)) as opened:
            opened.extractall(folder, filter="data")
        command: list[str | Path] = [PYTHON, "-W", "ignore", "-m", "megacpp_overlays", "rehearse", "--json"]
        command += ["--known-until", f"megatron-core={week.until}", "--tree", folder]
        path = os.pathsep.join([str(ROOT), str(ROOT / "tests" / "empty_modules")])
        environment = {**os.environ, "PYTHONPATH": path}
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment)
    rows = json.loads(done.stdout)["rows"]
    return {row["overlay"]: [row["right"], row["after"]] for row in rows}


def known_on(day: str) -> str:
    """Return the newest release that was out on a day."""
    return max((version for version, out in RELEASED.items() if out <= day), key=RELEASED.__getitem__)


def rehearse(parts: Sequence[Erratum], tree: SourceTree, until: str) -> dict[str, str]:
    """Return the decision of its day for each overlay that a commit needs or that is not recorded for it; of several parts the worst."""
    remember(None)
    now = {part: examine(part, tree) for part in parts}
    remember(until)
    then = {part: examine(part, tree) for part in parts}
    remember(None)
    found: dict[str, list[str]] = {}
    for part in parts:
        found.setdefault(part.id, []).extend(_said(part, tree, now[part], then[part]))
    return {name: min(each, key=WORST_FIRST.index) for name, each in found.items() if each}


def remember(until: str | None) -> None:
    """Let this process know the releases up to one, or everything."""
    os.environ.pop(knowledge.VARIABLE, None)
    if until is not None:
        os.environ[knowledge.VARIABLE] = f"megatron-core={until}"
    knowledge.until.cache_clear()


def _said(part: Erratum, tree: SourceTree, now: Finding, then: Finding) -> Iterator[str]:
    """Yield the decision of a commit's day about a part; nothing for a part that the commit does not need."""
    is_needed = now.verdict is Verdict.BROKEN and now.shape in part.repairs
    if then.verdict is Verdict.BROKEN and (now.verdict is Verdict.FIXED or (is_needed and then.shape != now.shape)):
        yield WRONG
    elif now.verdict is Verdict.UNRECOGNISED:
        yield UNKNOWN
    elif is_needed and then.verdict is Verdict.BROKEN:
        yield ACTIVE
    elif is_needed and then.verdict is Verdict.UNRECOGNISED:
        yield UNPROVED if contract.of(part, tree).candidates else CONFLICT
    elif is_needed:
        yield WRONG


def page(found: Sequence[Week]) -> Iterator[str]:
    """Yield the lines of the page."""
    yield from (
        "# Weekly commits as they would have been met",
        "",
        "Written by `scripts/rehearse_weeks.py`, from source alone. Each commit is met with the knowledge of its day: the releases that were out, and",
        "no head of a branch. A pair is an overlay and a week in which the commit has the defect, by all that is known today.",
        "",
        "- active: recognised by a form or a pattern of an older release; the seams go in without a proof",
        "- unproved: the seams can be placed; one `megacpp-overlays witness` in the image decides",
        "- conflict: the seams cannot be placed, or the code cannot be read",
        "- wrong: repaired and called broken, or broken and called repaired or absent",
        "- not known: neither is recorded of the commit, so that a reproducer would have to decide; these are no pairs",
        "",
        "| branch | commits | pairs | active | unproved | conflict | wrong | not known |",
        "|---|---|---|---|---|---|---|---|",
    )
    for branch in BRANCHES:
        weeks = [each for each in found if each.branch == branch]
        counts = Counter(said for each in weeks for said in each.overlays.values())
        pairs = sum(counts[each] for each in (ACTIVE, UNPROVED, CONFLICT, WRONG))
        first, last = weeks[-1], weeks[0]
        yield (
            f"| {branch} | {len(weeks)}, {first.day} to {last.day} | {pairs} | {counts[ACTIVE]} | {counts[UNPROVED]} "
            f"| {counts[CONFLICT]} | {counts[WRONG]} | {counts[UNKNOWN]} |"
        )
    if proved := [each for each in found if each.proved]:
        yield from _proved(proved)


def _proved(weeks: Sequence[Week]) -> Iterator[str]:
    """Yield the lines about commits on which reproducers were run."""
    yield from (
        "",
        "## After one `witness`",
        "",
        "Reproducers were run on these commits, on a CPU, with the knowledge of their day. Needed is an overlay that is, by all that is known today,",
        "active; of the others it is not known, and reproducers alone decide.",
        "",
        "| commit | day | known until | needed | active | unproved | conflict | wrong | not known today: active, right upstream, unproved, conflict |",
        "|---|---|---|---|---|---|---|---|---|",
    )
    for each in weeks:
        needed = Counter(after for right, after in each.proved.values() if right == "active")
        others = Counter(after for right, after in each.proved.values() if right in {"unproved", "conflict"})
        wrong = sum(needed[out] for out in OUT) + sum(
            1 for right, after in each.proved.values() if right in OUT and after == "active"
        )
        right_upstream = sum(others[out] for out in OUT)
        yield (
            f"| {each.branch} {each.commit} | {each.day} | {each.until} | {sum(needed.values())} | {needed['active']} | {needed['unproved']} "
            f"| {needed['conflict']} | {wrong} | {others['active']}, {right_upstream}, {others['unproved']}, {others['conflict']} |"
        )


if __name__ == "__main__":
    sys.exit(main())
