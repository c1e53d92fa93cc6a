"""The proof with Megatron-LM's own launcher: how its claims are judged, how it reads a log, and its demands on a checkout."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from places import HANG_S, ROOT, SUPPORT
from repositories import commit_all

Kept = dict[str, Any]
PYTHON = ROOT / ".envs/proof/bin/python"
STOCK, OVERLAYS, AGAIN, OFF = (f"{way}, one rank" for way in ("stock", "overlays", "stock once more", "overlays off"))
DATA, TENSOR = (f"overlays, two {kind}-parallel ranks" for kind in ("data", "tensor"))
RESHARDED = f"{OVERLAYS}, from a checkpoint of {DATA}"


@pytest.fixture
def receipts() -> Kept:
    found: Kept = json.loads((ROOT / "proof/results/megatron-cpu.json").read_text())
    return found


def outcomes(receipts: Kept) -> dict[str, str]:
    """Judge every claim anew that could be judged then."""
    import proofs

    subjects = [each for each in proofs.OF_A_CHECKOUT if each.id in receipts["measured"]]
    pairs = [(claim, receipts["measured"][subject.id]) for subject in subjects for claim in subject.claims]
    return {claim.id: claim.judge(found).outcome.value for claim, found in pairs if claim.asked(found)}


def launch(receipts: Kept, name: str) -> Kept:
    subject = "megatron-resumes" if "from a checkpoint" in name else "megatron"
    found: Kept = receipts["measured"][subject]["runs"][name]
    return found


def scale(name: str, series: str, step: int, factor: float) -> Callable[[Kept], None]:
    def change(receipts: Kept) -> None:
        launch(receipts, name)[series][step] *= factor

    return change


def set_in(name: str, **values: Any) -> Callable[[Kept], None]:
    return lambda receipts: launch(receipts, name).update(values)


def skip_a_step(receipts: Kept) -> None:
    launch(receipts, OVERLAYS)["skipped"][4] = 1.0


def learn_nothing(receipts: Kept) -> None:
    losses = launch(receipts, OVERLAYS)["losses"]
    losses[-1] = losses[0]


def call_less(receipts: Kept) -> None:
    launch(receipts, OVERLAYS)["calls"]["dsa-sparse-attention"] -= 1


def quarrel(receipts: Kept) -> None:
    launch(receipts, OVERLAYS)["decisions"]["seq-aux-loss-packed"] = "conflict"


def in_context(*, losses: int = 0, skipped: int = 0, agreed: bool = True) -> Callable[[Kept], None]:
    """Return a change to the context-parallel run with overlays: other losses, skipped steps, or ranks that differ."""

    def change(receipts: Kept) -> None:
        run = receipts["measured"]["megatron-context"]["runs"]["overlays, two context-parallel ranks"]
        run["losses"][:losses] = [1.002 * loss for loss in run["losses"][:losses]]
        run["skipped"][:skipped] = [1.0] * skipped
        run["ranks"]["agreed"] = agreed

    return change


def from_checkpoint(way: str, source: str) -> str:
    return f"{way}, one rank, from a checkpoint of {source}, one rank"


def on_a_gpu(ms: float, mib: float) -> Callable[[Kept], None]:
    def change(receipts: Kept) -> None:
        receipts["measured"]["megatron"]["host"] = "gpu"
        for name, times, most in ((STOCK, 100.0, 2048.0), (OVERLAYS, ms, mib)):
            kept = launch(receipts, name)
            kept.update(ms=[900.0, *[times] * (len(kept["ms"]) - 1)], peak_mib=most)

    return change


def lose_a_test(receipts: Kept) -> None:
    without, with_overlays = (receipts["measured"]["megatron-tests"][way] for way in ("without", "with"))
    name = with_overlays["passed"].pop()
    without["failed"][name] = with_overlays["failed"][name] = "RuntimeError: the same"
    without["passed"] = [*with_overlays["passed"], name]


def fail_in_another_way(receipts: Kept) -> None:
    failed = receipts["measured"]["megatron-tests"]["with"]["failed"]
    failed[next(iter(failed))] = "RuntimeError: another"


def call_nothing(receipts: Kept) -> None:
    del receipts["measured"]["megatron-tests"]["with"]["calls"]["dsa-sparse-attention"]


def quarrel_in_tests(receipts: Kept) -> None:
    receipts["measured"]["megatron-tests"]["with"]["conflicts"] = ["dsa-capture-gates"]


def on_one_gpu(subject: str, **values: Any) -> Callable[[Kept], None]:
    """Return a change that replaces a measurement of a CPU by one of a GPU."""
    return lambda receipts: receipts["measured"][subject].update(host="gpu", **values)


def micro_batches(stock: int, ours: int) -> Callable[[Kept], None]:
    sizes = {"stock": stock, "overlays": ours}
    tried = {way: {str(size): {"losses": [5.0, 4.0], "peak_mib": 2048.0}} for way, size in sizes.items()}
    return on_one_gpu("megatron-micro-batch", largest=sizes, tried=tried, most=64)


def captured(**otherwise: Any) -> Kept:
    run = {"losses": [5.0, 4.5, 4.0], "skipped": [0.0] * 3, "nans": [0.0] * 3, "ms": [90.0, 60.0, 20.0], "graphs": 4}
    return {**run, **otherwise}


def under_graphs(ours: Kept, stock: Kept, eager: Kept | None = None) -> Callable[[Kept], None]:
    runs = {
        "overlays, no graphs": eager or captured(graphs=0, ms=[90.0, 40.0, 40.0]),
        "overlays, graphs": ours,
        "stock, graphs": stock,
    }
    return on_one_gpu("megatron-graphs", runs=runs)


def mixers(*, said: str = "conflict", saved: str = "torch.bfloat16", **ends: Kept) -> Callable[[Kept], None]:
    names = ("float16-mixer-parameters", "float16-fp32-exemption")

    def run(decision: str, dtype: str) -> Kept:
        dtypes = {f"decoder.layers.0.mixer.{each}": dtype for each in ("A_log", "D")}
        return {"losses": [5.0, 4.0], "decisions": dict.fromkeys(names, decision), "dtypes": dtypes}

    return on_one_gpu(
        "megatron-neighbours", mixers={"on": run("active", "torch.float32"), "off": run(said, saved), **ends}
    )


def padded(way: str, **values: Any) -> Callable[[Kept], None]:
    return lambda receipts: receipts["measured"]["megatron-neighbours"]["padding"][way].update(values)


CAPTURE = {"error": "RuntimeError: operation not permitted when stream is capturing", "steps": 1}
MEMORY = {"error": "torch.OutOfMemoryError: CUDA out of memory.", "steps": 0}

BROKEN = {
    "a step is skipped": (skip_a_step, {"megatron-trains"}),
    "nothing is learnt": (learn_nothing, {"megatron-trains", "megatron-losses-one"}),
    "a loss is off": (scale(OVERLAYS, "losses", 3, 1.002), {"megatron-losses-one"}),
    "a loss is no number": (scale(OVERLAYS, "losses", 3, math.nan), {"megatron-losses-one"}),
    "a loss of two replicas is off": (scale(DATA, "losses", 3, 1.002), {"megatron-losses-data"}),
    "a loss of two shards is off": (scale(TENSOR, "losses", 3, 1.002), {"megatron-losses-tensor"}),
    "ranks decide otherwise": (set_in(DATA, ranks={"size": 2, "agreed": False}), {"megatron-losses-data"}),
    "ranks were not compared": (set_in(TENSOR, ranks=None), {"megatron-losses-tensor"}),
    "a loss of parts of sequences is off": (in_context(losses=2), {"megatron-context"}),
    "parts of sequences go without a step": (in_context(skipped=1), {"megatron-context"}),
    "ranks of parts of sequences decide otherwise": (in_context(agreed=False), {"megatron-context"}),
    "a step goes past a seam": (call_less, {"megatron-used"}),
    "a conflict": (quarrel, {"megatron-used"}),
    "off is not off": (scale(OFF, "losses", -1, 1 + 1e-12), {"megatron-off"}),
    "a resumed run begins elsewhere": (
        scale(from_checkpoint("overlays", "overlays"), "losses", 0, 1 + 1e-9),
        {"megatron-resumes"},
    ),
    "a resumed run goes elsewhere": (
        scale(from_checkpoint("overlays", "overlays"), "losses", 3, 1 + 1e-5),
        {"megatron-resumes"},
    ),
    "stock cannot go on": (
        scale(from_checkpoint("stock", "overlays"), "losses", 0, 1.01),
        {"megatron-stock-resumes"},
    ),
    "overlays cannot go on": (
        scale(from_checkpoint("overlays", "stock"), "losses", 0, 1.01),
        {"megatron-overlays-resume"},
    ),
    "one rank fails in another way": (set_in(RESHARDED, error="KeyError: 'step'"), {"megatron-reshards"}),
    "slower on a GPU": (on_a_gpu(101.0, 1024.0), {"megatron-time"}),
    "larger on a GPU": (on_a_gpu(50.0, 2049.0), {"megatron-memory"}),
    "a test is lost": (lose_a_test, {"megatron-tests-kept"}),
    "a test fails in another way": (fail_in_another_way, {"megatron-tests-rest"}),
    "tests go past a seam": (call_nothing, {"megatron-tests-used"}),
    "a conflict in tests": (quarrel_in_tests, {"megatron-tests-used"}),
    "no memory was logged": (on_a_gpu(50.0, 0.0), {"megatron-memory"}),
    "a smaller micro-batch": (micro_batches(4, 2), {"megatron-micro-batch"}),
    "no micro-batch": (micro_batches(0, 0), {"megatron-micro-batch"}),
    "only stock can be captured": (under_graphs(CAPTURE, captured()), {"megatron-graphs"}),
    "a capture fails in another way": (under_graphs(MEMORY, CAPTURE), {"megatron-graphs"}),
    "nothing was captured": (under_graphs(captured(graphs=0), CAPTURE), {"megatron-graphs"}),
    "a graph computes something else": (
        under_graphs(captured(losses=[5.0, 4.5, 4.1]), CAPTURE),
        {"megatron-graphs"},
    ),
    "a replay has no number": (
        under_graphs(captured(losses=[5.0, math.nan, 4.0], nans=[0.0, 1.0, 0.0]), captured()),
        {"megatron-graphs"},
    ),
    "nothing to compare graphs with": (under_graphs(captured(), captured(), MEMORY), {"megatron-graphs"}),
    "a checkpoint is right without its overlay": (padded("off", verdict="right", wrong={}), {"megatron-padding"}),
    "a checkpoint is wrong in another way": (
        padded("off", wrong={"a.weight": "its fp32 weights are not its weights, and do not say why"}),
        {"megatron-padding"},
    ),
    "a checkpoint is wrong with its overlay": (padded("on", verdict="written broken"), {"megatron-padding"}),
    "an overlay of checkpoints changes losses": (padded("off", losses=[5.0, 4.0]), {"megatron-padding"}),
    "a checkpoint was not saved": (padded("on", **CAPTURE), {"megatron-padding"}),
    "parameters are kept that cannot be saved": (mixers(said="active", saved="torch.float32"), {"megatron-mixers"}),
    "a refusal keeps them all the same": (mixers(saved="torch.float32"), {"megatron-mixers"}),
    "kept parameters cannot be saved": (mixers(on=CAPTURE), {"megatron-mixers"}),
    "no conflict is said": (mixers(said="active"), {"megatron-mixers"}),
    "what is refused ends the run": (mixers(off=CAPTURE), {"megatron-mixers"}),
}


def test_every_claim_that_is_kept_holds_or_is_upstreams_own(receipts: Kept) -> None:
    assert outcomes(receipts) == {claim["id"]: claim["outcome"] for claim in receipts["claims"]}
    others = {claim for claim, outcome in outcomes(receipts).items() if outcome != "HOLDS"}
    assert others == {"megatron-reshards", "megatron-tests-rest", "megatron-unit-tests-rest"}
    assert receipts["problems"] == []


def test_every_claim_that_was_kept_on_gpus_holds_or_is_upstreams_own() -> None:
    import proofs

    receipts: Kept = json.loads((ROOT / "proof/results/megatron-gpu.json").read_text())

    assert outcomes(receipts) == {claim["id"]: claim["outcome"] for claim in receipts["claims"]}
    others = {claim for claim, outcome in outcomes(receipts).items() if outcome != "HOLDS"}
    rest = {"megatron-reshards", "megatron-layers-kernels", "megatron-tests-rest", "megatron-unit-tests-rest"}
    assert {outcomes(receipts)[claim] for claim in others} == {"UPSTREAM"}
    assert others == rest
    assert set(receipts["measured"]) == {subject.id for subject in proofs.OF_A_CHECKOUT}
    assert "H200" in receipts["host"]["gpu"]
    assert receipts["problems"] == []


@pytest.mark.parametrize(("change", "wrong"), BROKEN.values(), ids=BROKEN)
def test_a_claim_fails_if_its_measurements_differ(
    receipts: Kept, change: Callable[[Kept], None], wrong: set[str]
) -> None:
    change(receipts)

    assert {claim for claim, outcome in outcomes(receipts).items() if outcome == "FAILS"} == wrong


def test_each_claim_is_made_to_fail_above_or_in_the_file_of_its_subject() -> None:
    import proofs

    subjects = [each for each in proofs.OF_A_CHECKOUT if each.id not in {"megatron-layers", "megatron-unit-tests"}]
    claims = {claim.id for subject in subjects for claim in subject.claims}
    assert set().union(*(wrong for _, wrong in BROKEN.values())) == claims


def test_noise_of_two_stock_runs_is_allowed_twice(receipts: Kept) -> None:
    scale(AGAIN, "losses", 3, 1.002)(receipts)
    scale(OVERLAYS, "losses", 3, 1.003)(receipts)

    assert outcomes(receipts)["megatron-losses-one"] == "HOLDS"


@pytest.mark.parametrize(("factor", "outcome"), [(1.002, "HOLDS"), (1.0, "FAILS")])
def test_so_is_that_of_a_stock_run_that_rounds_otherwise(receipts: Kept, factor: float, outcome: str) -> None:
    rounded = json.loads(json.dumps(launch(receipts, STOCK)))
    rounded["losses"][3] *= factor
    receipts["measured"]["megatron"]["runs"]["stock, rounded otherwise, one rank"] = rounded
    scale(OVERLAYS, "losses", 3, 1.003)(receipts)

    assert outcomes(receipts)["megatron-losses-one"] == outcome


def test_where_stock_begins_elsewhere_too_it_is_upstreams_own(receipts: Kept) -> None:
    for way in ("stock", "overlays"):
        scale(from_checkpoint(way, way), "losses", 0, 1 + 1e-9)(receipts)

    assert outcomes(receipts)["megatron-resumes"] == "UPSTREAM"


@pytest.mark.parametrize(("factor", "outcome"), [(1.0, "HOLDS"), (1.01, "FAILS")])
def test_one_rank_that_goes_on_from_two_is_judged_by_its_first_loss(
    receipts: Kept, factor: float, outcome: str
) -> None:
    found = receipts["measured"]["megatron-resumes"]
    whole = found["runs"][DATA]
    begin = whole["iterations"].index(found["saved"] + 1)
    goes_on = {"iterations": whole["iterations"][begin:], "losses": [whole["losses"][begin] * factor]}
    found["runs"][RESHARDED] = goes_on

    assert outcomes(receipts)["megatron-reshards"] == outcome


def test_a_step_is_read_from_the_line_that_megatron_logs() -> None:
    from megatron_launcher import peak_mib, steps

    line = (
        " [2026-11-24 13:20:31.282443] iteration        5/      20 | consumed samples:           20 |"
        " elapsed time per iteration (ms): 82.7 | learning rate: 1.000000E-03 | lm loss: 5.173357E+00 |"
        " grad norm: 0.938 | number of skipped iterations:   0 | number of nan iterations:   0 |"
    )
    log = f"> building\n{line}\n[Rank 0] (after 5 iterations) memory (MB) | allocated: 1.00 | max allocated: 2.50 | x\n"

    (found,) = steps(log)

    assert (found["iteration"], found["lm loss"], found["grad norm"]) == (5, 5.173357, 0.938)
    assert found["elapsed time per iteration (ms)"] == 82.7
    assert peak_mib(log) == 2.5


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("[rank0]: RuntimeError: no more memory\nthe end", "RuntimeError: no more memory"),
        (
            'a\n[rank0]:   File "/x/distrib_optimizer.py", line 839, in state_dict\n[rank0]:     assert len(steps) == 1\n'
            "[rank0]:            ^^^^^^\n[rank0]: AssertionError",
            "AssertionError at distrib_optimizer.py:839: assert len(steps) == 1",
        ),
        ("killed\nby a signal", "by a signal"),
    ],
)
def test_the_cause_of_an_end_is_the_last_exception(text: str, cause: str) -> None:
    import megatron_launcher

    assert megatron_launcher.cause(text) == cause


# --- parts that only a GPU can do ---


@pytest.mark.parametrize(
    ("change", "claim", "outcome", "says"),
    [
        (micro_batches(4, 32), "megatron-micro-batch", "HOLDS", "32 (2.0 GiB); stock: 4 (2.0 GiB); 8 times as large"),
        (micro_batches(4, 64), "megatron-micro-batch", "HOLDS", "64 (2.0 GiB, the most that was tried); stock: 4"),
        (micro_batches(0, 1), "megatron-micro-batch", "HOLDS", "1 (2.0 GiB); stock: not even one sample fits"),
        (under_graphs(captured(), CAPTURE), "megatron-graphs", "HOLDS", f"without 40 ms; stock: {CAPTURE['error']}"),
        (under_graphs(captured(), captured()), "megatron-graphs", "HOLDS", "stock: 4 graphs, its losses 0.0e+00 from"),
        (under_graphs(CAPTURE, CAPTURE), "megatron-graphs", "UPSTREAM", f"{CAPTURE['error']}; stock: "),
        (mixers(), "megatron-mixers", "HOLDS", "2 parameters saved in bfloat16"),
    ],
)
def test_a_claim_of_a_gpu_names_its_measurements(
    receipts: Kept, change: Callable[[Kept], None], claim: str, outcome: str, says: str
) -> None:
    import proofs

    change(receipts)

    (found,) = (
        each.judge(receipts["measured"][subject.id])
        for subject in proofs.OF_A_CHECKOUT
        for each in subject.claims
        if each.id == claim
    )
    assert found.outcome.value == outcome
    assert says in found.figure


def test_the_page_of_a_gpu_has_the_tried_sizes_and_the_steps_under_graphs(receipts: Kept) -> None:
    import page

    micro_batches(4, 32)(receipts)
    receipts["measured"]["megatron-micro-batch"]["tried"]["stock"]["8"] = MEMORY
    under_graphs(captured(), CAPTURE)(receipts)
    receipts["measured"]["megatron-graphs"]["words"] = ["--cuda-graph-impl", "local"]

    lines = page.markdown(receipts).splitlines()

    assert {"| stock | 8 | out of memory |", "| overlays | 32 | 2.0 GiB |"} <= set(lines)
    assert {"| overlays, graphs | 4 | 4 | 3 steps |", "| stock, graphs | - | - | ended after 1 steps |"} <= set(lines)


@pytest.mark.parametrize(
    ("fits", "begin", "found", "asked"),
    [
        (5, 1, 4, [1, 2, 4, 8]),
        (40, 4, 32, [4, 8, 16, 32, 64]),
        (1000, 4, 64, [4, 8, 16, 32, 64]),
        (2, 8, 2, [8, 4, 2]),
        (0, 1, 0, [1]),
        (0, 4, 0, [4, 2, 1]),
        (3, 0, 2, [1, 2, 4]),
    ],
)
def test_the_largest_size_is_found_in_few_launches(fits: int, begin: int, found: int, asked: list[int]) -> None:
    from megatron_micro_batch import MOST, largest

    seen: list[int] = []

    assert largest(lambda size: seen.append(size) or size <= fits, begin, MOST) == found  # type: ignore[func-returns-value]
    assert seen == asked


@pytest.mark.parametrize(
    ("error", "memory"),
    [
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.", True),
        ("torch.AcceleratorError: CUDA error: out of memory", True),
        ("RuntimeError: CUDA error: an illegal memory access was encountered", False),
        ("triton.runtime.errors.OutOfResources: out of resource: shared memory", False),
        ("RuntimeError: [enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory", False),
    ],
)
def test_an_end_for_want_of_memory_is_distinguished_from_any_other(error: str, memory: bool) -> None:
    from megatron_launcher import is_out_of_memory

    assert is_out_of_memory(error) == memory


def test_a_micro_batch_that_ends_in_another_way_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    import megatron_micro_batch
    from megatron_launches import Way
    from processes import ProofError

    monkeypatch.setattr(megatron_micro_batch, "tried", lambda *_, **__: CAPTURE)
    fits = megatron_micro_batch._fits(Way.STOCK, None, {}, lambda _: None)  # type: ignore[arg-type]

    with pytest.raises(
        ProofError, match=r"micro-batch of 2, stock: it ended otherwise than for want of memory: Runtime"
    ):
        fits(2)


@pytest.mark.parametrize(
    ("log", "count"),
    [
        (
            "create cuda graphs | mem: alloc 1.0 gb, res 2.0 gb:  50%|##| 2/4 [00:01\rcreate cuda graphs | x: 100%|##| 4/4 [00:02<",
            4,
        ),
        ("INFO:> built 8 cuda graph(s) in 2.10 sec, with total memory usage", 8),
        ("create cuda graphs:  50%|##| 2/4 [00:01<", 0),
        ("nothing of the kind", 0),
    ],
)
def test_graphs_are_counted_from_the_log(log: str, count: int) -> None:
    from megatron_launcher import graphs

    assert graphs(log) == count


# --- a checkout ---


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """Return a folder that looks like a checkout, with a module that compiles."""
    given = tmp_path / "given"
    for name in ("pretrain_hybrid.py", "hybrid_builders.py", "model_provider.py", "megatron/training/__init__.py"):
        (given / name).parent.mkdir(parents=True, exist_ok=True)
        (given / name).write_text("")
    info = given / "megatron/core/package_info.py"
    (given / "megatron/core/datasets").mkdir(parents=True)
    info.write_text("MAJOR = 0\nMINOR = 19\nPATCH = 0\nPRE_RELEASE = 'rc1'\nVERSION = (MAJOR, MINOR)\n")
    (given / "megatron/core/datasets/helpers.cpp").write_text(
        "#include <pybind11/pybind11.h>\nPYBIND11_MODULE(helpers_cpp, module) {}\n"
    )
    return given


@pytest.mark.full
def test_a_checkout_is_copied_and_nothing_is_written_into_it(checkout: Path, tmp_path: Path) -> None:
    from megatron_checkout import copied

    before = sorted(path for path in checkout.rglob("*"))
    copy = tmp_path / "copy"
    copy.mkdir()

    found = copied(checkout, copy)

    assert sorted(path for path in checkout.rglob("*")) == before
    assert found.version == "0.19.0rc1"
    assert found.commit.startswith("no commit; SHA-256 of its Python files ")
    assert [path.name for path in copy.glob("megatron/core/datasets/helpers_cpp*.so")]


@pytest.mark.full
def test_the_hash_of_a_checkout_without_git_covers_every_file(checkout: Path, tmp_path: Path) -> None:
    from megatron_checkout import copied

    seen = []
    for number, text in enumerate(("", "changed = True\n")):
        (checkout / "megatron/training/__init__.py").write_text(text)
        (copy := tmp_path / str(number)).mkdir()
        seen.append(copied(checkout, copy).commit)

    assert seen[0] != seen[1]


@pytest.mark.full
def test_a_checkout_that_git_knows_is_named_by_its_commit(checkout: Path, tmp_path: Path) -> None:
    from megatron_checkout import copied

    commit = commit_all(checkout)
    (copy := tmp_path / "copy").mkdir()

    assert copied(checkout, copy).commit == commit

    (checkout / "pretrain_hybrid.py").write_text("edited = True\n")
    (later := tmp_path / "later").mkdir()

    assert copied(checkout, later).commit == f"{commit}-dirty"


def test_a_folder_that_is_no_checkout_ends_with_the_way_out(tmp_path: Path) -> None:
    done = subprocess.run(
        [PYTHON, "-W", "ignore", ROOT / "proof/run.py", "--quick", "--megatron-lm", tmp_path],
        capture_output=True,
        text=True,
        check=False,
        timeout=HANG_S,
    )

    assert done.returncode == 1
    assert f"{tmp_path} has no pretrain_hybrid.py, hybrid_builders.py" in done.stdout
    assert "give a checkout of https://github.com/NVIDIA/Megatron-LM" in done.stdout


def test_the_readme_says_how_many_overlays_were_active(receipts: Kept) -> None:
    active = sum(decision == "active" for decision in launch(receipts, OVERLAYS)["decisions"].values())

    assert f"with {active} active overlays are stock's but for rounding" in (ROOT / "README.md").read_text()


# --- the stack that the launcher gets ---


@pytest.mark.full
@pytest.mark.upstream
@pytest.mark.parametrize("words", [(), ("every_layer_stack", "D+-E/+E")], ids=["sparse attention", "every layer"])
def test_the_stack_that_the_launcher_is_given_trains_on_the_released_megatron(words: tuple[str, ...]) -> None:
    variables = {
        "CUDA_VISIBLE_DEVICES": "",
        "TORCHDYNAMO_DISABLE": "1",
        "OMP_NUM_THREADS": "1",
        "TRITON_INTERPRET": "0",
    }
    path = os.pathsep.join(map(str, (ROOT / "proof/on_cpu", ROOT / "proof/launchers")))

    done = subprocess.run(
        [sys.executable, "-W", "ignore", SUPPORT / "local_stack_steps.py", *words],
        env={**os.environ, **variables, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
        timeout=HANG_S,
    )

    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["losses"] == sorted(found["losses"], reverse=True)
    assert found["without a gradient"] == []


@pytest.mark.upstream
@pytest.mark.skipif("MEGATRON_LM" not in os.environ, reason="MEGATRON_LM names no checkout of Megatron-LM")
def test_the_launcher_of_a_given_checkout_bears_every_claim(tmp_path: Path) -> None:
    words = ["--quick", "--megatron-lm", os.environ["MEGATRON_LM"], "--json", tmp_path / "found.json"]

    done = subprocess.run(
        [PYTHON, "-W", "ignore", ROOT / "proof/run.py", *words],
        capture_output=True,
        text=True,
        check=False,
        timeout=HANG_S,
    )

    assert done.returncode == 0, done.stdout


# The page and its plot


@pytest.mark.parametrize("host", ["cpu", "gpu"])
def test_the_plot_that_is_kept_is_that_of_the_receipts_and_on_their_page(host: str) -> None:
    import megatron_plot

    results = ROOT / "proof/results"
    receipts = json.loads((results / f"megatron-{host}.json").read_text())

    assert megatron_plot.svg(receipts) == (results / f"megatron-{host}.svg").read_text()
    assert f"(megatron-{host}.svg)" in (results / f"megatron-{host}.md").read_text()


def test_the_plot_agrees_with_the_claims() -> None:
    import megatron_plot

    receipts: Kept = json.loads((ROOT / "proof/results/megatron-gpu.json").read_text())
    figures = {claim["id"]: claim["figure"] for claim in receipts["claims"]}

    drawn = megatron_plot.svg(receipts)

    ours, stock = re.match(r"(\d+ ms) a step, stock (\d+ ms)", figures["megatron-time"]).groups()
    assert (f">{ours}, overlays<" in drawn, f">{stock}, stock<" in drawn) == (True, True)
    ours, stock = re.match(r"([\d.]+ GiB), stock ([\d.]+ GiB)", figures["megatron-memory"]).groups()
    assert (f">{ours}, overlays<" in drawn, f">{stock}, stock<" in drawn) == (True, True)
    ours, stock = re.match(r"(\d+) .*; stock: (\d+) ", figures["megatron-micro-batch"]).groups()
    assert (f">{ours}, overlays<" in drawn, f">{stock}, stock<" in drawn) == (True, True)
    assert (drawn.count("<polyline"), drawn.count('rx="2"')) == (2, 6)


def test_a_cpu_has_no_bars_and_a_proof_without_launches_no_lines(receipts: Kept) -> None:
    import megatron_plot

    on_a_cpu = megatron_plot.svg(receipts)
    del receipts["measured"]["megatron"]

    assert (on_a_cpu.count("<polyline"), on_a_cpu.count('rx="2"')) == (2, 0)
    assert "The launches over one rank were not measured." in megatron_plot.svg(receipts)
