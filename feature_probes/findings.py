"""Names of `source.findings` for probes of plugins that were written when it was here."""

from megacpp_overlays.source.findings import absent, at, broken, finding_of, unknown, unrecognised

__all__ = ["absent", "at", "broken", "finding_of", "unknown", "unrecognised"]
