"""The advice on a release of latent MoE that no seam repairs."""

from __future__ import annotations

from megacpp_overlays.feature_probes.latent_moe_fc2_init import SCALED_BY_SPECIFICATION
from megacpp_overlays.overlays.latent_moe_fc2_init import PARTS


def test_a_release_that_no_argument_reaches_is_not_repaired_and_names_the_way_out() -> None:
    for part in PARTS:
        assert "0.17.0 or newer" in part.unsupported[SCALED_BY_SPECIFICATION]
