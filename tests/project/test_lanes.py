"""The same audit on every lane: the true mix of active, retired and absent on real packages."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import warm_python
from places import HANG_S, ROOT

from megacpp_overlays.loader import registry, rendering
from megacpp_overlays.loader.lines import LONGEST

pytestmark = pytest.mark.upstream

LANES = {
    "spring-2026": ROOT / ".envs/spring-2026/bin/python",
    "summer-2026": ROOT / ".envs/summer-2026/bin/python",
    "current": ROOT / ".venv/bin/python",
    "newest": ROOT / ".envs/newest/bin/python",
    "mamba3-pinned": ROOT / ".envs/mamba3-pinned/bin/python",
    "edge": ROOT / ".envs/edge/bin/python",
}
STAND_IN = ROOT / "tests/empty_modules"
"""An empty module that mamba_ssm imports and a host without a CUDA toolkit cannot build; Mamba-3 does not call it."""

M = "megatron-core"
L = "liger-kernel"
S = "mamba-ssm"
T = "tilelang"
TRITON = "triton"
TORCH = "torch"
TRANSFORMERS = "transformers"
EXPECTED = {
    "cp-local-loss-mean": (M, ("disabled",) * 6),
    "dsa-branchless-scatter": (M, ("absent", "absent", "retired", "retired", "retired", "retired")),
    "dsa-capture-gates": (M, ("absent", "absent", "active", "active", "active", "active")),
    "dsa-indexer-streaming": (M, ("active", "active", "active", "active", "active", "active")),
    "dsa-sparse-attention": (M, ("absent", "absent", *("active",) * 4)),
    "explicit-tp-groups": (M, ("active",) * 6),
    "expert-bias-padding-mask": (M, ("active",) * 6),
    "gathered-logits-loss": (M, ("active",) * 6),
    "gdn-capture-gates": (M, ("absent", "active", "active", "active", "active", "active")),
    "fp8-quantized-unwrap": (M, ("absent", "absent", "active", "active", "active", "active")),
    "graph-hidden-recompute-grads": (M, ("active",) * 6),
    "hybrid-mtp-aux-loss": (M, ("absent", *("active",) * 5)),
    "latent-moe-fc2-init": (M, ("disabled",) * 6),
    "expert-grad-norm": (M, ("active", "active", *("retired",) * 4)),
    "fsdp-lone-rank-gradients": (M, ("active",) * 6),
    "fsdp-decoupled-grad-sums": (M, ("absent", *("active",) * 5)),
    "fsdp2-per-token-loss": (M, ("absent", "absent", *("active",) * 4)),
    "fsdp-fused-accumulation": (M, ("active",) * 6),
    "precision-aware-reload": (M, ("active",) * 6),
    "liger-flce-strided-gradients": (L, ("active",) * 3 + ("retired",) * 3),
    "fsdp-reduced-twice": (M, ("active",) * 6),
    "layerwise-norm-groups": (M, ("absent", "absent", *("active",) * 4)),
    "liger-flce-frozen-states": (L, ("active",) * 6),
    "liger-glm4v-norms": (L, (*("armed",) * 4, "active", "active")),
    "liger-flce-labelled": (L, ("disabled",) * 6),
    "liger-flce-none-backward": (L, ("active", "active", "active", "retired", "retired", "retired")),
    "hopper-flce-dispatch": (M, ("absent", "absent", "absent", "absent", "absent", "absent")),
    "float16-distributed-order": (M, ("active", "active", "active", "active", "active", "active")),
    "float16-fp32-exemption": (M, ("active", "active", "active", "active", "active", "active")),
    "float16-optimizer-state-ids": (M, ("active", "active", "active", "active", "active", "active")),
    "expert-rng-resume": (M, ("absent", "armed", *("active",) * 4)),
    "fsdp-optimizer-under-update": (M, ("absent", *("active",) * 5)),
    "fully-reshardable-padding": (M, ("active",) * 6),
    "global-aux-loss-scale": (M, ("disabled",) * 6),
    "hybrid-linear-ce": (M, ("absent",) * 6),
    "float16-mixer-parameters": (M, ("disabled",) * 6),
    "mamba-packed-seq-idx": (M, ("retired", "active", "active", "active", "active", "active")),
    "mamba2-int32-offsets": (S, ("active", "absent", "absent", "absent", "active", "active")),
    "mamba3-mimo-gqa-backward": (S, ("absent", "absent", "absent", "absent", "active", "active")),
    "mamba3-mimo-reduce-layout": (S, ("absent", "absent", "absent", "absent", "retired", "gated")),
    "mamba3-siso-pipelining": (S, ("absent", "absent", "absent", "absent", "gated", "gated")),
    "masked-aux-loss-tokens": (M, ("absent", "absent", *("active",) * 4)),
    "megatron-cuda-on-import": (M, ("absent",) * 6),
    "mla-rope-head-blocks": (M, ("active",) * 6),
    "mla-rope-key-gradient": (M, ("active",) * 6),
    "mtp-roll-padded-boundaries": (M, ("active",) * 6),
    "mtp-z-loss": (M, ("absent", *("active",) * 5)),
    "mla-softmax-scale": (M, ("disabled",) * 6),
    "muon-gated-fc1": (M, ("disabled",) * 6),
    "mtp-token-counts-local": (M, ("disabled",) * 6),
    "pipeline-padding-mask": (M, ("active",) * 6),
    "sparse-mla-dimensions": (M, ("absent", "absent", *("active",) * 4)),
    "cpu-offload-reload": (M, ("active",) * 6),
    "loss-mask-cache": (M, ("active",) * 6),
    "qk-clip-negative-head": (M, ("active",) * 6),
    "expert-gradient-groups": (M, ("active", "active", *("retired",) * 4)),
    "sft-end-of-turn-loss": (M, ("absent", "armed", *("active",) * 4)),
    "scheduler-restore": (M, ("active",) * 6),
    "seq-aux-loss-packed": (M, ("absent", "absent", *("active",) * 4)),
    "residual-norm-recompute-alias": (M, ("absent", *("active",) * 5)),
    "quant-recipe-stale-weights": (M, ("active", "active", *("retired",) * 4)),
    "tilelang-bulk-copy-rank": (S, ("absent", "absent", "absent", "absent", "absent", "retired")),
    "tilelang-grouped-reduce": (T, ("retired", "absent", "absent", "absent", "retired", "retired")),
    "tp-attention-sinks": (M, ("active",) * 6),
    "tp-label-smoothing": (M, ("disabled",) * 6),
    "tp-norm-gradients": (M, ("active",) * 6),
    "triton-register-operands": (TRITON, (*("absent",) * 5, "retired")),
    "compile-budget-dropout": (TORCH, ("active",) * 6),
    "dcp-fresh-optimizer-state": (TORCH, ("active",) * 6),
    "dcp-frozen-optimizer-state": (TORCH, ("active",) * 6),
    "loss-parallel-log-softmax": (TORCH, ("active",) * 6),
    "mix-order-reduction-views": (TORCH, (*("active",) * 5, "retired")),
    "cudnn-sdpa-query-gradient": (TRANSFORMERS, ("disabled",) * 6),
    "trainer-moe-aux-loss": (TRANSFORMERS, ("disabled",) * 6),
    "tilelang-zero-extent-iterator": (T, ("gated", "absent", "absent", "absent", "gated", "retired")),
}
"""Distribution and decision by overlay, the decisions in the order of the lanes."""
OFF_WITHOUT_TARGET = {
    ("spring-2026", "muon-gated-fc1"),
    *((lane, "trainer-moe-aux-loss") for lane in ("mamba3-pinned", "edge")),
}
"""Overlays that are off where the module of their target cannot be imported, so that there is no version of it: the release has none, or accelerate is not installed."""
VERSIONS = {
    ("spring-2026", M): "0.16.1",
    ("summer-2026", M): "0.18.2",
    ("current", M): "0.19.2",
    ("newest", M): "0.19.2",
    ("spring-2026", L): "0.7.0",
    ("summer-2026", L): "0.8.1",
    ("current", L): "0.8.1",
    ("newest", L): "0.8.5",
    **{(lane, M): "0.19.2" for lane in ("mamba3-pinned", "edge")},
    **{(lane, L): "0.8.5" for lane in ("mamba3-pinned", "edge")},
    **{(lane, S): "2.3.2.post1" for lane in ("mamba3-pinned", "edge")},
    ("spring-2026", S): "2.3.1",
    ("spring-2026", T): "0.1.8",
    ("mamba3-pinned", T): "0.1.8",
    ("edge", T): "0.1.15",
    **{(lane, TRITON): "3.6.0" for lane in ("spring-2026", "summer-2026", "current", "newest", "mamba3-pinned")},
    ("edge", TRITON): "3.9.0",
    **{(lane, TORCH): "2.11.0" for lane in ("spring-2026", "summer-2026", "current", "newest", "mamba3-pinned")},
    ("edge", TORCH): "2.15.0",
    **{(lane, TRANSFORMERS): "5.23.0" for lane in ("mamba3-pinned", "edge")},
}


class Preflight(NamedTuple):
    """The result of the pre-flight in a lane."""

    code: int
    decisions: dict[str, dict[str, str]]
    """By id."""
    stderr: str
    told: list[str]
    """Lines of the log, which would be on stderr in a launcher."""
    written: Any
    """The audit as it was written."""


def audit(lane: str, **variables: str) -> Preflight:
    """Run the pre-flight in a lane."""
    python = LANES[lane]
    assert python.exists(), f"there is no {python}: run `make setup`"
    words = ["-W", "ignore", "-m", "megacpp_overlays", "audit", "--json"]
    log = Path(tempfile.mkstemp(suffix=".log")[1])
    ours = {"PYTHONPATH": str(STAND_IN), "MEGACPP_OVERLAYS_LOG": str(log), "OMP_NUM_THREADS": "1"}
    env = {**os.environ, **ours, **variables}
    env.pop("MEGACPP_OVERLAYS_SAID", None)  # of this worker, which may have armed
    if python == Path(sys.executable):
        done = warm_python.run(words, env, cwd=Path("/"), after=warm_python.MEGATRON, timeout=HANG_S)
    else:
        done = subprocess.run([python, *words], env=env, capture_output=True, text=True, check=False, cwd="/")
    written = json.loads(done.stdout) if done.stdout else {"decisions": []}
    lines = log.read_text().splitlines()
    log.unlink()
    return Preflight(done.returncode, {item["id"]: item for item in written["decisions"]}, done.stderr, lines, written)


DAILY = {"current"}
"""The lane whose packages other daily tests import, too; the findings of the probes in every release are in packs/matrix.json."""
each_lane = pytest.mark.parametrize(
    "lane", [pytest.param(lane, marks=() if lane in DAILY else pytest.mark.full) for lane in LANES]
)


@pytest.fixture(scope="module")
def audits() -> Callable[[str], Preflight]:
    """Return the pre-flight of a lane, which runs once."""
    return functools.cache(audit)


@each_lane
@pytest.mark.parametrize("overlay", EXPECTED)
def test_the_decision_on_a_locked_environment(audits: Callable[[str], Preflight], lane: str, overlay: str) -> None:
    code, decisions, stderr, *_ = audits(lane)
    distribution, expected = EXPECTED[overlay]

    found = decisions[overlay]
    assert (found["decision"], found["distribution"]) == (dict(zip(LANES, expected, strict=True))[lane], distribution)
    has_version = found["decision"] != "armed" and (lane, overlay) not in OFF_WITHOUT_TARGET
    version = VERSIONS.get((lane, distribution)) if has_version else None
    assert (found["version"] or "").partition(" with ")[0] == (version or ""), found["reason"]
    assert code == 0, stderr


def table() -> str:
    """Return the decisions as a table in Markdown, overlays with the same ones in one row."""
    alike: dict[tuple[str, ...], list[str]] = {}
    for overlay, (_, decisions) in EXPECTED.items():
        alike.setdefault(decisions, []).append(f"`{overlay}`")
    rows = sorted((", ".join(sorted(names)), *decisions) for decisions, names in alike.items())
    head = ["overlay or gate", *(f"`{lane}`" for lane in LANES)]
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows))


def test_the_documentation_has_the_same_decisions() -> None:
    assert table() in (ROOT / "docs" / "evidence.md").read_text(), f"put this in place of its table:\n{table()}"


@each_lane
def test_every_overlay_is_in_the_audit_once(audits: Callable[[str], Preflight], lane: str) -> None:
    assert sorted(audits(lane)[1]) == sorted(EXPECTED)
    assert "[megacpp_overlays]" not in audits(lane).stderr


@each_lane
def test_only_active_overlays_gates_and_conflicts_have_a_line(audits: Callable[[str], Preflight], lane: str) -> None:
    by_decision: dict[str, list[str]] = {"active": [], "gated": [], "conflict": []}
    for overlay, found in audits(lane).decisions.items():
        by_decision.setdefault(found["decision"], []).append(overlay)
    lines = audits(lane).told

    active = [line.split()[2] for line in lines if line.startswith("[megacpp_overlays] active: ")]
    warnings = [line.split()[3] for line in lines if line.startswith("[megacpp_overlays] WARNING ")]
    assert sorted(active) == sorted(by_decision["active"])
    assert sorted(warnings) == sorted(by_decision["gated"] + by_decision["conflict"])
    assert len(lines) == len(active) + len(warnings)
    assert all(len(line) <= LONGEST for line in lines if "WARNING" not in line)


@each_lane
def test_overlays_that_are_due_for_deletion_are_those_that_the_audit_calls_retired(
    audits: Callable[[str], Preflight], lane: str
) -> None:
    retired = [overlay for overlay, found in audits(lane)[1].items() if found["decision"] == "retired"]

    done = subprocess.run(
        [LANES[lane], "-m", "megacpp_overlays", "ledger", "--due"], capture_output=True, text=True, check=False, cwd="/"
    )

    assert done.returncode == bool(retired)
    assert [line.partition(":")[0] for line in done.stdout.splitlines() if ":" in line] == retired


@pytest.mark.full
def test_observe_installs_nothing_and_reports_the_same_verdicts(
    audits: Callable[[str], Preflight],
) -> None:
    code, observed, *_ = audit("current", MEGACPP_OVERLAYS="observe")

    assert code == 0
    assert {id_ for id_, item in observed.items() if item["decision"] == "armed"} == {"liger-glm4v-norms"}
    assert {item["decision"] for item in observed.values()} <= {"armed", "disabled", "retired", "absent", "gated"}
    assert {id_: item["verdict"] for id_, item in observed.items()} == {
        id_: item["verdict"] for id_, item in audits("current")[1].items()
    }


def test_off_is_off() -> None:
    _, decisions, *_ = audit("current", MEGACPP_OVERLAYS="off")

    assert {item["decision"] for item in decisions.values()} == {"disabled"}


def test_importing_the_targets_starts_neither_cuda_nor_autograds_engine_and_every_seam_pickles_by_reference() -> None:
    """The engine counts the GPUs and starts a thread for each, and CUDA fails in a process that is forked after that."""
    code = """
import megacpp_overlays, contextlib, importlib, operator, pickle, sys
import torch
started = []
for module in (torch.autograd, torch.autograd.graph):
    module._engine_run_backward = lambda *_, _run=module._engine_run_backward, **__: (started.append(1), _run(*_, **__))[1]
torch.ones(1, requires_grad=True).sum().backward()
assert started == [1], "this torch starts its engine somewhere else"
for overlay in megacpp_overlays.loader.session.current().overlays:
    with contextlib.suppress(ModuleNotFoundError):  # a part for another tree, or one that needs an extra
        importlib.import_module(overlay.target.module)
audit = megacpp_overlays.audit()
known = [r for r in audit.records if r.overlay.installs and r.shape not in r.overlay.unsupported]
decisions = {r.decision.value for r in known if r.decision.value != "armed" or r.overlay.target.module in sys.modules}
assert decisions == {"active", "retired", "absent"}, str(audit)
assert not torch.cuda.is_initialized()
assert started == [1], "a self-test or a witness started it"

seams = [seam for record in audit.records for seam in record.seams]
assert len(seams) > 8, seams
for seam in seams:
    module = max((name for name in sys.modules if seam.startswith(f"{name}.")), key=len)
    reached = operator.attrgetter(seam.removeprefix(f"{module}."))(sys.modules[module])
    found = pickle.loads(pickle.dumps(reached))
    assert getattr(found, "__func__", found) is getattr(reached, "__func__", reached), seam  # a class method is bound anew
"""
    on = {each.variable: "on" for each in registry.load() if each.off_by_default}
    env = {**os.environ, "PYTHONPATH": str(STAND_IN), "OMP_NUM_THREADS": "1", **on}
    done = warm_python.run(["-W", "ignore", "-c", code], env, after=warm_python.MEGATRON, timeout=HANG_S)

    assert done.returncode == 0, done.stderr


# The written audit

SCHEMA_1 = json.loads(Path(rendering.__file__).with_name("audit.schema.json").read_text())
"""For as long as `audit.SCHEMA` is 1: checkpoints and trackers hold audits of older versions."""
SMALL = 1280
"""Bytes of JSON for each decision: an audit stays a small part of a checkpoint's metadata and of a tracker's config."""


@each_lane
def test_a_real_audit_fits_a_checkpoint_and_a_tracker(
    audits: Callable[[str], Preflight], lane: str, tmp_path: Path
) -> None:
    jsonschema, torch = pytest.importorskip("jsonschema"), pytest.importorskip("torch")
    written = audits(lane).written

    torch.save({"overlays": written}, tmp_path / "checkpoint.pt")
    loaded = torch.load(tmp_path / "checkpoint.pt", weights_only=True)["overlays"]

    assert loaded == written
    jsonschema.validate(written, SCHEMA_1)
    assert len(written["decisions"]) >= 10
    assert len(json.dumps(written)) < SMALL * len(written["decisions"])
