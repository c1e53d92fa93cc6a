"""Versions of distributions: correct, and never a reason to fail."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable
from pathlib import Path

import pytest
from made_up import Upstream

from megacpp_overlays.loader.session import Session
from megacpp_overlays.model import Decision
from megacpp_overlays.source import distributions


def install(upstream: Upstream, metadata: str) -> None:
    info = upstream.folder / f"{upstream.name}-1.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(metadata)


def test_the_version_of_an_installed_distribution(upstream: Upstream) -> None:
    install(upstream, f"Metadata-Version: 2.1\nName: {upstream.name}\nVersion: 1.2\n")

    assert distributions.version(upstream.name) == "1.2"
    assert distributions.describe(upstream.name, upstream.load().__file__) == "1.2"
    assert distributions.describe(upstream.name, None) == "1.2"


def test_a_module_from_elsewhere_is_not_passed_off_as_the_installed_version(upstream: Upstream) -> None:
    install(upstream, f"Metadata-Version: 2.1\nName: {upstream.name}\nVersion: 1.2\n")

    assert distributions.describe(upstream.name, "/src/core/layers.py") == "1.2, but loaded from /src/core/layers.py"


def test_a_distribution_that_is_not_installed_has_no_version() -> None:
    assert distributions.version("no-such-distribution") is None
    assert distributions.describe("no-such-distribution", None) is None
    assert distributions.describe("no-such-distribution", "/src/x.py") == "unversioned, loaded from /src/x.py"


def test_damaged_metadata_is_said_and_does_not_switch_a_fix_off(
    upstream: Upstream, session: Callable[..., Session], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(_: str) -> importlib.metadata.Distribution:
        raise UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte")

    monkeypatch.setattr(importlib.metadata, "distribution", broken)
    current = session(upstream.overlay())
    current.arm()
    upstream.load()

    record = current.audit().records[0]

    assert record.decision is Decision.ACTIVE
    assert (record.version or "").startswith("unreadable version (UnicodeDecodeError: ")


def test_a_link_to_the_module_is_followed(upstream: Upstream, tmp_path: Path) -> None:
    install(upstream, f"Metadata-Version: 2.1\nName: {upstream.name}\nVersion: 1.2\n")
    link = tmp_path.parent / f"link_to_{upstream.name}"
    link.symlink_to(tmp_path)

    assert distributions.describe(upstream.name, str(link / upstream.name / "layers.py")) == "1.2"
