"""Memory of the fused linear cross entropy: how much it may take, and how that is used.

Three variables, `LINEAR_CE_*` in `megacpp_overlays.variables`: the extra memory of a backward pass, the treatment of the
logits between the passes, and the treatment of tokens without a label or a gradient. They are read and checked when the
package is imported, so that every step of a run computes in the same way, and ranks compare them.

`recompute` forms the logits a second time in the backward pass; all but the last block, which stays from the forward
pass, within that memory. `keep` holds all of them, in the dtype of the hidden states: three products instead of four,
for 2 bytes a token and class in half precision. `auto` keeps them if, at the first call of the process
on a CUDA device that is not being captured, there is room for them twice; this decision holds for every later call.

The gradient of the hidden states in float32 counts, and so does a copy of a block's weight where autocast wants another
dtype. Under sequence parallelism the gathered hidden states, and their float32 gradient, come on top.

`skip` leaves tokens out of the products: in a forward pass those whose label is `ignore_index`, in a backward pass those
without a gradient, which are the same ones and those that a mask takes out. It works for half precision on compute
capability 9 with Triton 3.6, and on the CPU; elsewhere all tokens are computed, as with `compute`. Where no token is masked,
skipping with launches that are the same for any number of tokens costs 2 to 9% on an H200. So `auto` skips only if at most three
quarters of the tokens have a gradient, and in forward passes only if at most three quarters have a label. It counts both in the
first backward pass of 256 tokens or more that is not being captured. That is the one place here that waits for the device, and
the decision holds for every later call. So the first forward pass computes all tokens, and so does a process that never has a
backward pass. Until then blocks are cut so that both ways fit, so the last bits of a first step may differ from those of the
same step later. Set `skip` or `compute` where that matters, where a first batch, or the one that warms up a graph, is not
typical, and where ranks of different data must choose the same.

Hidden states of skipped tokens are not read, so they need not be finite. For `compute` they have to be: one that is not
may or may not spread.

Skipping copies the hidden states of the tokens that are not skipped, into room for all of them, which is counted as a part
of the memory next to several blocks. Where that leaves less than a sixteenth for a block, products read the rows in their
original places, which on an H200 takes 1.1 to 1.5 times as long as cuBLAS for logits and 2.0 to 2.7 times for the gradient of
weights.

With `skip`, one rank launches its products twice where a copy makes blocks narrower: over all tokens, which are read in their
original places in blocks as wide as without a copy, and over a copy of some. The device makes one of the two empty
(`two_paths`): where no token is masked that of a copy, else that of all. Both share one memory, that of the larger, so the
logits that stay from a forward pass are as many as without a copy. If all tokens have a label and not all a gradient, the
logits that stayed are computed again. On an H200 empty launches take 0.4 to 1.7 ms of a step of 52 to 97.

Where at most half of the tokens are not skipped, a block of logits, which has room for all, holds those of several blocks,
as many as find room, so products are larger and more of the logits stay from the forward pass. The device chooses how many
(`masked_products.panels`), and launches for blocks that are not needed do nothing. Blocks of a multiple of 256
classes can do that, where the weight has the dtype of the hidden states.

Where there is one block, or all logits are kept, the gradient takes the place of the copy in a backward pass, and
goes to its own place when the logits are gone; the copy of a forward pass is there when no gradient is yet. Under autocast
a rounded copy of all hidden states comes on top.

The limit cannot be kept where the gradient of the hidden states in float32 takes more by itself, 4 bytes for each number of
them: 256 MiB are 8192 tokens of size 8192. Half of that is allocated together with the blocks, and all of it while the result
is made from it.

Logits that stay from a forward pass stay until its backward pass. Several losses that wait for one backward pass, such as
those of heads that predict further tokens, each hold a block.
"""

from __future__ import annotations

import enum
import logging
import os
import threading
from dataclasses import dataclass, field
from typing import TypeVar

import torch

from megacpp_overlays.variables import LINEAR_CE_LOGITS, LINEAR_CE_MASKED, LINEAR_CE_MEMORY_MIB, OF_KERNELS, chosen

logger = logging.getLogger("megacpp_overlays")

_MIB = 1 << 20
_SPARSE = 0.75
"""The largest share of tokens with a gradient at which `auto` skips the others."""
_TELLING = 256
"""Tokens of a pass whose masks `auto` looks at, at least."""
_LEAST_SHARE, _SHARE_BEYOND = 16, 4
"""Of the memory, one part of so many is enough for a block; where even that is not left, a block gets the other one."""
_COPY_SHARE = 16
"""Selected hidden states are copied if one part of so many is left for a block in addition to them."""
_NARROWEST = 256
"""Classes of a block, however many tokens there are: narrower products leave the device idle."""
_FIRST_CLASS_OF_A_ROW = 64
"""Rows of a block of logits begin at multiples of this many elements: cuBLAS is slow at odd strides."""


class Logits(str, enum.Enum):
    """Treatment of the logits between the passes."""

    RECOMPUTE = "recompute"
    KEEP = "keep"
    AUTO = "auto"


class Masked(str, enum.Enum):
    """Treatment of tokens without a label in a forward pass, and without a gradient in a backward pass."""

    AUTO = "auto"
    COMPUTE = "compute"
    SKIP = "skip"


_Word = TypeVar("_Word", Logits, Masked)


@dataclass(slots=True)
class MaskDecision:
    """Decisions of `auto`."""

    skips: bool | None = None
    """Whether backward passes skip tokens without a gradient; None before the first of them."""
    skips_labels: bool = False
    """Whether forward passes skip tokens whose label is `ignore_index`."""


@dataclass(frozen=True, slots=True)
class Memory:
    """A choice.

    Attributes:
        extra_mib: MiB above inputs, losses and gradients that recomputing may take. The gradient of the hidden states
            in float32 is part of it. Where that leaves less than a sixteenth, a block of logits gets a quarter all the
            same: narrower ones would add up that gradient too often.
        logits: a `Logits` or its name.
        block_classes: classes that share one block of logits, whatever it takes; 0 leaves that to `extra_mib`.
        masked: a `Masked` or its name.
        panels: blocks that may share the memory of one where few tokens are not skipped; 0 means as many as have room.
        settled: the decision of `auto` on masks, shared by this choice and all that `dataclasses.replace` makes of it.

    Raises:
        ValueError: the number is not positive, or the name is unknown.
    """

    extra_mib: int = int(LINEAR_CE_MEMORY_MIB.default)
    logits: Logits | str = Logits.RECOMPUTE
    block_classes: int = 0
    masked: Masked | str = Masked.AUTO
    panels: int = 0
    settled: MaskDecision = field(default_factory=MaskDecision, compare=False, repr=False)

    def __post_init__(self) -> None:
        """Check them."""
        if self.extra_mib < 1:
            raise ValueError(f"extra_mib is {self.extra_mib}; it is a number of MiB, 1 or more")
        if self.panels < 0:
            raise ValueError(f"panels is {self.panels}; it is a number of blocks, or 0")
        object.__setattr__(self, "logits", _one_of(Logits, self.logits, "logits"))
        object.__setattr__(self, "masked", _one_of(Masked, self.masked, "masked"))

    def fits(self, bytes_of_a_class: int, classes: int, taken: int = 0) -> bool:
        """Return whether all logits together are no more than a block may take: then there is one block.

        Args:
            bytes_of_a_class: the bytes of a column of the logits.
            classes: columns of the logits.
            taken: bytes taken by other tensors next to one block of all classes.
        """
        return not self.block_classes and padded(classes) * bytes_of_a_class + taken <= self.extra_mib * _MIB

    def leaves_room(self, taken: int) -> bool:
        """Return whether enough memory is left for a block of logits after so many bytes."""
        budget = self.extra_mib * _MIB
        return bool(self.block_classes) or (budget - taken) * _COPY_SHARE >= budget

    def keeps(self, tokens: int, classes: int, element: int, device: torch.device) -> bool:
        """Return whether a forward pass keeps its logits.

        Args:
            tokens: rows of the logits.
            classes: columns of the logits.
            element: bytes of one.
            device: theirs.
        """
        if self.logits is not Logits.AUTO:
            return self.logits is Logits.KEEP
        if device.type != "cuda":
            return False
        global _room_was_found
        if _room_was_found is None:
            if torch.cuda.is_current_stream_capturing():
                return False  # a device that captures cannot be asked
            _room_was_found = _has_room(2 * tokens * classes * element, device)
        return _room_was_found

    @property
    def may_skip(self) -> bool:
        """Whether a backward pass may skip tokens."""
        return self.masked is Masked.SKIP or (self.masked is Masked.AUTO and self.settled.skips is not False)

    @property
    def skips_labels(self) -> bool:
        """Whether a forward pass skips tokens whose label is `ignore_index`."""
        return self.masked is Masked.SKIP or (self.masked is Masked.AUTO and self.settled.skips_labels)

    @property
    def has_looked(self) -> bool:
        """Whether nothing is left to be looked at."""
        return self.masked is not Masked.AUTO or self.settled.skips is not None

    def skips(self, alive: torch.Tensor, labelled: torch.Tensor) -> bool:
        """Return whether a backward pass skips tokens without a gradient.

        Args:
            alive: (tokens,), bool: which have one. `auto` counts them once.
            labelled: (tokens,), bool: whose label is not `ignore_index`; all that are alive. Counted with them.
        """
        if self.masked is not Masked.AUTO:
            return self.masked is Masked.SKIP
        if self.settled.skips is None and _can_be_counted(alive):
            with _settling:  # each device has a thread of its own for backward passes
                if self.settled.skips is None:
                    self._settle(alive, labelled)
        return bool(self.settled.skips)

    def _settle(self, alive: torch.Tensor, labelled: torch.Tensor) -> None:
        count, labels = torch.stack([alive, labelled]).sum(dim=1).tolist()
        if not count:
            return
        tokens = alive.numel()
        self.settled.skips_labels = labels <= _SPARSE * tokens
        self.settled.skips = count <= _SPARSE * tokens
        logger.info(
            "linear cross entropy: %d of %d tokens of the first backward pass have a gradient; the others are %s, "
            "and %d have a label; forward passes %s the others",
            count,
            tokens,
            "skipped" if self.settled.skips else "computed",
            labels,
            "skip" if self.settled.skips_labels else "compute",
        )

    def classes_with(self, bytes_of_a_class: int, taken: int, classes: int, *, taken_by_one: int = 0) -> int:
        """Return how many classes share one block of logits.

        Args:
            bytes_of_a_class: the bytes of a column of a block.
            taken: bytes taken by other tensors meanwhile, where there is more than one block.
            classes: of the whole shard; blocks are as equal as can be.
            taken_by_one: bytes taken by other tensors where there is one block.
        """
        if self.block_classes:
            return min(self.block_classes, max(classes, 1))
        if self.fits(bytes_of_a_class, classes, taken_by_one):
            return max(classes, 1)
        budget = self.extra_mib * _MIB
        room = budget - taken
        if room * _LEAST_SHARE < budget:
            room = budget // _SHARE_BEYOND
        widest = max(_NARROWEST, room // max(bytes_of_a_class, 1) // _NARROWEST * _NARROWEST)
        blocks = max(1, -(-classes // widest))
        return max(1, min(widest, -(-classes // blocks // _NARROWEST) * _NARROWEST))


_settling = threading.Lock()
_room_was_found: bool | None = None
_chosen: Memory | None = None


def process_wide() -> Memory:
    """Return the choice that the environment made when this package was imported, the same at every call."""
    global _chosen
    if _chosen is None:
        _warn_of_later_changes()
        _chosen = Memory(
            extra_mib=int(chosen(LINEAR_CE_MEMORY_MIB)),
            logits=chosen(LINEAR_CE_LOGITS),
            masked=chosen(LINEAR_CE_MASKED),
        )
    return _chosen


def _warn_of_later_changes() -> None:
    for setting in OF_KERNELS:
        now = os.environ.get(setting.name, "").strip() or setting.default
        if now.lower() != chosen(setting):
            logger.warning(
                "%s is %s now and was %s when megacpp_overlays was imported, which is what counts: set it before",
                setting.name,
                now,
                chosen(setting),
            )


def padded(classes: int) -> int:
    """Return the elements of a row of logits."""
    return -(-classes // _FIRST_CLASS_OF_A_ROW) * _FIRST_CLASS_OF_A_ROW


def _one_of(words: type[_Word], given: str, name: str) -> _Word:
    try:
        return words(given)
    except ValueError:
        known = ", ".join(each.value for each in words)
        raise ValueError(f"{name} is {given!r}; it is one of {known}") from None


def _has_room(wanted: int, device: torch.device) -> bool:
    """Return whether a CUDA device has so many bytes left, those included that PyTorch holds without using them."""
    free, _ = torch.cuda.mem_get_info(device)
    left = free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    logger.info(
        "linear cross entropy on %s: %d MiB left, twice the logits are %d MiB; they are %s",
        device,
        left // _MIB,
        wanted // _MIB,
        "kept" if wanted <= left else "computed again",
    )
    return bool(wanted <= left)


def _can_be_counted(alive: torch.Tensor) -> bool:
    """Return whether there is something to count: not few tokens, no fake ones, and no device that captures."""
    if type(alive) is not torch.Tensor or alive.numel() < _TELLING:
        return False
    return not (alive.is_cuda and torch.cuda.is_current_stream_capturing())
