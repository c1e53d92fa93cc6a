"""Rows of the table: the configurations in which stock and overlays are compared, and how each is known to be right."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any


@dataclass(frozen=True)
class Packing:
    """Documents of one packed row: how many tokens each has, and how many places it takes."""

    lengths: tuple[int, ...]
    places: tuple[int, ...]
    has_samples: bool = False
    """Whether each document is a sample of the microbatch, as Megatron's inter-document masking makes them."""

    @property
    def documents(self) -> list[tuple[int, int]]:
        """Where each document begins, and how many tokens it has."""
        return list(zip([0, *itertools.accumulate(self.places)], self.lengths, strict=False))

    @property
    def is_padded(self) -> bool:
        """Whether a document takes more places than it has tokens."""
        return self.lengths != self.places


@dataclass(frozen=True)
class Row:
    """One configuration of a training step."""

    name: str
    pattern: str
    """Layers, as Megatron's hybrid models write them: * attention, + latent attention, - MLP, E experts, M Mamba-2, G gated delta
    net, D sparse attention, `/` before layers that predict a further token."""
    model: str = "hybrid"
    """The class of the model: `hybrid` or `gpt`."""
    tp: int = 1
    sequence_parallel: bool = False
    cp: int = 1
    pp: int = 1
    ep: int = 1
    dp: int = 1
    microbatches: int = 1
    """Of all data parallel ranks together."""
    dtype: str = "float32"
    config: Mapping[str, Any] = field(default_factory=dict)
    """Fields of Megatron's configuration."""
    build: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the model's constructor."""
    packing: Packing | None = None
    padding: tuple[int, ...] = ()
    """Places at the end of each row of a batch that a padding mask names."""
    documents_alone: bool = False
    """Whether each document of a packed row is a microbatch of its own: only of references."""
    attention: str = "plain"
    """The core of softmax attention: `plain`, written out in PyTorch for any layout, or Megatron's `local` one."""
    frozen: tuple[str, ...] = ()
    """Parts of names of parameters that do not learn."""
    subclassed: bool = False
    """Whether every module of Megatron is a subclass of its class that calls super()."""
    mode: str = "train"
    """`train`; `eval` and `no_grad` compare outputs alone."""
    other: Row | None = None
    """Another model of the process, which trains in turn with this one."""
    left_out: tuple[str, ...] = ()
    """How the names of numbers begin that are not compared: those that a row does not have, or has elsewhere than its reference."""
    own_groups: bool = False
    """Whether the model is given process groups that are not the default ones."""
    distributed: bool = False
    """Whether the state of the optimizer is shared out over data parallel ranks."""
    steps: int = 1
    checkpoint: bool = False
    """Whether each step but the first is one of another run, which loads a checkpoint of the one before."""
    in_fp32: tuple[str, ...] = ()
    """Parts of names of parameters that are marked to stay in fp32 where others are cast to half precision."""
    truth: Mapping[str, Any] = field(default_factory=dict)
    """Fields that the reference has otherwise: where stock on one rank is wrong, a configuration whose numbers are the same by algebra."""
    full: bool = False
    """Whether only the full form of the table has it."""

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return self.tp * self.cp * self.pp * self.dp

    @property
    def layout(self) -> tuple[int, ...]:
        """The sizes of the default process groups: ranks of tensor, pipeline, context and expert parallelism."""
        return (1 if self.own_groups else self.tp), self.pp, self.cp, self.ep

    @property
    def reference(self) -> Row:
        """The same training step in float64 on one rank, without recomputing and without overlays."""
        plain = {
            name: value for name, value in self.config.items() if not name.startswith(("recompute", "distribute_saved"))
        }
        single = replace(
            self,
            pattern=self.pattern.replace("|", ""),
            tp=1,
            sequence_parallel=False,
            cp=1,
            pp=1,
            ep=1,
            dp=1,
            dtype="float64",
            config=plain,
            subclassed=False,
            own_groups=False,
            distributed=False,
            checkpoint=False,
            in_fp32=(),
            other=None,
        )
        given = dict(self.truth)
        config = {**plain, **given.pop("config", {})}
        return replace(single, config=config, **given)
