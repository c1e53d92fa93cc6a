"""The inventory of upstream problems: packs whose words agree, and whose claims are still in upstream's source."""

from __future__ import annotations

import ast
import re
import zipfile
from collections.abc import Callable, Collection
from pathlib import Path
from typing import NamedTuple

import pytest

from megacpp_overlays.loader import registry
from megacpp_overlays.model import Gate
from megacpp_overlays.repro import inventory, manifest, pack_file
from megacpp_overlays.repro.pack_file import PackFile

OVERLAYS = registry.load()
GATES = {overlay.id for overlay in OVERLAYS if isinstance(overlay, Gate)}
SECTIONS = (
    "Target",
    "Problem",
    "Solution",
    "Changed surfaces",
    "Testing evidence",
    "Upstream state",
    "Reproduce",
)
UNKNOWN = "unknown/unknown"
"""Repository of a number of which nothing is known but that it exists."""


class Described(NamedTuple):
    """A pack as its notes, its pack.toml and the declarations of overlays have it."""

    pack: inventory.Pack
    notes: str
    file: PackFile
    kind: str
    state: str
    overlays: tuple[str, ...]


def described(pack: inventory.Pack) -> Described:
    entry = manifest.derive(pack, OVERLAYS, None)
    notes = (pack.folder / "README.md").read_text()
    overlays = tuple(entry["overlays"])
    return Described(pack, notes, pack_file.read(pack.folder), entry["class"], entry["state"], overlays)


INVENTORY = tuple(described(pack) for pack in inventory.list_packs(inventory.own_folder()))
each = pytest.mark.parametrize("entry", INVENTORY, ids=lambda entry: entry.pack.name)


def in_class(*kinds: str) -> pytest.MarkDecorator:
    chosen = [entry for entry in INVENTORY if entry.kind in kinds]
    return pytest.mark.parametrize("entry", chosen, ids=lambda entry: entry.pack.name)


def section(notes: str, name: str) -> str:
    return notes.split(f"\n## {name}\n")[1].split("\n## ")[0]


# What is there


def test_packs_are_numbered_without_a_gap() -> None:
    assert [entry.pack.number for entry in INVENTORY] == list(range(1, len(INVENTORY) + 1))


def test_every_class_of_the_inventory_occurs() -> None:
    assert {entry.kind for entry in INVENTORY} == set(manifest.CLASSES) - {"bug report", "fork"}


@each
def test_notes_begin_with_a_heading_of_their_number_and_a_table_of_class_state_and_overlays(entry: Described) -> None:
    lines = entry.notes.splitlines()

    assert re.fullmatch(rf"# Pack {entry.pack.number:02}: \S.*", lines[0])
    assert lines[2:4] == ["| | |", "|---|---|"]
    assert lines[4] == f"| Class | {entry.kind} |"
    assert lines[5] == f"| Lifecycle state | {entry.state} |"
    assert re.match(r"\| (Overlays?|Gate) \| ", lines[6])
    assert lines[6].startswith("| Gate ") == bool(GATES.intersection(entry.overlays))


@each
def test_the_table_names_the_overlays_that_are_declared_and_no_others(entry: Described) -> None:
    row = entry.notes.splitlines()[6]

    assert set(re.findall(r"`([^`]+)`", row)) == set(entry.overlays)
    assert ("| none |" in row) == (not entry.overlays)


@each
def test_notes_have_these_sections_in_this_order(entry: Described) -> None:
    headings = re.findall(r"^## (.+)$", entry.notes, re.MULTILINE)

    assert [name for name in headings if name in SECTIONS] == list(SECTIONS)


# What the words may be together


@each
def test_a_pack_is_of_class_overlay_when_an_overlay_has_its_number_and_only_then(entry: Described) -> None:
    assert (entry.kind == "overlay") == bool(set(entry.overlays) - GATES)


@each
def test_a_gate_stands_for_a_combination_or_guards_what_was_repaired(entry: Described) -> None:
    assert bool(GATES.intersection(entry.overlays)) == (entry.kind in {"gate", "regression guard"})


@in_class("regression guard")
def test_what_is_guarded_was_repaired_by_upstream(entry: Described) -> None:
    assert entry.file.upstream == "fixed"
    assert re.search(r"Require \S+ \d+(\.\d+)+ or newer", section(entry.notes, "Solution"))


@in_class("held")
def test_what_is_held_is_never_filed(entry: Described) -> None:
    assert entry.file.priority == "none"


@each
def test_what_upstream_has_repaired_is_never_filed(entry: Described) -> None:
    assert entry.file.upstream != "fixed" or entry.file.priority == "none"


@each
def test_what_is_never_filed_is_repaired_or_held(entry: Described) -> None:
    settled = entry.file.upstream in pack_file.SETTLED or entry.kind in {"held", "regression guard"}

    assert entry.file.priority != "none" or settled


@each
def test_what_joins_a_thread_has_one_that_is_open(entry: Described) -> None:
    threads = [
        *entry.file.threads,
        *(thread for each in OVERLAYS if each.id in entry.overlays for thread in each.threads),
    ]
    opened = [thread for thread in threads if re.search(r"\bopen\b|\bnot merged\b", thread.state)]

    assert entry.file.upstream != "overlap" or opened
    assert entry.file.priority != "piggyback" or entry.file.upstream == "overlap"


@each
def test_a_pack_without_a_reproducer_is_a_draft_and_says_so(entry: Described) -> None:
    if entry.pack.reproducer.exists():
        assert "No reproducer yet" not in entry.notes
        return

    assert entry.state == "draft"
    assert "No reproducer yet" in section(entry.notes, "Testing evidence")
    assert "No reproducer yet" in section(entry.notes, "Reproduce")


# What is said of upstream


@each
def test_a_known_problem_names_its_files_and_an_unknown_one_names_nothing(entry: Described) -> None:
    file = entry.file
    unknown = file.repository == UNKNOWN

    assert bool(file.files) == (not unknown)
    assert bool(file.targets or entry.overlays) == (not unknown)
    assert not unknown or (entry.kind == "held" and not file.threads)


def test_the_two_numbers_that_the_notes_never_describe_are_unknown() -> None:
    assert [entry.pack.number for entry in INVENTORY if entry.file.repository == UNKNOWN] == [6, 15]


@each
def test_nothing_is_said_again_that_an_overlay_declares(entry: Described) -> None:
    mine = [overlay for overlay in OVERLAYS if overlay.id in entry.overlays]
    declared = {(thread.repository, thread.number) for overlay in mine for thread in overlay.threads}

    assert not declared & {(thread.repository, thread.number) for thread in entry.file.threads}
    assert not {overlay.target for overlay in mine} & set(entry.file.targets)


@each
def test_every_thread_is_listed_once_and_dated_or_marked_as_not_checked(entry: Described) -> None:
    keys = [(thread.repository, thread.number) for thread in entry.file.threads]

    assert len(keys) == len(set(keys))
    for thread in entry.file.threads:
        assert re.match(r"(open|merged|closed|not checked)\b", thread.state), thread
        assert re.search(r"20\d\d-\d\d-\d\d|not checked", thread.state), thread


@each
def test_files_are_paths_in_a_repository_in_order(entry: Described) -> None:
    assert list(entry.file.files) == sorted(set(entry.file.files))
    for file in entry.file.files:
        assert re.fullmatch(r"[\w.-]+(/[\w.-]+)+", file)


@each
def test_every_python_target_is_in_a_file_of_the_pack(entry: Described) -> None:
    for target in entry.file.targets:
        if target.distribution != "tilelang":  # its passes are C++ behind a Python function
            assert f"{target.module.replace('.', '/')}.py" in entry.file.files


# Read again, in what upstream ships

EXPERIMENTAL = "megatron/core/transformer/experimental_attention_variant"
SHIPPED = {
    1: ("megatron-core", "0.19.2"),
    2: ("megatron-core", "0.19.2"),
    9: ("liger-kernel", "0.8.5"),
    12: ("megatron-core", "0.19.2"),
    14: ("megatron-core", "0.19.2"),
    16: ("megatron-core", "0.19.2"),
    45: ("megatron-core", "0.19.2"),
}
"""The release whose wheel holds the files of a pack. The others are in a branch, in a sdist, or in another language."""
TOPS = {
    "state-spaces/mamba": "mamba_ssm",
    "tile-ai/tilelang": "src/layout",
    "NVIDIA/TransformerEngine": "transformer_engine",
}
"""The folder by which a checkout that was given with `--upstream-tree` is known."""
DEV = "megatron/core/fusions/linear_cross_entropy"
"""A folder that Megatron's dev has, and no release and no main."""

Wheel = Callable[[str, str], Path]
shipped = pytest.mark.parametrize("number", sorted(SHIPPED))


def by_number(number: int) -> Described:
    return next(entry for entry in INVENTORY if entry.pack.number == number)


def read(wheel: Path, file: str) -> str:
    return zipfile.ZipFile(wheel).read(file).decode()


def definitions(text: str) -> dict[str, ast.stmt]:
    tree = ast.parse(text)
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    return {node.name: node for node in tree.body if isinstance(node, kinds)}


@pytest.mark.upstream
@shipped
def test_files_of_a_pack_are_in_the_newest_release(number: int, wheel: Wheel) -> None:
    names = set(zipfile.ZipFile(wheel(*SHIPPED[number])).namelist())

    assert {file.removeprefix("src/") for file in by_number(number).file.files} - names == set()


@pytest.mark.upstream
@pytest.mark.parametrize("number", sorted(set(SHIPPED) & {2, 14, 45}))
def test_targets_of_a_pack_are_defined_in_the_newest_release(number: int, wheel: Wheel) -> None:
    release = wheel(*SHIPPED[number])

    for target in by_number(number).file.targets:
        assert target.symbol in definitions(read(release, f"{target.module.replace('.', '/')}.py"))


@pytest.mark.upstream
def test_pack_02_the_newest_release_takes_no_other_sizes(wheel: Wheel) -> None:
    release = wheel("megatron-core", "0.19.2")
    ops = f"{EXPERIMENTAL}/ops"

    assert "query.size(-1) != 576 or v_channels != 512" in read(release, f"{ops}/tilelang_dsa.py")
    forward = read(release, f"{ops}/tilelang_sparse_mla_fwd.py")
    assert re.search(r"assert \(\s*dim_plus_tail_dim == 576", forward)
    assert forward.count("tilelang.math.next_power_of_2(\n        tail_dim") == 1
    assert "assert dim == tilelang.math.next_power_of_2(dim)" in forward
    assert "d_v=512" in forward
    assert "d_v" not in read(release, f"{ops}/sparse_mla.py")
    assert re.search(r"^    D = 512$", read(release, f"{ops}/tilelang_sparse_mla_bwd.py"), re.MULTILINE)


@pytest.mark.upstream
def test_pack_14_the_newest_release_multiplies_both_buffers_by_tensors_of_their_own_type(wheel: Wheel) -> None:
    text = read(wheel("megatron-core", "0.19.2"), f"{EXPERIMENTAL}/ops/tilelang_sparse_mla_bwd.py")

    for buffer in ("P_shared_cast", "dP_shared_cast"):
        assert f"{buffer} = T.alloc_shared([block_H, BS], dtype)" in text
    assert len(re.findall(r"T\.gemm\(\s*d?P_shared_cast,", text)) == 5


@pytest.mark.upstream
@pytest.mark.parametrize("version", ["0.16.1", "0.18.2", "0.19.2"])
def test_pack_11_no_release_has_the_module_that_hybrid_models_lack(version: str, wheel: Wheel) -> None:
    names = zipfile.ZipFile(wheel("megatron-core", version)).namelist()

    assert "megatron/core/transformer/linear_cross_entropy.py" not in names


# Read again, in checkouts that were given


def given(trees: Collection[Path], top: str) -> list[Path]:
    found = [tree for tree in trees if (tree / top).is_dir()]
    if not found:
        pytest.skip(f"no --upstream-tree with {top}/")
    return found


@pytest.mark.upstream
@pytest.mark.parametrize("number", [3, 4, 5, 7, 8, 13])
def test_files_of_a_pack_are_in_a_checkout_that_was_given(number: int, upstream_trees: list[Path]) -> None:
    file = by_number(number).file

    for tree in given(upstream_trees, TOPS[file.repository]):
        assert [name for name in file.files if not (tree / name).is_file()] == []


@pytest.mark.upstream
@pytest.mark.parametrize("number", [10, 11])
def test_files_of_a_pack_about_dev_are_in_a_checkout_of_dev(number: int, upstream_trees: list[Path]) -> None:
    for tree in given(upstream_trees, DEV):
        assert [name for name in by_number(number).file.files if not (tree / name).is_file()] == []


@pytest.mark.upstream
def test_pack_11_dev_wires_the_fused_loss_into_gpt_and_not_into_hybrid_models(upstream_trees: list[Path]) -> None:
    for tree in given(upstream_trees, DEV):
        models = tree / "megatron/core/models"
        assert "LinearCrossEntropyModule" in (models / "gpt/gpt_model.py").read_text()
        assert "LinearCrossEntropyModule" not in (models / "hybrid/hybrid_model.py").read_text()


@pytest.mark.upstream
def test_pack_04_the_kernel_writes_its_product_three_times(upstream_trees: list[Path]) -> None:
    for tree in given(upstream_trees, "mamba_ssm"):
        text = (tree / by_number(4).file.files[0]).read_text()
        assert text.count("tl.dot(v_block, tl.trans(do_block))") == 3
