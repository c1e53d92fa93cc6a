"""The order of the tests, and the modules that stay with one worker: every listed name must exist, or time is lost unnoticed."""

from __future__ import annotations

import pytest
from distribution import FIRST, LONGEST, SPLIT, unit
from places import ROOT

LIGER = "tests/overlays/test_liger_flce_none_backward.py"


def test_every_listed_name_exists() -> None:
    tests = ROOT / "tests"

    assert [room for room in FIRST if not (tests / room).is_dir()] == []
    assert [name for name in (*LONGEST, *SPLIT) if not list(tests.glob(f"*/{name}"))] == []


@pytest.mark.parametrize(
    ("test", "expected"),
    [
        ("tests/loader/test_decide.py::test_a[0.8.1]", "tests/loader/test_decide.py"),
        (f"{LIGER}::test_the_witness_agrees", LIGER),
        (f"{LIGER}::test_undoing[0.8.0]", f"{LIGER} 0.8.0"),
        (f"{LIGER}::test_gradients[0.8.0-zero first]", f"{LIGER} 0.8.0"),
        (f"{LIGER}::test_other_reductions[mean-0.8.0]", f"{LIGER} 0.8.0"),
        (f"{LIGER}::test_gradients_are_right_from_logits_that_were_kept[plain]", f"{LIGER} logits_that_were_kept"),
    ],
)
def test_a_file_is_one_unit_of_work_and_so_is_each_release_with_a_long_run(test: str, expected: str) -> None:
    assert unit(test) == expected
