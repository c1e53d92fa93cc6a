"""Kept witnesses: one proves a repair while nothing that it depends on has changed, and proves nothing afterwards."""

from __future__ import annotations

import json
import os
import platform
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from made_up import BROKEN_TEXT, FIXED_TEXT, LOOKS_REPAIRED_TEXT, Upstream, gate_of

from megacpp_overlays.loader import probing, statement, witnesses
from megacpp_overlays.loader.audit import Audit
from megacpp_overlays.loader.decide import NOT_REPAIRED, decide
from megacpp_overlays.loader.session import Session
from megacpp_overlays.loader.settings import Settings
from megacpp_overlays.model import (
    Body,
    Decision,
    Erratum,
    Evidence,
    Finding,
    Observation,
    Overlay,
    Proof,
    Record,
    Replacement,
    Verdict,
)
from megacpp_overlays.processes import differences
from megacpp_overlays.processes.differences import StatementGroup
from megacpp_overlays.source.trees import InstalledTree, SourceTree

HELPERS = "def twice(x):\n    return x + x\n"
DATE = "2026-11-22"
CODE_OF = witnesses.probe_sources


@dataclass
class KeptWitness:
    """A witness of the made-up upstream, which looks repaired and is repaired."""

    upstream: Upstream
    overlay: Overlay
    session: Callable[..., Session]
    folder: Path

    @property
    def file(self) -> Path:
        return witnesses.path_of(self.overlay, Settings(witnesses=str(self.folder)))

    def keep(self, **changes: Any) -> None:
        tree = witnesses.RecordingTree(InstalledTree())
        self.overlay.probe(tree)
        tree.module(f"{self.upstream.name}.helpers")
        tree.module(f"{self.upstream.name}.absent")
        reproducer = self.folder.parent / "reproduce.py"
        if not reproducer.exists():
            reproducer.write_text("CASES = ()\n")
        data = witnesses.content(
            self.overlay,
            sources=tree.sources,
            versions={self.upstream.name: None, "packaging": witnesses.distributions.version("packaging")},
            reproducer=reproducer,
            cases=[{"case": "double", "device": "cpu", "seen": "double(1) = 2"}],
            host={"machine": "x86_64"},
            date=DATE,
        )
        witnesses.keep(self.file, {**data, **changes})

    def keep_unrepaired(self) -> None:
        """Keep a verdict of this user: a case showed the defect, and no repair of it."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(witnesses, "seam_sources", witnesses.probe_sources)
            self.keep(verdict=Verdict.BROKEN.value, unrepaired="case double: double(1) = 3")

    def edit(self, **changes: Any) -> None:
        """Write the file anew with other fields."""
        witnesses.keep(self.file, {**json.loads(self.file.read_text()), **changes})

    def audit(self, **settings: Any) -> Audit:
        """Import the target in an armed session, and audit."""
        made = self.session(self.overlay, **{"witnesses": str(self.folder), **settings})
        made.arm()
        self.upstream.load()
        return made.audit()

    def decide(self) -> Record:
        return self.audit().records[0]


@pytest.fixture(scope="module")
def code_of_the_probe() -> dict[str, str | None]:
    """Hashes of the probe that all made-up upstreams share, computed once."""
    return CODE_OF(Upstream("nothing", Path("nowhere")).overlay())


@pytest.fixture
def kept(
    upstream: Upstream,
    session: Callable[..., Session],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    code_of_the_probe: dict[str, str | None],
) -> KeptWitness:
    monkeypatch.setattr(witnesses, "probe_sources", lambda _: code_of_the_probe)
    upstream.write(LOOKS_REPAIRED_TEXT)
    upstream.write(HELPERS, "helpers")
    made = KeptWitness(upstream, upstream.overlay(), session, tmp_path / "witnesses")
    made.keep()
    return made


def test_a_witnessed_repair_is_retired_and_names_the_day_and_the_case(kept: KeptWitness) -> None:
    record = kept.decide()

    assert record.decision is Decision.RETIRED
    assert record.finding is not None
    assert (record.finding.verdict, record.finding.proof) == (Verdict.FIXED, Proof.WITNESSED)
    assert record.finding.repair == (Body(kept.upstream.module_name, "double"),)
    assert (
        record.reason == f"witnessed: return twice(x) (layers.py:9); witnessed here on {DATE} by double: double(1) = 2"
    )


def test_a_kept_witness_outweighs_the_observation_of_the_overlay(kept: KeptWitness) -> None:
    kept.overlay = kept.upstream.overlay(witness=lambda _: Observation(broken=True, seen="double(1) = 3"))
    kept.keep(probe=CODE_OF(kept.overlay))

    record = kept.decide()

    assert record.decision is Decision.RETIRED, record.reason


def test_without_a_witness_the_finding_does_not_change(kept: KeptWitness) -> None:
    kept.file.unlink()

    record = kept.decide()

    assert record.decision is Decision.CONFLICT
    assert "kept witness" not in record.reason
    assert "`megacpp-overlays witness double-fix` can prove it here" in record.reason


EDITED = LOOKS_REPAIRED_TEXT.replace("return cls.__name__, x + 1", "return cls.__name__, x + 2")


@pytest.mark.parametrize(
    ("module", "text", "says"),
    [
        ("layers", EDITED, "layers is not as it was witnessed"),
        ("layers", LOOKS_REPAIRED_TEXT + "# a comment\n", "layers is not as it was witnessed"),
        ("helpers", HELPERS.replace("x + x", "x + x + 1"), "helpers is not as it was witnessed"),
        ("absent", "double = 3\n", "absent was not there, and is now"),
    ],
)
def test_a_witness_does_not_count_after_an_edit(kept: KeptWitness, module: str, text: str, says: str) -> None:
    kept.upstream.write(text, module)

    record = kept.decide()

    assert record.decision is Decision.CONFLICT
    assert f"the kept witness does not count: {kept.upstream.name}.{says}" in record.reason
    assert "can prove it here" in record.reason


def test_a_witness_does_not_count_where_a_source_is_gone_or_unreadable(kept: KeptWitness) -> None:
    helpers = kept.upstream.folder / kept.upstream.name / "helpers.py"
    helpers.write_bytes(b"# coding: nonsense\n")
    unreadable = probing.examine_installed(kept.overlay, InstalledTree(), Settings(witnesses=str(kept.folder)))
    helpers.unlink()
    gone = probing.examine_installed(kept.overlay, InstalledTree(), Settings(witnesses=str(kept.folder)))

    assert "helpers is not as it was witnessed" in unreadable.summary()
    assert "helpers is not there any more" in gone.summary()
    assert unreadable.looks_repaired
    assert gone.looks_repaired


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"probe": {"made_up": "0" * 64}}, "the probe is another one since: made_up"),
        ({"probe": {}}, "the probe is another one since: made_up"),
        ({"python": "3.9.0"}, f"python was 3.9.0 and is {platform.python_version()}"),
        ({"machine": "vax"}, "machine was vax and is"),
        ({"versions": {"packaging": "1.0"}}, "packaging was 1.0 and is"),
        ({"versions": {"no-such-distribution": "1.0"}}, "no-such-distribution was 1.0 and is not installed"),
        ({"overlay": "other-fix"}, "it is about other-fix"),
        ({"target": "made.up"}, "it is about double-fix on made.up"),
        ({"sources": {"nothing.of.it": None}}, "the hash of"),
        ({"schema": 2}, "is no witness of this version"),
        ({"verdict": "BROKEN"}, "is no witness of this version"),
        ({"cases": []}, "is no witness of this version"),
        ({"cases": [{"case": 1}]}, "is no witness of this version"),
        ({"sources": ["layers"]}, "is no witness of this version"),
        ({"date": None}, "is no witness of this version"),
        ({"date": "2026-11-26\x1b[2J"}, "is no witness of this version"),
        ({"date": "2026-13-01"}, "is no witness of this version"),
        ({"date": "20261126"}, "is no witness of this version"),
        ({"date": "2026-11-26\n"}, "is no witness of this version"),
        ({"python": "3.9\x1b[2J\n"}, "python was 3.9\\x1b[2J\\n and is"),
        ({"overlay": "\x1b]0;title\x07"}, "it is about \\x1b]0;title\\x07 on"),
    ],
)
def test_a_witness_of_something_else_does_not_count(kept: KeptWitness, changes: dict[str, Any], says: str) -> None:
    kept.edit(**changes)

    record = kept.decide()

    assert record.decision is Decision.CONFLICT
    assert "the kept witness does not count: " in record.reason
    assert says in record.reason
    assert record.reason.isprintable()


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe", b"[" * 100_000, b"null", b"[1]", b" " * (5 << 20)])
def test_a_broken_or_oversized_file_is_no_witness(kept: KeptWitness, content: bytes) -> None:
    kept.file.write_bytes(content)

    record = kept.decide()

    assert record.decision is Decision.CONFLICT
    assert "the kept witness does not count" in record.reason


def _link(file: Path) -> None:
    elsewhere = file.with_suffix(".other")
    file.rename(elsewhere)
    file.symlink_to(elsewhere)


def _fifo(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


def _writable(file: Path) -> None:
    file.parent.chmod(0o777)


@pytest.mark.parametrize("spoil", [_link, _fifo, _writable])
def test_a_file_that_another_user_could_have_written_is_no_witness(
    kept: KeptWitness, spoil: Callable[[Path], None]
) -> None:
    spoil(kept.file)

    record = kept.decide()

    assert record.decision is Decision.CONFLICT
    assert "the kept witness does not count" in record.reason


NOBODY = 65534


@pytest.fixture
def as_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], None]]:
    """Let a test of root become a user who can read its files, and has a cache folder."""
    if os.geteuid() != 0:
        pytest.skip("only root can become another user")
    home = tmp_path / "home"
    home.mkdir()
    os.chown(home, NOBODY, NOBODY)
    monkeypatch.setenv("XDG_CACHE_HOME", str(home))
    for folder in (tmp_path, *tmp_path.parents[:-2]):
        folder.chmod(folder.stat().st_mode | 0o055)
    yield lambda: os.seteuid(NOBODY)
    os.seteuid(0)


def shared(kept: KeptWitness) -> None:
    """Have root keep the witness as in the build of an image."""
    data = json.loads(kept.file.read_text())
    kept.file.unlink()
    kept.folder.rmdir()
    witnesses.keep(kept.file, data, shared=witnesses.is_shared(Settings(witnesses=str(kept.folder))))


def examined(kept: KeptWitness) -> Finding:
    settings = Settings(witnesses=str(kept.folder))
    return witnesses.proved(kept.overlay, kept.overlay.probe(InstalledTree()), InstalledTree(), settings)


def test_a_file_of_another_user_is_no_witness(kept: KeptWitness, as_nobody: Callable[[], None]) -> None:
    for path in (kept.file, kept.folder):
        os.chown(path, NOBODY - 1, NOBODY - 1)
        path.chmod(path.stat().st_mode | 0o055)
    as_nobody()

    found = examined(kept)

    assert found.proof is not Proof.WITNESSED
    assert f"it belongs to user {NOBODY - 1}" in found.summary()


def test_a_witness_of_root_counts_for_every_user(kept: KeptWitness, as_nobody: Callable[[], None]) -> None:
    shared(kept)
    as_nobody()

    assert examined(kept).proof is Proof.WITNESSED


def test_a_private_witness_of_root_counts_for_no_other_user(kept: KeptWitness, as_nobody: Callable[[], None]) -> None:
    as_nobody()

    assert examined(kept).proof is not Proof.WITNESSED


def test_a_folder_of_root_that_others_may_write_into_proves_nothing(
    kept: KeptWitness, as_nobody: Callable[[], None]
) -> None:
    shared(kept)
    kept.folder.chmod(0o777)
    as_nobody()

    found = examined(kept)

    assert found.proof is not Proof.WITNESSED
    assert "others may write into it" in found.summary()


def test_a_verdict_of_a_user_is_kept_in_the_user_s_cache_where_root_has_witnesses(
    kept: KeptWitness, as_nobody: Callable[[], None], tmp_path: Path
) -> None:
    shared(kept)
    data = json.loads(kept.file.read_text())
    of_root = kept.file
    as_nobody()
    witnesses.keep(kept.file, {**data, "date": "2026-11-27"})

    assert kept.file.is_relative_to(tmp_path / "home")
    assert kept.file != of_root
    assert "witnessed here on 2026-11-27" in examined(kept).summary()


def test_a_witness_of_root_does_not_count_for_a_user_to_whom_a_case_showed_the_defect(
    kept: KeptWitness, as_nobody: Callable[[], None]
) -> None:
    shared(kept)
    as_nobody()
    settings = Settings(witnesses=str(kept.folder))

    witnesses.forget(kept.overlay, settings)
    without_a_case = examined(kept)
    kept.keep_unrepaired()
    shown = examined(kept)
    record = decide(kept.overlay, settings, shown)

    assert without_a_case.proof is Proof.WITNESSED
    assert (shown.verdict, shown.shape, shown.proof) == (Verdict.BROKEN, NOT_REPAIRED, Proof.WITNESSED)
    assert record.decision is Decision.CONFLICT
    assert record.reason == (
        "broken here, and its reproducer showed no repair; `megacpp-overlays witness double-fix` runs it again; seen: "
        f"return twice(x) (layers.py:9); shown here on {DATE}: case double: double(1) = 3"
    )


def test_the_defect_that_a_case_showed_counts_until_the_code_changes(kept: KeptWitness) -> None:
    kept.keep_unrepaired()
    before = kept.decide()
    kept.upstream.write(f"{HELPERS}# repaired\n", "helpers")
    after = examined(kept)

    assert before.decision is Decision.CONFLICT
    assert "shown here on" in before.reason
    assert after.looks_repaired
    assert f"{kept.upstream.name}.helpers is not as it was witnessed" in after.summary()


def test_a_witness_does_not_count_after_an_edit_of_its_reproducer(
    kept: KeptWitness, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pack = tmp_path / "packs" / "99-double"
    pack.mkdir(parents=True)
    (pack / "reproduce.py").write_text("CASES = ()\n")
    monkeypatch.setattr(witnesses, "PACKS", pack.parent)
    before = kept.decide().decision
    (pack / "reproduce.py").write_text("CASES = ()  # measures more\n")

    finding = probing.examine_installed(kept.overlay, InstalledTree(), Settings(witnesses=str(kept.folder)))

    assert before is Decision.RETIRED
    assert "the reproducer is another one since" in finding.summary()


DECLARED = """
# a comment
def make(original):
    'A docstring.'
    return 1 + original

OVERLAY = Overlay(
    id="scale",
    title="scale what is scaled",
    symptoms=("loss is doubled",),
    replacements={"unpadded": (make,)},
)
"""


def digest_of_a_plugin(folder: Path, name: str, text: str, monkeypatch: pytest.MonkeyPatch) -> str:
    folder.mkdir()
    (folder / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(folder)
    probe = type("Probe", (), {"__module__": name, "__call__": lambda *_: None})()
    (digest,) = witnesses.meaning(SimpleNamespace(functions=(probe,)), with_seams=False).values()  # type: ignore[arg-type]
    return digest


@pytest.mark.parametrize(
    ("old", "new", "is_the_same"),
    [
        ("# a comment", "# another comment", True),
        ("A docstring.", "Another docstring.", True),
        ("loss is doubled", "gradients are doubled", True),
        ("scale what is scaled", "double what is doubled", True),
        ("1 + original", "2 + original", False),
        ('"unpadded": (make,)', '"padded": (make,)', False),
        ('id="scale"', 'id="scales"', False),
    ],
)
def test_the_hash_of_code_ignores_the_prose_of_a_declaration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, old: str, new: str, is_the_same: bool
) -> None:
    assert old in DECLARED
    name = f"declared_{uuid.uuid4().hex}"

    before = digest_of_a_plugin(tmp_path / "before", name, DECLARED, monkeypatch)
    after = digest_of_a_plugin(tmp_path / "after", name, DECLARED.replace(old, new), monkeypatch)

    assert (before == after) is is_the_same


def test_every_field_of_prose_is_a_field_of_declarations() -> None:
    assert {*Erratum.__annotations__} >= witnesses.PROSE


def test_the_code_of_a_probe_is_its_modules_and_their_imports() -> None:
    from megacpp_overlays.overlays.liger_flce_none_backward import OVERLAY

    package = "megacpp_overlays"

    read = CODE_OF(OVERLAY)

    assert {f"{package}.overlays.liger_flce_none_backward", f"{package}.feature_probes.liger_flce_none_backward"} <= {
        *read
    }
    assert {f"{package}.source.forms", f"{package}.source.bindings"} <= {*read}
    assert f"{package}.feature_probes.fp8_quantized_unwrap" not in read


def test_loaded_code_must_be_the_code_that_was_witnessed(kept: KeptWitness) -> None:
    module = kept.upstream.load()
    module.double = lambda x: x + x + 1

    record = kept.decide()

    assert record.decision is Decision.CONFLICT
    assert "which is not the code that was read" in record.reason
    assert record.proof == "witnessed"


@pytest.mark.parametrize("text", [BROKEN_TEXT, FIXED_TEXT, LOOKS_REPAIRED_TEXT.replace("twice(x)", "thrice(x)")])
def test_no_witness_is_looked_up_where_nothing_looks_repaired(
    kept: KeptWitness, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def explode(*_: object) -> Finding:
        raise AssertionError("asked")

    monkeypatch.setattr(witnesses, "proved", explode)
    kept.upstream.write(text)

    assert "asked" not in kept.decide().reason


def test_a_gate_may_be_witnessed_after_the_session_was_armed(kept: KeptWitness) -> None:
    def probe(tree: SourceTree) -> Finding:
        source = tree.module(kept.upstream.module_name)
        assert source is not None
        repair = (Body(kept.upstream.module_name, "double"),)
        seen = (Evidence(seen="twice"),)
        return Finding(verdict=Verdict.UNRECOGNISED, shape=None, evidence=seen, repair=repair, looks_repaired=True)

    gate = gate_of(kept.upstream, probe=probe)
    made = kept.session(gate, witnesses=str(kept.folder))
    made.arm()
    (before,) = made.audit().records
    kept.overlay = gate  # type: ignore[assignment]
    kept.keep(probe=CODE_OF(gate))

    (after,) = made.audit().records

    assert before.decision is Decision.CONFLICT
    assert after.decision is Decision.RETIRED
    assert after.reason.startswith("witnessed: ")


@pytest.mark.parametrize("order", [("wrapper", "layers"), ("layers", "wrapper")], ids=" then ".join)
@pytest.mark.parametrize(("is_kept", "decision"), [(True, Decision.ACTIVE), (False, Decision.CONFLICT)])
def test_an_overlay_is_active_only_where_a_witness_proves_the_repair_that_it_needs(
    kept: KeptWitness, order: tuple[str, str], is_kept: bool, decision: Decision
) -> None:
    kept.upstream.write("def wrap(x):\n    return round(x)\n", "wrapper")
    dependent = kept.upstream.overlay(
        id="keep-bits",
        target=kept.overlay.target._replace(module=f"{kept.upstream.name}.wrapper", symbol="wrap"),
        probe=lambda _: Finding(verdict=Verdict.BROKEN, shape="rounds", evidence=(Evidence("rounds"),)),
        replacements={"rounds": (Replacement(symbol="wrap", make=lambda _original, _module: lambda x: x),)},
        witness=None,
        self_test=lambda module: Observation(broken=module.wrap(1.5) != 1.5, seen="it rounds"),
        needs=(kept.overlay.id,),
    )
    if not is_kept:
        kept.file.unlink()
    made = kept.session(dependent, kept.overlay, witnesses=str(kept.folder))
    made.arm()

    for module in order:
        kept.upstream.load(module)

    found = {record.overlay.id: record for record in made.audit().records}
    assert found["keep-bits"].decision is decision
    assert ("it needs double-fix" in found["keep-bits"].reason) is not is_kept


def test_ranks_with_and_without_a_witness_differ_and_the_advice_names_the_command(
    kept: KeptWitness, session: Callable[..., Session], tmp_path: Path
) -> None:
    with_it = session(kept.overlay, witnesses=str(kept.folder))
    without = session(kept.overlay, witnesses=str(tmp_path / "nowhere"))
    for each in (with_it, without):
        each.arm()
    kept.upstream.load()

    statements = [statement.of(each.audit(), InstalledTree()) for each in (with_it, without)]

    found = differences.find([StatementGroup(each, (rank,)) for rank, each in enumerate(statements)])
    assert [(each.field, each.values) for each in found] == [("witnessed", (("no", (1,)), ("yes", (0,))))]
    assert "run `megacpp-overlays witness double-fix` in each environment" in found[0].advice
    assert with_it.audit().fingerprint != without.audit().fingerprint


def test_a_repair_that_was_read_and_one_that_was_witnessed_have_different_fingerprints(kept: KeptWitness) -> None:
    audit = kept.audit()
    (record,) = audit.records
    assert record.finding is not None
    read = replace(record, finding=replace(record.finding, proof=Proof.READ))

    assert replace(audit, records=(read,)).fingerprint != audit.fingerprint


def test_the_observation_of_a_case_is_shown_without_escape_sequences(kept: KeptWitness) -> None:
    kept.edit(cases=[{"case": "double\x1b[1m", "seen": "double(1) = 2\n\x1b[31mactive"}])

    assert kept.decide().reason.endswith("by double\\x1b[1m: double(1) = 2\\n\\x1b[31mactive")


@pytest.mark.parametrize("relative", ["", "caches", "./caches", "~/caches"])
def test_a_cache_folder_that_is_no_absolute_path_is_ignored(monkeypatch: pytest.MonkeyPatch, relative: str) -> None:
    """The XDG Base Directory Specification says so. A relative path would be another folder in each working directory."""
    monkeypatch.setenv("XDG_CACHE_HOME", relative)
    monkeypatch.setenv("HOME", "/home/user")

    assert witnesses.folder_of(Settings()) == Path("/home/user/.cache/megacpp-overlays/witness")


def test_without_a_setting_witnesses_are_in_the_cache_folder_of_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/caches")
    in_cache = witnesses.folder_of(Settings())
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/user")

    assert in_cache == Path("/caches/megacpp-overlays/witness")
    assert witnesses.folder_of(Settings()) == Path("/home/user/.cache/megacpp-overlays/witness")
