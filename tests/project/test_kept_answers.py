"""Kept answers: a script runs again exactly where something that its answer depends on has changed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kept_answers
import pytest

FILES = {
    "megacpp_overlays/__init__.py": "import megacpp_overlays.loader",
    "megacpp_overlays/loader.py": "",
    "megacpp_overlays/kernels/__init__.py": "",
    "megacpp_overlays/kernels/sums.py": "def add():\n    from megacpp_overlays.kernels import device",
    "megacpp_overlays/kernels/device.py": "NAME = 'megacpp_overlays.kernels.by_name'",
    "megacpp_overlays/kernels/by_name.py": "",
    "megacpp_overlays/kernels/other.py": "",
    "tests/support/facts.py": "import cases\nfrom megacpp_overlays.kernels.sums import add\nSTARTS = 'rank.py'",
    "tests/support/cases.py": "",
    "tests/support/rank.py": "",
    "tests/support/warm_server.py": "",
    "tests/support/stranger.py": "",
}
OUTSIDE = {
    "megacpp_overlays/__init__.py",
    "megacpp_overlays/loader.py",
    "megacpp_overlays/kernels/other.py",
    "tests/support/stranger.py",
}
"""Files that `facts.py` does not depend on; the package is switched off in its process."""


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A checkout in which everything is kept that a script of it answers."""
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(kept_answers, "ROOT", tmp_path)
    monkeypatch.setattr(kept_answers, "SUPPORT", tmp_path / "tests/support")
    monkeypatch.setattr(kept_answers, "DERIVED", tmp_path / ".cache/answers")
    monkeypatch.setattr(kept_answers, "COMMITTED", tmp_path / "tests/answers")
    monkeypatch.delenv(kept_answers.KEEP, raising=False)
    _forget()
    yield tmp_path
    _forget()


def _forget() -> None:
    for each in vars(kept_answers).values():
        if hasattr(each, "cache_clear"):
            each.cache_clear()


def key(checkout: Path, *words: str, **variables: str) -> str:
    _forget()
    return kept_answers.key_of(checkout / "tests/support/facts.py", words, variables)


def test_a_script_depends_on_all_its_imports_and_on_scripts_that_it_names(checkout: Path) -> None:
    found = {str(path.relative_to(checkout)) for path in kept_answers.closure(checkout / "tests/support/facts.py")}

    assert found == FILES.keys() - OUTSIDE


@pytest.mark.parametrize("name", FILES)
def test_the_key_changes_with_these_files_and_with_no_other(checkout: Path, name: str) -> None:
    before = key(checkout)
    (checkout / name).write_text(FILES[name] + "\nEDITED = 1\n")

    assert (key(checkout) == before) is (name in OUTSIDE)


def test_the_key_does_not_change_with_comments_and_docstrings(checkout: Path) -> None:
    before = key(checkout)
    for name in FILES:
        (checkout / name).write_text(f'"""Edited."""\n# Edited.\n{FILES[name]}\n"""Of the last attribute."""\n')

    assert key(checkout) == before


def test_words_variables_and_versions_are_part_of_the_key(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = [key(checkout), key(checkout, "few"), key(checkout, "few", TRITON_INTERPRET="1"), key(checkout, A="1")]
    monkeypatch.setattr("importlib.metadata.version", lambda name: "0")
    keys.append(key(checkout))

    assert len({*keys}) == len(keys)


def test_a_process_sees_no_variable_of_torch_or_triton_that_is_not_in_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_DEBUG", "1")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/anywhere")
    monkeypatch.setenv("HOME", "/home")

    found = kept_answers.environment({"TRITON_INTERPRET": "1"})

    assert {name: found[name] for name in found if name.startswith(kept_answers.PREFIXES)} == {"TRITON_INTERPRET": "1"}
    assert found["HOME"] == "/home"


def test_an_answer_is_looked_up_unless_every_process_has_to_run(
    checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert kept_answers.look_up("k" * 20) is None
    kept_answers.keep("k" * 20, "facts", {"error": 0.5})
    assert kept_answers.look_up("k" * 20) == {"error": 0.5}

    monkeypatch.setenv(kept_answers.KEEP, "no")
    assert kept_answers.look_up("k" * 20) is None


def test_an_answer_of_the_checkout_counts_and_its_use_is_noted(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (checkout / "tests/answers").mkdir()
    (checkout / "tests/answers/facts.abc.json").write_text(json.dumps({"script": "facts", "answer": [1]}))
    (noted := checkout / "noted").mkdir()
    monkeypatch.setenv(kept_answers.KEEP, str(noted))

    assert kept_answers.look_up("abc") == [1]
    assert [each.name for each in noted.iterdir()] == ["abc"]


def test_a_process_runs_once_for_a_key(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[Any] = []
    monkeypatch.setattr(kept_answers, "_observed", lambda *request: ran.append(request) or {"found": len(ran)})

    assert [kept_answers.answer("facts.py", "few") for _ in range(2)] == [{"found": 1}, {"found": 1}]
    assert kept_answers.answer("facts.py") == {"found": 2}


def test_a_process_that_loads_a_module_outside_its_key_is_an_error(tmp_path: Path) -> None:
    script = tmp_path / "sly.py"
    script.write_text(
        "import importlib\nimportlib.import_module('megacpp_overlays' + '.kernels.devices')\nprint('{}')\n"
    )

    with pytest.raises(AssertionError, match=r"megacpp_overlays/kernels/devices\.py"):
        kept_answers._observed(script, [], {})


def test_a_process_may_load_the_modules_that_the_package_loads(tmp_path: Path) -> None:
    script = tmp_path / "facts.py"
    script.write_text("import json, megacpp_overlays\nprint(json.dumps({'off': True}))\n")

    assert kept_answers._observed(script, [], {"MEGACPP_OVERLAYS": "off"}) == {"off": True}
