"""The inventory of upstream problems: packs whose words agree, and whose claims are still in upstream's source."""

from __future__ import annotations

import ast
import functools
import re
import zipfile
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest
from releases import newest

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


class PackDescription(NamedTuple):
    """A pack as its notes, its pack.toml and the declarations of overlays have it."""

    pack: inventory.Pack
    notes: str
    file: PackFile
    kind: str
    state: str
    overlays: tuple[str, ...]


def described(pack: inventory.Pack) -> PackDescription:
    entry = manifest.derive(pack, OVERLAYS, None)
    notes = (pack.folder / "README.md").read_text()
    overlays = tuple(entry["overlays"])
    return PackDescription(pack, notes, pack_file.read(pack.folder), entry["class"], entry["state"], overlays)


@functools.cache
def packs() -> tuple[PackDescription, ...]:
    return tuple(described(pack) for pack in inventory.list_packs(inventory.own_folder()))


def wrong(*rules: Callable[[PackDescription], Iterator[str]]) -> list[str]:
    """Return the errors of all packs, each with the name of its pack: a rule yields one sentence for each error."""
    return [f"{entry.pack.name}: {each}" for entry in packs() for rule in rules for each in rule(entry)]


def section(notes: str, name: str) -> str:
    return notes.partition(f"\n## {name}\n")[2].split("\n## ")[0]


# Packs and classes


def test_packs_are_numbered_without_a_gap_and_every_class_of_the_inventory_occurs() -> None:
    assert [entry.pack.number for entry in packs()] == list(range(1, len(packs()) + 1))
    assert {entry.kind for entry in packs()} == set(manifest.CLASSES) - {"bug report", "fork"}


def heading_and_table(entry: PackDescription) -> Iterator[str]:
    """Notes begin with a heading of their number and a table of class, state and overlays."""
    lines = entry.notes.splitlines()
    if not re.fullmatch(rf"# Pack {entry.pack.number:02}: \S.*", lines[0]):
        yield f"the heading is {lines[0]}"
    expected = ["| | |", "|---|---|", f"| Class | {entry.kind} |", f"| Lifecycle state | {entry.state} |"]
    if lines[2:6] != expected:
        yield f"the table begins with {lines[2:6]}, and not with {expected}"
    row, gates = lines[6], GATES.intersection(entry.overlays)
    if not re.match(r"\| (Overlays?|Gate) \| ", row) or row.startswith("| Gate ") != bool(gates):
        yield f"the row of overlays is {row}, and gates are {sorted(gates)}"
    if set(re.findall(r"`([^`]+)`", row)) != set(entry.overlays) or ("| none |" in row) != (not entry.overlays):
        yield f"the row of overlays is {row}, and declared are {entry.overlays}"


def sections(entry: PackDescription) -> Iterator[str]:
    headings = [name for name in re.findall(r"^## (.+)$", entry.notes, re.MULTILINE) if name in SECTIONS]
    if headings != list(SECTIONS):
        yield f"the sections are {headings}"


def test_notes_begin_with_a_heading_and_a_table_and_have_all_sections_in_order() -> None:
    assert not wrong(heading_and_table, sections)


# Combinations of fields


def class_and_overlays(entry: PackDescription) -> Iterator[str]:
    if (entry.kind == "overlay") != bool(set(entry.overlays) - GATES):
        yield f"it is of class {entry.kind}, and its overlays are {entry.overlays}"
    if bool(GATES.intersection(entry.overlays)) != (entry.kind in {"gate", "regression guard"}):
        yield f"it is of class {entry.kind}: a gate is for a combination, or guards a repair"


def what_is_guarded(entry: PackDescription) -> Iterator[str]:
    if entry.kind != "regression guard":
        return
    if entry.file.upstream != "fixed":
        yield "upstream has not repaired the defect that it guards"
    if not re.search(r"Require \S+ \d+(\.\d+)+ or newer", section(entry.notes, "Solution")):
        yield "its solution requires no release"


def test_a_class_fits_the_overlays_and_a_guarded_defect_was_repaired_by_upstream() -> None:
    assert not wrong(class_and_overlays, what_is_guarded)


def priority(entry: PackDescription) -> Iterator[str]:
    """A held pack, or one that upstream fixed, has no priority; a pack without a priority is held, settled or a regression guard."""
    file = entry.file
    if file.priority != "none" and (entry.kind == "held" or file.upstream == "fixed"):
        yield f"it is {entry.kind}, {file.upstream} upstream, and to be filed: {file.priority}"
    if file.priority == "none" and not (
        file.upstream in pack_file.SETTLED or entry.kind in {"held", "regression guard"}
    ):
        yield f"it is {entry.kind}, {file.upstream} upstream, and never to be filed"


def joined(entry: PackDescription) -> Iterator[str]:
    """A pack that joins a thread has an open thread."""
    declared = [thread for each in OVERLAYS if each.id in entry.overlays for thread in each.threads]
    opened = [each for each in (*entry.file.threads, *declared) if re.search(r"\bopen\b|\bnot merged\b", each.state)]
    if entry.file.upstream == "overlap" and not opened:
        yield "it overlaps with no thread that is open"
    if entry.file.priority == "piggyback" and entry.file.upstream != "overlap":
        yield f"it joins a thread, and upstream is {entry.file.upstream}"


def test_a_settled_pack_is_never_filed_and_one_that_joins_a_thread_has_an_open_one() -> None:
    assert not wrong(priority, joined)


def reproducer(entry: PackDescription) -> Iterator[str]:
    """Notes say how to run the reproducer; a pack without one is a draft and says so."""
    if f"megacpp-overlays repro {entry.pack.number}" not in entry.notes:
        yield "its notes do not say how to run its reproducer"
    missing = [name for name in ("Testing evidence", "Reproduce") if "No reproducer yet" in section(entry.notes, name)]
    if entry.pack.reproducer.exists():
        if "No reproducer yet" in entry.notes:
            yield "its notes say that it has no reproducer"
    elif entry.state != "draft" or len(missing) < 2:
        yield f"it has no reproducer, is {entry.state}, and says so in {missing}"


def test_notes_say_how_to_run_the_reproducer_and_a_pack_without_one_is_a_draft() -> None:
    assert not wrong(reproducer)


# Fields about upstream


def known(entry: PackDescription) -> Iterator[str]:
    """A known problem names its files, and an unknown one names nothing."""
    file, unknown = entry.file, entry.file.repository == UNKNOWN
    if bool(file.files) == unknown or bool(file.targets or entry.overlays) == unknown:
        yield f"it is about {file.repository} and names {file.files}, {file.targets} and {entry.overlays}"
    if unknown and (entry.kind != "held" or file.threads):
        yield f"nothing is known of it, and it is {entry.kind} with threads {file.threads}"


def said_again(entry: PackDescription) -> Iterator[str]:
    """Nothing is said again that an overlay declares."""
    mine = [overlay for overlay in OVERLAYS if overlay.id in entry.overlays]
    declared = {(thread.repository, thread.number) for overlay in mine for thread in overlay.threads}
    for thread in sorted(declared & {(thread.repository, thread.number) for thread in entry.file.threads}):
        yield f"an overlay declares {thread}, too"
    for target in {overlay.target for overlay in mine} & set(entry.file.targets):
        yield f"an overlay declares {target}, too"


def threads(entry: PackDescription) -> Iterator[str]:
    """Every thread is listed once, and dated or marked as not checked."""
    keys = [(thread.repository, thread.number) for thread in entry.file.threads]
    if len(keys) != len(set(keys)):
        yield f"a thread is listed twice in {keys}"
    for thread in entry.file.threads:
        if not re.match(r"(open|merged|closed|not checked)\b", thread.state):
            yield f"{thread} has no known state"
        if not re.search(r"20\d\d-\d\d-\d\d|not checked", thread.state):
            yield f"{thread} has no date"


def files(entry: PackDescription) -> Iterator[str]:
    """Files are paths in a repository, in order, and each Python target is in one of them."""
    if list(entry.file.files) != sorted(set(entry.file.files)):
        yield "its files are not in order"
    yield from (f"{file} is no path" for file in entry.file.files if not re.fullmatch(r"[\w.-]+(/[\w.-]+)+", file))
    for target in entry.file.targets:
        path = f"{target.module.replace('.', '/')}.py"
        if target.distribution != "tilelang" and path not in entry.file.files:  # its passes are C++ behind Python
            yield f"{path} has a target, and is none of its files"


def test_threads_files_and_targets_are_complete_and_said_once() -> None:
    assert not wrong(known, said_again, threads, files)
    assert [entry.pack.number for entry in packs() if entry.file.repository == UNKNOWN] == [6, 15]


def test_each_of_these_rules_can_fail() -> None:
    """A pack whose notes are empty and whose file contradicts itself and an overlay breaks all of them."""
    entry = next(entry for entry in packs() if entry.overlays and entry.file.threads)
    overlay = next(each for each in OVERLAYS if each.id in entry.overlays and each.threads)
    file = replace(
        entry.file,
        repository=UNKNOWN,
        upstream="overlap",
        priority="none",
        threads=(overlay.threads[0]._replace(state="lost"),) * 2,
        files=("b", "a"),
    )
    bad = entry._replace(notes="\n" * 8, file=file, kind="regression guard", overlays=(), state="lost")
    bad = bad._replace(pack=replace(bad.pack, folder=bad.pack.folder / "none"))

    for rule in (
        heading_and_table,
        sections,
        class_and_overlays,
        what_is_guarded,
        joined,
        reproducer,
        known,
        threads,
        files,
    ):
        assert list(rule(bad)), rule.__name__
    assert list(said_again(bad._replace(overlays=entry.overlays)))
    assert list(priority(bad._replace(kind="overlay", file=replace(file, upstream="new"))))


# Read again, in upstream's releases

EXPERIMENTAL = "megatron/core/transformer/experimental_attention_variant"
SHIPPED = {
    9: ("liger-kernel", newest("liger-kernel")),
    **dict.fromkeys((1, 2, 12, 14, 16, 45), ("megatron-core", newest())),
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


def by_number(number: int) -> PackDescription:
    return next(entry for entry in packs() if entry.pack.number == number)


def read(wheel: Path, file: str) -> str:
    return zipfile.ZipFile(wheel).read(file).decode()


def definitions(text: str) -> dict[str, ast.stmt]:
    tree = ast.parse(text)
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    return {node.name: node for node in tree.body if isinstance(node, kinds)}


@pytest.mark.upstream
def test_files_and_targets_of_packs_are_in_the_newest_release(wheel: Wheel) -> None:
    for number, release in SHIPPED.items():
        names = set(zipfile.ZipFile(wheel(*release)).namelist())
        assert {file.removeprefix("src/") for file in by_number(number).file.files} - names == set(), number
    for number in (2, 14, 45):
        for target in by_number(number).file.targets:
            text = read(wheel(*SHIPPED[number]), f"{target.module.replace('.', '/')}.py")
            assert target.symbol in definitions(text), target


@pytest.mark.upstream
def test_pack_02_the_newest_release_takes_no_other_sizes(wheel: Wheel) -> None:
    release = wheel("megatron-core", newest())
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
    text = read(wheel("megatron-core", newest()), f"{EXPERIMENTAL}/ops/tilelang_sparse_mla_bwd.py")

    for buffer in ("P_shared_cast", "dP_shared_cast"):
        assert f"{buffer} = T.alloc_shared([block_H, BS], dtype)" in text
    assert len(re.findall(r"T\.gemm\(\s*d?P_shared_cast,", text)) == 5


@pytest.mark.upstream
def test_pack_11_no_release_has_the_module_that_hybrid_models_lack(wheel: Wheel) -> None:
    for version in ("0.16.1", "0.18.2", newest()):
        names = zipfile.ZipFile(wheel("megatron-core", version)).namelist()
        assert "megatron/core/transformer/linear_cross_entropy.py" not in names, version


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
