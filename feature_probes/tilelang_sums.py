"""Identify how the installed TileLang lowers sums, from the C++ that it ships: the release of the text, and its checks."""

from __future__ import annotations

from megacpp_overlays.errors import SourceError
from megacpp_overlays.feature_probes import cpp_source
from megacpp_overlays.frozen import NamedTuple
from megacpp_overlays.model import Text
from megacpp_overlays.source.trees import ShippedFile, SourceTree, shipped

CHECK = "ReduceOp cannot lower a layout where a source index depends on a"
"""What 0.1.13 (tile-ai/tilelang#2424) and newer say when they refuse a sum."""

_FILES = ("src/backend/common/op/reduce.h", "src/op/reduce.cc")
"""Where sums are lowered since 0.1.10, and where up to 0.1.9; newer ones have another file of the second name."""
_READ = {
    "3410d30a989504ce": "0.1.8",
    "e2818537767288da": "0.1.9",
    "d093f9826b4feace": "0.1.10",
    "618a3bf4e023b243": "0.1.11",
    "b5a70ea1f576da03": "0.1.12",
    "f6c4631469f64c8a": "0.1.13",
    "22813cd1e77f6958": "0.1.14",
    "888a717013bd207b": "0.1.15",
}
"""Releases that were read, by the text of the file. It is the same on every platform."""


class Sums(NamedTuple):
    """The file that lowers sums."""

    file: ShippedFile
    digest: str
    release: str | None
    """None where nobody read this text."""

    @property
    def text(self) -> Text:
        """What is compared: the whole file."""
        return Text(self.file.path, self.digest)

    @property
    def checks(self) -> bool:
        """Whether it refuses what it cannot prove."""
        return CHECK in self.file.text

    def unknown(self) -> SourceError:
        """Return the error that a probe raises where it needs to know this text."""
        return SourceError(f"sums are lowered in a way that nobody read, {self.digest}", file=self.file.path)


def read(tree: SourceTree) -> Sums:
    """Return how sums are lowered.

    Raises:
        SourceError: tilelang ships nothing that says so, or the file cannot be read.
    """
    for path in _FILES:
        if (file := shipped(tree, "tilelang", path)) is not None:
            digest = cpp_source.digest(file.text)
            return Sums(file, digest, _READ.get(digest))
    raise SourceError("tilelang ships nothing that says how it lowers sums")
