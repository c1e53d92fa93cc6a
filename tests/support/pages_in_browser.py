"""A headless Chromium for tests of pages."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from typing import Any

import pytest
from places import ROOT
from playwright.sync_api import sync_playwright


def chromium() -> Iterator[Any]:
    """Start a browser: of this machine, or the one that `scripts/browser.sh --fetch` brings; without any, skip."""
    done = subprocess.run([ROOT / "scripts" / "browser.sh"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    if not done.stdout:
        pytest.skip("no chromium here: install one, or run scripts/browser.sh --fetch")
    with sync_playwright() as started:
        launched = started.chromium.launch(executable_path=done.stdout.strip(), args=["--no-sandbox"])
        yield launched
        launched.close()
