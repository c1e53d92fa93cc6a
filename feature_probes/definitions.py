"""Names of `source.definitions` for probes of plugins that were written when it was here."""

from megacpp_overlays.source.definitions import *  # noqa: F403 - all that is public there
