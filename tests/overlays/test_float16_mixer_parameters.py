"""A real MambaMixer of Megatron with the overlay: A_log and D are marked, stay fp32 when wrapped, and go through files."""

from __future__ import annotations

import contextlib
import importlib
import os
import threading
import warnings
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import warm_python
from placed_seams import assert_self_test, placed
from places import HANG_S, SUPPORT
from upstream_imports import upstream_module
from warm_python import MEGATRON

import megacpp_overlays
from megacpp_overlays.feature_probes.float16_fp32_exemption import BLANKET_CAST
from megacpp_overlays.feature_probes.float16_mixer_parameters import MAMBA, UNMARKED
from megacpp_overlays.fp32_marks import MARK
from megacpp_overlays.overlays import float16_fp32_exemption
from megacpp_overlays.overlays.float16_mixer_parameters import PARTS

OVERLAY = PARTS[0]
EXEMPTION = float16_fp32_exemption.OVERLAY
NAMES = ("A_log", "D")


@pytest.fixture(scope="module")
def upstream() -> Iterator[ModuleType]:
    """The mixer's module in the installed release, as upstream made it."""
    module = upstream_module(MAMBA.module)
    megacpp_overlays.undo(EXEMPTION.id)
    yield module
    megacpp_overlays.arm()


@pytest.fixture
def mixer_module(upstream: ModuleType, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The mixer's module, able to build: its constructor asks for kernels, and runs none of them."""
    for module in (upstream, importlib.import_module("megatron.core.ssm.mamba_context_parallel")):
        for name in ("HAVE_MAMBA_SSM", "HAVE_EINOPS"):
            if hasattr(module, name):
                monkeypatch.setattr(module, name, True)
    # Without mamba-ssm upstream's norm is a mock that can be called once.
    monkeypatch.setattr(upstream, "ExtendedRMSNorm", Norm)
    return upstream


class Norm(torch.nn.Module):
    def __init__(self, size: int, *, dtype: torch.dtype, **_: Any) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(size, dtype=dtype))


class Projection(torch.nn.Module):
    def __init__(self, inputs: int, outputs: int, **_: Any) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(outputs, inputs))


@pytest.fixture
def build(mixer_module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Build a real mixer on the CPU: `build(D_has_hdim=True)`."""
    from megatron.core.transformer.transformer_config import TransformerConfig

    monkeypatch.setattr(torch.cuda, "current_device", lambda: torch.device("cpu"))
    tracker = SimpleNamespace(fork=contextlib.nullcontext)
    monkeypatch.setattr(mixer_module, "get_cuda_rng_tracker", lambda: tracker)
    group = SimpleNamespace(size=lambda: 1, rank=lambda: 0)

    def make(**options: Any) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # 0.19.2 warns about its own defaults
            config = TransformerConfig(
                num_layers=1,
                hidden_size=32,
                num_attention_heads=1,
                mamba_state_dim=8,
                mamba_head_dim=8,
                mamba_num_groups=1,
                bf16=True,
                params_dtype=torch.bfloat16,
            )
        submodules = mixer_module.MambaMixerSubmodules(in_proj=Projection, out_proj=Projection)
        groups = SimpleNamespace(tp=group, cp=group)
        return mixer_module.MambaMixer(config, submodules, 32, layer_number=1, pg_collection=groups, **options)

    return make


def wrap(model: torch.nn.Module, dtype: str = "bf16") -> Any:
    module = importlib.import_module(EXEMPTION.target.module)
    config = SimpleNamespace(fp16=dtype == "fp16", bf16=dtype == "bf16", virtual_pipeline_model_parallel_size=None)
    return module.Float16Module(config, model)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("options", [{}, {"D_has_hdim": True}], ids=["D of each head", "D of each channel"])
def test_both_parameters_of_a_real_mixer_keep_their_bits(
    mixer_module: ModuleType, build: Callable[..., Any], dtype: str, options: dict[str, Any]
) -> None:
    with (
        placed(OVERLAY, UNMARKED, mixer_module),
        placed(EXEMPTION, BLANKET_CAST, importlib.import_module(EXEMPTION.target.module)),
    ):
        mixer = build(**options)
        parameters = {name: getattr(mixer, name) for name in NAMES}
        before = {name: value.detach().clone() for name, value in parameters.items()}
        wrap(mixer, dtype)

    half = {"bf16": torch.bfloat16, "fp16": torch.float16}[dtype]
    for name, parameter in parameters.items():
        assert getattr(mixer, name) is parameter
        assert parameter.dtype is torch.float32
        assert torch.equal(parameter, before[name])
        assert parameter.tensor_model_parallel
        assert parameter.partition_dim == 0
    assert mixer.cp.get_A_log() is mixer.A_log
    assert mixer.cp.get_D() is mixer.D
    others = {value.dtype for name, value in mixer.named_parameters() if name not in NAMES}
    assert others == {half}


def test_marks_alone_change_nothing_where_nothing_honours_them(
    mixer_module: ModuleType, build: Callable[..., Any]
) -> None:
    with placed(OVERLAY, UNMARKED, mixer_module):
        mixer = build()
    wrap(mixer)

    assert mixer.A_log.dtype is torch.bfloat16


def test_a_constructor_that_fails_fails_as_before(mixer_module: ModuleType, build: Callable[..., Any]) -> None:
    with placed(OVERLAY, UNMARKED, mixer_module), pytest.raises(AssertionError):
        build(norm_before_gate=True)


def test_a_parameter_that_was_created_in_half_precision_is_not_marked(
    mixer_module: ModuleType, build: Callable[..., Any]
) -> None:
    torch.set_default_dtype(torch.bfloat16)
    try:
        with placed(OVERLAY, UNMARKED, mixer_module):
            mixer = build()
            assert not OVERLAY.self_test(mixer_module).broken
    finally:
        torch.set_default_dtype(torch.float32)

    assert mixer.D.dtype is torch.bfloat16
    assert not hasattr(mixer.D, MARK)
    assert getattr(mixer.A_log, MARK)


# The witness and the self-test


def test_the_witness_sees_the_defect_and_the_self_test_its_absence(mixer_module: ModuleType) -> None:
    assert OVERLAY.witness is not None
    assert OVERLAY.witness(mixer_module).broken
    assert_self_test(OVERLAY, mixer_module, UNMARKED)


def test_witness_and_self_test_pass_where_no_mixer_can_be_built(
    upstream: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upstream, "HAVE_MAMBA_SSM", False)
    assert OVERLAY.witness is not None

    assert OVERLAY.witness(upstream).broken
    answer = OVERLAY.self_test(upstream)
    assert not answer.broken
    assert "MambaSSM is not installed" in answer.seen


def test_a_test_build_leaves_no_trace(mixer_module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(torch.cuda, "current_device", lambda: asked.append(threading.get_ident()))
    tracker, random = mixer_module.get_cuda_rng_tracker, torch.random.get_rng_state()

    OVERLAY.self_test(mixer_module)

    assert not asked
    assert mixer_module.torch is torch
    assert mixer_module.get_cuda_rng_tracker is tracker
    assert torch.equal(torch.random.get_rng_state(), random)
    assert not torch.cuda.is_initialized()


def test_a_failing_test_build_puts_everything_back(mixer_module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise ValueError("not today")

    monkeypatch.setattr(mixer_module, "MambaContextParallel", refuse)

    with pytest.raises(ValueError, match="not today"):
        OVERLAY.self_test(mixer_module)

    assert mixer_module.torch is torch


def test_another_thread_keeps_its_device_meanwhile(mixer_module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 7)
    monkeypatch.setattr(mixer_module, "get_cuda_rng_tracker", lambda: "theirs")
    seen: list[Any] = []

    def look(*_: Any, **__: Any) -> Any:
        def elsewhere() -> None:
            seen.append((mixer_module.torch.cuda.current_device(), mixer_module.get_cuda_rng_tracker()))

        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        seen.append(mixer_module.torch.cuda.current_device())
        assert mixer_module.torch.float32 is torch.float32

    monkeypatch.setattr(mixer_module, "MambaContextParallel", look)
    OVERLAY.self_test(mixer_module)

    assert seen == [(7, "theirs"), "cpu"]


# Through files


@pytest.fixture(scope="module")
def checkpoints() -> dict[str, str]:
    """The A_log that comes back from each way through Megatron's dist_checkpointing: real files, on the CPU."""
    script = SUPPORT.joinpath("float16_mixer_checkpoints.py")
    done = warm_python.run(["-W", "ignore", script], os.environ, after=MEGATRON, timeout=HANG_S)
    assert done.returncode == 0, done.stderr[-3000:]
    rows = [line.partition(": ") for line in done.stdout.splitlines()]
    return {row[0]: row[2] for row in rows if row[0].startswith(("cast ", "kept "))}


@pytest.mark.upstream
def test_parameters_alone_load_either_way(checkpoints: dict[str, str]) -> None:
    assert checkpoints["cast kept model"] == "same"
    assert checkpoints["kept kept model"] == "same"
    assert checkpoints["kept cast model"] == "rounded"


@pytest.mark.upstream
def test_optimizer_state_comes_back_where_both_runs_are_alike(checkpoints: dict[str, str]) -> None:
    assert checkpoints["kept kept whole"] == "same same same"
    assert checkpoints["cast cast whole"] == "same same same"


@pytest.mark.upstream
def test_switching_it_on_in_a_run_rounds_the_value_that_is_updated(checkpoints: dict[str, str]) -> None:
    assert checkpoints["cast kept whole"] == "same same rounded"


@pytest.mark.upstream
def test_switching_it_off_in_a_run_is_refused_for_the_optimizer_state(checkpoints: dict[str, str]) -> None:
    assert checkpoints["kept cast whole"].startswith("fails: ")
    assert "fp32_param.A_log from model not in state dict" in checkpoints["kept cast whole"]
