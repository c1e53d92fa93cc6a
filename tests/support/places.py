"""Where things lie in the checkout, and what processes of tests have in common: a limit, and what they leave out."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SUPPORT = ROOT / "tests" / "support"
"""Helpers, which processes of their own find on their path."""
WHEELS = ROOT / ".cache" / "wheels"
"""Wheels of every supported release, fetched by `make wheels` with their hashes checked."""
HANG_S = 3600.0
"""No test measures how busy its host is: this limit only ends what would never end."""
UNMEASURED = {"COVERAGE_PROCESS_CONFIG": "", "COVERAGE_PROCESS_START": ""}
"""Variables of a process whose coverage nobody needs, as another one runs the same lines of the package.

On Python 3.12 branches are measured by tracing every line of every library: importing torch then takes twice as long.
"""
