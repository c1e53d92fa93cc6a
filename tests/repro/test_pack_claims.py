"""The claims of packs 4, 7, 14 and 45 about upstream: the source edits of their reproducers, and their answers."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
import zipfile
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pack_claims_sources as made
import pytest
import warm_python
from hypothesis import given
from hypothesis import strategies as st
from places import HANG_S, ROOT

from megacpp_overlays.repro import TargetAbsent, inventory

Wheel = Callable[[str, str], Path]
EXPERIMENTAL = "megatron/core/transformer/experimental_attention_variant"


def reproducer(number: int) -> ModuleType:
    path = inventory.find(inventory.own_folder(), number).reproducer
    cases = inventory.load_cases(path)
    return sys.modules[cases[0].run.__module__]


SISO, MIMO, SPARSE, STAGES = (reproducer(number) for number in (4, 7, 14, 45))


def installed(module: str) -> str:
    """Return the source of a module of mamba-ssm that is installed; the package itself is not imported."""
    spec = find_spec("mamba_ssm")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("mamba-ssm is not installed")
    return Path(spec.submodule_search_locations[0], *module.split(".")[1:]).with_suffix(".py").read_text()


# All claims


@pytest.mark.parametrize("pack", [4, 7, 14, 45])
def test_a_held_pack_declares_claims_and_its_targets_are_those_of_its_pack_file(pack: int) -> None:
    found = inventory.find(inventory.own_folder(), pack)
    cases = inventory.load_cases(found.reproducer)
    text = (found.folder / "pack.toml").read_text()

    assert all(case.overlay is None and case.claim for case in cases)
    for target in {target for case in cases for target in case.about}:
        assert f'module = "{target.module}"' in text
        assert f'symbol = "{target.symbol}"' in text


# Pack 4: one product


@given(uses=st.integers(1, 5))
def test_a_product_written_once_gives_the_same_result_and_is_computed_once_a_chunk(uses: int) -> None:
    text = made.siso(uses)

    once = SISO.write_once(text)

    assert SISO.count(text) == uses
    assert SISO.count(once) == 1
    (before, products), (after, products_after) = made.run_siso(text), made.run_siso(once)
    np.testing.assert_array_equal(np.array(before), np.array(after))
    assert (products, products_after) == (2 * (uses + 1), 2 * 2)


def test_the_control_with_a_doubled_product_changes_every_use_and_nothing_else() -> None:
    before, _ = made.run_siso(made.siso(3))

    doubled, _ = made.run_siso(SISO.write_once(made.siso(3), factor=2))

    for old, new in zip(before, doubled, strict=True):
        np.testing.assert_array_equal(np.array(old[:3]) * 2, np.array(new[:3]))
        np.testing.assert_array_equal(old[3], new[3])


def test_a_file_without_the_kernel_has_nothing_to_count() -> None:
    with pytest.raises(TargetAbsent, match="there is no mamba3_siso_bwd_kernel_dqkv"):
        SISO.count("def another(): pass\n")


@pytest.mark.parametrize(("left", "matrix", "broken"), [(12, 64, False), (14, 64, True), (12, 72, True)])
def test_the_compiler_has_merged_the_products_when_neither_count_falls(left: int, matrix: int, broken: bool) -> None:
    once = SISO.Compiled(14, 12, 64, ("mov;", "ret;"))
    stock = SISO.Compiled(16, left, matrix, ("mov;", "ret;"))

    answer = SISO._judge_code(stock, once)

    assert answer.broken == broken
    assert "the source 16 and 14" in answer.seen
    assert "the same PTX of 2 lines" in answer.seen


@pytest.mark.upstream
def test_pack_04_the_installed_kernel_writes_it_three_times() -> None:
    text = installed(SISO.MODULE)

    assert SISO.count(text) == SISO.TIMES
    assert SISO.count(SISO.write_once(text)) == 1


# Pack 7: two axes


@pytest.mark.parametrize("loops", [True, False], ids=["loops flat", "places flat"])
def test_the_flat_form_computes_the_same_as_the_kernels(loops: bool) -> None:
    flat = MIMO.flatten(made.MIMO, loops=loops)

    for before, after in zip(made.run_mimo(made.MIMO, flat=False), made.run_mimo(flat, flat=True), strict=True):
        assert np.abs(before).max() > 0
        np.testing.assert_allclose(after, before, rtol=1e-12)


@pytest.mark.parametrize("loops", [True, False], ids=["loops flat", "places flat"])
def test_nothing_of_three_axes_is_left_in_shared_memory(loops: bool) -> None:
    flat = MIMO.flatten(made.MIMO, loops=loops)

    for gone in ("[chunk_size, R, R]", "[chunk_size, R, N]", "[B, S, R, G, N]", "[B, H, S, R, R]"):
        assert gone in made.MIMO
        assert gone not in flat


def test_loops_run_over_the_flat_axis_only_where_that_is_asked_for() -> None:
    loops, places = MIMO.flatten(made.MIMO), MIMO.flatten(made.MIMO, loops=False)

    assert loops.count("csr % R, n]") == 4  # the bias of a rank, in a loop over chunk and rank
    assert places.count("csr % R, n]") == 0
    assert "T.Parallel(chunk_size, R, R)" in places


def test_q_and_k_can_be_flat_while_their_products_keep_three_axes() -> None:
    half = MIMO.flatten(made.MIMO, squares=False)

    assert half.count("[chunk_size, R, R]") == made.MIMO.count("[chunk_size, R, R]") > 0
    assert "[B, H, S, R, R]" in half
    assert "[B, S, R, G, N]" not in half
    for before, after in zip(
        made.run_mimo(made.MIMO, flat=False), made.run_mimo(half, flat=True, squares=False), strict=True
    ):
        np.testing.assert_allclose(after, before, rtol=1e-12)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("def mamba_mimo_bwd_bwd(", "def another("),
        (
            "qk_dot_shared = T.alloc_shared([chunk_size, R, R], dtype)",
            "qk_dot_shared = T.alloc_shared([8, R, R], dtype)",
        ),
        ("k_view = T.view(k_shared, shape=[chunk_size, R, N])", "k_view = T.view(k_shared, shape=[8, R, N])"),
    ],
)
def test_kernels_that_are_not_those_that_were_read_are_not_made_flat(old: str, new: str) -> None:
    assert old in made.MIMO

    with pytest.raises(TargetAbsent):
        MIMO.flatten(made.MIMO.replace(old, new))


@pytest.mark.upstream
@pytest.mark.parametrize("loops", [True, False], ids=["loops flat", "places flat"])
def test_pack_07_the_installed_kernels_can_be_made_flat(loops: bool) -> None:
    text = installed(MIMO.MODULE)

    flat = MIMO.flatten(text, loops=loops)

    ast.parse(flat)
    assert "T.alloc_shared([chunk_size, R, R]" in text
    assert "T.alloc_shared([chunk_size, R, R]" not in flat


# Pack 14: two parts


def test_two_parts_lose_a_thousand_times_less_than_one() -> None:
    one = made.run_sparse(made.SPARSE, stored=np.float16)

    two = made.run_sparse(SPARSE.in_two_parts(made.SPARSE), stored=np.float16)

    assert all(1e-5 < error < 1e-3 for error in one)
    assert all(error < single / 1000 for error, single in zip(two, one, strict=True))


def test_float32_for_both_buffers_is_a_change_of_two_words() -> None:
    changed = SPARSE.in_float32(made.SPARSE)

    before, after = (ast.unparse(ast.parse(text)).splitlines() for text in (made.SPARSE, changed))
    pairs = [(old, new) for old, new in zip(before, after, strict=True) if old != new]
    assert [new for _, new in pairs] == [old.replace("dtype)", "accum_dtype)") for old, _ in pairs]
    assert [old.split(" = ")[0].strip() for old, _ in pairs] == ["P_shared_cast", "dP_shared_cast"]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("def bwd(", "def another("),
        ("dP_shared_cast = T.alloc_shared([block_H, BS], dtype)", "dP_shared_cast = T.alloc_shared([BS, BS], dtype)"),
        ("T.copy(acc_p, P_shared_cast)", "T.copy(acc_p * 2, P_shared_cast)"),
        ("T.gemm(P_shared_cast, dO, acc_dkv, transpose_A=True)", "pass"),
    ],
)
def test_a_kernel_that_is_not_the_one_that_was_read_gets_no_second_part(old: str, new: str) -> None:
    assert old in made.SPARSE

    with pytest.raises(TargetAbsent):
        SPARSE.in_two_parts(made.SPARSE.replace(old, new))


def test_the_error_of_bf16_is_that_of_one_rounding_and_two_parts_remove_it() -> None:
    errors: Any = SPARSE._errors(32)

    assert 1e-3 < errors.bf16 < 2**-8
    assert errors.parts < errors.bf16 / 100
    assert errors.returned[1] < errors.returned[0] < 2 * errors.bf16


@pytest.mark.upstream
def test_pack_14_the_kernel_of_the_newest_release_can_be_changed_in_both_ways(wheel: Wheel) -> None:
    name = f"{EXPERIMENTAL}/ops/tilelang_sparse_mla_bwd.py"
    text = zipfile.ZipFile(wheel("megatron-core", "0.19.2")).read(name).decode()

    assert SPARSE.in_float32(text).count("T.alloc_shared([block_H, BS], accum_dtype)") == len(SPARSE.STORED)
    assert SPARSE.in_two_parts(text).count("T.gemm(") == text.count("T.gemm(") + SPARSE.PRODUCTS


# Pack 45: pipeline stages

REFUSED_BY = "_get_dp_tp_mesh raises EinopsError"
RELEASES_WITH_ADAPTER = (
    *("0.14.0", "0.15.0", "0.15.1", "0.15.2", "0.15.3", "0.16.0", "0.16.1", "0.17.0", "0.17.1"),
    *("0.18.0", "0.18.1", "0.18.2", "0.19.0", "0.19.1", "0.19.2"),
)
ADAPTER = "megatron/core/distributed/fsdp/mcore_fsdp_adapter.py"
AXES = {
    "_get_dp_tp_mesh": {"(dp_cp tp) -> dp_cp tp", "(dp_cp ep tp) -> ep dp_cp tp"},
    "_get_hsdp_tp_mesh": {
        "(outer_fsdp_dp fsdp tp) -> outer_fsdp_dp fsdp tp",
        "(outer_fsdp_dp fsdp ep tp) -> ep outer_fsdp_dp fsdp tp",
    },
}
"""How each function divides all ranks: data, tensors and experts, and no stages."""


@pytest.mark.parametrize(
    ("change", "broken"),
    [
        ({}, False),
        ({"2 stages": "_get_hsdp_tp_mesh raises AssertionError"}, False),
        ({"2 stages": "taken"}, True),
        ({"4 stages": "forward raises RuntimeError"}, True),
        ({STAGES.WHOLE: REFUSED_BY}, True),
    ],
)
def test_stages_are_refused_where_meshes_refuse_every_one_and_the_whole_model_is_taken(
    change: dict[str, str], broken: bool
) -> None:
    found = dict.fromkeys(STAGES.REFUSED, REFUSED_BY) | {STAGES.WHOLE: "taken"} | change

    assert STAGES._judge_refusals(found, "").broken is broken


def behind(**change: Any) -> dict[str, Any]:
    found = {"names": [0, 1], "of": 8, "saved": 4, "one to two": [1, 2], "two to two": [1, 2, 3, 4]}
    return {**found, "two to one": "Missing key in a checkpoint", **change}


def test_the_claim_holds_if_both_ranks_show_it() -> None:
    assert STAGES._holds(behind(), behind())
    assert STAGES._holds(behind(**{"two to two": [1, 2]}), behind(**{"two to two": [1, 2]}))  # all of the first stage


@pytest.mark.parametrize(
    "change",
    [
        {"names": [2, 3]},
        {"one to two": [3, 4]},
        {"saved": 8},
        {"two to one": "loaded"},
    ],
)
def test_a_right_result_contradicts_the_claim(change: dict[str, Any]) -> None:
    assert not STAGES._holds(behind(), behind(**change)) or not STAGES._holds(behind(**change), behind())


def test_stages_that_load_their_own_checkpoint_contradict_the_claim() -> None:
    assert not STAGES._holds(behind(**{"two to two": [1, 2]}), behind(**{"two to two": [3, 4]}))


@pytest.mark.upstream
@pytest.mark.parametrize("version", RELEASES_WITH_ADAPTER)
def test_pack_45_every_release_makes_meshes_of_all_ranks_and_leaves_stages_out(version: str, wheel: Wheel) -> None:
    text = zipfile.ZipFile(wheel("megatron-core", version)).read(ADAPTER).decode()
    functions = {node.name: node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)}

    for name, axes in AXES.items():
        body = ast.unparse(functions[name])
        divided = [
            node for node in ast.walk(functions[name]) if isinstance(node, ast.Call) and "arange" in ast.unparse(node)
        ]
        patterns = {
            each.args[1].value for each in divided if len(each.args) == 2 and isinstance(each.args[1], ast.Constant)
        }
        assert "world_size = dist.get_world_size()" in body
        assert len(patterns) == 1
        assert patterns <= axes
        assert re.search(r"assert _check_mesh_ranks_and_group_ranks_are_consistent\(mesh_\w+, \w+_group_ranks\)", body)


@pytest.mark.upstream
@pytest.mark.parametrize("version", ["0.12.0", "0.13.1"])
def test_pack_45_releases_before_have_no_adapter(version: str, wheel: Wheel) -> None:
    assert ADAPTER not in zipfile.ZipFile(wheel("megatron-core", version)).namelist()


@pytest.mark.upstream
def test_pack_45_no_stage_is_wrapped_on_ranks(tmp_path: Path) -> None:
    """Run the case in a forked process that has torch, with the einops of another lane added to the packages of this one."""
    [einops] = (ROOT / ".envs/mamba3-pinned/lib").glob("python*/site-packages/einops")
    (tmp_path / "einops").symlink_to(einops)
    report = tmp_path / "report"
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    words = ["-W", "ignore", "-m", "megacpp_overlays.repro.child", str(STAGES.__file__), "refused-cpu", str(report)]
    env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}

    done = warm_python.run(words, env, after=warm_python.MEGATRON, cwd=tmp_path, timeout=HANG_S)

    assert done.returncode == 0, done.stderr
    events = {each["event"]: each for each in map(json.loads, report.read_text().splitlines())}
    assert events["result"]["kind"] == "sound", events["result"]
    assert "no stages: taken; 2 stages: _get_dp_tp_mesh raises " in events["result"]["seen"]


@pytest.mark.full
@pytest.mark.upstream
@pytest.mark.parametrize("case", ["refused-cpu", "behind-cpu"])
def test_pack_45_holds_on_ranks(case: str) -> None:
    python = ROOT / ".envs/mamba3-pinned/bin/python"  # it has einops
    assert python.exists(), f"there is no {python}: run `make setup`"
    command = [python, "-W", "ignore", "-m", "megacpp_overlays", "repro", "45", "--case", case]

    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=HANG_S)

    assert done.returncode == 0, done.stdout + done.stderr
    assert f"(case {case})" in done.stdout.split("\nCLAIM_HOLDS: ")[1]


# With the compilers


@pytest.mark.upstream
@pytest.mark.parametrize(
    ("pack", "case", "needs"),
    [(4, "interpreter", ("mamba_ssm", "triton")), (4, "machine-code", ("mamba_ssm", "triton"))],
)
def test_a_claim_holds_without_a_gpu(pack: int, case: str, needs: tuple[str, ...]) -> None:
    for name in needs:
        if find_spec(name) is None:
            pytest.skip(f"{name} is not installed")
    command = [sys.executable, "-m", "megacpp_overlays", "repro", str(pack), "--case", case]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}

    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=HANG_S)

    if done.returncode == 3:
        pytest.skip(done.stdout.splitlines()[-2])  # such as a numpy that the interpreter does not work with
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"(case {case})" in done.stdout.split("\nCLAIM_HOLDS: ")[1]


@pytest.mark.upstream
def test_pack_14_float32_with_bf16_is_refused_by_the_compiler() -> None:
    if find_spec("tilelang") is None:
        pytest.skip("tilelang is not installed")

    answer = SPARSE._lower_apart("float32")

    assert not answer.source
    assert "dtype" in answer.reason
