"""Ask a probe: one place for what it means when a probe itself fails."""

from __future__ import annotations

from megacpp_overlays.errors import SourceError
from megacpp_overlays.model import Evidence, Finding, Overlay, Verdict
from megacpp_overlays.source.trees import SourceTree


def examine(overlay: Overlay, tree: SourceTree) -> Finding:
    """Run the probe of an overlay or a gate. A probe that fails has not recognised what it saw."""
    try:
        return overlay.probe(tree)
    except Exception as error:  # noqa: BLE001 - whatever a probe trips over is a shape it does not know
        return unreadable(error)


def unreadable(error: Exception) -> Finding:
    """Return the finding of a probe that raised: a `SourceError` is itself the evidence."""
    seen = Evidence(seen=f"the probe could not read it: {type(error).__name__}: {error}")
    if isinstance(error, SourceError):
        seen = Evidence(seen=str(error), file=error.file, line=error.line)
    return Finding(verdict=Verdict.UNRECOGNISED, shape=None, evidence=(seen,))
