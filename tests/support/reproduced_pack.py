"""Fixture and assertion of a pack whose cases run on real releases, in a process for each: without its overlay and with it."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Collection
from typing import Any

import pytest
from installed import python_of
from places import ROOT, SUPPORT
from released_megatron import ALL_ON
from releases import only


def measured_on(
    pack: str, *releases: str, switched_on: bool = False, daily: Collection[str] = (), neighbours: bool = False
) -> Any:
    """Return a fixture, to be bound to `measured`: the results of each release with the overlay and without it.

    Args:
        pack: two digits of its number.
        releases: of megatron-core.
        switched_on: whether overlays that are off by default are on.
        daily: releases whose tests are not marked `full`: none where tests of every day run the newest one in their own process.
        neighbours: whether those of the pack are run, too.
    """
    words = ["neighbours"] if neighbours else []

    @pytest.fixture(scope="module", params=only(releases, daily), name="measured")
    def measured(request: pytest.FixtureRequest, megatron_says: Callable[..., Any]) -> Any:
        switches = ALL_ON if switched_on else {}
        return megatron_says(request.param, SUPPORT / "reproduced.py", pack, *words, **switches)

    return measured


def assert_repaired(measured: Any, *, parts: int = 1, may_be_blocked: Collection[str] = ()) -> None:
    """Check that the overlay is active in all of its parts, and that each case is broken without it and right with it.

    Args:
        measured: of one release.
        parts: of the overlay.
        may_be_blocked: cases that some of the releases cannot be asked.
    """
    assert [decision for _, decision, _ in measured["decisions"]] == ["active"] * parts, measured["decisions"]
    blocked = {
        name for name in may_be_blocked if "blocked" in measured["off"][name] and "blocked" in measured["on"][name]
    }
    assert all(case["broken"] for name, case in measured["off"].items() if name not in blocked)
    assert not any(case["broken"] for name, case in measured["on"].items() if name not in blocked)
    assert measured["off"].keys() - blocked


def assert_neighbours_are_the_same(measured: Any, *, may_be_absent: Collection[str] = ()) -> None:
    """Check that results of neighbours are the same with the overlay as without it, and that each was measured.

    Args:
        measured: of one release, with neighbours.
        may_be_absent: neighbours that some of the releases cannot be asked.
    """
    found = measured["neighbours"]
    assert found["problems"] == []
    assert {*found["absent"]} <= {*may_be_absent}
    assert found["measured"]


def reproduced_in(lane: str, pack: str, **variables: str) -> Any:
    """Return the observations of the cases of a pack in the environment of a lane, with every overlay and with none.

    Args:
        lane: see `python_of`.
        pack: two digits of its number.
        variables: of its environment.
    """
    return answer_of("reproduced.py", pack, lane=lane, **variables)


def answer_of(script: str, *words: str, lane: str = "current", **variables: str) -> Any:
    """Return the JSON that a script of `tests/support` prints in a fresh interpreter of a lane."""
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    command = [python_of(lane), "-W", "ignore", SUPPORT / script, *words]
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": path, **variables}, stdout=subprocess.PIPE, check=True
    )
    return json.loads(done.stdout)
