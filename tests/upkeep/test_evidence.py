"""Evidence from an environment: it holds for that environment, independent of the shell and of this process.

The environments are real ones, with a made-up upstream in them; every question is a process of their interpreter.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import made_environments
import pytest
from made_environments import Packs
from made_up import BROKEN_TEXT, FIXED_TEXT, Upstream
from places import HANG_S, ROOT
from running import demand_end

from megacpp_overlays.errors import UpkeepError
from megacpp_overlays.loader import session as sessions
from megacpp_overlays.loader.session import Session
from megacpp_overlays.model import Decision, Finding, Verdict
from megacpp_overlays.repro import inventory
from megacpp_overlays.repro.case import PackError
from megacpp_overlays.repro.judge import Conclusion, Sentinel
from megacpp_overlays.source.trees import SourceTree
from megacpp_overlays.upkeep import evidence, inside, locks, other_python
from megacpp_overlays.upkeep.environments import Environment
from megacpp_overlays.upkeep.evidence import CaseResult, KeptReceipt, ProbedPart, ProbeReport

ID = "double-fix"
BOTH = {Sentinel.BUG_REPRODUCED, Sentinel.FIX_VALIDATED}
UNKNOWN_TEXT = BROKEN_TEXT.replace("x + x + 1", "2 * x + 1")


@pytest.fixture(autouse=True)
def with_plugin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGACPP_OVERLAYS_PLUGINS", "double")


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    return made_environments.make(tmp_path_factory.mktemp("envs") / "broken", BROKEN_TEXT, "1.0")


@pytest.fixture
def packs(tmp_path: Path) -> Packs:
    made = Packs(tmp_path / "packs")
    made.write()
    return made


def double_of(packs: Packs) -> inventory.Pack:
    return inventory.find(packs.folder, 99)


# Probes and decisions


def test_a_probe_reads_verdict_shape_version_and_whether_it_is_due(broken: Environment) -> None:
    found = evidence.probe(broken)[ID]

    assert (found.verdict, found.shapes, found.due) == (Verdict.BROKEN, ("off-by-one",), False)
    assert (dict(found.versions), found.parts[0].has_seams) == ({"made_target": "1.0"}, True)
    assert found.evidence == "return x + x + 1 (layers.py:7)"


def test_probing_imports_nothing_of_upstream(tmp_path: Path) -> None:
    fixed = made_environments.make(tmp_path / "fixed", f"raise OSError('imported')\n{FIXED_TEXT}", "2.0")

    found = evidence.probe(fixed)[ID]

    assert (found.verdict, found.shapes, found.due) == (Verdict.FIXED, (), True)


def test_variables_of_the_shell_do_not_count(
    broken: Environment, packs: Packs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shadow = tmp_path / "shadow" / "made_target"
    shadow.mkdir(parents=True)
    (shadow / "__init__.py").touch()
    (shadow / "layers.py").write_text(FIXED_TEXT)
    monkeypatch.setenv("PYTHONPATH", str(shadow.parent))
    monkeypatch.setenv("MEGACPP_OVERLAYS", "off")
    monkeypatch.setenv("MEGACPP_OVERLAY_DOUBLE_FIX", "off")

    assert evidence.probe(broken)[ID].verdict is Verdict.BROKEN
    assert evidence.reproduce(broken, double_of(packs), ID)[0].sentinels == BOTH


def test_the_pre_flight_returns_the_decisions_even_if_upstream_prints(tmp_path: Path) -> None:
    loud = made_environments.make(tmp_path / "loud", f"print('{{\\n\"decisions\": 1')\n{BROKEN_TEXT}", "1.0")

    (decided,) = evidence.pre_flight(loud)[ID]

    assert (decided.target, decided.decision) == ("made_target.layers.double", Decision.ACTIVE)


def test_a_conflict_of_the_loader_is_an_answer(tmp_path: Path) -> None:
    unknown = made_environments.make(tmp_path / "unknown", UNKNOWN_TEXT, "1.0")

    (decided,) = evidence.pre_flight(unknown)[ID]

    assert decided.decision is Decision.CONFLICT
    assert "2 * x + 1" in decided.reason


def test_an_environment_that_this_package_does_not_run_in_is_refused(tmp_path: Path) -> None:
    bare = made_environments.make(tmp_path / "bare", BROKEN_TEXT, "1.0", needed=())

    for look in (evidence.probe, evidence.pre_flight):
        with pytest.raises(
            UpkeepError, match="No module named 'wrapt'; its lock must pin the dependencies of this package"
        ):
            look(bare)


# Reproducers


@pytest.mark.parametrize(
    ("body", "timeout", "says"),
    [
        ("os.abort()", 60, "was killed by signal 6"),
        ("time.sleep(60)", 3, "took more than 3 seconds"),
        pytest.param(
            "raise RuntimeError('no such kernel')", 60, "RuntimeError: no such kernel", marks=pytest.mark.full
        ),
    ],
)
def test_a_case_that_does_not_come_to_an_answer_has_failed(
    broken: Environment, packs: Packs, body: str, timeout: float, says: str
) -> None:
    packs.write(body)

    (result,) = evidence.reproduce(broken, double_of(packs), ID, timeout=timeout)

    assert result.sentinels == {Sentinel.FAILED}
    assert says in result.said[0].reason


def test_a_case_that_this_host_cannot_run_is_blocked_and_progress_is_reported(
    broken: Environment, packs: Packs
) -> None:
    packs.write('raise Blocked("no such library")')
    lines: list[str] = []

    (result,) = evidence.reproduce(broken, double_of(packs), ID, progress=lines.append)

    assert [*result.said] == [Conclusion(Sentinel.BLOCKED, "no such library")]
    assert lines == [f"99-double: case double (overlay {ID}, cpu)", "  BLOCKED"]


def test_a_result_says_which_parts_its_case_is_about(broken: Environment, packs: Packs) -> None:
    reproducer = packs.write('raise Blocked("no such library")')
    text = reproducer.read_text()
    about = text.replace("device=", 'targets=("made_target.layers",), device=')

    for source, targets in ((text, ()), (about, ("made_target.layers",))):
        reproducer.write_text(source)
        (result,) = evidence.reproduce(broken, double_of(packs), ID)
        assert result.targets == targets


def test_the_cases_of_other_overlays_are_left_out(broken: Environment, packs: Packs) -> None:
    assert evidence.reproduce(broken, double_of(packs), "another") == ()


def test_a_reproducer_that_cannot_be_loaded_is_an_error(broken: Environment, packs: Packs) -> None:
    packs.write().write_text("CASES = 1 / 0\n")

    with pytest.raises(PackError, match="ZeroDivisionError"):
        evidence.reproduce(broken, double_of(packs), ID)


def test_a_process_that_dies_without_an_answer_is_a_failed_case(
    broken: Environment, packs: Packs, tmp_path: Path
) -> None:
    dying = tmp_path / "python"
    dying.write_text("#!/bin/sh\nkill -9 $$\n")
    dying.chmod(0o755)

    (result,) = evidence.reproduce(Environment(broken.lock, dying), double_of(packs), ID)

    assert [*result.said] == [Conclusion(Sentinel.FAILED, "the process was killed by signal 9 (Killed): no output")]


def test_a_process_that_does_not_end_is_ended_with_its_children(
    broken: Environment, packs: Packs, tmp_path: Path
) -> None:
    note = tmp_path / "pid"
    packs.write(f"open({str(note)!r}, 'w').write(str(os.getpid()))\ntime.sleep(300)")
    arguments = ["run", str(packs.folder / "99-double" / "reproduce.py"), "double", "200"]

    asked = other_python.ask(broken.python, arguments, 5)

    assert asked.problem is not None
    assert asked.problem.startswith("the process took more than 5 seconds")
    demand_end(note.read_text())


def test_a_command_that_is_asked_to_end_leaves_nothing_behind(
    broken: Environment, packs: Packs, tmp_path: Path
) -> None:
    note = tmp_path / "pid"
    packs.write(f"open({str(note)!r}, 'w').write(str(os.getpid()))\ntime.sleep(300)")
    script = (
        "import os\n"
        "from pathlib import Path\n"
        "from megacpp_overlays.repro import ending, inventory\n"
        "from megacpp_overlays.upkeep import evidence, locks\n"
        "from megacpp_overlays.upkeep.environments import Environment\n"
        f"environment = Environment(locks.read(Path({str(broken.lock.path)!r})), Path({str(broken.python)!r}))\n"
        "os.environ['MEGACPP_OVERLAYS_PLUGINS'] = 'double'\n"
        "with ending.by_exception():\n"
        f"    evidence.reproduce(environment, inventory.find(Path({str(packs.folder)!r}), 99), {ID!r})\n"
    )
    # The plugin is installed in that environment and not here, so this process does not get the variable.
    variables = {name: value for name, value in os.environ.items() if name != "MEGACPP_OVERLAYS_PLUGINS"}
    variables |= {"PYTHONPATH": str(ROOT), "MEGACPP_OVERLAYS_LOG": "logging"}
    with subprocess.Popen([sys.executable, "-c", script], env=variables) as process:
        for _ in range(600):
            if note.exists() and note.read_text():
                break
            time.sleep(0.1)
        process.send_signal(signal.SIGTERM)
        code = process.wait(HANG_S)

    assert code == 128 + signal.SIGTERM
    demand_end(note.read_text())


@pytest.mark.parametrize(
    ("cases", "modules"),
    [
        ([], ("made.a", "made.b")),
        ([("made.a",)], ("made.b",)),
        ([("made.b",), ("made.a",)], ()),
        ([("made.a", "made.b")], ()),
        ([("made.c",)], ("made.a", "made.b")),
        ([()], ()),
    ],
)
def test_a_part_is_covered_by_a_case_that_names_it_or_names_none(
    cases: list[tuple[str, ...]], modules: tuple[str, ...]
) -> None:
    results = [CaseResult(name="x", device="cpu", said=(), targets=targets) for targets in cases]

    assert evidence.uncovered([part_of("made.a"), part_of("made.b"), part_of("made.b")], iter(results)) == modules


def part_of(module: str) -> ProbedPart:
    return ProbedPart(
        module=module,
        target=f"{module}.f",
        distribution="made",
        version="1.0",
        verdict=Verdict.BROKEN,
        shape="off-by-one",
        evidence="seen",
        has_seams=True,
        left_alone=None,
    )


# In the environment itself


@pytest.fixture
def current(upstream: Upstream, session: Callable[..., Session], monkeypatch: pytest.MonkeyPatch) -> Upstream:
    def cannot_be_read(_: SourceTree) -> Finding:
        raise ValueError("odd source")

    made = session(upstream.overlay(), upstream.overlay(id="odd-probe", probe=cannot_be_read))
    monkeypatch.setattr(sessions, "current", lambda: made)
    return upstream


def test_the_answer_of_a_probe_is_plain_data_and_an_odd_probe_is_not_due(current: Upstream, tmp_path: Path) -> None:
    current.write(FIXED_TEXT)

    inside.main([str(tmp_path / "report"), "probe"])

    one, other = json.loads((tmp_path / "report").read_text())
    assert (one["overlay"], one["verdict"], one["due"], one["version"]) == (ID, "FIXED", True, None)
    assert (other["overlay"], other["verdict"], other["due"]) == ("odd-probe", "UNRECOGNISED", False)


@pytest.mark.usefixtures("current")
def test_a_case_is_run_by_the_runner_of_reproducers(
    packs: Packs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MEGACPP_OVERLAYS_PLUGINS")  # so its process knows no such overlay

    inside.main([str(tmp_path / "report"), "run", str(packs.folder / "99-double" / "reproduce.py"), "double", "60"])

    ((sentinel, reason),) = json.loads((tmp_path / "report").read_text())
    assert sentinel == "FAILED"
    assert "names double-fix" in reason


# Kept receipts

PACK, LOG = 1, "01-dsa-cuda-graph-safety/receipts/2026-11-21-nvidia-h200-b902da09.log"


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    """A copy of a real pack with its receipts."""
    folder = tmp_path / "kept"
    shutil.copytree(ROOT / "packs" / "01-dsa-cuda-graph-safety", folder / "01-dsa-cuda-graph-safety")
    shutil.copy(ROOT / "packs" / "manifest.json", folder)
    return folder


def receipts(folder: Path, **pins: str) -> tuple[KeptReceipt, ...]:
    """Return the receipts that count for an overlay on Megatron-Core 0.19.2 and torch 2.11.0, or other pins."""
    pinned = {"megatron-core": "0.19.2", "torch": "2.11.0", "packaging": "26.0", **pins}
    lines = [f"{name}=={version} --hash=sha256:{'0' * 64}" for name, version in pinned.items() if version]
    (folder / "lock.txt").write_text("\n".join([*lines, ""]))
    part = part_of("megatron.core.transformer.experimental_attention_variant.dsa")
    part = replace(part, distribution="megatron-core", version="0.19.2")
    probed = ProbeReport(overlay="dsa-capture-gates", parts=(part,), due=False)
    return evidence.receipts_for(probed, inventory.find(folder, PACK), locks.read(folder / "lock.txt"))


def edit(folder: Path, **changes: object) -> None:
    data = json.loads((folder / "manifest.json").read_text())
    for pack in data["packs"]:
        for receipt in pack["receipts"]:
            if receipt["log"] == LOG:
                receipt.update(changes)
    (folder / "manifest.json").write_text(json.dumps(data))


def test_a_receipt_of_the_pinned_versions_counts_and_one_of_a_tree_or_a_stand_in_does_not(kept: Path) -> None:
    (found,) = receipts(kept)

    assert found.log == LOG
    assert found.said["dsa-under-capture"] == BOTH
    assert found.said["bounds-under-capture"] == {Sentinel.BUG_NOT_PRESENT}
    assert "packed-under-capture" not in found.said  # it is about another overlay


@pytest.mark.parametrize(
    "pins",
    [{"megatron-core": "0.18.2"}, {"megatron-core": ""}, {"torch": "2.12.0"}, {"torch": "2.11.0+cpu"}],
)
def test_a_receipt_of_other_versions_does_not_count(kept: Path, pins: dict[str, str]) -> None:
    assert receipts(kept, **pins) == ()


@pytest.mark.parametrize("pins", [{"torch": "2.11.0+cu130"}, {"torch": ""}])
def test_a_build_that_the_lock_names_or_a_torch_that_it_leaves_open_is_no_difference(
    kept: Path, pins: dict[str, str]
) -> None:
    assert [each.log for each in receipts(kept, **pins)] == [LOG]


@pytest.mark.parametrize(
    "changes",
    [
        {"exit_code": 1},
        {"reproducer": "0" * 12},
        {"tree": {"megatron": "0" * 12}},
        {"sha256": "0" * 64},
        {"versions": {"megacpp-overlays": "0.1.0", "megatron-core": "not installed"}},
        {"claims": []},
    ],
)
def test_a_receipt_that_says_nothing_of_the_reproducer_on_a_release_does_not_count(
    kept: Path, changes: dict[str, object]
) -> None:
    edit(kept, **changes)

    assert receipts(kept) == ()


def test_a_receipt_without_its_log_or_a_pack_without_receipts_is_no_evidence(kept: Path) -> None:
    (kept / LOG).unlink()

    assert receipts(kept) == ()

    (kept / "manifest.json").unlink()

    assert receipts(kept) == ()
