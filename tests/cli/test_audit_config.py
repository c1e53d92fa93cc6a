"""`megacpp-overlays audit --config`: which active overlays concern a model, as text and as JSON."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from made_up import Upstream
from places import ROOT

from megacpp_overlays import cli
from megacpp_overlays.cli.codes import ExitCode
from megacpp_overlays.loader import session as sessions
from megacpp_overlays.loader.session import Session

SessionMaker = Callable[..., Session]
GPT = "python pretrain_gpt.py --bf16 --tensor-model-parallel-size 2\n"


@pytest.fixture
def config(tmp_path: Path) -> Path:
    (tmp_path / "train.sh").write_text(GPT)
    return tmp_path / "train.sh"


@pytest.fixture
def armed(upstream: Upstream, session: SessionMaker, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Arm a session whose only overlay is broken here and declares the features that it concerns."""

    def arm(concerns: str) -> None:
        made = session(upstream.overlay(concerns=concerns))
        made.arm()
        upstream.load()
        monkeypatch.setattr(sessions, "current", lambda: made)

    return arm


@pytest.mark.parametrize(
    ("concerns", "says", "is_listed"),
    [
        ("tensor_parallel", "1 of 1 active concern this model (train.sh, arguments of Megatron-LM)\n  concern it  double-fix\n", True),
        ("packed", "1 of 1 active concern this model (train.sh, arguments of Megatron-LM), 1 of\n  them perhaps\n  may         packed rows: double-fix\n", True),
        ("mla", "0 of 1 active concern this model (train.sh, arguments of Megatron-LM)\n  do not      no multi-latent attention: double-fix\n", False),
        ("", "1 of 1 active concern this model (train.sh, arguments of Megatron-LM), 1 of\n  them perhaps\n  may         double-fix\n", True),
        ("mla and", "  may         'mla and' is no predicate", True),
    ],
)  # fmt: skip
def test_overlays_that_do_not_concern_a_model_are_counted_and_not_explained(
    armed: Callable[[str], None],
    config: Path,
    capsys: pytest.CaptureFixture[str],
    concerns: str,
    says: str,
    is_listed: bool,
) -> None:
    armed(concerns)

    code = cli.main(["audit", "--config", str(config)])

    said = capsys.readouterr().out
    assert code == ExitCode.CLEAN
    assert says in said
    assert ("delete when" in said) is is_listed


def test_the_answers_are_in_the_json_and_in_its_schema(
    armed: Callable[[str], None], config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    armed("mla and tensor_parallel")

    cli.main(["audit", "--json", "--config", str(config)])

    audit: dict[str, Any] = json.loads(capsys.readouterr().out)
    jsonschema.validate(audit, json.loads((ROOT / "megacpp_overlays/loader/audit.schema.json").read_text()))
    assert audit["decisions"][0]["concerns"] == "mla and tensor_parallel"
    assert audit["model"] == {
        "origin": "train.sh, arguments of Megatron-LM",
        "concerns": {"double-fix": "no"},
        "because": {"double-fix": "no multi-latent attention"},
    }


def test_an_explanation_says_it_of_one_overlay(
    armed: Callable[[str], None], config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    armed("packed and tensor_parallel")

    cli.main(["audit", "double-fix", "--config", str(config)])

    said = capsys.readouterr().out
    assert "this model undecided (packed rows)" in said
    assert "bears on   packed and tensor_parallel" in said


def test_a_file_that_says_nothing_of_a_model_is_wrong_usage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "notes.txt").write_text("hello")

    with pytest.raises(SystemExit) as ended:
        cli.main(["audit", "--config", str(tmp_path / "notes.txt")])

    assert ended.value.code == ExitCode.USAGE
    assert (
        "notes.txt is not understood (nothing of a configuration is in it): it may be JSON" in capsys.readouterr().err
    )
