"""The hybrid models that the tests of pack 11 compare, fused with not fused: options of `hybrid_model.make`."""

from __future__ import annotations

from typing import Any

_MUP = {"use_mup": True, "mup_output_mult": 0.3}

CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "tied to the embedding": {"tie": True},
    "MTP": {"pattern": "*-*-/*-"},
    "MTP, tied": {"pattern": "*-*-/*-", "tie": True},
    "MTP, two heads": {"pattern": "*-*-/*-/*-"},
    "MTP, heads detached": {"pattern": "*-*-/*-", "mtp_detach_heads": True},
    "MuP": dict(_MUP),
    "MuP, MTP": {"pattern": "*-*-/*-", **_MUP},
    "MuP, MTP, tied": {"pattern": "*-*-/*-", "tie": True, **_MUP},
    "the former class": {"model_class": "mamba model"},
    "the former class, MTP": {"model_class": "mamba model", "pattern": "*-*-/*-"},
}

_PARALLEL = {"tensor_model_parallel_size": 2}

RANKED: dict[str, dict[str, Any]] = {
    "tensor parallel": dict(_PARALLEL),
    "sequence parallel": {"sequence_parallel": True, **_PARALLEL},
    "sequence parallel, tied, MTP": {"sequence_parallel": True, "tie": True, "pattern": "*-*-/*-", **_PARALLEL},
    "sequence parallel, MuP, MTP": {"sequence_parallel": True, "pattern": "*-*-/*-", **_MUP, **_PARALLEL},
}
