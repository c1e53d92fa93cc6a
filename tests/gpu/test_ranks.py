"""`verify_ranks` over NCCL groups: it names the rank that differs or is missing, and does not initialize CUDA."""

from __future__ import annotations

from pathlib import Path

import pytest
from launched_ranks import Ranks, only, same_error

pytestmark = pytest.mark.gpu


@pytest.fixture(params=[2, 4])
def size(request: pytest.FixtureRequest) -> int:
    import torch

    wanted: int = request.param
    if torch.cuda.device_count() < wanted:
        pytest.skip(f"{torch.cuda.device_count()} of {wanted} CUDA devices")
    return wanted


def test_ranks_agree_before_cuda_is_initialized_and_reduce_afterwards(tmp_path: Path, size: int) -> None:
    found = only(Ranks(tmp_path).torchrun(size, backend="nccl", reduces=True))

    assert [each["outcome"] for each in found] == ["agreed"] * size
    assert len({each["fingerprint"] for each in found}) == 1
    assert not any(each["cuda"] for each in found)  # recorded after the call and before the sum
    assert [each["sum"] for each in found] == [float(size)] * size


def test_an_overlay_that_is_off_on_the_last_rank_is_an_error_on_all(tmp_path: Path, size: int) -> None:
    last = size - 1
    plan = {str(last): {"environment": {"MEGACPP_OVERLAY_DOUBLE_FIX": "off"}}}

    found = only(Ranks(tmp_path).torchrun(size, backend="nccl", **plan))

    error = same_error(found)
    assert error["differences"] == [["double-fix", "switch", [["auto", list(range(last))], ["off", [last]]]]]
    assert not any(each["cuda"] for each in found)


def test_a_rank_that_never_calls_is_named_by_the_others(tmp_path: Path, size: int) -> None:
    last = size - 1

    seen = Ranks(tmp_path).torchrun(size, timeout=10, absent=1, backend="nccl", **{str(last): {"leaves": "exit"}})

    assert seen.pop() is None
    error = same_error(only(seen))
    assert error["missing"] == [last]
    assert not any(each["cuda"] for each in only(seen))
