"""Launch configurations of attention over chosen keys: everything fits, and each size goes the way that was quickest."""

from __future__ import annotations

from itertools import pairwise

import pytest
from compiled_programs import SHARED_OF_HOPPER
from hypothesis import given
from hypothesis import strategies as st

from megacpp_overlays.kernels.sparse_attention import tiles

DIMS = st.integers(1, 40).map(lambda sixteens: 16 * sixteens)
HEADS = st.integers(1, 160)


@st.composite
def channels(draw: st.DrawFn) -> tuple[int, int]:
    """Channels of keys, and of the values that are a prefix of them."""
    dim = draw(DIMS)
    return dim, draw(st.integers(1, dim))


@given(channels())
def test_two_parts_hold_all_channels_and_the_first_is_never_cut_short(sizes: tuple[int, int]) -> None:
    dim, value = sizes

    parts = tiles.parts_of(dim, value)

    assert parts.first <= dim <= parts.channels
    assert all(part & (part - 1) == 0 for part in (parts.first, parts.rest))
    assert value <= parts.values
    assert parts.wide == (value > parts.first)


@given(DIMS)
def test_tiles_of_channels_lie_side_by_side_and_hold_all_of_them(dim: int) -> None:
    found = tiles.channel_tiles(dim)

    assert found[0].start == found[0].before == 0
    for one, next_one in pairwise(found):
        assert next_one.start == one.start + one.width * one.tiles
        assert next_one.before == one.before + one.tiles
    assert found[-1].start < dim <= found[-1].start + found[-1].width * found[-1].tiles


@given(channels(), HEADS, st.booleans())
def test_operands_fit_into_shared_memory(sizes: tuple[int, int], heads: int, scaled: bool) -> None:
    parts = tiles.parts_of(*sizes)
    for tile, held in (
        (tiles.forward_tile(parts, heads), parts.channels),
        (tiles.query_side_tile(parts, heads), parts.channels + parts.values),
    ):
        block = tiles.head_block(heads, tile)

        slots = tiles.slots_of(tile, block, parts, held, scaled=scaled)

        needed = 2 * (held * block + parts.channels * tile.stages * slots)
        assert 16 <= slots <= tile.slots
        assert slots == 16 or needed <= SHARED_OF_HOPPER


@given(channels(), HEADS)
def test_a_ring_fits_into_shared_memory(sizes: tuple[int, int], heads: int) -> None:
    parts = tiles.parts_of(*sizes)
    held = 2 * tiles.SPECIALISED_HEADS * parts.first
    for ring, operands in ((tiles.forward_ring(parts, heads), held), (tiles.score_ring(parts, heads), 0)):
        if ring is not None:
            assert heads > tiles.FEW_HEADS
            assert ring.tiles >= 2
            assert operands + 2 * ring.tiles * ring.slots * parts.channels <= SHARED_OF_HOPPER


@pytest.mark.parametrize("heads", [64, 128])
def test_warps_share_out_the_work_of_deepseeks_channels(heads: int) -> None:
    parts = tiles.parts_of(576, 512)

    assert tiles.forward_ring(parts, heads) is not None
    assert tiles.score_ring(parts, heads) is not None


@pytest.mark.parametrize(("dim", "value"), [(192, 128), (128, 128), (64, 64)])
def test_with_few_channels_two_programs_share_a_multiprocessor(dim: int, value: int) -> None:
    parts = tiles.parts_of(dim, value)
    for tile, held in (
        (tiles.forward_tile(parts, 128), parts.channels),
        (tiles.query_side_tile(parts, 128), parts.channels + parts.values),
    ):
        block = tiles.head_block(128, tile)
        slots = tiles.slots_of(tile, block, parts, held, scaled=False)

        assert 2 * 2 * (held * block + parts.channels * tile.stages * slots) <= SHARED_OF_HOPPER
    assert tiles.forward_ring(parts, 128) is tiles.score_ring(parts, 128) is None


def test_with_some_channels_and_many_heads_a_key_is_gathered_once_for_all_of_them() -> None:
    parts = tiles.parts_of(320, 256)

    assert tiles.head_block(128, tiles.forward_tile(parts, 128)) == 128
    assert tiles.head_block(128, tiles.query_side_tile(parts, 128)) == 128
    assert tiles.forward_ring(parts, 128) is tiles.score_ring(parts, 128) is None
    assert tiles.forward_ring(parts, 64) is not None


def test_few_heads_have_a_block_of_their_number() -> None:
    parts = tiles.parts_of(192, 128)

    assert [tiles.head_block(heads, tiles.forward_tile(parts, heads)) for heads in (1, 16, 24, 32)] == [16, 16, 32, 32]


def test_few_heads_have_tiles_of_their_own() -> None:
    parts = tiles.parts_of(576, 512)
    for heads, is_few in ((1, True), (16, True), (17, False), (32, False)):
        assert (tiles.forward_tile(parts, heads) is tiles.FORWARD_OF_FEW_HEADS) is is_few
        assert (tiles.query_side_tile(parts, heads) is tiles.QUERY_SIDE_OF_FEW_HEADS) is is_few
        assert tiles.forward_ring(parts, heads) is tiles.score_ring(parts, heads) is None


@pytest.mark.parametrize(("keys", "dim", "mib"), [(4096, 576, 384), (32768, 576, 1152), (1 << 20, 576, 2048)])
def test_gradients_of_slots_take_memory_by_the_keys_they_are_added_to(keys: int, dim: int, mib: int) -> None:
    assert tiles.slot_bytes(keys, dim) == mib << 20


@pytest.mark.parametrize("dim", [16, 48, 80, 128, 192, 208, 320, 448, 576, 640])
def test_programs_add_up_every_tile_of_channels_once(dim: int) -> None:
    every = [
        (tile.start + at * tile.width, tile.width, tile.before + at)
        for tile in tiles.channel_tiles(dim)
        for at in range(tile.tiles)
    ]

    found = []
    for each in tiles.sum_tiles(dim):
        assert each.tiles & (each.tiles - 1) == 0
        found += [(each.start + at * each.width, each.width, each.before + at) for at in range(each.tiles)]
        if each.rest:
            found.append((each.start + each.tiles * each.width, each.rest, each.before + each.tiles))

    assert found == every
    assert len(tiles.sum_tiles(dim)) == (2 if dim == 448 else 1)  # three wide tiles and a rest
