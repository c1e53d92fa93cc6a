"""Names of `source.definitions` for probes of plugins that were written when it was here."""

from megacpp_overlays.source.definitions import (
    binders,
    called,
    calls,
    plain_class,
    plain_function,
    statements,
    ways_out,
    words,
)

__all__ = ["binders", "called", "calls", "plain_class", "plain_function", "statements", "ways_out", "words"]
