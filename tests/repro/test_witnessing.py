"""`megacpp-overlays witness`: a suspected repair is proved only by its reproducer, run on upstream alone."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from made_environments import HONEST, Packs, install_here
from made_up import BROKEN_TEXT, FIXED_TEXT, LOOKS_REPAIRED_TEXT, Upstream

from megacpp_overlays import cli
from megacpp_overlays.loader import session as sessions
from megacpp_overlays.loader.session import Session
from megacpp_overlays.model import Decision, Record, Verdict
from megacpp_overlays.repro import inventory, witnessing

UPSTREAM = "made_target"
HELPERS = "def twice(x):\n    return x + x\n"
WRONG_HELPERS = "def twice(x):\n    return x + x + 1\n"


@dataclass
class WitnessEnvironment:
    """An environment with a made-up upstream that looks repaired, its overlay as a plugin, and its pack."""

    upstream: Upstream
    packs: Packs
    witnesses: Path
    session: Callable[..., Session]
    monkeypatch: pytest.MonkeyPatch

    def fresh(self) -> Session:
        """Return the session of a process that has just begun."""
        for name in [name for name in sys.modules if name.partition(".")[0] == UPSTREAM]:
            del sys.modules[name]
        made = self.session(self.upstream.overlay(), witnesses=str(self.witnesses))
        self.monkeypatch.setattr(sessions, "current", lambda: made)
        made.arm()
        return made

    def witness(self, *arguments: str) -> int:
        """Run the command in a process that has just begun; return its exit code."""
        self.fresh()
        return cli.main(["witness", "--packs", str(self.packs.folder), *arguments])

    def decide(self) -> Record:
        """Return the decision at the next import of the upstream."""
        made = self.fresh()
        self.upstream.load()
        return made.audit().records[0]

    @property
    def kept(self) -> list[Path]:
        return sorted(self.witnesses.glob("*")) if self.witnesses.exists() else []


@pytest.fixture
def made(
    tmp_path: Path, session: Callable[..., Session], monkeypatch: pytest.MonkeyPatch
) -> Iterator[WitnessEnvironment]:
    upstream = install_here(tmp_path, monkeypatch, LOOKS_REPAIRED_TEXT)
    upstream.write(HELPERS, "helpers")
    packs = Packs(tmp_path / "packs")
    packs.write()
    yield WitnessEnvironment(upstream, packs, tmp_path / "witnesses", session, monkeypatch)
    for name in [name for name in sys.modules if name.partition(".")[0] == UPSTREAM]:
        del sys.modules[name]


def test_a_proved_repair_is_retired_until_a_source_is_edited(
    made: WitnessEnvironment, capsys: pytest.CaptureFixture[str]
) -> None:
    before = made.decide()

    code = made.witness()

    assert (before.decision, code) == (Decision.CONFLICT, 0)
    assert "proved FIXED: double-fix on made_target.layers | witnessed here on " in capsys.readouterr().out
    after = made.decide()
    assert after.decision is Decision.RETIRED
    assert after.reason.endswith("by double: double(1) = 2")
    (file,) = made.kept
    assert file.stat().st_mode & 0o777 == (0o644 if os.geteuid() == 0 else 0o600)  # a witness of root is for all users
    text = file.read_text()
    assert set(json.loads(text)["sources"]) == {"made_target", "made_target.layers", "made_target.helpers"}
    assert set(json.loads(text)["host"]) == {"machine", "processor", "cpus", "system", "python", "gpu"}
    assert str(made.upstream.folder) not in text
    assert sys.prefix not in text
    # The probe has not read the helper: that it was loaded is enough.
    made.upstream.write(WRONG_HELPERS, "helpers")
    edited = made.decide()
    assert edited.decision is Decision.CONFLICT
    assert "the kept witness does not count: made_target.helpers is not as it was witnessed" in edited.reason


BLOCKED = 'raise Blocked("no such kernel")'
DIES = "os._exit(3)"
ABSENT = 'raise TargetAbsent("no double")'
UNLOADED = 'return Behaviour(broken=False, seen="nothing was run")'
PATCHED = """
from made_target import layers
layers.double = lambda x: x + x
return Behaviour(broken=layers.double(1) != 2, seen="somebody else's double is right")
"""


@pytest.mark.parametrize(
    ("body", "device", "says"),
    [
        (BLOCKED, "cpu", "no case can run here: case double: no such kernel"),
        (HONEST, "cuda", "no case can run here: case double: needs a CUDA device"),
        (DIES, "cpu", "case double: it failed: the process ended with exit code 3"),
        (ABSENT, "cpu", "case double: it found nothing to ask, and its target is there: no double"),
        (UNLOADED, "cpu", "case double: it failed: the case has not loaded made_target.layers"),
        (PATCHED, "cpu", "which is not the code that was read"),
    ],
)
def test_a_case_that_measures_nothing_proves_nothing(
    made: WitnessEnvironment,
    body: str,
    device: str,
    says: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("megacpp_overlays.repro.runner.visible_gpus.visible", lambda: ())
    made.packs.write(body, device=device)

    code = made.witness()

    said = capsys.readouterr().out
    assert code == 1
    assert said.startswith("not proved: double-fix on made_target.layers | ")
    assert says in said
    assert made.kept == []


def test_a_defect_that_is_still_there_is_a_conflict_until_the_code_changes(
    made: WitnessEnvironment, capsys: pytest.CaptureFixture[str]
) -> None:
    made.upstream.write(WRONG_HELPERS, "helpers")

    code = made.witness("double-fix", "--json")

    (said,) = json.loads(capsys.readouterr().out)["witnesses"]
    assert code == 1
    assert said == {
        "id": "double-fix",
        "target": "made_target.layers",
        "proved": False,
        "verdict": None,
        "reason": "case double: it shows the defect: double(1) = 3",
        "confirms": False,
        "confirmed": False,
        "cases": [{"case": "double", "said": "broken"}],
    }
    shown = made.decide()
    assert shown.decision is Decision.CONFLICT
    assert shown.reason.startswith("broken here, and its reproducer showed no repair; ")
    assert shown.reason.endswith(": case double: it shows the defect: double(1) = 3")
    made.upstream.write(HELPERS, "helpers")
    assert "the kept witness does not count: made_target.helpers is not" in made.decide().reason
    assert made.witness("double-fix") == 0
    assert made.decide().decision is Decision.RETIRED


def test_a_pack_without_a_case_for_it_proves_nothing(
    made: WitnessEnvironment, capsys: pytest.CaptureFixture[str]
) -> None:
    (made.packs.folder / "99-double").rename(made.packs.folder / "97-double")

    code = made.witness()

    assert code == 1
    assert "not proved: double-fix on made_target.layers | there is no pack 99" in capsys.readouterr().out


@pytest.mark.parametrize(("text", "verdict"), [(FIXED_TEXT, ""), (BROKEN_TEXT, "BROKEN")], ids=["fixed", "broken"])
def test_a_part_that_does_not_look_repaired_is_not_run(
    made: WitnessEnvironment, text: str, verdict: str, capsys: pytest.CaptureFixture[str]
) -> None:
    made.packs.write(DIES)
    made.upstream.write(text)

    named = made.witness("double-fix")
    said = capsys.readouterr().out
    unnamed = made.witness()

    assert (named, unnamed) == (0, 0)
    assert said.startswith("nothing to prove: double-fix on made_target.layers | there is nothing to prove: the probe ")
    assert f"says {verdict}" in said
    assert capsys.readouterr().out == "nothing that is here is unproved\n"


def test_a_proved_overlay_is_not_proved_again_unless_it_is_named(
    made: WitnessEnvironment, capsys: pytest.CaptureFixture[str]
) -> None:
    made.witness()
    made.packs.write(BLOCKED)
    capsys.readouterr()

    unnamed = made.witness()
    said = capsys.readouterr().out
    named = made.witness("double-fix")

    assert (unnamed, said) == (0, "nothing that is here is unproved\n")
    assert named == 1
    assert "no such kernel" in capsys.readouterr().out


def test_a_folder_in_which_nothing_can_be_kept_is_named(
    made: WitnessEnvironment, capsys: pytest.CaptureFixture[str]
) -> None:
    made.witnesses.mkdir()
    made.witnesses.chmod(0o777)

    code = made.witness()

    assert code == 1
    assert "it was shown and cannot be kept: " in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments", [["dubble-fix"], ["--timeout", "0"], ["--packs", "/nowhere"]], ids=["id", "timeout", "packs"]
)
def test_wrong_usage_exits_2(
    made: WitnessEnvironment, arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    made.fresh()
    with pytest.raises(SystemExit) as ended:
        cli.main(["witness", *arguments])

    assert ended.value.code == 2
    assert "double-fix" in capsys.readouterr().err or arguments[0] != "dubble-fix"


def test_an_audit_can_first_prove_suspected_repairs(
    made: WitnessEnvironment, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inventory, "own_folder", lambda: made.packs.folder)

    made.fresh()
    without = cli.main(["audit", "--json"])
    first = json.loads(capsys.readouterr().out)
    made.fresh()
    with_it = cli.main(["audit", "--witness", "--json"])

    said = capsys.readouterr()
    (decision,) = json.loads(said.out)["decisions"]
    assert (without, first["decisions"][0]["decision"]) == (1, "conflict")
    assert (with_it, decision["decision"], decision["proof"]) == (0, "retired", "witnessed")
    assert "proved FIXED: double-fix on made_target.layers" in said.err


def test_a_reproducer_agrees_with_a_probe_that_was_witnessed(
    made: WitnessEnvironment, capsys: pytest.CaptureFixture[str]
) -> None:
    made.fresh()
    unproved = cli.main(["repro", "99", "--packs", str(made.packs.folder)])
    made.witness()
    made.monkeypatch.setenv("MEGACPP_OVERLAYS_WITNESSES", str(made.witnesses))
    capsys.readouterr()

    proved = cli.main(["repro", "99", "--packs", str(made.packs.folder)])

    assert (unproved, proved) == (1, 0)
    assert "BUG_NOT_PRESENT: double(1) = 2 (case double)" in capsys.readouterr().out


def test_every_case_that_can_run_has_to_agree(made: WitnessEnvironment, capsys: pytest.CaptureFixture[str]) -> None:
    reproducer = made.packs.write()
    another = 'Case(name="{}", overlay="double-fix", device="cpu", versions=(), run={})'
    wrong = "lambda: Behaviour(broken=double() == 2, seen='it is 2')"
    one = reproducer.read_text()
    reproducer.write_text(f"{one}\nCASES = (*CASES, {another.format('again', 'measure')})\n")
    both = made.witness()
    kept = json.loads(made.kept[0].read_text())["cases"]
    reproducer.write_text(f"{one}\nCASES = (*CASES, {another.format('wrong', wrong)})\n")
    capsys.readouterr()

    disagreeing = made.witness("double-fix")

    assert (both, disagreeing) == (0, 1)
    assert [each["case"] for each in kept] == ["double", "again"]
    assert "case wrong: it shows the defect: it is 2" in capsys.readouterr().out
    record = made.decide()
    assert record.decision is Decision.CONFLICT, "the witness that was kept before is no proof any more"
    assert record.reason.endswith(": case wrong: it shows the defect: it is 2")


def test_cases_of_other_parts_prove_a_repair_by_seams_and_never_one_by_upstream() -> None:
    broken, fixed = (witnessing._Proof(verdict, {}, ()) for verdict in (Verdict.BROKEN, Verdict.FIXED))

    assert witnessing._of_others(broken) is broken
    with pytest.raises(witnessing._NoProofError, match="its pack has no case for it"):
        witnessing._of_others(fixed)


@pytest.mark.parametrize(
    ("body", "says", "code"),
    [
        (
            HONEST,
            "as recognised: double-fix | case double: BUG_REPRODUCED: double(1) = 3; case double: FIX_VALIDATED",
            0,
        ),
        (BLOCKED, "recognised, and no case can run here: double-fix | case double: BLOCKED: no such kernel", 0),
        (
            'return Behaviour(broken=double() == 5, seen="right by what calls it")',
            "contradicted: double-fix | case double: FAILED: the probe says BROKEN, the behaviour is not broken",
            1,
        ),
    ],
    ids=["the defect", "nothing", "a repair that no place has"],
)
def test_with_all_the_cases_of_recognised_overlays_are_run_too(
    made: WitnessEnvironment, body: str, says: str, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    made.upstream.write(BROKEN_TEXT)
    made.packs.write(body)

    assert made.witness() == 0
    assert "nothing that is here is unproved" in capsys.readouterr().out
    assert made.witness("--all") == code
    assert says in capsys.readouterr().out
    assert made.kept == []


SEES_AN_IMPORT = """
import sys
if "made_target.layers" in sys.modules:
    return Behaviour(broken=False, seen="it was imported before")
return Behaviour(broken=double() != 2, seen=f"double(1) = {double()}")
"""
FAILS_LATER = """
import sys
if "made_target.layers" in sys.modules and double() == 2:
    raise RuntimeError("in a copy alone")
return Behaviour(broken=double() != 2, seen=f"double(1) = {double()}")
"""


@pytest.mark.parametrize(
    ("body", "in_copies"),
    [(HONEST, True), (SEES_AN_IMPORT, False), (FAILS_LATER, False)],
    ids=["the defect and the repair", "no defect", "no repair"],
)
def test_a_case_that_needs_an_import_of_its_own_runs_once_more(
    made: WitnessEnvironment, body: str, in_copies: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    made.upstream.write(BROKEN_TEXT)
    made.packs.write(body)

    assert made.witness("--all") == 0
    said = capsys.readouterr()
    assert (
        "as recognised: double-fix | case double: BUG_REPRODUCED: double(1) = 3; case double: FIX_VALIDATED" in said.out
    )
    assert ("upstream is imported before" in said.err) is in_copies


def test_of_limits_a_run_to_one_distribution(made: WitnessEnvironment, capsys: pytest.CaptureFixture[str]) -> None:
    made.upstream.write(BROKEN_TEXT)

    assert made.witness("--all", "--of", made.upstream.overlay().target.distribution) == 0
    assert "as recognised: double-fix" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        made.witness("--all", "--of", "no-such-library")
    assert "--of no-such-library: no overlay is about it" in capsys.readouterr().err


def test_an_unproved_overlay_is_proved_and_not_asked_about_twice(
    made: WitnessEnvironment, capsys: pytest.CaptureFixture[str]
) -> None:
    assert made.witness("--all") == 0

    said = capsys.readouterr().out
    assert said.startswith("proved FIXED: double-fix on made_target.layers")
    assert "recognised" not in said


TWO_CASES = """
CASES = (*CASES, dataclasses.replace(CASES[0], name="quiet", run=lambda: Behaviour(broken=False, seen="not seen here")))
"""


def test_one_case_that_shows_the_defect_confirms_a_probe(
    made: WitnessEnvironment, capsys: pytest.CaptureFixture[str]
) -> None:
    """Another case may not show it on every host, such as a case about the choice of a tuner."""
    made.upstream.write(BROKEN_TEXT)
    reproducer = made.packs.write()
    reproducer.write_text(f"import dataclasses\n{reproducer.read_text()}{TWO_CASES}")

    assert made.witness("--all") == 0
    assert "as recognised: double-fix | case double: BUG_REPRODUCED" in capsys.readouterr().out


def test_a_case_of_a_cpu_sees_no_gpu(made: WitnessEnvironment, capsys: pytest.CaptureFixture[str]) -> None:
    made.packs.write(
        'import os\nreturn Behaviour(broken=False, seen=repr(os.environ["CUDA_VISIBLE_DEVICES"]) + str(double()))'
    )

    assert made.witness() == 0
    assert "by double: ''2" in capsys.readouterr().out
