"""The gate of pack 17 knows the check of TileLang and the kernels that do not pass it."""

from __future__ import annotations

import pytest
from installed import Edited, tree_of
from probing import ask

from megacpp_overlays.feature_probes.mamba3_mimo_reduce_layout import REFUSED, probe
from megacpp_overlays.model import Verdict
from megacpp_overlays.overlays.mamba3_mimo_reduce_layout import OVERLAY

pytestmark = pytest.mark.upstream

CHECK = "tilelang/src/backend/common/op/reduce.h"
KERNELS = "mamba_ssm/ops/tilelang/mamba3/mamba3_mimo_bwd.py"
VARLEN = "mamba_ssm/ops/tilelang/mamba3/mamba3_mimo_bwd_varlen.py"


@pytest.mark.parametrize(
    ("lane", "verdict", "shape"),
    [
        ("mamba3-pinned", Verdict.FIXED, None),
        ("edge", Verdict.BROKEN, REFUSED),
        ("spring-2026", Verdict.ABSENT, None),
        ("newest", Verdict.ABSENT, None),
    ],
)
def test_the_verdict_on_locked_releases(lane: str, verdict: Verdict, shape: str | None) -> None:
    found = ask(probe, tree_of(lane))

    assert (found.verdict, found.shape) == (verdict, shape), found.summary()
    assert set(OVERLAY.unsupported) == {REFUSED}


@pytest.mark.parametrize("path", [KERNELS, VARLEN])
def test_a_file_that_was_read_needs_no_parsing_and_an_edited_one_gets_it(path: str) -> None:
    tree = Edited(tree_of("edge"), path, {"import tilelang\n": "import tilelang  # as it was\n"})

    assert ask(probe, tree).summary() == ask(probe, tree_of("edge")).summary()


@pytest.mark.parametrize(
    ("path", "edit"),
    [
        (KERNELS, {"T.reduce_sum(dZetaZ_frag": "T.reduce_max(dZetaZ_frag", "T.reduce_sum(kq": "T.reduce_max(kq"}),
        (VARLEN, {"T.reduce_sum(kq_frag": "T.reduce_max(kq_frag"}),
        (KERNELS, {"def mamba_mimo_bwd_bwd(": "def mamba_mimo_bwd_both("}),
        (VARLEN, None),
        (CHECK, {"thread-owned reduce": "thread owned reduce"}),
        (CHECK, {"ReduceOp cannot lower": "cannot lower"}),
    ],
)
def test_an_unknown_kernel_or_check_is_not_recognised(path: str, edit: dict[str, str] | None) -> None:
    assert ask(probe, Edited(tree_of("edge"), path, edit)).verdict is Verdict.UNRECOGNISED


def test_a_tilelang_whose_sums_cannot_be_read_is_not_recognised() -> None:
    tree = Edited(tree_of("mamba3-pinned"), "tilelang/src/op/reduce.cc", None)

    assert ask(probe, tree).verdict is Verdict.UNRECOGNISED


def test_it_is_due_for_deletion_where_sums_are_lowered() -> None:
    assert ask(OVERLAY.probe, tree_of("mamba3-pinned")).verdict is Verdict.FIXED
    assert ask(OVERLAY.probe, tree_of("edge")).verdict is not Verdict.FIXED
