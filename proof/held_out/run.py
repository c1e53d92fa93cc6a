"""Make held-out edits in trees of upstream, prove the overlays that are unproved then, and judge the decisions.

    python proof/held_out/run.py --megatron-lm CHECKOUT --json FILE --write FILE [--only ID ...]

Needs the wheels of `make wheels`, and a checkout of Megatron-LM for edits of its branches; without one these keep their
receipts. The exit code is 1 where a decision is wrong, or fewer than 90 of 100 edits that change nothing end active.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PROOF = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(PROOF))
from held_out.edits import Edit, Kind, Tree, applied, load  # noqa: E402
from held_out.page import markdown  # noqa: E402

from megacpp_overlays.loader.settings import WITNESSES  # noqa: E402
from megacpp_overlays.upkeep import rehearsal  # noqa: E402
from megacpp_overlays.upkeep.learning import unpack  # noqa: E402

WHEELS = PROOF.parent / ".cache" / "wheels"
NOTES = Path(__file__).with_name("notes.json")
SHARE_ACTIVE = 0.9
"""Of edits that change nothing."""
Receipts = dict[str, dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Source:
    """Where trees come from, and how they are asked about."""

    wheels: Path
    checkout: Path | None
    """Of Megatron-LM, or its repository without a work tree."""
    workers: int

    def has(self, tree: Tree) -> bool:
        """Return whether a tree can be had."""
        return tree.commit is None or self.checkout is not None

    def unpack(self, tree: Tree, folder: Path) -> None:
        """Put the packages of a tree into an empty folder."""
        if tree.commit is not None:
            words = ["git", "-C", str(self.checkout), "archive", tree.commit, "megatron"]
            with (
                subprocess.Popen(words, stdout=subprocess.PIPE) as git,
                tarfile.open(fileobj=git.stdout, mode="r|") as archive,
            ):
                archive.extractall(folder, filter="data")
            return
        stem = f"{tree.distribution.replace('-', '_')}-{tree.version}-"
        (wheel,) = (each for each in self.wheels.glob(f"{stem}*.whl"))
        unpack(wheel, folder)


def judge(edits: Sequence[Edit], source: Source) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the receipt of each edit of one tree and round."""
    tree, ids = edits[0].tree, sorted({each.overlay for each in edits})
    with tempfile.TemporaryDirectory() as made, tempfile.TemporaryDirectory() as kept:
        folder = Path(made)
        source.unpack(tree, folder)
        unedited = audited(tree, folder, Path(kept))
        files = {change.file for each in edits for change in each.changes}
        texts = applied(edits, {file: (folder / file).read_text(encoding="utf-8") for file in sorted(files)})
        for file, text in texts.items():
            (folder / file).write_text(text, encoding="utf-8")
        before = audited(tree, folder, Path(kept))
        said_by(["witness", "--json", "--workers", str(source.workers), *ids], folder, Path(kept))
        after = audited(tree, folder, Path(kept))
    for each in edits:
        decision, reason = after[each.overlay]
        yield (
            each.id,
            {
                "unedited": unedited[each.overlay][0],
                "before": before[each.overlay][0],
                "after": decision,
                "reason": reason.replace(made, ""),
            },
        )


def audited(tree: Tree, folder: Path, witnesses: Path) -> dict[str, tuple[str, str]]:
    """Return decision and reason of each overlay of a distribution."""
    decisions = said_by(["audit", "--json"], folder, witnesses)["decisions"]
    return rehearsal.by_overlay([each for each in decisions if each["distribution"] == tree.distribution])


def said_by(words: Sequence[str], folder: Path, witnesses: Path) -> dict[str, Any]:
    """Return the JSON that a command of this package prints, with a folder first on the path of its process."""
    path = os.pathsep.join([str(folder), str(PROOF.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "megacpp_overlays", *words],
        env={**os.environ, "PYTHONPATH": path, WITNESSES: str(witnesses), "CUDA_VISIBLE_DEVICES": ""},
        cwd=witnesses,
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def batches(edits: Iterable[Edit]) -> list[list[Edit]]:
    """Return edits by tree and round."""
    found: dict[tuple[str, int], list[Edit]] = {}
    for each in edits:
        found.setdefault((each.tree.name, each.round), []).append(each)
    return list(found.values())


def holds(edits: Sequence[Edit], found: Mapping[str, Mapping[str, Any]]) -> bool:
    """Return whether no decision is wrong, and enough overlays stay active where nothing changes."""
    judged = [(each, found[each.id]["after"]) for each in edits if each.id in found]
    same = [after == "active" for each, after in judged if each.kind is Kind.SAME]
    return sum(same) >= SHARE_ACTIVE * len(same) and not any(each.is_wrong(after) for each, after in judged)


def main() -> int:
    """Judge the edits that are asked for, write receipts and page, and return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--megatron-lm", type=Path, metavar="CHECKOUT", help="for edits of its branches")
    parser.add_argument(
        "--json", type=Path, required=True, metavar="FILE", help="receipts; kept for edits that are left out"
    )
    parser.add_argument("--write", type=Path, required=True, metavar="FILE", help="the page")
    parser.add_argument("--only", action="append", metavar="ID", help="an edit; may be repeated")
    parser.add_argument("--page-only", action="store_true", help="judge nothing, and write the page from the receipts")
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)), help="overlays at the same time")
    given = parser.parse_args()
    edits, source = load(), Source(WHEELS, given.megatron_lm, given.workers)
    if unknown := {*(given.only or ())} - {each.id for each in edits}:
        parser.error(f"--only: there is no edit {', '.join(sorted(unknown))}")
    found: Receipts = json.loads(given.json.read_text()) if given.json.exists() else {}
    chosen = [each for each in edits if each.id in (given.only or [each.id]) and source.has(each.tree)]
    for batch in [] if given.page_only else batches(chosen):
        found |= judge(batch, source)
        found = {each.id: found[each.id] for each in edits if each.id in found}
        given.json.write_text(json.dumps(found, indent=1) + "\n")
    given.write.write_text(markdown(edits, found, json.loads(NOTES.read_text()) if NOTES.exists() else {}))
    return 0 if {each.id for each in edits} == {*found} and holds(edits, found) else 1


if __name__ == "__main__":
    sys.exit(main())
