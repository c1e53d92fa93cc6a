"""`megacpp-overlays triage`: the outcome of an upgrade for each fix follows from its reproducer, never from a verdict alone."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from importlib import metadata
from pathlib import Path

import made_environments
import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_environments import Packs
from made_up import BROKEN_TEXT, FIXED_TEXT, LOOKS_REPAIRED_TEXT, Upstream
from places import ROOT

from megacpp_overlays import cli
from megacpp_overlays.cli.codes import ExitCode
from megacpp_overlays.errors import UpkeepError
from megacpp_overlays.loader import session as sessions
from megacpp_overlays.loader.session import Session
from megacpp_overlays.model import Decision, Verdict
from megacpp_overlays.repro import inventory
from megacpp_overlays.repro.judge import Conclusion, Sentinel
from megacpp_overlays.upkeep.environments import Environment
from megacpp_overlays.upkeep.evidence import CaseResult, KeptReceipt, PartDecision, ProbedPart, ProbeReport
from megacpp_overlays.upkeep.triage import outcomes, triage, triage_report
from megacpp_overlays.upkeep.triage.facts import Facts, shown
from megacpp_overlays.upkeep.triage.outcomes import UpgradeOutcome
from megacpp_overlays.upkeep.triage.preview import expect

B, F, A, U = Verdict.BROKEN, Verdict.FIXED, Verdict.ABSENT, Verdict.UNRECOGNISED
REPRODUCED, VALIDATED, NOT_PRESENT, BLOCKED, FAILED = (
    Sentinel.BUG_REPRODUCED,
    Sentinel.FIX_VALIDATED,
    Sentinel.BUG_NOT_PRESENT,
    Sentinel.BLOCKED,
    Sentinel.FAILED,
)
KEEP, CONFLICT, RETIRE, NOTHING = (
    UpgradeOutcome.KEEP,
    UpgradeOutcome.CONFLICT,
    UpgradeOutcome.RETIRE,
    UpgradeOutcome.ABSENT,
)


def probed(*verdicts: Verdict, version: str | None = "1.0", due: bool | None = None, seams: bool = True) -> ProbeReport:
    """Return a probe report with one part for each verdict. By default, `due` is set if the report's verdict is FIXED."""
    parts = tuple(
        ProbedPart(
            module=f"made.m{number}",
            target=f"made.m{number}.f",
            distribution="made",
            version=version,
            verdict=verdict,
            shape="off-by-one" if verdict is B else None,
            evidence=f"seen {number}",
            has_seams=seams and verdict is B,
            left_alone=None if seams else "no model needs it",
        )
        for number, verdict in enumerate(verdicts)
    )
    found = ProbeReport(overlay="double-fix", parts=parts, due=False)
    return replace(found, due=found.verdict is F if due is None else due)


def decided(*decisions: Decision) -> tuple[PartDecision, ...]:
    return tuple(PartDecision(f"made.m{number}.f", each, "so it is") for number, each in enumerate(decisions))


def case(*sentinels: Sentinel, name: str = "double", about: tuple[str, ...] = ()) -> CaseResult:
    said = tuple(Conclusion(each, f"because of {each.value}") for each in sentinels)
    return CaseResult(name=name, device="cpu", said=said, targets=about)


def receipt(*sentinels: Sentinel, name: str = "double") -> KeptReceipt:
    return KeptReceipt(log="99-double/receipts/x.log", said={name: frozenset(sentinels)})


def facts(
    before: ProbeReport,
    after: ProbeReport,
    *ran: CaseResult,
    by: tuple[PartDecision, ...] | str | None = None,
    kept: tuple[KeptReceipt, ...] = (),
    why_not: str | None = None,
) -> Facts:
    active = {B: Decision.ACTIVE, F: Decision.RETIRED, A: Decision.ABSENT, U: Decision.CONFLICT}
    usual = decided(*(active[part.verdict] for part in after.parts))
    locks = ("a.txt", "b.txt")
    return Facts(
        pack=99,
        locks=locks,
        before=before,
        after=after,
        decided=usual if by is None else by,
        ran=why_not or ran,
        kept=kept,
    )


# Outcomes


@pytest.mark.parametrize(
    ("found", "outcome", "says"),
    [
        (facts(probed(B), probed(B), case(REPRODUCED, VALIDATED)), KEEP, "still broken; the seams install"),
        (facts(probed(A), probed(B), case(REPRODUCED, VALIDATED)), KEEP, "broken from here on"),
        (facts(probed(U), probed(A, B), case(REPRODUCED, VALIDATED)), KEEP, "still broken"),
        (facts(probed(B), probed(F), case(NOT_PRESENT)), RETIRE, "passes the reproducer without the overlay"),
        (facts(probed(F), probed(F), case(NOT_PRESENT)), RETIRE, "without the overlay, as before the upgrade"),
        (facts(probed(A), probed(F), case(NOT_PRESENT)), RETIRE, "its target is new and right"),
        (facts(probed(F), probed(A), case(NOT_PRESENT)), RETIRE, "upstream had repaired it, and its target is gone"),
        (facts(probed(A), probed(A)), NOTHING, "on both: seen 0"),
        (facts(probed(B), probed(A, version=None)), NOTHING, "made is not in this environment any more"),
    ],
)
def test_evidence_decides_the_outcome(found: Facts, outcome: UpgradeOutcome, says: str) -> None:
    ruling = outcomes.judge(found)

    assert ruling.outcome is outcome
    assert says in ruling.reason


@pytest.mark.parametrize(
    ("found", "says", "to_do"),
    [
        (facts(probed(B), probed(U), case(FAILED)), "shape unknown: made.m0: seen 0; case double", "teach its probe"),
        (facts(probed(B), probed(B, U), case(REPRODUCED, VALIDATED)), "shape unknown: made.m1: seen 1", "read the new"),
        (
            facts(probed(B), probed(B, seams=False), case(REPRODUCED, FAILED)),
            "no seam for shape off-by-one of made.m0: no model needs it",
            "extend the overlay",
        ),
        (facts(probed(B), probed(B), case(FAILED)), "its reproducer fails: double: because of FAILED", "repro 99 --v"),
        (
            facts(probed(B), probed(F), case(NOT_PRESENT), case(FAILED, name="b")),
            "its reproducer fails: b:",
            "repro 99",
        ),
        (
            facts(probed(B), probed(B), case(REPRODUCED, VALIDATED), by=decided(Decision.CONFLICT)),
            "the loader refuses it: made.m0.f: so it is",
            "repair the overlay",
        ),
        (
            facts(probed(B), probed(B), case(REPRODUCED, VALIDATED), by=decided(Decision.ARMED)),
            "it does not install: made.m0.f armed: so it is",
            "repair the overlay",
        ),
        (
            facts(probed(B), probed(B, B), case(REPRODUCED, VALIDATED), by=decided(Decision.ACTIVE)),
            "it does not install: made.m1.f undecided",
            "repair the overlay",
        ),
        (facts(probed(B), probed(A), case(NOT_PRESENT)), "its target was BROKEN and is gone: seen 0", "moved the code"),
        (facts(probed(U), probed(A), case(NOT_PRESENT)), "its target was UNRECOGNISED and is gone", "moved the code"),
        (facts(probed(B), probed(B), case(BLOCKED)), "nothing else shows it: double: because of B", "repro 99 --keep"),
        (
            facts(probed(B), probed(F), case(BLOCKED)),
            "the probe says FIXED of made.m0 and nothing else shows it",
            "--adopt FOLDER",
        ),
        (facts(probed(B), probed(F), why_not="there is no pack 99"), "shows it: there is no pack 99", "repro 99"),
        (facts(probed(B), probed(F)), "its pack has no case for it", "repro 99"),
        (
            facts(probed(B), probed(B), case(NOT_PRESENT)),
            "disagree: the probe says BROKEN, double says BUG_NOT",
            "probe",
        ),
        (
            facts(probed(B), probed(F), case(BLOCKED), kept=(receipt(REPRODUCED, VALIDATED),)),
            "disagree: the probe says FIXED, double says BUG_REPRODUCED and FIX_VALIDATED",
            "repair the probe",
        ),
        (
            facts(probed(B), probed(B, due=True), case(REPRODUCED, VALIDATED)),
            "says BROKEN, and its retirement check says that it is due",
            "repair the check",
        ),
        (
            facts(probed(B), probed(B), case(BLOCKED), by="it hung", kept=(receipt(REPRODUCED, VALIDATED),)),
            "whether it installs is not known: it hung",
            "repair the environment",
        ),
    ],
)
def test_missing_evidence_is_a_conflict_with_a_reason_and_a_next_step(found: Facts, says: str, to_do: str) -> None:
    ruling = outcomes.judge(found)

    assert ruling.outcome is CONFLICT
    assert says in ruling.reason
    assert to_do in ruling.to_do


ON_0, ON_1 = {"about": ("made.m0",)}, {"about": ("made.m1",)}


@pytest.mark.parametrize(
    ("found", "outcome", "says"),
    [
        (
            facts(probed(B, B), probed(B, B), case(REPRODUCED, VALIDATED, **ON_0)),
            CONFLICT,
            "the probe says BROKEN of made.m1 and nothing else shows it: its pack has no case for it",
        ),
        (
            facts(probed(B, B), probed(B, B), case(REPRODUCED, VALIDATED, **ON_0), case(BLOCKED, name="b", **ON_1)),
            CONFLICT,
            "the probe says BROKEN of made.m1 and nothing else shows it: b: because of BLOCKED",
        ),
        (
            facts(probed(B, B), probed(F, F), case(NOT_PRESENT, **ON_1)),
            CONFLICT,
            "the probe says FIXED of made.m0 and nothing else shows it",
        ),
        (
            facts(probed(A, B), probed(A, F), case(NOT_PRESENT, **ON_0)),
            CONFLICT,
            "the probe says FIXED of made.m1 and nothing else shows it",
        ),
        (
            facts(
                probed(B, B),
                probed(B, B),
                case(REPRODUCED, VALIDATED, **ON_0),
                case(BLOCKED, name="b", **ON_1),
                by="it hung",
                kept=(receipt(REPRODUCED, VALIDATED, name="b"),),
            ),
            CONFLICT,
            "whether it installs is not known: it hung",
        ),
        (
            facts(probed(B, B), probed(B, F), case(REPRODUCED, VALIDATED, **ON_0), case(NOT_PRESENT, name="b", **ON_0)),
            CONFLICT,
            "probe and behaviour disagree: the probe says BROKEN, b says BUG_NOT_PRESENT",
        ),
        (
            facts(
                probed(B, B),
                probed(B, F),
                case(REPRODUCED, VALIDATED, **ON_0),
                case(REPRODUCED, VALIDATED, name="b", **ON_1),
            ),
            CONFLICT,
            "probe and behaviour disagree: the probe says FIXED, b says BUG_REPRODUCED and FIX_VALIDATED",
        ),
        (
            facts(probed(B, B), probed(B, F), case(BLOCKED, **ON_0), case(NOT_PRESENT, name="b", **ON_1)),
            CONFLICT,
            "the probe says BROKEN of made.m0 and nothing else shows it: double: because of BLOCKED",
        ),
        (
            facts(probed(B, B), probed(B, F), case(REPRODUCED, VALIDATED, **ON_0), case(NOT_PRESENT, name="b", **ON_1)),
            KEEP,
            "still broken",
        ),
        (facts(probed(B, F), probed(B, F), case(REPRODUCED, VALIDATED, **ON_0)), KEEP, "still broken"),
        (
            facts(probed(B, B), probed(F, F), case(NOT_PRESENT, about=("made.m0", "made.m1"))),
            RETIRE,
            "passes the reproducer",
        ),
        (facts(probed(F, B), probed(A, F), case(NOT_PRESENT, **ON_1)), RETIRE, "passes the reproducer"),
    ],
)
def test_a_case_counts_for_the_parts_that_it_is_about(found: Facts, outcome: UpgradeOutcome, says: str) -> None:
    ruling = outcomes.judge(found)

    assert ruling.outcome is outcome
    assert says in ruling.reason


GONE = "its target made.m0.f was BROKEN and is gone: seen 0"


@pytest.mark.parametrize(
    ("found", "outcome", "says"),
    [
        (facts(probed(B, B), probed(A, B), case(REPRODUCED, VALIDATED)), CONFLICT, GONE),
        (facts(probed(B, F), probed(A, F), case(NOT_PRESENT)), CONFLICT, GONE),
        (facts(probed(B, A), probed(A, F), case(NOT_PRESENT, **ON_0)), CONFLICT, GONE),
        (facts(probed(B, A), probed(A, F), case(NOT_PRESENT, **ON_1)), RETIRE, "passes the reproducer"),
        (facts(probed(B, A), probed(A, B), case(REPRODUCED, VALIDATED)), KEEP, "still broken"),
        (facts(probed(F, B), probed(A, B), case(REPRODUCED, VALIDATED)), KEEP, "still broken"),
    ],
)
def test_a_broken_part_that_is_gone_is_a_conflict_unless_a_new_one_is_there_and_shown(
    found: Facts, outcome: UpgradeOutcome, says: str
) -> None:
    ruling = outcomes.judge(found)

    assert ruling.outcome is outcome
    assert says in ruling.reason


def test_a_broken_part_whose_distribution_is_gone_is_nothing_to_carry() -> None:
    after = probed(A, B)
    after = replace(after, parts=(replace(after.parts[0], distribution="other", version=None), after.parts[1]))

    assert outcomes.judge(facts(probed(B, B), after, case(REPRODUCED, VALIDATED))).outcome is KEEP


def test_a_receipt_replaces_a_case_that_is_blocked_here_and_no_other() -> None:
    kept = (receipt(VALIDATED, REPRODUCED), receipt(NOT_PRESENT))

    blocked = facts(probed(B), probed(B), case(BLOCKED), kept=kept)
    failed = facts(probed(B), probed(B), case(FAILED), kept=kept)

    (case_shown,) = shown(blocked)
    assert (str(case_shown), case_shown.receipt) == (
        "double says BUG_REPRODUCED and FIX_VALIDATED",
        "99-double/receipts/x.log",
    )
    assert outcomes.judge(blocked).outcome is KEEP
    assert outcomes.judge(failed).outcome is CONFLICT


def test_a_fix_that_was_shown_here_needs_no_pre_flight() -> None:
    assert outcomes.judge(facts(probed(B), probed(B), case(REPRODUCED, VALIDATED), by="it hung")).outcome is KEEP


def test_a_retirement_names_the_lock_on_which_it_can_be_shown() -> None:
    absorbed = outcomes.judge(facts(probed(B), probed(F), case(NOT_PRESENT)))
    gone = outcomes.judge(facts(probed(F), probed(A), case(NOT_PRESENT)))

    assert absorbed.to_do == "`megacpp-overlays retire double-fix --lock b.txt`"
    assert gone.to_do == "`megacpp-overlays retire double-fix --lock a.txt`"


def test_a_retirement_that_its_own_check_does_not_see_says_so() -> None:
    ruling = outcomes.judge(facts(probed(B), probed(F, due=False), case(NOT_PRESENT)))

    assert ruling.outcome is RETIRE
    assert ruling.reason.endswith("its retirement check does not say so yet")


EVERY_FACT = st.builds(
    lambda before, after, due, seams, ran, decisions, kept: facts(
        probed(*before), probed(*after, due=due, seams=seams), *ran, by=decisions, kept=kept
    ),
    st.lists(st.sampled_from(Verdict), min_size=2, max_size=2),
    st.lists(st.sampled_from(Verdict), min_size=1, max_size=2),
    st.booleans(),
    st.booleans(),
    st.lists(
        st.builds(
            lambda words, about: case(*words, about=about),
            st.lists(st.sampled_from(Sentinel), min_size=1, max_size=2),
            st.sampled_from([(), ("made.m0",), ("made.m1",), ("made.m0", "made.m1")]),
        ),
        max_size=2,
    ),
    st.one_of(st.just("it hung"), st.lists(st.sampled_from(Decision), max_size=2).map(lambda each: decided(*each))),
    st.sampled_from([(), (receipt(NOT_PRESENT),), (receipt(REPRODUCED, VALIDATED),)]),
)


@given(EVERY_FACT)
def test_nothing_is_kept_or_retired_without_evidence_and_every_conflict_has_a_next_step(found: Facts) -> None:
    ruling = outcomes.judge(found)

    verdicts = {part.verdict for part in found.after.parts}
    said = [each.sentinels for each in shown(found)]
    by_part = {
        part.module: [each.sentinels for each in shown(found) if not each.targets or part.module in each.targets]
        for part in found.after.parts
    }
    broken, fixed = ([by_part[part.module] for part in found.after.parts if part.verdict is each] for each in (B, F))
    if ruling.outcome is KEEP:
        assert broken
        assert all(any({REPRODUCED, VALIDATED} <= each for each in of_part) for of_part in broken)
    if ruling.outcome is RETIRE:
        assert found.after.verdict is F or (found.before.verdict is F and found.after.verdict is A)
        assert all(any(NOT_PRESENT in each for each in of_part) for of_part in fixed)
    if ruling.outcome is not CONFLICT:
        pairs = [(old.verdict, new.verdict) for old, new in zip(found.before.parts, found.after.parts, strict=False)]
        assert (B, A) not in pairs or any(old is A and new in {B, F} for old, new in pairs)
    if U in verdicts or any(FAILED in each for each in said):
        assert ruling.outcome is CONFLICT
    assert bool(ruling.to_do) is (ruling.outcome in {CONFLICT, RETIRE})


# A whole triage, on environments with a made-up upstream


@pytest.fixture(scope="module")
def releases(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Environment]:
    """Environments with one release each, by the state of the bug in that release."""
    texts = {
        "broken": (BROKEN_TEXT, "1.0"),
        "broken-still": (BROKEN_TEXT, "1.1"),
        "fixed": (FIXED_TEXT, "2.0"),
        "gone": ("def other():\n    pass\n", "4.0"),
        "gone-still": ("def other():\n    pass\n", "4.1"),
        "looks": (LOOKS_REPAIRED_TEXT, "3.1"),
        "deadly": (f"import os\nos._exit(3)\n{BROKEN_TEXT}", "5.0"),
    }
    folder = tmp_path_factory.mktemp("envs")
    made = {name: made_environments.make(folder / name, text, version) for name, (text, version) in texts.items()}
    helpers = made_environments.site_of(made["looks"]) / "made_target" / "helpers.py"
    helpers.write_text("def twice(x):\n    return x + x\n")
    return made


@pytest.fixture
def packs(tmp_path: Path) -> Packs:
    made = Packs(tmp_path / "packs")
    made.write()
    return made


@pytest.fixture
def run(
    releases: Mapping[str, Environment],
    packs: Packs,
    session: Callable[..., Session],
    monkeypatch: pytest.MonkeyPatch,
) -> Callable[..., int]:
    """Return the command, for an upgrade from one release to another."""
    monkeypatch.setenv("MEGACPP_OVERLAYS_PLUGINS", "double")
    made = session(Upstream("made_target", Path("nowhere")).overlay())
    monkeypatch.setattr(sessions, "current", lambda: made)
    folder = releases["broken"].python.parent.parent.parent

    def command(before: str, after: str, *more: str) -> int:
        locks = [str(releases[name].lock.path) for name in (before, after)]
        places = ["--environments", str(folder), "--packs", str(packs.folder)]
        return cli.main(["triage", "--from", locks[0], "--to", locks[1], *places, *more])

    return command


def one_line(text: str) -> str:
    return " ".join(text.split())


def test_an_upgrade_is_a_row_with_its_evidence_and_an_exit_code(
    run: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("broken", "broken-still") == 0

    said = capsys.readouterr()
    assert "double-fix 99 made_target 1.0 -> 1.1 BROKEN BROKEN keep" in one_line(said.out)
    assert "FIX_VALIDATED double: double(1) = 2" in one_line(said.out)
    assert "made-target" in said.out.partition("overlay")[0]  # changed distributions come first
    assert "delete when: upstream doubles without adding one" in said.out
    assert "99-double: case double (overlay double-fix, cpu)" in said.err  # progress is no part of the answer


def test_a_seeming_repair_is_proved_in_its_environment_and_retires(
    run: Callable[..., int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MEGACPP_OVERLAYS_WITNESSES", str(tmp_path / "witnesses"))

    code = run("broken", "looks")

    said = capsys.readouterr()
    assert code == 1
    assert "made_target 1.0 -> 3.1 BROKEN FIXED retire" in one_line(said.out)
    assert "BUG_NOT_PRESENT double: double(1) = 2" in one_line(said.out)
    assert "proving parts that look repaired: double-fix" in said.err
    assert len(list((tmp_path / "witnesses").iterdir())) == 1


@pytest.mark.full
def test_a_seeming_repair_that_cannot_be_proved_is_a_conflict_with_the_reason(
    run: Callable[..., int],
    packs: Packs,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("MEGACPP_OVERLAYS_WITNESSES", str(tmp_path / "witnesses"))
    packs.write('return Behaviour(broken=True, seen="double(1) = 3")')

    code = run("broken", "looks")

    said = one_line(capsys.readouterr().out)
    assert code == 1
    assert "made_target 1.0 -> 3.1 BROKEN UNRECOGNISED conflict" in said
    assert "return twice(x) (layers.py:9); case double: it shows the defect: double(1) = 3" in said


def test_a_target_on_neither_side_is_absent_and_nothing_is_run(
    run: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("gone", "gone-still") == 0

    said = capsys.readouterr()
    assert "made_target 4.0 -> 4.1 ABSENT ABSENT absent" in one_line(said.out)
    assert "1 absent. The upgrade changes nothing for the overlays." in said.out
    assert "case double" not in said.err


@pytest.mark.full
def test_a_receipt_is_named_where_a_case_cannot_run_here(
    run: Callable[..., int], packs: Packs, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    log = keep_receipt(packs, made_target="1.1")

    assert run("broken", "broken-still") == 0
    said = one_line(capsys.readouterr().out)
    assert f"receipt {log}: double BUG_REPRODUCED and FIX_VALIDATED delete when" in said

    assert run("broken-still", "broken") == 1  # 1.0 is another release than the one of the receipt
    assert "nothing else shows it: double: needs a CUDA device" in one_line(capsys.readouterr().out)


def keep_receipt(packs: Packs, *, made_target: str) -> str:
    """Put a receipt of a case that needs a GPU into the manifest: a real one, made to be of the made-up upstream."""
    reproducer = packs.write(device="cuda")
    real = json.loads((ROOT / "packs" / "manifest.json").read_text())
    pack = next(pack for pack in real["packs"] if any(each["host"]["gpu"] for each in pack["receipts"]))
    log = packs.folder / "99-double" / "receipts" / "2026-11-21-nvidia-h200-12345678.log"
    log.parent.mkdir()
    log.write_text("a log\n")
    receipt = {
        **next(each for each in pack["receipts"] if each["host"]["gpu"]),
        "log": log.relative_to(packs.folder).as_posix(),
        "sha256": hashlib.sha256(log.read_bytes()).hexdigest(),
        "versions": {"megacpp-overlays": "0.1.0", "made_target": made_target},
        "tree": None,
        "reproducer": inventory.digest(reproducer),
        "command": "megacpp-overlays repro 99",
        "claims": [
            {"case": "double", "sentinel": word, "overlay": "double-fix"}
            for word in ("BUG_REPRODUCED", "FIX_VALIDATED")
        ],
    }
    entry = {**pack, "number": 99, "slug": "double", "receipts": [receipt]}
    (packs.folder / "manifest.json").write_text(json.dumps({**real, "packs": [entry]}))
    return str(receipt["log"])


def test_json_has_everything_that_the_table_has(run: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    assert run("broken", "fixed", "--json", "--only", "double-fix") == 1

    data = json.loads(capsys.readouterr().out)
    (found,) = data["overlays"]
    assert data["changes"] == [{"distribution": "made-target", "from": "1.0", "to": "2.0", "target": True}]
    assert (found["id"], found["outcome"], found["due"]) == ("double-fix", "retire", True)
    assert (found["from"]["verdict"], found["from"]["shapes"], found["to"]["verdict"]) == (
        "BROKEN",
        ["off-by-one"],
        "FIXED",
    )
    assert found["cases"] == [
        {
            "case": "double",
            "said": [{"sentinel": "BUG_NOT_PRESENT", "reason": "double(1) = 2"}],
            "receipt": None,
        }
    ]
    assert found["decided"] is None  # nothing is broken there, so nothing has to install
    assert found["next"].startswith("`megacpp-overlays retire double-fix --lock ")


@pytest.mark.full
def test_a_brief_table_has_the_outcomes_and_no_evidence(
    run: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("broken", "fixed", "--brief", "--only", "double-fix") == 1

    said = capsys.readouterr().out
    (row,) = [line for line in said.splitlines() if line.startswith("double-fix ")]
    assert row.split()[-3:] == ["BROKEN", "FIXED", "retire"]
    assert "BUG_NOT_PRESENT" not in said
    assert said.rstrip().endswith("1 retire. Upgrade, and retire what upstream has absorbed.")


@pytest.mark.full
def test_a_kept_overlay_has_the_decision_of_the_loader(
    run: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("broken", "broken-still", "--json") == 0

    (found,) = json.loads(capsys.readouterr().out)["overlays"]
    assert (found["outcome"], found["next"]) == ("keep", None)
    assert [(each["target"], each["decision"]) for each in found["decided"]] == [
        ("made_target.layers.double", "active")
    ]


@pytest.mark.full
def test_a_crash_a_timeout_and_a_broken_pack_are_conflicts_and_no_tracebacks(
    run: Callable[..., int], packs: Packs, capsys: pytest.CaptureFixture[str]
) -> None:
    packs.write("time.sleep(60)")
    assert run("broken", "broken-still", "--timeout", "3") == 1
    assert "its reproducer fails: double: without the overlay: the process took more" in one_line(
        capsys.readouterr().out
    )

    packs.write().write_text("CASES = 1 / 0\n")
    assert run("broken", "broken-still") == 1
    assert "nothing else shows it: 99-double/reproduce.py cannot be loaded" in one_line(capsys.readouterr().out)


@pytest.mark.full
def test_a_case_for_a_gpu_without_one_or_a_receipt_is_no_evidence(
    run: Callable[..., int], packs: Packs, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    packs.write(device="cuda")

    assert run("broken", "fixed") == 1

    said = one_line(capsys.readouterr().out)
    assert "the probe says FIXED of made_target.layers and nothing else shows it: double: needs a CUDA device" in said
    assert "not run, needs a CUDA device: double" in said


# Errors


@pytest.mark.parametrize(
    "more", [["--only", "no-such"], ["--timeout", "0"], ["--packs", "nowhere"], ["--no-such-option"]]
)
def test_wrong_usage_exits_2(run: Callable[..., int], more: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        run("broken", "fixed", *more)

    assert caught.value.code == 2


def test_locks_that_pin_the_same_are_no_upgrade(run: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    assert run("broken", "broken") == ExitCode.NOT_CHECKED

    assert "pin the same versions: there is no upgrade to triage" in capsys.readouterr().err


def test_a_lock_that_cannot_be_read_is_named(
    releases: Mapping[str, Environment], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "broken.txt").write_text("wrapt==2.0\n")

    code = cli.main(["triage", "--from", str(releases["broken"].lock.path), "--to", str(tmp_path / "broken.txt")])

    assert code == ExitCode.NOT_CHECKED
    assert "broken.txt:1: wrapt has no hash" in capsys.readouterr().err


def test_an_environment_that_does_not_hold_its_lock_is_refused(
    run: Callable[..., int], releases: Mapping[str, Environment], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("broken", "fixed", "--to-python", str(releases["broken"].python)) == ExitCode.NOT_CHECKED

    said = capsys.readouterr().err
    assert "differs from this lock: made-target is 1.0, not 2.0" in said


def test_an_overlay_that_an_environment_does_not_know_is_named(
    releases: Mapping[str, Environment], packs: Packs, upstream: Upstream
) -> None:
    how = triage.RunOptions(packs=packs.folder)

    with pytest.raises(UpkeepError, match="its environment knows no overlay double-fix"):
        triage.triage(releases["broken"], releases["fixed"], [upstream.overlay()], how)


# Distributions that an upgrade changes


def test_targets_come_first_and_added_or_removed_distributions_are_marked(
    releases: Mapping[str, Environment], tmp_path: Path
) -> None:
    before, after = releases["broken"].lock, releases["fixed"].lock
    before = replace(before, pins={**before.pins, "aa-removed": before.pins["wrapt"]})
    after = replace(after, pins={**after.pins, "aa-added": after.pins["wrapt"]})

    found = triage.changes(before, after, [Upstream("made_target", tmp_path).overlay()])

    assert [each.distribution for each in found] == ["made-target", "aa-added", "aa-removed"]
    lines = triage_report.heading(before, after, found).splitlines()
    assert [one_line(line) for line in lines[4:7]] == [
        "made-target 1.0 2.0 target of overlays",
        f"aa-added - {after.version('wrapt')} added",
        f"aa-removed {before.version('wrapt')} - removed",
    ]


# Real upstreams


@pytest.mark.full
@pytest.mark.upstream
def test_a_real_upgrade_keeps_a_broken_overlay_by_a_case_that_ran_and_by_receipts() -> None:
    done = subprocess.run(
        [
            *(sys.executable, "-m", "megacpp_overlays", "triage", "--json", "--environments", ROOT / ".envs"),
            *("--from", ROOT / "locks" / "summer-2026.txt", "--to", ROOT / "locks" / "newest.txt"),
            *("--only", "fp8-quantized-unwrap"),
        ],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
    )

    assert done.returncode == 0, done.stderr
    (found,) = json.loads(done.stdout)["overlays"]
    assert (found["outcome"], found["from"]["verdict"], found["to"]["verdict"]) == ("keep", "ABSENT", "BROKEN")
    assert (found["from"]["versions"], found["to"]["versions"]) == (
        {"megatron-core": "0.18.2"},
        {"megatron-core": "0.19.2"},
    )
    cases = {case["case"]: case for case in found["cases"]}
    here, elsewhere = cases["wrapper-stand-in"], cases["transformer-engine-on-gpu"]
    assert [said["sentinel"] for said in here["said"]] == ["BUG_REPRODUCED", "FIX_VALIDATED"]
    assert [said["sentinel"] for said in elsewhere["said"]] == ["BUG_REPRODUCED", "FIX_VALIDATED"]
    assert here["receipt"] is None
    assert "nvidia-h200" in elsewhere["receipt"]


# A preview, for which nothing runs


def provable(report: ProbeReport) -> ProbeReport:
    """Return a report whose unrecognised parts a reproducer can decide."""
    return replace(report, parts=tuple(replace(part, can_be_proved=part.verdict is U) for part in report.parts))


@pytest.mark.parametrize(
    ("before", "after", "expected", "says"),
    [
        (probed(B), probed(B), UpgradeOutcome.KEEP, "still broken"),
        (probed(A), probed(B), UpgradeOutcome.KEEP, "broken from here on"),
        (probed(F), probed(B), UpgradeOutcome.KEEP, "broken from here on"),
        (probed(B), probed(F), UpgradeOutcome.RETIRE, "upstream repaired it: seen 0"),
        (probed(B), probed(F, A), UpgradeOutcome.RETIRE, "upstream repaired it"),
        (probed(F), probed(A), UpgradeOutcome.RETIRE, "its target is gone"),
        (probed(A), probed(A), UpgradeOutcome.ABSENT, "seen 0"),
        (probed(B), probed(A, version=None), UpgradeOutcome.ABSENT, "seen 0"),
        (probed(B), probed(A), UpgradeOutcome.CONFLICT, "it was broken and is gone: made.m0: seen 0"),
        (probed(B, A), probed(A, B), UpgradeOutcome.KEEP, "still broken"),
        (probed(B, B), probed(A, B), UpgradeOutcome.CONFLICT, "it was broken and is gone: made.m0"),
        (
            probed(B),
            probed(B, seams=False),
            UpgradeOutcome.CONFLICT,
            "no seam for its shape: made.m0: no model needs it",
        ),
        (probed(B), probed(U), UpgradeOutcome.CONFLICT, "no seam can be placed: made.m0: seen 0"),
        (probed(B, B), provable(probed(U, B)), UpgradeOutcome.WITNESS, "not recognised: made.m0"),
    ],
)
def test_the_expected_outcome_follows_from_the_probes(
    before: ProbeReport, after: ProbeReport, expected: UpgradeOutcome, says: str
) -> None:
    found, reason = expect(before, after)

    assert found is expected
    assert says in reason


@pytest.mark.parametrize(
    ("after", "code", "row"),
    [
        ("broken-still", 0, "made_target 1.0 -> 1.1 BROKEN BROKEN keep"),
        ("fixed", 1, "made_target 1.0 -> 2.0 BROKEN FIXED retire"),
        ("deadly", 0, "made_target 1.0 -> 5.0 BROKEN BROKEN keep"),
    ],
)
def test_a_preview_runs_nothing_of_upstream(
    run: Callable[..., int], capsys: pytest.CaptureFixture[str], after: str, code: int, row: str
) -> None:
    assert run("broken", after, "--quick") == code

    said = capsys.readouterr()
    assert said.out.startswith("from ")
    assert f"double-fix 99 {row}" in one_line(said.out)
    assert "No reproducer ran" in said.out
    assert "case double" not in said.err


def test_a_preview_as_json_has_the_contents_of_the_table(
    run: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    run("broken", "fixed", "--quick", "--json")

    data = json.loads(capsys.readouterr().out)
    (overlay,) = data["overlays"]
    assert (overlay["id"], overlay["expected"]) == ("double-fix", "retire")
    assert (overlay["from"]["verdict"], overlay["to"]["verdict"]) == ("BROKEN", "FIXED")
    assert [each["distribution"] for each in data["changes"]] == ["made-target"]


@pytest.mark.skipif(not (ROOT / ".envs/newest/.ready").is_file(), reason="needs the lanes")
def test_a_preview_of_a_real_upgrade_knows_both_releases(capsys: pytest.CaptureFixture[str]) -> None:
    locks = [str(ROOT / f"locks/{lane}.txt") for lane in ("summer-2026", "newest")]
    cli.main(
        ["triage", "--from", locks[0], "--to", locks[1], "--environments", str(ROOT / ".envs"), "--quick", "--json"]
    )

    expected = {each["id"]: each["expected"] for each in json.loads(capsys.readouterr().out)["overlays"]}
    assert expected["liger-flce-none-backward"] == "retire"
    assert expected["scheduler-restore"] == "keep"
    assert {"witness", "conflict"}.isdisjoint(expected.values())


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have megatron-core 0.18.2 and no other target of overlays, as far as the command can see."""

    def version(name: str) -> str:
        if name != "megatron-core":
            raise metadata.PackageNotFoundError(name)
        return "0.18.2"

    monkeypatch.setattr(metadata, "version", version)


@pytest.mark.usefixtures("installed")
def test_a_move_to_a_release_is_compared_with_the_installation(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["triage", "--to", "megatron-core==0.19.2", "--json"]) == 1

    data = json.loads(capsys.readouterr().out)
    expected = {each["id"]: each["expected"] for each in data["overlays"]}
    assert (data["from"], data["to"], data["changes"][0]["from"]) == (None, None, "0.18.2")
    assert expected["quant-recipe-stale-weights"] == "retire"
    assert (expected["scheduler-restore"], expected["dsa-sparse-attention"]) == ("keep", "keep")
    assert "liger-flce-none-backward" not in expected
    assert {"witness", "conflict"}.isdisjoint(expected.values())


@pytest.mark.usefixtures("installed")
def test_changes_of_a_move_come_first_and_the_rest_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    cli.main(["triage", "--to", "megatron-core==0.19.2"])

    said = capsys.readouterr().out
    news, same = said.split("broken on both sides, and repaired: ")
    assert one_line(news).startswith("from what is installed here to other releases")
    assert news.index("quant-recipe-stale-weights") < news.index("dsa-sparse-attention")
    assert "broken from here on: " in news
    assert "scheduler-restore" in same
    assert "scheduler-restore" not in news


@pytest.mark.usefixtures("installed")
def test_a_move_back_names_overlays_that_become_absent(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["triage", "--to", "megatron-core==0.16.1", "--only", "expert-rng-resume"]) == 0

    assert "broken here, and not there any more: expert-rng-resume" in one_line(capsys.readouterr().out)


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("release", "says"),
    [
        ("megatron-core==9.9", "does not know it (of megatron-core it knows 0.1.0 to"),
        ("megatron-core==0.18.2", "this version is installed here already, so nothing changes"),
        ("liger-kernel==0.8.5", "liger-kernel is not installed here"),
        ("numpy==2.0", "no overlay is about numpy"),
        ("megatron-core==0.19.*", "NAME==VERSION with one version"),
        ("megatron-core==", "no release, which is NAME==VERSION"),
    ],
)
def test_a_release_that_cannot_be_compared_is_named(
    release: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["triage", "--to", release]) == 5

    assert says in one_line(capsys.readouterr().err)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--from", "a.txt", "--to", "liger-kernel==1"], "NAME==VERSION"),
        (["--to", "a.txt"], "NAME==VERSION"),
        (["--from", "a.txt"], "the following arguments are required: --to"),
    ],
)
def test_two_locks_are_named_or_releases_alone(words: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["triage", *words])

    assert ended.value.code == 2
    assert says in capsys.readouterr().err
