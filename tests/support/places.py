"""Where things lie in the checkout, and how long a process may take before it counts as hung."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SUPPORT = ROOT / "tests" / "support"
"""Helpers, which processes of their own find on their path."""
WHEELS = ROOT / ".cache" / "wheels"
"""Wheels of every supported release, fetched by `make wheels` with their hashes checked."""
HANG_S = 3600.0
"""No test measures how busy its host is: this limit only ends what would never end."""
