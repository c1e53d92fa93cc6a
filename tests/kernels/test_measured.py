"""Kernels that are not plain PyTorch decline where they were not measured, and log it once."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from megacpp_overlays import variables
from megacpp_overlays.kernels import measured
from megacpp_overlays.kernels.masked_products import products

CUDA = torch.device("cuda:0")
KERNELS = {torch.bfloat16}
A_LITTLE = measured.SMALL // 4
"""Elements of the largest tensor that is small."""


@pytest.fixture(autouse=True)
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Pretend that there is a Hopper GPU, and the Triton that was measured on one."""
    monkeypatch.setattr(measured, "_said", set())
    measured._is_measured_gpu.cache_clear()
    monkeypatch.setattr(measured, "_triton", lambda: "3.6.0")
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    yield
    measured._is_measured_gpu.cache_clear()


def test_measured_devices_and_the_cpu_are_served(caplog: pytest.LogCaptureFixture) -> None:
    assert not measured.declines(CUDA, "we", "others do")
    assert not measured.declines(torch.device("cpu"), "we", "others do")
    assert not caplog.records


@pytest.mark.parametrize("capability", [(8, 0), (10, 0), (12, 0)], ids=str)
def test_other_gpus_are_declined(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)

    assert measured.why_not(CUDA) == f"nothing was measured on compute capability {capability[0]}.0, but on 9"


@pytest.mark.parametrize("version", ["3.4.0", "3.5.1", "3.7.0", "3.7.1", "3.8.0", "3.9.0", "4.0.0+git1234"])
def test_other_releases_of_triton_are_declined_on_a_gpu_alone(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr(measured, "_triton", lambda: version)

    assert measured.why_not(CUDA) == f"nothing was measured on a GPU with triton {version}, but with 3.6"
    assert measured.why_not(torch.device("cpu")) is None


def test_devices_that_are_no_nvidia_gpus_are_declined(monkeypatch: pytest.MonkeyPatch) -> None:
    assert measured.why_not(torch.device("meta")) == "meta is no NVIDIA GPU"
    monkeypatch.setattr(torch.version, "hip", "6.3")
    assert measured.why_not(CUDA) == "cuda:0 is no NVIDIA GPU"


def test_without_triton_a_gpu_is_declined(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measured, "_triton", lambda: None)

    assert measured.why_not(CUDA) == "triton is not installed"


def test_each_reason_is_said_once_by_each_who_declines(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(measured, "_triton", lambda: "3.9.0")

    for who in ("we", "we", "they"):
        assert measured.declines(CUDA, who, "others do")

    reason = "nothing was measured on a GPU with triton 3.9.0, but with 3.6; others do"
    assert [each.getMessage() for each in caplog.records] == [f"we: {reason}", f"they: {reason}"]


class OnGpu:
    """A tensor as its dtype and device describe it."""

    def __init__(self, dtype: torch.dtype = torch.bfloat16) -> None:
        self.dtype, self.device = dtype, CUDA


def test_where_kernels_were_measured_calls_of_any_size_are_served() -> None:
    assert measured.serves(OnGpu(), KERNELS, 1)


@pytest.mark.parametrize(
    "tensor",
    [torch.zeros((), dtype=torch.bfloat16), torch.zeros(()), OnGpu(torch.float32)],
    ids=["CPU", "CPU, float32", "a dtype of no kernel"],
)
def test_elsewhere_only_calls_are_served_for_which_upstream_needs_much_memory(tensor: torch.Tensor) -> None:
    assert not measured.serves(tensor, KERNELS, A_LITTLE)
    assert measured.serves(tensor, KERNELS, A_LITTLE + 1)


@pytest.mark.parametrize("capability", [(8, 0), (10, 0), (12, 0)], ids=str)
def test_small_calls_on_other_gpus_are_upstreams(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)

    assert not measured.serves(OnGpu(), KERNELS, A_LITTLE)
    assert measured.serves(OnGpu(), KERNELS, A_LITTLE + 1)


def test_a_setting_has_small_calls_served(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(variables._of_this_process, variables.SMALL_CALLS.name, "overlay")

    assert measured.serves(torch.zeros(()), KERNELS, 1)


def test_small_calls_are_served_while_that_is_asked_for() -> None:
    with measured.serving_calls_of_every_size():
        with measured.serving_calls_of_every_size():
            pass
        assert measured.serves(torch.zeros(()), KERNELS, 1)

    assert not measured.serves(torch.zeros(()), KERNELS, 1)


def test_products_that_end_after_some_rows_are_not_to_be_had_there(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("triton")

    monkeypatch.setattr(products.in_triton, "fits", lambda dtype, *matrices: True)
    assert products.available(torch.bfloat16, OnGpu())
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (12, 0))
    assert not products.available(torch.bfloat16, OnGpu())
    assert not products.available(torch.bfloat16, OnGpu())
    assert [each.getMessage() for each in caplog.records] == [
        "linear cross entropy: nothing was measured on compute capability 12.0, but on 9; "
        "no token is skipped here, all are computed"
    ]
