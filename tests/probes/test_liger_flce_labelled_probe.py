"""The probe of pack 46: its reason, and a seam only for releases whose contract is known."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from probing import ask, parsed_once

from megacpp_overlays.feature_probes.liger_flce_labelled import EVERY_TOKEN, OLDER
from megacpp_overlays.model import Verdict
from megacpp_overlays.overlays.liger_flce_labelled import OVERLAY

Wheel = Callable[[str, str], Path]

RELEASES = {"0.1.0": OLDER, "0.8.1": OLDER, "0.8.2": EVERY_TOKEN, "0.8.5": EVERY_TOKEN}


@pytest.mark.upstream
@pytest.mark.parametrize("version", RELEASES)
def test_releases_compute_every_token(wheel: Wheel, version: str) -> None:
    found = ask(OVERLAY.probe, parsed_once(wheel("liger-kernel", version)))

    assert (found.verdict, found.shape) == (Verdict.BROKEN, RELEASES[version]), found.summary()
    assert "every token goes through the products" in found.summary()


@pytest.mark.upstream
def test_a_release_that_was_read_is_named(wheel: Wheel) -> None:
    assert "as in 0.8.3" in OVERLAY.probe(parsed_once(wheel("liger-kernel", "0.8.3"))).summary()
