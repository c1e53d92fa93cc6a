"""`megacpp-overlays report`: the contents of the file that goes to a maintainer, without folders of the host."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_up import Upstream

from megacpp_overlays import cli
from megacpp_overlays.loader import session as sessions
from megacpp_overlays.loader.session import Session
from megacpp_overlays.source.fingerprint import fingerprint
from megacpp_overlays.source.trees import InstalledTree
from megacpp_overlays.upkeep import form_report

SessionMaker = Callable[..., Session]
EDITED = """
    def double(x):
        return 2 * x + 1

    class Layer:
        def forward(self, x):
            return x

        class Inner:
            def step(self):
                ...

    if True:
        def only_sometimes():
            ...
"""


@pytest.fixture
def current(upstream: Upstream, session: SessionMaker, monkeypatch: pytest.MonkeyPatch) -> Session:
    upstream.write(EDITED)
    made = session(upstream.overlay())
    monkeypatch.setattr(sessions, "current", lambda: made)
    return made


def report(capsys: pytest.CaptureFixture[str], *options: str) -> dict[str, Any]:
    assert cli.main(["report", "double-fix", *options]) == 0
    data: dict[str, Any] = json.loads(capsys.readouterr().out)
    return data


@pytest.mark.usefixtures("current")
def test_a_form_that_is_not_recognised_is_described_by_the_fingerprints_of_its_functions(
    upstream: Upstream, capsys: pytest.CaptureFixture[str]
) -> None:
    found = report(capsys)

    [part] = found["parts"]
    source = InstalledTree().module(upstream.module_name)
    assert source is not None
    assert (part["decision"], part["verdict"]) == ("conflict", "UNRECOGNISED")
    entry = found["sources"][upstream.module_name]
    assert entry["sha256"] == source.sha256
    assert set(entry["functions"]) == {"double", "Layer.forward", "Layer.Inner.step", "only_sometimes"}
    assert entry["functions"]["double"] == fingerprint(source.function("double"))
    assert found["audit"]["decisions"] == found["parts"]
    assert set(found["versions"]) == {upstream.name, "torch", "triton"}


@pytest.mark.usefixtures("current")
def test_no_folder_of_the_host_is_in_it_unless_that_is_asked_for(
    upstream: Upstream, capsys: pytest.CaptureFixture[str]
) -> None:
    upstream.write("def (\n")

    assert str(upstream.folder) not in json.dumps(report(capsys))
    assert str(upstream.folder) in json.dumps(report(capsys, "--paths"))


@pytest.mark.usefixtures("current")
def test_no_code_and_no_variable_is_in_it(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("API_TOKEN", "not-for-everybody")

    written = json.dumps({**report(capsys), "parts": [], "audit": {}})  # the evidence of the probe quotes a line

    assert "not-for-everybody" not in written
    assert "2 * x + 1" not in written


@pytest.mark.usefixtures("current")
def test_a_text_that_cannot_be_parsed_has_a_hash_and_the_problem(
    upstream: Upstream, capsys: pytest.CaptureFixture[str]
) -> None:
    upstream.write("def (\n")

    entry = report(capsys)["sources"][upstream.module_name]

    assert len(entry["sha256"]) == 64
    assert entry["functions"] == {}
    assert entry["problem"].startswith("layers.py:1: cannot be parsed")


@pytest.mark.usefixtures("current")
def test_it_goes_to_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "report.json"

    assert cli.main(["report", "double-fix", "--output", str(path)]) == 0

    assert capsys.readouterr().out == ""
    assert json.loads(path.read_text())["parts"][0]["id"] == "double-fix"


NAMES = st.text("abcdefghijklmnopqrstuvwxyz0123456789._-@+", min_size=1, max_size=12)


@given(folders=st.lists(NAMES, min_size=1, max_size=6), file=NAMES, before=st.sampled_from(["", "at ", "'", "(", "x="]))
def test_of_an_absolute_path_the_file_is_left(folders: list[str], file: str, before: str) -> None:
    path = "/" + "/".join([*folders, file])

    assert form_report._without_folders(f"{before}{path}:3") == f"{before}{file}:3"


@pytest.mark.parametrize("text", ["megatron/core/module.py:3", "a / b", "1/2", "https://github.com/NVIDIA/x/y", "n/a"])
def test_text_without_an_absolute_path_stays(text: str) -> None:
    assert form_report._without_folders(text) == text
