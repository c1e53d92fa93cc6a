"""Fully reshardable checkpoints of a real DistributedOptimizer: gloo, one rank and more, through files.

Each parameter's own state, put together from the shards that the ranks held, is compared with the tensors of a checkpoint under
its name and with the state of other ranks that loaded it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from itertools import chain, permutations
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from launched_reshardable import ID, differences, dumped, launch, saved, step
from placed_seams import assert_self_test, without_overlays
from releases import only
from unpacked import unpacked

from megacpp_overlays.errors import CheckpointError
from megacpp_overlays.feature_probes.fully_reshardable_padding import PADDED_SLICES
from megacpp_overlays.overlays import fully_reshardable_padding as overlay
from megacpp_overlays.upkeep.checkpoint import masters

pytestmark = pytest.mark.upstream

SIZES = (1, 2, 3)
DAILY = 2
each_size = pytest.mark.parametrize("size", only(SIZES, [DAILY]))
BUCKET, OTHER_BUCKET, WHOLE = 2000, 3500, 10**9
NEIGHBOURS = ("float16-distributed-order", "float16-optimizer-state-ids")


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], SimpleNamespace]:
    """Return the checkpoints that ranks wrote without the overlay and with it, by the number of ranks."""
    done: dict[int, SimpleNamespace] = {}

    def of(size: int) -> SimpleNamespace:
        if size not in done:
            done[size] = write(tmp_path_factory.mktemp(f"ranks-{size}"), size, measured=size == DAILY)
        return done[size]

    return of


def write(folder: Path, size: int, *, measured: bool = False, path: Path | None = None) -> SimpleNamespace:
    said = launch(
        folder / "plan",
        size,
        step("overlays", off=[ID]),
        step("build", seed=1, bucket=BUCKET, steps=2),
        step("dump", to=folder / "truth"),
        step("save", to=folder / "broken", efficient=True),
        step("overlays", off=[]),
        step("save", to=folder / "right", efficient=True),
        step("save", to=folder / "from-all-ranks", efficient=False),
        step("build", seed=2, bucket=BUCKET, steps=0),
        step("load", source=folder / "right", efficient=True),
        step("dump", to=folder / "same-layout"),
        step("build", seed=3, bucket=OTHER_BUCKET, steps=1),
        step("load", source=folder / "broken", efficient=True),
        step("build", seed=4, bucket=BUCKET, steps=0),
        step("load", source=folder / "broken", efficient=True, with_model=False),
        step("load", source=folder / "right", efficient=True, with_model=False),
        step("overlays", off=[ID]),
        step("build", seed=5, bucket=BUCKET, steps=0),
        step("load", source=folder / "broken", efficient=True),
        step("dump", to=folder / "in-silence"),
        measured=measured,
        path=path,
    )
    loads = ("right", "broken", "broken, other model", "right, other model", "in silence")
    places = [number for number, each in enumerate(said[0]) if isinstance(each, str)]
    return SimpleNamespace(
        folder=folder,
        truth=dumped(folder / "truth"),
        buckets=said[0][1],
        loads={name: [rank[place] for rank in said] for name, place in zip(loads, places, strict=True)},
    )


def behind_padding(run: SimpleNamespace) -> int:
    """Return how many elements lie in buckets behind one that is padded."""
    [buckets] = run.buckets
    first = next(number for number, (padded, unpadded) in enumerate(buckets) if padded > unpadded)
    return sum(unpadded for _, unpadded in buckets[first + 1 :])


@each_size
def test_without_it_every_parameter_behind_the_first_padded_bucket_is_saved_with_the_state_of_others(
    written: Callable[[int], SimpleNamespace], size: int
) -> None:
    run = written(size)
    stored = saved(run.folder / "broken")

    wrong = differences(run.truth, stored)
    [buckets] = run.buckets
    assert len(buckets) >= 3
    assert any(padded > unpadded for padded, unpadded in buckets[:-1])
    # Parameters are laid out from the last to the first, and each begins at a multiple of 64.
    room = sum(-(-len(run.truth[name]["param"]) // 64) * 64 for name in wrong)
    assert behind_padding(run) <= room < behind_padding(run) + 64 * len(buckets)
    assert 0 < len(wrong) < len(run.truth)
    assert all(torch.equal(run.truth[name]["weight"], stored[name]["weight"]) for name in wrong)
    assert not stored["layer0.weight"]["exp_avg"][-8:].any()


@pytest.mark.parametrize("folder", ["right", "from-all-ranks"])
@each_size
def test_with_it_every_state_is_saved_under_the_name_of_its_parameter(
    written: Callable[[int], SimpleNamespace], size: int, folder: str
) -> None:
    run = written(size)

    assert differences(run.truth, saved(run.folder / folder)) == []


@each_size
def test_the_layout_that_wrote_a_checkpoint_reads_its_own_state_back(
    written: Callable[[int], SimpleNamespace], size: int
) -> None:
    run = written(size)

    assert run.loads["right"] == [""] * size
    assert differences(run.truth, dumped(run.folder / "same-layout")) == []


@pytest.mark.parametrize(("size", "other"), only(permutations(SIZES, 2), [(DAILY, 1)]))
def test_another_number_of_ranks_with_other_buckets_reads_the_same(
    written: Callable[[int], SimpleNamespace], tmp_path: Path, size: int, other: int
) -> None:
    run = written(size)

    said = launch(
        tmp_path / "plan",
        other,
        step("build", seed=9, bucket=OTHER_BUCKET, steps=1),
        step("load", source=run.folder / "right", efficient=True),
        step("dump", to=tmp_path / "read"),
    )

    assert [rank[1] for rank in said] == [""] * other
    assert said[0][0] != run.buckets
    assert differences(run.truth, dumped(tmp_path / "read")) == []


SWITCHED_OFF = {"-".join(off): off for off in ((), NEIGHBOURS[:1], NEIGHBOURS[1:], NEIGHBOURS)}


@pytest.fixture(scope="module")
def beside_others(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """Return the answers of two ranks that switch off the neighbouring overlays in turn."""
    folder = tmp_path_factory.mktemp("with-neighbours")
    plans = {}
    for name, off in SWITCHED_OFF.items():
        native = NEIGHBOURS[0] not in off  # a model of both kinds needs that one
        plans[name] = (
            step("overlays", off=[*off]),
            step("build", seed=1, bucket=BUCKET, steps=2, native=native),
            step("dump", to=folder / f"{name}-truth"),
            step("save", to=folder / f"{name}-saved", efficient=True),
            step("build", seed=2, bucket=BUCKET, steps=0, native=native),
            step("load", source=folder / f"{name}-saved", efficient=True),
            step("dump", to=folder / f"{name}-state"),
        )
    said = launch(folder / "plan", 2, *chain.from_iterable(plans.values()))
    parts = {name: [rank[7 * number : 7 * number + 7] for rank in said] for number, name in enumerate(plans)}
    return SimpleNamespace(folder=folder, said=parts)


@pytest.mark.full
@pytest.mark.parametrize("off", SWITCHED_OFF)
def test_the_other_overlays_of_optimizers_may_be_on_or_off(beside_others: SimpleNamespace, off: str) -> None:
    said, folder = beside_others.said[off], beside_others.folder

    assert len(said[0][1]) == (1 if NEIGHBOURS[0] in off else 2)
    assert [rank[5] for rank in said] == ["", ""]
    truth = dumped(folder / f"{off}-truth")
    assert differences(truth, saved(folder / f"{off}-saved")) == []
    assert differences(truth, dumped(folder / f"{off}-state")) == []


@each_size
def test_a_checkpoint_that_was_written_broken_is_refused_and_its_parameters_are_named(
    written: Callable[[int], SimpleNamespace], size: int
) -> None:
    run = written(size)
    wrong = differences(run.truth, saved(run.folder / "broken"))

    assert all(each.startswith("CheckpointError: ") for each in run.loads["broken"])
    named = {name for name in run.truth if any(f"module.{name} (" in each for each in run.loads["broken"])}
    assert named <= set(wrong)
    assert {name for name in wrong if len(run.truth[name]["param"]) > 1000} <= named


@each_size
def test_without_it_such_a_checkpoint_is_loaded_in_silence(
    written: Callable[[int], SimpleNamespace], size: int
) -> None:
    run = written(size)

    assert run.loads["in silence"] == [""] * size
    loaded = dumped(run.folder / "in-silence")
    wrong = differences(run.truth, loaded)
    assert wrong == differences(run.truth, saved(run.folder / "broken"))
    assert all(torch.equal(run.truth[name]["weight"], loaded[name]["weight"]) for name in wrong)


def test_nothing_is_refused_for_a_model_whose_weights_were_not_loaded(
    written: Callable[[int], SimpleNamespace],
) -> None:
    run = written(2)

    assert run.loads["right, other model"] == run.loads["broken, other model"] == ["", ""]


# A vocabulary that is padded to another number of rows, and other ranks of tensor parallelism

VOCABULARY, GROWN, SHRUNK, PADDED = 128, 256, 96, 112


def saving(folder: Path) -> list[dict[str, Any]]:
    """Return the steps that write a model whose embedding alone lies behind padding, right and broken."""
    return [
        step("overlays", off=[]),
        step("build", seed=1, bucket=BUCKET, steps=2, vocabulary=VOCABULARY, layers=1),
        step("save", to=folder / "right", efficient=True),
        step("zero_rows", start=PADDED),
        step("save", to=folder / "padded", efficient=True),
        step("build", seed=1, bucket=BUCKET, steps=2, vocabulary=VOCABULARY, layers=1),
        step("overlays", off=[ID]),
        step("save", to=folder / "broken", efficient=True),
        step("overlays", off=[]),
    ]


def loading(source: Path, vocabulary: int, new_rows: int | None) -> list[dict[str, Any]]:
    """Return the steps that load a checkpoint into a vocabulary whose rows from `new_rows` on are initialised in between."""
    return [
        step("build", seed=2, bucket=WHOLE, steps=0, vocabulary=vocabulary, layers=1),
        step("load", source=source, efficient=True, new_rows=new_rows),
    ]


INTO = {
    "the same": (VOCABULARY, None),
    "grown": (GROWN, VOCABULARY),
    "grown without values for new rows": (GROWN, None),
    "shrunk": (SHRUNK, None),
}
Vocabularies = Callable[[int, int], dict[tuple[str, str], list[str]]]
RE_INITIALISED = "rows that were zeros and never trained are initialised"


@pytest.fixture(scope="module")
def vocabularies(tmp_path_factory: pytest.TempPathFactory) -> Vocabularies:
    """Return the errors of ranks that load checkpoints of as many or of other ranks.

    They are keyed by checkpoint and by the vocabulary that it was loaded into.
    """
    folder = tmp_path_factory.mktemp("vocabularies")
    written = {ranks: folder / f"of-{ranks}" for ranks in (1, 2)}
    for each in written.values():
        each.mkdir()

    @functools.cache
    def said(by: int, ranks: int) -> dict[tuple[str, str], list[str]]:
        first = saving(written[by]) if by == ranks else []
        if not first:
            said(by, by)
        plans = {
            (kind, into): loading(written[by] / kind, *size)
            for kind in ("right", "broken")
            for into, size in INTO.items()
        }
        plans["padded", RE_INITIALISED] = loading(written[by] / "padded", VOCABULARY, PADDED)
        steps = [*first, *chain.from_iterable(plans.values())]
        found = launch(folder / f"{by}-{ranks}", ranks, *steps, tensor_parallel=ranks)
        return {key: [rank[len(first) + 2 * number + 1] for rank in found] for number, key in enumerate(plans)}

    return said


each_way = pytest.mark.parametrize(
    ("by", "ranks"),
    only([(1, 1), (1, 2), (2, 1), (2, 2)], [(1, 1)]),
    ids=lambda ranks: f"tensor parallelism of {ranks}",
)


@pytest.mark.parametrize("into", [*INTO, RE_INITIALISED])
@each_way
def test_a_right_checkpoint_is_loaded_into_any_vocabulary(
    vocabularies: Vocabularies, by: int, ranks: int, into: str
) -> None:
    """Where one rank wrote and two load, all rows of the second one may be new."""
    kind = "padded" if into == RE_INITIALISED else "right"

    assert vocabularies(by, ranks)[kind, into] == [""] * ranks


@pytest.mark.parametrize("into", INTO)
@each_way
def test_a_broken_checkpoint_is_refused_for_any_vocabulary(
    vocabularies: Vocabularies, by: int, ranks: int, into: str
) -> None:
    assert any("module.embedding.weight (" in each for each in vocabularies(by, ranks)["broken", into])


@pytest.mark.full
def test_a_buffer_of_one_bucket_is_saved_by_upstream_alone(tmp_path: Path) -> None:
    said = launch(
        tmp_path / "plan",
        2,
        step("overlays", off=[ID]),
        step("build", seed=1, bucket=WHOLE, steps=1),
        step("save", to=tmp_path / "without", efficient=True),
        step("overlays", off=[]),
        step("save", to=tmp_path / "with", efficient=True),
    )

    [[(padded, unpadded)]] = said[0][1]
    assert padded > unpadded
    assert differences(saved(tmp_path / "without"), saved(tmp_path / "with")) == []


@pytest.mark.full
@pytest.mark.parametrize("version", ["0.15.0", "0.16.1", "0.17.1", "0.18.2"])
def test_older_releases_are_as_wrong_and_are_repaired_alike(
    version: str, wheel: Callable[[str, str], Path], tmp_path: Path
) -> None:
    run = write(tmp_path, 1, path=unpacked(wheel("megatron-core", version)))

    assert len(differences(run.truth, saved(tmp_path / "broken"))) > 1
    assert differences(run.truth, saved(tmp_path / "right")) == []
    assert differences(run.truth, dumped(tmp_path / "same-layout")) == []
    assert run.loads["broken"][0].startswith("CheckpointError: ")
    verdicts = [masters.check(tmp_path / each).verdict for each in ("broken", "right")]
    assert verdicts == [masters.CheckpointVerdict.BROKEN, masters.CheckpointVerdict.RIGHT]


@each_size
def test_the_command_detects_broken_parameters_from_the_files(
    written: Callable[[int], SimpleNamespace], size: int
) -> None:
    run = written(size)

    broken, *right = (masters.check(run.folder / each) for each in ("broken", "right", "from-all-ranks"))

    assert broken.verdict is masters.CheckpointVerdict.BROKEN
    wrong = [each.name for each in broken.parameters if not each.is_right]
    assert sorted(wrong) == sorted(differences(run.truth, saved(run.folder / "broken")))
    assert [each.verdict for each in right] == [masters.CheckpointVerdict.RIGHT] * 2


# In this process


def buffer(*buckets: tuple[int, int], **places: tuple[int, int, int]) -> Any:
    return SimpleNamespace(
        buckets=[SimpleNamespace(grad_data=torch.empty(padded), numel_unpadded=own) for padded, own in buckets],
        param_index_map={
            torch.nn.Parameter(torch.empty(stop - start)): place
            for place in places.values()
            for start, stop, _ in [place]
        },
    )


def test_only_padding_of_buckets_before_a_parameter_is_taken_away() -> None:
    found = buffer((8, 5), (8, 8), (8, 6), a=(0, 5, 0), b=(8, 16, 1), c=(16, 18, 2), d=(19, 22, 2))

    stripped = overlay.stripped_before(found)

    assert stripped == [0, 3, 3]
    assert [*overlay.compact_index_map(found, stripped).values()] == [(0, 5, 0), (5, 13, 1), (13, 15, 2), (16, 19, 2)]


@pytest.mark.parametrize("place", [(5, 9, 1), (8, 17, 1), (16, 24, 1)])
def test_a_parameter_that_lies_elsewhere_than_in_its_bucket_is_not_saved(place: tuple[int, int, int]) -> None:
    found = buffer((8, 5), (8, 8), a=place)

    with pytest.raises(CheckpointError, match="its bucket lies from 5 to 13"):
        overlay.compact_index_map(found, overlay.stripped_before(found))


class LoadedOptimizer:
    """An optimizer of one rank with parameters of two buckets, and the state that a checkpoint has for it."""

    def __init__(self, count: int = 400, ahead: int = 90, parameters: int = 2) -> None:
        generator = torch.Generator().manual_seed(1)
        whole = {
            key: torch.randn(parameters * count, generator=generator) for key in ("param", "exp_avg", "exp_avg_sq")
        }
        self.model = torch.nn.ParameterList()
        self.state: dict[int, dict[str, Any]] = {}
        for number in range(parameters):
            start = number * count
            weight = whole["param"][start : start + count].bfloat16()
            self.model.append(torch.nn.Parameter(weight, requires_grad=False))
            behind = start + (ahead if number else 0)
            cut = {key: each[behind : behind + count] for key, each in whole.items()}
            self.state[number] = {
                key: torch.nn.functional.pad(each, (0, count - len(each))) for key, each in cut.items()
            }
        places = {each: (0, count, number) for number, each in enumerate(self.model)}
        owned = SimpleNamespace(start=0, end=count)
        self.optimizer = SimpleNamespace(
            buffers=[SimpleNamespace(param_index_map=places)],
            gbuf_ranges=[{torch.bfloat16: [{"param_map": {each: {"param": owned}}} for each in self.model]}],
            model_chunks=[self.model],
        )
        self.owned = owned

    def check(self, *, fixed: bool = True) -> None:
        overlay.check(self.optimizer, self.state, range(len(self.model)) if fixed else ())


def test_state_of_its_own_is_loaded() -> None:
    LoadedOptimizer(ahead=0).check()


def test_a_displacement_is_named() -> None:
    with pytest.raises(CheckpointError, match=r"in the place of: 1 \(90 elements displaced\); "):
        LoadedOptimizer().check()


def test_a_rank_tells_by_the_part_that_it_owns() -> None:
    loading = LoadedOptimizer()
    loading.owned.start, loading.owned.end = 350, 360

    with pytest.raises(CheckpointError, match=r"1 \(90 elements displaced\)"):
        loading.check()


def test_a_parameter_that_a_rank_owns_nothing_of_is_left_to_the_others() -> None:
    loading = LoadedOptimizer()
    [ranges] = loading.optimizer.gbuf_ranges
    del ranges[torch.bfloat16][1]

    loading.check()


def nothing_but_zeros() -> LoadedOptimizer:
    """Return a second parameter that the buffer of a broken checkpoint ended before."""
    return LoadedOptimizer(count=60, ahead=60)


def test_nothing_but_zeros_is_a_sign_if_the_weight_is_the_models() -> None:
    with pytest.raises(CheckpointError, match=r"1 \(60 zeros at its end\)"):
        nothing_but_zeros().check()


def test_nothing_but_zeros_is_none_where_the_parameter_may_have_grown() -> None:
    nothing_but_zeros().check(fixed=False)


def test_nothing_but_zeros_is_none_where_the_model_may_be_another() -> None:
    loading = nothing_but_zeros()
    for each in loading.model:
        each.data = torch.randn(60).bfloat16()

    loading.check()


@pytest.mark.parametrize("fixed", [True, False])
def test_a_short_parameter_is_detected_by_the_numbers_ahead_of_its_zeros(fixed: bool) -> None:
    with pytest.raises(CheckpointError, match=r"1 \(30 elements displaced\)"):
        LoadedOptimizer(count=60, ahead=30).check(fixed=fixed)


def test_sharded_tensors_of_a_load_say_which_parameters_may_grow() -> None:
    state: dict[Any, Any] = {
        0: {"param": SimpleNamespace(allow_shape_mismatch=False)},
        1: {"param": SimpleNamespace(allow_shape_mismatch=True)},
        2: {"param": SimpleNamespace()},  # as a factory of sharded tensors
        "step": {"param": SimpleNamespace(allow_shape_mismatch=False)},
    }

    assert overlay.of_fixed_size(state) == {0}
    assert overlay.of_fixed_size(None) == frozenset()


def test_an_error_names_eight_and_counts_the_rest() -> None:
    with pytest.raises(CheckpointError, match="and 3 more; "):
        LoadedOptimizer(parameters=12).check()


@pytest.mark.parametrize("of", ["quantized", "another size", "no master"])
def test_parameters_that_cannot_be_compared_are_not_refused(of: str) -> None:
    class Quantized(torch.Tensor):
        pass

    loading = LoadedOptimizer()
    if of == "quantized":
        loading.optimizer.gbuf_ranges[0][torch.bfloat16][1]["param_map"] = {}
        wrapped = torch.nn.Parameter(loading.model[1].data.as_subclass(Quantized), requires_grad=False)
        loading.optimizer.buffers[0].param_index_map = {loading.model[0]: None, wrapped: None}
        loading.optimizer.gbuf_ranges[0][torch.bfloat16][1]["param_map"] = {wrapped: {"param": loading.owned}}
    elif of == "another size":
        loading.state[1]["param"] = loading.state[1]["param"][:5]
    else:
        del loading.state[1]["param"]

    loading.check()


def test_a_parameter_that_no_model_has_is_named_by_its_shape() -> None:
    loading = LoadedOptimizer()
    loading.optimizer.model_chunks = []

    with pytest.raises(CheckpointError, match=r"a parameter of shape \(400,\) \(90 elements"):
        loading.check()


def test_the_self_test_sees_the_defect_and_its_absence() -> None:
    with without_overlays(overlay.TARGET.module) as module:
        assert_self_test(overlay.OVERLAY, module, PADDED_SLICES)
