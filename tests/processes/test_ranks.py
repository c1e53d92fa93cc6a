"""verify_ranks with real processes: under torchrun, and as a launcher without an agent starts them."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import ANY

import pytest
import warm_python
from launched_ranks import TIMEOUT, Ranks, only, same_error
from made_up import BROKEN_TEXT, Upstream
from memory_store import Memory
from places import HANG_S, ROOT
from ranks_launcher import wait
from unpacked import unpacked
from warm_python import WarmProcess

import megacpp_overlays
from megacpp_overlays.errors import RanksError
from megacpp_overlays.processes import rank_exchange, ranks

pytest.importorskip("torch")

LIGER = "liger-flce-none-backward"


@pytest.fixture
def launch(tmp_path: Path) -> Ranks:
    return Ranks(tmp_path)


@pytest.mark.parametrize("size", [2, pytest.param(8, marks=pytest.mark.full)])
def test_ranks_that_run_the_same_code_get_their_audit(launch: Ranks, size: int) -> None:
    found = only(launch.torchrun(size, measured=size == 2, fresh=size == 8))

    assert [each["outcome"] for each in found] == ["agreed"] * size
    assert len({each["fingerprint"] for each in found}) == 1
    assert not any(each["cuda"] for each in found)


@pytest.mark.full
def test_one_rank_with_an_overlay_off_stops_all_eight(launch: Ranks) -> None:
    found = only(launch.torchrun(8, **{"5": {"environment": {"MEGACPP_OVERLAY_DOUBLE_FIX": "off"}}}))

    error = same_error(found)
    assert len(found) == 8
    assert error["differences"] == [["double-fix", "switch", [["auto", [0, 1, 2, 3, 4, 6, 7]], ["off", [5]]]]]
    assert error["text"].splitlines()[0] == "8 ranks do not run the same code: rank 5 differs from the other 7"
    assert "double-fix  switch      auto   0-4, 6-7\n" in error["text"]
    assert "- double-fix: set MEGACPP_OVERLAY_DOUBLE_FIX the same everywhere, or nowhere" in error["text"]


def test_another_liger_kernel_and_a_rank_that_is_off_are_reported_together(
    launch: Ranks, tmp_path: Path, wheel: Callable[[str, str], Path]
) -> None:
    one, other = ([str(unpacked(wheel("liger-kernel", version)))] for version in ("0.8.1", "0.8.2"))
    plan = {
        "all": {"path": one},
        "1": {"path": one, "environment": {"MEGACPP_OVERLAYS": "off"}},
        "2": {"path": other},
    }

    found = only(launch.torchrun(4, **plan))

    error = same_error(found)
    assert error["differences"] == [
        ["megacpp_overlays", "mode", [["auto", [0, 2, 3]], ["off", [1]]]],
        *(
            [each, "version", [["0.8.1", [0, 1, 3]], ["0.8.2", [2]]]]
            for each in (
                LIGER,
                "liger-flce-labelled",
                *["liger-flce-frozen-states"] * 2,
                "liger-glm4v-norms",
                "liger-flce-strided-gradients",
            )
        ),
    ]
    assert error["text"].startswith("4 ranks do not run the same code: ranks 1-2 differ from the other 2\n")
    assert "- megacpp_overlays: give every process the same MEGACPP_OVERLAYS\n" in error["text"]
    assert f"- {LIGER} and 4 more: install the same liger-kernel everywhere" in error["text"]


@pytest.mark.parametrize(
    "imported", [True, pytest.param(False, marks=pytest.mark.full)], ids=["imported", "not yet imported"]
)
def test_an_edited_file_of_one_host_stops_both(launch: Ranks, tmp_path: Path, imported: bool) -> None:
    other = Upstream("upstream_of_ranks", tmp_path / "edited")
    other.folder.mkdir()
    other.write(BROKEN_TEXT + "\n# edited\n")
    other.write((tmp_path / "upstream_of_ranks" / "plugin.py").read_text(), "plugin")

    plan = {"all": {"before": ["upstream_of_ranks.layers"] * imported}, "1": {"path": [str(other.folder)]}}
    found = only(launch.torchrun(2, measured=imported, **plan))

    error = same_error(found)
    ((subject, field, values),) = error["differences"]
    assert (subject, field) == ("double-fix", "source_sha256")
    assert [held_by for _, held_by in values] == [[0], [1]]
    assert "the version is the same and the file of upstream_of_ranks.layers is not" in error["text"]


def test_another_import_order_stops_all_four(launch: Ranks) -> None:
    found = only(launch.torchrun(4, **{"all": {"before": ["upstream_of_ranks.layers"]}, "3": {"before": []}}))

    error = same_error(found)
    ((subject, field, values),) = error["differences"]
    assert (subject, field) == ("double-fix", "decision")
    assert [(said.partition(" (")[0], held_by) for said, held_by in values] == [("active", [0, 1, 2]), ("armed", [3])]
    assert "import megacpp_overlays first" in error["text"]


def test_one_rank_that_imported_us_too_late_stops_both(launch: Ranks, tmp_path: Path) -> None:
    held = "import functools, upstream_of_ranks.layers\nHELD = functools.partial(upstream_of_ranks.layers.double)\n"
    (tmp_path / "holder.py").write_text(held)

    found = only(launch.torchrun(2, **{"all": {"before": ["holder"]}, "1": {"first": ["holder"]}}))

    error = same_error(found)
    ((subject, field, values),) = error["differences"]
    assert (subject, field) == ("double-fix", "decision")
    assert [said.partition(" (")[0] for said, _ in values] == ["active", "conflict"]
    assert "still held by an object of functools.partial" in values[1][0]


def test_a_rank_that_left_is_named_on_all_others(launch: Ranks) -> None:
    seen = launch.torchrun(4, timeout=0.5, absent=1, measured=True, **{"2": {"leaves": "exit"}})

    assert seen.pop(2) is None
    error = same_error(only(seen))
    assert error["missing"] == [2]
    assert error["text"].startswith("rank 2 of 4 did not arrive within 0.5 s; the other 3 run the same code\n")
    assert "rank 2: see the log there. It never called verify_ranks: it crashed" in error["text"]
    assert "does not import megacpp_overlays" in error["text"]


def test_a_rank_that_calls_once_more_is_not_left_waiting(launch: Ranks) -> None:
    first, second = launch.torchrun(2, timeout=0.5, **{"1": {"calls": 2}})

    assert [each["outcome"] for each in first] == ["agreed"]
    assert [each["outcome"] for each in second] == ["agreed", "RanksError"]
    assert second[1]["missing"] == [0]
    assert "This was call 2 of verify_ranks, and it has called less often" in second[1]["text"]


def test_a_subgroup_is_compared_on_its_own_and_again(launch: Ranks) -> None:
    # Rank 0 differs from all others, is no member, and gets its audit.
    plan = {"all": {"group": [1, 3], "calls": 2}, "0": {"environment": {"MEGACPP_OVERLAY_DOUBLE_FIX": "off"}}}
    seen = launch.torchrun(4, **plan)

    assert [[each["outcome"] for each in calls] for calls in seen] == [["agreed", "agreed"]] * 4


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


@pytest.fixture
def started(launch: Ranks) -> Iterator[Callable[..., list[WarmProcess]]]:
    """Start ranks without an agent, as srun and mpirun do. The process of rank 0 keeps the store."""
    running: list[WarmProcess] = []

    def start(size: int, *, timeout: float, absent: int = 0, **plan: Any) -> list[WarmProcess]:
        command = launch.command(timeout, size - absent, **plan)
        port = str(free_port())
        for rank in range(size):
            place = {"RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            running.append(warm_python.start(command, launch.environment(**place)))
        return running

    yield start
    for each in running:
        each.kill()
        each.wait()


def test_all_read_the_table_before_the_rank_that_keeps_the_store_is_gone(
    launch: Ranks, started: Callable[..., list[WarmProcess]]
) -> None:
    plan = {"1": {"environment": {"MEGACPP_OVERLAY_DOUBLE_FIX": "off"}}}
    # None of them is expected to leave word, so each process ends as soon as it has raised.
    for each in started(3, timeout=TIMEOUT, absent=3, **plan):
        assert each.wait(HANG_S) == 0

    assert same_error(only(launch.seen(3)))["differences"][0][1] == "switch"


def test_a_rank_that_was_killed_is_named_on_all_others(
    launch: Ranks, started: Callable[..., list[WarmProcess]]
) -> None:
    running = started(3, timeout=0.5, absent=1, **{"1": {"leaves": "kill"}})
    assert [running[0].wait(HANG_S), running[2].wait(HANG_S)] == [0, 0]

    error = same_error([launch.seen(3)[0][0], launch.seen(3)[2][0]])
    assert error["missing"] == [1]


@pytest.mark.parametrize(
    "how", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.full)], ids=["is killed", "hangs"]
)
def test_a_rank_says_so_when_the_process_that_keeps_the_store(
    launch: Ranks, started: Callable[..., list[WarmProcess]], how: signal.Signals
) -> None:
    keeper = "kill" if how is signal.SIGKILL else "stop"
    running = started(2, timeout=1, patience=1, absent=1, **{"0": {"leaves": keeper}, "1": {"after": 0}})

    assert running[1].wait(HANG_S) == 0
    (seen,) = launch.seen(2)[1]
    assert seen["outcome"] == "RanksError"
    assert "the TCPStore at 127.0.0.1:" in seen["text"]
    assert "the process of rank 0 keeps it" in seen["text"]
    assert "What to do:\n- look at the" in seen["text"]


def state(pid: int) -> str:
    """Return the letter that the kernel has for the state of a process: `T` is stopped."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


@contextlib.contextmanager
def stopped(pid: int) -> Iterator[None]:
    """Stop a process, all of its threads, until the end of the block."""
    os.kill(pid, signal.SIGSTOP)
    try:
        wait(lambda: state(pid) == "T")
        yield
        assert state(pid) == "T"  # all the while
    finally:
        os.kill(pid, signal.SIGCONT)


def wait_for(*files: Path) -> None:
    wait(lambda: all(file.exists() for file in files))
    assert [file for file in files if not file.exists()] == []


@pytest.mark.parametrize("keeper", ["rank 0", pytest.param("torchrun", marks=pytest.mark.full)])
def test_a_keeper_of_the_store_that_is_stopped_for_a_while_costs_one_call_and_no_more(
    launch: Ranks, started: Callable[..., list[WarmProcess]], keeper: str
) -> None:
    """Stop it while a rank waits in the store for another; the waiting rank gets an error and meets the other later."""
    waits, comes = ("1", "0") if keeper == "rank 0" else ("0", "1")
    plan = {waits: {"calls": 2, "timeouts": [1, TIMEOUT]}, comes: {"until": "continued"}}
    if keeper == "rank 0":
        running: list[Any] = started(2, timeout=TIMEOUT, patience=1, **plan)
        wait_for(launch.said / "0.joined")
        pid = int((launch.said / "0.joined").read_text())
    else:
        running = [launch.agent(2, timeout=TIMEOUT, patience=1, **plan)]
        pid = running[0].pid
    try:
        wait_for(launch.said / f"{waits}.1.arrived")

        with stopped(pid):
            wait_for(launch.said / f"{waits}.1.ended")

        (launch.said / "continued").touch()
        assert [each.wait(HANG_S) for each in running] == [0] * len(running)
    finally:
        for each in running:
            each.kill()

    first, second = launch.seen(2)[int(waits)]
    assert first["outcome"] == "RanksError"
    assert re.search(r"the TCPStore at .* has not answered for \d+ s", first["text"])
    assert ("the process of rank 0 keeps it" if keeper == "rank 0" else "torchrun on the first node keeps it") in first[
        "text"
    ]
    assert second["outcome"] == "agreed"
    assert launch.seen(2)[int(comes)] == [{**second, "seconds": ANY}]


@pytest.mark.full
def test_a_rank_that_raises_ends_although_the_keeper_of_the_store_is_stopped(
    launch: Ranks, started: Callable[..., list[WarmProcess]]
) -> None:
    """An interpreter of its own, to its end: whatever torch still wants of the store then."""
    plan = {"0": {"until": "never"}, "1": {"until": "stopped"}}
    command = launch.command(1, 1, patience=1, **plan)
    place = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    keeper, rank = (
        subprocess.Popen([sys.executable, *command], env=launch.environment(**place, RANK=str(rank))) for rank in (0, 1)
    )
    try:
        wait_for(launch.said / "0.joined", launch.said / "1.joined")
        with stopped(keeper.pid):
            (launch.said / "stopped").touch()

            assert rank.wait(HANG_S) == 0
    finally:
        for each in (keeper, rank):
            each.kill()
            each.wait()

    assert only([launch.seen(2)[1]])[0]["outcome"] == "RanksError"


def test_a_store_in_a_file_does_as_well(
    launch: Ranks, started: Callable[..., list[WarmProcess]], tmp_path: Path
) -> None:
    for each in started(2, timeout=TIMEOUT, init_method=f"file://{tmp_path}/store", all={"calls": 2}):
        assert each.wait(HANG_S) == 0

    assert [[each["outcome"] for each in calls] for calls in launch.seen(2)] == [["agreed", "agreed"]] * 2


# Tests in one process.


def test_a_process_on_its_own_returns_its_audit() -> None:
    assert megacpp_overlays.verify_ranks().fingerprint == megacpp_overlays.audit().fingerprint


def test_a_rank_without_a_process_group_gets_an_error_that_says_how_to_make_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "8")

    with pytest.raises(
        RanksError, match=r"WORLD_SIZE is 8, but torch.distributed is not initialised.*init_process_group"
    ):
        megacpp_overlays.verify_ranks()


@pytest.mark.parametrize("timeout", [0, -1, float("nan"), float("inf"), timedelta()])
def test_a_timeout_is_a_span_of_time(timeout: float | timedelta) -> None:
    with pytest.raises(ValueError, match="more than nothing"):
        megacpp_overlays.verify_ranks(timeout=timeout)


def joined(monkeypatch: pytest.MonkeyPatch, **internals: Any) -> None:
    """Make this process the first of two ranks, for a torch.distributed with these internals."""
    world = object()
    distributed = SimpleNamespace(
        is_available=lambda: True,
        is_initialized=lambda: True,
        group=SimpleNamespace(WORLD=world),
        GroupMember=SimpleNamespace(NON_GROUP_MEMBER=object()),
        get_rank=lambda _=world: 0,
        get_world_size=lambda _: 2,
        get_backend=lambda _: "made up",
        get_process_group_ranks=lambda _: [0, 1],
        distributed_c10d=SimpleNamespace(**internals),
        Store=object,
    )
    monkeypatch.setitem(sys.modules, "torch.distributed", distributed)  # type: ignore[arg-type]


def test_a_call_that_was_given_up_asks_nothing_more_when_the_store_answers_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its caller has got the error, and may be in the next call already."""
    asked, answers = threading.Event(), threading.Event()

    class Silent(Memory):
        def check(self, keys: list[str]) -> bool:
            if any(key.endswith("/verdict") for key in keys):
                asked.set()
                answers.wait(HANG_S)
            return super().check(keys)

    store = Silent()
    joined(monkeypatch, _get_default_store=lambda: store)
    monkeypatch.setattr(ranks, "PATIENCE_S", 0.01)

    with pytest.raises(RanksError, match=r"the Silent of the process group has not answered for \d+ s"):
        megacpp_overlays.verify_ranks(timeout=0.01)
    assert asked.is_set()
    before = dict(store.held)
    answers.set()
    for thread in [each for each in threading.enumerate() if each.name == "megacpp_overlays.verify_ranks"]:
        thread.join(HANG_S)

    assert store.held == before  # no verdict about a rank that may be there by now


@pytest.mark.parametrize("left", [b"%%", b"", b"eJxLBAAAAGEAAQ=="], ids=["no base64", "nothing", "cut off"])
def test_an_unreadable_value_of_another_rank_is_not_reported_as_a_lost_store(
    monkeypatch: pytest.MonkeyPatch, left: bytes
) -> None:
    class AnsweringMemory(Memory):
        def check(self, keys: list[str]) -> bool:
            return keys[0].endswith("/verdict")

        def get(self, key: str) -> bytes:
            return left

    joined(monkeypatch, _get_default_store=AnsweringMemory)

    with pytest.raises(
        RanksError, match="rank 0 cannot read what another rank left for it in the AnsweringMemory"
    ) as error:
        megacpp_overlays.verify_ranks()

    assert "look for a rank with another megacpp_overlays" in str(error.value)
    assert "is gone" not in str(error.value)


def test_a_backend_without_a_store_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    joined(monkeypatch, _get_default_store=object)  # a placeholder of the base class, as MPI has it

    with pytest.raises(RanksError, match="no key-value store, as MPI has none"):
        megacpp_overlays.verify_ranks()


def test_a_torch_that_hides_its_store_is_refused_with_a_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    joined(monkeypatch)

    with pytest.raises(RanksError, match=r"compare megacpp_overlays\.audit"):
        megacpp_overlays.verify_ranks()


def test_ranks_that_the_fake_backend_makes_up_are_not_waited_for(run_python: Any) -> None:
    code = """
        import megacpp_overlays
        import torch.distributed as dist
        from torch.testing._internal.distributed.fake_pg import FakeStore
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
        print(megacpp_overlays.verify_ranks(timeout=5).fingerprint == megacpp_overlays.audit().fingerprint)
    """

    assert run_python(textwrap.dedent(code), ROOT, after=warm_python.TORCH).stdout == "True\n"


@pytest.mark.parametrize(
    ("nodes", "restarts", "apart"),
    [("1", ("0", "1"), True), ("1", ("1", "1"), False), ("2", ("0", "1"), False), ("1", ("", ""), False)],
)
def test_ranks_that_one_agent_restarts_do_not_read_values_of_the_failed_ones(
    monkeypatch: pytest.MonkeyPatch, nodes: str, restarts: tuple[str, str], apart: bool
) -> None:
    """With several agents the number of restarts may differ between honest ranks, which must still meet."""
    monkeypatch.setenv("GROUP_WORLD_SIZE", nodes)
    monkeypatch.setattr(rank_exchange, "LINGER_S", 0.0)
    keys = []
    for restart in restarts:
        store = Memory()
        joined(monkeypatch, _get_default_store=lambda store=store: store)
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", restart)
        with pytest.raises(RanksError, match="rank 1 of 2 did not arrive"):
            megacpp_overlays.verify_ranks(timeout=0.01)
        keys.append(store.held.keys())

    assert keys[0].isdisjoint(keys[1]) if apart else keys[0] == keys[1]
