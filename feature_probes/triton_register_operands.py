"""Products on Hopper whose left operand a Triton kernel makes in registers.

In a loop that Triton pipelines, and with eight warps, 3.4.0 to 3.6.0 write registers again while products that read them are
under way: results are wrong without an error. 3.3.1 and 3.7.0 to 3.9.0 are right. That was measured, kernel by kernel, in all
of them but 3.5.0; see pack 43.

The verdict rests on the text of the module that calls the compiler, which itself is a library without source in its wheel. The
text is the same on every platform.
"""

from __future__ import annotations

from megacpp_overlays.model import Finding, Target
from megacpp_overlays.source import forms
from megacpp_overlays.source.trees import SourceTree

TARGET = Target(distribution="triton", module="triton.backends.nvidia.compiler", symbol="CUDABackend")
WRITTEN_AGAIN = "written-again"


def probe(tree: SourceTree) -> Finding:
    """Return whether such products may be wrong, by the release of the compiler."""
    return forms.finding("triton-register-operands", TARGET, tree)
