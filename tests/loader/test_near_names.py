"""A misspelt name is answered with the one that was meant, and with every known one where they are few."""

from __future__ import annotations

from megacpp_overlays.near_names import suggestion


def test_the_nearest_name_is_offered() -> None:
    assert suggestion("liger", ["liger-kernel", "megatron-core"]) == (
        "did you mean liger-kernel? known: liger-kernel, megatron-core"
    )


def test_one_name_alone_is_offered_for_a_slip_at_its_end() -> None:
    assert suggestion("double-fxi", ["double-fix"]) == "did you mean double-fix? known: double-fix"


def test_nothing_near_leaves_the_list() -> None:
    assert suggestion("zzz", ["a"]) == "known: a"
    assert suggestion("zzz", []) == "known: none"


def test_the_beginning_of_names_counts_before_their_spelling() -> None:
    known = ["hybrid-linear-ce", "liger-flce-none", "liger-flce-dispatch", "liger"]

    assert suggestion("liger-f", known).startswith("did you mean liger-flce-none or liger-flce-dispatch? ")
    assert suggestion("flce-none", known).startswith("did you mean liger-flce-none? ")
    assert suggestion("ligre", known).startswith("did you mean liger? ")


def test_of_many_equally_near_names_the_shortest_is_proposed() -> None:
    assert suggestion("a", ["ab", "abc", "a", "acd", "ade", "aef"]).startswith("did you mean a? ")


def test_neither_case_nor_hyphens_count() -> None:
    known = ["Scale-Pad", "scale-pad-more", "liger"]

    assert suggestion("scale_pad", known).startswith("did you mean Scale-Pad? ")
    assert suggestion("SCALE-PAD-", known).startswith("did you mean scale-pad-more? ")
    assert suggestion("LIGRE", known).startswith("did you mean liger? ")


def test_many_names_are_not_listed() -> None:
    known = [f"{letter * 3}-fix" for letter in "abcdefghij"]

    assert suggestion("ccc", known) == "did you mean ccc-fix?"
    assert suggestion("qqqqqq", known) == "none of the 10 known names is near"
    assert (
        suggestion("qqqqqq", known, where="the ledger")
        == "none of the 10 known names is near (the ledger has them all)"
    )
    assert suggestion("-fix", known) == "did you mean aaa-fix?"


def test_the_intended_name_comes_before_near_ones() -> None:
    assert suggestion("1", ["10", "off"], "off") == "did you mean off? known: 10, off"
