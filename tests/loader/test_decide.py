"""The decision rule: the whole table."""

from __future__ import annotations

import itertools

import pytest
from made_up import Upstream, gate_of

from megacpp_overlays.loader.decide import Policy, apply, before_import, decide, select
from megacpp_overlays.loader.settings import Mode, Settings, Switch
from megacpp_overlays.model import Body, Decision, Erratum, Evidence, Finding, Proof, Verdict

KNOWN, UNKNOWN = "off-by-one", "off-by-two"
OFF = (Policy.ALL_OFF, Policy.SWITCHED_OFF, Policy.OFF_BY_DEFAULT)


def found(verdict: Verdict, shape: str = KNOWN) -> Finding:
    seen = (Evidence(seen="x + x + 1"),)
    if verdict is Verdict.FIXED:
        return Finding(verdict=verdict, shape=None, evidence=seen, repair=(Body("m", "double"),), proof=Proof.READ)
    return Finding(verdict=verdict, shape=shape, evidence=seen)


def settings_of(erratum: Erratum, mode: Mode, switch: Switch) -> Settings:
    on, off = switch is Switch.ON, switch is Switch.OFF
    ids = frozenset({erratum.id})
    return Settings(mode=mode, enabled=ids if on else frozenset(), disabled=ids if off else frozenset())


@pytest.mark.parametrize("opt_in", [False, True])
@pytest.mark.parametrize(("mode", "switch"), list(itertools.product(Mode, Switch)))
def test_off_beats_everything_then_opt_in_then_the_mode(
    upstream: Upstream, mode: Mode, switch: Switch, opt_in: bool
) -> None:
    overlay = upstream.overlay(opt_in=opt_in)

    policy = select(overlay, settings_of(overlay, mode, switch))

    if mode is Mode.OFF:
        assert policy is Policy.ALL_OFF
    elif switch is Switch.OFF:
        assert policy is Policy.SWITCHED_OFF
    elif opt_in and switch is not Switch.ON:
        assert policy is Policy.OFF_BY_DEFAULT
    else:
        assert policy is (Policy.OBSERVE if mode is Mode.OBSERVE else Policy.APPLY)


@pytest.mark.parametrize(
    ("verdict", "shape", "decision"),
    [
        (Verdict.BROKEN, KNOWN, Decision.ACTIVE),
        (Verdict.BROKEN, UNKNOWN, Decision.CONFLICT),
        (Verdict.FIXED, KNOWN, Decision.RETIRED),
        (Verdict.ABSENT, KNOWN, Decision.ABSENT),
        (Verdict.UNRECOGNISED, KNOWN, Decision.CONFLICT),
    ],
)
def test_only_a_broken_shape_with_seams_is_installed(
    upstream: Upstream, verdict: Verdict, shape: str, decision: Decision
) -> None:
    assert apply(Policy.APPLY, upstream.overlay(), found(verdict, shape)) is decision


@pytest.mark.parametrize(
    ("verdict", "shape", "decision"),
    [
        (Verdict.BROKEN, "no-work", Decision.GATED),
        (Verdict.BROKEN, UNKNOWN, Decision.CONFLICT),
        (Verdict.FIXED, "no-work", Decision.RETIRED),
        (Verdict.ABSENT, "no-work", Decision.ABSENT),
        (Verdict.UNRECOGNISED, "no-work", Decision.CONFLICT),
    ],
)
@pytest.mark.parametrize("policy", [Policy.APPLY, Policy.OBSERVE])
def test_a_gate_speaks_where_it_has_advice_and_observing_changes_nothing_about_that(
    upstream: Upstream, policy: Policy, verdict: Verdict, shape: str, decision: Decision
) -> None:
    assert apply(policy, gate_of(upstream), found(verdict, shape)) is decision


@pytest.mark.parametrize(("verdict", "shape"), list(itertools.product(Verdict, [KNOWN, UNKNOWN])))
def test_observe_decides_as_auto_does_but_never_installs(upstream: Upstream, verdict: Verdict, shape: str) -> None:
    auto = apply(Policy.APPLY, upstream.overlay(), found(verdict, shape))
    observed = apply(Policy.OBSERVE, upstream.overlay(), found(verdict, shape))

    assert observed is (Decision.DISABLED if auto is Decision.ACTIVE else auto)


@pytest.mark.parametrize(("policy", "verdict", "shape"), list(itertools.product(OFF, Verdict, [KNOWN, UNKNOWN])))
def test_an_overlay_that_is_off_is_disabled_with_any_finding(
    upstream: Upstream, policy: Policy, verdict: Verdict, shape: str
) -> None:
    assert apply(policy, upstream.overlay(), found(verdict, shape)) is Decision.DISABLED
    assert apply(policy, gate_of(upstream), found(verdict, shape)) is Decision.DISABLED


VARIABLE = "MEGACPP_OVERLAY_DOUBLE_FIX"


@pytest.mark.parametrize(
    ("mode", "switch", "opt_in", "why"),
    [
        (Mode.OFF, Switch.AUTO, False, "MEGACPP_OVERLAYS=off"),
        (Mode.AUTO, Switch.OFF, True, f"{VARIABLE}=off"),
        (Mode.STRICT, Switch.AUTO, True, f"off by default; {VARIABLE}=on switches it on"),
    ],
)
def test_the_setting_that_holds_an_overlay_back_is_the_reason_before_and_after_its_import(
    upstream: Upstream, mode: Mode, switch: Switch, opt_in: bool, why: str
) -> None:
    overlay = upstream.overlay(opt_in=opt_in)
    settings = settings_of(overlay, mode, switch)

    before, after = before_import(overlay, settings), decide(overlay, settings, found(Verdict.FIXED))

    assert (before.decision, before.reason) == (Decision.DISABLED, why)
    assert (after.decision, after.reason) == (Decision.DISABLED, f"{why}; upstream here is FIXED: x + x + 1")


@pytest.mark.parametrize(
    ("finding", "mode", "reason"),
    [
        (found(Verdict.BROKEN), Mode.OBSERVE, "observe only; would install for shape off-by-one: x + x + 1"),
        (found(Verdict.BROKEN), Mode.AUTO, "x + x + 1"),
        (found(Verdict.BROKEN, UNKNOWN), Mode.AUTO, "no seam for shape off-by-two: x + x + 1"),
        (found(Verdict.BROKEN, "rounded"), Mode.AUTO, "upstream rounds on purpose: x + x + 1"),
        (found(Verdict.UNRECOGNISED, UNKNOWN), Mode.AUTO, "x + x + 1"),
    ],
)
def test_the_reason_of_an_overlay(upstream: Upstream, finding: Finding, mode: Mode, reason: str) -> None:
    overlay = upstream.overlay(unsupported={"rounded": "upstream rounds on purpose"})

    assert decide(overlay, Settings(mode=mode), finding).reason == reason


def test_the_reason_of_a_gate_is_its_effect_and_its_advice(upstream: Upstream) -> None:
    gate = gate_of(upstream)
    advice = "the first double hangs. What to do: install fewer doubles. Seen: x + x + 1"

    assert decide(gate, Settings(), found(Verdict.BROKEN, "no-work")).reason == advice
    assert decide(gate, Settings(), found(Verdict.BROKEN, UNKNOWN)).reason == "x + x + 1"
