"""Reports of a run on its model: at start-up from its arguments, and before its first step from its objects."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from launchers import environment, launch, write
from made_up import Upstream

pytestmark = [pytest.mark.upstream, pytest.mark.unmeasured_children]

IMPORTS = "import importlib, os\nimportlib.import_module(os.environ['NAME'] + '.layers')\n"
TRAINS = """
import megacpp_overlays
import torch
from megatron.core.optimizer.optimizer import MegatronOptimizer
from megatron.core.transformer.transformer_config import MLATransformerConfig

config = MLATransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=2)
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters())
for _ in range(2):
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
"""
HEAD = "[megacpp_overlays] "


def lines(stderr: str, word: str) -> list[str]:
    return [each for each in stderr.splitlines() if each.startswith(HEAD) and word in each]


def about(upstream: Upstream, concerns: str, **variables: str) -> dict[str, str]:
    """Return the environment of a process whose plugin bears on something, and which uses Megatron-LM's names for launchers."""
    env = environment(upstream, **variables)
    declared = f"OVERLAY = Upstream({upstream.name!r}, None).overlay(concerns={concerns!r})"
    upstream.write(f"from made_up import Upstream\n{declared}\n", module="plugin")
    return env


@pytest.mark.parametrize(
    ("concerns", "words", "has_line"),
    [
        ("mla", ["--bf16"], False),
        ("mla", ["--bf16", "--multi-latent-attention"], True),
        ("mla", ["--bf16", "--use-checkpoint-args"], True),
        ("mla and packed", [], False),
        ("packed", [], True),
    ],
)
def test_a_launcher_of_megatron_lm_has_a_line_for_each_overlay_that_concerns_its_model(
    upstream: Upstream, concerns: str, words: list[str], has_line: bool
) -> None:
    launcher = write(upstream, f"import megacpp_overlays\n{IMPORTS}", name="pretrain_gpt")

    done = launch(launcher, *words, env=about(upstream, concerns))

    assert done.returncode == 0, done.stderr
    (count,) = lines(done.stderr, "(fingerprint")
    assert len(lines(done.stderr, "active: double-fix")) == has_line
    assert ("1 active that do not concern this model have no line" in count) is not has_line
    assert " 1 active" in count, "it is installed all the same"


def test_any_other_launcher_prints_its_own_lines_unless_a_file_names_the_model(
    upstream: Upstream, tmp_path: Path
) -> None:
    launcher = write(upstream, f"import megacpp_overlays\n{IMPORTS}")
    (tmp_path / "train.sh").write_text("python pretrain_gpt.py --bf16\n")

    def said(**variables: str) -> str:
        return launch(launcher, "--bf16", env=about(upstream, "mla", **variables)).stderr

    assert lines(said(), "active: double-fix")
    assert not lines(said(MEGACPP_OVERLAYS_CONFIG=str(tmp_path / "train.sh")), "active: double-fix")
    unread = said(MEGACPP_OVERLAYS_CONFIG=str(tmp_path / "gone.sh"))
    assert lines(unread, "active: double-fix")
    assert len(lines(unread, "WARNING")) == 1
    assert "gone.sh cannot be read (No such file or directory)" in unread


def test_a_run_of_megatron_prints_the_overlays_of_its_model_before_its_first_step(
    upstream: Upstream, tmp_path: Path
) -> None:
    launcher, left = write(upstream, TRAINS), tmp_path / "audit.json"

    done = launch("-W", "ignore", launcher, env=environment(upstream, MEGACPP_OVERLAYS_AUDIT=str(left)))
    other = launch("-W", "ignore", launcher, env=environment(upstream, RANK="1"))

    assert done.returncode == 0, done.stderr
    (said,) = lines(done.stderr, "concern this model")
    assert "(MLATransformerConfig of this process)" in said
    assert "float16-optimizer-state-ids" in said.split("; not ")[1], "neither fp16 nor bf16"
    kept = json.loads(left.read_text())["model"]
    assert (kept["concerns"]["mla-rope-key-gradient"], kept["because"]["mla-rope-key-gradient"]) == (
        "no",
        "no tensor parallelism",
    )
    assert kept["concerns"]["scheduler-restore"] == "yes"
    assert lines(other.stderr, "concern this model") == []
