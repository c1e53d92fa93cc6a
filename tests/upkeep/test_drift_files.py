"""Installed files compared with their RECORD: an installation by pip is clean, and each edited file is named."""

from __future__ import annotations

import os
import py_compile
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from py_compile import PycInvalidationMode

import pytest
from drift_environments import digest, install, installed_in, make_wheel
from made_up import Upstream

from megacpp_overlays.errors import UpkeepError
from megacpp_overlays.upkeep.drift import drift
from megacpp_overlays.upkeep.drift.drift import DriftReport, DriftState
from megacpp_overlays.upkeep.drift.installations import import_names
from megacpp_overlays.upkeep.drift.records import Kind

FILES = {
    "fast_ops/__init__.py": "",
    "fast_ops/scale.py": "def scale(x):\n    return 2 * x\n",
    "fast_ops/kernels/__init__.py": "",
    "fast_ops/kernels/tile.so": "not really compiled",
}


@pytest.fixture(scope="session")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One folder that pip installed into, with two distributions that share a namespace."""
    folder = tmp_path_factory.mktemp("published")
    entry_point = {"fast_ops-1.0.dist-info/entry_points.txt": "[console_scripts]\nfast-ops = fast_ops:main\n"}
    make_wheel(folder / "wheels", "fast_ops", "1.0", {**FILES, **entry_point})
    make_wheel(folder / "wheels", "lab_core", "1.0", {"lab/core/__init__.py": "", "lab/core/x.py": "X = 1\n"})
    make_wheel(folder / "wheels", "lab_more", "1.0", {"lab/more/__init__.py": "", "lab_flat.py": "Y = 1\n"})
    install(folder / "target", "fast_ops", "lab_core", "lab_more", find_links=folder / "wheels")
    return folder / "target"


@pytest.fixture
def target(published: Path, tmp_path: Path) -> Path:
    """A copy of the installed folder that a test may edit."""
    shutil.copytree(published, tmp_path / "target")
    return tmp_path / "target"


@pytest.fixture
def examine(target: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., DriftReport]:
    """Compare distributions of the copy."""

    def run(*names: str, quick: bool = False, required: bool = False) -> DriftReport:
        installed = installed_in(target, monkeypatch)
        return drift.examine(names or ("fast-ops",), installed, (), quick=quick, required=required)

    return run


def found(report: DriftReport) -> Mapping[str, Kind]:
    return {each.file: each.kind for row in report.rows for each in row.differences}


def test_an_installation_by_pip_is_clean_scripts_and_bytecode_included(
    target: Path, examine: Callable[..., DriftReport]
) -> None:
    cache = target / "fast_ops" / "__pycache__"
    cache.mkdir(exist_ok=True)
    (cache / "scale.cpython-399.pyc").write_bytes(b"made by a run")
    (target / "fast_ops" / "old.pyo").write_bytes(b"made by a run")
    assert (target / "bin" / "fast-ops").is_file()

    report = examine("fast-ops", "lab-core", "lab-more")

    assert report.clean
    assert [(row.version, row.where, row.state) for row in report.rows] == [("1.0", "RECORD", DriftState.CLEAN)] * 3
    assert report.rows[0].checked >= len(FILES) + 4


def test_an_installation_by_uv_is_restored_past_its_cache(target: Path, examine: Callable[..., DriftReport]) -> None:
    (target / "fast_ops-1.0.dist-info" / "INSTALLER").write_text("uv")

    assert "uv pip install --reinstall --no-cache --no-deps fast-ops==1.0" in examine().rows[0].restore


def test_metadata_is_compared_too(target: Path, examine: Callable[..., DriftReport]) -> None:
    (target / "fast_ops-1.0.dist-info" / "entry_points.txt").write_text("[console_scripts]\nfast-ops = other:main\n")

    assert found(examine()) == {"fast_ops-1.0.dist-info/entry_points.txt": Kind.CHANGED}


def test_a_quick_look_compares_sizes_and_says_so(target: Path, examine: Callable[..., DriftReport]) -> None:
    (target / "fast_ops" / "scale.py").write_text("def scale(x):\n    return 3 * x\n")  # as long as it was
    (target / "fast_ops" / "__init__.py").write_text("x = 1\n")

    report = examine(quick=True)

    assert found(report) == {"fast_ops/__init__.py": Kind.CHANGED}
    assert report.quick


def test_a_shared_folder_is_everybodys_and_a_part_of_it_its_owners(
    target: Path, examine: Callable[..., DriftReport]
) -> None:
    (target / "lab" / "__init__.py").write_text("")  # it would hide every other part of the namespace
    (target / "lab" / "more" / "extra.py").write_text("")

    assert found(examine("lab-core")) == {"lab/__init__.py": Kind.ADDED}
    assert found(examine("lab-more")) == {"lab/__init__.py": Kind.ADDED, "lab/more/extra.py": Kind.ADDED}


def test_import_names_are_the_outermost_packages_and_modules(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed = installed_in(target, monkeypatch)

    assert import_names(installed["fast-ops"]) == ("fast_ops",)
    assert import_names(installed["lab-core"]) == ("lab.core",)
    assert import_names(installed["lab-more"]) == ("lab.more", "lab_flat")


def test_without_a_record_nothing_is_vouched_for(target: Path, examine: Callable[..., DriftReport]) -> None:
    (target / "fast_ops-1.0.dist-info" / "RECORD").unlink()
    (target / "fast_ops-1.0.dist-info" / "INSTALLER").write_text("conda\n")

    report = examine()

    assert report.rows[0].state is DriftState.UNCHECKED
    assert report.rows[0].unchecked == ("it was installed without a RECORD by conda",)
    assert not report.clean


def test_a_line_without_a_hash_leaves_the_distribution_unchecked(
    target: Path, examine: Callable[..., DriftReport]
) -> None:
    record = target / "fast_ops-1.0.dist-info" / "RECORD"
    lines = record.read_text().splitlines()
    record.write_text(
        "\n".join("fast_ops/scale.py,," if line.startswith("fast_ops/scale.py") else line for line in lines)
    )

    row = examine().rows[0]

    assert (row.state, row.unchecked) == (DriftState.UNCHECKED, ("fast_ops/scale.py has no hash",))


def test_an_upgrade_that_was_left_half_done_cannot_be_checked(
    target: Path, examine: Callable[..., DriftReport]
) -> None:
    shutil.copytree(target / "fast_ops-1.0.dist-info", target / "fast_ops-0.9.dist-info")
    metadata = target / "fast_ops-0.9.dist-info" / "METADATA"
    metadata.write_text(metadata.read_text().replace("1.0", "0.9"))

    row = examine().rows[0]

    assert row.state is DriftState.UNCHECKED
    assert "an upgrade was left half done" in row.unchecked[0]


def test_metadata_that_cannot_be_read_is_an_error_with_a_way_out(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (target / "fast_ops-1.0.dist-info" / "direct_url.json").write_text("{")

    with pytest.raises(UpkeepError, match=r"fast_ops-1\.0\.dist-info: the metadata .* reinstall it"):
        installed_in(target, monkeypatch)


def test_a_build_from_a_repository_names_its_commit(target: Path, examine: Callable[..., DriftReport]) -> None:
    origin = '{"url": "https://example.org/fast.git", "vcs_info": {"vcs": "git", "commit_id": "0123456789abcdef0123"}}'
    (target / "fast_ops-1.0.dist-info" / "direct_url.json").write_text(origin)

    row = examine().rows[0]

    assert row.where == "RECORD, from https://example.org/fast.git at 0123456789ab"
    assert row.restore.endswith(" git+https://example.org/fast.git@0123456789abcdef0123")


def test_a_person_asks_by_any_spelling_of_an_installed_name(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed = installed_in(target, monkeypatch)

    assert drift.demand(["Fast_Ops", "fast.ops"], installed) == ("fast-ops",)
    with pytest.raises(UpkeepError, match="--distribution fats-ops: no such distribution is installed here"):
        drift.demand(["fats-ops"], installed)


def test_usually_the_targets_of_overlays_and_the_stack_are_looked_at(upstream: Upstream) -> None:
    names = drift.usual([upstream.overlay()])

    assert {"torch", "triton", "megatron-core", "mamba-ssm", "liger-kernel", "tilelang"} <= set(names)
    assert upstream.name.replace("_", "-") in names


def test_a_link_to_other_code_in_site_packages_is_seen_through(
    target: Path, tmp_path: Path, examine: Callable[..., DriftReport]
) -> None:
    elsewhere = tmp_path / "elsewhere"
    shutil.move(target / "fast_ops", elsewhere / "fast_ops")
    (target / "fast_ops").symlink_to(elsewhere / "fast_ops")

    report = examine()

    assert [row.state for row in report.rows] == [DriftState.CLEAN, DriftState.UNCHECKED]
    assert f"it is imported from {elsewhere}, which no RECORD and no commit accounts for" in report.rows[1].unchecked[0]


def test_a_link_to_a_folder_is_a_file_of_its_own(
    target: Path, tmp_path: Path, examine: Callable[..., DriftReport]
) -> None:
    for name in ("scale", "kernels"):
        (tmp_path / "elsewhere" / name).mkdir(parents=True)
        (tmp_path / "elsewhere" / name / "__init__.py").write_text("")
    (target / "fast_ops" / "scale").symlink_to(tmp_path / "elsewhere" / "scale")  # it is imported before scale.py
    shutil.move(target / "fast_ops" / "kernels" / "tile.so", tmp_path / "elsewhere" / "kernels" / "tile.so")
    shutil.rmtree(target / "fast_ops" / "kernels")
    (target / "fast_ops" / "kernels").symlink_to(tmp_path / "elsewhere" / "kernels")  # with the files of RECORD

    assert found(examine()) == {"fast_ops/scale": Kind.ADDED, "fast_ops/kernels": Kind.ADDED}


def test_a_link_in_place_of_a_part_belongs_to_the_distribution_of_the_part(
    target: Path, tmp_path: Path, examine: Callable[..., DriftReport]
) -> None:
    shutil.move(target / "lab" / "more", tmp_path / "more")
    (target / "lab" / "more").symlink_to(tmp_path / "more")

    assert found(examine("lab-core")) == {}
    assert found(examine("lab-more"))["lab/more"] is Kind.ADDED


def compiled(source: Path, cache: Path, mode: PycInvalidationMode = PycInvalidationMode.TIMESTAMP) -> None:
    py_compile.compile(str(source), cfile=str(cache), invalidation_mode=mode, doraise=True)


def test_bytecode_that_needs_no_source_is_code_like_any_other(
    target: Path, tmp_path: Path, examine: Callable[..., DriftReport]
) -> None:
    (tmp_path / "extra.py").write_text("x = 1\n")
    compiled(tmp_path / "extra.py", target / "fast_ops" / "extra.pyc")

    assert found(examine()) == {"fast_ops/extra.pyc": Kind.ADDED}


def test_cached_bytecode_that_python_never_compares_with_its_source_is_named(
    target: Path, tmp_path: Path, examine: Callable[..., DriftReport]
) -> None:
    cache = target / "fast_ops" / "__pycache__"
    shutil.rmtree(cache, ignore_errors=True)
    (tmp_path / "scale.py").write_text("def scale(x):\n    return 4 * x\n")
    modes = {
        "scale.cpython-312.pyc": PycInvalidationMode.UNCHECKED_HASH,
        "scale.cpython-313.pyc": PycInvalidationMode.CHECKED_HASH,
        "scale.cpython-314.pyc": PycInvalidationMode.TIMESTAMP,
    }
    for name, mode in modes.items():
        compiled(tmp_path / "scale.py", cache / name, mode)
    (cache / "scale.nbi").write_bytes(b"cache of another compiler")
    record = target / "fast_ops-1.0.dist-info" / "RECORD"
    unnamed = found(examine())
    record.write_text(f"{record.read_text()}fast_ops/__pycache__/scale.cpython-312.pyc,,\n")  # as pip does

    assert unnamed == {"fast_ops/__pycache__/scale.cpython-312.pyc": Kind.ADDED}
    assert found(examine()) == unnamed
    content = (cache / "scale.cpython-312.pyc").read_bytes()
    line = f"fast_ops/__pycache__/scale.cpython-312.pyc,sha256={digest(content)},{len(content)}"
    record.write_text(record.read_text().replace("fast_ops/__pycache__/scale.cpython-312.pyc,,", line))
    assert found(examine()) == {}  # published so
    (cache / "scale.cpython-312.pyc").write_bytes(content + b"more")
    assert found(examine()) == {"fast_ops/__pycache__/scale.cpython-312.pyc": Kind.CHANGED}


def test_a_cache_that_lies_elsewhere_is_named(
    target: Path, tmp_path: Path, examine: Callable[..., DriftReport]
) -> None:
    shutil.rmtree(target / "fast_ops" / "__pycache__", ignore_errors=True)
    (target / "fast_ops" / "__pycache__").symlink_to(tmp_path)

    assert found(examine()) == {"fast_ops/__pycache__": Kind.ADDED}


def test_a_missing_distribution_that_was_asked_for_by_name_is_not_clean(examine: Callable[..., DriftReport]) -> None:
    usual = examine("fast-ops", "never-published")
    assert ([row.distribution for row in usual.rows], usual.absent) == (["fast-ops"], ("never-published",))
    assert usual.clean
    assert not examine("fast-ops", "never-published", required=True).clean
    assert examine("fast-ops", required=True).clean


def test_a_file_of_record_outside_of_the_environment_is_not_read(
    target: Path, tmp_path: Path, examine: Callable[..., DriftReport]
) -> None:
    """Otherwise a RECORD could make the command print the hash of any file of this user."""
    (tmp_path / "secret").write_text("swordfish")
    record = target / "fast_ops-1.0.dist-info" / "RECORD"
    wrong = "sha256=AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA"
    names = ("../secret", str(tmp_path / "secret"), "fast_ops/../../secret")
    record.write_text(record.read_text() + "".join(f"{name},{wrong},\n" for name in names))

    [row] = examine().rows

    assert row.unchecked == tuple(f"{name} lies outside of this environment, and is not read" for name in names)
    assert row.differences == ()


def test_files_of_the_environment_next_to_its_packages_are_read(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packages = tmp_path / "env" / "lib" / "python3.12" / "site-packages"
    shutil.copytree(target, packages)
    (tmp_path / "env" / "bin").mkdir()
    shutil.move(packages / "bin" / "fast-ops", tmp_path / "env" / "bin" / "fast-ops")
    record = packages / "fast_ops-1.0.dist-info" / "RECORD"
    record.write_text(record.read_text().replace("../../bin/", "../../../bin/"))

    report = drift.examine(("fast-ops",), installed_in(packages, monkeypatch), ())
    assert report.clean

    (tmp_path / "env" / "bin" / "fast-ops").write_text("another")
    assert [*found(drift.examine(("fast-ops",), installed_in(packages, monkeypatch), ()))] == ["../../../bin/fast-ops"]


def test_a_fifo_does_not_block(target: Path, examine: Callable[..., DriftReport]) -> None:
    (target / "fast_ops" / "scale.py").unlink()
    for name in ("scale.py", "hot.py", "__pycache__/scale.cpython-312.pyc"):
        (target / "fast_ops" / name).parent.mkdir(exist_ok=True)
        (target / "fast_ops" / name).unlink(missing_ok=True)
        os.mkfifo(target / "fast_ops" / name)

    report = examine()

    assert found(report) == {"fast_ops/hot.py": Kind.ADDED, "fast_ops/scale.py": Kind.CHANGED}
    assert [each.sha256 for each in report.rows[0].differences] == [None, None]


def test_metadata_that_is_a_fifo_is_an_error(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (target / "fast_ops-1.0.dist-info" / "INSTALLER").unlink()
    os.mkfifo(target / "fast_ops-1.0.dist-info" / "INSTALLER")

    with pytest.raises(UpkeepError, match="INSTALLER is no regular file"):
        installed_in(target, monkeypatch)


@pytest.mark.parametrize("name", ["INSTALLER", "top_level.txt"])
def test_metadata_that_is_not_utf_8_is_an_error(target: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    (target / "fast_ops-1.0.dist-info" / name).write_bytes(b"\xff")

    with pytest.raises(
        UpkeepError, match=r"fast_ops-1\.0\.dist-info: the metadata .* cannot be read \(UnicodeDecodeError"
    ):
        installed_in(target, monkeypatch)


def test_a_record_that_is_not_utf_8_leaves_the_distribution_unchecked(
    target: Path, examine: Callable[..., DriftReport]
) -> None:
    (target / "fast_ops-1.0.dist-info" / "RECORD").write_bytes(b"\xff,,\n")

    [row] = examine().rows

    assert row.state is DriftState.UNCHECKED
    assert row.unchecked[0].startswith("RECORD is not UTF-8")


@pytest.mark.parametrize(
    "line",
    ["fast_ops/__init__.py", "fast_ops/\0.py,sha256=AA,1", f"x.py,sha256=AA,{'9' * 5000}"],
    ids=["a path alone", "NUL", "a long number"],
)
def test_a_record_that_no_installer_writes_is_no_record(
    target: Path, examine: Callable[..., DriftReport], line: str
) -> None:
    (target / "fast_ops-1.0.dist-info" / "RECORD").write_text(f"{line}\n")

    [row] = examine().rows

    assert row.state is DriftState.UNCHECKED
    assert row.unchecked[0].startswith("RECORD")
