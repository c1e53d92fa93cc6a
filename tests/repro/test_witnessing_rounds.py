"""The order in which `witness` proves overlays: needed ones first, and once more where the seams of others were missing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from made_up import Upstream

from megacpp_overlays.loader.settings import Settings
from megacpp_overlays.model import Decision, Verdict
from megacpp_overlays.repro import Behaviour, Case, Neighbour, neighbour, runner, witnessing
from megacpp_overlays.repro.judge import Part, Run, RunKind
from megacpp_overlays.repro.neighbour import NeighbourResult
from megacpp_overlays.repro.witnessing import Attempt, WitnessOptions


class Rounds:
    """Overlays whose cases find the defect gone once the seams of certain others were proved."""

    def __init__(self, folder: Path, **missing: set[str]) -> None:
        self.missing = missing
        self.proved: set[str] = set()
        self.tried: list[str] = []
        self.lines: list[str] = []
        self.parts = tuple(Upstream(name, folder).overlay(id=name) for name in missing)
        self.how = WitnessOptions(packs=folder, settings=Settings(), progress=self.lines.append)

    def prove_one(self, _: object, parts: Sequence[Any], how: WitnessOptions, __: object) -> list[Attempt]:
        """Stand for the cases of one overlay."""
        (part,) = parts
        self.tried.append(part.id)
        repaired = self.missing[part.id] <= self.proved
        self.proved |= {part.id} if repaired else set()
        verdict = Verdict.BROKEN if repaired else None
        return [
            Attempt(
                overlay=part.id, target="made", proved=repaired, reason="", verdict=verdict, unrepaired=not repaired
            )
        ]

    def prove(self, monkeypatch: pytest.MonkeyPatch) -> list[Attempt]:
        """Prove all of them."""
        monkeypatch.setattr(witnessing, "_prove_one", self.prove_one)
        return list(witnessing.prove(self.parts, self.parts, self.how))


def test_an_overlay_that_stayed_broken_is_tried_once_more_with_the_seams_of_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rounds = Rounds(tmp_path, first={"second"}, second=set())

    found = rounds.prove(monkeypatch)

    assert rounds.tried == ["first", "second", "first"]
    assert [(each.overlay, each.verdict) for each in found] == [("first", Verdict.BROKEN), ("second", Verdict.BROKEN)]
    printed = [line.partition("; about ")[0] for line in rounds.lines]  # without the estimate of the remaining time
    assert printed == ["1 of 2: first: not proved", "2 of 2: second: BROKEN", "once more: first: BROKEN"]


def test_where_nothing_else_was_proved_no_case_runs_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rounds = Rounds(tmp_path, first={"nothing"}, second={"nothing"})

    found = rounds.prove(monkeypatch)

    assert rounds.tried == ["first", "second"]
    assert not any(each.proved for each in found)


@pytest.mark.parametrize("workers", [1, 3])
def test_an_overlay_that_is_needed_is_proved_before_those_that_need_it(
    workers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two that need each other are proved in some order, and nothing waits for ever."""
    rounds = Rounds(tmp_path, last={"first"}, other=set(), first=set(), one=set(), two=set())
    needs = {"last": ("first",), "one": ("two",), "two": ("one",)}
    rounds.parts = tuple(replace(each, needs=needs.get(each.id, ())) for each in rounds.parts)
    rounds.how = replace(rounds.how, workers=workers)

    found = rounds.prove(monkeypatch)

    assert {each.overlay for each in found if each.proved} == {"last", "other", "first", "one", "two"}
    assert sorted(rounds.tried) == ["first", "last", "one", "other", "two"]  # each once


def ended(number: float, decision: Decision = Decision.ACTIVE) -> Run:
    """A run that is not broken, with the number of its neighbour."""
    part = Part(
        module="made", verdict=Verdict.UNRECOGNISED, shape="one", evidence="", decision=decision, reason="", sources={}
    )
    return Run(
        kind=RunKind.SOUND, seen="", parts=(part,), beside={"no-mask": NeighbourResult(numbers={"loss": [number]})}
    )


@pytest.mark.parametrize(("with_others", "problem"), [(2.0, None), (3.0, "neighbour no-mask is not the same")])
def test_a_neighbour_that_another_overlay_changes_is_compared_with_that_one_in(
    with_others: float, problem: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case(name="made", overlay="first", device="cpu", versions=(), run=lambda: Behaviour(broken=True, seen=""))
    no_mask = Neighbour(name="no-mask", overlay="first", run=dict)
    monkeypatch.setattr(neighbour, "of", lambda *_: (no_mask,))
    monkeypatch.setattr(runner, "without_case", lambda *_: ended(with_others))
    how = WitnessOptions(packs=tmp_path, settings=Settings())
    pack = SimpleNamespace(folder=tmp_path, reproducer=tmp_path / "reproduce.py")
    part = Upstream("first", tmp_path).overlay(id="first")
    measuring = witnessing._CaseRunner(pack, (case,), (), part, how)  # type: ignore[arg-type] # it has every attribute that is read

    found = measuring._problem(witnessing._Ran(case, ended(1.0), ended(2.0)), {"made": "one"})

    assert found is None if problem is None else str(found).startswith(problem)
