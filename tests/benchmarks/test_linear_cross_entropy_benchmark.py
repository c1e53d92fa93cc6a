"""The benchmark of linear cross entropy: its verdicts and its page from made-up numbers, and a tiny run of all of it."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
import zipfile
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
from benchmark_runs import run_quickly
from places import ROOT

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
SHAPE = {"tokens": 8192, "hidden": 4096, "vocabulary": 131072}


def row(kind: str, ms: float, mib: float | None = None) -> dict[str, Any]:
    taken = {"ms": ms, "stages": [ms / 3, 2 * ms / 3], "calls": 9}
    return {"kind": kind, "warm": taken, "cold": dict(taken), "extra_mib": mib}


def right(error: float) -> dict[str, Any]:
    parts = ("loss", "x", "weight", "frequent", "weight from plain")
    errors = {part: {"norm": error, "max": error} for part in parts}
    return {"errors": errors, "right": error < 0.05, "options": ["bias"]}


@pytest.fixture
def found() -> dict[str, Any]:
    """Numbers that reach everything that was asked for."""
    refuses = {"failed": "ValueError: reduction must be 'mean' or 'sum'", "options": ["ignore_index"]}
    per_token = {
        "ours": right(2e-3),
        "ours, logits kept": right(2e-3),
        "PyTorch": right(2e-3),
        "liger-kernel 0.8.1": right(1.0),
        "liger-kernel 0.8.5": right(7e-3),
        "Mean Only": refuses,
    }
    accuracy = {
        "shape": SHAPE,
        "none": {"uniform": per_token, "zipf": deepcopy(per_token)},
        "mean": {"uniform": {"ours": right(2e-3), "Mean Only": right(2e-3)}, "zipf": {}},
    }
    products = {"three products": row("floor", 40.0), "four products": row("floor", 50.0)}
    none = {
        **products,
        "ours": row("ours", 53.0, 250.0),
        "ours, logits kept": row("ours", 42.0, 2048.0),
        "PyTorch": row("plain", 49.0, 11200.0),
        "torch.compile": row("plain", 42.5, 2048.0),
        "liger-kernel 0.8.1": row("peer", 154.0, 2080.0),
        "liger-kernel 0.8.5": row("peer", 75.0, 128.0),
        "cut-cross-entropy, exact": row("peer", 140.0, 0.3),
    }
    mean = {
        **products,
        "ours": row("ours", 53.5, 250.0),
        "ours, none without a mask": row("ours", 53.4, 250.0),
        "Mean Only": row("peer", 41.0, 2112.0),
    }
    half = {
        "three products": row("floor", 20.0),
        "four products": row("floor", 25.0),
        "ours": row("ours", 27.6, 250.0),
        "ours, told to skip": row("ours", 27.5, 250.0),
        "ours, logits kept, told to skip": row("ours", 22.0, 2048.0),
        "Mean Only, labelled tokens selected beforehand": row("peer", 30.0, 2112.0),
    }
    nothing_masked = {
        **products,
        "ours": row("ours", 53.5, 250.0),
        "ours, logits kept": row("ours", 42.5, 2048.0),
        "ours, told to skip": row("ours", 54.0, 250.0),
        "ours, masked tokens computed": row("ours", 53.0, 250.0),
        "ours, logits kept, told to skip": row("ours", 43.0, 2048.0),
        "ours, logits kept, masked tokens computed": row("ours", 42.0, 2048.0),
    }
    return {
        "date": "2026-11-21",
        "host": {"machine": "x86_64", "python": "3.12.3"},
        "versions": {"torch": "2.11.0"},
        "absent": {"quack": "quack-kernels needs a GPU"},
        "notes": [],
        "problems": [],
        "seconds": 1.0,
        "accuracy": [accuracy],
        "none": [{"shape": SHAPE, "rows": none, "outputs_mib": 1088.0, "clocks": None}],
        "mean": [{"shape": SHAPE, "rows": mean, "outputs_mib": 1088.0, "clocks": None}],
        "labelled": [
            {"shape": SHAPE, "labelled": count, "rows": rows, "outputs_mib": 1088.0, "clocks": None}
            for count, rows in ((4096, half), (8192, nothing_masked))
        ],
    }


SIZES = r"^\d+ x \d+ x \d+, (\d+ tokens labelled, )?"
"""The prefix of a goal that names its sizes."""


def verdicts(found: dict[str, Any]) -> dict[str, str]:
    """Return each goal at the shape, and whether it was reached."""
    return {
        f"{re.sub(SIZES, '', where)}: {asked}": said
        for where, asked, _, said in importlib.import_module("linear_cross_entropy.goals").goals(found)
    }


def test_everything_that_was_asked_has_a_verdict(found: dict[str, Any]) -> None:
    said = verdicts(found)
    assert set(said.values()) == {"reached"}
    assert len(said) == 27


@pytest.mark.parametrize(
    ("section", "name", "field", "value", "missed"),
    [
        ("none", "ours", "ms", 54.1, ["none: <= 1.08 x the four products"]),
        ("none", "ours", "extra_mib", 256.4, ["none: extra peak <= 256 MiB"]),
        ("none", "liger-kernel 0.8.5", "ms", 68.0, ["none: >= 1.3 x faster than liger-kernel 0.8.5"]),
        ("none", "cut-cross-entropy, exact", "ms", 105.0, ["none: >= 2.0 x faster than cut-cross-entropy, exact"]),
        ("none", "torch.compile", "ms", 41.9, ["logits kept: not slower than torch.compile"]),
        ("none", "torch.compile", "extra_mib", 2047.0, ["logits kept: no more memory than torch.compile"]),
        ("none", "three products", "ms", 38.0, ["logits kept: <= 1.08 x the three products"]),
        ("mean", "ours", "ms", 55.1, ["mean: <= 1.03 x none on the same data"]),
    ],
)
def test_a_number_beyond_its_limit_is_missed(
    section: str, name: str, field: str, value: float, missed: list[str], found: dict[str, Any]
) -> None:
    changed = found[section][0]["rows"][name]
    (changed["cold"] if field == "ms" else changed)[field] = value  # the cold cache counts as much as the warm one
    assert [asked for asked, said in verdicts(found).items() if said == "**missed**"] == missed


@pytest.mark.parametrize(
    ("table", "name", "ms", "missed"),
    [
        (0, "ours", 28.1, "<= 1.12 x the four products over them"),
        (0, "ours, told to skip", 28.1, "<= 1.12 x the four products over them"),
        (0, "ours, logits kept, told to skip", 22.5, "<= 1.12 x the three products over them"),
        (1, "ours", 54.6, "<= 1.03 x ours, masked tokens computed"),
        (1, "ours, logits kept", 43.3, "<= 1.03 x ours, logits kept, masked tokens computed"),
        (1, "ours, told to skip", 54.6, "<= 1.03 x ours, masked tokens computed"),
        (
            1,
            "ours, logits kept, told to skip",
            43.3,
            "<= 1.03 x ours, logits kept, masked tokens computed",
        ),
    ],
)
def test_skipping_is_held_to_the_products_over_labelled_tokens_and_to_computing_where_all_have_a_label(
    table: int, name: str, ms: float, missed: str, found: dict[str, Any]
) -> None:
    found["labelled"][table]["rows"][name]["warm"]["ms"] = ms
    assert [asked for asked, said in verdicts(found).items() if said == "**missed**"] == [f"{name}: {missed}"]


def test_a_race_over_labelled_tokens_has_a_table_of_its_own(found: dict[str, Any]) -> None:
    page = importlib.import_module("linear_cross_entropy.page").markdown(found)

    assert "## 4096 of 8192 tokens labelled, the mean, 8192 x 4096 x 131072" in page
    assert "| Mean Only, labelled tokens selected beforehand | 30.0 |" in page


def test_a_peer_that_gets_labelled_tokens_alone_has_the_loss_and_the_gradients_of_all() -> None:
    import torch

    work, truth = (
        importlib.import_module("linear_cross_entropy.work"),
        importlib.import_module("linear_cross_entropy.truth"),
    )
    data = work.with_labels(work.make_data(work.Shape(12, 8, 20), "uniform", "cpu"), 0.25)
    (plain,) = work.plain()

    forward, backward = work.selecting(plain).stages(data)
    losses = forward()
    found = truth.errors(losses, backward(losses), truth.truth_of(data, "mean"))

    assert int((data.target != work.IGNORED).sum()) == 3
    assert work.labelled_alone(data).x.shape == (3, 8)
    assert torch.isfinite(losses)
    assert max(part["norm"] for part in found.values()) < 0.02


def test_the_logits_kept_have_to_be_as_right_as_the_rest(found: dict[str, Any]) -> None:
    found["accuracy"][0]["none"]["zipf"]["ours, logits kept"] = right(2.5e-3)
    missed = [asked for asked, said in verdicts(found).items() if said == "**missed**"]
    assert missed == [
        "zipf labels: error of dX no worse than PyTorch's",
        "zipf labels: error of dW no worse than PyTorch's",
        "zipf labels: dW 3 x as near to PyTorch's as Liger's",
        "zipf labels: dW 3 x as right as Liger's against float64, at the largest error",
        "zipf labels: dW 3 x as right as Liger's against float64",
    ]


def test_a_goal_beyond_the_dtype_of_a_gradient_is_out_of_reach(found: dict[str, Any]) -> None:
    rows = found["accuracy"][0]["none"]["zipf"]
    rows["float64, rounded to bfloat16"] = {**right(2.4e-3), "right": True}
    del rows["float64, rounded to bfloat16"]["errors"]["weight from plain"]

    said = verdicts(found)

    assert said["zipf labels: dW 3 x as right as Liger's against float64"] == "out of reach of bfloat16"
    assert said["uniform labels: dW 3 x as right as Liger's against float64"] == "reached"
    assert said["zipf labels: dW 3 x as near to PyTorch's as Liger's"] == "reached"


def test_gradients_that_are_those_of_pytorch_bit_by_bit_are_as_right_as_can_be(found: dict[str, Any]) -> None:
    for name in ("ours", "ours, logits kept"):
        found["accuracy"][0]["none"]["zipf"][name]["errors"]["weight from plain"]["norm"] = 0.0

    assert verdicts(found)["zipf labels: dW 3 x as near to PyTorch's as Liger's"] == "reached"


def test_other_settings_of_ours_race_but_are_no_other_contract(found: dict[str, Any]) -> None:
    found["accuracy"][0]["none"]["uniform"]["ours, masked tokens computed"] = right(2e-3)
    found["none"][0]["rows"]["ours, masked tokens computed"] = row("ours", 60.0, 250.0)

    contract, times = (
        importlib.import_module("linear_cross_entropy.page").markdown(found).split("## A loss for each token", 1)
    )

    assert "**ours, masked tokens computed** | right" not in contract
    assert "| <= 1.08 x the four products | 1.200 x, cold 1.200 x | **missed** |" in contract
    assert "| **ours, masked tokens computed** | 60.0 |" in times


def test_a_peer_that_did_not_run_is_said_to_be_not_measured(found: dict[str, Any]) -> None:
    del found["none"][0]["rows"]["liger-kernel 0.8.5"]
    assert verdicts(found)["none: >= 1.3 x faster than liger-kernel 0.8.5"] == "not measured"


def test_the_page_says_who_refuses_who_is_wrong_and_who_is_absent(found: dict[str, Any]) -> None:
    page = importlib.import_module("linear_cross_entropy.page").markdown(found)
    assert "| Mean Only | **refuses**: ValueError: reduction must be 'mean' or 'sum' | yes |" in page
    assert "| liger-kernel 0.8.1 | **wrong**: dX is off by 100%, dW by 100% |" in page
    assert "| **ours** | right |" in page
    assert "- quack: quack-kernels needs a GPU" in page


def test_a_failure_that_is_about_something_else_is_not_called_a_refusal(found: dict[str, Any]) -> None:
    found["accuracy"][0]["none"]["uniform"]["Mean Only"]["failed"] = "RuntimeError: no kernel image"

    page = importlib.import_module("linear_cross_entropy.page").markdown(found)

    assert "| Mean Only | **does not run**: RuntimeError: no kernel image |" in page


SVG = "{http://www.w3.org/2000/svg}"


def test_the_plot_has_a_bar_for_each_contestant_the_fastest_first_and_at_most_three_of_ours(
    found: dict[str, Any],
) -> None:
    plot = importlib.import_module("linear_cross_entropy.plot")

    for each in found["none"]:
        bars = plot.bars_of(found, each)
        assert [one.ms for one in bars] == sorted(one.ms for one in bars)
        assert {one.name for one in bars if one.kind == "ours"} <= set(plot.OURS)
        assert len(plot.OURS) == 3
        peers = {name for name, row in each["rows"].items() if row["kind"] in {"peer", "plain"} and row["warm"]}
        assert peers <= {one.name for one in bars}
    words = ["".join(each.itertext()) for each in ElementTree.fromstring(plot.svg(found)).iter(f"{SVG}text")]
    for name in ("ours", "ours, logits kept", "PyTorch", "torch.compile", "liger-kernel 0.8.1", "Mean Only"):
        assert name in words


def test_the_kept_plot_is_that_of_the_kept_numbers_and_says_who_returns_nan() -> None:
    results = ROOT / "benchmarks/results"
    plot = importlib.import_module("linear_cross_entropy.plot")
    kept = json.loads((results / "linear_cross_entropy.json").read_text())

    assert plot.svg(kept) == (results / "linear_cross_entropy.svg").read_text()
    quack = [
        one for each in kept["none"] for one in plot.bars_of(kept, each) if one.name == "quack-kernels, logits kept"
    ]
    assert [one.note for one in quack] == ["", "", "returns NaN"]


@pytest.mark.parametrize("name", ["linear_cross_entropy_labelled", "linear_cross_entropy_labelled_shapes"])
def test_the_plot_of_labelled_tokens_is_that_of_the_kept_numbers_and_has_a_panel_for_each_share(name: str) -> None:
    results = ROOT / "benchmarks/results"
    plot = importlib.import_module("linear_cross_entropy.plot")
    kept = json.loads((results / f"{name}.json").read_text())

    drawn = plot.svg(kept)

    assert drawn == (results / f"{name}.svg").read_text()
    assert f"]({name}.svg)" in (results / f"{name}.md").read_text()
    words = ["".join(each.itertext()) for each in ElementTree.fromstring(drawn).iter(f"{SVG}text")]
    assert [word.split(" of ")[0] for word in words if " tokens labelled, " in word] == [
        str(each["labelled"]) for each in kept["labelled"]
    ]
    assert "wrong under a mask" not in words
    for each in kept["labelled"]:
        bars = plot.bars_of_labelled(each)
        assert [one.ms for one in bars] == sorted(one.ms for one in bars)
        assert [one.name for one in bars if one.kind == "ours"] == ["ours, logits kept", "ours"]
        assert {"PyTorch", "torch.compile"} <= {one.name for one in bars if one.kind == "peer"}


@pytest.mark.parametrize(
    "name",
    [
        "linear_cross_entropy", "linear_cross_entropy_labelled", "linear_cross_entropy_labelled_shapes", "index_scores",
        "packed_documents",
    ],
)  # fmt: skip
def test_a_plot_has_a_name_a_description_and_colours_for_dark_screens(name: str) -> None:
    drawing = (ROOT / f"benchmarks/results/{name}.svg").read_text()
    root = ElementTree.fromstring(drawing)

    assert root.get("role") == "img"
    named = {each.get("id"): each.text for each in root if each.tag in {f"{SVG}title", f"{SVG}desc"}}
    assert root.get("aria-labelledby") == " ".join(named) == "title description"
    assert all(named.values())
    assert "prefers-color-scheme: dark" in drawing
    assert 'fill="white"' not in drawing


def test_a_way_is_known_by_its_signature() -> None:
    work = importlib.import_module("linear_cross_entropy.work")

    def peer(x: Any, bias: Any = None, ignore_index: int = -100) -> None: ...

    assert work.options(peer) == {"bias", "ignore_index"}
    assert work.options(work.functional.linear) == {"bias"}, "written in C, so without a signature"


@pytest.mark.parametrize("labels", ["uniform", "zipf"])
@pytest.mark.parametrize("reduction", ["none", "mean"])
@pytest.mark.parametrize("ignored", [[], [0, 7]])
def test_the_truth_is_that_of_autograd_in_float64(
    labels: str, reduction: str, ignored: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch
    from torch.nn import functional

    work, truth = (
        importlib.import_module("linear_cross_entropy.work"),
        importlib.import_module("linear_cross_entropy.truth"),
    )
    monkeypatch.setattr(truth, "LARGEST_BLOCK", 5 * 20)  # slices of five tokens
    data = work.make_data(work.Shape(12, 8, 20), labels, "cpu")
    data.target[ignored] = -100
    x, weight = (each.detach().double().requires_grad_() for each in (data.x, data.weight))
    losses = functional.cross_entropy(x @ weight.t(), data.target, reduction=reduction)
    gradients = torch.autograd.grad(losses, (x, weight), data.incoming.double() if reduction == "none" else None)

    found = truth.errors(losses, gradients, truth.truth_of(data, reduction))

    assert max(part["norm"] for part in found.values()) < 1e-12


def test_the_floors_multiply_the_real_gradient_of_the_logits() -> None:
    import torch
    from torch.nn import functional

    work = importlib.import_module("linear_cross_entropy.work")
    data = work.make_data(work.Shape(12, 8, 20), "uniform", "cpu")
    logits = (data.x @ data.weight.t()).detach().float().requires_grad_()
    losses = functional.cross_entropy(logits, data.target, reduction="none")
    (expected,) = torch.autograd.grad(losses, logits, data.incoming)
    torch.testing.assert_close(work.logits_gradient(data, "none"), expected.bfloat16(), rtol=0.02, atol=1e-5)


def test_wheels_are_unpacked_where_the_benchmark_looks_for_them_those_in_pieces_too(tmp_path: Path) -> None:
    name = "cut_cross_entropy-25.1.1-py3-none-any.whl"
    with zipfile.ZipFile(tmp_path / name, "w") as archive:
        archive.writestr("cut_cross_entropy/__init__.py", "")
    whole = (tmp_path / name).read_bytes()
    first, second, peers = (tmp_path / each for each in ("first", "second", "peers"))
    for folder, piece, suffix in ((first, whole[:50], ".0"), (second, whole[50:], ".1")):
        folder.mkdir()
        (folder / f"{name}{suffix}").write_bytes(piece)

    command = [sys.executable, BENCHMARKS / "linear_cross_entropy" / "unpack.py", peers, second, first]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout

    assert (peers / "cut-cross-entropy/site-packages/cut_cross_entropy/__init__.py").exists()
    assert "cut-cross-entropy: cut_cross_entropy-25.1.1" in said
    assert "quack: no wheel" in said


def test_a_finished_race_is_kept_when_the_next_one_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    run = importlib.import_module("linear_cross_entropy.run")

    def races(_bench: Any, _shape: Any) -> Iterator[dict[str, Any]]:
        yield {"labelled": 4}
        raise KeyboardInterrupt

    kept = tmp_path / "found.json"
    monkeypatch.setattr(run, "SECTIONS", {**run.SECTIONS, "labelled": races})
    words = ["run.py", "--quick", "--device", "cpu", "--shape", "8x32x48", "--sections", "labelled", "--peers", "torch"]
    monkeypatch.setattr(sys, "argv", [*words, "--json", str(kept)])

    with pytest.raises(KeyboardInterrupt):
        run.main()

    assert [each["labelled"] for each in json.loads(kept.read_text())["labelled"]] == [4]


@pytest.mark.full
@pytest.mark.upstream
def test_every_line_of_it_runs_on_a_cpu_at_tiny_sizes(tmp_path: Path) -> None:
    if importlib.util.find_spec("torch") is None:
        pytest.skip("torch is not in this environment")
    words = ["--shape", "8x32x48", "--peers", "torch", "verl", "--peers-at", str(tmp_path)]

    run_quickly(BENCHMARKS / "linear_cross_entropy", tmp_path, *words, "--plot", str(tmp_path / "plot.svg"))

    assert re.search(r"^\| \*\*ours\*\* \| right \|", (tmp_path / "page.md").read_text(), re.MULTILINE)
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["none"][0]["rows"]["ours"]["warm"]["ms"] > 0
    assert [each["labelled"] for each in found["labelled"]] == [4, 2, 1, 8]
    for each in found["labelled"]:
        assert {name for name, row in each["rows"].items() if not row["warm"]} == set()
        assert "PyTorch, labelled tokens selected beforehand" in each["rows"]
    assert "there is no" in found["absent"]["verl"]
    assert str(tmp_path) not in json.dumps(found["absent"])  # kept results name no folder of the host
    ElementTree.fromstring((tmp_path / "plot.svg").read_text())
