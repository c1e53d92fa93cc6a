"""Tables of known repairs, as probes of plugins keep them: a tree is FIXED if it has one of the repairs completely."""

from __future__ import annotations

import copy

import pytest
from layers_text import LAYERS
from probing import Texts

from megacpp_overlays.feature_probes.repairs import Repairs, judged, meaning, table
from megacpp_overlays.model import Body, Evidence, Proof, Verdict
from megacpp_overlays.source.trees import SourceTree

SEEN = Evidence(seen="it adds once")
PLACES = ("package.layers:repaired", "package.layers:Layer.forward", "package.layers:helper", "package.layers:a_half")


def layers(text: str = LAYERS) -> Texts:
    return Texts({"package.layers": text})


def as_if_read(tree: SourceTree, *places: str) -> Repairs:
    """Return the table of a repair that was read in these places of a tree."""
    return {"this tree": {place: meaning(tree, place) for place in places}}


READ = as_if_read(layers(), *PLACES)


def test_a_known_repair_is_fixed_and_names_its_tree_and_the_compared_places() -> None:
    finding = judged(layers(), READ, SEEN)

    assert (finding.verdict, finding.proof) == (Verdict.FIXED, Proof.READ)
    assert finding.summary() == "it adds once; as in this tree"
    assert finding.repair == tuple(Body("package.layers", place.partition(":")[2]) for place in PLACES)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('    """Say what it does."""\n', "    # says nothing\n"),
        ("        return 1\n", "        return 2\n"),
        ("class Base:\n    pass", "class Base:\n    def extra(self):\n        return 2"),
        ("SCALE = 2\n", "SCALE = 2\nOTHER = 3\n"),
        ("import math\n", "import math\nimport json\n"),
    ],
    ids=["comments", "another method", "inside a base", "another constant", "another import"],
)
def test_code_outside_of_a_repair_may_change(old: str, new: str) -> None:
    assert LAYERS.replace(old, new) != LAYERS
    assert judged(layers(LAYERS.replace(old, new)), READ, SEEN).verdict is Verdict.FIXED


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("[helper(each) for", "[each for"),
        ("a_half(x) +", "x +"),
        ("import half as a_half", "import third as a_half"),
        ("from package.helpers", "from vendor.helpers"),
        ("SCALE = 2", "SCALE = 3"),
        ("SCALE = 2", "SCALE = 2\nSCALE = read()"),
        ("SCALE = 2", "if flag:\n    SCALE = 2"),
        ("@functools.cache\n", ""),
        ("@functools.cache\n", "@functools.cache\n@patched\n"),
        ("@functools.cache\n", "if flag:\n    def repaired(x): ...\n\n\n@functools.cache\n"),
        ("\nclass Base", "\ndef isinstance(*_):\n    return False\n\n\nclass Base"),
        ("\nclass Base", "\nlen = max\n\n\nclass Base"),
        ("\nclass Base", "\nfrom elsewhere import *\n\n\nclass Base"),
        ("\nclass Base", "\nrepaired = patched(repaired)\n\n\nclass Base"),
        ("\nclass Base", "\nglobals()['repaired'] = patched\n\n\nclass Base"),
        ("\nclass Base", "\ndef patch():\n    global helper\n    helper = patched\n\n\nclass Base"),
        ("\nclass Base", "\nexec(text)\n\n\nclass Base"),
        ("class Layer(Base)", "class Layer(Base, Mixed)"),
        ("class Layer(Base)", "class Layer(Base, metaclass=Meta)"),
        ("class Layer(Base)", "@patched\nclass Layer(Base)"),
        ("    def other(", "    def __getattribute__(self, name):\n        pass\n\n    def other("),
        ("    def other(", "    forward = patched(forward)\n\n    def other("),
        ("        return 1\n", "        return 1\n\nLayer.forward = patched\n"),
        ("        return 1\n", "        return 1\n\nsetattr(Layer, name, patched)\n"),
        ("        return 1\n", "        return 1\n\nLayer = patched(Layer)\n"),
        ("def repaired(", "def other("),
    ],
)
def test_an_edit_of_anything_that_a_repair_goes_through_only_looks_repaired(old: str, new: str) -> None:
    text = LAYERS.replace(old, new)
    assert text != LAYERS

    finding = judged(layers(text), READ, SEEN)

    assert (finding.verdict, finding.looks_repaired) == (Verdict.UNRECOGNISED, True)
    assert "not as in a tree that was read: package.layers:" in finding.summary()


def test_a_whole_module_and_every_definition_that_mentions_a_word_are_places_too() -> None:
    module, word = "package.layers:", "package.layers:*positions"
    read = as_if_read(layers(), module, word)
    extra = f"{LAYERS}\n    def late(self):\n        self.positions = {{}}\n"

    assert judged(layers(), {"this tree": {word: read["this tree"][word]}}, SEEN).repair == (
        Body("package.layers", "Layer.__init__"),
    )
    for place in (module, word):
        known = {"this tree": {place: read["this tree"][place]}}
        assert judged(layers(), known, SEEN).verdict is Verdict.FIXED
        assert judged(layers(extra), known, SEEN).verdict is Verdict.UNRECOGNISED


@pytest.mark.parametrize(
    "change",
    [
        "Layer.forward = patched",
        "setattr(Layer, 'forward', patched)",
        "del Layer.forward",
    ],
)
def test_a_class_is_a_place_with_all_that_is_done_to_its_methods(change: str) -> None:
    read = as_if_read(layers(), "package.layers:Layer")

    assert judged(layers(), read, SEEN).verdict is Verdict.FIXED
    assert judged(layers(f"{LAYERS}\n\n{change}\n"), read, SEEN).verdict is Verdict.UNRECOGNISED


def test_a_module_whose_text_is_known_is_not_parsed() -> None:
    source = layers().module("package.layers")
    assert source is not None
    digest, read = source.sha256[:16], as_if_read(layers(), "package.layers:")

    class UnparsedTexts(Texts):
        def module(self, name: str) -> None:
            found = copy.copy(super().module(name))
            vars(found)["syntax"] = property(lambda _: pytest.fail("parsed"))
            return found

    known = {digest: read["this tree"]["package.layers:"]}
    found = judged(UnparsedTexts({"package.layers": LAYERS}), read, SEEN, texts=known)

    assert found.verdict is Verdict.FIXED
    assert judged(layers(f"{LAYERS}# more\n"), read, SEEN, texts=known).verdict is Verdict.FIXED
    assert judged(layers(f"{LAYERS}MORE = 1\n"), read, SEEN, texts=known).verdict is Verdict.UNRECOGNISED


def test_the_nearest_tree_is_named_with_the_difference() -> None:
    two = table(PLACES[:2], {"a": "0 1", "b": f"{meaning(layers(), PLACES[0])} 1"})

    finding = judged(layers(), two, SEEN)

    assert f"not as in a tree that was read: {PLACES[1]} " in finding.summary()
    assert PLACES[0] not in finding.summary()


def test_a_place_that_a_tree_did_not_have_must_not_be_there() -> None:
    places = ("package.layers:helper", "package.layers:_added")
    read = table(places, {"this tree": f"{meaning(layers(), places[0])} -"})

    assert judged(layers(), read, SEEN).verdict is Verdict.FIXED
    assert judged(layers(f"{LAYERS}\ndef _added(): ...\n"), read, SEEN).verdict is Verdict.UNRECOGNISED


def test_a_repair_that_was_read_nowhere_only_looks_repaired() -> None:
    finding = judged(layers(), {}, SEEN, places=PLACES[:1])

    assert (finding.verdict, finding.summary()) == (Verdict.UNRECOGNISED, "it adds once; no repair was read yet")
    assert finding.repair == (Body("package.layers", "repaired"),)
