"""Probes answer ABSENT for missing code, but not for a name that a module re-exports or a text that is too long to read."""

from __future__ import annotations

import pytest

from megacpp_overlays.loader import probing, registry
from megacpp_overlays.model import Erratum, Verdict
from megacpp_overlays.source.trees import ModuleSource

ERRATA = registry.load()
OVERLAYS = [each for each in ERRATA if each.installs]


class OneText:
    """A tree in which every module has the same text; None where it has no module."""

    def __init__(self, text: str | None) -> None:
        self._text = text

    def module(self, name: str) -> ModuleSource | None:
        return None if self._text is None else ModuleSource(name, f"{name}.py", self._text)


def name_of(erratum: Erratum) -> str:
    return f"{erratum.id} {erratum.target.module.rpartition('.')[2]}"


@pytest.mark.parametrize("erratum", ERRATA, ids=name_of)
def test_without_its_module_a_target_is_absent(erratum: Erratum) -> None:
    assert probing.examine(erratum, OneText(None)).verdict is Verdict.ABSENT


NOT_BY_ITS_NAME = {
    *(
        "compile-budget-dropout",
        "dcp-fresh-optimizer-state",
        "dcp-frozen-optimizer-state",
        "fsdp-fused-accumulation",
        "fsdp-lone-rank-gradients",
    ),
    *(
        "fsdp-reduced-twice",
        "fsdp2-per-token-loss",
        "hybrid-linear-ce",
        "liger-flce-labelled",
        "loss-parallel-log-softmax",
    ),
    *("mamba3-mimo-gqa-backward", "mamba3-mimo-reduce-layout", "megatron-cuda-on-import", "mix-order-reduction-views"),
    *(
        "cudnn-sdpa-query-gradient",
        "mla-rope-head-blocks",
        "muon-gated-fc1",
        "sft-end-of-turn-loss",
        "sparse-mla-dimensions",
    ),
    *("tilelang-bulk-copy-rank", "tilelang-grouped-reduce", "tilelang-zero-extent-iterator", "tp-label-smoothing"),
    *("tp-norm-gradients", "trainer-moe-aux-loss", "triton-register-operands"),
}
"""Overlays whose defect may be in a module without the target's name."""


@pytest.mark.parametrize("erratum", ERRATA, ids=name_of)
def test_without_its_name_a_target_is_absent_where_the_defect_can_be_nowhere_else(erratum: Erratum) -> None:
    may_be_elsewhere = erratum.id in NOT_BY_ITS_NAME or name_of(erratum) == "gdn-capture-gates common"

    found = probing.examine(erratum, OneText("class Other: pass\n"))

    assert found.verdict is (Verdict.UNRECOGNISED if may_be_elsewhere else Verdict.ABSENT), found.summary()


@pytest.mark.parametrize("erratum", OVERLAYS, ids=name_of)
@pytest.mark.parametrize(
    "gives",
    [
        "from .elsewhere import *",
        "from .elsewhere import {name}",
        "import elsewhere\n{name} = elsewhere.{name}",
        "def __getattr__(name):\n    return table[name]",
        "globals()['{name}'] = make()",
        "exec(text)",
        "def {name}(",
    ],
    ids=["star", "import", "assignment", "hook", "globals", "exec", "no module of Python"],
)
def test_a_name_that_a_module_hands_on_is_not_absent(erratum: Erratum, gives: str) -> None:
    name = erratum.target.symbol.partition(".")[0]

    found = probing.examine(erratum, OneText(gives.format(name=name) + "\n"))

    assert found.verdict is Verdict.UNRECOGNISED, found.summary()


LONG = "def f(x):\n    return x + 1\n" * 200_000
"""More than 5 MB."""
DEEP = "def f(x):\n    if x == 0:\n        return 0\n" + "".join(
    f"    elif x == {n}:\n        return {n}\n" for n in range(1, 1_200)
)
"""As deep as the branches are many."""


@pytest.mark.parametrize("erratum", OVERLAYS, ids=name_of)
def test_a_text_that_is_too_long_is_not_recognised_and_says_so(erratum: Erratum) -> None:
    found = probing.examine(erratum, OneText(LONG))

    assert found.verdict is Verdict.UNRECOGNISED
    assert "more than the 524,288 that a probe reads" in found.summary()


@pytest.mark.parametrize("erratum", OVERLAYS, ids=name_of)
def test_a_definition_that_is_too_deep_is_not_recognised_but_by_a_word_that_its_text_has_not(erratum: Erratum) -> None:
    owner, _, method = erratum.target.symbol.rpartition(".")
    text = DEEP.replace("def f(x)", f"def {method or erratum.target.symbol}(x)")
    if owner:
        text = f"class {owner}:\n" + "".join(f"    {line}\n" for line in text.splitlines())

    found = probing.examine(erratum, OneText(text))

    assert found.verdict is Verdict.UNRECOGNISED or found.verdict is probing.examine(erratum, OneText("")).verdict
    assert "RecursionError" not in found.summary()
