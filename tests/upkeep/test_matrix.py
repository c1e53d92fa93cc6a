"""`megacpp-overlays matrix`: run every probe over every release of an index, a cache or trees, and keep the findings."""

from __future__ import annotations

import copy
import hashlib
import json
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from index_server import OTHER, PACKAGE, Index, module, sdist, serving, wheel
from made_up import BROKEN_TEXT, FIXED_TEXT, Upstream, gate_of
from repositories import commit_all, git, write_files

from megacpp_overlays import cli
from megacpp_overlays.cli.codes import ExitCode
from megacpp_overlays.errors import UpkeepError
from megacpp_overlays.loader import registry
from megacpp_overlays.loader import session as sessions
from megacpp_overlays.loader.session import Session
from megacpp_overlays.model import Evidence, Finding, Gate, Overlay, Proof, Target, Text, Verdict
from megacpp_overlays.source.file_trees import DirectoryTree
from megacpp_overlays.source.trees import SourceTree
from megacpp_overlays.upkeep.matrix import matrix, matrix_file, matrix_page, matrix_text
from megacpp_overlays.upkeep.matrix.matrix import Cell, PartFinding, Row, Table

ODD_TEXT = BROKEN_TEXT.replace("return x + x + 1", "return 2 * x + 1")
SessionMaker = Callable[..., Session]
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def index(monkeypatch: pytest.MonkeyPatch) -> Iterator[Index]:
    with serving() as made:
        monkeypatch.setenv("PIP_INDEX_URL", made.endpoint)
        for name in ("UV_DEFAULT_INDEX", "UV_INDEX_URL"):
            monkeypatch.delenv(name, raising=False)
        yield made


@pytest.fixture
def made(tmp_path: Path) -> Upstream:
    return Upstream(PACKAGE, tmp_path)


@pytest.fixture
def declared(made: Upstream, session: SessionMaker, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Declare overlays instead of the real ones."""

    def declare(*overlays: Overlay) -> None:
        monkeypatch.setattr(sessions, "current", lambda: session(*overlays))
        monkeypatch.setattr(registry, "load", lambda *_: overlays)

    declare(made.overlay())
    return declare


@pytest.fixture
def run(tmp_path: Path, declared: object, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run the command with a cache of its own; return its exit code, stdout and stderr."""

    def call(*arguments: str | Path) -> tuple[int, str, str]:
        code = cli.main(["matrix", "--cache", str(tmp_path / "cache"), *map(str, arguments)])
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    return call


def publish_history(index: Index) -> None:
    """Four releases: without the code, broken twice, repaired; one of them as source alone, one withdrawn."""
    other = {f"{PACKAGE}/__init__.py": "", f"{PACKAGE}/other.py": ""}
    index.publish(f"{PACKAGE}-0.9.0-py3-none-any.whl", wheel(other), "2026-01-01T00:00:00Z")
    index.publish(f"{PACKAGE}-0.10.0.tar.gz", sdist(f"{PACKAGE}-0.10.0", module(BROKEN_TEXT)), "2026-02-01T00:00:00Z")
    index.publish(f"{PACKAGE}-0.10.1-py3-none-any.whl", wheel(module(BROKEN_TEXT)), "2026-02-02T00:00:00Z")
    index.yanked[f"{PACKAGE}-0.10.1-py3-none-any.whl"] = "wrong version"
    index.publish(f"{PACKAGE}-1.0.0-py3-none-any.whl", wheel(module(FIXED_TEXT)), "2026-03-01T00:00:00Z")
    index.publish(f"{PACKAGE}-1.1.0.dev1-py3-none-any.whl", wheel(module(ODD_TEXT)), "2026-04-01T00:00:00Z")


def words(text: str) -> list[list[str]]:
    return [line.split() for line in text.splitlines()]


# --- the table ---


def test_the_table_has_every_final_release_with_its_date_and_verdict_and_marks_flips(index: Index, run: Run) -> None:
    publish_history(index)

    code, out, _ = run()

    assert code == 0
    rows = words(out)
    assert ["0.9.0", "2026-01-01", "-"] in rows
    assert ["0.10.0", "2026-02-01", "BROKEN", "*"] in rows
    assert ["0.10.1", "2026-02-02", "BROKEN", "yanked:", "wrong", "version"] in rows
    assert ["1.0.0", "2026-03-01", "FIXED", "*"] in rows
    assert "ABSENT, BROKEN since 0.10.0 (2026-02-01), FIXED since 1.0.0 (2026-03-01)" in out
    assert "dev1" not in out
    assert [row[0] for row in rows if row[1:2] and row[1].startswith("2026-")] == ["0.9.0", "0.10.0", "0.10.1", "1.0.0"]


def test_pre_adds_pre_releases_and_development_builds(index: Index, run: Run) -> None:
    publish_history(index)

    _, out, _ = run("--pre")

    assert ["1.1.0.dev1", "2026-04-01", "UNRECOGNISED", "*"] in words(out)


def test_evidence_names_the_seen_code_and_its_place_once_for_releases_that_are_alike(index: Index, run: Run) -> None:
    publish_history(index)

    _, out, _ = run("--evidence")

    assert "0.10.0 to 0.10.1  BROKEN\n      off-by-one: return x + x + 1 (layers.py:7)" in out
    assert "1.0.0  FIXED\n      return x + x (layers.py:7)" in out


def test_json_has_all_of_it_and_no_address(index: Index, run: Run) -> None:
    publish_history(index)

    _, out, _ = run("--json")

    data = json.loads(out)
    (found,) = data["distributions"]
    assert data["index"] == "the configured index"
    assert [(each["release"], each["before"], each["after"], each["date"]) for each in found["flips"]] == [
        ("0.10.0", "ABSENT", "BROKEN", "2026-02-01"),
        ("1.0.0", "BROKEN", "FIXED", "2026-03-01"),
    ]
    row = found["releases"][1]
    assert row["source"] == f"{PACKAGE}-0.10.0.tar.gz"
    assert row["overlays"]["double-fix"]["parts"][0]["evidence"] == [
        {"seen": "return x + x + 1", "file": f"{PACKAGE}/layers.py", "line": 7}
    ]
    assert index.address not in out


def test_a_target_is_a_distribution_or_an_overlay(
    index: Index, run: Run, made: Upstream, declared: Callable[..., None]
) -> None:
    publish_history(index)
    other = made.overlay(id="halve-fix", pack=98, target=Target(PACKAGE, f"{PACKAGE}.other", "halve"))
    declared(made.overlay(), other)

    assert "halve-fix" in run(PACKAGE)[1]
    assert "halve-fix" not in run("double-fix")[1]


def test_an_unknown_target_is_an_error_with_the_nearest_name(run: Run) -> None:
    code, _, err = run("--offline", "double-fx")

    assert code == ExitCode.NOT_CHECKED
    assert f"double-fx: no overlay has this id, and none is about it; did you mean double-fix? known: {PACKAGE}" in err


# --- gates ---


def answer_of(tree: SourceTree) -> Finding:
    """BROKEN where `double` is as in the broken release and the other package does not work, FIXED where that works."""
    source, other = tree.module(f"{PACKAGE}.layers"), tree.module(OTHER)
    if source is None or other is None:
        missing = PACKAGE if source is None else OTHER
        return Finding(verdict=Verdict.ABSENT, shape=None, evidence=(Evidence(seen=f"there is no {missing}"),))
    seen = (Evidence(seen=f"{other.text} beside {'x + 1' if 'x + x + 1' in source.text else 'x'}", file=other.path),)
    if other.text == "WORKS = True":
        return Finding(
            verdict=Verdict.FIXED, shape=None, evidence=seen, repair=(Text(other.path, ""),), proof=Proof.READ
        )
    return Finding(verdict=Verdict.BROKEN, shape="no-work", evidence=seen)


@pytest.fixture
def combination(index: Index, made: Upstream, declared: Callable[..., None]) -> Gate:
    """Publish two distributions; declare an overlay for one, and a gate about both that the other one decides."""
    publish_history(index)
    for version, text in (("0.1", "WORKS = True"), ("0.2", "WORKS = False"), ("0.3", "WORKS = True")):
        content = wheel({f"{OTHER}/__init__.py": text})
        index.publish(f"{OTHER}-{version}-py3-none-any.whl", content, f"2026-05-0{version[-1]}T00:00:00Z")
    index.yanked[f"{OTHER}-0.3-py3-none-any.whl"] = ""
    gate = gate_of(made, beside=(OTHER,), decided_by=OTHER, probe=answer_of)
    declared(made.overlay(), gate)
    return gate


def test_a_gate_about_two_distributions_reads_every_release_of_the_one_that_decides(
    combination: Gate, run: Run
) -> None:
    _, out, _ = run("--evidence")

    rows = words(out)
    assert ["0.1", "2026-05-01", "FIXED"] in rows
    assert ["0.2", "2026-05-02", "BROKEN", "*"] in rows, "a gate leaves nothing alone"
    assert ["0.3", "2026-05-03", "FIXED", "*", "yanked"] in rows
    assert f"1  {combination.id}, a gate  98    beside {PACKAGE} 1.0.0: FIXED, BROKEN since 0.2" in out
    assert "no-work: WORKS = False beside x (__init__.py)" in out, "the newest release, which adds nothing"
    assert "double-fix" in out


def test_a_gate_is_found_by_its_id_and_by_either_distribution(combination: Gate, run: Run) -> None:
    assert combination.id in run(OTHER)[1]
    assert "double-fix" not in run(OTHER)[1]
    assert "double-fix" not in run(combination.id)[1]
    assert combination.id in run(PACKAGE)[1]


def test_a_newest_release_that_was_withdrawn_is_not_combined_with_others(
    combination: Gate, index: Index, run: Run
) -> None:
    index.yanked[f"{PACKAGE}-1.0.0-py3-none-any.whl"] = "broken"

    assert f"beside {PACKAGE} 0.10.0:" in run(combination.id)[1]


def test_the_release_that_others_are_combined_with_must_be_here(
    combination: Gate, index: Index, run: Run, tmp_path: Path
) -> None:
    run()
    next((tmp_path / "cache" / "files").glob(f"{PACKAGE}-1.0.0*")).unlink()

    code, _, err = run("--offline", combination.id)

    assert code == ExitCode.NOT_CHECKED
    assert f"{PACKAGE} 1.0.0, which releases of {OTHER} are read together with, is not in the cache" in err


def test_a_damaged_release_spoils_all_combinations_with_it_and_is_named(
    combination: Gate, index: Index, run: Run
) -> None:
    raw = wheel(module(FIXED_TEXT))
    index.publish(f"{PACKAGE}-1.0.0-py3-none-any.whl", raw.replace(b"return x + x\n", b"return y + x\n", 1))

    code, out, _ = run(combination.id)

    assert code == ExitCode.FOUND
    assert out.count(f"{PACKAGE}-1.0.0-py3-none-any.whl: cannot read {PACKAGE}/layers.py: BadZipFile") == 3


def test_a_tree_is_combined_with_the_same_release(combination: Gate, run: Run, tmp_path: Path) -> None:
    (tmp_path / "checkout" / OTHER).mkdir(parents=True)
    (tmp_path / "checkout" / OTHER / "__init__.py").write_text("WORKS = False")

    _, out, _ = run(combination.id, "--tree", tmp_path / "checkout")

    assert ["checkout", "no", "date", "BROKEN", OTHER] in [row[:5] for row in words(out)]


def test_a_kept_combination_is_checked_against_the_same_release(
    combination: Gate, index: Index, run: Run, tmp_path: Path
) -> None:
    assert run("--write", tmp_path / "kept")[0] == 0
    assert run("--offline", "--check", tmp_path / "kept")[0] == 0
    page = (tmp_path / "kept" / "matrix.html").read_text()
    assert f"gate, beside {PACKAGE} 1.0.0" in page
    assert "left alone</span></li>" not in page

    index.publish(f"{PACKAGE}-2.0.0-py3-none-any.whl", wheel(module(BROKEN_TEXT)))

    assert f"{PACKAGE} 2.0.0 (2026-01-02) came since" in run("--check", tmp_path / "kept")[1]
    run("--write", tmp_path / "kept")
    assert f"gate, beside {PACKAGE} 2.0.0" in (tmp_path / "kept" / "matrix.html").read_text()


def test_a_kept_matrix_without_the_other_distribution_of_a_gate_is_an_error(
    combination: Gate, run: Run, made: Upstream, declared: Callable[..., None], tmp_path: Path
) -> None:
    declared(combination)
    run("--write", tmp_path / "kept")

    code, _, err = run("--offline", "--check", tmp_path / "kept")

    assert code == ExitCode.NOT_CHECKED
    assert (
        f"{PACKAGE} is not in the kept matrix, and releases in it are read together with one of it; use --write" in err
    )


@pytest.mark.parametrize(
    "arguments", [["--write", "x", "--pre"], ["--check", "x", "double-fix"], ["--archives", "nope"]]
)
def test_wrong_usage_exits_2(run: Run, arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        run(*arguments)

    assert caught.value.code == 2


# --- errors ---


WHEEL = f"{PACKAGE}-2.0.0-py3-none-any.whl"
WHOLE = wheel({**module(BROKEN_TEXT), "more.py": ""})
UNREADABLE = {
    "of another kind": (f"{PACKAGE}-2.0.0.zip", WHOLE, "it has no wheel and no tar.gz with a SHA-256"),
    "with another hash": (WHEEL, WHOLE, "does not have the SHA-256 that the index lists"),
    "damaged": (
        WHEEL,
        WHOLE.replace(b"x + x + 1", b"x + x + 2"),
        f"{WHEEL}: cannot read {PACKAGE}/layers.py: BadZipFile",
    ),
}
"""Release files that cannot be read, each with the expected reason in the row."""


@pytest.mark.parametrize("how", UNREADABLE)
def test_a_release_that_cannot_be_read_is_a_hole_with_the_reason_and_such_a_matrix_is_not_kept(
    index: Index, run: Run, tmp_path: Path, how: str
) -> None:
    name, content, says = UNREADABLE[how]
    publish_history(index)
    index.publish(name, content)
    if how == "with another hash":
        index.served[name] = b"cut"

    code, out, _ = run()
    written, _, err = run("--write", tmp_path / "packs")

    [row] = [line for line in out.splitlines() if line.startswith("2.0.0 ")]
    assert code == 1
    assert "not read: " in row
    assert says in row
    assert "UNRECOGNISED" not in row
    assert "ABSENT, BROKEN since 0.10.0 (2026-02-01), FIXED since 1.0.0 (2026-03-01)" in out, "the others still count"
    assert written == ExitCode.NOT_CHECKED
    assert f"not every release can be read\n  {PACKAGE} 2.0.0: " in err
    assert not (tmp_path / "packs").exists()


def test_a_release_without_any_file_that_can_be_read_says_so(index: Index, run: Run) -> None:
    index.publish(f"{PACKAGE}-1.0.0-py3-none-any.whl", b"no archive at all")

    code, out, _ = run()

    assert code == 1
    assert "cannot open this archive: BadZipFile" in out
    assert "nothing could be read" in out


def test_a_wheel_without_the_package_gives_way_to_the_source_distribution(index: Index, run: Run) -> None:
    index.publish(f"{PACKAGE}-1.0.0-py3-none-any.whl", wheel({"elsewhere/__init__.py": ""}))
    index.publish(f"{PACKAGE}-1.0.0.tar.gz", sdist(f"{PACKAGE}-1.0.0", module(BROKEN_TEXT)))
    index.publish(f"{PACKAGE}-2.0.0-py3-none-any.whl", wheel({"elsewhere/__init__.py": ""}))

    code, out, _ = run()

    assert code == 0
    assert ["1.0.0", "2026-01-02", "BROKEN"] in words(out)
    assert ["2.0.0", "2026-01-02", "-", "*"] in words(out)


@pytest.mark.parametrize("how", ["cut", "gone", "offline"])
def test_where_that_source_distribution_cannot_be_read_the_wheel_says_nothing(
    index: Index, run: Run, tmp_path: Path, how: str
) -> None:
    source = f"{PACKAGE}-1.0.0.tar.gz"
    index.publish(f"{PACKAGE}-1.0.0-py3-none-any.whl", wheel({"elsewhere/__init__.py": ""}))
    index.publish(source, sdist(f"{PACKAGE}-1.0.0", module(BROKEN_TEXT)))
    if how == "cut":
        index.served[source] = b"cut"
    elif how == "gone":
        index.answer = lambda path: (404, "", b"") if path.endswith(source) else Index.answer(index, path)  # type: ignore[method-assign]
    else:
        run()
        (tmp_path / "cache" / "files" / source).unlink()

    offline = ["--offline"] if how == "offline" else []
    code, out, _ = run(*offline)
    written, _, err = run("--write", tmp_path / "packs", *offline)

    assert code == 1
    assert f"not read: {source}" in out
    assert written == ExitCode.NOT_CHECKED
    assert f"{PACKAGE} 1.0.0: {source}" in err


def test_without_upload_dates_the_date_is_when_it_was_built_and_says_so(index: Index, run: Run) -> None:
    index.speaks_json, index.has_project_json = False, False
    index.publish(f"{PACKAGE}-1.0.0-py3-none-any.whl", wheel(module(BROKEN_TEXT)), None)
    hidden = wheel(module(FIXED_TEXT), (1980, 1, 1, 0, 0, 0))
    index.publish(f"{PACKAGE}-2.0.0-py3-none-any.whl", hidden, None)

    _, out, _ = run()

    assert ["1.0.0", "2026-03-04", "built", "BROKEN"] in words(out)
    assert ["2.0.0", "no", "date", "FIXED", "*"] in words(out)


def test_a_probe_that_raises_has_recognised_nothing_and_hides_nothing(
    index: Index, run: Run, made: Upstream, declared: Callable[..., None]
) -> None:
    def fails(_: SourceTree) -> Finding:
        raise RecursionError("too deep")

    publish_history(index)
    declared(made.overlay(probe=fails), made.overlay(id="halve-fix", pack=98))

    code, out, _ = run("--evidence")

    assert code == 0
    assert ["1.0.0", "2026-03-01", "UNRECOGNISED", "FIXED", "*"] in words(out)
    assert "its code is nested too deeply for the probe to read it" in out


def test_old_source_that_a_newer_python_warns_about_is_no_problem(index: Index, run: Run) -> None:
    index.publish(f"{PACKAGE}-1.0.0-py3-none-any.whl", wheel(module(BROKEN_TEXT + "\nOLD = '\\d'\n")))

    assert ["1.0.0", "2026-01-02", "BROKEN"] in words(run()[1])


# --- without a network ---


def test_after_one_run_offline_gives_the_same_table_without_requests(index: Index, run: Run) -> None:
    publish_history(index)
    _, before, _ = run()
    index.asked.clear()

    code, out, _ = run("--offline")

    assert (code, out, index.asked) == (0, before, [])


def test_without_an_answer_the_cache_is_used_and_that_is_said(index: Index, run: Run) -> None:
    publish_history(index)
    _, before, _ = run()
    index.status = 503

    code, out, err = run()

    assert (code, out) == (0, before)
    assert "the configured index answers with an error (HTTP 503)" in err


def test_offline_a_release_that_is_not_in_the_cache_says_so(index: Index, run: Run, tmp_path: Path) -> None:
    publish_history(index)
    run()
    (tmp_path / "cache" / "files" / f"{PACKAGE}-1.0.0-py3-none-any.whl").unlink()

    code, out, _ = run("--offline")

    assert code == 1
    assert "1.0.0-py3-none-any.whl is not in the cache; run once with a network" in out


# --- trees ---


COMMITTED = "2026-05-06T23:30:00-0200"
"""A moment that is a day later in UTC."""


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A repository whose branch `old` is broken and whose branch `main` is repaired, on top of it."""
    folder = tmp_path / "repository"
    write_files(folder / "src", module(BROKEN_TEXT))
    commit_all(folder, date=COMMITTED)
    git(folder, "branch", "old")
    write_files(folder / "src", module(FIXED_TEXT))
    commit_all(folder, date=COMMITTED)
    return folder


def test_trees_are_rows_named_by_revision_commit_and_date(
    index: Index, run: Run, repository: Path, tmp_path: Path
) -> None:
    publish_history(index)
    git(tmp_path, "clone", "--quiet", "--bare", str(repository), "mirror")
    main, old = git(repository, "rev-parse", "main"), git(repository, "rev-parse", "old")
    (repository / "src" / PACKAGE / "layers.py").write_text(ODD_TEXT)

    code, out, _ = run(
        *("--tree", f"{repository}@old", "--tree", f"{repository}@{old[:9]}"),
        *("--tree", tmp_path / "mirror", "--tree", repository),
    )

    assert code == 0
    rows = words(out)
    assert ["old", "2026-05-07", "committed", "BROKEN", old[:12]] in rows
    assert [old[:12], "2026-05-07", "committed", "BROKEN", old[:12]] in rows
    assert ["main", "2026-05-07", "committed", "FIXED", main[:12]] in rows
    assert ["repository", "no", "date", "UNRECOGNISED", "a", "folder"] in rows


def test_a_checkout_with_the_package_at_its_top_is_named_by_its_commit(index: Index, run: Run, tmp_path: Path) -> None:
    publish_history(index)
    folder = write_files(tmp_path / "checkout", module(BROKEN_TEXT))
    commit = commit_all(folder, date=COMMITTED)[:12]

    assert ["checkout", "2026-05-07", "committed", "BROKEN", commit] in words(run("--tree", folder)[1])
    (folder / PACKAGE / "layers.py").write_text(FIXED_TEXT)
    assert ["checkout", "2026-05-07", "committed", "FIXED", commit, "modified"] in words(run("--tree", folder)[1])


def test_a_folder_that_is_no_checkout_is_named_by_its_contents(index: Index, run: Run, tmp_path: Path) -> None:
    publish_history(index)
    plain = write_files(tmp_path / "plain", module(BROKEN_TEXT))

    (row,) = [row for row in words(run("--tree", plain)[1]) if row[:1] == ["plain"]]

    assert row[1:4] == ["no", "date", "BROKEN"]
    assert row[4] == PACKAGE
    assert len(row[5]) == 12


@pytest.fixture
def wrong_trees(repository: Path, tmp_path: Path) -> Path:
    """The folder of the repository, with trees next to it that cannot be read."""
    (tmp_path / "empty").mkdir()
    (tmp_path / "without").mkdir()
    commit_all(tmp_path / "without")
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked" / PACKAGE).symlink_to(repository / "src" / PACKAGE)
    outer = tmp_path / "outer"
    (outer / PACKAGE).mkdir(parents=True)
    git(outer, "init", "--quiet")
    git(outer, "update-index", "--add", "--cacheinfo", f"160000,{git(repository, 'rev-parse', 'main')},{PACKAGE}")
    git(outer, "commit", "--quiet", "--message", "points to it")
    return tmp_path


@pytest.mark.parametrize(
    ("named", "says"),
    [
        ("nowhere", "there is no such folder"),
        ("repository@nonsense", "has no commit 'nonsense'; try PATH@BRANCH, PATH@TAG or PATH@COMMIT"),
        ("empty@main", "git finds no repository there"),
        ("empty", f"it has no folder {PACKAGE}, and is no repository"),
        ("without", f"it has no folder {PACKAGE}"),
        ("linked", "a link there leads out of the tree, to "),
        ("linked", "give the folder that it leads to"),
        ("outer@main", f"{PACKAGE} is a submodule; give PATH of it"),
        (f"outer/{PACKAGE}@main", f"{PACKAGE} is a submodule; give PATH of it"),
    ],
)
def test_a_tree_that_cannot_be_read_is_an_error_with_the_way_out(
    wrong_trees: Path, run: Run, named: str, says: str
) -> None:
    code, _, err = run("--tree", wrong_trees / named)

    assert code == ExitCode.NOT_CHECKED
    assert says in err


@pytest.fixture
def mono(tmp_path: Path) -> Path:
    """A repository with a broken package in its folder `libs/upstream`, and a repaired one of the same name at its top."""
    folder = write_files(tmp_path / "mono", module(FIXED_TEXT))
    write_files(folder / "libs/upstream", module(BROKEN_TEXT))
    commit_all(folder)
    return folder


def test_a_commit_is_read_from_the_folder_of_the_repository_that_was_named(index: Index, run: Run, mono: Path) -> None:
    publish_history(index)

    def verdict(path: Path) -> str:
        return next(row[3] for row in words(run("--tree", f"{path}@main")[1]) if row[:1] == ["main"])

    assert verdict(mono / "libs" / "upstream") == "BROKEN"
    assert verdict(mono) == "FIXED"
    assert f"it has no folder {PACKAGE}" in run("--tree", f"{mono / 'libs'}@main")[2]


def test_a_partial_clone_without_the_files_is_an_error_and_fetches_nothing(
    index: Index, run: Run, repository: Path, tmp_path: Path
) -> None:
    publish_history(index)
    git(repository, "config", "uploadpack.allowFilter", "true")
    git(tmp_path, "clone", "--quiet", "--bare", "--filter=blob:none", repository.as_uri(), "partial")

    code, out, err = run("--tree", f"{tmp_path / 'partial'}@old")

    assert (code, out) == (ExitCode.NOT_CHECKED, "")
    assert "git cannot give" in err
    assert "partial clone" in err
    assert "?" in git(tmp_path / "partial", "rev-list", "--objects", "--missing=print", "old"), "still not fetched"


def test_a_tree_is_a_row_only_where_it_has_something_of_the_distribution(
    index: Index, run: Run, repository: Path, made: Upstream, declared: Callable[..., None]
) -> None:
    publish_history(index)
    other = made.overlay(id="halve-fix", pack=98, target=Target("liger-kernel", "liger_kernel.other", "halve"))
    declared(made.overlay(), other)
    index.answer = answering_for_all(index)  # type: ignore[method-assign]

    _, out, _ = run("--tree", f"{repository}@old")

    assert [row[:1] for row in words(out)].count(["old"]) == 1


def answering_for_all(index: Index) -> Callable[[str], tuple[int, str, bytes]]:
    """Return answers in which another distribution has the same releases."""
    answer = type(index).answer
    return lambda path: answer(index, path.replace("liger-kernel", "made-up-upstream"))


# --- the kept matrix ---


@pytest.fixture
def kept(index: Index, run: Run, tmp_path: Path) -> Path:
    publish_history(index)
    code, out, _ = run("--write", tmp_path / "packs")
    assert code == 0
    assert "matrix.json" in out
    return tmp_path / "packs"


def test_a_matrix_that_was_just_kept_is_in_step_and_has_the_same_bytes_again(kept: Path, run: Run) -> None:
    before = {path.name: path.read_bytes() for path in kept.iterdir()}

    assert run("--check", kept)[:2] == (0, f"{kept}: the kept matrix agrees with the probes\n")
    assert run("--write", kept)[0] == 0

    assert {path.name: path.read_bytes() for path in kept.iterdir()} == before
    assert sorted(before) == ["matrix.html", "matrix.json"]


def test_nothing_that_is_kept_says_where_it_was_made(kept: Path, index: Index, tmp_path: Path) -> None:
    for path in kept.iterdir():
        text = path.read_text()
        assert index.address not in text
        assert str(tmp_path) not in text


def test_offline_and_without_a_remembered_answer_the_kept_releases_are_read_again(
    kept: Path, run: Run, tmp_path: Path
) -> None:
    before = (kept / "matrix.json").read_bytes()
    for path in (tmp_path / "cache" / "index").rglob("*.json"):
        path.unlink()

    code, _, err = run("--offline", "--write", kept)

    assert code == 0
    assert "the kept releases of" in err
    assert (kept / "matrix.json").read_bytes() == before
    assert run("--offline", "--write", tmp_path / "elsewhere")[0] == ExitCode.NOT_CHECKED


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"title": "Doubles."}, "double-fix: the declaration is not the one that the kept matrix was made with"),
        ({"id": "twice-fix"}, "twice-fix is not in the kept matrix"),
        ({"target": Target("other", "other.x", "y")}, "other: it is not in the kept matrix"),
    ],
)
def test_another_declaration_makes_it_stale(
    kept: Path, run: Run, made: Upstream, declared: Callable[..., None], change: dict[str, object], says: str
) -> None:
    declared(made.overlay(**change))

    code, out, err = run("--offline", "--check", kept)

    assert code == 1
    assert says in out
    assert f"next: megacpp-overlays matrix --write {kept}" in err


def test_another_order_of_the_overlays_makes_it_stale(
    kept: Path, run: Run, made: Upstream, declared: Callable[..., None]
) -> None:
    other = made.overlay(id="halve-fix", pack=98)
    declared(made.overlay(), other)
    run("--write", kept)
    declared(other, made.overlay())

    assert "the overlays are in another order" in run("--offline", "--check", kept)[1]


@pytest.mark.parametrize(
    ("verdict", "seen", "says"),
    [
        (Verdict.UNRECOGNISED, "no idea", f"{PACKAGE} 1.0.0: double-fix: FIXED is kept, the probe says UNRECOGNISED"),
        (Verdict.FIXED, "another reason", f"{PACKAGE} 1.0.0: double-fix: FIXED as kept, for other reasons"),
    ],
)
def test_a_probe_that_says_something_else_makes_it_stale(
    kept: Path, run: Run, made: Upstream, declared: Callable[..., None], verdict: Verdict, seen: str, says: str
) -> None:
    def changed(tree: SourceTree) -> Finding:
        found = made.probe(tree)
        if found.verdict is not Verdict.FIXED:
            return found
        again = replace(found, evidence=(Evidence(seen=seen),))
        return again if verdict is Verdict.FIXED else Finding(verdict=verdict, shape=None, evidence=again.evidence)

    declared(made.overlay(probe=changed))

    assert says in run("--offline", "--check", kept)[1]


def test_another_source_of_the_probe_makes_it_stale(kept: Path, run: Run) -> None:
    data = (kept / "matrix.json").read_text()
    digest = json.loads(data)["distributions"][0]["overlays"][0]["probes"]["made_up"]
    (kept / "matrix.json").write_text(data.replace(digest, "0" * 64))

    out = run("--offline", "--check", kept)[1]

    assert "double-fix: the probe is not the one that the kept matrix was made with" in out


def test_an_edited_page_or_none_is_stale(kept: Path, run: Run) -> None:
    page = kept / "matrix.html"
    page.write_text(page.read_text().replace("BROKEN", "FIXED"))
    assert "matrix.html is not made from the matrix.json next to it" in run("--offline", "--check", kept)[1]

    page.unlink()
    assert "matrix.html is not made from the matrix.json next to it" in run("--offline", "--check", kept)[1]


def test_a_date_that_was_edited_is_stale(kept: Path, run: Run) -> None:
    path = kept / "matrix.json"
    path.write_text(path.read_text().replace('"uploaded"', '"built"'))

    assert "its date or its file is not as kept" in run("--offline", "--check", kept)[1]


def edited(kept: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change the kept data as --write would have written it, and make the page from it."""
    path = kept / "matrix.json"
    data = json.loads(path.read_text())
    before = copy.deepcopy(data)
    change(data["distributions"][0])
    assert data != before
    path.write_text(matrix_file.data_to_text(data))
    (kept / "matrix.html").write_text(matrix_page.render(matrix_file.read(kept)))


@pytest.mark.parametrize(
    "change",
    [
        lambda table: table["flips"][-1].update(release="0.9.0"),
        lambda table: table["flips"].pop(),
        lambda table: table["releases"].reverse(),
        lambda table: table.update(trees=copy.deepcopy(table["releases"][:1])),
    ],
    ids=["another flip", "a flip less", "another order", "a row more"],
)
def test_data_that_follow_from_the_findings_cannot_be_edited(
    kept: Path, run: Run, change: Callable[[dict[str, Any]], None]
) -> None:
    edited(kept, change)

    code, out, _ = run("--offline", "--check", kept)

    assert code == 1
    assert "matrix.json differs from the output of --write for these releases" in out


@pytest.mark.parametrize("how", [{"date": "2025-01-01"}, {"date": "2026-03-04", "dated": "built"}])
def test_a_date_that_is_not_that_of_the_index_is_stale(kept: Path, run: Run, how: dict[str, str]) -> None:
    def change(table: dict[str, Any]) -> None:
        table["releases"][-1].update(how)
        table["flips"][-1]["date"] = how["date"]

    edited(kept, change)

    code, out, _ = run("--check", kept)

    assert code == 1
    assert f"{PACKAGE} 1.0.0: {how['date']} is kept, the index says that it was uploaded on 2026-03-01" in out


def test_a_file_that_is_not_of_the_index_is_stale(kept: Path, run: Run, index: Index, tmp_path: Path) -> None:
    name, other = f"{PACKAGE}-1.0.0-py3-none-any.whl", wheel({**module(FIXED_TEXT), "more.py": ""})
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / name).write_bytes(other)
    edited(kept, lambda table: table["releases"][-1].update(sha256=hashlib.sha256(other).hexdigest()))

    code, out, _ = run("--archives", tmp_path / "own", "--check", kept)

    assert code == 1
    assert out == f"{PACKAGE} 1.0.0: the index has no {name} with the SHA-256 that is kept\n"


def test_an_index_that_gives_no_dates_does_not_make_it_stale(kept: Path, run: Run, index: Index) -> None:
    index.speaks_json, index.has_project_json = False, False

    assert run("--check", kept)[0] == 0


def test_with_an_index_releases_that_came_and_went_since_make_it_stale(kept: Path, run: Run, index: Index) -> None:
    index.publish(f"{PACKAGE}-1.1.0-py3-none-any.whl", wheel(module(FIXED_TEXT)), "2026-05-01T00:00:00Z")
    index.yanked[f"{PACKAGE}-1.0.0-py3-none-any.whl"] = "too early"
    del index.files[f"{PACKAGE}-0.9.0-py3-none-any.whl"]

    code, out, _ = run("--check", kept)

    assert code == 1
    assert f"{PACKAGE} 1.1.0 (2026-05-01) came since" in out
    assert f"{PACKAGE} 1.0.0: the index says something else about its being yanked" in out
    assert f"{PACKAGE} 0.9.0: the index no longer has it" in out
    assert run("--offline", "--check", kept)[0] == 0, "offline, only the probes count"


def test_a_check_without_the_archives_is_an_error_that_names_them(kept: Path, run: Run, tmp_path: Path) -> None:
    for path in (tmp_path / "cache" / "files").iterdir():
        path.unlink()

    code, _, err = run("--offline", "--check", kept)

    assert code == ExitCode.NOT_CHECKED
    assert f"{PACKAGE}-0.10.0.tar.gz is not in the cache" in err


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (None, "make it with --write"),
        ("{", "this is no kept matrix"),
        ("{}", "this is no kept matrix"),
        ('{"schema": 99}', "schema 99 is not known here"),
    ],
)
def test_a_kept_matrix_that_cannot_be_read_is_an_error(run: Run, tmp_path: Path, text: str | None, says: str) -> None:
    if text is not None:
        (tmp_path / "matrix.json").write_text(text)

    code, _, err = run("--offline", "--check", tmp_path)

    assert code == ExitCode.NOT_CHECKED
    assert says in err


def test_a_verdict_that_its_parts_do_not_say_is_refused(kept: Path) -> None:
    path = kept / "matrix.json"
    path.write_text(path.read_text().replace('{"verdict": "FIXED"', '{"verdict": "BROKEN"'))

    with pytest.raises(UpkeepError, match="the parts say FIXED, and the verdict is BROKEN"):
        matrix_file.read(kept)


# --- parts, flips and runs ---


def part(verdict: Verdict, seen: str = "x", shape: str | None = None) -> PartFinding:
    named = shape or ("shape" if verdict is Verdict.BROKEN else None)
    return PartFinding(module="a.b", verdict=verdict, shape=named, evidence=(Evidence(seen=seen),))


def row(number: int, *parts: PartFinding, problem: str | None = None) -> Row:
    return Row(
        name=f"1.{number}",
        date="2026-01-01",
        dated=matrix.UPLOADED,
        source="x.whl",
        sha256="0" * 64,
        yanked=None,
        cells={} if problem else {"o": Cell(parts=parts)},
        problem=problem,
    )


def table(rows: list[Row], made: Upstream) -> Table:
    columns = matrix.columns([made.overlay(id="o", unsupported={"rounded": "on purpose"})])
    return Table(distribution="d", asked="2026-11-21", columns=columns, rows=tuple(rows))


def test_absent_parts_are_not_shown_if_there_are_others() -> None:
    absent, fixed = part(Verdict.ABSENT), part(Verdict.FIXED)

    assert Cell(parts=(absent, fixed)).telling == (fixed,)
    assert Cell(parts=(absent, absent)).telling == (absent, absent)


@pytest.mark.parametrize(
    ("shapes", "is_left_alone"),
    [(["rounded"], True), (["rounded", "rounded"], True), (["rounded", "off-by-one"], False), ([], False)],
    ids=["its one shape", "every shape", "one shape of two", "nothing is broken"],
)
def test_a_broken_overlay_is_left_alone_if_all_its_shapes_are(
    made: Upstream, shapes: list[str], is_left_alone: bool
) -> None:
    (column,) = table([], made).columns
    parts = [part(Verdict.FIXED), *(part(Verdict.BROKEN, shape=shape) for shape in shapes)]

    assert matrix.is_left_alone(Cell(parts=tuple(parts)), column) is is_left_alone


def test_parts_of_an_overlay_share_a_column_and_say_their_module(made: Upstream, tmp_path: Path) -> None:
    second = Target(PACKAGE, f"{PACKAGE}.other", "double")
    parts = [made.overlay(), made.overlay(target=second)]

    found = matrix.probe(parts, DirectoryTree(write_files(tmp_path, module(BROKEN_TEXT))))
    (column,) = matrix.columns(parts)

    assert [each.module for each in found["double-fix"].parts] == [f"{PACKAGE}.layers", f"{PACKAGE}.other"]
    assert column.targets == (parts[0].target, second)
    assert list(column.probes) == ["made_up"]
    assert matrix_text.seen(found["double-fix"].parts[0], named=True).startswith("layers: off-by-one: return")


def test_a_shape_that_is_left_alone_is_marked(made: Upstream) -> None:
    shown = matrix_text.render(
        table([row(1, part(Verdict.BROKEN, shape="rounded")), row(2, part(Verdict.BROKEN))], made), evidence=False
    )

    assert ["1.1", "2026-01-01", "BROKEN", "~"] in words(shown)
    assert ["1.2", "2026-01-01", "BROKEN"] in words(shown)


verdicts = st.lists(st.sampled_from([*Verdict, None]), min_size=1, max_size=12)


@given(verdicts)
def test_flips_and_runs_tell_the_whole_history(found: list[Verdict | None]) -> None:
    made = Upstream(PACKAGE, Path())
    rows = [
        row(number, problem="gone") if verdict is None else row(number, part(verdict))
        for number, verdict in enumerate(found)
    ]
    whole = table(rows, made)
    read = [each for each in rows if each.problem is None]

    changes = {flip.row.name: flip for flip in matrix.flips(whole, "o")}
    held: list[Verdict] = []
    for each in read:
        held.append(changes[each.name].after if each.name in changes else (held or [each.cells["o"].verdict])[-1])
    assert held == [each.cells["o"].verdict for each in read]
    assert all(flip.before is not flip.after for flip in changes.values())

    runs = matrix.runs(rows, "o")
    covered = [each for run in runs for each in read[read.index(run.first) : read.index(run.last) + 1]]
    assert covered == read
    assert len(runs) == len(changes) + bool(read)
    assert matrix_text.render(whole, evidence=True)


@given(verdicts, st.text(), st.sampled_from([None, "", "why"]))
def test_a_table_survives_being_kept_and_read(found: list[Verdict | None], seen: str, yanked: str | None) -> None:
    rows = [
        replace(row(number, part(verdict, seen)), yanked=yanked)
        for number, verdict in enumerate(found)
        if verdict is not None
    ]
    whole = table(rows, Upstream(PACKAGE, Path()))

    with tempfile.TemporaryDirectory() as name:
        Path(name, "matrix.json").write_text(matrix_file.to_text([whole]))
        assert matrix_file.read(Path(name)) == (whole,)
