"""The proof with the pretrain function of megatron-bridge: how its claims are judged, and the stand-ins for missing modules."""

from __future__ import annotations

import importlib
import json
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from places import HANG_S, ROOT

Kept = dict[str, Any]
PYTHON = ROOT / ".envs/bridge/bin/python"
RESULTS = ROOT / "proof/results"
STOCK, OVERLAYS, AGAIN, OFF = (f"{way}, one rank" for way in ("stock", "overlays", "stock once more", "overlays off"))
DATA, TENSOR = (f"overlays, two {kind}-parallel ranks" for kind in ("data", "tensor"))


@pytest.fixture
def receipts() -> Kept:
    found: Kept = json.loads((RESULTS / "bridge-cpu.json").read_text())
    return found


def prove(*words: str | Path, python: Path | str) -> subprocess.CompletedProcess[str]:
    command = [python, "-W", "ignore", ROOT / "proof/run.py", *words]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=HANG_S)


def outcomes(receipts: Kept) -> dict[str, str]:
    """Judge every claim anew."""
    import bridge_claims

    found = receipts["measured"]["bridge"]
    return {claim.id: claim.judge(found).outcome.value for claim in bridge_claims.CLAIMS if claim.asked(found)}


def launch(receipts: Kept, name: str) -> Kept:
    found: Kept = receipts["measured"]["bridge"]["runs"][name]
    return found


def scale(name: str, step: int, factor: float) -> Callable[[Kept], None]:
    def change(receipts: Kept) -> None:
        launch(receipts, name)["losses"][step] *= factor

    return change


def set_in(name: str, **values: Any) -> Callable[[Kept], None]:
    return lambda receipts: launch(receipts, name).update(values)


def skip_a_step(receipts: Kept) -> None:
    launch(receipts, OVERLAYS)["skipped"][4] = 1.0


def lose_a_number(receipts: Kept) -> None:
    launch(receipts, OVERLAYS)["nans"][4] = 1.0


def learn_nothing(receipts: Kept) -> None:
    losses = launch(receipts, OVERLAYS)["losses"]
    losses[-1] = losses[0]


def call_less(receipts: Kept) -> None:
    launch(receipts, OVERLAYS)["calls"]["dsa-indexer-streaming"] = 1


def quarrel(receipts: Kept) -> None:
    launch(receipts, OVERLAYS)["decisions"]["explicit-tp-groups"] = "conflict"


BROKEN = {
    "a step is skipped": (skip_a_step, {"bridge-trains"}),
    "a step has no number": (lose_a_number, {"bridge-trains"}),
    "nothing is learnt": (learn_nothing, {"bridge-trains", "bridge-losses-one"}),
    "a loss is off": (scale(OVERLAYS, 3, 1.002), {"bridge-losses-one"}),
    "a loss is no number": (scale(OVERLAYS, 3, math.nan), {"bridge-losses-one"}),
    "a loss of two replicas is off": (scale(DATA, 3, 1.002), {"bridge-losses-data"}),
    "a loss of two shards is off": (scale(TENSOR, 3, 1.002), {"bridge-losses-tensor"}),
    "ranks decide otherwise": (set_in(DATA, ranks={"size": 2, "agreed": False}), {"bridge-losses-data"}),
    "ranks were not compared": (set_in(TENSOR, ranks=None), {"bridge-losses-tensor"}),
    "steps go past a seam": (call_less, {"bridge-used"}),
    "a conflict": (quarrel, {"bridge-used"}),
    "off is not off": (scale(OFF, -1, 1 + 1e-12), {"bridge-off"}),
}


def test_every_claim_that_is_kept_holds(receipts: Kept) -> None:
    assert outcomes(receipts) == {claim["id"]: claim["outcome"] for claim in receipts["claims"]}
    assert set(outcomes(receipts).values()) == {"HOLDS"}
    assert receipts["problems"] == []


@pytest.mark.parametrize(("change", "wrong"), BROKEN.values(), ids=BROKEN)
def test_a_claim_fails_if_its_measurements_differ(
    receipts: Kept, change: Callable[[Kept], None], wrong: set[str]
) -> None:
    change(receipts)

    assert {claim for claim, outcome in outcomes(receipts).items() if outcome == "FAILS"} == wrong


def test_each_claim_is_made_to_fail_above() -> None:
    import proofs

    claims = {claim.id for subject in proofs.OF_BRIDGE for claim in subject.claims}
    assert set().union(*(wrong for _, wrong in BROKEN.values())) == claims


def test_noise_of_two_stock_runs_is_allowed_twice(receipts: Kept) -> None:
    scale(AGAIN, 3, 1.002)(receipts)
    scale(OVERLAYS, 3, 1.003)(receipts)

    assert outcomes(receipts)["bridge-losses-one"] == "HOLDS"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--bridge"], "megatron-bridge, nvidia-modelopt: `make proof-bridge` sets up .envs/bridge"),
        (["--bridge", "--only", "trainer"], "--only trainer: with --bridge there are bridge"),
        (["--only", "bridge"], "--only bridge: without --megatron-lm there are trainer, liger-tests"),
        (["--bridge", "--megatron-lm", "."], "argument --megatron-lm: not allowed with argument --bridge"),
    ],
)
def test_wrong_usage_ends_at_once_and_names_the_way_out(words: list[str], says: str) -> None:
    done = prove(*words, python=sys.executable)

    assert done.returncode == 2
    assert says in done.stderr


def test_steps_are_read_from_the_stream_of_the_last_rank(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import bridge_launches
    from megatron_launcher import LOGGED

    def start(words: list[Any], *_: Any, **__: Any) -> str:
        for rank, text in enumerate(("Step Time : 0.12s", "".join(map(line, (1, 2))))):
            stream = words[words.index("--log-dir") + 1] / f"none_x/attempt_0/{rank}/stdout.log"
            stream.parent.mkdir(parents=True)
            stream.write_text(text)
        return ""

    def line(number: int) -> str:
        values = "".join(f" {name}: {number}.5 |" for name in LOGGED.values() if name != "iteration")
        return f" [2026-11-24 16:34:01] iteration        {number}/       2 |{values}\n"

    monkeypatch.setattr(bridge_launches, "start", start)
    replicas = next(each for each in bridge_launches.LAUNCHES if each.name == "stock, two data-parallel ranks")

    assert bridge_launches.launched(replicas, 2, tmp_path)["losses"] == [1.5, 2.5]


def test_a_launch_that_logs_less_than_its_steps_is_a_problem(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import bridge_launches
    from processes import ProofError

    monkeypatch.setattr(bridge_launches, "start", lambda *_, **__: "")

    with pytest.raises(ProofError, match=r"stock, one rank: bridge_pretrain\.py logged 0 of 3 steps"):
        bridge_launches.launched(bridge_launches.LAUNCHES[0], 3, tmp_path)


def test_the_launcher_does_not_know_of_this_project() -> None:
    for name in ("bridge_pretrain", "bridge_stand_ins", "local_stack"):
        assert "megacpp" not in (ROOT / f"proof/launchers/{name}.py").read_text()


# --- stand-ins ---


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Return the module, with two modules that ask for `absent_thing` in the place of megatron-bridge's."""
    monkeypatch.syspath_prepend(ROOT / "proof/launchers")
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("asks_and_has_it", "asks_in_vain"):
        (tmp_path / f"{name}.py").write_text("from absent_thing.part import Named\n")
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.delitem(sys.modules, "bridge_stand_ins", raising=False)
    found = importlib.import_module("bridge_stand_ins")
    named = {"absent_thing": {}, "absent_thing.part": {"Named": found.Nothing}}
    monkeypatch.setattr(found, "ASKED", {"asks_and_has_it": named})
    yield found
    for name in ("asks_and_has_it", "asks_in_vain", "bridge_stand_ins"):
        sys.modules.pop(name, None)


def test_a_stand_in_is_seen_by_the_module_that_asks_and_by_no_other(stand_ins: Any) -> None:
    asks = importlib.import_module("asks_and_has_it")

    assert asks.Named is stand_ins.Nothing
    assert not any(name.startswith("absent_thing") for name in sys.modules)
    with pytest.raises(ModuleNotFoundError, match="absent_thing"):
        importlib.import_module("asks_in_vain")


def test_an_installed_module_has_no_stand_in(stand_ins: Any, tmp_path: Path) -> None:
    (tmp_path / "absent_thing").mkdir()
    (tmp_path / "absent_thing/part.py").write_text("class Named: real = True\n")
    importlib.invalidate_caches()

    try:
        assert importlib.import_module("asks_and_has_it").Named.real
    finally:
        for name in ("absent_thing", "absent_thing.part"):
            sys.modules.pop(name, None)


# --- for real ---


@pytest.mark.full
@pytest.mark.upstream
@pytest.mark.skipif(not PYTHON.exists(), reason="there is no .envs/bridge: `make proof-bridge` sets it up")
def test_the_pretrain_function_that_is_released_bears_every_claim(tmp_path: Path) -> None:
    done = prove("--bridge", "--quick", "--json", tmp_path / "found.json", python=PYTHON)

    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "found.json").read_text())
    assert {claim["outcome"] for claim in found["claims"]} == {"HOLDS"}
