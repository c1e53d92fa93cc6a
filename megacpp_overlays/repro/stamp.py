"""Stamp of a run: the first line of a reproducer's output, with the hardware and the versions of the software.

It names no host, no user and no path.
"""

from __future__ import annotations

import datetime
import hashlib
import os
import platform
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import megacpp_overlays
from megacpp_overlays.errors import OverlayError
from megacpp_overlays.model import Target
from megacpp_overlays.repro import inventory, trees
from megacpp_overlays.repro.case import Case
from megacpp_overlays.runtime import visible_gpus
from megacpp_overlays.source import distributions
from megacpp_overlays.source.trees import InstalledTree
from megacpp_overlays.version import VERSION

OWN = "megacpp-overlays"
FROM_TREE = "from --tree"


@dataclass(frozen=True, slots=True, kw_only=True)
class Stamp:
    """Origin of a log. The fields are those of a receipt."""

    host: Mapping[str, Any]
    """machine, processor, cpus, system, python and gpu; gpu is None or has name, capability, driver and count."""
    versions: Mapping[str, str]
    """Version by distribution; `from --tree` for a package of a source tree."""
    tree: Mapping[str, str] | None
    """None, or the git id of each package folder, and `commit` where the tree is a checkout, or the name of the
    `stand-in` where the tree is one."""
    reproducer: str
    """First 12 digits of the sha256 of `reproduce.py`."""
    date: str
    """Day of the run, UTC, as 2026-11-21."""

    def line(self) -> str:
        """Return the stamp as the first line of a log."""
        host = self.host
        parts = [
            f"host: {host['machine']}, {host['processor']}, {host['cpus']} CPUs, {host['system']}, "
            f"Python {host['python']}, {_gpu(host['gpu'])}",
            "versions: " + ", ".join(f"{name} {version}" for name, version in self.versions.items()),
            f"reproduce.py: {self.reproducer}",
            f"date: {self.date}",
        ]
        if self.tree is not None:
            kind = f"stand-in {self.tree[trees.STAND_IN]}" if trees.STAND_IN in self.tree else "tree"
            ids = (f"{name} {found}" for name, found in self.tree.items() if name != trees.STAND_IN)
            parts.append(f"{kind}: " + ", ".join(ids))
        return " | ".join(parts)

    def as_dict(self) -> dict[str, Any]:
        """Return the fields as plain data."""
        return asdict(self)


def _gpu(gpu: Mapping[str, Any] | None) -> str:
    if gpu is None:
        return "no CUDA device"
    return f"{gpu['count']} x {gpu['name']}, compute capability {gpu['capability']}, driver {gpu['driver']}"


def take(reproducer: Path, cases: Sequence[Case], targets: Sequence[Target], tree: Path | None) -> Stamp:
    """Return the stamp of a run of these cases.

    Args:
        reproducer: the file that declares the cases.
        cases: the cases that will run.
        targets: every target of their overlays.
        tree: the folder of `--tree`, or None.

    Raises:
        PackError: the tree holds no package of these targets.
    """
    tops = {target.distribution: target.module.partition(".")[0] for target in targets}
    expected = list(tops.values())
    names = dict.fromkeys([*tops, *(name for case in cases for name in case.versions)])
    names.pop(OWN, None)
    tops |= {name: name.replace("-", "_") for name in names if name not in tops}
    versions = {name: FROM_TREE if tree and (tree / tops[name]).is_dir() else _version(name) for name in sorted(names)}
    return Stamp(
        host=_host(),
        versions={OWN: f"{VERSION} ({_own_sources()})", **versions},
        tree=trees.describe(tree, expected, tops.values()) if tree else None,
        reproducer=inventory.digest(reproducer),
        date=datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
    )


def _host() -> dict[str, Any]:
    gpus = visible_gpus.visible()
    return {
        "machine": platform.machine(),
        "processor": _processor(),
        "cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "system": _system(),
        "python": platform.python_version(),
        "gpu": {**gpus[0]._asdict(), "count": len(gpus)} if gpus else None,
    }


def _system() -> str:
    kernel = ".".join(platform.release().split(".")[:2])  # the rest names a build, which may name its owner
    try:
        distribution = f", {platform.freedesktop_os_release()['PRETTY_NAME']}"
    except (OSError, KeyError):
        distribution = ""
    return f"{platform.system()} {kernel}{distribution}"


def _processor() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        text = ""
    model = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return " ".join(model[1].split()) if model else "unknown processor"


def _version(distribution: str) -> str:
    reported = distributions.version(distribution)
    if reported is None:
        return "not installed"
    # The metadata of torch leaves out the CUDA version of its build.
    return _torch_version() or reported if distribution == "torch" else reported


def _torch_version() -> str | None:
    try:
        source = InstalledTree().module("torch.version")
    except OverlayError:
        return None
    found = re.search(r"^__version__ = '(.+)'$", source.text, re.MULTILINE) if source else None
    return found[1] if found else None


def _own_sources() -> str:
    """Return 12 digits of the hash of this package's code: its version number does not change with every commit."""
    root = Path(str(megacpp_overlays.__file__)).parent
    digest = hashlib.sha256()
    for name in sorted(_python_files(root)):
        content = (root / name).read_bytes()
        digest.update(f"{name} {len(content)}\n".encode() + content)
    return digest.hexdigest()[:12]


def _python_files(root: Path) -> Iterable[str]:
    for folder, folders, files in os.walk(root, followlinks=True):
        folders[:] = [name for name in folders if name != "packs"]
        yield from (Path(folder, name).relative_to(root).as_posix() for name in files if name.endswith(".py"))
