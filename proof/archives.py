"""Source archives of upstreams, and the part of an archive that is unpacked."""

from __future__ import annotations

import tarfile
from pathlib import Path

from processes import ProofError

LIGER = "liger_kernel-0.8.5"
"""The release whose tests are run, and whose code is repaired: both are in its source archive."""


def unpack(archives: Path, stem: str, part: str, folder: Path) -> Path:
    """Unpack one folder of an archive and return where it lies.

    Args:
        archives: the folder of the archives.
        stem: of the archive, its name and version.
        part: the folder in it, such as `test`.
        folder: where to put it; the part keeps its name.

    Raises:
        ProofError: there is no such archive, or nothing of the part in it.
    """
    path = archives / f"{stem}.tar.gz"
    if not path.is_file():
        raise ProofError(f"there is no {path}: `make proof-cpu` fetches it, its hash checked")
    with tarfile.open(path) as archive:
        members = [each for each in archive.getmembers() if each.name.startswith(f"{stem}/{part}/")]
        if not members:
            raise ProofError(f"{path} has no folder {part}: fetch it again with `make proof-cpu`")
        archive.extractall(folder, members, filter="data")
    return folder / stem / part
