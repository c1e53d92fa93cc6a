"""Decision rule, as tables: select a policy from the settings, then apply it to the finding of a probe.

Pure functions. The precedence of mode, switch and opt-in is defined in `select` alone.
"""

from __future__ import annotations

import enum
from typing import Protocol

from megacpp_overlays.loader.settings import MODE, Mode, Settings, Switch
from megacpp_overlays.model import Decision, Erratum, Finding, Record, Verdict


class Policy(enum.Enum):
    """The policy of the settings for one erratum, independent of upstream's source."""

    ALL_OFF = enum.auto()
    SWITCHED_OFF = enum.auto()
    OFF_BY_DEFAULT = enum.auto()
    OBSERVE = enum.auto()
    APPLY = enum.auto()


_OFF = {
    Policy.ALL_OFF: f"{MODE}=off",
    Policy.SWITCHED_OFF: "{variable}=off",
    Policy.OFF_BY_DEFAULT: "off by default; {variable}=on switches it on",
}
"""The policies that switch an erratum off, each with its reason."""

_LOOKS_REPAIRED = "it looks repaired, but this form is not on record; `megacpp-overlays witness {id}` can prove it here"
_UNPUBLISHED = (
    "this repair was read, but these files are of no published release, so an edit elsewhere may have undone it; "
    "`megacpp-overlays witness {id}` can prove it here"
)

_NOT_BROKEN = {
    Verdict.FIXED: Decision.RETIRED,
    Verdict.ABSENT: Decision.ABSENT,
    Verdict.UNRECOGNISED: Decision.CONFLICT,
}
_UNPROVED = "not a release that this package knows, and nothing is proved of it here; `megacpp-overlays witness` runs its reproducer"
_NOT_REPAIRED = "broken here, and its reproducer showed no repair; `megacpp-overlays witness {id}` runs it again"


NOT_REPAIRED = "not repaired"
"""The shape of a source that its reproducer showed to be broken, alone and under every seam that can be placed."""


class Switchable(Protocol):
    """An object with a switch: an erratum, or its line in a list."""

    @property
    def id(self) -> str:
        """The id from which the name of its variable is formed."""

    @property
    def off_by_default(self) -> bool:
        """Whether it stays off until its variable says `on`."""


def is_off(erratum: Switchable, settings: Settings) -> bool:
    """Return whether the settings, or its default, switch an erratum off."""
    return select(erratum, settings) in _OFF


def select(erratum: Switchable, settings: Settings) -> Policy:
    """Return the policy for an erratum: off has precedence over any other setting, and the mode over its switch."""
    switch = settings.switch(erratum.id)
    if settings.mode is Mode.OFF:
        return Policy.ALL_OFF
    if switch is Switch.OFF:
        return Policy.SWITCHED_OFF
    if erratum.off_by_default and switch is not Switch.ON:
        return Policy.OFF_BY_DEFAULT
    return Policy.OBSERVE if settings.mode is Mode.OBSERVE else Policy.APPLY


def apply(policy: Policy, erratum: Erratum, finding: Finding) -> Decision:
    """Return the decision for a finding. `ACTIVE` is an order to install, and holds only after the self-test has passed."""
    if policy in _OFF:
        return Decision.DISABLED
    if finding.candidates or finding.unpublished:
        return Decision.UNPROVED
    if finding.verdict is not Verdict.BROKEN:
        return _NOT_BROKEN[finding.verdict]
    if not erratum.answers(finding.shape):
        return Decision.CONFLICT
    if policy is Policy.OBSERVE and erratum.remedy is Decision.ACTIVE:
        return Decision.DISABLED
    return erratum.remedy


def before_import(erratum: Erratum, settings: Settings) -> Record:
    """Return the record of an erratum whose probe has not run yet."""
    policy = select(erratum, settings)
    if policy in _OFF:
        return Record(overlay=erratum, decision=Decision.DISABLED, reason=_off(policy, erratum))
    reason = f"waits for the import of {erratum.target.module}"
    return Record(overlay=erratum, decision=Decision.ARMED, reason=reason)


def decide(erratum: Erratum, settings: Settings, finding: Finding) -> Record:
    """Return the record of an erratum whose probe has run."""
    policy = select(erratum, settings)
    decision = apply(policy, erratum, finding)
    return Record(
        overlay=erratum, decision=decision, reason=_reason(policy, erratum, finding, decision), finding=finding
    )


def _reason(policy: Policy, erratum: Erratum, finding: Finding, decision: Decision) -> str:
    seen, advice = finding.summary(), erratum.unsupported.get(finding.shape or "")
    if finding.unpublished:
        seen = f"{seen}; {_UNPUBLISHED.format(id=erratum.id)}"
    elif finding.looks_repaired:
        seen = f"{seen}; {_LOOKS_REPAIRED.format(id=erratum.id)}"
    elif finding.candidates:
        seen = f"{_UNPROVED}; seen: {seen}"
    elif finding.shape == NOT_REPAIRED:
        seen = f"{_NOT_REPAIRED.format(id=erratum.id)}; seen: {seen}"
    elif finding.verdict is Verdict.BROKEN and finding.proof is not None:
        seen = f"{finding.proof.value}: {seen}"
    if policy in _OFF:
        return f"{_off(policy, erratum)}; upstream here is {finding.verdict.value}: {seen}"
    if decision is Decision.DISABLED:
        return f"observe only; would install for shape {finding.shape}: {seen}"
    if decision is Decision.RETIRED and finding.proof is not None:
        return f"{finding.proof.value}: {seen}"
    if decision is Decision.GATED:
        return f"{erratum.breaks}. What to do: {advice}. Seen: {seen}"
    if decision is Decision.CONFLICT and erratum.remedy is Decision.ACTIVE:
        if advice is not None:
            return f"{advice}: {seen}"
        if finding.verdict is Verdict.BROKEN and finding.shape != NOT_REPAIRED:
            return f"no seam for shape {finding.shape}: {seen}"
    return seen


def _off(policy: Policy, erratum: Erratum) -> str:
    return _OFF[policy].format(variable=erratum.variable)
