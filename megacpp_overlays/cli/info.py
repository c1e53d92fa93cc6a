"""`megacpp-overlays info`: print version, mode, settings in force, how processes are armed, plugins, and missing requirements."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
import textwrap
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from megacpp_overlays import terminal_text, variables
from megacpp_overlays.cli import commands, status
from megacpp_overlays.cli.codes import ExitCode
from megacpp_overlays.cli.commands import Subparsers, add
from megacpp_overlays.errors import OverlayError, SettingsError
from megacpp_overlays.loader import declarations, witnesses
from megacpp_overlays.loader.listed import LISTED
from megacpp_overlays.loader.registry import PLUGIN_GROUP
from megacpp_overlays.loader.settings import Settings, plugin_names, this_environment
from megacpp_overlays.processes import startup_file
from megacpp_overlays.source import distributions
from megacpp_overlays.upkeep.drift.drift import STACK
from megacpp_overlays.version import VERSION

_TEXT = "Describe this package here: version, mode, settings in force, how processes are armed, plugins, and missing requirements."
_EXAMPLES = ("info", "info --json")
_CODES = {
    ExitCode.CLEAN: "printed",
    ExitCode.USAGE: "wrong usage, or a setting is not known; the rest is printed all the same",
    ExitCode.NOT_CHECKED: "a plugin that is asked for cannot be loaded; the rest is printed all the same",
}
_KEY, _WIDTH = 11, 100


class Info(NamedTuple):
    """Facts about this package in this environment, gathered without importing a library of a target."""

    version: str
    package: str
    python: str
    environment: str
    mode: str
    """The mode in force, or empty where a setting is wrong."""
    settings: Mapping[str, str]
    """Settings that are set here, by variable."""
    wrong: str
    """Error of a setting or a plugin; empty where there is none."""
    armed_by: str
    """How Pythons of this environment are armed at their start."""
    plugins: Mapping[str, str]
    """Installed plugins by name: `asked for`, or `not asked for`."""
    overlays: int
    gates: int
    libraries: Mapping[str, str]
    """Versions of installed libraries of targets and of the stack."""
    not_installed: Sequence[str]
    missing: Sequence[str]
    """Requirements of the extra `upkeep` that are not installed."""
    witnesses: str
    """The folder of witnesses; empty where a setting is wrong."""


def add_to(subparsers: Subparsers) -> None:
    """Add the command to the parser."""
    parser = add(subparsers, "info", _TEXT, examples=_EXAMPLES, codes=_CODES)
    parser.add_argument("--json", action="store_true", help="print JSON instead of lines")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> ExitCode:
    """Print the facts; return the exit code."""
    info, code = gather()
    if arguments.json:
        print(json.dumps(info._asdict(), indent=2))
    else:
        print("\n".join(_lines(info)))
    return code


def gather() -> tuple[Info, ExitCode]:
    """Return the facts and the exit code for them."""
    env = os.environ
    asked = plugin_names(env)
    settings, wrong, code = None, "", ExitCode.CLEAN
    ids = frozenset(each.id for each in LISTED)
    try:
        ids = declarations.of(asked).ids
        settings = Settings.from_env(env, ids)
    except OverlayError as error:
        wrong = str(error)
        code = ExitCode.USAGE if isinstance(error, SettingsError) else ExitCode.NOT_CHECKED
    names = sorted({*STACK, *(each.target.distribution for each in declarations.of(()).errata)})
    libraries = {name: found for name in names if (found := distributions.version(name)) is not None}
    gates = sum(not each.installs for each in LISTED)
    info = Info(
        version=VERSION,
        package=str(startup_file.PACKAGE),
        python=f"{'.'.join(map(str, sys.version_info[:3]))}, {sys.executable}",
        environment=this_environment(),
        mode=settings.mode.value if settings else "",
        settings={name: env[name] for name in sorted(env) if variables.is_ours(name) and env[name].strip()},
        wrong=wrong,
        armed_by=_armed_by(),
        plugins=_plugins(asked),
        overlays=len(ids) - gates,
        gates=gates,
        libraries=libraries,
        not_installed=[name for name in names if name not in libraries],
        missing=_missing(),
        witnesses=str(witnesses.folder_of(settings)) if settings else "",
    )
    return info, code


def _armed_by() -> str:
    if files := startup_file.found():
        how = "" if files[0].is_ours else f", which was edited or leads to another copy, {files[0].package}"
        return f"file {files[0].path}{how}"
    if status.arms_by_variables():
        return "variables: PYTHONPATH and MEGACPP_OVERLAYS_CHILDREN"
    return ""


def _plugins(asked: Sequence[str]) -> dict[str, str]:
    import importlib_metadata  # noqa: PLC0415 - the other commands do not need it

    installed = sorted(importlib_metadata.entry_points(group=PLUGIN_GROUP).names)
    return {name: "asked for" if name in asked else "not asked for" for name in installed}


def _missing() -> list[str]:
    wanted = {requirement: module for module, requirement in commands.extra_requirements().items()}
    return [requirement for requirement, module in wanted.items() if importlib.util.find_spec(module) is None]


def _lines(info: Info) -> list[str]:
    settings = [f"{name}={value}" for name, value in info.settings.items()] or ["none is set: the defaults"]
    plugins = [f"{name}: {how}" for name, how in info.plugins.items()] or ["none is installed"]
    libraries = [f"{name} {version}" for name, version in info.libraries.items()] or ["none"]
    missing = (
        [f"extra `upkeep`: {', '.join(info.missing)}; only commands that keep a lane need it"] if info.missing else []
    )
    absent = [f"not installed: {', '.join(info.not_installed)}"] if info.not_installed else []
    nothing = "nothing at its start: import megacpp_overlays first, start with `megacpp-overlays run`, or `megacpp-overlays enable`"
    rows = {
        "version": [f"{info.version}, {info.overlays} overlays and {info.gates} gates"],
        "package": [info.package],
        "python": [info.python, info.environment],
        "mode": [info.mode or "unknown: a setting is wrong"],
        "settings": settings,
        "wrong": [info.wrong] if info.wrong else [],
        "armed by": [info.armed_by or nothing],
        "plugins": plugins,
        "libraries": [", ".join(libraries), *absent],
        "missing": missing or ["nothing"],
        "witnesses": [info.witnesses] if info.witnesses else [],
        "next": ["megacpp-overlays audit --quick"],
    }
    lines: list[str] = []
    for key, texts in rows.items():
        for number, text in enumerate(texts):
            head = f"{'' if number else key:{_KEY}}"
            lines += textwrap.wrap(
                terminal_text.one_line(text),
                _WIDTH,
                initial_indent=head,
                subsequent_indent=" " * _KEY,
                break_long_words=False,  # a path is there to be copied
                break_on_hyphens=False,
            )
    return lines
