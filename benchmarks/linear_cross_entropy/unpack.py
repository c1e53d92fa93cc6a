"""Unpack the peers of linear_cross_entropy.py, each into a folder of its own.

    python benchmarks/linear_cross_entropy/unpack.py FOLDER WHEELS...

WHEELS are folders with wheels; a wheel may lie there in pieces, NAME.whl.0, NAME.whl.1 and so on, in any of them. A peer
ends up in FOLDER/PEER/site-packages. The folder needs that name: quack-kernels takes code elsewhere for its
users' own, inspects it, and rejects the code of nvidia-cutlass-dsl.
"""

from __future__ import annotations

import sys
import zipfile
from pathlib import Path

PEERS = {
    "liger-0.8.1": ("liger_kernel-0.8.1",),
    "liger-0.8.5": ("liger_kernel-0.8.5",),
    "cut-cross-entropy": ("cut_cross_entropy-",),
    "verl": ("verl-",),
    "megatron": ("megatron_core-0.19.2",),
    "quack": ("quack_kernels-", "einops-"),
    "cute": ("nvidia_cutlass_dsl", "apache_tvm_ffi-", "torch_c_dlpack_ext-", "protobuf-"),
    "cuda": ("cuda_bindings-", "cuda_pathfinder-"),
}
"""Beginnings of the names of the wheels of each peer. Others need `cute` and `cuda`."""


def main() -> None:
    """Unpack the wheels of each peer, and print the peers that have none."""
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    target, *places = map(Path, sys.argv[1:])
    found = wheels(places, target / "joined")
    for peer, beginnings in PEERS.items():
        mine = [wheel for wheel in found if wheel.name.startswith(beginnings)]
        for wheel in mine:
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(target / peer / "site-packages")
        print(f"{peer}: {', '.join(wheel.name.rsplit('-', 3)[0] for wheel in mine) or 'no wheel'}")


def wheels(places: list[Path], joined: Path) -> list[Path]:
    """Return the wheels of some folders, those in pieces put together."""
    found = [wheel for place in places for wheel in sorted(place.glob("*.whl"))]
    pieces: dict[str, list[Path]] = {}
    for piece in sorted(
        (piece for place in places for piece in place.glob("*.whl.[0-9]")), key=lambda piece: piece.name
    ):
        pieces.setdefault(piece.stem, []).append(piece)
    for name, parts in pieces.items():
        joined.mkdir(parents=True, exist_ok=True)
        (joined / name).write_bytes(b"".join(part.read_bytes() for part in parts))
        found.append(joined / name)
    return found


if __name__ == "__main__":
    main()
