"""Copies of upstream code from the Hugging Face Hub, as they lie in its cache; tests/proof/test_launchers.py has the real loader."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import jsonschema
import pytest
from made_up import Upstream

from megacpp_overlays.loader import hub_copies, rendering
from megacpp_overlays.loader.session import Session
from megacpp_overlays.loader.settings import Mode, Settings

SNAPSHOT = "hub/models--some-org--some-kernels/snapshots/abc/build/torch-cpu"


def load(file: Path, name: str) -> ModuleType:
    """Import a file under a name of its own, as loaders of kernels do."""
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def copy(upstream: Upstream, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A kernel in the cache of the Hub with a copy of the upstream, in a process that has imported `kernels`."""
    # of a release that keeps no list of loaded kernels
    monkeypatch.setitem(sys.modules, "kernels", ModuleType("kernels"))
    symbol = upstream.overlay().target.symbol
    file = tmp_path / SNAPSHOT / "__init__.py"
    file.parent.mkdir(parents=True)
    file.write_text(f"def {symbol}(number):\n    return number + number\n")
    monkeypatch.setitem(sys.modules, "_some_kernels", ModuleType("_some_kernels"))
    return load(file, "_some_kernels")


def test_a_copy_is_named_with_its_repository_and_its_file(upstream: Upstream, copy: ModuleType) -> None:
    overlay = upstream.overlay()

    (said,) = hub_copies.find([overlay])

    target = overlay.target
    assert said == (
        f"{overlay.id}: some-org/some-kernels was loaded from the Hub by `kernels` and has a copy of "
        f"{target.distribution}'s {target.symbol}, which no overlay repairs ({copy.__file__})"
    )


def test_a_kernel_that_only_imports_the_symbol_has_no_copy(upstream: Upstream, copy: ModuleType) -> None:
    symbol = upstream.overlay().target.symbol
    vars(copy)[symbol].__module__ = upstream.module_name

    assert hub_copies.find([upstream.overlay()]) == ()


def test_nothing_is_looked_for_where_no_kernels_were_imported(
    upstream: Upstream, copy: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "kernels")

    assert hub_copies.find([upstream.overlay()]) == ()


def test_the_audit_and_one_line_of_the_log_name_it(
    upstream: Upstream, copy: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    session = Session([upstream.overlay()], Settings())

    audits = [session.audit() for _ in range(2)]

    (said,) = audits[1].hub_copies
    assert capsys.readouterr().err.count(f"WARNING copy: {said}") == 1
    assert "out of reach: code from the Hugging Face Hub" in str(audits[1])
    data = json.loads(audits[1].to_json())
    assert data["hub_copies"] == [said]
    jsonschema.validate(data, json.loads(Path(rendering.__file__).with_name("audit.schema.json").read_text()))


def test_a_process_in_which_all_is_off_says_nothing_of_it(upstream: Upstream, copy: ModuleType) -> None:
    assert Session([upstream.overlay()], Settings(mode=Mode.OFF)).audit().hub_copies == ()
