"""Direct launches give Triton's launcher the same arguments as Triton itself."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton.tools.tensor_descriptor")

from triton import knobs  # noqa: E402
from triton.backends.nvidia import driver  # noqa: E402
from triton.runtime import driver as runtime  # noqa: E402
from triton.tools.tensor_descriptor import TensorDescriptor  # noqa: E402

from megacpp_overlays.kernels.masked_products import direct_launches  # noqa: E402

GRID, STREAM, FUNCTION, PACKED = (12, 3, 1), 77, 1234, (8, 1, 229408)
PLACE = 3

pytestmark = pytest.mark.skipif(
    getattr(driver, "_BASE_ARGS_FORMAT", None) != direct_launches._LAYOUT, reason="this Triton launches by itself"
)


class Recorder:
    """The launcher that Triton compiles from C, but for the launch."""

    def __init__(self) -> None:
        self.got: list[tuple[Any, ...]] = []

    def __call__(self, *arguments: Any) -> None:
        self.got.append(arguments)


class CompiledProgram:
    """A compiled program, as Triton keeps one."""

    function, packed_metadata = FUNCTION, PACKED

    def __init__(self, launch: Any, *, scratch: int = 0) -> None:
        self.run = SimpleNamespace(
            launch=launch, num_ctas=1, launch_cooperative_grid=False, launch_pdl=True,
            global_scratch_size=scratch, global_scratch_align=16, profile_scratch_size=0, profile_scratch_align=1,
        )  # fmt: skip
        self.by_triton: list[list[Any]] = []

    def __getitem__(self, grid: tuple[int, int, int]) -> Any:
        assert grid == GRID
        return lambda *values: self.by_triton.append(list(values))


@pytest.fixture(autouse=True)
def _a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand for a device: its number, its stream, and how a descriptor is encoded for it."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    utils = SimpleNamespace(fill_tma_descriptor=lambda *given: ("encoded", *map(str, given)))
    active = SimpleNamespace(utils=utils, get_current_stream=lambda device: STREAM + device)
    monkeypatch.setattr(runtime, "_active", active, raising=False)
    monkeypatch.setattr(type(runtime), "active", property(lambda each: each._active), raising=False)


def values() -> list[Any]:
    """Return arguments of every kind."""
    matrix = torch.zeros(256, 128, dtype=torch.bfloat16)
    described = TensorDescriptor(matrix, list(matrix.shape), list(matrix.stride()), [128, 64])
    return [described, torch.ones(4), None, 0, 2.5, described, 128]


def launcher(given: list[Any], recorder: Recorder) -> Any:
    """Return the function that Triton calls to launch a program with these arguments."""
    kinds = ["tensordesc<bf16[128, 64]>" if isinstance(each, TensorDescriptor) else "i32" for each in given]
    meta = {"swizzle": 3, "elem_size": 2, "elem_type": 10, "block_size": [64, 64], "fp4_padded": False}
    return driver.wrap_handle_tensordesc(
        recorder, dict(enumerate(kinds)), [meta] * sum(kind.startswith("tensordesc") for kind in kinds)
    )


def of_triton(given: list[Any], number: int) -> tuple[Any, ...]:
    """Return the arguments that Triton's own launch passes to its launcher, pointers as numbers."""
    recorder = Recorder()
    compiled = CompiledProgram(launcher(given, recorder))
    numbered = [number if place == PLACE else each for place, each in enumerate(given)]
    driver.CudaLauncher.__call__(compiled.run, *GRID, STREAM, FUNCTION, PACKED, None, None, None, *numbered)
    (got,) = recorder.got
    return tuple(each.data_ptr() if isinstance(each, torch.Tensor) else each for each in got)


@pytest.mark.parametrize("descriptors", [True, False])
def test_a_launcher_gets_the_arguments_that_triton_passes(descriptors: bool) -> None:
    recorder = Recorder()
    given = [each if descriptors or not isinstance(each, TensorDescriptor) else 6 for each in values()]
    compiled = CompiledProgram(launcher(given, recorder))

    launch = direct_launches.directly(compiled, GRID, list(given), PLACE)
    for number in (0, 5, 3):
        launch(number)

    assert recorder.got == [of_triton(given, number) for number in (0, 5, 3)]
    assert compiled.by_triton == []


def test_descriptors_are_encoded_once() -> None:
    encode = mock.Mock(return_value="encoded")
    recorder = Recorder()

    with mock.patch.object(runtime._active.utils, "fill_tma_descriptor", encode):
        launch = direct_launches.directly(CompiledProgram(launcher(values(), recorder)), GRID, values(), PLACE)
        for number in range(9):
            launch(number)

    assert (len(recorder.got), encode.call_count) == (9, 2)


def other(obstacle: str, recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> CompiledProgram:
    """Return a program whose launches are not as they were read."""
    launch = launcher(values(), recorder)
    if obstacle == "layout":
        monkeypatch.setattr(driver, "_BASE_ARGS_FORMAT", "iiiKKOOOO")
    elif obstacle == "wrapped":
        return CompiledProgram(lambda *arguments: launch(*arguments))
    elif obstacle == "profiler":
        monkeypatch.setattr(knobs.runtime.launch_enter_hook, "calls", [print])
    elif obstacle == "hook":
        monkeypatch.setattr(knobs.runtime, "launch_exit_hook", print)
    elif obstacle == "attributes":
        compiled = CompiledProgram(launch)
        del compiled.run.launch_pdl
        return compiled
    return CompiledProgram(launch, scratch=64 if obstacle == "scratch" else 0)


@pytest.mark.parametrize("obstacle", ["layout", "wrapped", "scratch", "attributes", "profiler", "hook"])
def test_triton_launches_if_its_launcher_differs_or_a_hook_is_set(
    obstacle: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder, given = Recorder(), values()
    compiled = other(obstacle, recorder, monkeypatch)

    direct_launches.directly(compiled, GRID, given, PLACE)(5)

    assert compiled.by_triton == [[*given[:PLACE], 5, *given[PLACE + 1 :]]]
    assert recorder.got == []
