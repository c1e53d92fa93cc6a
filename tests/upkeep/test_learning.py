"""`megacpp-overlays learn`: results of reproducers on a release decide for every host that has the same bytes of it."""

from __future__ import annotations

import dataclasses
import json
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from places import ROOT
from probing import Texts

from megacpp_overlays import cli
from megacpp_overlays.cli.codes import ExitCode
from megacpp_overlays.cli.learn import is_decided
from megacpp_overlays.errors import UpkeepError
from megacpp_overlays.frozen import replace
from megacpp_overlays.loader import known, learned, registry, witnesses
from megacpp_overlays.loader.decide import NOT_REPAIRED, decide
from megacpp_overlays.loader.provenance import Provenance, provenance
from megacpp_overlays.loader.settings import Settings
from megacpp_overlays.model import Decision, Erratum, Evidence, Finding, Proof, Record, Verdict
from megacpp_overlays.source import forms, published
from megacpp_overlays.source.file_trees import DirectoryTree
from megacpp_overlays.source.forms import ANY
from megacpp_overlays.upkeep import form_record, learning
from megacpp_overlays.upkeep.learning import LearnOptions, Lesson, ReleaseKnowledge, ReleaseTree

OVERLAY = "liger-flce-none-backward"
SHAPE = "per-token-scalar-backward-input-grad"
FILE = "liger_kernel/ops/fused_linear_cross_entropy.py"
OTHER_WORDS = ("        BT, H = grad_input.shape\n        n_rows = BT\n", "        n_rows, H = grad_input.shape\n")
"""The defect in another form: no probe recognises it."""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy of this package, to which records can be written."""
    folder = tmp_path / "checkout"
    skipped = shutil.ignore_patterns("__pycache__", "receipts", "matrix.html")
    shutil.copytree(ROOT / "megacpp_overlays", folder / "megacpp_overlays", ignore=skipped)
    return folder


@pytest.fixture
def release(wheel: Callable[[str, str], Path], tmp_path: Path) -> ReleaseTree:
    """A release of liger-kernel that came out, with the defect in another form."""
    folder = tmp_path / "release"
    zipfile.ZipFile(wheel("liger-kernel", "0.8.1")).extractall(folder)
    text = (folder / FILE).read_text()
    assert text.count(OTHER_WORDS[0]) == 1
    (folder / FILE).write_text(text.replace(*OTHER_WORDS))
    return ReleaseTree("liger-kernel", "0.9.0", folder)


@pytest.mark.full
@pytest.mark.upstream
@pytest.mark.unmeasured_children
def test_a_learned_record_of_a_release_decides_without_a_witness_until_its_form_changes(
    checkout: Path, release: ReleaseTree
) -> None:
    how = LearnOptions(Path(sys.executable), workers=2, only=(OVERLAY,), root=checkout)
    before = learning.audit(release, how)[OVERLAY]

    found = learning.learn(release, registry.load(), how)
    decisions = []
    for file, line in (("liger_kernel/utils.py", "# a fork\n"), (FILE, "element_mul_kernel = None\n")):
        with (release.folder / file).open("a") as opened:
            opened.write(line)
        decisions.append(learning.audit(release, how)[OVERLAY][0])

    assert before[0] == "unproved"
    assert {each.overlay: each.verdict for each in found.lessons}[OVERLAY] is Verdict.BROKEN
    assert found.decisions[OVERLAY][0] == "active"
    assert "as in 0.9.0" in found.decisions[OVERLAY][1]
    assert decisions == ["active", "unproved"]
    kept = json.loads((checkout / "megacpp_overlays/loader/learned.json").read_text())
    assert kept["liger-kernel"]["0.9.0"][f"{OVERLAY} liger_kernel.ops.fused_linear_cross_entropy"]["shape"] == SHAPE


@pytest.mark.parametrize(
    ("distribution", "there"),
    [
        ("megatron-core", ("megatron/training",)),
        ("torch", ("torch/distributed/checkpoint",)),
        ("liger-kernel", ()),
    ],
)
def test_a_tree_that_lacks_a_package_is_refused(tmp_path: Path, distribution: str, there: tuple[str, ...]) -> None:
    """The main package of a distribution has to be there; of one without a main package, as torch, all that targets are in."""
    for each in there:
        (tmp_path / each).mkdir(parents=True)
    how = LearnOptions(Path(sys.executable), workers=1, root=tmp_path)

    with pytest.raises(UpkeepError, match=f"it has no package .*{distribution.partition('-')[0]}"):
        learning.learn(ReleaseTree(distribution, "9.9", tmp_path), registry.load(), how)


@pytest.mark.parametrize("only", [(), (OVERLAY,)], ids=["a whole release", "one overlay once more"])
def test_lessons_are_written_next_to_those_of_other_releases(
    tmp_path: Path, part: Erratum, only: tuple[str, ...]
) -> None:
    how = LearnOptions(Path(sys.executable), workers=1, only=only, root=tmp_path)
    files = [how.beside(each) for each in (learned.FILE, published.FILE, forms.file_of(OVERLAY))]
    for file in files:
        file.parent.mkdir(parents=True, exist_ok=True)
    labelled = next(each for each in registry.load() if each.id == "liger-flce-labelled")
    holds = {known.name_of(labelled): {"code": learned.code_of(labelled, None), "shape": None}}
    stale = {"fourth module": {"code": "0" * 16, "shape": None}}
    files[0].write_text(json.dumps({"liger-kernel": {"0.8.9": {"a b": 1}, "0.9.0": {**holds, **stale}}}))
    files[1].write_text(json.dumps({"liger-kernel": {"0.8.9": "1" * 16}}))
    module = part.target.module
    files[2].write_text(json.dumps({module: {"places": [f"{module}:", f"{module}:f"], "forms": []}}))
    lessons = (
        Lesson(OVERLAY, module, Verdict.BROKEN, "shown"),
        Lesson("other", module, None, "no case can run here"),
        Lesson("third", module, None, "case none: it shows the defect: 3.2 off; broken, not repaired: 3.2 off"),
    )
    kept = {"target": module, "verdict": "BROKEN", "cases": [{"case": "none", "seen": "3.2 off"}]}

    learning.write_down(
        ReleaseTree("liger-kernel", "0.9.0", tmp_path),
        {"liger-kernel": "2" * 16},
        [part, labelled, *(replace(part, id=each) for each in ("other", "third", "fourth"))],
        lessons,
        [
            {**kept, "overlay": OVERLAY, "shape": SHAPE},
            {**kept, "overlay": "third", "shape": None, "unrepaired": lessons[2].reason},
        ],
        how,
    )

    found, digests = (json.loads(file.read_text())["liger-kernel"] for file in files[:2])
    assert digests == {"0.8.9": "1" * 16, "0.9.0": "2" * 16}
    assert found["0.8.9"] == {"a b": 1}
    assert ("fourth module" in found["0.9.0"]) is bool(only)
    assert holds.items() <= found["0.9.0"].items()
    written, not_proved, broken = (found["0.9.0"][f"{each} {module}"] for each in (OVERLAY, "other", "third"))
    assert (written["verdict"], written["shape"], written["seen"]) == ("BROKEN", SHAPE, "none: 3.2 off")
    assert (not_proved["verdict"], not_proved["seen"]) == (None, "no case can run here")
    assert (broken["verdict"], broken["shape"], broken["seen"]) == ("BROKEN", NOT_REPAIRED, lessons[2].reason)
    (added,) = json.loads(files[2].read_text())[module]["forms"]
    assert (added["shape"], added["trees"], added["digests"]) == (SHAPE, ["0.9.0"], "- -")


# Forms


TEXT = "def f(x):\n    return x + x\n"
ASKED = ["package.layers:f", "package.layers:g"]
SHOWN = {"verdict": "BROKEN", "shape": "twice"}


def add(form: dict[str, Any] | None, text: str, shown: dict[str, Any] | None) -> list[dict[str, Any]]:
    """Return the forms of a part after a release with a text was learned."""
    record = {"package.layers": {"places": ASKED, "forms": [form] if form else []}}
    form_record.add(record, "package.layers", Texts({"package.layers": text}), "0.8.10", shown)
    form_record.add(record, "package.others", Texts({}), "0.8.10", shown)
    assert record.keys() == {"package.layers"}
    return record["package.layers"]["forms"]


@pytest.fixture
def form() -> dict[str, Any]:
    """The recorded form of an older release, which does not depend on `g`."""
    (made,) = add(None, TEXT, SHOWN)
    first, _ = made["digests"].split()
    return {**made, "digests": f"{first} *", "seen": [["it adds twice", ASKED[0]]], "trees": ["0.8.9", "main abc"]}


def test_a_release_that_has_a_recorded_form_is_named_with_it(form: dict[str, Any]) -> None:
    (found,) = add(form, f"{TEXT}\n\ndef g(): ...\n", None)

    assert found["trees"] == ["0.8.9", "0.8.10", "main abc"]


def test_a_form_that_was_shown_to_be_broken_is_recorded_with_the_evidence_of_its_shape(
    form: dict[str, Any],
) -> None:
    _, found = add(form, TEXT.replace("x + x", "2 * x"), SHOWN)

    assert (found["verdict"], found["shape"], found["trees"]) == ("BROKEN", "twice", ["0.8.10"])
    assert found["seen"] == form["seen"]
    assert found["digests"].split()[1] == ANY
    assert found["digests"] != form["digests"]


@pytest.mark.parametrize(
    "shown",
    [None, {"verdict": None, "shape": None}, {"verdict": "FIXED", "shape": None}, {**SHOWN, "shape": NOT_REPAIRED}],
)
def test_a_release_that_was_not_shown_to_be_repaired_is_no_form(
    form: dict[str, Any], shown: dict[str, Any] | None
) -> None:
    assert add(form, TEXT.replace("x + x", "2 * x"), shown) == [form]


def test_a_release_that_reproducers_say_otherwise_of_is_not_named_with_a_form(form: dict[str, Any]) -> None:
    (found,) = add(form, TEXT, {"verdict": "FIXED", "shape": None})

    assert found["trees"] == ["0.8.9", "main abc"]


def test_shipped_records_were_learned_with_the_present_code() -> None:
    parts = {known.name_of(each): each for each in registry.load()}
    kept = {
        (release, name): data
        for releases in learned.read().values()
        for release, found in releases.items()
        for name, data in found.items()
    }

    stale = [each for each, data in kept.items() if data["code"] != learned.code_of(parts[each[1]], data["shape"])]

    assert kept
    assert stale == [], "run `megacpp-overlays learn` once more"


# One record


@pytest.fixture
def part() -> Erratum:
    return next(each for each in registry.load() if each.id == OVERLAY)


@pytest.fixture
def record(part: Erratum, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The learned record of the overlay in a release. A test may change it before the look-up."""
    code = learned.code_of(part, SHAPE)
    data = {"verdict": "BROKEN", "shape": SHAPE, "seen": "none: 3.2 off", "date": "2026-11-27", "code": code}
    monkeypatch.setattr(learned, "_kept", lambda: {"liger-kernel": {"0.9.0": {known.name_of(part): data}}})
    return data


UNRECOGNISED = Finding(
    verdict=Verdict.UNRECOGNISED, shape=None, evidence=(Evidence("not read yet"),), candidates=(SHAPE,)
)


def test_a_record_names_finding_date_and_release_and_is_proved_by_the_release(
    part: Erratum, record: dict[str, Any]
) -> None:
    found = learned.in_release(part, "0.9.0", UNRECOGNISED)

    assert (found.verdict, found.shape, found.proof) == (Verdict.BROKEN, SHAPE, Proof.LEARNED)
    assert "learned on 2026-11-27 in 0.9.0: none: 3.2 off" in found.summary()
    decided = Record(overlay=part, decision=Decision.ACTIVE, reason="", finding=found, version="0.9.0")
    assert provenance(decided) is Provenance.RELEASE


def test_a_record_of_other_code_of_ours_is_stale(part: Erratum, record: dict[str, Any]) -> None:
    record["code"] = "0" * 16

    found = learned.in_release(part, "0.9.0", UNRECOGNISED)

    assert found.verdict is Verdict.UNRECOGNISED
    assert "with another probe, seam or reproducer" in found.summary()


def test_a_record_is_about_its_release_alone(part: Erratum, record: dict[str, Any]) -> None:
    assert learned.in_release(part, "0.9.1", UNRECOGNISED) is UNRECOGNISED


def test_a_form_that_a_probe_recognises_needs_no_record(part: Erratum, record: dict[str, Any]) -> None:
    recognised = Finding(verdict=Verdict.BROKEN, shape="another", evidence=(Evidence("read"),))

    assert learned.in_release(part, "0.9.0", recognised) is recognised


def test_a_repair_that_was_read_is_unproved_where_reproducers_gave_no_verdict(
    part: Erratum,
    record: dict[str, Any],
    wheel: Callable[[str, str], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from megacpp_overlays.loader import probing

    zipfile.ZipFile(wheel("liger-kernel", "0.8.5")).extractall(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    tree, settings = DirectoryTree(tmp_path), Settings(witnesses=str(tmp_path / "none"))
    kept = {"liger-kernel": {"0.8.5": {known.name_of(part): record}}}
    monkeypatch.setattr(learned, "_kept", lambda: kept)
    trusted = probing.known_or_examined(part, tree, settings)
    record["verdict"] = None
    doubted = probing.known_or_examined(part, tree, settings)
    record |= {"verdict": "BROKEN", "shape": NOT_REPAIRED, "code": learned.code_of(part, NOT_REPAIRED)}
    disproved = decide(part, settings, probing.known_or_examined(part, tree, settings))

    assert trusted.verdict is Verdict.FIXED
    assert (doubted.verdict, doubted.unpublished) == (Verdict.UNRECOGNISED, True)
    assert disproved.decision is Decision.CONFLICT
    assert disproved.reason.startswith("broken here, and its reproducer showed no repair; ")


def test_a_case_that_showed_a_user_the_defect_outweighs_the_record(
    part: Erratum, record: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from megacpp_overlays.loader import probing

    settings = Settings(witnesses=str(tmp_path / "witnesses"))
    monkeypatch.setattr(published, "release_of", lambda *_: "0.9.0")
    before = probing._witnessed(part, UNRECOGNISED, DirectoryTree(tmp_path), settings)
    tree = DirectoryTree(tmp_path)
    data = witnesses.content(
        part,
        sources={part.target.module: None},
        versions={},
        reproducer=next(witnesses.PACKS.glob(f"{part.pack:02}-*/reproduce.py")),
        cases=[{"case": "none", "device": "cpu", "seen": "3.2 off"}],
        host={},
        date="2026-11-27",
        verdict=Verdict.BROKEN,
        unrepaired="case none: 3.2 off with the overlay, too",
    )
    witnesses.keep(witnesses.path_of(part, settings), data)
    after = probing._witnessed(part, UNRECOGNISED, tree, settings)

    assert (before.shape, before.proof) == (SHAPE, Proof.LEARNED)
    assert (after.shape, after.proof) == (NOT_REPAIRED, Proof.WITNESSED)
    assert "shown here on 2026-11-27: case none: 3.2 off with the overlay, too" in after.summary()


# Output and errors


def test_lines_count_and_name_changes_and_overlays_that_need_a_person() -> None:
    tree = ReleaseTree("megatron-core", "0.20.0", Path("nowhere"))
    lessons = (Lesson("one", "m", Verdict.BROKEN, "seen"), Lesson("three", "m", None, "no GPU"))
    decisions = {
        "one": ("active", "learned"),
        "two": ("retired", "read"),
        "three": ("unproved", "no GPU"),
        "four": ("conflict", "names: m defines no function f"),
    }

    contradicted = (Lesson("five", "m", None, "case c: FAILED: the probe says BROKEN, the behaviour is not broken"),)
    found = ReleaseKnowledge(tree, lessons, decisions, confirmed=1, contradicted=contradicted)
    lines = learning.lines(found, {"one": "BROKEN", "two": "BROKEN", "three": "FIXED"})

    assert lines == [
        "megatron-core 0.20.0: still broken and repaired 1, repaired upstream 1, contract broken, or not repaired 1, could not ask 1; "
        "1 decided by reproducers, 1 recognised and confirmed by them",
        "changed:",
        "  two: BROKEN before, retired now",
        "for a person:",
        "  unproved: three: no GPU",
        "  conflict: four: names: m defines no function f",
        "  contradicted: five: case c: FAILED: the probe says BROKEN, the behaviour is not broken",
    ]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["megatron-core"], "name DISTRIBUTION==VERSION, or DISTRIBUTION and --tree"),
        (["megatron-core==0.19.2", "--tree", "."], "name DISTRIBUTION==VERSION, or DISTRIBUTION and --tree"),
        (["made-up==1.0"], "made-up: no overlay is about it"),
    ],
)
def test_wrong_usage_exits_2(words: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["learn", *words])

    assert ended.value.code == ExitCode.USAGE
    assert says in capsys.readouterr().err


def test_a_folder_without_a_name_and_a_commit_that_is_not_there_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    subprocess.run(["git", "init", "--quiet", str(tmp_path)], check=True)

    codes = [cli.main(["learn", "liger-kernel", "--tree", each]) for each in (str(tmp_path), f"{tmp_path}@main")]

    said = capsys.readouterr().err
    assert codes == [ExitCode.NOT_CHECKED, ExitCode.NOT_CHECKED]
    assert "a folder needs a --name" in said
    assert f"--tree {tmp_path}@main: there is no such folder, and no such commit" in said


def test_a_case_that_contradicts_a_probe_needs_a_person() -> None:
    tree = ReleaseTree("megatron-core", "0.20.0", Path("nowhere"))
    found = ReleaseKnowledge(tree, (), {"one": ("active", "read")}, confirmed=1)

    assert is_decided(found)
    assert not is_decided(dataclasses.replace(found, contradicted=(Lesson("one", "m", None, "not broken"),)))
