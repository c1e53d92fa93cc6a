"""Statement of a process: its decisions, its settings, and one hash for the files that it may execute."""

from __future__ import annotations

import functools
import json
import re
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from launchers import environment, launch, write
from made_up import BROKEN_TEXT, Upstream
from places import ROOT, SUPPORT

from megacpp_overlays.loader import statement
from megacpp_overlays.loader.session import Session
from megacpp_overlays.loader.settings import Mode
from megacpp_overlays.source.trees import InstalledTree
from megacpp_overlays.variables import LINEAR_CE_LOGITS, SETTINGS, Setting


def say(session: Session) -> statement.Statement:
    return statement.of(session.audit(), InstalledTree())


def test_a_target_that_waits_is_read_from_its_file(session: Callable[..., Session], upstream: Upstream) -> None:
    made = session(upstream.overlay())
    made.arm()
    waiting = say(made)
    upstream.load()
    loaded = say(made)

    (before,), (after,) = waiting["decisions"], loaded["decisions"]
    assert (before["decision"], after["decision"]) == ("armed", "active")
    assert before["source_sha256"] == after["source_sha256"]
    assert before["version"] == after["version"] == "unversioned"


def test_an_edit_of_a_file_that_was_not_imported_changes_the_digest(
    session: Callable[..., Session], upstream: Upstream
) -> None:
    made = session(upstream.overlay())
    made.arm()
    before = statement.digest(say(made))
    upstream.write(BROKEN_TEXT + "# edited\n")

    assert statement.digest(say(made)) != before
    assert f"{upstream.name}.layers" not in sys.modules


def test_a_target_that_cannot_be_read_has_no_hash(session: Callable[..., Session], upstream: Upstream) -> None:
    made = session(upstream.overlay())
    made.arm()
    (upstream.folder / upstream.name / "layers.py").write_bytes(b"# coding: nonsense\n")

    (decision,) = say(made)["decisions"]

    assert (decision["decision"], decision["source_sha256"]) == ("conflict", None)


def test_the_statement_has_hashes_of_sources_in_mode_off(session: Callable[..., Session], upstream: Upstream) -> None:
    made = session(upstream.overlay(), mode=Mode.OFF)
    made.arm()

    stated = say(made)

    assert stated["mode"] == "off"
    assert stated["decisions"][0]["source_sha256"] is not None


def test_an_overlay_off_by_default_is_off_until_it_is_switched_on(
    session: Callable[..., Session], upstream: Upstream
) -> None:
    overlay = upstream.overlay(opt_in=True)
    usual, asked_for = session(overlay), session(overlay, enabled=frozenset({overlay.id}))

    assert say(usual)["off"] == [overlay.id]
    assert say(asked_for)["off"] == []


def test_a_statement_is_plain_data_without_paths(session: Callable[..., Session], upstream: Upstream) -> None:
    made = session(upstream.overlay())
    made.arm()
    upstream.load()

    stated = say(made)

    assert json.loads(json.dumps(stated)) == stated
    stated["decisions"][0].pop("reason")
    assert str(upstream.folder) not in json.dumps(stated)


def test_the_files_of_a_plugin_are_part_of_the_statement(session: Callable[..., Session], upstream: Upstream) -> None:
    made = session(upstream.overlay())  # declared in made_up.py
    made.arm()

    (decision,) = say(made)["decisions"]

    assert len(decision["overlay_sha256"]) == 64


PLUGIN = """
import importlib, json
from dataclasses import replace
from pathlib import Path
from made_up import Upstream
from megacpp_overlays.loader.session import Session
from megacpp_overlays.loader.settings import Settings
from megacpp_overlays.model import Replacement
from megacpp_overlays.loader import statement
from megacpp_overlays.source.trees import InstalledTree

makes = [importlib.import_module(f"plugin_{letter}.probes").make for letter in "abcdefgh"]
parts = tuple(Replacement(f"f{number}", make) for number, make in enumerate(makes))
overlay = replace(Upstream("upstream_of_plugins", Path()).overlay(), replacements={"off-by-one": parts})
session = Session((overlay,), Settings())
session.arm()
(decision,) = statement.of(session.audit(), InstalledTree())["decisions"]
print(decision["overlay_sha256"])
"""


def test_files_of_one_name_in_two_packages_of_a_plugin_have_one_order_in_every_process(
    run_python: Callable[..., Any], tmp_path: Path
) -> None:
    for letter in "abcdefgh":
        folder = tmp_path / f"plugin_{letter}" / "probes"
        folder.mkdir(parents=True)
        (folder / "__init__.py").write_text(f"def make(original, module):\n    return {letter!r}\n")

    stated = {run_python(PLUGIN, ROOT, SUPPORT, tmp_path, PYTHONHASHSEED=seed).stdout for seed in "123"}

    assert len(stated) == 1
    assert len(stated.pop().strip()) == 64


def test_a_replacement_that_is_bound_to_arguments_counts_with_the_file_of_its_function(
    session: Callable[..., Session], upstream: Upstream
) -> None:
    overlay = upstream.overlay()
    bound = {
        shape: tuple(each._replace(make=functools.partial(each.make)) for each in replacements)
        for shape, replacements in overlay.replacements.items()
    }

    said = [say(session(each)) for each in (overlay, replace(overlay, replacements=bound))]

    assert said[0] == said[1]


# The hash of this package


PACKAGE = ROOT / "megacpp_overlays"


def test_every_file_and_folder_with_python_is_named_as_one_that_runs_or_as_one_that_does_not() -> None:
    """A new folder must be named in one of the two lists; its files and subfolders are included."""
    there = {each.name for each in PACKAGE.iterdir() if each.suffix == ".py" or any(each.rglob("*.py"))}

    assert there == {*statement.RUN, *statement.KERNELS, *statement.NOT_RUN}
    assert not {*statement.RUN, *statement.KERNELS} & {*statement.NOT_RUN}


def test_code_of_a_run_imports_no_code_outside_of_the_hash() -> None:
    files = [
        path
        for name in (*statement.RUN, *statement.KERNELS)
        for path in [PACKAGE / name, *(PACKAGE / name).rglob("*.py")]
    ]
    names = "|".join(name.removesuffix(".py") for name in statement.NOT_RUN)
    imports = re.compile(rf"(from|import) megacpp_overlays(\.| import )({names})\b")

    assert not [path for path in files if path.is_file() and imports.search(path.read_text())]


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A copy of this package with links followed: the files of a wheel, and more."""
    folder = tmp_path / "megacpp_overlays"
    shutil.copytree(PACKAGE, folder, ignore=shutil.ignore_patterns("__pycache__", "receipts"))
    return folder


def test_a_copy_has_the_hash_of_the_checkout(copy: Path) -> None:
    assert statement.package_sha256(copy) == statement.package_sha256() == statement.package_sha256(PACKAGE)


def edit(path: Path) -> None:
    path.write_text(f"{path.read_text()}# edited\n")


@pytest.mark.parametrize(
    ("names", "folder"), [(statement.RUN, "processes/startup"), (statement.KERNELS, "kernels/linear_cross_entropy")]
)
def test_an_edit_changes_the_hash_in_every_folder_that_a_run_can_execute(
    copy: Path, names: tuple[str, ...], folder: str
) -> None:
    others = statement.KERNELS if names is statement.RUN else statement.RUN
    of_others = statement.package_sha256(copy, others)
    tops = [copy / name for name in names]
    folders = {
        path.parent: path for top in tops for path in [*top.rglob("*.py"), *copy.glob(top.name)] if path.is_file()
    }
    seen = [statement.package_sha256(copy, names)]

    for path in folders.values():
        edit(path)
        seen.append(statement.package_sha256(copy, names))

    assert len({*seen}) == len(folders) + 1
    assert copy / folder in folders
    assert statement.package_sha256(copy, others) == of_others


def test_an_edit_of_a_file_that_no_run_executes_changes_nothing(copy: Path) -> None:
    before = statement.package_sha256(copy)

    for path in [path for name in statement.NOT_RUN for path in [*(copy / name).rglob("*.py"), *copy.glob(name)]]:
        if path.is_file():
            edit(path)

    assert statement.package_sha256(copy) == before


@pytest.mark.parametrize("name", ["loader/retired.json", "overlays/scale_pad.py", "runtime/new/room/one.py"])
def test_data_and_files_that_are_added_count(copy: Path, name: str) -> None:
    before = statement.package_sha256(copy)
    (copy / name).parent.mkdir(parents=True, exist_ok=True)
    (copy / name).write_text("[ ]")

    assert statement.package_sha256(copy) != before


def test_a_file_that_moves_between_rooms_counts(copy: Path) -> None:
    before = statement.package_sha256(copy)
    (copy / "runtime" / "gpus.py").rename(copy / "source" / "gpus.py")

    assert statement.package_sha256(copy) != before


# The digest


def test_a_long_reason_is_shortened_and_two_of_them_still_differ(
    session: Callable[..., Session], upstream: Upstream
) -> None:
    made = session(upstream.overlay())
    made.arm()
    upstream.load()
    audit = made.audit()
    (record,) = audit.records

    def said(reason: str, around: str) -> statement.Statement:
        changed = replace(audit, records=(replace(record, reason=reason, around=(around,)),))
        return statement.of(changed, InstalledTree())

    short, long, other = said("short", "short"), said("r" * 75_000, "w" * 75_000), said("s" * 9000, "w" * 75_001)

    assert (short["decisions"][0]["reason"], short["decisions"][0]["around"]) == ("short", ["short"])
    assert len(json.dumps(long)) < len(json.dumps(short)) + 2 * 1100
    assert long["decisions"][0]["reason"].startswith("r" * 1000 + " ... (75000 characters, SHA-256 ")
    assert statement.digest(long) != statement.digest(other)


def test_the_words_of_a_reason_do_not_count(session: Callable[..., Session], upstream: Upstream) -> None:
    made = session(upstream.overlay())
    made.arm()
    stated = say(made)
    (decision,) = stated["decisions"]

    assert statement.digest({**stated, "decisions": [{**decision, "reason": "other"}]}) == statement.digest(stated)
    assert statement.digest({**stated, "decisions": [{**decision, "verdict": "other"}]}) != statement.digest(stated)


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting.name)
def test_a_setting_that_is_compared_is_in_the_statement(
    session: Callable[..., Session], upstream: Upstream, setting: Setting
) -> None:
    made = session(upstream.overlay())
    made.arm()

    stated = say(made)

    assert (setting.name in stated["settings"]) is (setting.compared_in == "settings")
    assert not setting.compared_in or setting.compared_in in stated


def test_a_setting_of_a_kernel_changes_the_digest(session: Callable[..., Session], upstream: Upstream) -> None:
    usual, other = session(upstream.overlay()), session(upstream.overlay(), of_kernels={LINEAR_CE_LOGITS.name: "keep"})

    assert statement.digest(say(usual)) != statement.digest(say(other))


# --- the fingerprint ---

PRINTS = """
import importlib, os, megacpp_overlays
importlib.import_module(os.environ["NAME"] + ".layers")
print(megacpp_overlays.audit().fingerprint)
"""


def test_the_fingerprint_of_an_audit_is_the_digest_that_ranks_compare(
    session: Callable[..., Session], upstream: Upstream
) -> None:
    made = session(upstream.overlay())
    made.arm()
    upstream.load()
    audit = made.audit()

    assert audit.fingerprint == statement.digest(statement.of(audit, InstalledTree()))
    assert audit.as_dict()["fingerprint"] == audit.fingerprint
    assert len(audit.fingerprint) == 16


def test_every_print_of_a_fingerprint_tells_apart_statements_that_ranks_tell_apart(
    upstream: Upstream, copy: Path
) -> None:
    elsewhere = upstream.folder / "elsewhere"
    elsewhere.mkdir()
    edit(copy.rename(elsewhere / copy.name) / "kernels" / "measured.py")
    env = environment(upstream)
    edited = {**env, "PYTHONPATH": f"{elsewhere}:{env['PYTHONPATH']}"}
    settings = {**env, LINEAR_CE_LOGITS.name: "keep"}
    told_otherwise = {**env, "MEGACPP_OVERLAYS_LOG": "json"}

    printed = []
    for variables in (env, edited, settings, told_otherwise):
        done = launch(write(upstream, PRINTS), env=variables)
        assert done.returncode == 0, done.stderr
        in_the_log = re.findall(r"(?:\(fingerprint |\"fingerprint\": \")(\w+)", done.stderr)
        printed.append((done.stdout.strip(), *in_the_log))

    assert all(printed[0] != other for other in printed[1:3])
    assert printed[3] == printed[0]
    assert all(in_an_audit == in_the_log for in_an_audit, in_the_log in printed)
    assert len({in_an_audit for in_an_audit, _ in printed}) == 3
