"""Names of `source.repairs` for probes of plugins that were written when it was here."""

from megacpp_overlays.source.repairs import Repairs, judged, meaning, table

__all__ = ["Repairs", "judged", "meaning", "table"]
