"""The runner of proofs: its exit code, its output, and its output where a measurement is impossible."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from places import HANG_S, ROOT

SCRIPT = ROOT / "proof/run.py"
PYTHON = ROOT / ".envs/proof/bin/python"


def prove(*words: str | Path, python: Path | str = PYTHON) -> subprocess.CompletedProcess[str]:
    assert Path(python).exists(), f"there is no {python}: run `make setup`"
    command = [python, "-W", "ignore", SCRIPT, *words]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=HANG_S)


def subject(*outcomes: str, problem: str = "", name: str = "made") -> Any:
    """Return a subject whose claims come out like this, or that cannot be measured."""
    from claims import Claim, Outcome, Subject, Verdict
    from processes import ProofError

    def measure(_place: Any, _say: Any) -> dict[str, Any]:
        if problem:
            raise ProofError(problem)
        return {}

    def claim(number: int, outcome: str) -> Any:
        return Claim(f"claim-{number}", f"sentence {number}", lambda _: Verdict(Outcome[outcome], f"figure {number}"))

    claims = tuple(claim(*each) for each in enumerate(outcomes))
    return Subject(name, "made up", measure, claims, "no launch")


@pytest.mark.parametrize(
    ("outcomes", "code"),
    [
        (["HOLDS"], 0),
        (["HOLDS", "UPSTREAM"], 0),
        (["UPSTREAM", "FAILS", "HOLDS"], 1),
        ([], 1),
    ],
)
def test_the_exit_code_says_whether_a_claim_fails(tmp_path: Path, outcomes: list[str], code: int) -> None:
    from runner import exit_code
    from runner import prove as prove_subjects

    found = prove_subjects([subject(*outcomes)], tmp_path, lambda _: None, quick=True)

    assert exit_code(found["claims"]) == code


def test_the_table_has_each_claim_with_its_outcome_and_its_figure(tmp_path: Path) -> None:
    from runner import prove as prove_subjects
    from runner import summary

    found = prove_subjects([subject("HOLDS", "FAILS")], tmp_path, lambda _: None, quick=True)
    lines = summary(found["claims"]).splitlines()

    assert [line.split() for line in lines[:4]] == [
        ["HOLDS", "claim-0", "sentence", "0"],
        ["figure", "0"],
        ["FAILS", "claim-1", "sentence", "1"],
        ["figure", "1"],
    ]
    assert lines[-1] == "1 HOLDS, 1 FAILS, 0 UPSTREAM"


def test_a_subject_that_cannot_be_measured_fails_aloud_and_others_are_still_measured(tmp_path: Path) -> None:
    from runner import exit_code
    from runner import prove as prove_subjects

    said: list[str] = []

    found = prove_subjects([subject("HOLDS", problem="fetch it"), subject("HOLDS")], tmp_path, said.append, quick=True)

    assert [claim["outcome"] for claim in found["claims"]] == ["FAILS", "HOLDS"]
    assert found["problems"] == ["fetch it"]
    assert "error: fetch it" in said
    assert exit_code(found["claims"]) == 1


def test_measurements_are_kept_after_each_subject(tmp_path: Path) -> None:
    from runner import prove as prove_subjects

    kept: list[tuple[list[str], int]] = []
    subjects = [subject("HOLDS", name="one"), subject("FAILS", "HOLDS", name="two")]

    prove_subjects(
        subjects,
        tmp_path,
        lambda _: None,
        quick=True,
        keep=lambda found: kept.append((list(found["measured"]), len(found["claims"]))),
    )

    assert kept == [(["one"], 1), (["one", "two"], 3)]


# --- parts ---


def part(subject: str, **otherwise: Any) -> dict[str, Any]:
    return {
        "date": "2026-11-24",
        "host": {"gpu": "a"},
        "versions": {"torch": "2.11.0"},
        "inputs": {"a file": "its hash"},
        "quick": False,
        "measured": {subject: {"checkout": {"commit": "5be9626"}}},
        "claims": [{"id": subject, "says": "so", "outcome": "HOLDS", "figure": "1"}],
        "problems": [],
        "seconds": 60.0,
        "cpu_seconds": 30.0,
        **otherwise,
    }


def test_parts_are_put_together_in_the_order_in_which_they_are_given() -> None:
    from parts import joined

    later = part("two", date="2026-11-25", versions={"liger-kernel": "0.8.1"}, problems=["a problem"])

    found = joined([part("one"), later], ["one.json", "two.json"])

    assert list(found["measured"]) == [claim["id"] for claim in found["claims"]] == ["one", "two"]
    assert (found["date"], found["seconds"], found["problems"]) == ("2026-11-25", 120.0, ["a problem"])
    assert found["versions"] == {"torch": "2.11.0", "liger-kernel": "0.8.1"}


@pytest.mark.parametrize(
    ("other", "says"),
    [
        (part("two", host={"gpu": "b"}), "host: {'gpu': 'a'} in one.json, {'gpu': 'b'} in two.json"),
        (part("two", quick=True), "quick: False in one.json, True in two.json"),
        (part("two", versions={"torch": "2.12.0"}), "versions, torch: 2.11.0 in one.json, 2.12.0 in two.json"),
        (part("two", inputs={"a file": "another"}), "inputs, a file: its hash in one.json, another in two.json"),
        (part("two", measured={"two": {"checkout": {"commit": "0"}}}), "checkout: {'commit': '5be9626'} in one.json"),
        (part("one"), "one is in one.json and in two.json: give one of the two"),
    ],
)
def test_parts_of_different_proofs_are_not_put_together(other: dict[str, Any], says: str) -> None:
    from parts import PartsError, joined

    with pytest.raises(PartsError) as caught:
        joined([part("one"), other], ["one.json", "two.json"])

    assert says in str(caught.value)


def test_receipts_given_twice_end_with_the_reason_and_write_nothing(tmp_path: Path) -> None:
    kept = ROOT / "proof/results/cpu.json"

    done = prove("--page", kept, "--page", kept, "--write", tmp_path / "page.md")

    assert done.returncode == 2
    assert "trainer is in cpu.json and in cpu.json: give one of the two" in done.stderr
    assert not list(tmp_path.iterdir())


# --- processes and the command line ---


def test_a_process_that_ends_badly_is_named_with_the_end_of_its_output(tmp_path: Path) -> None:
    from processes import ProofError, start

    script = tmp_path / "launcher.py"
    script.write_text("print('step 1'); raise SystemExit('no more memory')")

    with pytest.raises(ProofError) as caught:
        start([script], {}, cwd=tmp_path)

    assert str(caught.value) == "launcher.py ended with 1:\nstep 1\nno more memory"


def test_all_that_a_process_wrote_is_handed_on_with_its_end(tmp_path: Path) -> None:
    from processes import LINES, EndedError, start

    script = tmp_path / "launcher.py"
    script.write_text("print('begin' + '\\n' * 99); raise SystemExit('the end')")

    with pytest.raises(EndedError) as caught:
        start([script], {}, cwd=tmp_path)

    assert caught.value.wrote.startswith("begin\n")
    assert len(str(caught.value).splitlines()) == LINES + 1


def test_a_process_inherits_no_switch_of_this_package_and_no_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from processes import start

    for name in ("MEGACPP_OVERLAYS", "MEGACPP_OVERLAYS_LOG", "PYTHONPATH", "PYTHONWARNINGS"):
        monkeypatch.setenv(name, "off")
    script = tmp_path / "launcher.py"
    script.write_text("import os, json; json.dump(dict(os.environ), open('environment.json', 'w'))")

    start([script], {"GIVEN": "1"}, path=[tmp_path], cwd=tmp_path)

    found = json.loads((tmp_path / "environment.json").read_text())
    assert [name for name in found if name.startswith(("MEGACPP_", "PYTHON"))] == ["PYTHONPATH"]
    assert (found["PYTHONPATH"], found["GIVEN"]) == (str(tmp_path), "1")


def test_an_archive_that_is_not_there_fails_the_claims_and_names_the_command_that_fetches_it(tmp_path: Path) -> None:
    done = prove("--quick", "--only", "liger-tests", "--archives", tmp_path, "--json", tmp_path / "found.json")

    assert done.returncode == 1
    assert f"there is no {tmp_path}/liger_kernel-0.8.5.tar.gz: `make proof-cpu` fetches it" in done.stdout
    assert "0 HOLDS, 3 FAILS, 0 UPSTREAM" in done.stdout
    assert len(json.loads((tmp_path / "found.json").read_text())["problems"]) == 1


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (
            ["--write", "/nowhere/page.md"],
            "there is no folder /nowhere to write page.md into: make it, or name another",
        ),
        (["--page", "/nowhere.json"], "there are no receipts /nowhere.json: `make proof-cpu` leaves"),
        (["--only", "trainers"], "invalid choice: 'trainers' (choose from"),
        (["--only", "megatron-tests"], "--only megatron-tests: without --megatron-lm there are trainer, liger-tests"),
    ],
)
def test_wrong_usage_ends_at_once_and_names_the_way_out(words: list[str], says: str) -> None:
    done = prove(*words)

    assert done.returncode == 2
    assert says in done.stderr


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "--gpu: torch finds none here"),
        (["--only", "liger-tests"], "--only liger-tests: with --gpu there are trainer"),
        (["--megatron-lm", "."], "argument --megatron-lm: not allowed with argument --gpu"),
    ],
)
def test_a_gpu_is_asked_for_where_there_is_one_and_for_the_trainer_alone(
    words: list[str], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")

    done = prove("--gpu", *words)

    assert done.returncode == 2
    assert says in done.stderr


def test_a_gpu_trains_a_real_size_on_one_device(monkeypatch: pytest.MonkeyPatch) -> None:
    from trainer_sizes import sizes

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")

    large, small = sizes(on_gpu=True, quick=False), sizes(on_gpu=False, quick=False)

    assert large.env["CUDA_VISIBLE_DEVICES"] == "3"
    assert "bfloat16" in large.words
    assert (small.words, small.env["CUDA_VISIBLE_DEVICES"]) == ((), "")


def test_an_interpreter_without_a_trainer_gets_the_name_of_one_that_has_it() -> None:
    done = prove(python=sys.executable)

    assert done.returncode == 2
    assert "accelerate: `make proof-cpu` sets up .envs/proof" in done.stderr


def test_page_and_plot_that_are_kept_are_those_of_the_receipts(tmp_path: Path) -> None:
    results = ROOT / "proof/results"

    done = prove("--page", results / "cpu.json", "--write", tmp_path / "cpu.md", "--plot", tmp_path / "cpu.svg")

    assert done.returncode == 0
    for name in ("cpu.md", "cpu.svg"):
        assert (tmp_path / name).read_text() == (results / name).read_text()


def test_the_readme_quotes_the_page(kept: dict[str, Any]) -> None:
    readme = (ROOT / "README.md").read_text().partition("## Proof\n")[2].partition("\n## ")[0]
    figures = {claim["id"]: claim["figure"] for claim in kept["claims"]}
    text = " ".join(readme.split())

    zero = figures["trainer-prompts-stock"].partition("; ")[0]
    worst = figures["trainer-prompts-overlay"].partition(", ")[0].removeprefix("worst relative difference: loss ")
    assert zero.replace("grad_norm", "`grad_norm`") in text
    assert f"no loss is further from PyTorch's than {worst} of it" in text


@pytest.mark.parametrize(
    ("name", "again"),
    [
        ("cpu", "make proof-cpu"),
        ("bridge-cpu", "make proof-bridge"),
        ("megatron-layers-cpu", "proof/run.py --megatron-lm CHECKOUT --only megatron-layers"),
    ],
)
def test_the_receipts_are_of_the_inputs_that_are_here_and_of_a_whole_run(name: str, again: str) -> None:
    kept = json.loads((ROOT / f"proof/results/{name}.json").read_text())

    here = {each: hashlib.sha256((ROOT / each).read_bytes()).hexdigest() for each in kept["inputs"]}

    assert kept["inputs"] == here, f"run `{again}`, and look at its output"
    assert not kept["quick"]
    assert kept["problems"] == []


@pytest.mark.parametrize("name", ["cpu", "bridge-cpu", "megatron-cpu", "megatron-gpu", "megatron-layers-cpu"])
def test_the_page_that_is_kept_is_that_of_the_receipts(name: str) -> None:
    import page

    kept = json.loads((ROOT / f"proof/results/{name}.json").read_text())

    assert page.markdown(kept) == (ROOT / f"proof/results/{name}.md").read_text()
