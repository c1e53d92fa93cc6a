"""Learning a release: run its reproducers once here, and record the results for every user of this package.

The release is put first on the path of a Python that has the release's dependencies. Two processes run. `witness` proves the code
that no probe recognises and every repair that a person read, and also confirms the code that probes recognise. An audit follows.
"""

from __future__ import annotations

import datetime
import json
import os
import subprocess
import tarfile
import tempfile
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megacpp_overlays.errors import UpkeepError
from megacpp_overlays.files import write
from megacpp_overlays.loader import known, learned
from megacpp_overlays.loader.decide import NOT_REPAIRED
from megacpp_overlays.loader.settings import WITNESSES
from megacpp_overlays.model import Decision, Erratum, Verdict
from megacpp_overlays.source import forms, published
from megacpp_overlays.source.file_trees import DirectoryTree

ROOT = Path(__file__).resolve().parents[2]
"""The folder that this package is imported from."""


@dataclass(frozen=True, slots=True)
class ReleaseTree:
    """A release, or a commit, as a folder that can be put on the path of Python."""

    distribution: str
    name: str
    """A version, or a branch and the first digits of a commit."""
    folder: Path


@dataclass(frozen=True, slots=True)
class LearnOptions:
    """Options of learning."""

    python: Path
    """An interpreter whose environment has the dependencies of the release."""
    workers: int
    only: tuple[str, ...] = ()
    """Ids of the overlays to prove or confirm, also where they are proved already; empty for all."""
    root: Path = ROOT
    """The checkout in which the results are written."""

    def beside(self, file: Path) -> Path:
        """Return the file of the checkout that corresponds to a file of this package."""
        return self.root / file.relative_to(ROOT)


@dataclass(frozen=True, slots=True)
class Lesson:
    """The result of learning one part of an overlay."""

    overlay: str
    module: str
    verdict: Verdict | None
    """The verdict; None where the reproducers gave none."""
    reason: str


@dataclass(frozen=True, slots=True)
class ReleaseKnowledge:
    """The knowledge of a release after learning."""

    tree: ReleaseTree
    lessons: tuple[Lesson, ...]
    decisions: Mapping[str, tuple[str, str]]
    """Decision and reason of each overlay of the distribution, with the lessons applied."""
    confirmed: int = 0
    """Number of overlays that a probe recognises and whose cases show the probe's verdict."""
    contradicted: tuple[Lesson, ...] = ()
    """Parts that a probe recognises and whose cases show another verdict: the places of their forms leave something out."""


def learn(tree: ReleaseTree, overlays: Sequence[Erratum], how: LearnOptions) -> ReleaseKnowledge:
    """Run the reproducers on a release, record the results, and audit the release with them.

    Args:
        tree: the release.
        overlays: every declaration of this package, in parts.
        how: the options.

    Raises:
        UpkeepError: a process gave no answer, or the folder has no package of the distribution.
        OSError: the results cannot be written.
    """
    parts = [each for each in overlays if each.target.distribution == tree.distribution]
    digests = _digests(tree, parts)
    with tempfile.TemporaryDirectory() as folder:
        words = [
            "witness",
            "--json",
            "--workers",
            str(how.workers),
            "--all",
            *(how.only or ["--of", tree.distribution]),
        ]
        said = _ask(tree, how, words, Path(folder))["witnesses"]
        kept = [json.loads(path.read_text()) for path in Path(folder).glob("*.json")]
    lessons = tuple(_lessons((each for each in said if not each["confirms"]), parts))
    asked = [each for each in said if each["confirms"]]
    contradicted = tuple(_lessons((each for each in asked if not each["proved"]), parts))
    write_down(tree, digests, parts, lessons, kept, how)
    confirmed = sum(1 for each in asked if each["confirmed"])
    return ReleaseKnowledge(tree, lessons, audit(tree, how), confirmed, contradicted)


def audit(tree: ReleaseTree, how: LearnOptions) -> dict[str, tuple[str, str]]:
    """Return decision and reason of each overlay of a release, with the recorded lessons and without this user's witnesses.

    Raises:
        UpkeepError: the process gave no answer.
    """
    with tempfile.TemporaryDirectory() as folder:
        decisions = _ask(tree, how, ["audit", "--json"], Path(folder))["decisions"]
    ours = (each for each in decisions if each["distribution"] == tree.distribution)
    return {each["id"]: (each["decision"], each["reason"]) for each in ours}


def _digests(tree: ReleaseTree, parts: Sequence[Erratum]) -> dict[str, str]:
    if not parts:
        raise UpkeepError(f"{tree.distribution}: no overlay is about it")
    packages = {published.key_of(each.target): published.package_of(each.target) for each in parts}
    folders = {key: tree.folder.joinpath(*package.split(".")) for key, package in packages.items()}
    found = {key: published.digest_of_folder(str(each.resolve())) for key, each in folders.items() if each.is_dir()}
    needed = {tree.distribution} & packages.keys() or packages.keys()  # torch has no main package
    if missing := sorted(packages[key] for key in needed - found.keys()):
        raise UpkeepError(f"{tree.folder}: it has no package {', '.join(missing)}")
    return found


def _ask(tree: ReleaseTree, how: LearnOptions, words: Sequence[str], witnesses: Path) -> dict[str, Any]:
    """Return the parsed JSON output of a command of this package that runs with the release first on its path.

    Raises:
        UpkeepError: the command printed no JSON.
    """
    path = os.pathsep.join([str(tree.folder.resolve()), str(how.root), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [str(how.python.absolute()), "-W", "ignore", "-m", "megacpp_overlays", *words]
    done = subprocess.run(  # noqa: S603 - a Python that was named, and words of ours
        command,
        env={**os.environ, "PYTHONPATH": path, WITNESSES: str(witnesses)},
        cwd=witnesses,
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    try:
        found: dict[str, Any] = json.loads(done.stdout)
    except ValueError as error:
        said = (
            f"`megacpp-overlays {' '.join(words)}` in {how.python} ended with {done.returncode}: {done.stdout[-500:]}"
        )
        raise UpkeepError(said) from error
    return found


def _lessons(said: Iterable[Mapping[str, Any]], parts: Sequence[Erratum]) -> Iterable[Lesson]:
    ours = {(each.id, each.target.module) for each in parts}
    for each in said:
        if (each["id"], each["target"]) in ours:
            verdict = Verdict(each["verdict"]) if each["proved"] and each["verdict"] else None
            yield Lesson(each["id"], each["target"], verdict, each["reason"])


def write_down(
    tree: ReleaseTree,
    digests: Mapping[str, str],
    parts: Sequence[Erratum],
    lessons: Sequence[Lesson],
    kept: Sequence[Mapping[str, Any]],
    how: LearnOptions,
) -> None:
    """Record the lessons of a release, the digests that identify it, and its forms, in addition to those of other releases.

    Args:
        tree: the release.
        digests: digests of the Python files of the release's packages, by `published.key_of`.
        parts: every declaration about the distribution.
        lessons: the lessons.
        kept: the witnesses of the proved parts, see `loader.witnesses`.
        how: the checkout to write to, and whether the lessons are added to earlier ones of the release.

    Raises:
        OSError: the records cannot be written.
    """
    from megacpp_overlays.upkeep import form_record  # noqa: PLC0415 - of this command alone

    declared = {known.name_of(part): part for part in parts}
    witnessed = {f"{each['overlay']} {each['target']}": each for each in kept}
    today = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
    found: dict[str, dict[str, Any]] = {}
    for lesson in lessons:
        name = f"{lesson.overlay} {lesson.module}"
        witness = witnessed.get(name, {})  # a part that was neither proved nor shown to be broken has no witness
        shape = NOT_REPAIRED if "unrepaired" in witness else witness.get("shape")
        cases = "; ".join(f"{each['case']}: {each['seen']}" for each in witness.get("cases", ()))
        found[name] = {
            "verdict": witness.get("verdict"),
            "shape": shape,
            "seen": cases if lesson.verdict is not None and cases else lesson.reason,
            "date": today,
            "code": learned.code_of(declared[name], shape),
        }
    of_learned, of_published = map(how.beside, (learned.FILE, published.FILE))
    of_forms = {each: how.beside(forms.file_of(each)) for each in sorted({part.id for part in parts})}
    records = {file: json.loads(file.read_bytes()) for file in of_forms.values() if file.is_file()}
    with DirectoryTree(tree.folder) as files:
        for name, part in declared.items():
            if (record := records.get(of_forms[part.id])) is not None:
                form_record.add(record, part.target.module, files, tree.name, found.get(name))
    texts = json.loads(of_learned.read_text(encoding="utf-8"))
    before = texts.setdefault(tree.distribution, {}).get(tree.name, {})
    holds = {name: each for name, each in before.items() if how.only or _is_current(declared.get(name), each)}
    texts[tree.distribution][tree.name] = {**holds, **found}
    published_digests = json.loads(of_published.read_text(encoding="utf-8"))
    for key, digest in digests.items():
        published_digests.setdefault(key, {})[tree.name] = digest
    write(
        {
            of_learned: (json.dumps(texts, indent=1, sort_keys=True) + "\n").encode(),
            of_published: (json.dumps(published_digests, indent=0, sort_keys=True) + "\n").encode(),
            **{file: form_record.written(record).encode() for file, record in records.items()},
        }
    )


def _is_current(part: Erratum | None, data: Mapping[str, Any]) -> bool:
    """Return whether a recorded lesson on a part is still valid, so that `witness` did not run its cases again."""
    return part is not None and bool(data["code"] == learned.code_of(part, data["shape"]))


def unpack(archive: Path, folder: Path) -> Path:
    """Unpack a wheel or a source distribution into a folder, and return the folder that contains its packages."""
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as opened:
            opened.extractall(folder)  # noqa: S202 - a release whose hash was checked
        return folder
    with tarfile.open(archive) as opened:
        opened.extractall(folder, filter="data")
    (top,) = folder.iterdir()
    return top


_WORDS = {
    Decision.ACTIVE: "still broken and repaired",
    Decision.RETIRED: "repaired upstream",
    Decision.ABSENT: "absent",
    Decision.DISABLED: "off by default",
    Decision.CONFLICT: "contract broken, or not repaired",
    Decision.UNPROVED: "could not ask",
}


def lines(found: ReleaseKnowledge, before: Mapping[str, str]) -> list[str]:
    """Return the knowledge of a release as lines: counts, changed decisions, and cases that need a person.

    Args:
        found: the knowledge of the release.
        before: the verdict on each overlay in the previous newest release.
    """
    counts = {
        word: [name for name, (decision, _) in found.decisions.items() if decision == each.value]
        for each, word in _WORDS.items()
    }
    by_reproducer = {each.overlay for each in found.lessons if each.verdict is not None}
    text = ", ".join(f"{word} {len(names)}" for word, names in counts.items() if names)
    head = (
        f"{found.tree.distribution} {found.tree.name}: {text}; {len(by_reproducer)} decided by reproducers, "
        f"{found.confirmed} recognised and confirmed by them"
    )
    changed = [
        f"  {name}: {before[name]} before, {decision} now"
        for name, (decision, _) in found.decisions.items()
        if name in before and decision in _DECIDED and before[name] not in _DECIDED[decision]
    ]
    person = [
        f"  {decision}: {name}: {reason}"
        for name, (decision, reason) in found.decisions.items()
        if decision in {Decision.CONFLICT.value, Decision.UNPROVED.value}
    ]
    person += [f"  contradicted: {each.overlay}: {each.reason}" for each in found.contradicted]
    return [head, *(["changed:", *changed] if changed else []), *(["for a person:", *person] if person else [])]


_DECIDED = {
    Decision.ACTIVE.value: {Verdict.BROKEN.value},
    Decision.RETIRED.value: {Verdict.FIXED.value},
    Decision.ABSENT.value: {Verdict.ABSENT.value},
}
"""The previous verdicts with which a decision is no change."""
