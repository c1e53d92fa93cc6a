"""`megacpp-overlays matrix [TARGET]`: run every probe over every release of its target, and import nothing of them."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from megacpp_overlays.cli import commands
from megacpp_overlays.cli.codes import ExitCode
from megacpp_overlays.cli.commands import Subparsers, add
from megacpp_overlays.loader import registry, session
from megacpp_overlays.upkeep.matrix import archives

_TEXT = "Run every probe over every release of its target, read as it was published: nothing of them is imported."
_MORE = f"""\
The releases are those of the index that pip or uv would ask (UV_DEFAULT_INDEX, UV_INDEX_URL, PIP_INDEX_URL, else
PyPI). They are kept in --cache, {archives.VARIABLE} or the cache folder of the user; after one run with a network,
--offline gives the same table.
"""
_EXAMPLES = (
    "matrix liger-flce-none-backward",
    "matrix megatron-core --tree Megatron-LM@main --evidence",
    "matrix --check packs --offline",
)
_CODES = {
    ExitCode.CLEAN: "every release was read; with --check, the kept matrix agrees with the probes",
    ExitCode.FOUND: "a release could not be read, or the kept matrix is stale",
    ExitCode.NOT_CHECKED: "no release could be looked at: the index does not answer, or a folder is not there",
    ExitCode.MISSING_EXTRA: "without --offline, or with --write or --check, and the extra `upkeep` is not installed",
}


def add_to(commands: Subparsers) -> None:
    """Add the command to the parser."""
    parser = add(commands, "matrix", _TEXT, more=_MORE, examples=_EXAMPLES, codes=_CODES)
    parser.add_argument("target", metavar="TARGET", nargs="?", help="a distribution or an overlay (default: all)")
    parser.add_argument("--pre", action="store_true", help="read pre-releases and development builds, too")
    parser.add_argument(
        "--tree", metavar="PATH[@REV]", action="append", default=[], help="add a folder or a commit; can be repeated"
    )
    parser.add_argument("--evidence", action="store_true", help="print the evidence of the probes, and its place")
    parser.add_argument("--json", action="store_true", help="print JSON, evidence included")
    parser.add_argument("--offline", action="store_true", help="ask no index and fetch nothing")
    parser.add_argument("--cache", metavar="FOLDER", type=Path, help="keep releases in this folder")
    parser.add_argument(
        "--archives", metavar="FOLDER", type=Path, action="append", default=[], help="look for releases here, too"
    )
    kept = parser.add_mutually_exclusive_group()
    kept.add_argument("--write", metavar="FOLDER", type=Path, help="keep matrix.json and matrix.html in this folder")
    kept.add_argument("--check", metavar="FOLDER", type=Path, help="exit 1 when the matrix in it is stale")
    parser.set_defaults(run=lambda arguments: run(arguments, parser))


def run(arguments: argparse.Namespace, parser: argparse.ArgumentParser) -> bool:
    """Run the command; return whether every release was read, and nothing kept is stale."""
    keeps = arguments.write or arguments.check
    if keeps and (arguments.target or arguments.tree or arguments.pre or arguments.evidence or arguments.json):
        parser.error("--write and --check are about all final releases of all distributions, and nothing else")
    if missing := next((folder for folder in arguments.archives if not folder.is_dir()), None):
        parser.error(f"--archives {missing}: there is no such folder")
    with commands.extra():
        return _matrix(arguments)


def _matrix(arguments: argparse.Namespace) -> bool:
    from megacpp_overlays.upkeep.matrix import matrix_build, matrix_file, matrix_text  # noqa: PLC0415 - the other commands do not need these

    places = matrix_build.Places(
        cache=arguments.cache or archives.default_folder(),
        archives=tuple(arguments.archives),
        offline=arguments.offline,
        tell=lambda text: print(text, file=sys.stderr, flush=True),
    )
    if arguments.check:
        stale = matrix_build.check(registry.load(), arguments.check, places)
        print("\n".join(stale) or f"{arguments.check}: the kept matrix agrees with the probes")
        if stale:
            print(f"next: megacpp-overlays matrix --write {arguments.check}", file=sys.stderr)
        return not stale
    if arguments.write:
        matrix_build.write(matrix_build.build(registry.load(), places, kept=arguments.write), arguments.write)
        print(f"kept: {arguments.write / matrix_file.NAME}, {arguments.write / matrix_file.PAGE}")
        return True
    tables = matrix_build.build(
        session.current().overlays, places, target=arguments.target, pre=arguments.pre, trees=arguments.tree
    )
    if arguments.json:
        source = {"index": "the configured index", "offline": arguments.offline}
        print(json.dumps({**source, **matrix_file.to_data(tables)}, indent=2))
    else:
        print("\n\n\n".join(matrix_text.render(table, evidence=arguments.evidence) for table in tables))
        print(f"\n{matrix_text.LEGEND}")
        if not arguments.evidence:
            print("next: --evidence prints the evidence of the probes, and its place")
    return all(row.problem is None for table in tables for row in table.rows)
