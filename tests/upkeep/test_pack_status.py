"""`megacpp-overlays pack list`: the status and the next step of every pack."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from made_up import Upstream
from made_up_packs import Packs, thread, today
from places import ROOT

from megacpp_overlays import cli

pytestmark = pytest.mark.usefixtures("one_day")


def test_the_list_has_the_state_of_every_pack_and_its_next_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    packs = Packs(tmp_path)
    packs.ready(91, more=thread(1) + thread(2))
    packs.answer(1, "merged")
    packs.answer(2)
    packs.write(92, kind="regression guard", reproducer=None)
    (packs.write(93, kind="held") / "pack.toml").unlink()
    packs.write(94, kind="bug report", state="reproduced", more=thread(9, state="not merged"))
    (packs.write(95, kind="fork", reproducer=None) / "pack.toml").unlink()
    packs.synchronise()
    packs.ready(96)
    packs.write(96, kind="bug report", state="ready", repository="made/other")

    assert cli.main(["pack", "list", "--packs", str(tmp_path)]) == 0

    text = capsys.readouterr().out
    assert "91    bug report        ready       made/up     new       crash     1, 1 now       1 merged, 1 open" in text
    assert 'next: a person files it, see "File a pack" in CONTRIBUTING.md' in text
    assert "next: needs a reproduce.py that shows BUG_NOT_PRESENT; there is nothing to file" in text
    assert "next: it is held: not filed until its class is another one" in text
    assert "next: needs a kept receipt with BUG_REPRODUCED (megacpp-overlays repro 94 --keep packs)" in text
    assert "next: needs a pack.toml, with its repository, upstream and priority" in text
    assert "next: needs a manifest in step (megacpp-overlays receipts --sync)" in text
    assert "1 unknown" in text
    assert cli.main(["pack", "list", "--packs", str(tmp_path), "--json"]) == 0
    data = {each["number"]: each for each in json.loads(capsys.readouterr().out)}
    assert data[91]["threads"] == [
        {"thread": "made/up#1", "state": "merged", "checked": str(today())},
        {"thread": "made/up#2", "state": "open", "checked": str(today())},
    ]
    assert data[91]["receipts"] == {"kept": 1, "current": 1}
    assert data[95]["repository"] is None


@pytest.mark.parametrize(
    ("facts", "says"),
    [
        (
            {"upstream": "fixed"},
            "fixed upstream: it is not filed, and becomes a regression guard (megacpp-overlays triage",
        ),
        ({"upstream": "declined"}, "declined upstream: it is not filed"),
        ({"priority": "none"}, "its priority is none: it is not filed"),
        ({"kind": "regression guard"}, "it is a regression guard: nothing to file"),
        ({"state": "filed"}, "its state is filed: it was sent"),
        (
            {"state": "ready"},
            "needs a claim that holds: its state is ready, and no receipt shows",
        ),
        ({"reproducer": None}, "needs a reproduce.py"),
        ({"state": "validated", "more": thread(1)}, "needs a look at 1 of its 1 threads (megacpp-overlays sweep)"),
        (
            {"state": "validated"},
            "needs a person who moves its lifecycle state from validated to ready in its README.md",
        ),
    ],
    ids=str,
)
def test_a_pack_that_is_filed_elsewhere_settled_or_not_shown_is_not_ready(
    upstream: Upstream, tmp_path: Path, facts: dict[str, str], says: str
) -> None:
    packs = Packs(tmp_path / "packs", (upstream.overlay(),))
    packs.write(**facts)  # type: ignore[arg-type]

    assert packs.status().next_step.startswith(says)


def test_every_pack_of_this_repository_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["pack", "list", "--json"]) == 0

    data = json.loads(capsys.readouterr().out)
    assert len(data) == len([path for path in (ROOT / "packs").iterdir() if path.name[:2].isdigit()])
    assert all(each["next_step"] for each in data)
