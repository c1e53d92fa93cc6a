"""`megacpp-overlays new-overlay ID MODULE:SYMBOL`: write the files of an overlay, in this project or as a plugin."""

from __future__ import annotations

import argparse
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING

import megacpp_overlays
from megacpp_overlays import files
from megacpp_overlays.cli.codes import ExitCode
from megacpp_overlays.cli.commands import Subparsers, add
from megacpp_overlays.errors import UpkeepError
from megacpp_overlays.loader import registry, session

if TYPE_CHECKING:
    from megacpp_overlays.upkeep.new_overlay.files_of_overlay import NewOverlay

NAME = "new-overlay"

_TEXT = "Write the files of a new overlay: declaration, probe, reproducer, neighbours, notes and test, in the form of those that are there."
_MORE = """\
The probe knows the code of the target as it is read here, word for word, and everything else is left to be written: each place
says TODO. Until the self-test is written the overlay is in conflict and installs nothing. No file is overwritten.
"""
_EXAMPLES = (
    "new-overlay clip-upper-bound cliplib.bounds:clip --plugin our-fixes",
    "new-overlay moe-router-shape megatron.core.transformer.moe.router:TopKRouter.forward",
)
_CODES = {
    ExitCode.CLEAN: "written",
    ExitCode.NOT_CHECKED: "the target cannot be read, a file is there already, or this is no checkout of this package and --plugin is missing",
}


def add_to(commands: Subparsers) -> None:
    """Add the command to the parser."""
    parser = add(commands, NAME, _TEXT, examples=_EXAMPLES, codes=_CODES, more=_MORE)
    parser.add_argument("id", metavar="ID", help="lower-case words joined by hyphens that name the repair")
    parser.add_argument("target", metavar="MODULE:SYMBOL", help="the function or method that is broken")
    parser.add_argument(
        "--plugin", metavar="FOLDER", type=Path, help="write it into this package, which is made if need be"
    )
    parser.add_argument(
        "--distribution", metavar="NAME", help="of the target, where several have its outermost package"
    )
    parser.add_argument("--tree", metavar="FOLDER", type=Path, help="read the target in this folder of packages")
    parser.set_defaults(run=lambda arguments: run(arguments, parser))


def run(arguments: argparse.Namespace, parser: argparse.ArgumentParser) -> bool:
    """Write the files; print them and the next steps.

    Raises:
        UpkeepError: the target cannot be read, or a file is there already.
    """
    from megacpp_overlays.source.file_trees import DirectoryTree  # noqa: PLC0415 - the other commands do not need these
    from megacpp_overlays.source.trees import InstalledTree  # noqa: PLC0415
    from megacpp_overlays.upkeep.new_overlay import files_of_overlay  # noqa: PLC0415

    if not registry.is_id(arguments.id):
        parser.error(f"{arguments.id!r} is no id: lower-case words joined by hyphens, such as clip-upper-bound")
    if arguments.id in {each.id for each in session.current().overlays}:
        parser.error(f"there is an overlay {arguments.id} already; `megacpp-overlays explain {arguments.id}`")
    if arguments.tree is not None and not arguments.tree.is_dir():
        parser.error(f"--tree {arguments.tree}: there is no such folder")
    module, symbol = files_of_overlay.target_of(arguments.target)
    new = files_of_overlay.NewOverlay(
        id=arguments.id,
        module=module,
        symbol=symbol,
        distribution=arguments.distribution or files_of_overlay.distribution_of(module),
        date=datetime.now(timezone.utc).date().isoformat(),
    )
    tree = DirectoryTree(arguments.tree) if arguments.tree else InstalledTree()
    if arguments.plugin:
        written = files_of_overlay.as_plugin(new, tree, arguments.plugin)
    else:
        written = files_of_overlay.in_project(new, tree, _checkout())
    for path, text in sorted(written.items()):
        path.parent.mkdir(parents=True, exist_ok=True)
        files.write_text(path, text)
        print(f"written: {path}")
    print("\n".join(_next(new, arguments.plugin, made_project=any(each.name == "pyproject.toml" for each in written))))
    return True


def _checkout() -> Path:
    root = Path(str(megacpp_overlays.__file__)).resolve().parent.parent
    if not (root / "overlays").is_dir() or not (root / "packs").is_dir():
        raise UpkeepError(f"{root} is no checkout of this package: say --plugin FOLDER to write a package of your own")
    return root


def _next(new: NewOverlay, plugin: Path | None, *, made_project: bool) -> list[str]:
    todo = "next: write the places that say TODO, the reproducer first"
    if plugin is None:
        return [
            todo,
            "then: .venv/bin/python scripts/list_overlays.py, and `make derived PACK=NN`; see docs/write-an-overlay.md",
        ]
    package = plugin.resolve().name.replace("-", "_")
    entry = f'{new.id} = "{package}.{new.name}:OVERLAY"'
    lines = (
        []
        if made_project
        else [f'add to [project.entry-points."megacpp_overlays.overlays"] of its pyproject.toml: {entry}']
    )
    return [
        *lines,
        todo,
        f"then: pip install -e {plugin}, and MEGACPP_OVERLAYS_PLUGINS={new.id} megacpp-overlays audit {new.id}",
    ]
