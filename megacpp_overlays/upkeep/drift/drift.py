"""The comparison of installed distributions with their published form: files with RECORD, checkouts with their commit."""

from __future__ import annotations

import enum
import shlex
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from packaging.utils import canonicalize_name

from megacpp_overlays.errors import UpkeepError
from megacpp_overlays.model import Erratum
from megacpp_overlays.near_names import suggestion
from megacpp_overlays.repro.git import GitError
from megacpp_overlays.source.trees import InstalledTree, readable
from megacpp_overlays.upkeep.drift import checkouts, published
from megacpp_overlays.upkeep.drift.installations import Installation, import_names
from megacpp_overlays.upkeep.drift.published import FileDifference, Files, Owners

STACK: Mapping[str, str | None] = {
    "torch": "torch",
    "triton": "triton",
    "transformer-engine": "transformer_engine",
    "transformer-engine-cu13": None,
    "transformer-engine-torch": None,
    "megatron-core": "megatron.core",
    "mamba-ssm": "mamba_ssm",
    "liger-kernel": "liger_kernel",
    "tilelang": "tilelang",
}
"""Distributions that are examined in addition to the targets of overlays, each with its import name; None is part of another one."""


class DriftState(enum.Enum):
    """State of a distribution, or of a start-up file."""

    CLEAN = "clean"
    TRACKED = "tracked"
    """The file was not published with a distribution, and this package wrote it."""
    UNTRACKED = "untracked"
    """The distribution or file differs, and the difference is unexplained."""
    UNCHECKED = "cannot be checked"


@dataclass(frozen=True, slots=True, kw_only=True)
class DistributionDrift:
    """One distribution, or one checkout that is imported in its place."""

    distribution: str
    version: str | None
    where: str
    """The reference of the comparison, such as RECORD or a commit."""
    checked: int
    """Number of compared files."""
    differences: tuple[FileDifference, ...] = ()
    unchecked: tuple[str, ...] = ()
    """Files or folders that cannot be checked, with reasons."""
    restore: str = ""
    """The command that restores the published form."""

    @property
    def state(self) -> DriftState:
        """The worst state among the files."""
        if self.differences:
            return DriftState.UNTRACKED
        return DriftState.UNCHECKED if self.unchecked else DriftState.CLEAN


@dataclass(frozen=True, slots=True, kw_only=True)
class DriftReport:
    """The rows of all distributions, and the distributions that were not found."""

    rows: tuple[DistributionDrift, ...]
    absent: tuple[str, ...]
    """Distributions that are neither installed nor importable."""
    quick: bool
    required: bool = False
    """Whether the user named each distribution, so that an absent one is a failure."""

    @property
    def clean(self) -> bool:
        """Whether everything was checked and is as published."""
        answered = not (self.required and self.absent)
        return answered and all(row.state is DriftState.CLEAN for row in self.rows)


def usual(overlays: Collection[Erratum]) -> tuple[str, ...]:
    """Return the distributions that are examined by default: targets and the stack."""
    return tuple(sorted({*STACK, *(canonicalize_name(overlay.target.distribution) for overlay in overlays)}))


def examine(
    names: Collection[str],
    installed: Mapping[str, Installation],
    overlays: Collection[Erratum],
    *,
    quick: bool = False,
    required: bool = False,
) -> DriftReport:
    """Compare distributions with their published form.

    Args:
        names: canonical names of distributions.
        installed: every installed distribution.
        overlays: their targets give the import names of distributions that are not installed.
        quick: whether to compare only sizes where RECORD has them.
        required: whether a distribution that is absent is a failure.
    """
    search = _Search(installed, _modules(overlays), quick=quick)
    rows: list[DistributionDrift] = []
    absent: list[str] = []
    for name in names:
        found = tuple(search.rows(name))
        rows += found
        if not found:
            absent.append(name)
    return DriftReport(rows=tuple(rows), absent=tuple(absent), quick=quick, required=required)


def _modules(overlays: Collection[Erratum]) -> Mapping[str, str]:
    found = {canonicalize_name(each.target.distribution): each.target.module for each in overlays}
    return found | {name: module for name, module in STACK.items() if module}


def demand(names: Sequence[str], installed: Mapping[str, Installation]) -> tuple[str, ...]:
    """Return the canonical names of the distributions that the user named.

    Raises:
        UpkeepError: a distribution is neither installed nor in the stack; those of the stack may be checkouts on the path.
    """
    wanted = tuple(dict.fromkeys(map(canonicalize_name, names)))
    for name in wanted:
        if name not in installed and name not in STACK:
            near = suggestion(name, sorted({*installed, *STACK}), where="`pip list`")
            raise UpkeepError(f"--distribution {name}: no such distribution is installed here; {near}")
    return wanted


class _Search:
    """Producer of the rows of each distribution."""

    def __init__(self, installed: Mapping[str, Installation], modules: Mapping[str, str], *, quick: bool) -> None:
        self._installed = installed
        self._modules = modules
        self._owners = Owners(installed.values())
        self._quick = quick

    def rows(self, name: str) -> Iterator[DistributionDrift]:
        """Yield the rows of one distribution."""
        here = self._installed.get(name)
        if here is None:
            yield from self._checkouts(name, None, _located([self._modules[name]] if name in self._modules else []))
        elif here.origin is not None and here.origin.editable:
            yield from self._editable(here)
        elif here.entries is None:
            yield from self._without_record(here)
        else:
            yield self._published(here)
            elsewhere = {base: paths for base, paths in _located(import_names(here)).items() if base != here.root}
            yield from self._checkouts(name, here.version, elsewhere)

    def _without_record(self, here: Installation) -> Iterator[DistributionDrift]:
        """Yield the rows of a checkout with its metadata in the same folder, which `python -m` in it finds, or one unchecked row."""
        rows = tuple(self._checkouts(here.name, here.version, _located(here.top_levels)))
        if here.also or not rows or any(row.state is DriftState.UNCHECKED for row in rows):
            why = here.why_not or "it has no RECORD"
            rows = (
                DistributionDrift(
                    distribution=here.name,
                    version=here.version,
                    where=str(here.root),
                    checked=0,
                    unchecked=(why,),
                    restore=_reinstall(here),
                ),
            )
        yield from rows

    def _published(self, here: Installation) -> DistributionDrift:
        files = published.compare(here, self._owners, quick=self._quick)
        where = "RECORD"
        if here.origin is not None:
            commit = f" at {here.origin.commit[:12]}" if here.origin.commit else ""
            where = f"RECORD, from {here.origin.url}{commit}"
        return _row(here.name, here.version, where, files, _reinstall(here))

    def _editable(self, here: Installation) -> Iterator[DistributionDrift]:
        located = _located(import_names(here))
        folder = here.origin.folder if here.origin else None
        if not located and folder is not None:
            located = {folder.resolve(): [folder]}
        yield from self._checkouts(here.name, here.version, located)

    def _checkouts(
        self, name: str, version: str | None, located: Mapping[Path, Sequence[Path]]
    ) -> Iterator[DistributionDrift]:
        for base, paths in located.items():
            try:
                found = checkouts.compare(paths, base)
            except GitError as error:
                why = f"it is imported from {base}, which no RECORD and no commit accounts for: {error}"
                yield DistributionDrift(
                    distribution=name, version=version, where=str(base), checked=0, unchecked=(why,)
                )
                continue
            where = f"commit {found.commit[:12]} of {found.top}"
            restore = f"git -C {shlex.quote(str(found.top))} stash --include-untracked"
            yield _row(name, version, where, found.files, restore)


def _row(name: str, version: str | None, where: str, files: Files, restore: str) -> DistributionDrift:
    return DistributionDrift(
        distribution=name,
        version=version,
        where=where,
        checked=files.checked,
        differences=files.differences,
        unchecked=files.unchecked,
        restore=restore,
    )


def _reinstall(here: Installation) -> str:
    requirement = here.origin.url if here.origin else f"{here.name}=={here.version}"
    if here.origin and here.origin.commit:
        requirement = f"git+{here.origin.url}@{here.origin.commit}"
    if here.installer == "uv":  # it links files to its cache, so an edit in place is in the cache, too
        return f"uv pip install --reinstall --no-cache --no-deps {shlex.quote(requirement)}"
    return f"pip install --force-reinstall --no-cache-dir --no-deps {shlex.quote(requirement)}"


def _located(modules: Collection[str]) -> dict[Path, list[Path]]:
    """Return the paths that packages would be imported from, by the folder of the outermost package, without importing."""
    found: dict[Path, list[Path]] = {}
    tree = InstalledTree()
    for name in modules:
        parts = name.split(".")
        for depth in range(1, len(parts) + 1):  # the first with a source: a package above it may be a namespace package
            source = readable(tree, ".".join(parts[:depth]))
            if source is None:
                continue
            path = Path(source.path).resolve()
            path = path.parent if path.name == "__init__.py" else path
            base = path.parents[depth - 1]
            if path not in found.setdefault(base, []):
                found[base].append(path)
            break
    return found
