"""Run every probe of a distribution over commits of its repository, and compare with an earlier run.

probe_commits.py REPOSITORY                   the finding of each probe, grouped by finding
probe_commits.py REPOSITORY --keep FILE       the same, kept as JSON
probe_commits.py REPOSITORY --against FILE    only differences from a kept run; exit 1 if something was lost

The commits are the heads of the branches, one commit a week before them, and the head of every pull request that a
probe, a declaration or a page of the inventory names, as far as the repository has it. Nothing is checked out, fetched or
imported. A finding is lost where it was BROKEN or FIXED and is UNRECOGNISED.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import NamedTuple

from megacpp_overlays.loader import registry
from megacpp_overlays.model import Erratum, Verdict
from megacpp_overlays.repro import git
from megacpp_overlays.upkeep.matrix import combinations, matrix, matrix_trees

ROOT = Path(__file__).resolve().parents[1]
_NUMBERS = re.compile(r"(?:#|pull/|\bPRs? |\bpull requests? )(\d{3,5}(?:(?:,? and |, )#?\d{3,5})*)")
_PULL_REFS = ("refs/pull/{}/head", "refs/heads/pull-request/{}")
_RECOGNISED = {Verdict.BROKEN.value, Verdict.FIXED.value}


class ProbedCommit(NamedTuple):
    """The finding of a probe in one commit."""

    verdict: str
    shape: str | None
    seen: str

    def __str__(self) -> str:
        """Return the verdict with its shape, or with the reason where there is none."""
        reason = self.seen if self.verdict == Verdict.UNRECOGNISED.value else ""
        return " ".join(filter(None, [self.verdict, self.shape, reason]))


Run = dict[str, dict[str, ProbedCommit]]
"""Findings by part of an overlay and by name of a commit."""


def main() -> int:
    """Probe, and print or compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("repository", type=Path, help="a git repository of the upstream; a bare one will do")
    parser.add_argument("--distribution", default="megatron-core", help="whose probes (default: megatron-core)")
    parser.add_argument("--branch", action="append", help="a branch; may be repeated (default: main and dev)")
    parser.add_argument("--weeks", type=int, default=12, help="how many weekly commits of each branch (default: 12)")
    parser.add_argument("--no-pulls", action="store_true", help="leave pull requests out")
    parser.add_argument("--keep", type=Path, metavar="FILE", help="write the findings to a file")
    parser.add_argument("--against", type=Path, metavar="FILE", help="compare with findings that were kept")
    given = parser.parse_args()
    declared = [each for each in registry.load() if each.target.distribution == given.distribution]
    overlays = [each for each in declared if combinations.partner(each) is None]
    commits = dict(branch_commits(given.repository, given.branch or ["main", "dev"], given.weeks))
    pulls, missing = ({}, []) if given.no_pulls else pull_heads(given.repository, named_pulls(overlays))
    commits |= pulls
    if missing:
        print(f"named, and no pull request of this repository: {', '.join(map(str, missing))}", file=sys.stderr)
    found = probed(given.repository, commits, overlays)
    if given.keep:
        given.keep.write_text(json.dumps({"commits": commits, "findings": found}, indent=1) + "\n", encoding="utf-8")
    if given.against is None:
        print("\n".join(table(found)))
        return 0
    before = json.loads(given.against.read_text(encoding="utf-8"))["findings"]
    kept = {part: {name: ProbedCommit(*row) for name, row in rows.items()} for part, rows in before.items()}
    lost, lines = differences(kept, found)
    print("\n".join(lines) or "no finding differs")
    return int(lost)


def branch_commits(repository: Path, branches: Sequence[str], weeks: int) -> Iterator[tuple[str, str]]:
    """Yield the name and the commit of each head, and of the last commit a week, two weeks ... before it."""
    for branch in branches:
        head = git.run(repository, "rev-parse", "--verify", f"{branch}^{{commit}}").strip()
        yield branch, head
        newest = datetime.fromtimestamp(int(git.run(repository, "log", "-1", "--format=%ct", head)), timezone.utc)
        for week in range(1, weeks + 1):
            day = newest - timedelta(weeks=week)
            commit = git.run(
                repository, "rev-list", "-1", "--first-parent", f"--before={day.isoformat()}", head
            ).strip()
            if commit:
                yield f"{branch} {day.date()}", commit


def named_pulls(overlays: Iterable[Erratum]) -> list[int]:
    """Return the numbers that texts about these overlays give to pull requests; some may be issues."""
    packs = {each.pack for each in overlays}
    threads = {thread.number for each in overlays for thread in each.threads}
    texts = [
        *{Path(str(sys.modules[each.probe.__module__].__file__)) for each in overlays},
        *(path for pack in packs for path in (ROOT / "packs").glob(f"{pack:02}-*/README.md")),
    ]
    written = (
        int(number)
        for path in texts
        for numbers in _NUMBERS.findall(path.read_text(encoding="utf-8"))
        for number in re.findall(r"\d+", numbers)
    )
    return sorted({*threads, *written})


def pull_heads(repository: Path, numbers: Iterable[int]) -> tuple[dict[str, str], list[int]]:
    """Return the heads of pull requests by name, and the numbers for which the repository has none."""
    heads: dict[str, str] = {}
    missing = []
    for number in numbers:
        asked = (git.ask(repository, "rev-parse", "--verify", "--quiet", ref.format(number)) for ref in _PULL_REFS)
        if head := next(filter(None, asked), None):
            heads[f"pull {number}"] = head
        else:
            missing.append(number)
    return heads, missing


def probed(repository: Path, commits: dict[str, str], overlays: Sequence[Erratum]) -> Run:
    """Return the finding of every probe in every commit that holds a package of the distribution."""
    packages, found = matrix.packages(overlays), defaultdict[str, dict[str, ProbedCommit]](dict)
    by_commit: dict[str, dict[str, ProbedCommit]] = {}
    for name, commit in commits.items():
        if commit not in by_commit:
            print(f"{name} {commit[:10]}", file=sys.stderr, flush=True)
            with ExitStack() as stack:
                tree = matrix_trees.open_tree(f"{repository}@{commit}", packages, stack)
                by_commit[commit] = dict(_findings(overlays, tree))
        for part, finding in by_commit[commit].items():
            found[part][name] = finding
    return dict(found)


def _findings(overlays: Sequence[Erratum], tree: matrix_trees.Tree) -> Iterator[tuple[str, ProbedCommit]]:
    for overlay_id, cell in matrix.probe(overlays, tree.files).items():
        for part in cell.parts:
            seen = "; ".join(each.seen for each in part.evidence)
            yield f"{overlay_id} {part.module}", ProbedCommit(part.verdict.value, part.shape, seen)


def table(found: Run) -> Iterator[str]:
    """Yield lines: a part, and below it each finding with the commits that have it."""
    for part, rows in found.items():
        yield part
        yield from _grouped((str(finding), name) for name, finding in rows.items())


def differences(before: Run, now: Run) -> tuple[int, list[str]]:
    """Return how many findings were lost, and lines with every finding that differs."""
    lost, lines = 0, []
    for part, rows in now.items():
        changed = {
            name: (old, new)
            for name, new in rows.items()
            if (old := before.get(part, {}).get(name)) and (old.verdict, old.shape) != (new.verdict, new.shape)
        }
        lost += sum(
            old.verdict in _RECOGNISED and new.verdict == Verdict.UNRECOGNISED.value for old, new in changed.values()
        )
        if changed:
            lines += [part, *_grouped((f"{old}  ->  {new}", name) for name, (old, new) in changed.items())]
    return lost, lines


def _grouped(rows: Iterable[tuple[str, str]]) -> Iterator[str]:
    names = defaultdict[str, list[str]](list)
    for text, name in rows:
        names[text].append(name)
    for text, each in names.items():
        yield f"  {text}\n      {len(each)}: {', '.join(each)}"


if __name__ == "__main__":
    sys.exit(main())
