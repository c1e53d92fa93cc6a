"""A real MambaMixer on packed rows with the overlay: documents have the results that each has alone. Arguments do not change."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import warm_python
from hypothesis import given, settings
from hypothesis import strategies as st
from places import HANG_S, ROOT, SUPPORT
from tensor_writes import COPIES, WRITES, Copy, Write
from unpacked import unpacked
from upstream_imports import upstream_module
from warm_python import MEGATRON_INTERPRETED, WarmProcess

import megacpp_overlays
from megacpp_overlays.feature_probes.mamba_packed_seq_idx import TARGET
from megacpp_overlays.kernels.mamba2 import packed_reference
from megacpp_overlays.model import Decision
from megacpp_overlays.runtime import graph_capture

pytestmark = pytest.mark.upstream

ID = "mamba-packed-seq-idx"
ROUNDING = 2e-6
"""Relative, of the largest value: a row is cut into other chunks than a document alone, in fp32."""


# The kernels of mamba-ssm, interpreted, in processes of their own. Every day a row of the differential test has packed documents


def start(script: str, *words: str, release: Path | None = None, **variables: str) -> WarmProcess:
    python = ROOT / ".envs/edge/bin/python"
    assert python.exists(), f"there is no {python}: run `make setup`"
    path = os.pathsep.join(str(each) for each in (release, SUPPORT) if each is not None)
    env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "1", **variables}
    return warm_python.start(["-W", "ignore", SUPPORT / script, *words], env, after=MEGATRON_INTERPRETED, python=python)


def answer(process: WarmProcess) -> Any:
    out, error = process.communicate(HANG_S)
    assert process.returncode == 0, error[-4000:]
    return json.loads(out) if out else None


OFF = {f"MEGACPP_OVERLAY_{ID.replace('-', '_').upper()}": "off"}
PACKINGS = ("ends of chunks", "within chunks", "padded", "tail", "one document")
OF_UPSTREAM = ("padded", "one document")
"""Packings that are run without the overlay, too."""


@pytest.fixture(scope="module")
def facts() -> dict[str, Any]:
    """Results of a mixer of the newest release on packed rows, with the overlay and without it."""
    ways = {
        "on": start("packed_mixer_facts.py", *PACKINGS),
        "off": start("packed_mixer_facts.py", *OF_UPSTREAM, **OFF),
    }
    return {way: answer(process) for way, process in ways.items()}


@pytest.mark.full
def test_upstream_lets_state_run_into_the_next_document_unless_it_gets_the_number_of_tokens(
    facts: dict[str, Any],
) -> None:
    found = facts["off"]["packings"]["padded"]

    assert facts["off"]["decision"] == "disabled"
    assert found["seq_idx"] is None
    assert found["apart"]["output"] > 0.1
    assert found["apart"]["slope"] > 0.1
    assert found["apart"]["parameters"] > 0.1
    assert not found["as explicit"]


@pytest.mark.full
@pytest.mark.parametrize("packing", PACKINGS)
def test_outputs_and_gradients_of_documents_in_one_row_are_those_of_each_alone(
    packing: str, facts: dict[str, Any]
) -> None:
    assert facts["on"]["decision"] == "active", facts["on"]["reason"]
    assert max(facts["on"]["packings"][packing]["apart"].values()) < ROUNDING


@pytest.mark.full
def test_where_documents_end_with_chunks_outputs_and_their_gradient_have_the_same_bits(facts: dict[str, Any]) -> None:
    apart = facts["on"]["packings"]["ends of chunks"]["apart"]

    assert (apart["output"], apart["slope"]) == (0.0, 0.0)


@pytest.mark.full
@pytest.mark.parametrize("packing", PACKINGS)
def test_the_bits_are_those_of_upstream_with_total_tokens(packing: str, facts: dict[str, Any]) -> None:
    found = facts["on"]["packings"][packing]

    assert found["as explicit"]
    assert found["dtype"] == "torch.int32"
    assert found["field of the caller"] is None


@pytest.mark.full
def test_with_total_tokens_and_without_packing_the_overlay_changes_no_bit(facts: dict[str, Any]) -> None:
    for packing, found in facts["off"]["packings"].items():
        assert facts["on"]["packings"][packing]["explicit"] == found["explicit"]
    assert facts["on"]["not packed"] == facts["off"]["not packed"]


@pytest.mark.full
@pytest.mark.parametrize(
    ("release", "decision"),
    [("0.16.1", "retired"), ("0.17.1", "active"), ("0.18.2", "active")],
)
def test_on_another_release_a_padded_row_is_right_too(
    release: str, decision: str, wheel: Callable[[str, str], Path]
) -> None:
    found = answer(start("packed_mixer_facts.py", "padded", release=unpacked(wheel("megatron-core", release))))

    assert found["decision"] == decision, found["reason"]
    assert max(found["packings"]["padded"]["apart"].values()) < ROUNDING


@pytest.mark.full
@pytest.mark.parametrize("variables", [{}, OFF], ids=["on", "off"])
def test_context_parallel_ranks_get_the_documents_of_the_gathered_row(
    variables: dict[str, str], tmp_path: Path
) -> None:
    ranks = [start("packed_mixer_rank.py", str(rank), str(tmp_path / "meet"), **variables) for rank in range(2)]
    found, _ = [answer(each) for each in ranks]

    if variables:
        assert found["seq_idx"] is None
        assert found["apart"]["output"] > 0.1
    else:
        assert found["seq_idx"] == [[0] * 12 + [1] * 16]
        assert max(found["apart"].values()) < ROUNDING


# A real mixer around a plain scan, in this process


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The mixer's module in the installed release with the overlay in, able to build and to run without kernels."""
    found = upstream_module(TARGET.module)
    parallel = upstream_module("megatron.core.ssm.mamba_context_parallel")
    megacpp_overlays.arm()
    for name in ("HAVE_MAMBA_SSM", "HAVE_EINOPS"):
        for owner in (found, parallel):
            monkeypatch.setattr(owner, name, True, raising=False)
    monkeypatch.setattr(found, "get_cuda_rng_tracker", lambda: SimpleNamespace(fork=contextlib.nullcontext))
    monkeypatch.setattr(found, "_check_mamba_sequence_packing_support", lambda **_: (True, None))
    monkeypatch.setattr(found, "rearrange", rearrange, raising=False)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: torch.device("cpu"))
    return found


def rearrange(values: torch.Tensor, pattern: str) -> torch.Tensor:
    return values.squeeze(1) if pattern == "d 1 w -> d w" else values.transpose(0, 1)


class Projection(torch.nn.Module):
    def __init__(self, inputs: int, outputs: int, **_: Any) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(outputs, inputs) / inputs**0.5)

    def forward(self, values: torch.Tensor) -> tuple[torch.Tensor, None]:
        return torch.nn.functional.linear(values, self.weight), None


@pytest.fixture
def scanned(module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The `seq_idx` of each scan so far; the scan is a plain one."""
    seen: list[Any] = []

    def scan(*args: Any, seq_idx: Any, **kwargs: Any) -> torch.Tensor:
        seen.append(seq_idx)
        return packed_reference.scan(*args, seq_idx=seq_idx, **kwargs)

    monkeypatch.setattr(module, "mamba_split_conv1d_scan_combined", scan)
    monkeypatch.setattr(module, "MAMBA_HAS_STATE_DTYPE", False, raising=False)
    return seen


@pytest.fixture
def mixer(module: ModuleType, scanned: list[Any]) -> Any:
    from megatron.core.transformer.transformer_config import TransformerConfig

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = TransformerConfig(
            num_layers=1, hidden_size=8, num_attention_heads=1, mamba_state_dim=4, mamba_head_dim=4, mamba_num_groups=1
        )
    torch.manual_seed(3)
    group = SimpleNamespace(size=lambda: 1, rank=lambda: 0)
    submodules = module.MambaMixerSubmodules(in_proj=Projection, out_proj=Projection)
    groups = SimpleNamespace(tp=group, cp=group)
    return module.MambaMixer(config, submodules, 8, rmsnorm=False, layer_number=1, pg_collection=groups)


def packed(module: ModuleType, *bounds: int, **fields: Any) -> Any:
    boundaries = torch.tensor(bounds, dtype=torch.int32) if bounds else None
    return module.PackedSeqParams(**{"qkv_format": "thd", "cu_seqlens_q": boundaries, **fields})


def row(tokens: int, batch: int = 1) -> torch.Tensor:
    return torch.randn(tokens, batch, 8, generator=torch.Generator().manual_seed(2))


def test_the_overlay_is_active_and_names_the_input_of_the_scan(module: ModuleType) -> None:
    record = next(each for each in megacpp_overlays.audit().records if each.overlay.id == ID)

    assert record.decision is Decision.ACTIVE, record.reason
    assert record.overlay.self_test(module).broken is False
    assert module.MambaMixer._ssm_training.__wrapped__ is not None


def test_undone_the_mixer_is_upstream_s_again_and_the_witness_sees_the_defect(
    module: ModuleType, mixer: Any, scanned: list[Any]
) -> None:
    record = next(each for each in megacpp_overlays.audit().records if each.overlay.id == ID)
    megacpp_overlays.undo(ID)
    try:
        mixer(row(6), packed_seq_params=packed(module, 0, 2, 6))
        assert scanned == [None]
        assert record.overlay.witness(module).broken
    finally:
        megacpp_overlays.arm()
    mixer(row(6), packed_seq_params=packed(module, 0, 2, 6))
    assert scanned[-1].tolist() == [[0, 0, 1, 1, 1, 1]]


@settings(max_examples=60)
@given(
    lengths=st.lists(st.integers(0, 5), max_size=5),
    tail=st.integers(0, 4),
    dtype=st.sampled_from([torch.int32, torch.int64]),
)
def test_the_numbers_are_those_that_upstream_computes_from_total_tokens(
    lengths: list[int], tail: int, dtype: torch.dtype
) -> None:
    from megacpp_overlays.overlays.mamba_packed_seq_idx import _with_seq_idx

    params = upstream_module("megatron.core.packed_seq_params").PackedSeqParams
    bounds = torch.tensor([0, *lengths], dtype=dtype).cumsum(0, dtype=dtype)
    tokens = int(bounds[-1]) + tail
    expected = params(cu_seqlens_q=bounds, total_tokens=tokens)

    found = _with_seq_idx(params(cu_seqlens_q=bounds), torch.empty(tokens, 1, 1))

    assert torch.equal(found.seq_idx, expected.seq_idx)
    assert found.seq_idx.dtype is expected.seq_idx.dtype


def test_padded_boundaries_come_first(module: ModuleType, mixer: Any, scanned: list[Any]) -> None:
    padded = torch.tensor([0, 4, 8], dtype=torch.int32)

    mixer(row(8), packed_seq_params=packed(module, 0, 2, 5, cu_seqlens_q_padded=padded))

    assert scanned[0].tolist() == [[0] * 4 + [1] * 4]


@pytest.mark.parametrize(
    "fields",
    [
        {"total_tokens": 6},
        {"seq_idx": torch.tensor([[0, 0, 0, 1, 1, 1]], dtype=torch.int32)},
        {"qkv_format": "sbhd"},
        {"qkv_format": "bshd"},
        {"cu_seqlens_q": None},
        {"cu_seqlens_q": [0, 2, 6]},
    ],
    ids=["total tokens", "seq_idx", "sbhd", "bshd", "no boundaries", "a list"],
)
def test_fields_that_the_caller_set_are_passed_on_as_they_are(
    fields: dict[str, Any], module: ModuleType, mixer: Any, scanned: list[Any]
) -> None:
    params = packed(module, 0, 2, 6, **fields)

    mixer(row(6), packed_seq_params=params)
    mixer(row(6))

    assert scanned == [params.seq_idx, None]
    assert scanned[0] is params.seq_idx


def test_the_caller_s_parameters_keep_every_field(module: ModuleType, mixer: Any) -> None:
    params = packed(module, 0, 2, 6)
    before = dict(vars(params))

    mixer(row(6), packed_seq_params=params)

    assert vars(params) == before
    assert module.PackedSeqParams(**vars(params)).seq_idx is None


def test_a_class_of_the_caller_s_own_stays_one(module: ModuleType, mixer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    @dataclasses.dataclass
    class Own(module.PackedSeqParams):  # type: ignore[name-defined, misc]
        more: int = 3

    given_on: list[Any] = []
    monkeypatch.setattr(mixer.cp, "post_conv_ssm", lambda values, params: given_on.append(params) or values)

    mixer(row(6), packed_seq_params=Own(qkv_format="thd", cu_seqlens_q=torch.tensor([0, 6], dtype=torch.int32)))

    assert (type(given_on[0]), given_on[0].more) == (Own, 3)


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_each_layer_reads_the_boundaries_as_they_are_however_they_were_written(
    write: Write, module: ModuleType, mixer: Any, scanned: list[Any]
) -> None:
    params = packed(module, 0, 2, 6)
    mixer(row(6), packed_seq_params=params)

    write(params.cu_seqlens_q, torch.tensor([0, 5, 6], dtype=torch.int32))
    mixer(row(6), packed_seq_params=params)
    mixer(row(7), packed_seq_params=params)

    assert [each.tolist() for each in scanned] == [[[0, 0, 1, 1, 1, 1]], [[0] * 5 + [1]], [[0] * 5 + [1, 2]]]


@pytest.mark.parametrize("make_copy", COPIES.values(), ids=COPIES)
def test_copies_of_the_boundaries_bear_nothing_of_a_pass(
    make_copy: Copy, module: ModuleType, mixer: Any, scanned: list[Any]
) -> None:
    params = packed(module, 0, 2, 6)
    mixer(row(6), packed_seq_params=params)

    again = make_copy(params.cu_seqlens_q)
    again.data.copy_(torch.tensor([0, 5, 6]))
    mixer(row(6), packed_seq_params=packed(module, cu_seqlens_q=again))

    assert (vars(params.cu_seqlens_q), vars(again)) == ({}, {})
    assert scanned[-1].tolist() == [[0] * 5 + [1]]


def test_a_captured_graph_derives_its_own(module: ModuleType, mixer: Any, scanned: list[Any]) -> None:
    params = packed(module, 0, 2, 6)
    mixer(row(6), packed_seq_params=params)

    with graph_capture.rehearsal():
        mixer(row(6), packed_seq_params=params)
        mixer(row(6), packed_seq_params=params)
    mixer(row(6), packed_seq_params=params)

    assert len({id(each) for each in scanned}) == 4
    assert all(torch.equal(each, scanned[0]) for each in scanned)


def test_a_pass_in_inference_mode_leaves_nothing_that_training_cannot_save(
    module: ModuleType, mixer: Any, scanned: list[Any]
) -> None:
    params = packed(module, 0, 2, 6)
    with torch.inference_mode():
        mixer(row(6), packed_seq_params=params)
        made_there = packed(module, 0, 2, 6)

    for each in (params, made_there):
        mixer(row(6), packed_seq_params=each)[0].sum().backward()

    assert not scanned[1].is_inference()
    assert all(torch.equal(each, scanned[0]) for each in scanned)


def test_the_host_reads_nothing(module: ModuleType, mixer: Any) -> None:
    params = packed(module, 0, 2, 6, cu_seqlens_q_padded=torch.tensor([0, 3, 6], dtype=torch.int32))

    with graph_capture.host_reads() as reads:
        mixer(row(6), packed_seq_params=params)

    assert reads == []


def test_a_compiled_caller_gets_one_graph_and_the_same_numbers(module: ModuleType) -> None:
    from megacpp_overlays.overlays.mamba_packed_seq_idx import _with_seq_idx

    torch._dynamo.reset()
    params = packed(module, 0, 2, 6)

    def numbers(values: torch.Tensor, given: Any) -> torch.Tensor:
        return _with_seq_idx(given, values).seq_idx + 0

    compiled = torch.compile(numbers, backend="eager", fullgraph=True)

    assert torch.equal(compiled(row(7), params), numbers(row(7), params))


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Use one thread, because threads of tiny operators wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
