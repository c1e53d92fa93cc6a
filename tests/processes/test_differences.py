"""Reports of differences between statements, from cause to consequence."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megacpp_overlays.loader import statement
from megacpp_overlays.processes import differences
from megacpp_overlays.processes.differences import Difference, StatementGroup
from megacpp_overlays.variables import LINEAR_CE_LOGITS


def decided(**changes: Any) -> dict[str, Any]:
    return {
        "id": "scale-pad",
        "target": "upstream.ops.Scale.forward",
        "module": "upstream.ops",
        "distribution": "upstream",
        "version": "1.0",
        "source_sha256": "a" * 64,
        "overlay_sha256": None,
        "verdict": "BROKEN",
        "shape": "unpadded",
        "decision": "active",
        "reason": "it does not pad",
        "seams": ["upstream.ops.Scale.forward"],
        "variable": "MEGACPP_OVERLAY_SCALE_PAD",
        **changes,
    }


def stated(*decisions: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {
        "schema": 1,
        "version": "0.1.0",
        "package_sha256": "b" * 64,
        "kernels_sha256": "c" * 64,
        "mode": "auto",
        "python": "3.12.1",
        "versions": {"torch": "2.11.0", "triton": "3.6.0"},
        "settings": {LOGITS: "recompute"},
        "off": [],
        "decisions": list(decisions or [decided()]),
        **changes,
    }


LOGITS = LINEAR_CE_LOGITS.name
ARMED = {"decision": "armed", "verdict": "-", "shape": None, "seams": [], "reason": "waits for the import"}


def found(*statements: dict[str, Any]) -> list[tuple[str, str, tuple[tuple[str, tuple[int, ...]], ...]]]:
    groups = [StatementGroup(each, (number,)) for number, each in enumerate(statements)]
    return [(each.subject, each.field, each.values) for each in differences.find(groups)]


def test_equal_statements_differ_in_nothing() -> None:
    assert found(stated(), stated(decided(reason="other words"))) == []


def test_another_version_explains_all_that_follows_from_it() -> None:
    other = decided(version="2.0", source_sha256="c" * 64, verdict="FIXED", shape=None, decision="retired", seams=[])

    assert found(stated(), stated(other)) == [("scale-pad", "version", (("1.0", (0,)), ("2.0", (1,))))]


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"overlay_sha256": "d" * 64, "verdict": "FIXED"}, "overlay_sha256"),
        ({"source_sha256": "c" * 64, "verdict": "FIXED", "decision": "retired"}, "source_sha256"),
        (ARMED, "decision"),
        ({"verdict": "UNRECOGNISED", "shape": None, "decision": "conflict"}, "verdict"),
        ({"shape": "otherwise", "seams": []}, "shape"),
        ({"decision": "conflict", "seams": []}, "decision"),
        ({"seams": []}, "seams"),
    ],
)
def test_of_one_overlay_the_cause_is_told_and_not_what_follows(changes: dict[str, Any], field: str) -> None:
    assert [(subject, told) for subject, told, _ in found(stated(), stated(decided(**changes)))] == [
        ("scale-pad", field)
    ]


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"version": "0.2.0", "package_sha256": "e" * 64}, "version"),
        ({"package_sha256": "e" * 64}, "package_sha256"),
        ({"package_sha256": "e" * 64, "kernels_sha256": "f" * 64}, "package_sha256"),
        ({"mode": "off"}, "mode"),
        ({"python": "3.11.9"}, "python"),
    ],
)
def test_what_concerns_the_package_explains_its_decisions(changes: dict[str, Any], field: str) -> None:
    off = decided(decision="disabled", seams=[]) if field != "python" else decided()

    assert [(subject, told) for subject, told, _ in found(stated(), stated(off, **changes))] == [
        ("megacpp_overlays", field)
    ]


@pytest.mark.parametrize(
    ("other", "subject", "field", "values", "advice"),
    [
        (
            stated(kernels_sha256="f" * 64),
            *("megacpp_overlays", "kernels_sha256", ("c" * 64, "f" * 64), "the kernels are not the same"),
        ),
        (
            stated(decided(decision="disabled", seams=[]), off=["scale-pad"]),
            *("scale-pad", "switch", ("auto", "off"), "set MEGACPP_OVERLAY_SCALE_PAD the same everywhere"),
        ),
        (
            stated(settings={LOGITS: "keep"}),
            *("megacpp_overlays", LOGITS, ("recompute", "keep"), f"set {LOGITS} the same everywhere, or nowhere"),
        ),
    ],
    ids=["other kernels under the same loader", "a switch", "a setting of a kernel"],
)
def test_a_difference_has_its_values_with_their_holders_and_says_what_to_do(
    other: dict[str, Any], subject: str, field: str, values: tuple[str, str], advice: str
) -> None:
    (difference,) = differences.find([StatementGroup(stated(), (0, 1)), StatementGroup(other, (2,))])

    assert (difference.subject, difference.field) == (subject, field)
    assert difference.values == ((values[0], (0, 1)), (values[1], (2,)))
    assert advice in difference.advice


@pytest.mark.parametrize("changes", [{"version": "0.2.0"}, {"package_sha256": "e" * 64}], ids=["version", "files"])
def test_another_package_explains_that_it_knows_other_settings(changes: dict[str, str]) -> None:
    told = found(stated(), stated(settings={LOGITS: "recompute", "MEGACPP_LINEAR_CE_NEW": "1"}, **changes))

    assert [field for _, field, _ in told] == list(changes)


def test_an_overlay_that_only_one_process_has_is_told_as_such() -> None:
    assert found(stated(), stated(decided(), decided(id="other"))) == [
        ("other", "declared", (("declared", (1,)), ("not declared", (0,))))
    ]


def test_torch_is_compared_although_no_overlay_is_about_it() -> None:
    assert found(stated(), stated(versions={"torch": "2.10.0", "triton": "3.6.0"})) == [
        ("torch", "version", (("2.10.0", (1,)), ("2.11.0", (0,))))
    ]


def test_independent_causes_are_told_together() -> None:
    newer = decided(version="2.0", verdict="FIXED", shape=None, decision="retired", seams=[])
    off = decided(decision="disabled", seams=[])

    told = found(stated(), stated(newer), stated(off, off=["scale-pad"]), stated(decided(**ARMED)))

    assert [field for _, field, _ in told] == ["switch", "version", "decision"]


def test_one_wording_of_a_reason_stands_for_all() -> None:
    armed = decided(**ARMED)
    told = found(stated(decided(reason="one")), stated(decided(reason="other")), stated(armed))

    assert told == [
        ("scale-pad", "decision", (("active (one)", (0, 1)), ("armed (waits for the import)", (2,)))),
    ]


def test_the_value_with_the_most_holders_comes_first() -> None:
    newer = stated(decided(version="2.0"))

    (difference,) = differences.find([StatementGroup(stated(), ("a",)), StatementGroup(newer, ("b", "c"))])

    assert difference.values == (("2.0", ("b", "c")), ("1.0", ("a",)))


def test_a_switch_of_an_overlay_that_nobody_decided_about_is_told() -> None:
    said = [stated(off=[], decisions=[]), stated(off=["scale-pad"], decisions=[])]

    (told,) = differences.find([StatementGroup(each, (number,)) for number, each in enumerate(said)])

    assert (told.subject, told.field) == ("scale-pad", "switch")
    assert told.values == (("auto", (0,)), ("off", (1,)))
    assert told.advice == "set MEGACPP_OVERLAY_SCALE_PAD the same everywhere, or nowhere"


def test_a_process_that_does_not_know_an_overlay_is_not_taken_for_one_without_a_verdict() -> None:
    said = [
        stated(decisions=[decided(verdict="BROKEN")]),
        stated(decisions=[]),
        stated(decisions=[decided(verdict="-")]),
    ]

    found = differences.find([StatementGroup(each, (number,)) for number, each in enumerate(said)])

    (verdict,) = (each for each in found if each.field == "verdict")
    assert verdict.values == (("-", (2,)), ("BROKEN", (0,)), ("not declared", (1,)))


@given(st.data())
def test_statements_with_unequal_digests_never_go_without_a_difference(data: st.DataObject) -> None:
    hashes = st.sampled_from(["a" * 64, "c" * 64])
    decisions = st.fixed_dictionaries(
        {},
        optional={
            "version": st.sampled_from(["1.0", "2.0", None]),
            "source_sha256": hashes,
            "overlay_sha256": st.one_of(st.none(), hashes),
            "verdict": st.sampled_from(["-", "BROKEN", "FIXED"]),
            "shape": st.sampled_from(["unpadded", None]),
            "decision": st.sampled_from(["armed", "active", "conflict", "disabled"]),
            "seams": st.sampled_from([[], ["upstream.ops.Scale.forward"]]),
        },
    )
    wholes = st.fixed_dictionaries(
        {},
        optional={
            "version": st.sampled_from(["0.1.0", "0.2.0"]),
            "package_sha256": hashes,
            "kernels_sha256": hashes,
            "mode": st.sampled_from(["auto", "off"]),
            "python": st.sampled_from(["3.12.1", "3.11.9"]),
            "versions": st.sampled_from([{"torch": "2.11.0"}, {"torch": "2.10.0"}, {}]),
            "settings": st.sampled_from([{LOGITS: "recompute"}, {LOGITS: "keep"}, {}]),
            "off": st.sampled_from([[], ["scale-pad"]]),
            "decisions": st.lists(decisions.map(lambda changes: decided(**changes)), max_size=1),
        },
    )
    said = [stated(**data.draw(wholes)) for _ in range(data.draw(st.integers(1, 4)))]
    digests = {statement.digest(each) for each in said}

    told = differences.find([StatementGroup(each, (number,)) for number, each in enumerate(said)])

    assert bool(told) == (len(digests) > 1)
    for each in told:
        assert sorted(holder for _, who in each.values for holder in who) == list(range(len(said)))
        assert len({value for value, _ in each.values}) == len(each.values) > 1


# For people.


@pytest.mark.parametrize(
    ("numbers", "text"),
    [([], ""), ([3], "3"), ([0, 1, 2, 3], "0-3"), ([7, 0, 1, 3], "0-1, 3, 7")],
)
def test_ranks_are_written_as_ranges(numbers: Sequence[int], text: str) -> None:
    assert differences.ranges(numbers) == text


def test_a_list_of_ranks_that_is_too_long_says_how_many_there_are() -> None:
    text = differences.who(range(0, 16_384, 2))

    assert text.startswith("0, 2, 4, ")
    assert text.endswith(", ... (8192 in all)")
    assert len(text) < 70


def test_the_table_is_aligned_and_shortens_what_nobody_reads() -> None:
    told = [
        Difference("scale-pad", "source_sha256", (("a" * 64, (0, 1)), ("c" * 64, (7,))), "reinstall"),
        Difference("megacpp_overlays", "mode", (("auto", (0, 1)), ("off", (7,))), "give every process the same"),
    ]

    assert differences.table(told).splitlines() == [
        "what              differs in     value                ranks",
        "----------------  -------------  -------------------  -----",
        "scale-pad         source_sha256  aaaaaaaaaaaaaaaa...  0-1",
        "                                 cccccccccccccccc...  7",
        "megacpp_overlays  mode           auto                 0-1",
        "                                 off                  7",
    ]
    assert differences.advice(told) == ["scale-pad: reinstall", "megacpp_overlays: give every process the same"]


def test_overlays_with_one_cause_share_a_row() -> None:
    told = [
        Difference(each, "version", (("1.0", (0,)), ("2.0", (1,))), "install the same upstream everywhere")
        for each in ("one", "two", "three", "one")
    ]

    assert differences.table(told, "processes").splitlines()[2:] == [
        "one    version     1.0    0",
        "two                2.0    1",
        "three",
    ]
    assert differences.advice(told) == ["one and 2 more: install the same upstream everywhere"]


def test_a_long_value_is_wrapped_beside_its_holders() -> None:
    told = [Difference("scale-pad", "decision", (("word " * 30, (0,)), ("armed", (1,))), "look")]

    lines = differences.table(told).splitlines()[2:]

    assert len(lines) == 4
    assert max(map(len, lines)) < 100
    assert lines[0].endswith("  0")
