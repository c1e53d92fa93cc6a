"""Releases: the list of an index with dates, the file of each that is read, and the check that it is the published one."""

from __future__ import annotations

import gzip
import io
import itertools
import json
import os
import stat
import struct
import tarfile
import tracemalloc
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from index_server import JSON, NAME, PACKAGE, Index, module, sdist, serving, wheel
from releases import only
from repositories import commit_all, git, write_files

from megacpp_overlays.errors import SourceError, UpkeepError
from megacpp_overlays.source.file_trees import ArchiveTree, DirectoryTree
from megacpp_overlays.upkeep import bounded_http
from megacpp_overlays.upkeep.matrix import archives as archives_module
from megacpp_overlays.upkeep.matrix.archives import Archives
from megacpp_overlays.upkeep.matrix.commit_tree import CommitTree
from megacpp_overlays.upkeep.matrix.index_answers import IndexAnswers, NoNetworkError, configured
from megacpp_overlays.upkeep.matrix.package_index import PackageIndex
from megacpp_overlays.upkeep.matrix.releases import ArchiveFile, from_data, is_read, release, to_data

PURE = f"{PACKAGE}-1.0-py3-none-any.whl"
BUILT = "made_up_upstream-1.0-cp{0}-cp{0}-manylinux_2_28_{1}.whl"
SOURCE = f"{PACKAGE}-1.0.tar.gz"


@pytest.fixture
def index(monkeypatch: pytest.MonkeyPatch) -> Iterator[Index]:
    with serving() as made:
        monkeypatch.setenv("UV_DEFAULT_INDEX", made.endpoint)
        yield made


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def answers(tmp_path: Path, said: list[str]) -> Callable[..., IndexAnswers]:
    """Make the answers of the configured index, remembered in one folder."""
    return lambda *, offline=False: IndexAnswers(tmp_path / "index", offline=offline, tell=said.append)


def file(name: str, sha256: str = "0" * 64, uploaded: str | None = None) -> ArchiveFile:
    return ArchiveFile(name=name, sha256=sha256, uploaded=uploaded)


# --- which file of a release ---


@given(st.permutations([BUILT.format(minor, cpu) for minor in (310, 311, 312, 313) for cpu in ("x86_64", "aarch64")]))
def test_of_several_wheels_the_same_one_is_read_on_every_machine(names: list[str]) -> None:
    files = release("1.0", [file(SOURCE), *map(file, names)], None).files

    assert files[0].name == BUILT.format(312, "x86_64")
    assert files[1].name == BUILT.format(311, "x86_64"), "an older Python before a newer one"
    assert files[-1].name == SOURCE


@given(
    st.permutations(
        [
            "torch-2.13.0-cp312-cp312-macosx_14_0_arm64.whl",
            "torch-2.13.0-cp313-cp313-macosx_14_0_arm64.whl",
            "torch-2.13.0-cp312-cp312-manylinux_2_28_x86_64.whl",
            "torch-2.13.0-cp312-cp312-win_amd64.whl",
        ]
    )
)
def test_of_torch_a_small_wheel_is_read_on_every_machine(names: list[str]) -> None:
    files = release("2.13.0", map(file, names), None).files

    assert files[0].name == "torch-2.13.0-cp312-cp312-macosx_14_0_arm64.whl"


@pytest.mark.parametrize(
    ("names", "first"),
    [
        ([BUILT.format(312, "x86_64"), PURE, SOURCE], PURE),
        ([SOURCE, BUILT.format(313, "aarch64")], BUILT.format(313, "aarch64")),
        ([SOURCE, "not-a-name.whl"], SOURCE),
    ],
    ids=["a pure wheel", "any wheel", "no wheel with tags"],
)
def test_wheels_come_before_source(names: list[str], first: str) -> None:
    assert release("1.0", map(file, names), None).files[0].name == first


@pytest.mark.parametrize("name", ["../x.whl", "/etc/x.whl", "a\\b.whl", "", ".hidden.whl"])
def test_a_name_that_leads_to_another_folder_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="no name of a file"):
        file(name)


def test_of_a_distribution_of_large_archives_old_releases_are_not_read() -> None:
    assert [is_read("triton", version) for version in ("2.0.0", "3.3.0", "3.3.1", "3.10.0")] == [
        False,
        False,
        True,
        True,
    ]
    assert is_read("megatron-core", "0.1.0")


# --- answers of an index ---


@pytest.mark.parametrize("speaks_json", [True, False], ids=["JSON", "HTML"])
def test_releases_come_by_version_with_the_date_of_their_first_file(
    index: Index, answers: Callable[..., IndexAnswers], speaks_json: bool
) -> None:
    index.speaks_json = speaks_json
    index.publish(f"{PACKAGE}-0.10.0-py3-none-any.whl", b"b", "2026-02-01T23:30:00Z")
    index.publish(f"{PACKAGE}-0.9.0-py3-none-any.whl", b"a", "2026-01-05T10:00:00Z")
    index.publish(f"{PACKAGE}-0.9.0.tar.gz", b"c", "2026-01-04T10:00:00Z")
    index.publish(f"{PACKAGE}-0.11.0rc1.tar.gz", b"d", "2026-03-01T10:00:00Z")
    index.yanked = {f"{PACKAGE}-0.10.0-py3-none-any.whl": "wrong version", f"{PACKAGE}-0.9.0.tar.gz": "only one file"}

    with answers() as asked:
        answer = asked.get(PACKAGE)

    assert [(each.version, each.date, each.yanked, each.is_final) for each in answer.releases] == [
        ("0.9.0", "2026-01-04", None, True),
        ("0.10.0", "2026-02-01", "wrong version", True),
        ("0.11.0rc1", "2026-03-01", None, False),
    ]


@pytest.mark.parametrize("has_project_json", [True, False])
def test_without_any_date_there_is_none(
    index: Index, answers: Callable[..., IndexAnswers], has_project_json: bool
) -> None:
    index.speaks_json, index.has_project_json = False, has_project_json
    index.publish(PURE, b"a", None)

    with answers() as asked:
        assert asked.get(PACKAGE).releases[0].date is None


def test_an_index_that_is_no_simple_one_is_asked_for_no_dates(
    index: Index, answers: Callable[..., IndexAnswers], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UV_DEFAULT_INDEX", f"{index.address}/mirror/")

    with answers() as asked, pytest.raises(UpkeepError, match="no such project"):
        asked.get(PACKAGE)

    assert index.asked == [f"/mirror/{NAME}/"]


def test_files_that_cannot_be_read_or_checked_are_passed_over(
    index: Index, answers: Callable[..., IndexAnswers]
) -> None:
    index.publish(PURE, b"a")
    index.publish(f"{PACKAGE}-1.0.win32.exe", b"b")
    index.publish(f"{PACKAGE}-2.0.egg", b"c")
    index.publish(f"{PACKAGE}-not.a.version-py3-none-any.whl", b"d")

    with answers() as asked:
        assert [f.name for each in asked.get(PACKAGE).releases for f in each.files] == [PURE]


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, "https://pypi.org/simple/"),
        ({"PIP_INDEX_URL": "https://a.example/simple", "UV_INDEX_URL": ""}, "https://a.example/simple"),
        (
            {"UV_DEFAULT_INDEX": "mine=https://a.example/simple", "PIP_INDEX_URL": "https://b"},
            "https://a.example/simple",
        ),
        ({"UV_INDEX_URL": "https://u:p@a.example/simple?x=1"}, "https://u:p@a.example/simple?x=1"),
    ],
)
def test_the_index_is_the_one_that_pip_or_uv_would_ask(variables: dict[str, str], expected: str) -> None:
    assert configured(variables) == expected


def test_an_unknown_project_is_an_error_that_names_it(index: Index, answers: Callable[..., IndexAnswers]) -> None:
    with answers() as asked, pytest.raises(UpkeepError, match="other: the configured index has no such project"):
        asked.get("other")


def test_a_release_of_files_that_cannot_be_read_stays_a_release(
    index: Index, answers: Callable[..., IndexAnswers]
) -> None:
    index.publish(f"{PACKAGE}-0.5.0.zip", b"a")
    index.publish(PURE, b"b")
    index.publish(f"{PACKAGE}-1.0.zip", b"c")
    index.yanked[PURE] = "not all of it"

    with answers() as asked:
        found = asked.get(PACKAGE).releases
    with answers(offline=True) as remembered:
        assert remembered.get(PACKAGE).releases == found

    assert [(each.version, [f.name for f in each.files], each.yanked) for each in found] == [
        ("0.5.0", [], None),
        ("1.0", [PURE], None),
    ]


def test_a_project_without_any_release_is_an_error(index: Index, answers: Callable[..., IndexAnswers]) -> None:
    index.publish(f"{PACKAGE}-not.a.version-py3-none-any.whl", b"a")

    with answers() as asked, pytest.raises(UpkeepError, match=f"{PACKAGE}: the configured index has no release of it"):
        asked.get(PACKAGE)


def test_an_answer_that_is_no_page_is_an_error(index: Index, answers: Callable[..., IndexAnswers]) -> None:
    index.answer = lambda _: (200, "image/png", b"x")  # type: ignore[method-assign]

    with answers() as asked, pytest.raises(UpkeepError, match="cannot be read: UnsupportedContentTypeError"):
        asked.get(PACKAGE)


@pytest.mark.parametrize(
    "changes",
    [
        {"files": [1]},
        {"files": {"a": 1}},
        {"files": [{"filename": 1, "url": 2, "hashes": 3}]},
        {"files": [{"filename": PURE, "url": "x", "hashes": {"sha256": ["a"]}, "yanked": {}}]},
        {"files": [{"filename": PURE, "url": "x", "hashes": {"sha256": "a"}, "upload-time": 1e300}]},
        {"files": None, "versions": 3},
    ],
    ids=str,
)
def test_an_answer_in_which_something_is_of_another_type_is_an_error(
    index: Index, answers: Callable[..., IndexAnswers], changes: dict[str, object]
) -> None:
    body = json.dumps({"meta": {"api-version": "1.1"}, "name": PACKAGE, **changes}).encode()
    index.answer = lambda _: (200, JSON, body)  # type: ignore[method-assign]

    with answers() as asked, pytest.raises(UpkeepError, match=r"index cannot be read|has no release"):
        asked.get(PACKAGE)


def test_json_that_is_nested_without_end_is_an_error(index: Index, answers: Callable[..., IndexAnswers]) -> None:
    index.answer = lambda _: (200, JSON, b"[" * 100_000)  # type: ignore[method-assign]

    with answers() as asked, pytest.raises(UpkeepError, match="the answer of the configured index cannot be read"):
        asked.get(PACKAGE)


@pytest.mark.parametrize(
    ("kind", "packed"),
    only(itertools.product([JSON, "text/html"], [True, False]), [(JSON, True), ("text/html", False)]),
)
def test_a_page_that_is_too_long_is_an_error(
    index: Index, answers: Callable[..., IndexAnswers], packed: bool, kind: str
) -> None:
    page = b" " * 2 * bounded_http.LARGEST_ANSWER
    index.headers = {"Content-Encoding": "gzip"} if packed else {}
    index.answer = lambda _: (200, kind, gzip.compress(page) if packed else page)  # type: ignore[method-assign]

    with answers() as asked, pytest.raises(UpkeepError, match=f"{PACKAGE}: .* longer than 67108864 bytes"):
        asked.get(PACKAGE)


def test_answers_that_cannot_be_kept_are_an_error_with_the_way_out(index: Index) -> None:
    index.publish(PURE, b"a")

    with (
        IndexAnswers(Path("/dev/null/index"), offline=False, tell=print) as asked,
        pytest.raises(UpkeepError, match=r"answers cannot be kept here: .*; see --cache"),
    ):
        asked.get(PACKAGE)
    with pytest.raises(UpkeepError, match=r"releases cannot be kept here: .*; see --cache"):
        Archives(Path("/dev/null/files"), (), PackageIndex(index.endpoint)).get(file(PURE))


# --- answers that were kept ---


def test_an_answer_is_remembered_and_holds_no_address(
    index: Index, answers: Callable[..., IndexAnswers], tmp_path: Path, said: list[str]
) -> None:
    index.publish(PURE, b"a")
    with answers() as asked:
        answer = asked.get(PACKAGE)
    before = len(index.asked)

    with answers(offline=True) as remembered:
        assert remembered.get(PACKAGE) == answer

    assert len(index.asked) == before, "offline sends no request"
    assert said == []
    assert not [path for path in (tmp_path / "index").rglob("*.json") if "http" in path.read_text()]


@pytest.mark.parametrize("status", [500, 503])
def test_where_the_index_fails_its_last_answer_is_used_and_that_is_said(
    index: Index, answers: Callable[..., IndexAnswers], said: list[str], status: int
) -> None:
    index.publish(PURE, b"a")
    with answers() as asked:
        answer = asked.get(PACKAGE)

    index.status = status
    with answers() as again:
        assert again.get(PACKAGE) == answer

    assert said == [
        f"the configured index answers with an error (HTTP {status}): its answer about {PACKAGE} of {answer.asked} is used"
    ]


def test_without_a_network_and_without_a_memory_there_is_no_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: list[str]
) -> None:
    monkeypatch.setenv("UV_DEFAULT_INDEX", "http://user:secret@127.0.0.1:9/simple/")

    with IndexAnswers(tmp_path, offline=False, tell=said.append) as asked, pytest.raises(NoNetworkError) as caught:
        asked.get(PACKAGE)

    assert "the configured index does not answer" in str(caught.value)
    assert "secret" not in str(caught.value)


def test_an_answer_of_another_index_is_not_used(
    index: Index, answers: Callable[..., IndexAnswers], monkeypatch: pytest.MonkeyPatch
) -> None:
    index.publish(PURE, b"a")
    with answers() as asked:
        asked.get(PACKAGE)

    monkeypatch.setenv("UV_DEFAULT_INDEX", "https://other.example/simple")
    with answers(offline=True) as other, pytest.raises(NoNetworkError, match="no answer of the index is in the cache"):
        other.get(PACKAGE)


@pytest.mark.parametrize("text", ["", "[]", '{"releases": [{"version": "x", "yanked": null, "files": []}]}'])
def test_a_damaged_memory_is_no_answer(
    index: Index, answers: Callable[..., IndexAnswers], tmp_path: Path, text: str
) -> None:
    index.publish(PURE, b"a")
    with answers() as asked:
        asked.get(PACKAGE)
    next((tmp_path / "index").rglob("*.json")).write_text(text)

    with answers(offline=True) as damaged, pytest.raises(NoNetworkError, match="offline"):
        damaged.get(PACKAGE)


versions = st.from_regex(r"[0-9]{1,2}\.[0-9]{1,2}(rc[0-9])?", fullmatch=True)


@given(st.lists(st.tuples(versions, st.sampled_from([None, "", "why"])), unique_by=lambda each: each[0]))
def test_an_answer_survives_being_written_and_read(releases: list[tuple[str, str | None]]) -> None:
    data = {
        "distribution": PACKAGE,
        "asked": "2026-11-21",
        "releases": [
            {"version": v, "yanked": y, "files": [{"name": PURE, "sha256": "0" * 64, "uploaded": "2026-01-01"}]}
            for v, y in releases
        ],
    }
    answer = from_data(data)

    assert from_data(to_data(answer)) == answer
    assert len(answer.releases) == len(releases)


# --- the files ---


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "files"


def published(index: Index, answers: Callable[..., IndexAnswers], content: bytes) -> ArchiveFile:
    index.publish(PURE, content)
    with answers() as asked:
        return asked.get(PACKAGE).releases[0].files[0]


def test_a_file_is_fetched_once(index: Index, answers: Callable[..., IndexAnswers], cache: Path) -> None:
    wanted = published(index, answers, b"content")
    with answers() as asked:
        asked.get(PACKAGE)
        files = Archives(cache, (), asked.index)

        assert [files.get(wanted), files.get(wanted)] == [cache / PURE] * 2

    assert (cache / PURE).read_bytes() == b"content"
    assert index.asked.count(f"/files/{PURE}") == 1


@pytest.mark.parametrize("damage", [b"", b"cont", b"changed"], ids=["empty", "half", "changed"])
def test_a_damaged_file_does_not_count_and_is_fetched_again(
    index: Index, answers: Callable[..., IndexAnswers], cache: Path, damage: bytes
) -> None:
    wanted = published(index, answers, b"content")
    cache.mkdir()
    (cache / PURE).write_bytes(damage)

    assert Archives(cache).get(wanted) is None
    with answers() as asked:
        asked.get(PACKAGE)
        Archives(cache, (), asked.index).get(wanted)

    assert (cache / PURE).read_bytes() == b"content"


@pytest.mark.parametrize("sent", [b"cont", b"other"], ids=["cut short", "another file"])
def test_a_file_with_another_hash_than_the_listed_one_is_not_kept(
    index: Index, answers: Callable[..., IndexAnswers], cache: Path, sent: bytes
) -> None:
    wanted = published(index, answers, b"content")
    index.served[PURE] = sent

    with answers() as asked:
        asked.get(PACKAGE)
        with pytest.raises(UpkeepError, match="does not have the SHA-256"):
            Archives(cache, (), asked.index).get(wanted)

    assert list(cache.iterdir()) == []


def test_a_file_that_is_longer_than_any_is_not_kept(
    index: Index, answers: Callable[..., IndexAnswers], cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bounded_http, "LARGEST_DOWNLOAD", 1 << 20)
    wanted = published(index, answers, b"content")
    index.served[PURE] = bytes(2 << 20)

    with answers() as asked:
        asked.get(PACKAGE)
        with pytest.raises(UpkeepError, match=f"{PURE} cannot be downloaded: the answer is longer than 1048576 bytes"):
            Archives(cache, (), asked.index).get(wanted)

    assert list(cache.iterdir()) == []


def test_a_file_that_the_index_does_not_have_is_an_error_that_names_it(
    index: Index, answers: Callable[..., IndexAnswers], cache: Path
) -> None:
    wanted = published(index, answers, b"content")

    with answers() as asked:
        files = Archives(cache, (), asked.index)
        with pytest.raises(NoNetworkError, match="does not offer it"):
            files.get(wanted)
        asked.get(PACKAGE)
        index.files.clear()
        with pytest.raises(NoNetworkError, match=f"{PURE} cannot be downloaded .HTTP 404"):
            files.get(wanted)


def test_a_link_in_the_cache_is_not_written_through(
    index: Index, answers: Callable[..., IndexAnswers], cache: Path, tmp_path: Path
) -> None:
    wanted = published(index, answers, b"content")
    (tmp_path / "precious").write_text("precious")
    cache.mkdir(exist_ok=True)
    for name in (PURE, f".{os.getpid()}.{PURE}"):
        (cache / name).symlink_to(tmp_path / "precious")

    with answers() as asked:
        asked.get(PACKAGE)
        fetched = Archives(cache, (), asked.index).get(wanted)

    assert fetched == cache / PURE
    assert fetched.read_bytes() == b"content"
    assert (tmp_path / "precious").read_text() == "precious"


def test_another_folder_is_read_and_never_written(
    index: Index, answers: Callable[..., IndexAnswers], cache: Path, tmp_path: Path
) -> None:
    wanted = published(index, answers, b"content")
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    (wheels / PURE).write_bytes(b"content")
    with answers() as asked:
        asked.get(PACKAGE)
        assert Archives(cache, [wheels], asked.index).get(wanted) == wheels / PURE

        (wheels / PURE).write_bytes(b"changed")
        assert Archives(cache, [wheels], asked.index).get(wanted) == cache / PURE

    assert (wheels / PURE).read_bytes() == b"changed"


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"MEGACPP_RELEASES_CACHE": "/a"}, "/a"),
        ({"XDG_CACHE_HOME": "/x"}, "/x/megacpp-overlays/releases"),
        ({"HOME": "/h"}, "/h/.cache/megacpp-overlays/releases"),
        ({"HOME": "/h", "XDG_CACHE_HOME": "x"}, "/h/.cache/megacpp-overlays/releases"),
    ],
)
def test_the_cache_is_where_caches_are(
    variables: dict[str, str], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("MEGACPP_RELEASES_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)

    assert archives_module.default_folder() == Path(expected)


# --- contents of archives and trees ---


@pytest.mark.parametrize("top", ["", "src/"], ids=["at the top", "below src"])
@pytest.mark.parametrize("kind", ["wheel", "sdist", "folder", "commit", "bare"])
def test_every_kind_of_tree_gives_the_same_source_with_the_same_path(tmp_path: Path, kind: str, top: str) -> None:
    files = {f"{top}{name}": text for name, text in module("x = 1\n").items()}
    if kind == "wheel":
        (tmp_path / PURE).write_bytes(wheel(files))
        tree = ArchiveTree(tmp_path / PURE, prefix="")
    elif kind == "sdist":
        (tmp_path / SOURCE).write_bytes(sdist(f"{PACKAGE}-1.0", {**files, "README": "no Python"}))
        tree = ArchiveTree(tmp_path / SOURCE, prefix="")
    elif kind == "folder":
        tree = DirectoryTree(write_files(tmp_path, files), prefix="")
    else:
        commit_all(write_files(tmp_path / "work", files))
        git(tmp_path, "clone", "--quiet", "--bare", "work", "bare")
        (tmp_path / "work" / f"{top}{PACKAGE}" / "layers.py").write_text("changed, and not committed")
        tree = CommitTree(tmp_path / ("work" if kind == "commit" else "bare"), "HEAD")

    with tree:
        source = tree.module(f"{PACKAGE}.layers")
        package = tree.module(PACKAGE)

        assert source is not None
        assert package is not None
        assert (source.path, source.text) == (f"{top}{PACKAGE}/layers.py", "x = 1\n")
        assert package.path == f"{top}{PACKAGE}/__init__.py"
        assert tree.module(f"{PACKAGE}.missing") is None
        assert tree.has_package(PACKAGE)
        assert not tree.has_package("other")


def committed(folder: Path, files: dict[str, str], links: dict[str, str]) -> Path:
    write_files(folder, files)
    for name, target in links.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).symlink_to(target)
    commit_all(folder)
    return folder


@pytest.mark.parametrize(
    "links",
    [
        {f"{PACKAGE}/layers.py": "real.py"},
        {f"{PACKAGE}/layers.py": "../lib/..//made_up_upstream/./real.py"},
        {f"{PACKAGE}/layers.py": "second.py", f"{PACKAGE}/second.py": "real.py"},
        {f"{PACKAGE}/layers.py": "../lib/real.py", "lib": PACKAGE},
    ],
    ids=["in the same folder", "a roundabout way", "a link to a link", "through a folder"],
)
def test_a_committed_link_is_read_as_its_target(tmp_path: Path, links: dict[str, str]) -> None:
    files = {f"{PACKAGE}/real.py": "x = 1\n", f"{PACKAGE}/__init__.py": ""}
    if "lib" not in links:
        files["lib/other.py"] = ""

    with CommitTree(committed(tmp_path, files, links), "HEAD") as tree:
        source = tree.module(f"{PACKAGE}.layers")

    assert source is not None
    assert (source.path, source.text) == (f"{PACKAGE}/layers.py", "x = 1\n")


def test_a_submodule_of_the_name_src_hides_no_package_next_to_it(tmp_path: Path) -> None:
    folder = committed(tmp_path, {f"{PACKAGE}/layers.py": "x = 1\n"}, {})
    git(folder, "update-index", "--add", "--cacheinfo", f"160000,{'1' * 40},src")
    git(folder, "commit", "--quiet", "--message", "points to it")

    with CommitTree(folder, "HEAD") as tree:
        assert tree.has_package(PACKAGE)
        assert not tree.has_package("other")


def test_a_package_that_is_a_link_to_a_folder_is_there(tmp_path: Path) -> None:
    with CommitTree(committed(tmp_path, {"code/layers.py": "x = 1\n"}, {PACKAGE: "code"}), "HEAD") as tree:
        assert tree.has_package(PACKAGE)
        assert tree.module(f"{PACKAGE}.layers") is not None
        assert tree.module(f"{PACKAGE}.layers.deeper") is None, "a file has no folder in it"


@pytest.mark.parametrize(
    ("links", "says"),
    [
        ({f"{PACKAGE}/layers.py": "missing.py"}, "leads to nothing"),
        ({f"{PACKAGE}/layers.py": "../lib/missing.py", "lib": PACKAGE}, "leads to nothing"),
        ({f"{PACKAGE}/layers.py": "layers.py"}, "leads to itself"),
    ],
    ids=["nothing", "nothing behind another link", "itself"],
)
def test_a_committed_link_that_leads_nowhere_is_an_error(tmp_path: Path, links: dict[str, str], says: str) -> None:
    folder = committed(tmp_path, {f"{PACKAGE}/__init__.py": ""}, links)

    with CommitTree(folder, "HEAD") as tree:
        assert tree.module(f"{PACKAGE}.missing") is None
        with pytest.raises(SourceError, match=f"^{PACKAGE}/layers.py: a link there {says}"):
            tree.module(f"{PACKAGE}.layers")


SECRET = "token = 'hidden'\n"


@pytest.mark.parametrize("kind", ["folder", "commit"])
@pytest.mark.parametrize(
    ("link", "target"),
    [
        (f"{PACKAGE}/layers.py", "{outside}/layers.py"),
        (f"{PACKAGE}/layers.py", "../../outside/layers.py"),
        (PACKAGE, "{outside}"),
        (PACKAGE, "../outside"),
        ("src", "{outside}"),
        (f"{PACKAGE}/layers", "{outside}"),
        (f"{PACKAGE}/layers.py", "/dev/zero"),
    ],
)
def test_no_link_leads_out_of_a_tree(tmp_path: Path, kind: str, link: str, target: str) -> None:
    """A third-party tree may have links. No file outside of the tree is read through one."""
    outside = write_files(
        tmp_path / "outside", {"layers.py": SECRET, "__init__.py": SECRET, f"{PACKAGE}/layers.py": SECRET}
    )
    files = {"README": ""} if link == PACKAGE else {f"{PACKAGE}/__init__.py": ""}
    tree = committed(tmp_path / "tree", files, {link: target.format(outside=outside)})

    opened = CommitTree(tree, "HEAD") if kind == "commit" else DirectoryTree(tree, prefix="")
    with opened, pytest.raises(SourceError, match="a link there leads out of the") as caught:
        opened.module(f"{PACKAGE}.layers")

    assert "hidden" not in str(caught.value)


def test_a_folder_that_is_reached_through_a_link_is_a_tree_and_its_inner_links_are_followed(tmp_path: Path) -> None:
    files = {f"{PACKAGE}/real.py": "x = 1\n", f"{PACKAGE}/__init__.py": ""}
    committed(tmp_path / "tree", files, {f"{PACKAGE}/layers.py": "real.py", "src": "."})
    (tmp_path / "link").symlink_to("tree")

    source = DirectoryTree(tmp_path / "link", prefix="").module(f"{PACKAGE}.layers")

    assert source is not None
    assert source.text == "x = 1\n"


def sdist_with(*members: tuple[str, bytes, str]) -> bytes:
    """Return a source distribution of members of some type: with this text, or leading to it."""
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w:gz") as archive:
        for name, kind, text in members:
            item = tarfile.TarInfo(f"top/{name}")
            item.type, item.linkname = kind, "" if kind == tarfile.REGTYPE else text
            item.size = len(text) if kind == tarfile.REGTYPE else 0
            archive.addfile(item, io.BytesIO(text.encode()))
    return raw.getvalue()


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE], ids=["symbolic", "hard"])
@pytest.mark.parametrize(
    ("link", "target"),
    [
        (f"{PACKAGE}/layers.py", "/etc/hostname"),
        (f"{PACKAGE}/layers.py", "top/lib/layers.py"),
        (PACKAGE, "lib"),
        ("src", "lib"),
    ],
)
def test_a_link_in_a_source_distribution_is_not_absent_code(
    tmp_path: Path, kind: bytes, link: str, target: str
) -> None:
    members = [("lib/layers.py", tarfile.REGTYPE, "x = 1\n"), (link, kind, target)]
    (tmp_path / SOURCE).write_bytes(sdist_with(*members))

    with ArchiveTree(tmp_path / SOURCE, prefix="") as tree:
        with pytest.raises(SourceError, match=f"{SOURCE}: {link} is a link, which is not followed in an archive"):
            tree.module(f"{PACKAGE}.layers")
        assert tree.damage is not None
        assert tree.module("lib.layers") is not None


@pytest.mark.parametrize("last", [tarfile.REGTYPE, tarfile.SYMTYPE], ids=["a file", "a link"])
def test_of_two_members_of_one_name_the_last_one_counts(tmp_path: Path, last: bytes) -> None:
    members = [
        (f"{PACKAGE}/layers.py", tarfile.REGTYPE, "x = 1\n"),
        (f"{PACKAGE}/layers.py", tarfile.SYMTYPE, "other.py"),
        (f"{PACKAGE}/layers.py", last, "x = 2\n"),
    ]
    (tmp_path / SOURCE).write_bytes(sdist_with(*members))

    with ArchiveTree(tmp_path / SOURCE, prefix="") as tree:
        if last == tarfile.SYMTYPE:
            with pytest.raises(SourceError, match="is a link"):
                tree.module(f"{PACKAGE}.layers")
        else:
            source = tree.module(f"{PACKAGE}.layers")
            assert source is not None
            assert source.text == "x = 2\n"


def test_a_link_in_a_wheel_is_the_file_that_an_installer_makes_of_it(tmp_path: Path) -> None:
    raw = io.BytesIO()
    with zipfile.ZipFile(raw, "w") as archive:
        item = zipfile.ZipInfo(f"{PACKAGE}/layers.py")
        item.external_attr = (stat.S_IFLNK | 0o777) << 16
        archive.writestr(item, "/etc/hostname")
    (tmp_path / PURE).write_bytes(raw.getvalue())

    with ArchiveTree(tmp_path / PURE, prefix="") as tree:
        source = tree.module(f"{PACKAGE}.layers")

    assert source is not None
    assert source.text == "/etc/hostname"


@pytest.mark.parametrize("path", ["layers.py", ""], ids=["a file", "a tree"])
def test_an_object_that_git_cannot_deliver_is_no_absent_file(tmp_path: Path, path: str) -> None:
    folder = committed(tmp_path, {f"{PACKAGE}/layers.py": "x = 1\n"}, {})
    name = git(folder, "rev-parse", f"HEAD:{PACKAGE}/{path}".rstrip("/"))
    (folder / ".git" / "objects" / name[:2] / name[2:]).unlink()

    with pytest.raises(UpkeepError, match="git cannot give"), CommitTree(folder, "HEAD") as tree:
        tree.module(f"{PACKAGE}.layers")


def test_a_module_that_is_no_text_is_an_error_with_its_path_in_the_tree(tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_bytes(b"# coding: nonsense\n")

    with pytest.raises(SourceError, match=r"^bad.py: cannot be decoded"):
        DirectoryTree(tmp_path, prefix="").module("bad")


@pytest.mark.parametrize("name", [PURE, SOURCE])
def test_a_damaged_archive_is_an_error_that_names_it(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"neither")

    with pytest.raises(SourceError, match=f"{name}: cannot open"):
        ArchiveTree(tmp_path / name)


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        (PURE, wheel({"a.py": ""}, (2026, 3, 4, 5, 6, 8)), 1772600768.0),
        (PURE, wheel({"a.py": ""}, (1980, 1, 1, 0, 0, 0)), None),
        (SOURCE, sdist("x", {"a.py": ""}, 1_772_600_000), 1772600000.0),
        (SOURCE, sdist("x", {"a.py": ""}, 0), None),
    ],
    ids=["wheel", "wheel that hides it", "sdist", "sdist that hides it"],
)
def test_the_newest_member_dates_an_archive(tmp_path: Path, name: str, content: bytes, expected: float | None) -> None:
    (tmp_path / name).write_bytes(content)

    with ArchiveTree(tmp_path / name) as tree:
        assert tree.newest == expected


def deflated(size: int) -> tuple[bytes, bytes]:
    """Return `size` zero bytes, deflated as a repeatable block, and the bytes that end such a stream."""
    packer = zlib.compressobj(9, zlib.DEFLATED, -15)
    return packer.compress(bytes(size)) + packer.flush(zlib.Z_FULL_FLUSH), packer.flush()


def wheel_bomb() -> bytes:
    """Return a wheel of 4 MB in which one module has almost 4 GiB."""
    again, end = deflated(64 << 20)
    packed = again * 63 + end
    sizes = struct.pack("<LLL", 0, len(packed), 63 * (64 << 20))
    name = b"bomb/__init__.py"
    common = struct.pack("<HHHHH", 20, 0, 8, 0, 33) + sizes + struct.pack("<HH", len(name), 0)
    member = b"PK\3\4" + common + name + packed
    entry = b"PK\1\2" + struct.pack("<H", 20) + common + struct.pack("<HHHLL", 0, 0, 0, 0, 0) + name
    return member + entry + b"PK\5\6" + struct.pack("<HHHHLLH", 0, 0, 1, 1, len(entry), len(member), 0)


def sdist_bomb(claimed: int, name: str, *, kind: bytes = tarfile.REGTYPE) -> bytes:
    """Return a source distribution of 4 MB that unpacks to 4 GiB, and whose first member claims to have so many bytes."""
    first = tarfile.TarInfo(name)
    first.size, first.type = claimed, kind
    return gzip.compress(first.tobuf(tarfile.GNU_FORMAT)) + gzip.compress(bytes(64 << 20)) * 64


def test_no_more_of_a_wheel_is_inflated_than_a_module_has(tmp_path: Path) -> None:
    (tmp_path / PURE).write_bytes(wheel_bomb())
    assert 3_900_000 < (tmp_path / PURE).stat().st_size < 4_500_000

    tracemalloc.start()
    with ArchiveTree(tmp_path / PURE) as tree, pytest.raises(SourceError, match="it is larger than 67108864 bytes"):
        tree.module("bomb")

    assert tracemalloc.get_traced_memory()[1] < 200 << 20
    tracemalloc.stop()


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (lambda: sdist_bomb(4 << 30, "x/data.bin"), "more than 1073741824 bytes are packed into it"),
        (lambda: sdist_bomb(4 << 30, "x/module.py"), "x/module.py is larger than"),
        (lambda: sdist_bomb(4 << 30, "x", kind=tarfile.GNUTYPE_LONGNAME), "a header in it is larger than any file"),
        (lambda: sdist_bomb(4 << 30, "x", kind=tarfile.XHDTYPE), "a header in it is larger than any file"),
    ],
    ids=["data", "module", "name", "header"],
)
def test_no_more_of_a_source_distribution_is_unpacked_than_one_has(
    tmp_path: Path, content: Callable[[], bytes], says: str
) -> None:
    (tmp_path / SOURCE).write_bytes(content())
    tracemalloc.start()

    with pytest.raises(SourceError, match=says):
        ArchiveTree(tmp_path / SOURCE)

    assert tracemalloc.get_traced_memory()[1] < 200 << 20
    tracemalloc.stop()


def test_a_damaged_member_is_an_error_and_the_archive_says_so(tmp_path: Path) -> None:
    content = wheel({"a.py": "x = 1\n", "b.py": "y = 2\n"}).replace(b"x = 1\n", b"x = 3\n")
    (tmp_path / PURE).write_bytes(content)

    with ArchiveTree(tmp_path / PURE) as tree:
        assert tree.module("b") is not None
        assert tree.damage is None
        with pytest.raises(SourceError, match=r"cannot read a.py: BadZipFile: Bad CRC-32"):
            tree.module("a")
        assert tree.damage is not None


@pytest.mark.parametrize("when", [10**18, -1, float("nan"), float("inf")], ids=str)
def test_a_member_that_was_written_at_no_time_dates_nothing(tmp_path: Path, when: float) -> None:
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w:gz", format=tarfile.PAX_FORMAT) as archive:
        item = tarfile.TarInfo("x/a.py")
        item.pax_headers = {"mtime": str(when)}
        archive.addfile(item)
    (tmp_path / SOURCE).write_bytes(raw.getvalue())

    with ArchiveTree(tmp_path / SOURCE) as tree:
        assert tree.newest is None


def test_a_large_blob_of_a_commit_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.py").write_text("x = 1\n")
    commit_all(tmp_path)
    monkeypatch.setattr("megacpp_overlays.files.LARGEST", 5)

    with pytest.raises(SourceError, match=r"a.py: it is larger than 5 bytes"):
        CommitTree(tmp_path, "HEAD").module("a")


def test_a_fifo_in_a_tree_does_not_block(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.py")

    with pytest.raises(SourceError, match=r"a.py: cannot read it: it is no regular file"):
        DirectoryTree(tmp_path, prefix="").module("a")
