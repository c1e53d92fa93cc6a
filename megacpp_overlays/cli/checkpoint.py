"""`megacpp-overlays checkpoint`: check that a checkpoint holds the optimizer state of each parameter under its own name."""

from __future__ import annotations

import argparse
import functools
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from megacpp_overlays.cli.codes import ExitCode
from megacpp_overlays.cli.commands import Subparsers, add
from megacpp_overlays.errors import CheckpointError

if TYPE_CHECKING:
    from megacpp_overlays.upkeep.checkpoint import masters

_TEXT = "Say whether a fully reshardable checkpoint of Megatron holds the optimizer state of each parameter under its own name."
_MORE = """\
megatron-core 0.15.0 to 0.19.2 writes checkpoints in the format fully_reshardable in which the fp32 weights and moments of a
parameter are those of other parameters, or zeros, wherever its grad buffer has several buckets and padding between them.
The model's own weights in it are right. Each parameter's fp32 weights are compared with its weight in the same checkpoint,
shard by shard, in blocks, without a model and without a GPU. No file is changed, and nothing that a file names is imported
or called. It reads the fp32 weights, the weights, and the moments of parameters that end in zeros. Needs torch.
"""
_EXAMPLES = ("checkpoint checkpoints/iter_0000100", "checkpoint --json checkpoints/iter_0000100")
_CODES = {
    ExitCode.CLEAN: "the state of every parameter is its own, or the checkpoint has none in this format",
    ExitCode.FOUND: "it was written broken: load it without its optimizer state, or take another one",
    ExitCode.NOT_CHECKED: "the folder has no checkpoint that can be read, or the answer is unknown: fp32 weights differ without a "
    "mark of this defect (FP8 weights do), or the checkpoint has no weights to compare them with",
    ExitCode.MISSING_EXTRA: "torch is not installed",
}


def add_to(commands: Subparsers) -> None:
    """Add the command to the parser."""
    parser = add(commands, "checkpoint", _TEXT, more=_MORE, examples=_EXAMPLES, codes=_CODES)
    parser.add_argument("path", metavar="PATH", type=Path, help="the folder that has the file .metadata")
    parser.add_argument("--json", action="store_true", help="print JSON, every parameter in it, instead of lines")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the report about a checkpoint; return the exit code."""
    from megacpp_overlays.upkeep.checkpoint import masters  # noqa: PLC0415 - the other commands do not need it

    progress = functools.partial(print, file=sys.stderr, flush=True) if sys.stderr.isatty() else lambda _: None
    try:
        report = masters.check(arguments.path, progress)
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        print("megacpp-overlays: this command needs torch to read numbers: pip install torch", file=sys.stderr)
        return ExitCode.MISSING_EXTRA
    except CheckpointError as error:
        print(f"megacpp-overlays: {error}", file=sys.stderr)
        return ExitCode.NOT_CHECKED
    print(json.dumps(report.as_dict(), indent=2) if arguments.json else _lines(report))
    codes = {masters.CheckpointVerdict.BROKEN: ExitCode.FOUND, masters.CheckpointVerdict.UNKNOWN: ExitCode.NOT_CHECKED}
    return codes.get(report.verdict, ExitCode.CLEAN)


def _lines(report: masters.Report) -> str:
    wrong = [each for each in report.parameters if not each.is_right]
    head = f"{report.folder}: {report.verdict.value}"
    if not report.parameters:
        return f"{head}: it has no optimizer state in the format fully_reshardable"
    counted = (
        f"{len(wrong)} of {len(report.parameters)} parameters are not right" if wrong else "all parameters are right"
    )
    return "\n".join([f"{head}: {counted}", *(f"    {each.name}: {each}" for each in wrong)])
