"""A release that no probe recognises: reproducers decide, and only on the very code that they ran on."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from places import HANG_S, ROOT

pytestmark = pytest.mark.upstream

SCRIPT = """
import contextlib, io, json, pathlib, sys
from megacpp_overlays import cli
from megacpp_overlays.loader import decide, probing, session
from megacpp_overlays.source.trees import InstalledTree

ID, FILE, EDITS = sys.argv[1], pathlib.Path(sys.argv[2]), json.loads(sys.argv[3])
released = FILE.read_text()


def ask():
    settings = session.current().settings
    (part,) = [each for each in session.current().overlays if each.id == ID]
    record = decide.decide(part, settings, probing.examine_installed(part, InstalledTree(), settings))
    return {"decision": record.decision.value, "proof": record.proof, "shape": record.shape, "reason": record.reason}


def witness():
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        code = cli.main(["witness", ID])
    return {"code": code, "said": said.getvalue()}


found = {}
for name, edits in EDITS.items():
    text = released
    for old, new in edits:
        assert text.count(old) == 1, (name, old)
        text = text.replace(old, new)
    FILE.write_text(text)
    found[name] = {"before": ask(), "witness": witness(), "after": ask()}
FILE.write_text(text + "# another comment\\n")
found["edited again"] = ask()
print(json.dumps(found))
"""


class Release(NamedTuple):
    """A release that is edited, and the overlay of the edited code."""

    overlay: str
    distribution: str
    version: str
    file: str


MEGATRON = Release("masked-aux-loss-tokens", "megatron-core", "0.19.2", "megatron/core/transformer/moe/moe_utils.py")
LIGER = Release("liger-flce-none-backward", "liger-kernel", "0.8.1", "liger_kernel/ops/fused_linear_cross_entropy.py")

OTHER_WORDS = [("        BT, H = grad_input.shape\n        n_rows = BT\n", "        n_rows, H = grad_input.shape\n")]
SUM = "    local_tokens_per_expert = routing_map.sum(dim=0)\n    global_tokens"
COUNT = "        local_num_tokens = local_tokens_per_expert.sum() / topk\n"
ANOTHER_FORM = [
    (SUM, "    counted = routing_map.sum(dim=0)\n    global_tokens"),
    (
        "        local_tokens_per_expert, reduce_group\n    )\n    if with",
        "        counted, reduce_group\n    )\n    if with",
    ),
    (COUNT, "        local_num_tokens = counted.sum() / topk\n"),
]
REPAIRED = [
    (COUNT, "        local_num_tokens = global_tokens_per_expert.sum() / topk / reduce_group.size()\n"),
]
WORSE = [("        total_num_tokens = global_tokens_per_expert.sum() / topk\n", "        total_num_tokens = 7.0\n")]
"""A second defect in addition to the first, which no seam repairs."""
CLASS = "class MoEAuxLossAutoScaler("
GONE = [
    ("def get_tokens_per_expert_and_token_count(", "def _counted("),
    (CLASS, f"get_tokens_per_expert_and_token_count = _counted\n\n\n{CLASS}"),
]
"""A name that is assigned and not defined."""


@pytest.fixture
def found(wheel: Callable[[str, str], Path], tmp_path: Path) -> Callable[..., Any]:
    """Return decisions about edits of a release, each before and after `witness`."""

    def ask(release: Release, **edits: list[tuple[str, str]]) -> Any:
        zipfile.ZipFile(wheel(release.distribution, release.version)).extractall(tmp_path / "unpacked")
        file = tmp_path / "unpacked" / release.file
        env = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(tmp_path / "unpacked"), str(ROOT)]),
            "MEGACPP_OVERLAYS_WITNESSES": str(tmp_path / "witnesses"),
            "OMP_NUM_THREADS": "1",
        }
        command = [sys.executable, "-W", "ignore", "-c", SCRIPT, release.overlay, str(file), json.dumps(edits)]
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=HANG_S)
        assert done.returncode == 0, done.stdout + done.stderr[-4000:]
        return json.loads(done.stdout.splitlines()[-1])

    return ask


@pytest.mark.parametrize(
    ("release", "edits", "shape"),
    [
        (LIGER, OTHER_WORDS, "per-token-scalar-backward-input-grad"),
        pytest.param(MEGATRON, ANOTHER_FORM, "counted-twice", marks=pytest.mark.full),
    ],
    ids=["liger", "megatron"],
)
def test_the_defect_in_another_form_is_installed_on_once_it_was_witnessed_and_until_the_code_changes(
    found: Callable[..., Any], release: Release, edits: list[tuple[str, str]], shape: str
) -> None:
    answers = found(release, another_form=edits)

    before, proved, after = (answers["another_form"][each] for each in ("before", "witness", "after"))
    assert (before["decision"], before["proof"]) == ("unproved", None)
    assert "`megacpp-overlays witness` runs its reproducer" in before["reason"]
    assert proved["code"] == 0, proved["said"]
    assert proved["said"].startswith(f"proved BROKEN: {release.overlay} on ")
    assert (after["decision"], after["proof"], after["shape"]) == ("active", "witnessed", shape)
    assert answers["edited again"]["decision"] == "unproved"
    assert f"{Path(release.file).stem} is not as it was witnessed" in answers["edited again"]["reason"]


def test_a_part_whose_seams_cannot_be_placed_is_a_conflict_that_names_the_clause(found: Callable[..., Any]) -> None:
    answer = found(MEGATRON, gone=GONE)["gone"]

    assert answer["before"]["decision"] == "conflict"
    assert "names: " in answer["before"]["reason"]
    assert (answer["witness"]["code"], answer["after"]["decision"]) == (1, "conflict")


@pytest.mark.full
def test_a_repair_that_no_probe_knows_retires_and_a_second_defect_is_not_covered_up(
    found: Callable[..., Any],
) -> None:
    answers = found(MEGATRON, repaired=REPAIRED, worse=WORSE)

    repaired, worse = answers["repaired"], answers["worse"]
    assert repaired["before"]["decision"] == "unproved"
    assert (repaired["after"]["decision"], repaired["after"]["proof"]) == ("retired", "witnessed")
    assert worse["witness"]["code"] == 1
    assert "broken, not repaired: " in worse["witness"]["said"]
    assert worse["after"]["decision"] == "conflict"
    assert "broken here, and its reproducer showed no repair" in worse["after"]["reason"]
