"""Recorded forms: a tree has the verdict of a form where all places of the form are unchanged, and only there."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from layers_text import LAYERS
from probing import Texts, ask

from megacpp_overlays.loader import registry
from megacpp_overlays.model import Body, Finding, Proof, Target, Text, Verdict
from megacpp_overlays.source import forms, knowledge
from megacpp_overlays.source.forms import ANY, MISSING, Form, FormRecord, TreeDigests
from megacpp_overlays.source.trees import SourceTree

TARGET = Target(distribution="liger-kernel", module="package.layers", symbol="Layer.forward")
PLACES = ("package.layers:repaired", "package.layers:Layer.forward", "package.layers:helper", "package.layers:a_half")
OTHER_PLACES = ("package.layers:SCALE", "package.layers:Layer*", "package.layers:", "package//csrc/layers.cc")
CPP = "int add(int x) {\n  return x + 1;  // one more\n}\n"


def layers(text: str = LAYERS) -> Texts:
    return Texts({"package.layers": text, "package:csrc/layers.cc": CPP})


def form(
    tree: SourceTree, *places: str, verdict: Verdict = Verdict.BROKEN, trees: tuple[str, ...] = ("0.8.0",)
) -> Form:
    return Form(
        verdict=verdict,
        shape="twice" if verdict is Verdict.BROKEN else None,
        trees=trees,
        seen=(("it adds twice", places[0]),),
        repair=places if verdict is Verdict.FIXED else (),
        digests=tuple(forms.digest(tree, each) for each in places),
    )


@pytest.fixture
def record(monkeypatch: pytest.MonkeyPatch) -> dict[str, FormRecord]:
    """The recorded forms, which a test fills."""
    kept: dict[str, FormRecord] = {}
    monkeypatch.setattr(forms, "record", lambda overlay, module: kept[f"{overlay} {module}"])
    return kept


def asked(tree: SourceTree, without: dict[str, str] | None = None) -> Finding:
    return ask(lambda given: forms.finding("adds-twice", TARGET, given, without or {}), tree)


def test_an_unchanged_tree_has_the_verdict_of_its_form_with_evidence_and_releases(
    record: dict[str, FormRecord],
) -> None:
    record["adds-twice package.layers"] = FormRecord(
        PLACES, (form(layers(), *PLACES, trees=("0.8.0", "0.8.2", "main abc")),)
    )

    found = asked(layers())

    assert (found.verdict, found.shape, found.proof) == (Verdict.BROKEN, "twice", None)
    assert found.summary() == "it adds twice (layers.py:15); as in 0.8.0 to 0.8.2, main abc"
    assert {each.symbol for each in found.read} == {"repaired", "Layer", "Layer.forward", "helper", "a_half"}


def test_a_repair_that_was_read_names_the_bodies_and_files_that_hold_it(record: dict[str, FormRecord]) -> None:
    places = ("package.layers:repaired", "package.layers:Layer*", "package//csrc/layers.cc")
    record["adds-twice package.layers"] = FormRecord(places, (form(layers(), *places, verdict=Verdict.FIXED),))

    found = asked(layers())

    assert (found.verdict, found.proof) == (Verdict.FIXED, Proof.READ)
    assert found.repair[:2] == (Body("package.layers", "repaired"), Body("package.layers", "Layer"))
    assert isinstance(found.repair[2], Text)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('    """Say what it does."""\n', "    # says nothing\n"),
        ("        return 1\n", "        return 2\n"),
        ("class Base:\n    pass", "class Base:\n    def extra(self):\n        return 2"),
        ("SCALE = 2\n", "SCALE = 2\nOTHER = 3\n"),
        ("import math\n", "import math\nimport json\n"),
        ("import half as a_half", "import half as a_half, third"),
        ("    def other(", "    def another(self): ...\n\n    def other("),
    ],
    ids=["comments", "another method", "inside a base", "a constant", "an import", "imported with it", "a new method"],
)
def test_code_outside_of_the_places_may_change(record: dict[str, FormRecord], old: str, new: str) -> None:
    record["adds-twice package.layers"] = FormRecord(PLACES, (form(layers(), *PLACES),))

    assert LAYERS.replace(old, new) != LAYERS
    assert asked(layers(LAYERS.replace(old, new))).verdict is Verdict.BROKEN


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("[helper(each) for", "[each for"),
        ("a_half(x) +", "x +"),
        ("import half as a_half", "import third as a_half"),
        ("from package.helpers", "from vendor.helpers"),
        ("@functools.cache\n", ""),
        ("@functools.cache\n", "@functools.cache\n@patched\n"),
        ("@functools.cache\n", "if flag:\n    def repaired(x): ...\n\n\n@functools.cache\n"),
        ("\nclass Base", "\nfrom elsewhere import *\n\n\nclass Base"),
        ("\nclass Base", "\nrepaired = patched(repaired)\n\n\nclass Base"),
        ("\nclass Base", "\nglobals()['repaired'] = patched\n\n\nclass Base"),
        ("\nclass Base", "\ndef patch():\n    global helper\n    helper = patched\n\n\nclass Base"),
        ("\nclass Base", "\nexec(text)\n\n\nclass Base"),
        ("\nclass Base", "\nrepaired.__code__ = patched.__code__\n\n\nclass Base"),
        ("class Layer(Base)", "class Layer(Base, Mixed)"),
        ("class Layer(Base)", "class Layer(Base, metaclass=Meta)"),
        ("class Layer(Base)", "@patched\nclass Layer(Base)"),
        ("    def other(", "    def __getattribute__(self, name):\n        pass\n\n    def other("),
        ("    def other(", "    forward = patched(forward)\n\n    def other("),
        ("        return 1\n", "        return 1\n\nLayer.forward = patched\n"),
        ("        return 1\n", "        return 1\n\nsetattr(Layer, name, patched)\n"),
        ("        return 1\n", "        return 1\n\nLayer = patched(Layer)\n"),
        ("    def forward(self, x):\n        return repaired(x)", "    if flag:\n        def forward(self, x):\n            return repaired(x)"),
        ("def repaired(", "def other("),
    ],
)  # fmt: skip
def test_a_change_of_any_place_is_not_recognised_and_the_place_is_named(
    record: dict[str, FormRecord], old: str, new: str
) -> None:
    record["adds-twice package.layers"] = FormRecord(PLACES, (form(layers(), *PLACES),))
    text = LAYERS.replace(old, new, 1)
    assert text != LAYERS

    found = asked(layers(text))

    assert found.verdict is Verdict.UNRECOGNISED
    assert "unlike 0.8.0 in package.layers:" in found.summary()


@pytest.mark.parametrize("place", OTHER_PLACES)
def test_values_whole_classes_whole_modules_and_files_are_places_too(place: str) -> None:
    first = forms.digest(layers(), place)
    changed = LAYERS.replace("SCALE = 2", "SCALE = 3").replace("return 1", "return 2")
    commented = f"{LAYERS}# more\n"

    assert len(first) == 16
    assert (
        forms.digest(
            Texts({"package.layers": commented, "package:csrc/layers.cc": CPP.replace("one more", "1")}), place
        )
        == first
    )
    assert (
        forms.digest(Texts({"package.layers": changed, "package:csrc/layers.cc": CPP.replace("+", "-")}), place)
        != first
    )


def test_a_place_that_a_tree_did_not_have_must_not_be_there(record: dict[str, FormRecord]) -> None:
    places = (*PLACES, "package.layers:Layer.backward")
    made = form(layers(), *places)
    record["adds-twice package.layers"] = FormRecord(places, (made,))

    assert made.digests[-1] == MISSING
    assert asked(layers()).verdict is Verdict.BROKEN
    assert asked(layers(f"{LAYERS}\n    def backward(self): ...\n")).verdict is Verdict.UNRECOGNISED


def test_a_form_may_ignore_places_and_the_nearest_form_is_named(record: dict[str, FormRecord]) -> None:
    old = form(layers(), *PLACES)
    old = old._replace(digests=(*old.digests[:1], ANY, ANY, ANY), shape="older", trees=("0.7.0",))
    new = form(layers(LAYERS.replace("half(x) +", "half(x) -")), *PLACES)
    record["adds-twice package.layers"] = FormRecord(PLACES, (new, old))

    found = asked(layers())
    other = asked(
        layers(
            LAYERS.replace("half(x) +", "half(x) -")
            .replace("return repaired(x)", "return repaired(2 * x)")
            .replace("len(total)", "1")
        )
    )

    assert (found.shape, found.evidence[-1].seen) == ("older", "as in 0.7.0")
    assert "unlike 0.7.0 in package.layers:repaired" in other.summary()


def test_a_missing_requirement_makes_a_defect_absent_unless_it_may_be_elsewhere(
    record: dict[str, FormRecord],
) -> None:
    record["adds-twice package.layers"] = FormRecord(PLACES, (form(layers(), *PLACES),))
    needs = {"package.layers:Layer.forward": "no layer", "package.layers#positions": "no positions"}

    assert asked(Texts({"package.layers": None})).verdict is Verdict.ABSENT
    assert asked(layers("def other(): pass\n"), needs).summary().startswith("no layer")
    assert asked(layers("class Layer:\n    def forward(self): pass\n"), needs).summary().startswith("no positions")
    for text in (
        "from vendor import *\n",
        "from vendor import Layer\n",
        "Layer = vendor.Layer\n",
        "def f(): Layer()\n",
    ):
        assert asked(layers(text), needs).verdict is Verdict.UNRECOGNISED, text


@pytest.fixture
def rehearsal(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv(knowledge.VARIABLE, "liger-kernel=0.8.1")
    knowledge.until.cache_clear()
    yield
    monkeypatch.undo()
    knowledge.until.cache_clear()


@pytest.mark.usefixtures("rehearsal")
@pytest.mark.parametrize(
    ("trees", "is_known"), [(("0.8.0", "0.8.2"), True), (("0.8.2",), False), (("main abc",), False)]
)
def test_a_rehearsal_forgets_forms_of_newer_releases(
    record: dict[str, FormRecord], trees: tuple[str, ...], is_known: bool
) -> None:
    record["adds-twice package.layers"] = FormRecord(PLACES, (form(layers(), *PLACES, trees=trees),))

    found = asked(layers())

    assert (found.verdict is Verdict.BROKEN) is is_known
    assert is_known or "no form of it is recorded" in found.summary()


# The record that is shipped


def test_every_part_that_is_recorded_is_declared_and_its_forms_differ() -> None:
    recorded = {(overlay, module) for overlay in forms.overlays() for module in forms.read(overlay)}

    assert {overlay for overlay, _ in recorded} <= {each.id for each in registry.load()}
    for part, kept in ((part, forms.record(*part)) for part in sorted(recorded)):
        assert len({(each.verdict, each.shape, each.digests) for each in kept.forms}) == len(kept.forms), part
        for each in kept.forms:
            assert len(each.digests) == len(kept.places), part
            assert {*each.digests} != {ANY}, part
            assert each.trees, part
            assert each.seen, part
            assert (each.verdict is Verdict.BROKEN) == (each.shape is not None), part
            assert bool(each.repair) == (each.verdict is Verdict.FIXED), part


def test_a_shape_that_is_recorded_is_one_that_its_overlay_knows() -> None:
    shapes: dict[str, set[str]] = {}
    for each in registry.load():
        shapes.setdefault(each.id, set()).update(each.repairs, each.unsupported)

    for overlay in forms.overlays():
        for module in forms.read(overlay):
            found = {each.shape for each in forms.record(overlay, module).forms if each.shape}
            assert found <= shapes[overlay], (overlay, module)


def test_a_missing_digest_says_why() -> None:
    digests = TreeDigests(Texts({"package.layers": "def broken(:\n"}))

    assert "cannot be parsed" in digests.of("package.layers:broken")
    assert digests.of("package.other:name") == MISSING
