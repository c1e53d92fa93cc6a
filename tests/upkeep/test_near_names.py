"""A misspelt name is answered with the one that was meant, and with every known one."""

from __future__ import annotations

from megacpp_overlays.upkeep.near_names import suggestion


def test_the_nearest_name_is_offered() -> None:
    assert suggestion("liger", ["liger-kernel", "megatron-core"]) == (
        "did you mean liger-kernel? known: liger-kernel, megatron-core"
    )


def test_nothing_near_leaves_the_list() -> None:
    assert suggestion("zzz", ["a"]) == "known: a"
    assert suggestion("zzz", []) == "known: none"
