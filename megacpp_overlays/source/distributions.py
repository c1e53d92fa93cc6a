"""Versions of installed distributions, as evidence for people; never a verdict, so nothing here raises.

Version strings are not reliable: four different trees of Megatron-Core all report 0.19.0. So the text also says when the
module does not come from the files of the distribution that reports the version.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

_FIELD = "\nVersion: "


def version(distribution: str) -> str | None:
    """Return the version that an installed distribution reports, or None when it is not installed."""
    reported, _ = _look_up(distribution)
    return reported


def describe(distribution: str, module_file: str | None) -> str | None:
    """Return the version of a distribution, and the place of a module file that is not part of it.

    Returns:
        `0.19.2` when the file lies where the distribution is installed; `0.19.2, but loaded from /src/x` or
        `unversioned, loaded from /src/x` when it lies elsewhere; None when there is neither.
    """
    reported, root = _look_up(distribution)
    if reported is None:
        return f"unversioned, loaded from {module_file}" if module_file else None
    if module_file is None or root is None or Path(module_file).resolve().is_relative_to(root):
        return reported
    return f"{reported}, but loaded from {module_file}"


def without_place(described: str | None) -> str | None:
    """Return the version in a text of `describe` without the path, which differs between hosts with the same code."""
    return (described or "").partition(",")[0] or None


def is_extra(distribution: str, package: str) -> bool:
    """Return whether a distribution asks for a package in an extra and not otherwise.

    Args:
        distribution: an installed distribution.
        package: import name of the package, or name of its distribution.
    """
    from importlib import metadata  # noqa: PLC0415 - not needed to arm

    from packaging.requirements import Requirement  # noqa: PLC0415
    from packaging.utils import canonicalize_name  # noqa: PLC0415

    try:
        asked = [Requirement(each) for each in metadata.requires(distribution) or ()]
    except metadata.PackageNotFoundError:
        return False
    of_package = [each for each in asked if canonicalize_name(each.name) == canonicalize_name(package)]
    return bool(of_package) and not any(
        each.marker is None or each.marker.evaluate({"extra": ""}) for each in of_package
    )


def _look_up(distribution: str) -> tuple[str | None, Path | None]:
    try:
        from importlib import metadata  # noqa: PLC0415 - wrapt has imported it; `importlib_metadata` takes 10 ms more

        try:
            found = metadata.distribution(distribution)
        except metadata.PackageNotFoundError:
            return None, None
        return _version_of(found), Path(str(found.locate_file(""))).resolve()
    except Exception as error:  # noqa: BLE001 - damaged metadata must not switch a fix off
        return f"unreadable version ({type(error).__name__}: {error})", None


def _version_of(found: Any) -> str:
    """Return the version of a distribution from its line in the metadata: to parse all of it takes milliseconds."""
    _, field, rest = (found.read_text("METADATA") or "").partition(_FIELD)
    return rest.partition("\n")[0].strip() if field else str(found.version)
