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


def decision(**changes: Any) -> dict[str, Any]:
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


def statement_of(*decisions: dict[str, Any], **changes: Any) -> dict[str, Any]:
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
        "decisions": list(decisions or [decision()]),
        **changes,
    }


LOGITS = LINEAR_CE_LOGITS.name
ARMED = {"decision": "armed", "verdict": "-", "shape": None, "seams": [], "reason": "waits for the import"}


def found(*statements: dict[str, Any]) -> list[tuple[str, str, tuple[tuple[str, tuple[int, ...]], ...]]]:
    groups = [StatementGroup(each, (number,)) for number, each in enumerate(statements)]
    return [(each.subject, each.field, each.values) for each in differences.find(groups)]


def test_equal_statements_differ_in_nothing() -> None:
    assert found(statement_of(), statement_of(decision(reason="other words"))) == []


def test_another_version_explains_all_that_follows_from_it() -> None:
    other = decision(version="2.0", source_sha256="c" * 64, verdict="FIXED", shape=None, decision="retired", seams=[])

    assert found(statement_of(), statement_of(other)) == [("scale-pad", "version", (("1.0", (0,)), ("2.0", (1,))))]


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
def test_for_one_overlay_only_the_first_cause_is_reported(changes: dict[str, Any], field: str) -> None:
    assert [(subject, name) for subject, name, _ in found(statement_of(), statement_of(decision(**changes)))] == [
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
def test_a_difference_of_the_package_explains_those_of_its_decisions(changes: dict[str, Any], field: str) -> None:
    off = decision(decision="disabled", seams=[]) if field != "python" else decision()

    assert [(subject, name) for subject, name, _ in found(statement_of(), statement_of(off, **changes))] == [
        ("megacpp_overlays", field)
    ]


@pytest.mark.parametrize(
    ("other", "subject", "field", "values", "advice"),
    [
        (
            statement_of(kernels_sha256="f" * 64),
            *("megacpp_overlays", "kernels_sha256", ("c" * 64, "f" * 64), "the kernels are not the same"),
        ),
        (
            statement_of(decision(decision="disabled", seams=[]), off=["scale-pad"]),
            *("scale-pad", "switch", ("auto", "off"), "set MEGACPP_OVERLAY_SCALE_PAD the same everywhere"),
        ),
        (
            statement_of(settings={LOGITS: "keep"}),
            *("megacpp_overlays", LOGITS, ("recompute", "keep"), f"set {LOGITS} the same everywhere, or nowhere"),
        ),
    ],
    ids=["other kernels under the same loader", "a switch", "a setting of a kernel"],
)
def test_a_difference_has_values_with_holders_and_advice(
    other: dict[str, Any], subject: str, field: str, values: tuple[str, str], advice: str
) -> None:
    (difference,) = differences.find([StatementGroup(statement_of(), (0, 1)), StatementGroup(other, (2,))])

    assert (difference.subject, difference.field) == (subject, field)
    assert difference.values == ((values[0], (0, 1)), (values[1], (2,)))
    assert advice in difference.advice


@pytest.mark.parametrize("changes", [{"version": "0.2.0"}, {"package_sha256": "e" * 64}], ids=["version", "files"])
def test_a_difference_of_the_package_explains_unknown_settings(changes: dict[str, str]) -> None:
    differing = found(
        statement_of(), statement_of(settings={LOGITS: "recompute", "MEGACPP_LINEAR_CE_NEW": "1"}, **changes)
    )

    assert [field for _, field, _ in differing] == list(changes)


def test_an_overlay_that_only_one_process_declares_is_reported() -> None:
    assert found(statement_of(), statement_of(decision(), decision(id="other"))) == [
        ("other", "declared", (("declared", (1,)), ("not declared", (0,))))
    ]


def test_torch_versions_are_compared() -> None:
    assert found(statement_of(), statement_of(versions={"torch": "2.10.0", "triton": "3.6.0"})) == [
        ("torch", "version", (("2.10.0", (1,)), ("2.11.0", (0,))))
    ]


def test_independent_causes_are_reported_together() -> None:
    newer = decision(version="2.0", verdict="FIXED", shape=None, decision="retired", seams=[])
    off = decision(decision="disabled", seams=[])

    differing = found(
        statement_of(), statement_of(newer), statement_of(off, off=["scale-pad"]), statement_of(decision(**ARMED))
    )

    assert [field for _, field, _ in differing] == ["switch", "version", "decision"]


def test_differences_of_reasons_alone_are_one_value() -> None:
    armed = decision(**ARMED)
    differing = found(statement_of(decision(reason="one")), statement_of(decision(reason="other")), statement_of(armed))

    assert differing == [
        ("scale-pad", "decision", (("active (one)", (0, 1)), ("armed (waits for the import)", (2,)))),
    ]


def test_the_value_with_the_most_holders_comes_first() -> None:
    newer = statement_of(decision(version="2.0"))

    (difference,) = differences.find([StatementGroup(statement_of(), ("a",)), StatementGroup(newer, ("b", "c"))])

    assert difference.values == (("2.0", ("b", "c")), ("1.0", ("a",)))


def test_a_switch_of_an_overlay_without_a_decision_is_reported() -> None:
    statements = [statement_of(off=[], decisions=[]), statement_of(off=["scale-pad"], decisions=[])]

    (difference,) = differences.find([StatementGroup(each, (number,)) for number, each in enumerate(statements)])

    assert (difference.subject, difference.field) == ("scale-pad", "switch")
    assert difference.values == (("auto", (0,)), ("off", (1,)))
    assert difference.advice == "set MEGACPP_OVERLAY_SCALE_PAD the same everywhere, or nowhere"


def test_an_undeclared_overlay_differs_from_one_without_a_verdict() -> None:
    statements = [
        statement_of(decisions=[decision(verdict="BROKEN")]),
        statement_of(decisions=[]),
        statement_of(decisions=[decision(verdict="-")]),
    ]

    differing = differences.find([StatementGroup(each, (number,)) for number, each in enumerate(statements)])

    (verdict,) = (each for each in differing if each.field == "verdict")
    assert verdict.values == (("-", (2,)), ("BROKEN", (0,)), ("not declared", (1,)))


@given(st.data())
def test_statements_with_unequal_digests_always_have_a_difference(data: st.DataObject) -> None:
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
            "decisions": st.lists(decisions.map(lambda changes: decision(**changes)), max_size=1),
        },
    )
    statements = [statement_of(**data.draw(wholes)) for _ in range(data.draw(st.integers(1, 4)))]
    digests = {statement.digest(each) for each in statements}

    differing = differences.find([StatementGroup(each, (number,)) for number, each in enumerate(statements)])

    assert bool(differing) == (len(digests) > 1)
    for each in differing:
        assert sorted(holder for _, who in each.values for holder in who) == list(range(len(statements)))
        assert len({value for value, _ in each.values}) == len(each.values) > 1


# Tables and ranges


@pytest.mark.parametrize(
    ("numbers", "text"),
    [([], ""), ([3], "3"), ([0, 1, 2, 3], "0-3"), ([7, 0, 1, 3], "0-1, 3, 7")],
)
def test_ranks_are_written_as_ranges(numbers: Sequence[int], text: str) -> None:
    assert differences.ranges(numbers) == text


def test_a_long_list_of_ranks_is_cut_and_counted() -> None:
    text = differences.who(range(0, 16_384, 2))

    assert text.startswith("0, 2, 4, ")
    assert text.endswith(", ... (8192 in all)")
    assert len(text) < 70


def test_the_table_is_aligned_and_shortens_hashes() -> None:
    differing = [
        Difference("scale-pad", "source_sha256", (("a" * 64, (0, 1)), ("c" * 64, (7,))), "reinstall"),
        Difference("megacpp_overlays", "mode", (("auto", (0, 1)), ("off", (7,))), "give every process the same"),
    ]

    assert differences.table(differing).splitlines() == [
        "what              differs in     value                ranks",
        "----------------  -------------  -------------------  -----",
        "scale-pad         source_sha256  aaaaaaaaaaaaaaaa...  0-1",
        "                                 cccccccccccccccc...  7",
        "megacpp_overlays  mode           auto                 0-1",
        "                                 off                  7",
    ]
    assert differences.advice(differing) == ["scale-pad: reinstall", "megacpp_overlays: give every process the same"]


def test_overlays_with_one_cause_share_a_row() -> None:
    differing = [
        Difference(each, "version", (("1.0", (0,)), ("2.0", (1,))), "install the same upstream everywhere")
        for each in ("one", "two", "three", "one")
    ]

    assert differences.table(differing, "processes").splitlines()[2:] == [
        "one    version     1.0    0",
        "two                2.0    1",
        "three",
    ]
    assert differences.advice(differing) == ["one and 2 more: install the same upstream everywhere"]


def test_a_long_value_is_wrapped_next_to_its_ranks() -> None:
    differing = [Difference("scale-pad", "decision", (("word " * 30, (0,)), ("armed", (1,))), "look")]

    lines = differences.table(differing).splitlines()[2:]

    assert len(lines) == 4
    assert max(map(len, lines)) < 100
    assert lines[0].endswith("  0")
