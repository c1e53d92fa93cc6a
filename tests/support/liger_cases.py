"""Cases of pack 09 for a liger-kernel release: data only, for the tests and for `liger_grid.py`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

SINCE = {
    "accum_dtype": (0, 6, 2),
    "use_token_scaling": (0, 6, 3),
    "return_token_accuracy": (0, 6, 4),
    "return_predicted_tokens": (0, 8, 0),
}
"""First release with an option; the others are in 0.5.3."""


@dataclass(frozen=True)
class Case:
    """One call. Sizes are multiplied by the scale of the run; options have upstream's names, dtypes are names."""

    tokens: int = 7
    hidden: int = 4
    vocabulary: int = 11
    options: dict[str, Any] = field(default_factory=dict)
    bias: bool = False
    ce_weight: str = ""
    """`contiguous`, `strided` or none."""
    ignored: tuple[int, ...] = ()
    """Which tokens; (-1,) means all."""
    arrives: str = "random"
    """The gradient that arrives at the loss: `random`, `zero first`, `strided`, `expanded` or `masked`."""
    use: str = "once"
    """`once`, `twice` through a retained graph, or `two terms` of one loss."""
    frozen: tuple[str, ...] = ()
    strided_input: bool = False
    dtype: str = "float32"
    autocast: str = ""

    def runs_on(self, version: str) -> bool:
        """Return whether a release has all options of the case."""
        release = tuple(map(int, version.split(".")))
        return all(release >= SINCE.get(option, (0, 5, 3)) for option in self.options)


ACCUMULATE = {"accum_dtype": "float32"}
CASES = {
    "plain": Case(),
    "zero first": Case(arrives="zero first"),
    "masked": Case(arrives="masked", ignored=(0, 3)),
    "all ignored": Case(ignored=(-1,), bias=True),
    "one token": Case(tokens=1),
    "one token ignored": Case(tokens=1, ignored=(0,)),
    "one chunk": Case(tokens=3, hidden=12, vocabulary=5),
    "strided gradient": Case(arrives="strided"),
    "expanded gradient": Case(arrives="expanded", ignored=(2,)),
    "strided input": Case(strided_input=True),
    "bias": Case(bias=True, ignored=(1,)),
    "other ignore index": Case(options={"ignore_index": 5}),
    "label smoothing": Case(options={"label_smoothing": 0.2}, bias=True),
    "class weights": Case(ce_weight="contiguous", ignored=(6,)),
    "strided class weights, smoothing": Case(ce_weight="strided", options={"label_smoothing": 0.1}),
    "z-loss": Case(options={"lse_square_scale": 0.05, "return_z_loss": True}, ignored=(0,)),
    "token scaling": Case(options={"use_token_scaling": True}, ignored=(0,), bias=True),
    "all ignored, token scaling": Case(options={"use_token_scaling": True}, ignored=(-1,)),
    "every option": Case(
        options={"use_token_scaling": True, "lse_square_scale": 0.02, "label_smoothing": 0.1, "return_z_loss": True},
        bias=True,
        ce_weight="contiguous",
        ignored=(0, 5),
        arrives="masked",
    ),
    "every option but token scaling": Case(
        options={"lse_square_scale": 0.02, "label_smoothing": 0.1, "return_z_loss": True},
        bias=True,
        ce_weight="contiguous",
        ignored=(0, 5),
        arrives="masked",
    ),
    "accumulation in float32": Case(options=ACCUMULATE, bias=True),
    "frozen weight": Case(frozen=("weight",), bias=True),
    "frozen input": Case(frozen=("input",), bias=True),
    "frozen bias": Case(frozen=("bias",), bias=True),
    "retained graph": Case(use="twice", bias=True),
    "two terms of one loss": Case(use="two terms", bias=True),
    "bfloat16": Case(dtype="bfloat16", bias=True),
    "bfloat16, accumulation in float32": Case(dtype="bfloat16", options=ACCUMULATE, bias=True),
    "bfloat16, token scaling": Case(dtype="bfloat16", options={"use_token_scaling": True}),
    "autocast": Case(autocast="bfloat16"),
    "autocast, bias": Case(autocast="bfloat16", bias=True, ce_weight="contiguous"),
    "token accuracy": Case(options={"return_token_accuracy": True}, bias=True, ignored=(2,)),
    "token accuracy and predicted tokens": Case(
        options={"return_token_accuracy": True, "return_predicted_tokens": True, "use_token_scaling": True},
        ce_weight="contiguous",
    ),
    "softcap": Case(options={"softcap": 1.5}, bias=True),
    "softcap, every option": Case(
        options={"softcap": 1.5, "use_token_scaling": True, "lse_square_scale": 0.02, "label_smoothing": 0.1},
        ce_weight="contiguous",
        ignored=(1,),
    ),
    "softcap, bfloat16": Case(options={"softcap": 1.5}, dtype="bfloat16"),
    "float16": Case(dtype="float16", bias=True),
    "autocast to float16": Case(autocast="float16"),
}
"""Upstream's own kernels have no `tanh` in the Triton interpreter, so there softcap is for releases that are repaired."""
