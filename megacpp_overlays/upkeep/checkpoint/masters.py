"""Comparison of the fp32 weights in a fully reshardable checkpoint with the model's weights in the same checkpoint.

A checkpoint of this format has the fp32 weights in `optimizer.state.param.NAME`, and the moments in
`optimizer.state.exp_avg.NAME` and so on, with a prefix `chained_N.` where optimizers are chained. They have the shape and
the shards of the model's weight `NAME`. Other formats call the fp32 weights `fp32_param`, or keep whole buckets, and do not
have this defect.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

from megacpp_overlays.runtime.displaced_masters import Marks, has_many_numbers, marks
from megacpp_overlays.upkeep.checkpoint import stored_tensors
from megacpp_overlays.upkeep.checkpoint.stored_tensors import StoredShard, StoredValues

_STATE = re.compile(r"(?P<head>(?:chained_\d+\.)?optimizer\.state)\.(?P<key>[^.]+)\.(?P<name>.+)", re.DOTALL)
_MASTER = "param"
Tensors = Mapping[str, tuple[StoredShard, ...]]
"""The shards of every tensor of a checkpoint, by its name."""


class CheckpointVerdict(enum.Enum):
    """Verdict on a whole checkpoint."""

    NOT_CONCERNED = "not concerned"
    """The checkpoint has no fp32 weights in this format."""
    RIGHT = "right"
    """Every parameter has its own fp32 weights."""
    BROKEN = "written broken"
    """Some parameters have fp32 weights that differ from their weights and have a mark of this defect."""
    UNKNOWN = "cannot be told"
    """Some fp32 weights differ or cannot be compared, and no parameter has a mark of the defect."""


class ParameterFinding(NamedTuple):
    """Result of the comparison for one parameter."""

    name: str
    marks: Marks | None
    """Marks of its worst shard; None where the shards cannot be compared."""
    why: str = ""
    """Reason why the shards cannot be compared; empty where they can."""

    @property
    def is_right(self) -> bool:
        """Whether the fp32 weights, rounded, are the weights of the parameter."""
        return self.marks is not None and not self.marks.differs

    def __str__(self) -> str:
        if self.marks is None:
            return f"cannot be compared: {self.why}"
        if self.is_right:
            return "right"
        shown = [
            f"its fp32 weights begin {self.marks.displaced_by} elements too far on" if self.marks.displaced_by else "",
            f"its state ends in {self.marks.zero_tail} zeros" if self.marks.zero_tail else "",
        ]
        return " and ".join(filter(None, shown)) or "its fp32 weights are not its weights, and do not say why"


class Report(NamedTuple):
    """Results of the comparison for a checkpoint."""

    folder: Path
    parameters: tuple[ParameterFinding, ...]

    @property
    def verdict(self) -> CheckpointVerdict:
        """Verdict on the whole checkpoint."""
        if not self.parameters:
            return CheckpointVerdict.NOT_CONCERNED
        if any(each.marks is not None and each.marks.shows_the_defect for each in self.parameters):
            return CheckpointVerdict.BROKEN
        return CheckpointVerdict.RIGHT if all(each.is_right for each in self.parameters) else CheckpointVerdict.UNKNOWN

    def as_dict(self) -> dict[str, object]:
        """Return the report as values that JSON can represent."""
        return {
            "schema": 1,
            "checkpoint": str(self.folder),
            "verdict": self.verdict.value,
            "parameters": [
                {
                    "name": each.name,
                    "right": each.is_right if each.marks is not None else None,
                    "displaced_by": each.marks.displaced_by if each.marks is not None else None,
                    "zeros_at_the_end": each.marks.zero_tail if each.marks is not None else None,
                    "says": str(each),
                }
                for each in self.parameters
            ],
        }


def check(folder: Path, progress: Callable[[str], object] = lambda _: None) -> Report:
    """Compare every parameter that has fp32 weights, without writing files or running code from the checkpoint.

    Args:
        folder: the folder with `.metadata`.
        progress: called with a line of text ahead of each parameter.

    Raises:
        CheckpointError: the checkpoint cannot be read.
    """
    tensors = stored_tensors.read(folder)
    keys: dict[tuple[str, str], list[str]] = {}
    for full in tensors:
        if (found := _STATE.fullmatch(full)) is not None:
            keys.setdefault((found["head"], found["name"]), []).append(found["key"])
    chosen = sorted((name, head, had) for (head, name), had in keys.items() if _MASTER in had)
    parameters = []
    for number, (name, head, had) in enumerate(chosen, 1):
        progress(f"{number} of {len(chosen)}: {name}")
        moments = [f"{head}.{key}.{name}" for key in sorted(had) if key != _MASTER]
        parameters.append(_compare(folder, tensors, name, f"{head}.{_MASTER}.{name}", moments))
    return Report(folder, tuple(parameters))


def _compare(folder: Path, tensors: Tensors, name: str, master: str, moments: Sequence[str]) -> ParameterFinding:
    if name not in tensors:
        return ParameterFinding(name, None, "the checkpoint has no weight of that name")
    found, some_are_own = [], False
    for shard in tensors[master]:
        with ExitStack() as stack:
            opened = []
            for each in (master, name, *moments):
                own = [one for one in tensors[each] if one.offsets == shard.offsets]
                if len(own) != 1:
                    return ParameterFinding(name, None, f"{each} has other shards")
                opened.append(stack.enter_context(StoredValues(folder, own[0], each)))
            if len({each.shape for each in opened}) != 1:
                return ParameterFinding(name, None, "its tensors have different shapes")
            found.append(marks(opened[0], opened[1], opened[2:]))
            some_are_own = some_are_own or (not found[-1].differs and has_many_numbers(opened[1], opened[1].numel))
    if some_are_own:
        # All shards of a parameter are cut in the same way. One of them is right, so the zeros at the end of another one are
        # rows that were added to the parameter.
        found = [each._replace(zero_tail=each.zero_tail if each.displaced_by else 0) for each in found]
    return ParameterFinding(name, max(found, key=_badness, default=Marks(differs=False)))


def _badness(found: Marks) -> tuple[bool, int, int]:
    return found.differs, found.displaced_by, found.zero_tail
