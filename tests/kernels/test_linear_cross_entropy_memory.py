"""The memory budget of a linear cross entropy: its settings, and the sizes of blocks that follow."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import warm_python
from hypothesis import given, settings
from hypothesis import strategies as st
from places import HANG_S, ROOT
from torch._subclasses.fake_tensor import FakeTensorMode

from megacpp_overlays.kernels.linear_cross_entropy import block_sizes
from megacpp_overlays.kernels.linear_cross_entropy import memory as linear_cross_entropy_memory
from megacpp_overlays.kernels.linear_cross_entropy.memory import (
    Logits,
    MaskDecision,
    Masked,
    Memory,
    padded,
)
from megacpp_overlays.kernels.linear_cross_entropy.shard import Shard
from megacpp_overlays.kernels.masked_products.products import TileWave
from megacpp_overlays.variables import LINEAR_CE_LOGITS, LINEAR_CE_MASKED, LINEAR_CE_MEMORY_MIB

CPU = torch.device("cpu")
MIB = 2**20


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """Begin as a new process does, and leave nothing behind."""
    for name in ("_chosen", "_room_was_found"):
        monkeypatch.setattr(linear_cross_entropy_memory, name, None)


# The environment. That a bad name or value is an error at import is a matter of the loader's settings.


def test_the_words_of_the_settings_are_those_of_the_kernel() -> None:
    assert set(LINEAR_CE_LOGITS.values) == {each.value for each in Logits}
    assert set(LINEAR_CE_MASKED.values) == {each.value for each in Masked}


SAYS = """
from megacpp_overlays.kernels.linear_cross_entropy.memory import process_wide
first = process_wide()
print(first.extra_mib, first.logits.value, first.masked.value, process_wide() is first)
"""


@pytest.fixture
def says(run_python: Callable[..., Any]) -> Callable[..., Any]:
    """Run a process that uses the kernel on its own, with variables in its environment."""

    def run(code: str = SAYS, **variables: str) -> Any:
        path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        return run_python(
            code, ROOT, **{**variables, "MEGACPP_OVERLAYS_LOG": "logging", "PYTHONPATH": path}, after=warm_python.TORCH
        )

    return run


def test_without_variables_256_mib_are_used_to_compute_logits_again_of_tokens_that_masks_decide(
    says: Callable[..., Any],
) -> None:
    assert says().stdout == "256 recompute auto True\n"
    assert Memory() == Memory(extra_mib=256, logits=Logits.RECOMPUTE, masked=Masked.AUTO)


def test_variables_set_the_memory_and_the_handling_of_logits_and_masked_tokens(says: Callable[..., Any]) -> None:
    done = says(MEGACPP_LINEAR_CE_MEMORY_MIB="512", MEGACPP_LINEAR_CE_LOGITS="Keep", MEGACPP_LINEAR_CE_MASKED="compute")

    assert done.stdout == "512 keep compute True\n"


def test_a_variable_set_after_the_import_is_ignored_with_a_warning(says: Callable[..., Any]) -> None:
    """Such a value was never checked, and ranks have not compared it."""
    code = f"""
import os, megacpp_overlays
os.environ["{LINEAR_CE_LOGITS.name}"] = "keep"
os.environ["{LINEAR_CE_MEMORY_MIB.name}"] = "not a number"
{SAYS}
"""
    done = says(code)

    assert done.stdout == "256 recompute auto True\n"
    assert f"{LINEAR_CE_LOGITS.name} is keep now and was recompute when megacpp_overlays was imported" in done.stderr
    assert f"{LINEAR_CE_MEMORY_MIB.name} is not a number now and was 256" in done.stderr
    assert LINEAR_CE_MASKED.name not in done.stderr


# A choice


def test_a_way_may_be_given_by_its_name() -> None:
    assert Memory(logits="keep", masked="skip") == Memory(logits=Logits.KEEP, masked=Masked.SKIP)


@pytest.mark.parametrize(
    ("given_", "reason"),
    [
        ({"extra_mib": 0}, "extra_mib is 0; it is a number of MiB, 1 or more"),
        ({"extra_mib": -5}, "extra_mib is -5"),
        ({"logits": "all"}, "logits is 'all'; it is one of recompute, keep, auto"),
        ({"masked": True}, "masked is True; it is one of auto, compute, skip"),
    ],
)
def test_a_choice_that_cannot_be_meant_is_refused(given_: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        Memory(**given_)


SIZES = {
    "tokens": st.integers(0, 200_000),
    "element": st.sampled_from([2, 4, 8]),
    "classes": st.integers(1, 300_000),
    "extra_mib": st.integers(1, 4096),
}


@settings(deadline=None)
@given(**SIZES, taken=st.integers(0, 2**33))
def test_a_block_stays_within_the_remaining_budget_or_gets_a_quarter_of_all(
    tokens: int, element: int, classes: int, extra_mib: int, taken: int
) -> None:
    step = Memory(extra_mib).classes_with(tokens * element, taken, classes)

    budget = extra_mib * MIB
    left = budget - taken
    allowed = left if left >= budget / 16 else budget / 4
    if Memory(extra_mib).fits(tokens * element, classes):
        assert step == classes  # nothing is added up then, so nothing else is taken
    else:
        assert 1 <= step <= 256 or tokens * element * step <= allowed


@settings(deadline=None)
@given(
    tokens=st.integers(1, 200_000),
    element=SIZES["element"],
    extra_mib=SIZES["extra_mib"],
    share=st.floats(1.01, 100.0),
    more=st.integers(0, 1000),
)
def test_blocks_are_as_equal_as_multiples_of_256_classes_can_be(
    tokens: int, element: int, extra_mib: int, share: float, more: int
) -> None:
    """So no product is narrow: the first block lacks fewer classes than there are blocks of 256."""
    classes = int(share * (extra_mib * MIB // (tokens * element))) + 64 + more  # too many for one block
    assert not Memory(extra_mib).fits(tokens * element, classes)

    step = Memory(extra_mib).classes_with(tokens * element, 0, classes)

    blocks = -(-classes // step)
    assert step % 256 == 0
    assert step < -(-classes // blocks) + 256
    widest = max(256, extra_mib * MIB // (tokens * element) // 256 * 256)
    assert blocks == -(-classes // widest) or step == 256


def test_the_default_at_the_size_of_a_model() -> None:
    """8192 tokens of size 4096 in bfloat16, 131072 classes: 64 MiB are the sum in float32 less its result."""
    forward = Memory().classes_with(8192 * 2, 0, 131072)
    backward = Memory().classes_with(8192 * 2, 64 * MIB, 131072)

    assert (forward, backward) == (16384, 12032)
    assert 8192 * 2 * backward <= 192 * MIB


@pytest.mark.parametrize(
    ("sizes", "copied"),
    [
        ((8192, 4096, 131072), True),
        ((12288, 4096, 151552), True),
        ((8192, 7168, 129280), True),
        ((8192, 7680, 128256), False),
        ((8192, 8192, 128256), False),
        ((16384, 4096, 131072), False),
    ],
    ids=str,
)
@pytest.mark.parametrize("masked", list(Masked))
def test_a_block_leaves_room_for_the_sum_and_a_copy_of_selected_tokens(
    masked: Masked, sizes: tuple[int, int, int], copied: bool
) -> None:
    """Where the copy leaves no room, products take rows from where they are."""
    tokens, size, classes = sizes
    hidden, weight = (torch.empty(rows, size, dtype=torch.bfloat16) for rows in (tokens, classes))
    shard = Shard(weight=weight, logits_dtype=torch.bfloat16)

    step = block_sizes.step_of(hidden, shard, Memory(masked=masked))

    copy = 0 if masked is Masked.COMPUTE or not copied else hidden.nbytes
    others = tokens * size * 4 + copy - hidden.nbytes  # the result is allocated when all of this is freed
    assert others + tokens * step * 2 <= 256 * MIB
    assert step >= 256
    assert block_sizes.copies(hidden, shard, Memory(masked=masked)) is copied


@pytest.mark.parametrize("masked", list(Masked))
@pytest.mark.parametrize("ranks", [2, 4, 8, 16])
def test_a_rank_of_a_group_stays_within_its_memory_with_one_block_and_with_several(masked: Masked, ranks: int) -> None:
    """Its gradient of the hidden states is a sum over ranks, in float32 even if there is one block."""
    hidden, weight = (torch.empty(rows, 4096, dtype=torch.bfloat16) for rows in (8192, 131072 // ranks))
    shard = Shard(weight=weight, logits_dtype=torch.bfloat16, is_whole=False)
    memory = Memory(masked=masked)

    step = block_sizes.step_of(hidden, shard, memory)

    copy = 0 if masked is Masked.COMPUTE else hidden.nbytes
    others = hidden.numel() * 4 + copy - hidden.nbytes
    assert others + 8192 * padded(step) * 2 <= 256 * MIB
    assert block_sizes.is_one_block(hidden, shard, memory) == (step == weight.shape[0])


def test_a_block_of_given_classes_has_a_copy_of_any_size() -> None:
    hidden, weight = (torch.empty(rows, 8192, dtype=torch.bfloat16, device="meta") for rows in (65536, 131072))
    shard = Shard(weight=weight, logits_dtype=torch.bfloat16)

    assert block_sizes.copies(hidden, shard, Memory(block_classes=4096))
    assert not block_sizes.copies(hidden, shard, Memory())


def test_a_block_takes_no_room_for_selected_tokens_where_none_are_selected() -> None:
    hidden, weight = (torch.empty(rows, 4096, dtype=torch.bfloat16) for rows in (8192, 131072))
    shard = Shard(weight=weight, logits_dtype=torch.bfloat16)

    def step(memory: Memory, device: str = "cpu") -> int:
        return block_sizes.step_of(hidden.to(device), replace(shard, weight=weight.to(device)), memory)

    everything = step(Memory(masked="compute"))
    assert step(Memory()) < everything
    assert step(Memory(settled=MaskDecision(skips=False))) == everything
    assert step(Memory(), device="meta") == everything  # it has no products that end after some rows


OF_AN_H200 = TileWave(rows=128, columns=256, tiles=132)


@pytest.mark.parametrize(
    ("widest", "tokens", "channels", "width"),
    [
        (31, 8192, 4096, 30), (47, 8192, 4096, 47), (10, 12288, 4096, 10), (26, 12288, 4096, 26), (23, 16384, 2048, 20),
        (8, 8192, 7168, 8), (1, 8192, 4096, 1),
    ],
)  # fmt: skip
def test_a_block_is_narrower_where_products_would_have_waves_that_do_not_fill_the_device(
    widest: int, tokens: int, channels: int, width: int
) -> None:
    """In tiles of 256 classes. For 8192 tokens 31 of them are 1984 tiles, 15 waves of 132 and 4, and 30 are 14.5 waves;
    the gradient of their weight, 4096 channels wide, has 992 tiles, 7.5 waves and 2, and 960, 7 waves and a third.
    """
    assert block_sizes.with_full_waves(256 * widest, tokens, channels, OF_AN_H200) == 256 * width


@settings(deadline=None)
@given(
    widest=st.integers(1, 1000),
    tokens=st.integers(1, 100_000),
    channels=st.integers(1, 200).map(lambda each: 64 * each),
    tiles=st.integers(1, 200),
)
def test_fuller_waves_cost_no_more_than_a_quarter_of_a_block(
    widest: int, tokens: int, channels: int, tiles: int
) -> None:
    """The widest block is a multiple of 256 classes, if it is no whole shard."""
    wave = TileWave(128, 256, tiles)

    def time_of_a_class(width: int) -> float:
        logits, of_weight = wave.waves(tokens, 256 * width), wave.waves(256 * width, channels)
        return (2 * channels * logits + tokens * of_weight) / width

    width, rest = divmod(block_sizes.with_full_waves(256 * widest, tokens, channels, wave), 256)

    assert rest == 0
    assert 0.75 * widest - 1 < width <= widest
    assert time_of_a_class(width) <= time_of_a_class(widest) * (1 + 1e-9)


@pytest.mark.parametrize(
    ("rows", "columns", "waves"),
    [(0, 256, 0), (1, 1, 0.5), (128, 66 * 256, 0.5), (128, 67 * 256, 1), (128, 132 * 256, 1), (129, 132 * 256, 2), (128, 133 * 256, 1.5)],
)  # fmt: skip
def test_a_wave_of_few_tiles_takes_half_of_its_time(rows: int, columns: int, waves: float) -> None:
    assert OF_AN_H200.waves(rows, columns) == waves


def test_only_blocks_whose_products_end_after_some_rows_have_the_width_of_their_waves() -> None:
    hidden, weight = (torch.empty(rows, 4096, dtype=torch.bfloat16) for rows in (8192, 131072))
    shard = Shard(weight=weight, logits_dtype=torch.bfloat16)

    def step(**chosen: Any) -> int:
        memory = Memory(**chosen)
        with mock.patch.object(block_sizes, "wave_of", return_value=OF_AN_H200):
            return block_sizes.step_of(hidden, shard, memory)

    assert step(masked="skip") == 256 * 30
    assert block_sizes.step_of(hidden, shard, Memory(masked="skip")) == 256 * 31
    assert step(masked="compute") == block_sizes.step_of(hidden, shard, Memory(masked="compute"))
    assert step(masked="skip", block_classes=7936) == 7936


@given(classes=st.integers(1, 1000), block=st.integers(1, 2000))
def test_the_classes_of_a_block_can_be_given(classes: int, block: int) -> None:
    assert Memory(block_classes=block).classes_with(10**9 * 4, 2**40, classes) == min(block, classes)


@given(classes=st.integers(0, 300_000))
def test_rows_of_logits_begin_at_multiples_of_64_elements(classes: int) -> None:
    row = padded(classes)

    assert row % 64 == 0
    assert 0 <= row - classes < 64


# Keeping


@pytest.mark.parametrize(("logits", "keeps"), [("recompute", False), ("keep", True), ("auto", False)])
def test_a_host_keeps_logits_only_by_setting(logits: str, keeps: bool) -> None:
    assert Memory(logits=logits).keeps(1, 1, 4, CPU) is keeps


@settings(deadline=None)
@given(**SIZES)
def test_logits_that_a_block_has_room_for_are_one_block(
    tokens: int, element: int, classes: int, extra_mib: int
) -> None:
    memory = Memory(extra_mib)

    fits = memory.fits(tokens * element, classes)

    assert fits == (tokens * padded(classes) * element <= extra_mib * MIB)
    assert not replace(memory, block_classes=classes).fits(tokens * element, classes)


@pytest.mark.parametrize("room", [True, False])
def test_the_finding_of_the_first_call_holds_for_all_later_calls(room: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that keeps its logits and a step that does not differ in their last bits, and in their time."""
    answers: list[int] = []

    def has_room(wanted: int, device: torch.device) -> bool:
        answers.append(wanted)
        return room

    monkeypatch.setattr(linear_cross_entropy_memory, "_has_room", has_room)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    automatic, device = Memory(logits="auto"), torch.device("cuda")

    assert not automatic.keeps(1, 1, 4, CPU)  # which settles nothing
    assert automatic.keeps(1000, 5000, 2, device) is room
    room = not room
    assert automatic.keeps(7, 3, 2, device) is not room
    assert answers == [2 * 1000 * 5000 * 2]


@pytest.mark.parametrize(("free", "kept"), [(98, False), (99, True)])
def test_memory_that_pytorch_holds_without_using_it_counts_as_room(
    free: int, kept: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A device of which PyTorch holds 3 MiB and uses 2; the logits take 50. No such device is here."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free * MIB, 1000 * MIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 3 * MIB)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 2 * MIB)

    with caplog.at_level(logging.INFO, logger="megacpp_overlays"):
        assert Memory(logits="auto").keeps(1024, 25 * 1024, 2, torch.device("cuda")) is kept

    assert f"{free + 1} MiB left, twice the logits are 100 MiB; they are" in caplog.text


def test_nothing_is_asked_of_a_device_while_a_graph_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)

    assert not Memory(logits="auto").keeps(1, 1, 2, torch.device("cuda"))


@pytest.mark.parametrize("room", [True, False])
def test_a_captured_step_repeats_the_decision_of_earlier_steps(room: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear_cross_entropy_memory, "_has_room", lambda wanted, device: room)
    automatic, device = Memory(logits="auto"), torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    automatic.keeps(1, 1, 2, device)

    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)

    assert automatic.keeps(1, 1, 2, device) is room


# Skipping


def alive(count: int, tokens: int = 1000) -> torch.Tensor:
    return torch.arange(tokens) < count


@pytest.mark.parametrize(("masked", "skips"), [("compute", False), ("skip", True)])
@pytest.mark.parametrize("count", [0, 1, 1000])
def test_a_setting_decides_for_all_masks(masked: str, skips: bool, count: int) -> None:
    memory = Memory(masked=masked)

    assert memory.skips(alive(count), alive(count)) is skips
    assert memory.may_skip is skips
    assert memory.settled.skips is None


@pytest.mark.parametrize(("count", "skips"), [(1, True), (750, True), (751, False), (1000, False)])
def test_masks_of_the_first_backward_pass_decide_for_all_later_ones(
    count: int, skips: bool, caplog: pytest.LogCaptureFixture
) -> None:
    memory = Memory()
    assert memory.may_skip

    with caplog.at_level("INFO", logger="megacpp_overlays"):
        first = memory.skips(alive(count), alive(count))
        later = [memory.skips(alive(each), alive(each)) for each in (1, 1000)]

    assert first is skips
    assert later == [skips, skips]
    assert memory.may_skip is skips
    outcome = "skipped" if skips else "computed"
    assert [each.getMessage() for each in caplog.records] == [
        f"linear cross entropy: {count} of 1000 tokens of the first backward pass have a gradient; the others are {outcome}, "
        f"and {count} have a label; forward passes {'skip' if skips else 'compute'} the others"
    ]


@pytest.mark.parametrize(("labels", "skips"), [(500, True), (750, True), (751, False), (1000, False)])
def test_labels_decide_about_forward_passes_at_the_same_look(labels: int, skips: bool) -> None:
    memory = Memory()
    assert not memory.skips_labels
    assert not memory.has_looked

    memory.skips(alive(500), alive(labels))
    memory.skips(alive(500), alive(1000 - labels))

    assert memory.has_looked
    assert memory.skips_labels is skips


@pytest.mark.parametrize(("masked", "skips"), [("compute", False), ("skip", True)])
def test_a_way_that_is_named_is_that_of_forward_passes_without_a_look(masked: str, skips: bool) -> None:
    memory = Memory(masked=masked)

    assert memory.has_looked
    assert memory.skips_labels is skips


@pytest.mark.parametrize(("count", "tokens"), [(0, 0), (0, 1000), (255, 255), (1, 1)])
def test_a_pass_without_a_gradient_or_with_few_tokens_says_nothing_about_the_next_one(count: int, tokens: int) -> None:
    memory = Memory()

    assert not memory.skips(alive(count, tokens), alive(count, tokens))
    assert memory.settled.skips is None
    assert memory.skips(alive(500), alive(500))


def test_tokens_without_values_cannot_be_counted() -> None:
    memory = Memory()

    with FakeTensorMode():
        tokens = torch.ones(1000, dtype=torch.bool)
        assert not memory.skips(tokens, tokens)

    assert memory.settled.skips is None


def test_threads_of_several_devices_settle_one_thing_once(monkeypatch: pytest.MonkeyPatch) -> None:
    memory, both = Memory(), threading.Barrier(2, timeout=HANG_S)
    counted: list[int] = []
    settle = Memory._settle

    def count(self: Memory, tokens: torch.Tensor, labelled: torch.Tensor) -> None:
        counted.append(int(tokens.sum()))
        settle(self, tokens, labelled)

    def run(tokens: torch.Tensor) -> bool:
        both.wait()
        return memory.skips(tokens, tokens)

    monkeypatch.setattr(Memory, "_settle", count)
    with ThreadPoolExecutor(2) as pool:
        answers = list(pool.map(run, [alive(500), alive(1000)]))

    assert len(counted) == 1
    assert answers == [memory.settled.skips] * 2


def test_copies_of_a_choice_share_its_findings_and_others_do_not() -> None:
    """The entry for Megatron copies the choice of the process at each call."""
    memory = Memory()
    copy = replace(memory, block_classes=5)

    memory.skips(alive(1000), alive(1000))

    assert copy.settled.skips is False
    assert Memory().settled.skips is None
    assert memory == Memory()
