"""Predicates over features: they have three values, and are never "no" for a feature that a configuration does not rule out."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from made_up import Upstream

from megacpp_overlays.concerns.configuration import UNKNOWN, Configuration, Vocabulary, possible
from megacpp_overlays.concerns.features import BY_NAME, FEATURES, Criterion, Sign
from megacpp_overlays.concerns.predicates import Ternary, because, features_of, of_feature, of_predicate
from megacpp_overlays.errors import RegistryError
from megacpp_overlays.loader import registry

YES, NO, UNDECIDED = Ternary.YES, Ternary.NO, Ternary.UNDECIDED
DECLARED = registry.load()


def configured(vocabulary: Vocabulary = Vocabulary.CONFIG, **values: Any) -> Configuration:
    return Configuration("a test", vocabulary, {key: (value,) for key, value in values.items()})


def answer(name: str, configuration: Configuration) -> Ternary:
    return of_feature(BY_NAME[name], configuration)


# --- every declaration says something ---


@pytest.mark.parametrize(
    "declared", [pytest.param(each, id=each.id) for each in {one.id: one for one in DECLARED}.values()]
)
def test_each_declaration_says_on_which_features_it_bears(declared: registry.Erratum) -> None:
    assert declared.concerns, f"{declared.id} declares no `concerns`; `every model` is an answer"
    assert {*features_of(declared.concerns)} <= BY_NAME.keys()


def test_each_feature_is_asked_for() -> None:
    assert BY_NAME.keys() == {name for each in DECLARED for name in features_of(each.concerns)}


def test_parts_of_an_overlay_agree_and_a_predicate_is_a_text(upstream: Upstream) -> None:
    with pytest.raises(RegistryError, match=r"concerns \('mla',\) is no text"):
        registry.check([("here", upstream.overlay(concerns=("mla",)))])


# --- three values ---


def test_and_or_and_not_have_three_values() -> None:
    """`mla` is on, `qk_clip` off, `half` not known."""
    known = configured(multi_latent_attention=True, qk_clip=False)
    names = {YES: "mla", NO: "qk_clip", UNDECIDED: "half"}
    order = [NO, UNDECIDED, YES]

    for one, other in itertools.product(order, repeat=2):
        assert of_predicate(f"{names[one]} and {names[other]}", known) is min(one, other, key=order.index)
        assert of_predicate(f"{names[one]} or {names[other]}", known) is max(one, other, key=order.index)
    assert [of_predicate(f"not {names[each]}", known) for each in order] == [YES, UNDECIDED, NO]
    assert of_predicate("every model", known) is YES
    assert of_predicate("", known) is UNDECIDED
    assert of_predicate("mla and no_such_feature", known) is UNDECIDED


def test_a_no_and_an_undecided_name_their_evidence() -> None:
    known = configured(
        multi_latent_attention=False, sequence_parallel=True, tensor_model_parallel_size=2, num_moe_experts=4
    )

    assert because("mla and tensor_parallel", known) == ("no multi-latent attention",)
    assert because("tensor_parallel and not sequence_parallel", known) == ("sequence parallelism",)
    assert because("mla or qk_clip", configured(multi_latent_attention=False, qk_clip=False)) == (
        "no multi-latent attention",
        "no QK clipping",
    )
    assert because("experts and half", known) == ("fp16 or bf16",)
    assert because("experts", known) == ()


@pytest.mark.parametrize("text", ["mla and", "mla()", "mla > 1", "1", "__import__('os')"])
def test_a_text_that_is_no_expression_of_features_is_refused(text: str) -> None:
    with pytest.raises(RegistryError, match="is no predicate: it takes names of features"):
        of_predicate(text, configured())


# --- never a wrong no ---

_OFF = {
    Criterion.TRUE: False,
    Criterion.GIVEN: None,
    Criterion.COUNT: 0,
    Criterion.SEVERAL: 1,
    Criterion.HAS: "none of it",
    Criterion.ABSENT: None,
}
_ON = {
    Criterion.TRUE: True,
    Criterion.GIVEN: "something",
    Criterion.COUNT: 2,
    Criterion.SEVERAL: 2,
    Criterion.ABSENT: "something",
}


def _values(sign: Sign) -> list[Any]:
    """Values with which a sign is off, is on, and decides nothing."""
    off = sign.off[0] if sign.criterion is Criterion.ONE_OF else _OFF[sign.criterion]
    on = sign.on[0] if sign.on else _ON.get(sign.criterion, object())
    return [off, on, UNKNOWN]


SIGNS = {Vocabulary.CONFIG: "config", Vocabulary.ARGUMENTS: "arguments"}


@pytest.mark.parametrize("vocabulary", SIGNS, ids=lambda each: each.name.lower())
@pytest.mark.parametrize("feature", FEATURES, ids=lambda each: each.name)
@settings(max_examples=20)
@given(data=st.data())
def test_a_partial_configuration_never_rules_out_a_feature_that_is_on(
    vocabulary: Vocabulary, feature: Any, data: st.DataObject
) -> None:
    """A predicate is not "no" of a partial configuration of a run in which the feature is on.

    Keys may be missing, values in doubt, or keys unknown to every launcher.
    """
    signs = {sign.key: sign for sign in (*getattr(feature, SIGNS[vocabulary]), *feature.shows)}
    full = {key: data.draw(st.sampled_from(_values(sign)), label=key) for key, sign in signs.items()}
    kept = data.draw(st.sets(st.sampled_from(sorted(signs))) if signs else st.just(set()))
    doubted = data.draw(st.sets(st.sampled_from(sorted(signs))) if signs else st.just(set()))
    partial = {key: (full[key], UNKNOWN) if key in doubted else (full[key],) for key in kept}
    partial["a_key_of_tomorrow"] = (data.draw(st.one_of(st.none(), st.booleans(), st.integers(), st.text())),)

    whole = of_feature(feature, configured(vocabulary, **full))
    # A sign in `shows` for a feature that the launcher does not have is not of this run.
    assume(
        not getattr(feature, SIGNS[vocabulary])
        or whole is of_feature(feature._replace(shows=()), configured(vocabulary, **full))
    )
    found = of_feature(feature, Configuration("a test", vocabulary, partial))

    assert found is not NO or whole is NO
    assert found is not NO or {*kept} >= {sign.key for sign in getattr(feature, SIGNS[vocabulary])} - doubted


@given(
    value=st.one_of(
        st.none(), st.booleans(), st.integers(), st.floats(), st.text(), st.lists(st.text()), st.just(object())
    )
)
def test_a_value_of_another_kind_decides_nothing(value: object) -> None:
    """Numbers above 1 are several ranks and 0 and 1 are none; a switch is a bool, and nothing else is."""
    several = answer("tensor_parallel", configured(tensor_model_parallel_size=value))
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    assert (several is YES) <= (is_number and value > 1)  # type: ignore[operator]
    assert (several is NO) == (value is None or (is_number and 0 <= value <= 1))  # type: ignore[operator]
    assert (answer("qk_clip", configured(qk_clip=value)) is UNDECIDED) == (
        value is not None and not isinstance(value, bool)
    )


def test_only_values_that_all_objects_share_decide() -> None:
    two = possible({"tensor_model_parallel_size": (1,)}, {"tensor_model_parallel_size": (4,), "fp16": (False,)})

    assert two == {"tensor_model_parallel_size": (1, 4), "fp16": (False,)}
    assert answer("tensor_parallel", Configuration("a test", Vocabulary.CONFIG, two)) is UNDECIDED
    same = possible({"tensor_model_parallel_size": (1,)}, {"tensor_model_parallel_size": (1,)})
    assert answer("tensor_parallel", Configuration("a test", Vocabulary.CONFIG, same)) is NO


def test_a_key_that_a_release_does_not_have_rules_its_feature_out_where_all_fields_were_read() -> None:
    fields = Configuration("a test", Vocabulary.CONFIG, {"fp16": (False,)}, whole=frozenset({"TransformerConfig"}))

    assert answer("qk_clip", fields) is NO
    assert answer("optimizer_offload", fields) is UNDECIDED, "a field of another class"
    assert answer("mamba_mixer", fields) is UNDECIDED, "no field decides it"
