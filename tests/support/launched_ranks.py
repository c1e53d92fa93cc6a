"""Real processes of a distributed group: planned in a folder, run under torchrun or alone, and the reports of each of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import warm_python
from made_up import BROKEN_TEXT, Upstream, install_plugin
from places import HANG_S, ROOT, SUPPORT, measuring

LAUNCHER = SUPPORT.joinpath("ranks_launcher.py")


TIMEOUT = HANG_S
"""For ranks that are all expected: eight processes that import torch at once on a busy host take their time."""


class Ranks:
    """A folder in which launches of ranks are planned and leave their reports."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.made_up = Upstream("upstream_of_ranks", folder)
        self.made_up.write(BROKEN_TEXT)
        self.made_up.write(
            "from made_up import Upstream\nOVERLAY = Upstream('upstream_of_ranks', None).overlay()\n", "plugin"
        )
        install_plugin(folder, "upstream_of_ranks.plugin:OVERLAY")

    def command(self, timeout: float, expected: int, **plan: Any) -> list[str]:
        self.said = self.folder / "said"
        self.said.mkdir()
        plan = {"all": {}, "timeout": timeout, "expected": expected, **plan}
        (self.folder / "plan.json").write_text(json.dumps(plan))
        return [str(LAUNCHER), str(self.folder / "plan.json"), str(self.said)]

    def environment(self, **variables: str) -> dict[str, str]:
        given = os.environ.get("PYTHONPATH")
        path = os.pathsep.join([*map(str, (self.folder, LAUNCHER.parent, ROOT)), *([given] if given else [])])
        ours = {"PYTHONPATH": path, "MEGACPP_OVERLAYS_PLUGINS": "double", "MEGACPP_OVERLAYS_LOG": "logging"}
        return {**os.environ, **ours, "OMP_NUM_THREADS": "1", **variables}

    def torchrun(
        self,
        size: int,
        *,
        timeout: float = TIMEOUT,
        absent: int = 0,
        measured: bool = False,
        fresh: bool = False,
        **plan: Any,
    ) -> list[Any]:
        """Run all ranks under torchrun; return the report of each of them, by rank.

        Args:
            size: how many ranks.
            timeout: that of `verify_ranks`, in seconds.
            absent: how many will leave no word.
            measured: whether coverage is measured in them.
            fresh: whether agent and ranks are started as a user's are, and not copied from one that has torch.
            plan: see `ranks_launcher`.
        """
        env = self.environment(**(measuring() if measured else {}))
        agent = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(size)]
        command = self.command(timeout, size - absent, **plan)
        if fresh:
            words = [sys.executable, *agent, *command]
            done = subprocess.run(words, env=env, capture_output=True, text=True, check=False, timeout=HANG_S)
        else:
            rank = [sys.executable, "-S", warm_python.__file__, warm_python.address(env), *command]
            done = warm_python.run([*agent, "--no-python", *rank], env, timeout=HANG_S)
        assert done.returncode == 0, done.stdout + done.stderr
        return self.seen(size)

    def agent(self, size: int, *, timeout: float, absent: int = 0, **plan: Any) -> subprocess.Popen[bytes]:
        """Start torchrun, which keeps the store, and all ranks under it."""
        words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(size)]
        command = self.command(timeout, size - absent, **plan)
        return subprocess.Popen([sys.executable, *words, *command], env=self.environment())

    def seen(self, size: int) -> list[Any]:
        files = [self.said / f"{rank}.json" for rank in range(size)]
        return [json.loads(file.read_text()) if file.exists() else None for file in files]


def only(seen: list[Any]) -> list[Any]:
    """Return the one call that each rank made."""
    return [each[0] for each in seen]


def same_error(found: list[Any]) -> Any:
    """Return the error that every rank raised, which is one text and one table."""
    assert {each["outcome"] for each in found} == {"RanksError"}, found
    assert len({each["text"] for each in found}) == 1
    assert all(each["differences"] == found[0]["differences"] for each in found)
    return found[0]
