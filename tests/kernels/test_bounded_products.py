"""Products over the first rows, and rows that come first: on the CPU, in Triton's interpreter, compiled for Hopper.

Their results on a GPU are tested in tests/gpu.
"""

from __future__ import annotations

from typing import Any

import compiled_programs
import kept_answers
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megacpp_overlays.kernels.masked_products import products as bounded_products
from megacpp_overlays.kernels.masked_products.products import Products
from megacpp_overlays.kernels.masked_products.row_counts import ROW_ALIGNMENT
from megacpp_overlays.kernels.masked_products.token_selection import select

ROUNDING = 1e-3
"""Largest relative error in float16."""


# On the CPU


@settings(deadline=None)
@given(st.lists(st.booleans(), max_size=20), st.sampled_from([torch.float64, torch.float16]))
def test_selected_rows_come_first_in_their_order_and_go_back(wanted: list[bool], dtype: torch.dtype) -> None:
    mask = torch.tensor(wanted, dtype=torch.bool)
    rows = torch.randn(len(wanted), 3)

    selection = select(mask)
    first = selection.first(torch.where(mask.unsqueeze(1), rows, torch.nan))
    in_place = rows.clone()
    selection.bring_first(in_place)
    zeros = first[sum(wanted) : ROW_ALIGNMENT].clone()
    first[sum(wanted) :] = torch.nan
    back = selection.put_back(first, dtype)

    assert int(selection.count) == sum(wanted)
    assert torch.equal(selection.order[selection.place], torch.arange(len(wanted)))
    assert not zeros.any()
    assert torch.equal(first[: sum(wanted)], rows[mask])
    assert torch.equal(in_place[: sum(wanted)], rows[mask])
    assert torch.equal(back, torch.where(mask.unsqueeze(1), rows, 0).to(dtype))


@pytest.mark.parametrize(
    "count", [0, 1, ROW_ALIGNMENT - 1, ROW_ALIGNMENT, ROW_ALIGNMENT + 1, 2 * ROW_ALIGNMENT, 2 * ROW_ALIGNMENT + 1]
)
def test_zeros_follow_selected_rows_as_far_as_a_tile_reaches(count: int) -> None:
    tokens = 3 * ROW_ALIGNMENT
    first = select(torch.arange(tokens) < count).first(torch.ones(tokens, 2), torch.full((tokens, 2), torch.nan))

    assert first[:count].eq(1).all()
    assert first[count : max(1, -(-count // ROW_ALIGNMENT)) * ROW_ALIGNMENT].eq(0).all()


@settings(deadline=None)
@given(st.lists(st.sampled_from(["neither", "one", "both"]), max_size=20))
def test_tokens_of_a_selection_come_first_among_those_of_a_wider_one(each: list[str]) -> None:
    wide, narrow = (
        torch.tensor([word in words for word in each], dtype=torch.bool) for words in (("one", "both"), ("both",))
    )
    rows = torch.randn(len(each), 3)
    wider, narrower = select(wide), select(narrow)
    come_first = wider.first(rows)

    narrower.among(wider).bring_first(come_first)

    assert torch.equal(come_first[: int(narrow.sum())], rows[narrow])


@settings(deadline=None)
@given(
    rows=st.integers(0, 7), count=st.integers(0, 7), dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    wide=st.booleans(), add=st.booleans(), chosen=st.booleans(),
)  # fmt: skip
def test_rows_after_the_count_do_not_count(
    rows: int, count: int, dtype: torch.dtype, wide: bool, add: bool, chosen: bool
) -> None:
    count = min(count, rows)
    left, right, across = (torch.randn(*shape).to(dtype) for shape in ((rows, 3), (3, 5), (rows, 4)))
    left[count:] = float("nan")
    out = torch.ones(rows, 5, dtype=torch.float32 if wide else dtype)
    over = torch.ones(3, 4, dtype=out.dtype)
    products = Products(torch.tensor([count], dtype=torch.int32))

    order = torch.randperm(rows) if chosen else None
    products.of_rows(left if order is None else left[order.argsort()], right, out=out, add=add, order=order)
    products.over_rows(left, across if order is None else across[order.argsort()], out=over, add=add, order=order)

    some = left[:count].double()
    tolerance = 2e-2 if dtype == torch.bfloat16 else 1e-5
    close = {"rtol": tolerance, "atol": 2 * tolerance, "check_dtype": False}
    torch.testing.assert_close(out[:count].double(), some @ right.double() + add, **close)
    torch.testing.assert_close(over.double(), some.t() @ across[:count].double() + add, **close)
    assert (out[count:] == 1).all()


@pytest.mark.parametrize("count", [None, 0, 2, 4])
def test_rows_that_count_are_added_up(count: int | None) -> None:
    matrix = torch.randn(4, 3)
    out = torch.empty(3, dtype=torch.float64)

    Products(None if count is None else torch.tensor([count], dtype=torch.int32)).sum_rows(matrix, out=out)

    torch.testing.assert_close(out, matrix[:count].sum(dim=0).double())


def test_without_a_count_all_rows_do() -> None:
    left, right = torch.randn(4, 3), torch.randn(3, 5)
    out, over = torch.zeros(4, 5), torch.zeros(3, 3)

    Products().of_rows(left, right, out=out)
    Products().over_rows(left, left, out=over, add=True)

    torch.testing.assert_close(out, left @ right)
    torch.testing.assert_close(over, left.t() @ left)


def test_a_device_that_is_not_known_has_no_such_products() -> None:
    assert bounded_products.available(torch.float64, torch.zeros(2, 2))
    assert not bounded_products.available(torch.bfloat16, torch.zeros(2, 2, device="meta"))


@pytest.mark.parametrize(
    ("matrix", "fits"),
    [
        (torch.zeros(4, 16, dtype=torch.bfloat16), True),
        (torch.zeros(4, 12, dtype=torch.bfloat16), False),
        (torch.zeros(4, 16), True),
        (torch.zeros(4, 12), False),
        (torch.zeros(4, 24, dtype=torch.bfloat16)[:, :16], True),
        (torch.zeros(4, 24, dtype=torch.bfloat16)[:, :12], False),
        (torch.zeros(4, 20, dtype=torch.bfloat16)[:, :16], False),
        (torch.zeros(4, 24, dtype=torch.bfloat16)[:, 1:17], False),
        (torch.zeros(16, 16, dtype=torch.bfloat16).t(), False),
    ],
)
def test_rows_that_a_descriptor_can_address_begin_at_16_bytes_even_in_a_copy(matrix: torch.Tensor, fits: bool) -> None:
    triton = pytest.importorskip("megacpp_overlays.kernels.masked_products.products_triton")

    assert triton.fits(torch.bfloat16, matrix) is fits
    assert triton.fits(torch.bfloat16, torch.zeros(2, 8), matrix) is fits


# In Triton


def test_without_a_row_there_is_no_program_and_the_sum_is_zero() -> None:
    triton = pytest.importorskip("megacpp_overlays.kernels.masked_products.products_triton")
    none = torch.zeros(1, dtype=torch.int32)
    left, right, out, total = torch.zeros(0, 16), torch.zeros(0, 8), torch.ones(16, 8), torch.ones(16, 8)

    triton.product_over_rows(left, right, none, out, False)
    triton.product_over_rows(left, right, none, total, True)
    triton.product_of_rows(left, out, none, right, False)

    assert not out.any()
    assert (total == 1).all()


@pytest.fixture(scope="module")
def facts(grid_size: str) -> Any:
    """Return the results of `bounded_products_facts.py`. No kernel runs on a device."""
    pytest.importorskip("triton")
    return kept_answers.answer("bounded_products_facts.py", grid_size, TRITON_INTERPRET="1")


def test_triton_agrees_with_float64_on_every_count(facts: Any, grid_size: str) -> None:
    found = facts["products"]

    assert len(found) == (4 if grid_size == "few" else 24)
    assert {name: each for name, each in found.items() if not max(each.values()) < ROUNDING} == {}


def test_a_program_computes_several_tiles_and_two_programs_the_halves_of_one(facts: Any, grid_size: str) -> None:
    found = facts["few programs"]

    assert len(found) == (1 if grid_size == "few" else 12)
    assert {name: each for name, each in found.items() if not max(each.values()) < ROUNDING} == {}


def test_triton_brings_rows_first_and_back_in_their_own_memory(facts: Any, grid_size: str) -> None:
    assert len(facts["moves"]) == (4 if grid_size == "few" else 12)
    assert {name: found for name, found in facts["moves"].items() if found != [True] * 8} == {}


def test_triton_takes_rows_from_anywhere(facts: Any, grid_size: str) -> None:
    found = facts["chosen"]

    assert len(found) == (2 if grid_size == "few" else 12)
    assert {name: each for name, each in found.items() if not max(each.values()) < ROUNDING} == {}


def test_triton_computes_every_panel_of_every_group(facts: Any, grid_size: str) -> None:
    found = facts["panels"]

    assert len(found) == (2 if grid_size == "few" else 24)
    assert {name: each for name, each in found.items() if not max(each.values()) < ROUNDING} == {}


def test_kernels_write_nothing_for_the_row_count_nothing(facts: Any, grid_size: str) -> None:
    laid = ("100",) if grid_size == "few" else ("-1", "100")

    assert facts["nothing"] == {f"{rows}{order}": 0 for rows in laid for order in ("", " by order")}


def test_triton_adds_up_the_rows_that_count(facts: Any, grid_size: str) -> None:
    assert len(facts["sums"]) == (2 if grid_size == "few" else 6)
    assert {count: error for count, error in facts["sums"].items() if not error < ROUNDING} == {}


@pytest.fixture(scope="module")
def programs() -> Any:
    """Return the results of `bounded_products_targets.py`: the resources of each program on compute capability 9.0."""
    return compiled_programs.needs("bounded_products_targets.py")["programs"]


@pytest.mark.full
def test_every_product_compiles_for_hopper_to_its_own_instructions_and_keeps_all_in_registers(programs: Any) -> None:
    found = [each for each in programs if each["kernel"].endswith("_rows") and each["kernel"] != "sum_of_rows"]
    others = {"_bring_first", "_put_back", "_select", "_first", "_put_back_apart", "sum_of_rows"}

    assert {each["kernel"] for each in programs} == {
        "of_rows", "over_rows", "of_chosen_rows", "over_chosen_rows", *others
    }  # fmt: skip
    assert len(found) == 40
    assert [each for each in found if not (each["wgmma"] and each["bulk copies"])] == []
    assert [each for each in programs if each["stack"]] == []
    assert {each["kernel"] for each in programs if each["adds in memory"]} == {
        "of_rows", "over_rows", "over_chosen_rows"
    }  # fmt: skip
    assert sum(each["adds in memory"] for each in programs) == 8  # float32 results that something is added to
    triton = pytest.importorskip("megacpp_overlays.kernels.masked_products.products_triton")
    assert max(each["shared"] for each in programs) == triton._SHARED_BY_LARGE


def test_a_product_waits_before_it_touches_any_memory_and_lets_nothing_in_while_it_runs(programs: Any) -> None:
    early = {"of_rows", "over_rows", "of_chosen_rows", "over_chosen_rows", "sum_of_rows"}

    for each in programs:
        assert each["begins early"] == (each["kernel"] in early)
        if each["begins early"]:
            assert 0 < each["waits"] < each["first access"]
        else:
            assert each["waits"] == -1
        assert each["lets the next begin"] == -1
