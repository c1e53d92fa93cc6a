"""The probe for outputs that are freed although they are the input: trees without the class."""

from __future__ import annotations

from probing import Texts, ask

from megacpp_overlays.feature_probes.residual_norm_recompute_alias import ENGINE, TARGET, probe
from megacpp_overlays.model import Verdict

HAS_THE_NORM = {ENGINE: "class TEFusedResidualRMSNorm: pass"}


def test_a_missing_target_is_absent() -> None:
    assert ask(probe, Texts({TARGET.module: None, **HAS_THE_NORM})).verdict is Verdict.ABSENT
    assert ask(probe, Texts({TARGET.module: "class Other: pass", **HAS_THE_NORM})).verdict is Verdict.ABSENT


def test_an_imported_or_inherited_class_is_not_absent() -> None:
    from_elsewhere = "from vendor import CheckpointWithoutOutput\n"
    inherited = "class CheckpointWithoutOutput(Other): pass\n"

    assert ask(probe, Texts({TARGET.module: from_elsewhere, **HAS_THE_NORM})).verdict is Verdict.UNRECOGNISED
    assert ask(probe, Texts({TARGET.module: inherited, **HAS_THE_NORM})).verdict is Verdict.UNRECOGNISED
