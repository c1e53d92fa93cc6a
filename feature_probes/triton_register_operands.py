"""Products on Hopper whose left operand a Triton kernel makes in registers.

In a loop that Triton pipelines, and with eight warps, 3.4.0 to 3.6.0 write registers again while products that read them are
under way: results are wrong without an error. The compiler is a library without source in its wheel, so a release is known
by the text of the module that calls it. Whether releases are right was measured, kernel by kernel; see pack 43.
"""

from __future__ import annotations

from megacpp_overlays.feature_probes.findings import absent, broken, fixed, unknown
from megacpp_overlays.model import Evidence, Finding, Target, Text
from megacpp_overlays.source.trees import SourceTree, check_length

TARGET = Target(distribution="triton", module="triton.backends.nvidia.compiler", symbol="CUDABackend")
WRITTEN_AGAIN = "written-again"

_WRONG = {
    "703cffec3481886c": "3.4.0",
    "3e3d33fbab70c7c0": "3.5.0 and 3.5.1",
    "eea55698bab00c72": "3.6.0",
}
_RIGHT = {
    "78995dd40c4e5496": "3.3.1",
    "d012f2a7e705592e": "3.7.0 and 3.7.1",
    "e898d9a654e9e51a": "3.8.0",
    "57d5191d8b256f76": "3.9.0",
}
"""Releases by the text of the module; all but 3.5.0 were measured. The text is the same on every platform."""


def probe(tree: SourceTree) -> Finding:
    """Return whether such products may be wrong, by the release of the compiler."""
    source = tree.module(TARGET.module)
    if source is None:
        return absent(f"there is no {TARGET.module}")
    digest = source.sha256[:16]
    if digest in _WRONG:
        return broken(WRITTEN_AGAIN, Evidence(seen=f"the compiler of {_WRONG[digest]}", file=source.path))
    if digest in _RIGHT:
        seen = Evidence(seen=f"the compiler of {_RIGHT[digest]}, whose products were right", file=source.path)
        return fixed(seen, repair=[Text(source.path, digest)])
    check_length(source.path, source.text)
    raise unknown(source, None, f"it belongs to a compiler that nobody measured: {digest}")
