"""Policy: the whole table."""

from __future__ import annotations

import itertools

import pytest

from megacpp_overlays.loader.decide import decide
from megacpp_overlays.loader.settings import Mode, Switch
from megacpp_overlays.model import Decision, Verdict


@pytest.mark.parametrize("mode", [Mode.AUTO, Mode.STRICT])
@pytest.mark.parametrize(
    ("verdict", "installable", "decision"),
    [
        (Verdict.BROKEN, True, Decision.ACTIVE),
        (Verdict.BROKEN, False, Decision.CONFLICT),
        (Verdict.FIXED, True, Decision.RETIRED),
        (Verdict.FIXED, False, Decision.RETIRED),
        (Verdict.ABSENT, True, Decision.ABSENT),
        (Verdict.ABSENT, False, Decision.ABSENT),
        (Verdict.UNRECOGNISED, True, Decision.CONFLICT),
        (Verdict.UNRECOGNISED, False, Decision.CONFLICT),
    ],
)
def test_only_a_broken_shape_with_seams_is_installed(
    mode: Mode, verdict: Verdict, installable: bool, decision: Decision
) -> None:
    assert decide(mode=mode, switch=Switch.AUTO, verdict=verdict, installable=installable) is decision


@pytest.mark.parametrize(("verdict", "installable"), list(itertools.product(Verdict, [True, False])))
def test_observe_decides_as_auto_does_but_never_installs(verdict: Verdict, installable: bool) -> None:
    auto = decide(mode=Mode.AUTO, switch=Switch.AUTO, verdict=verdict, installable=installable)
    observed = decide(mode=Mode.OBSERVE, switch=Switch.AUTO, verdict=verdict, installable=installable)

    assert observed is (Decision.DISABLED if auto is Decision.ACTIVE else auto)


@pytest.mark.parametrize(("mode", "verdict", "installable"), list(itertools.product(Mode, Verdict, [True, False])))
def test_off_beats_everything(mode: Mode, verdict: Verdict, installable: bool) -> None:
    assert decide(mode=mode, switch=Switch.OFF, verdict=verdict, installable=installable) is Decision.DISABLED
    assert decide(mode=Mode.OFF, switch=Switch.AUTO, verdict=verdict, installable=installable) is Decision.DISABLED
