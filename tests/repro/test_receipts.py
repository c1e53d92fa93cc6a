"""Receipts of packs and their manifest: a claim needs a kept log, and an edited log or manifest is refused."""

from __future__ import annotations

import concurrent.futures
import copy
import hashlib
import json
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from made_up import Upstream

from megacpp_overlays import cli
from megacpp_overlays.cli.codes import ExitCode
from megacpp_overlays.loader import retired
from megacpp_overlays.loader.retired import RetiredOverlay
from megacpp_overlays.model import Overlay, Target, Thread
from megacpp_overlays.repro import inventory, manifest, receipts, schema
from megacpp_overlays.repro.manifest import ManifestError
from megacpp_overlays.repro.stamp import Stamp

CPU = {"machine": "x86_64", "processor": "a CPU", "cpus": 2, "system": "Linux 6.1", "python": "3.12.1", "gpu": None}
GPU = {**CPU, "gpu": {"name": "NVIDIA H200", "capability": "9.0", "driver": "580.1", "count": 1}}
REPRODUCER = "CASES = ()\n"
DIGEST = hashlib.sha256(REPRODUCER.encode()).hexdigest()[:12]
COMMAND = "megacpp-overlays repro 99"
EARNED = (
    "case double (overlay double-fix): cpu",
    "    | FIX_VALIDATED: printed by upstream (case other)",
    "BUG_REPRODUCED: double(1) = 3 (case double)",
    "FIX_VALIDATED: double(1) = 2 (case double)",
)
"""Lines of a run that earns two sentinels. An indented line is output of upstream, and earns none."""
RULES = json.loads((inventory.own_folder() / "manifest.schema.json").read_text())


def stamp_of(host: dict[str, Any] = CPU, tree: dict[str, str] | None = None, reproducer: str = DIGEST) -> Stamp:
    return Stamp(
        host=host,
        versions={"megacpp-overlays": "0 (0)", "made": "1"},
        tree=tree,
        reproducer=reproducer,
        date="2026-11-21",
    )


def log_of(stamp: Stamp, *lines: str, command: str = COMMAND, code: int = 0) -> str:
    return "".join(f"{line}\n" for line in (stamp.line(), f"$ {command}", *lines, f"exit code {code}"))


@pytest.fixture
def overlays() -> tuple[Overlay, ...]:
    thread = Thread(repository="made/up", number=1, state="open")
    return (Upstream("made_target", Path()).overlay(threads=(thread,)),)


@pytest.fixture
def folder(tmp_path: Path, overlays: tuple[Overlay, ...]) -> Path:
    """Return a folder of packs with one pack, 99-double, and one receipt of it."""
    packs = tmp_path / "packs"
    pack = packs / "99-double"
    pack.mkdir(parents=True)
    (pack / "reproduce.py").write_text(REPRODUCER)
    write_notes(packs)
    manifest.write(packs, manifest.synchronise(packs, overlays))
    keep(packs, overlays)
    return packs


def write_notes(folder: Path, kind: str = "overlay", state: str = "draft") -> None:
    text = f"# Pack 99: doubles\n\n| | |\n|---|---|\n| Class | {kind} |\n| Lifecycle state | {state} |\n"
    (folder / "99-double" / "README.md").write_text(text)


def keep(folder: Path, overlays: tuple[Overlay, ...], stamp: Stamp | None = None, *lines: str, code: int = 0) -> str:
    """Keep a receipt of the pack, by default of `EARNED`; return the name of its log."""
    pack = inventory.Pack(folder / "99-double", 99, "double")
    stamp = stamp or stamp_of()
    command = COMMAND + (" --tree PATH" if stamp.tree else "")
    text = log_of(stamp, *(lines or EARNED), command=command, code=code)
    return receipts.keep(folder, receipts.prepare(folder, pack, overlays), pack, stamp, text, command)


def only_receipt(data: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = data["packs"][0]["receipts"][0]
    return found


def test_a_receipt_has_the_sentinels_of_its_log(folder: Path) -> None:
    receipt = only_receipt(manifest.read(folder))

    assert receipts.problems(folder) == []
    assert receipt["log"].startswith(f"99-double/receipts/{receipt['date']}-cpu-")
    assert receipt["exit_code"] == 0
    assert receipt["claims"] == [
        {"case": "double", "sentinel": sentinel, "overlay": "double-fix"}
        for sentinel in ("BUG_REPRODUCED", "FIX_VALIDATED")
    ]


def test_a_failed_or_blocked_run_is_kept_without_claims(folder: Path, overlays: tuple[Overlay, ...]) -> None:
    head = "case double (overlay double-fix): cuda"
    keep(folder, overlays, stamp_of(GPU), head, "FAILED: no fix (case double)", code=1)
    keep(folder, overlays, stamp_of(), head, "BLOCKED: needs a CUDA device (case double)", code=3)

    found = [(each["exit_code"], each["claims"]) for each in manifest.read(folder)["packs"][0]["receipts"]]

    assert receipts.problems(folder) == []
    assert sorted(found, key=str)[1:] == [(1, []), (3, [])]
    assert list(folder.glob("99-double/receipts/*-nvidia-h200-*.log"))


# Refused receipts


def edit_log(change: Callable[[str], str]) -> Callable[[Path, dict[str, Any]], None]:
    """Return a function that changes the log of a receipt, and its hash and name to fit, as a forger would."""

    def edit(folder: Path, receipt: dict[str, Any]) -> None:
        old = folder / receipt["log"]
        text = change(old.read_text())
        receipt["sha256"] = hashlib.sha256(text.encode()).hexdigest()
        old.unlink()
        receipt["log"] = receipts._name("99-double", receipt)
        (folder / receipt["log"]).write_text(text)

    return edit


def without(line: str) -> Callable[[str], str]:
    return lambda text: "".join(each for each in text.splitlines(keepends=True) if not each.startswith(line))


def move(folder: Path, receipt: dict[str, Any], **changes: str) -> None:
    """Change fields of a receipt, and rename its log to fit."""
    old = folder / receipt["log"]
    receipt.update(changes)
    receipt["log"] = receipts._name("99-double", receipt)
    old.rename(folder / receipt["log"])


TAMPERING: dict[str, tuple[Callable[[Path, dict[str, Any]], Any], str]] = {
    "log changed": (lambda folder, r: (folder / r["log"]).write_text("better"), "the log was changed"),
    "log deleted": (lambda folder, r: (folder / r["log"]).unlink(), "there is no such log"),
    "log of nobody": (
        lambda folder, r: (folder / "99-double/receipts/x.log").write_text(""),
        "no receipt in the manifest names it",
    ),
    "log not text": (
        lambda folder, r: (
            (folder / r["log"]).write_bytes(b"\xff"),
            r.update(sha256=hashlib.sha256(b"\xff").hexdigest()),
        ),
        "it is no text",
    ),
    "log of another pack": (lambda folder, r: r.update(log="98-other/receipts/a.log"), "it is not of 99-double"),
    "sentinel taken out": (edit_log(without("FIX_VALIDATED")), "claims FIX_VALIDATED for case double"),
    "sentinel added": (
        edit_log(lambda text: text.replace("exit code", "BUG_NOT_PRESENT: - (case double)\nexit code")),
        "does not claim BUG_NOT_PRESENT for case double",
    ),
    "failure taken out": (lambda folder, r: r.update(exit_code=1), "its last line is not: exit code 1"),
    "exit code improved": (
        edit_log(lambda text: text.replace("exit code", "FAILED: - (case double)\nexit code")),
        "its sentinels mean exit code 1, not 0",
    ),
    "date changed": (
        lambda folder, r: move(folder, r, date="2030-01-01"),
        "its first line is not the stamp",
    ),
    "stamp taken out": (edit_log(without("host:")), "its first line is not the stamp"),
    "other command": (
        edit_log(lambda text: text.replace("$ megacpp", "$ better")),
        "its second line is not the command",
    ),
    "path of a machine": (
        edit_log(lambda text: text.replace("double(1) = 3", "/srv/someone/x.py")),
        "it has paths of a machine: /srv/someone/x.py",
    ),
    "claim of another overlay": (
        lambda folder, r: r["claims"][0].update(overlay="other"),
        "it claims BUG_REPRODUCED for case double of other",
    ),
    "tree without --tree": (
        lambda folder, r: r.update(tree={"made": "1" * 12}),
        "its command and its tree do not fit together",
    ),
}


@pytest.mark.parametrize("how", TAMPERING)
def test_tampering_is_noticed(folder: Path, how: str) -> None:
    tamper, says = TAMPERING[how]
    data = manifest.read(folder)
    tamper(folder, only_receipt(data))
    manifest.write(folder, data)

    assert any(says in problem for problem in receipts.problems(folder)), receipts.problems(folder)


def test_a_log_that_is_in_the_manifest_twice_is_refused(folder: Path) -> None:
    data = manifest.read(folder)
    data["packs"][0]["receipts"] *= 2
    manifest.write(folder, data)

    assert any("more than once" in problem for problem in receipts.problems(folder))


def leaves(data: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the place of every scalar in JSON data, as a tuple of keys and indexes."""
    items = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else None
    if items is None:
        yield place
        return
    for key, value in items:
        yield from leaves(value, (*place, key))


def set_at(data: Any, place: tuple[Any, ...], value: Any) -> None:
    for key in place[:-1]:
        data = data[key]
    data[place[-1]] = value


OTHER = st.one_of(st.none(), st.integers(), st.text(max_size=12), st.just([]), st.just({}))
"""Values in place of a scalar of a manifest."""


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=200, deadline=None)
@given(choice=st.data())
def test_another_value_in_a_receipt_is_refused(folder: Path, choice: st.DataObject) -> None:
    data = manifest.read(folder)
    changed = copy.deepcopy(data)
    receipt = only_receipt(changed)
    place = choice.draw(st.sampled_from(list(leaves(receipt))))
    value = choice.draw(OTHER)
    set_at(receipt, place, value)
    if only_receipt(data) == receipt:
        return
    try:
        (folder / manifest.NAME).write_text(json.dumps(changed))
        assert receipts.problems(folder), (place, value)
    except ManifestError:
        pass  # it does not fit the schema
    finally:
        manifest.write(folder, data)


def test_a_manifest_that_is_no_json_or_does_not_fit_its_schema_is_refused(folder: Path) -> None:
    (folder / manifest.NAME).write_text("{")
    with pytest.raises(ManifestError, match=r"manifest\.json is no JSON"):
        manifest.read(folder)

    (folder / manifest.NAME).write_text('{"schema": 2, "packs": [{"number": 0}]}')
    with pytest.raises(ManifestError, match=r"schema: 2 is none of 1;.*packs\[0\]: slug is missing"):
        manifest.read(folder)


# States of a pack


@pytest.mark.parametrize(
    ("kind", "state", "shown", "says"),
    [
        ("overlay", "draft", (), None),
        ("overlay", "reproduced", ("BUG_REPRODUCED",), None),
        ("overlay", "reproduced", (), "no receipt shows BUG_REPRODUCED for double-fix"),
        ("overlay", "validated", ("BUG_REPRODUCED", "FIX_VALIDATED"), None),
        ("overlay", "validated", ("BUG_REPRODUCED", "MEMORY_SAVE_VERIFIED"), None),
        ("overlay", "validated", ("BUG_REPRODUCED", "SOMETHING_ELSE"), "no receipt shows FIX_VALIDATED for double-fix"),
        ("overlay", "reproduced", ("MEMORY_SAVE_VERIFIED",), "no receipt shows BUG_REPRODUCED for double-fix"),
        ("overlay", "validated", ("BUG_REPRODUCED",), "no receipt shows FIX_VALIDATED for double-fix"),
        ("overlay", "ready", ("BUG_REPRODUCED", "FIX_VALIDATED"), "made/up#1 has no date checked"),
        (
            "overlay",
            "ready",
            ("BUG_REPRODUCED", "FIX_VALIDATED"),
            "no pack.toml has the result of a search of upstream",
        ),
        (
            "overlay",
            "filed",
            ("BUG_REPRODUCED", "FIX_VALIDATED"),
            "no pack.toml has the result of a search of upstream",
        ),
        (
            "regression guard",
            "validated",
            ("BUG_NOT_PRESENT",),
            "its class is regression guard, and its state is validated",
        ),
        ("overlay", "retired", ("FIX_VALIDATED",), "a retired pack is a regression guard"),
        ("bug report", "validated", ("BUG_REPRODUCED",), None),
        ("fork", "validated", ("BUG_REPRODUCED",), "no receipt shows FIX_VALIDATED"),
        ("held", "filed", ("BUG_REPRODUCED", "FIX_VALIDATED"), "it is held, and its state is filed"),
        ("regression guard", "retired", ("BUG_NOT_PRESENT",), "an overlay still has its number"),
    ],
)
def test_a_state_or_class_that_the_receipts_do_not_show_is_refused(
    folder: Path, overlays: tuple[Overlay, ...], kind: str, state: str, shown: tuple[str, ...], says: str | None
) -> None:
    shutil.rmtree(folder / "99-double" / "receipts")
    (folder / manifest.NAME).unlink()
    write_notes(folder, kind, state)
    lines = [f"{sentinel}: - (case double)" for sentinel in shown]
    head = "case double (overlay double-fix, fix shown by MEMORY_SAVE_VERIFIED): cpu"
    keep(folder, overlays, None, head, *lines, code=0 if shown else 3)

    wrong = manifest.problems(folder, overlays)

    assert receipts.problems(folder) == []
    assert (wrong == []) if says is None else any(says in problem for problem in wrong), wrong


@pytest.mark.parametrize(
    ("stamp", "code"),
    [
        (stamp_of(reproducer="0" * 12), 0),
        (stamp_of(tree={"stand-in": "made-spring", "made": "1" * 12}), 0),
        (stamp_of(), 1),
    ],
    ids=["of another reproducer", "of a stand-in", "with a failure"],
)
def test_a_receipt_of_another_reproducer_or_a_stand_in_or_with_a_failure_proves_no_state(
    folder: Path, overlays: tuple[Overlay, ...], stamp: Stamp, code: int
) -> None:
    shutil.rmtree(folder / "99-double" / "receipts")
    (folder / manifest.NAME).unlink()
    write_notes(folder, "overlay", "validated")
    failure = ("FAILED: another case (case other)",) if code else ()
    keep(folder, overlays, stamp, *EARNED, *failure, code=code)

    assert receipts.problems(folder) == []
    assert manifest.problems(folder, overlays) == [
        "99: its state is validated, and no receipt shows FIX_VALIDATED for double-fix"
    ]


def test_a_retired_pack_is_a_regression_guard_without_an_overlay(folder: Path, overlays: tuple[Overlay, ...]) -> None:
    write_notes(folder, "regression guard", "retired")
    keep(folder, overlays, None, "case double (overlay double-fix): cpu", "BUG_NOT_PRESENT: - (case double)")
    manifest.write(folder, manifest.synchronise(folder, ()))

    assert manifest.problems(folder, ()) == []


def test_an_overlay_pack_needs_an_overlay(folder: Path) -> None:
    manifest.write(folder, manifest.synchronise(folder, ()))

    assert manifest.problems(folder, ()) == ["99: its class is overlay, and no overlay has its number"]


def test_the_manifest_must_be_in_step_with_notes_declarations_and_folders(
    folder: Path, overlays: tuple[Overlay, ...]
) -> None:
    assert manifest.problems(folder, overlays) == []
    write_notes(folder, "held")
    (folder / "98-new").mkdir()
    (folder / "98-new" / "README.md").write_text("# 98 new\n\n## Class\nheld\n\n## Lifecycle state\ndraft\n")

    wrong = manifest.problems(folder, (Upstream("made_target", Path()).overlay(threads=()),))

    assert wrong == [
        "98: not in the manifest",
        "99: class is not as the notes and declarations have it",
        "99: threads is not as the notes and declarations have it",
    ]


def test_synchronising_keeps_receipts_and_dates(folder: Path, overlays: tuple[Overlay, ...]) -> None:
    data = manifest.read(folder)
    data["packs"][0]["threads"][0]["checked"] = "2026-11-21"
    manifest.write(folder, data)

    assert manifest.synchronise(folder, overlays) == data


def write_facts(folder: Path, upstream: str = "new", priority: str = "crash", more: str = "") -> None:
    text = f'repository = "made/up"\nupstream = "{upstream}"\npriority = "{priority}"\nfiles = ["layers.py"]\n{more}'
    (folder / "99-double" / "pack.toml").write_text(text)


def test_the_manifest_has_facts_of_pack_toml_and_of_declarations(folder: Path, overlays: tuple[Overlay, ...]) -> None:
    target = '[[targets]]\ndistribution = "made"\nmodule = "made.other"\nsymbol = "x"\n'
    threads = "".join(
        f'[[threads]]\nrepository = "made/up"\nnumber = {number}\nstate = "merged"\n' for number in (1, 2)
    )
    write_facts(folder, more=target + threads)

    (entry,) = manifest.synchronise(folder, overlays)["packs"]

    facts = ("repository", "upstream", "priority", "files")
    assert [entry[name] for name in facts] == ["made/up", "new", "crash", ["layers.py"]]
    assert [each["module"] for each in entry["targets"]] == ["made_target.layers", "made.other"]
    assert [(each["number"], each["state"]) for each in entry["threads"]] == [(1, "open"), (2, "merged")]
    assert manifest.problems(folder, overlays) == [
        f"99: {name} is not as the notes and declarations have it" for name in (*facts, "targets", "threads")
    ]


def test_a_manifest_without_facts_of_pack_toml_is_read_and_brought_in_step(
    folder: Path, overlays: tuple[Overlay, ...]
) -> None:
    data = manifest.read(folder)
    for name in ("repository", "upstream", "priority", "files"):
        del data["packs"][0][name]
    manifest.write(folder, data)

    assert "99: repository is not as the notes and declarations have it" in manifest.problems(folder, overlays)
    manifest.write(folder, manifest.synchronise(folder, overlays))
    assert manifest.problems(folder, overlays) == receipts.problems(folder) == []


def test_a_pack_keeps_targets_and_threads_of_its_retired_overlay(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = Target("made", "made.layers", "double")
    gone = RetiredOverlay(
        id="double-fix",
        pack=99,
        date="2026-11-21",
        distribution="made",
        version="2.0",
        why="upstream doubles",
        targets=(target,),
        threads=(Thread("made/up", 1, "merged"),),
    )
    monkeypatch.setattr(retired, "read", lambda: (gone, gone._replace(pack=98)))

    (entry,) = manifest.synchronise(folder, ())["packs"]

    assert entry["targets"] == [target._asdict()]
    assert [each["state"] for each in entry["threads"]] == ["merged"]
    assert entry["overlays"] == []


def test_a_thread_has_the_date_of_its_saved_answer_or_else_the_date_in_the_manifest(
    folder: Path, overlays: tuple[Overlay, ...]
) -> None:
    data = manifest.read(folder)
    data["packs"][0]["threads"][0]["checked"] = "2026-05-28"
    manifest.write(folder, data)
    answer = {"repository": "made/up", "number": 2, "checked": "2026-11-20"}
    checked = []
    for number in (2, 1):
        (folder / "threads.json").write_text(json.dumps({"schema": 1, "threads": [{**answer, "number": number}]}))
        checked.append(manifest.synchronise(folder, overlays)["packs"][0]["threads"][0]["checked"])

    assert checked == ["2026-05-28", "2026-11-20"]


@pytest.mark.parametrize("text", ["{", "[]", '{"threads": [{"number": 1}]}'])
def test_malformed_saved_answers_are_refused(folder: Path, overlays: tuple[Overlay, ...], text: str) -> None:
    (folder / "threads.json").write_text(text)

    with pytest.raises(ManifestError, match=r"threads\.json is not in the format of `megacpp-overlays sweep`"):
        manifest.synchronise(folder, overlays)


@pytest.mark.parametrize(
    ("upstream", "priority", "says"),
    [
        ("new", "crash", []),
        ("overlap", "piggyback", []),
        ("fixed", "crash", ["upstream has it fixed: it becomes a regression guard or stays local"]),
        ("declined", "crash", ["upstream has it declined: it becomes a regression guard or stays local"]),
        ("new", "none", ["its priority is none: that is never filed"]),
    ],
)
def test_a_ready_pack_is_neither_fixed_nor_declined_upstream_and_has_a_priority(
    folder: Path, overlays: tuple[Overlay, ...], upstream: str, priority: str, says: list[str]
) -> None:
    write_notes(folder, "overlay", "ready")
    write_facts(folder, upstream, priority)
    answer = {"repository": "made/up", "number": 1, "checked": "2026-11-20"}
    (folder / "threads.json").write_text(json.dumps({"schema": 1, "threads": [answer]}))
    manifest.write(folder, manifest.synchronise(folder, overlays))

    assert [text.partition("ready, and ")[2] for text in manifest.problems(folder, overlays)] == says


def test_a_pack_without_a_reproducer_can_only_be_a_draft(folder: Path, overlays: tuple[Overlay, ...]) -> None:
    shutil.rmtree(folder / "99-double" / "receipts")
    (folder / "99-double" / "reproduce.py").unlink()
    (folder / manifest.NAME).unlink()
    claims = {}
    for state in ("draft", "reproduced"):
        write_notes(folder, "fork", state)
        manifest.write(folder, manifest.synchronise(folder, overlays))
        claims[state] = manifest.problems(folder, overlays)

    assert claims == {
        "draft": [],
        "reproduced": ["99: its state is reproduced, and no receipt shows BUG_REPRODUCED for double-fix"],
    }
    assert receipts.current_of(folder, manifest.read(folder)["packs"]) == (0, 0)


def test_a_regression_guard_may_be_a_draft(folder: Path) -> None:
    write_notes(folder, "regression guard", "draft")
    manifest.write(folder, manifest.synchronise(folder, ()))

    assert manifest.problems(folder, ()) == []


def test_notes_with_an_unknown_class_are_refused(folder: Path, overlays: tuple[Overlay, ...]) -> None:
    (folder / "99-double" / "README.md").write_text(
        "# Pack 99: doubles\n\nClass: wonderful\n\nLifecycle state: draft\n"
    )

    with pytest.raises(ManifestError, match=r"99-double/README\.md does not say its class"):
        manifest.synchronise(folder, overlays)


# Receipts from another machine


def test_receipts_are_adopted_once(folder: Path, overlays: tuple[Overlay, ...], tmp_path: Path) -> None:
    log = keep(tmp_path / "elsewhere", overlays, stamp_of(GPU)) if link_notes(folder, tmp_path / "elsewhere") else ""

    assert receipts.adopt(tmp_path / "elsewhere", folder) == [log]
    assert receipts.adopt(tmp_path / "elsewhere", folder) == []
    assert receipts.problems(folder) == []
    assert len(manifest.read(folder)["packs"][0]["receipts"]) == 2


def link_notes(folder: Path, elsewhere: Path) -> bool:
    """Copy the notes of the pack to another folder of packs; return True."""
    (elsewhere / "99-double").mkdir(parents=True)
    shutil.copy(folder / "99-double" / "README.md", elsewhere / "99-double")
    return True


@pytest.mark.parametrize("how", ["log changed", "claim of another overlay"])
def test_nothing_is_adopted_when_one_receipt_does_not_hold(
    folder: Path, overlays: tuple[Overlay, ...], tmp_path: Path, how: str
) -> None:
    elsewhere = tmp_path / "elsewhere"
    link_notes(folder, elsewhere)
    keep(elsewhere, overlays, stamp_of(GPU))
    data = manifest.read(elsewhere)
    TAMPERING[how][0](elsewhere, only_receipt(data))
    manifest.write(elsewhere, data)
    before = (folder / manifest.NAME).read_text()

    with pytest.raises(ManifestError, match="these receipts do not hold"):
        receipts.adopt(elsewhere, folder)

    assert (folder / manifest.NAME).read_text() == before


def test_receipts_of_an_unknown_pack_are_refused(folder: Path, overlays: tuple[Overlay, ...], tmp_path: Path) -> None:
    (tmp_path / "here").mkdir()

    with pytest.raises(ManifestError, match="there is no pack 99-double here"):
        receipts.adopt(folder, tmp_path / "here")


def test_receipts_of_another_reproducer_are_not_adopted(
    folder: Path, overlays: tuple[Overlay, ...], tmp_path: Path
) -> None:
    link_notes(folder, tmp_path / "elsewhere")
    keep(tmp_path / "elsewhere", overlays, stamp_of(GPU, reproducer="0" * 12))

    with pytest.raises(ManifestError, match=r"of another reproduce\.py than the one here: 99-double/receipts/"):
        receipts.adopt(tmp_path / "elsewhere", folder)


# Folders in which a receipt can be kept


def test_a_folder_that_has_the_pack_with_another_reproducer_is_refused(
    folder: Path, overlays: tuple[Overlay, ...], tmp_path: Path
) -> None:
    shutil.copytree(folder, tmp_path / "elsewhere")
    (tmp_path / "elsewhere" / "99-double" / "reproduce.py").write_text("CASES = (1,)\n")

    with pytest.raises(ManifestError, match=r"has pack 99 with another reproduce\.py"):
        receipts.prepare(tmp_path / "elsewhere", inventory.find(folder, 99), overlays)


@pytest.mark.parametrize("name", ["file", "file/below", "/proc/nowhere"])
def test_a_folder_that_cannot_be_written_is_refused_before_anything_runs(
    folder: Path, overlays: tuple[Overlay, ...], tmp_path: Path, name: str
) -> None:
    (tmp_path / "file").touch()

    with pytest.raises(ManifestError, match=f"{name} cannot be written: "):
        receipts.prepare(tmp_path / name, inventory.find(folder, 99), overlays)


def test_no_receipt_is_lost_when_runs_end_at_the_same_time(folder: Path, overlays: tuple[Overlay, ...]) -> None:
    pack = inventory.find(folder, 99)
    entries = [receipts.prepare(folder, pack, overlays) for _ in range(8)]  # all are prepared before any is kept
    start = threading.Barrier(len(entries))

    def keep_one(number: int) -> None:
        start.wait()
        text = log_of(stamp_of(), f"    | {number}", *EARNED)
        receipts.keep(folder, entries[number], pack, stamp_of(), text, COMMAND)

    with concurrent.futures.ThreadPoolExecutor(len(entries)) as pool:
        list(pool.map(keep_one, range(len(entries))))

    assert receipts.problems(folder) == []
    assert len(manifest.read(folder)["packs"][0]["receipts"]) == 1 + len(entries)
    assert not list(folder.glob(".manifest*"))


def test_text_that_cannot_be_encoded_is_kept_escaped(folder: Path, overlays: tuple[Overlay, ...]) -> None:
    log = keep(folder, overlays, None, *EARNED, "    | a lone \udc80")

    assert receipts.problems(folder) == []
    assert "a lone \\udc80\n" in (folder / log).read_text()


def test_a_receipt_of_a_source_tree_holds(folder: Path, overlays: tuple[Overlay, ...]) -> None:
    keep(folder, overlays, stamp_of(tree={"made": "1" * 12, "commit": "2" * 12}))

    assert receipts.problems(folder) == []


# The command


def test_the_command_checks_and_names_the_errors(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, overlays: tuple[Overlay, ...]
) -> None:
    monkeypatch.setattr("megacpp_overlays.cli.receipts._overlays", lambda: overlays)

    assert cli.main(["receipts", "--check", "--packs", str(folder)]) == 0
    assert capsys.readouterr().out == "1 receipts hold; 1 of them are of the reproducers as they are now\n"

    next(folder.glob("99-double/receipts/*")).write_text("")
    assert cli.main(["receipts", "--check", "--packs", str(folder)]) == ExitCode.FOUND
    assert "the log was changed" in capsys.readouterr().err


def test_the_command_synchronises_and_adopts(
    folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    overlays: tuple[Overlay, ...],
) -> None:
    monkeypatch.setattr("megacpp_overlays.cli.receipts._overlays", lambda: overlays)
    shutil.copytree(folder, tmp_path / "elsewhere")
    shutil.rmtree(folder / "99-double" / "receipts")
    (folder / manifest.NAME).unlink()

    assert (
        cli.main(["receipts", "--adopt", str(tmp_path / "elsewhere"), "--packs", str(folder)]) == ExitCode.NOT_CHECKED
    )
    assert "run receipts --sync first" in capsys.readouterr().err
    assert cli.main(["receipts", "--sync", "--packs", str(folder)]) == 0
    assert cli.main(["receipts", "--adopt", str(tmp_path / "elsewhere"), "--packs", str(folder)]) == 0
    assert "adopted: 99-double/receipts/" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [[], ["--check", "--sync"]])
def test_wrong_usage_exits_2(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["receipts", *arguments])

    assert caught.value.code == 2


# The schema


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=300, deadline=None)
@given(choice=st.data())
def test_our_schema_check_agrees_with_jsonschema(folder: Path, choice: st.DataObject) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    data = manifest.read(folder)
    only_receipt(data).update(tree={"made": "1"}, host=copy.deepcopy(GPU))
    for _ in range(choice.draw(st.integers(0, 2))):
        place = choice.draw(st.sampled_from(list(leaves(data))))
        set_at(data, place, choice.draw(OTHER))
    for level in (data, *data["packs"][:1]) if isinstance(data["packs"], list) else (data,):
        if isinstance(level, dict) and choice.draw(st.booleans()):
            level["unknown"] = 1

    agrees = jsonschema.Draft202012Validator(RULES).is_valid(data)

    assert (not schema.problems(data, RULES)) == agrees, schema.problems(data, RULES)


def test_an_unknown_keyword_of_a_schema_is_an_error() -> None:
    with pytest.raises(ValueError, match="maxLength, which is not known"):
        schema.problems("text", {"maxLength": 1})
