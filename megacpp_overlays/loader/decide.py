"""Policy: one pure function from switch and verdict to decision."""

from __future__ import annotations

from megacpp_overlays.loader.settings import Mode, Switch
from megacpp_overlays.model import Decision, Verdict


def decide(
    *, mode: Mode, switch: Switch, verdict: Verdict, installable: bool, gate: bool = False, opt_in: bool = False
) -> Decision:
    """Return what to do about a finding.

    Args:
        mode: the global setting.
        switch: the setting of this one overlay; `off` beats every mode.
        verdict: what the probe says.
        installable: whether the overlay has seams, a gate advice, for the shape that the probe named.
        gate: whether there is nothing to install, only something to say.
        opt_in: whether the overlay waits to be switched on.

    Returns:
        `ACTIVE` is an order to install; it becomes true only after reach and self-test.
    """
    if switch is Switch.OFF or mode is Mode.OFF:
        return Decision.DISABLED
    if opt_in and switch is not Switch.ON:
        return Decision.DISABLED
    match verdict:
        case Verdict.FIXED:
            return Decision.RETIRED
        case Verdict.ABSENT:
            return Decision.ABSENT
        case Verdict.UNRECOGNISED:
            return Decision.CONFLICT
        case Verdict.BROKEN if not installable:
            return Decision.CONFLICT
        case Verdict.BROKEN if gate:
            return Decision.GATED
        case Verdict.BROKEN:
            return Decision.DISABLED if mode is Mode.OBSERVE else Decision.ACTIVE
