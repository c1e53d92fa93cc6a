"""Megatron-LM's own unit tests under overlays: running them, comparing runs with and without overlays, and judging the claims."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from places import HANG_S, ROOT
from running import demand_end

Kept = dict[str, Any]
PYTHON = ROOT / ".envs/proof/bin/python"
SUBJECT = "megatron-unit-tests"
KEPT, USED, REST = (f"{SUBJECT}-{each}" for each in ("kept", "used", "rest"))
ERROR = "RuntimeError: one and the same"


@pytest.fixture
def measured() -> Kept:
    found: Kept = json.loads((ROOT / "proof/results/megatron-cpu.json").read_text())["measured"][SUBJECT]
    return found


def outcomes(measured: Kept) -> dict[str, str]:
    import megatron_unit_claims

    return {claim.id: claim.judge(measured).outcome.value for claim in megatron_unit_claims.CLAIMS}


def figure(measured: Kept, wanted: str) -> str:
    import megatron_unit_claims

    (found,) = (claim.judge(measured).figure for claim in megatron_unit_claims.CLAIMS if claim.id == wanted)
    return found


# --- how claims are judged ---


def ran(
    passed: Sequence[str] = (),
    failed: Mapping[str, str] | None = None,
    skipped: Sequence[str] = (),
    unreached: Sequence[str] = (),
    **otherwise: Any,
) -> Kept:
    """Return a run of tests that are all in one file."""
    files = {"passed": passed, "skipped": skipped, "unreached": unreached}
    errors: dict[str, dict[str, list[str]]] = {}
    for name, error in (failed or {}).items():
        errors.setdefault(error, {"test_a.py": []})["test_a.py"].append(name)
    found = {kind: {"test_a.py": list(names)} if names else {} for kind, names in files.items()}
    return {**found, "failed": errors, "left_out": {}, "cut": None, "stopped": None, "seconds": 1.0, **otherwise}


def called(**run: Any) -> Kept:
    return ran(**{"calls": {"mtp-z-loss": 3}, "conflicts": [], **run})


def of_one_group(without: Kept, with_overlays: Kept, *again: Kept) -> Kept:
    """Return the measurement of one group: the runs without and with overlays, and their repetitions where given."""
    ways = ("without", "with")
    found = {"groups": {"mtp": dict(zip(ways, (without, with_overlays), strict=True))}, "again": {}, "limit_s": 150.0}
    return {**found, "again": {"mtp": dict(zip(ways, again, strict=True))}} if again else found


BOTH = ("test_1", "test_2")
GOOD = ran(passed=BOTH, failed={"test_3": ERROR})
WITH = called(passed=BOTH, failed={"test_3": ERROR})
LOST = called(passed=["test_1"], failed={"test_2": "AssertionError", "test_3": ERROR})
ONE_ERROR_MORE = ran(passed=["test_1"], failed={"test_2": "AssertionError", "test_3": ERROR})
SKIPS = called(passed=["test_1"], failed={"test_3": ERROR}, skipped=["test_2"])
KNOWS_LESS = called(passed=["test_1"], failed={"test_3": ERROR})
DIED = called(passed=["test_1"], failed={"test_3": "the process ended in it: SIGSEGV"}, unreached=["test_2"])
DIED.update(cut="test_a.py::test_3", stopped="SIGSEGV")
LATE = called(passed=["test_1"], unreached=["test_2", "test_3"], stopped="limit")
HANGS = called(passed=["test_1"], unreached=["test_3"], stopped="limit", cut="test_a.py::test_2")
REPAIRED = called(passed=[*BOTH, "test_3"])
OTHERWISE = called(passed=BOTH, failed={"test_3": "AssertionError: another"})
NOTHING_PASSES = {"failed": dict.fromkeys(BOTH, ERROR)}

JUDGED = {
    "all is alike": (of_one_group(GOOD, WITH), set()),
    "a test is lost": (of_one_group(GOOD, LOST, GOOD, LOST), {KEPT, REST}),
    "a test is lost once": (of_one_group(GOOD, LOST, GOOD, WITH), {KEPT, REST}),
    "stock loses it, too, when it is run once more": (of_one_group(GOOD, LOST, ONE_ERROR_MORE, WITH), set()),
    "a test is skipped with overlays": (of_one_group(GOOD, SKIPS, GOOD, SKIPS), {KEPT, REST}),
    "a test is not there with overlays": (of_one_group(GOOD, KNOWS_LESS, GOOD, KNOWS_LESS), {KEPT, REST}),
    "the process ends with overlays before a test": (of_one_group(GOOD, DIED, GOOD, DIED), {KEPT, REST}),
    "stock was not run once more": (of_one_group(GOOD, LOST), {KEPT, REST}),
    "stock had no time for it when it was run once more": (
        of_one_group(GOOD, LOST, ran(unreached=["test_1", "test_2", "test_3"], stopped="limit"), LOST),
        {KEPT, REST},
    ),
    "time was over with overlays": (of_one_group(GOOD, LATE), set()),
    "time was over in a test, with overlays": (of_one_group(GOOD, HANGS, GOOD, WITH), set()),
    "time was over in the same test both times": (of_one_group(GOOD, HANGS, GOOD, HANGS), {KEPT, REST}),
    "a test is repaired": (of_one_group(GOOD, REPAIRED, GOOD, REPAIRED), set()),
    "a test fails in another way": (of_one_group(GOOD, OTHERWISE, GOOD, OTHERWISE), {REST}),
    "nothing passes in a group": (of_one_group(ran(**NOTHING_PASSES), called(**NOTHING_PASSES)), {KEPT}),
    "nothing is called": (of_one_group(GOOD, called(passed=BOTH, failed={"test_3": ERROR}, calls={})), {USED}),
    "a conflict": (of_one_group(GOOD, called(passed=BOTH, failed={"test_3": ERROR}, conflicts=["mtp-z-loss"])), {USED}),
    "no group was run": ({"groups": {}, "again": {}, "limit_s": 150.0}, {KEPT, USED}),
}


@pytest.mark.parametrize(("found", "wrong"), JUDGED.values(), ids=JUDGED)
def test_a_claim_fails_where_a_test_is_lost_and_not_where_stock_or_the_time_takes_it(
    found: Kept, wrong: set[str]
) -> None:
    assert {claim for claim, outcome in outcomes(found).items() if outcome == "FAILS"} == wrong


def test_each_claim_is_made_to_fail_above() -> None:
    assert set().union(*(wrong for _, wrong in JUDGED.values())) == {KEPT, USED, REST}


@pytest.mark.parametrize(
    ("found", "claim", "says"),
    [
        (of_one_group(GOOD, LOST, GOOD, LOST), KEPT, "lost: test_a.py::test_2; repaired: 0"),
        (of_one_group(GOOD, REPAIRED, GOOD, REPAIRED), KEPT, "2 pass without, 3 with, in 1 groups; 1 fail without"),
        (of_one_group(GOOD, REPAIRED, GOOD, REPAIRED), KEPT, "repaired: 1; stock's own changes: 0"),
        (of_one_group(GOOD, REPAIRED, REPAIRED, REPAIRED), KEPT, "repaired: 0; stock's own changes: 1"),
        (of_one_group(GOOD, REPAIRED, GOOD, WITH), KEPT, "repaired: 0; stock's own changes: 0"),
        (of_one_group(GOOD, LATE), KEPT, "not reached in the time limit or behind an end: 2"),
        (of_one_group(ran(**NOTHING_PASSES), called(**NOTHING_PASSES)), KEPT, "nothing passes in: multi-token predic"),
        (
            of_one_group(GOOD, WITH),
            USED,
            "1 overlays called: mtp-z-loss 3 times; groups that call none on this host: none; in",
        ),
        (
            of_one_group(GOOD, {**WITH, "calls": {}}),
            USED,
            "groups that call none on this host: multi-token prediction; in",
        ),
        (
            of_one_group(GOOD, WITH),
            REST,
            f"1 fail without overlays, too, with the same 1 errors, the most frequent: {ERROR}",
        ),
        (of_one_group(ran(passed=BOTH), called(passed=BOTH)), REST, "nothing fails"),
    ],
)
def test_a_figure_names_its_counts_and_tests(found: Kept, claim: str, says: str) -> None:
    assert says in figure(found, claim)


def lose_a_test(measured: Kept) -> None:
    """Let a test that really passed be lost, in both runs."""
    ways = measured["groups"]["routers"]
    file, names = next(iter(ways["with"]["passed"].items()))
    lost = names.pop()
    ways["with"]["failed"].setdefault("AssertionError", {}).setdefault(file, []).append(lost)


def pass_nothing(measured: Kept) -> None:
    for way in ("without", "with"):
        measured["groups"]["ssm"][way]["passed"] = {}


def call_nothing(measured: Kept) -> None:
    for ways in measured["groups"].values():
        ways["with"]["calls"] = {}


@pytest.mark.parametrize(
    ("change", "wrong"),
    [(lambda _: None, set()), (lose_a_test, {KEPT, REST}), (pass_nothing, {KEPT}), (call_nothing, {USED})],
    ids=["as they are", "a test is lost", "nothing passes", "nothing is called"],
)
def test_the_kept_receipts_bear_the_claims_and_changed_ones_do_not(
    measured: Kept, change: Callable[[Kept], None], wrong: set[str]
) -> None:
    change(measured)

    assert {claim for claim, outcome in outcomes(measured).items() if outcome == "FAILS"} == wrong


def test_in_the_receipts_every_group_really_passes_tests_and_says_how_many(measured: Kept) -> None:
    from megatron_unit_ends import count
    from megatron_unit_groups import GROUPS

    assert list(measured["groups"]) == [group.id for group in GROUPS]
    passed = sum(count(ways["without"], "passed") for ways in measured["groups"].values())
    assert passed > 600
    assert figure(measured, KEPT).startswith(f"{passed} pass without, ")


# --- the page ---


def test_the_page_has_the_counts_the_repaired_tests_and_those_that_were_not_collected() -> None:
    import megatron_unit_page

    stock = ran(
        passed=BOTH, failed={"test_3": ERROR}, left_out={"tests/unit_tests/test_b.py": "ModuleNotFoundError: te"}
    )
    lines = megatron_unit_page.section(of_one_group(stock, REPAIRED, stock, REPAIRED))

    assert "| multi-token prediction | without | 2 | 1 | 0 | all |" in lines
    assert "| multi-token prediction | with | 3 | 0 | 0 | all |" in lines
    assert lines[lines.index("Repaired by overlays:") + 2] == "- `test_a.py::test_3`"
    assert "- `test_b.py`: ModuleNotFoundError: te, only without overlays" in lines


@pytest.mark.parametrize(
    ("run", "says"),
    [
        (LATE, "at the time limit, 2 not reached"),
        (HANGS, "at the time limit in `test_a.py::test_2`, 1 not reached"),
        (DIED, "by SIGSEGV in `test_a.py::test_3`, 1 not reached"),
    ],
)
def test_the_page_says_where_a_group_was_cut_off(run: Kept, says: str) -> None:
    import megatron_unit_page

    assert any(line.endswith(f"| {says} |") for line in megatron_unit_page.section(of_one_group(GOOD, run)))


# --- which tests are run ---


def test_every_overlay_of_megatron_has_its_group_or_a_reason() -> None:
    from megatron_unit_groups import GROUPS, UNTESTED

    from megacpp_overlays.loader import registry

    named = [overlay for group in GROUPS for overlay in group.of]

    assert len(named) == len(set(named))
    assert {*named, *UNTESTED} == {each.id for each in registry.load() if each.target.distribution == "megatron-core"}


@pytest.mark.upstream
@pytest.mark.skipif("MEGATRON_LM" not in os.environ, reason="MEGATRON_LM names no checkout of Megatron-LM")
def test_a_checkout_has_the_files_of_every_group() -> None:
    from megatron_unit_groups import GROUPS

    given = Path(os.environ["MEGATRON_LM"])

    assert [path for group in GROUPS for path in group.paths if not (given / path).exists()] == []


# --- one run ---

TESTS = """
import os
import pytest

def test_passes():
    assert os.environ["WORLD_SIZE"] == "1"
    assert os.path.isdir(os.environ["TMPDIR"]) and os.environ["TMPDIR"].startswith(os.getcwd())

def test_fails():
    raise RuntimeError(f"no {object()} in {os.getcwd()}/x\\nand a second line")

@pytest.fixture
def broken():
    raise ValueError("before it begins")

def test_cannot_begin(broken):
    pass

@pytest.fixture
def leaves_a_mess():
    yield
    raise ValueError("after it has passed")

def test_cannot_end(leaves_a_mess):
    pass

@pytest.mark.skip(reason="not here")
def test_is_skipped():
    pass
"""
DIES = (
    "import os, signal\ndef test_dies():\n    os.kill(os.getpid(), signal.SIGKILL)\ndef test_is_behind():\n    pass\n"
)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Return a folder with tests where Megatron-LM has its own."""
    folder = tmp_path / "root/tests/unit_tests"
    folder.mkdir(parents=True)
    (tmp_path / "root/pytest.ini").write_text("[pytest]\n")
    (folder / "test_a.py").write_text(TESTS)
    (folder / "test_b.py").write_text("import a_package_that_nobody_has\n")
    (folder / "test_c.py").write_text("import pytest\npytest.skip('no GPU', allow_module_level=True)\n")
    (folder / "test_d.py").write_text(DIES)
    return tmp_path / "root"


def run(root: Path, *files: str, armed: bool = False, limit_s: float = HANG_S, but: tuple[str, ...] = ()) -> Kept:
    from megatron_unit_groups import Group
    from megatron_unit_runs import Stand
    from megatron_unit_runs import run as run_once

    return run_once(Group("made", "made tests", files, (), but), Stand(root, {}, (ROOT,), armed, limit_s))


def test_each_test_of_a_group_has_its_outcome_and_its_error(root: Path) -> None:
    found = run(root, "test_a.py", "test_b.py", "test_c.py", "test_that_this_release_has_not.py")

    file = "tests/unit_tests/test_a.py"
    assert found["passed"] == {file: ["test_passes"]}
    assert found["skipped"] == {file: ["test_is_skipped"]}
    assert found["failed"] == {
        "RuntimeError: no <object object at 0x...> in x": {file: ["test_fails"]},
        "ValueError: before it begins": {file: ["test_cannot_begin"]},
        "ValueError: after it has passed": {file: ["test_cannot_end"]},
    }
    assert found["left_out"] == {
        "tests/unit_tests/test_b.py": "ModuleNotFoundError: No module named 'a_package_that_nobody_has'",
        "tests/unit_tests/test_c.py": "Skipped: no GPU",
    }
    assert (found["stopped"], found["cut"], found["unreached"]) == (None, None, {})


def test_an_armed_run_reports_calls_and_conflicts_too(root: Path) -> None:
    stock, armed = (run(root, "test_a.py", armed=each) for each in (False, True))

    assert "calls" not in stock
    assert (armed["calls"], armed["conflicts"]) == ({}, [])
    assert armed["failed"] == stock["failed"]


def test_a_test_that_is_left_out_is_not_run(root: Path) -> None:
    found = run(root, "test_a.py", but=("test_a.py::test_fails",))

    assert "test_fails" not in json.dumps(found)
    assert found["passed"] == {"tests/unit_tests/test_a.py": ["test_passes"]}


def test_when_the_time_is_over_no_test_is_begun_and_finished_tests_are_kept(root: Path) -> None:
    found = run(root, "test_a.py", armed=True, limit_s=0.0)

    file = "tests/unit_tests/test_a.py"
    assert (found["stopped"], found["passed"]) == ("limit", {file: ["test_passes"]})
    assert found["unreached"] == {file: ["test_fails", "test_cannot_begin", "test_cannot_end", "test_is_skipped"]}
    assert found["conflicts"] == []


def test_a_test_that_kills_its_process_has_failed_and_later_ones_are_unreached(root: Path) -> None:
    found = run(root, "test_a.py", "test_d.py")

    file = "tests/unit_tests/test_d.py"
    assert found["failed"]["the process ended in it: SIGKILL"] == {file: ["test_dies"]}
    assert (found["stopped"], found["cut"]) == ("SIGKILL", f"{file}::test_dies")
    assert found["unreached"] == {file: ["test_is_behind"]}
    assert found["passed"] == {"tests/unit_tests/test_a.py": ["test_passes"]}


def test_a_test_in_which_time_is_over_has_not_failed() -> None:
    from megatron_unit_runs import ended

    lines = [{"collected": ["a.py::one", "a.py::two", "a.py::three"]}, {"began": "a.py::one"}]
    lines += [{"ended": "a.py::one", "outcome": "passed", "error": ""}, {"began": "a.py::two"}]

    found = ended(lines, None)

    assert (found["stopped"], found["cut"], found["failed"]) == ("limit", "a.py::two", {})
    assert (found["passed"], found["unreached"]) == ({"a.py": ["one"]}, {"a.py": ["three"]})


def test_a_process_that_does_not_end_is_ended_with_all_that_it_started(tmp_path: Path) -> None:
    from megatron_unit_runs import waited

    code = "import subprocess, sys, time; child = subprocess.Popen(['sleep', '4000']); print(child.pid, flush=True); time.sleep(4000)"
    log = tmp_path / "log"

    assert waited([sys.executable, "-c", code], dict(os.environ), tmp_path, log, 5.0) is None
    demand_end(log.read_text().strip())


def test_a_failed_collection_is_an_error_with_the_output_of_pytest(root: Path) -> None:
    from processes import ProofError

    (root / "tests/unit_tests/conftest.py").write_text("raise ImportError('no torch of this kind')\n")

    with pytest.raises(ProofError, match=r"(?s)pytest of made tests ended with exit code 4:.*no torch of this kind"):
        run(root, "test_a.py")


# --- the whole of it ---


def test_a_checkout_without_tests_ends_with_the_way_out(tmp_path: Path) -> None:
    from megatron_checkout import ready_for_tests
    from processes import ProofError

    with pytest.raises(ProofError, match=r"has no tests/unit_tests/\S+: give a checkout of https://github.com/NVIDIA"):
        ready_for_tests(tmp_path, tmp_path)


@pytest.mark.upstream
@pytest.mark.skipif("MEGATRON_LM" not in os.environ, reason="MEGATRON_LM names no checkout of Megatron-LM")
def test_two_groups_of_a_given_checkout_bear_every_claim(tmp_path: Path) -> None:
    words = [
        "--quick",
        "--megatron-lm",
        os.environ["MEGATRON_LM"],
        "--only",
        SUBJECT,
        "--json",
        tmp_path / "found.json",
    ]

    done = subprocess.run(
        [PYTHON, "-W", "ignore", ROOT / "proof/run.py", *words],
        capture_output=True,
        text=True,
        check=False,
        timeout=HANG_S,
    )

    assert done.returncode == 0, done.stdout
    found = json.loads((tmp_path / "found.json").read_text())["measured"][SUBJECT]
    assert list(found["groups"]) == ["module", "mtp"]
