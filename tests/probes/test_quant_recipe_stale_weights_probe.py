"""The probe of layers that a recipe quantizes: given trees, and edits of the newest release."""

from __future__ import annotations

from pathlib import Path

import pytest
from edited_code import edited_release
from probing import Texts, ask

from megacpp_overlays.feature_probes.quant_recipe_stale_weights import ENGINE, TARGET, probe
from megacpp_overlays.model import Finding, Verdict
from megacpp_overlays.source.file_trees import DirectoryTree


def edited(release: str, old: str, new: str) -> Finding:
    return ask(probe, edited_release(TARGET.module, old, new, release=release))


def test_given_trees_are_fixed(upstream_trees: list[Path]) -> None:
    for path in upstream_trees:
        assert ask(probe, DirectoryTree(path)).verdict is Verdict.FIXED, path


def test_what_is_not_there_is_absent() -> None:
    reads = {ENGINE: "class TEQuantizationParams: pass"}

    assert ask(probe, Texts({TARGET.module: None})).verdict is Verdict.ABSENT
    assert ask(probe, Texts({TARGET.module: "class Other: pass", **reads})).verdict is Verdict.ABSENT
    assert ask(probe, Texts({TARGET.module: "class MegatronModule: pass", **reads})).verdict is Verdict.ABSENT
    assert ask(probe, Texts({TARGET.module: "class MegatronModule: pass", ENGINE: None})).verdict is Verdict.ABSENT


def test_what_comes_from_elsewhere_is_not_absent() -> None:
    reads = {ENGINE: "class TEQuantizationParams: pass"}

    text = "from vendor import MegatronModule\n"
    assert ask(probe, Texts({TARGET.module: text, **reads})).verdict is Verdict.UNRECOGNISED


@pytest.mark.parametrize("release", ["0.18.2", "0.19.2"])
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("    def set_is_first_microbatch(self):", "    @other\n    def set_is_first_microbatch(self):"),
        ("    def set_is_first_microbatch(self):", "    def set_is_first_microbatch(self, more=None):"),
        ("class MegatronModule(", "@other\nclass MegatronModule("),
        ("            self.config.fp8 is not None\n", "            self.config.fp8 is None\n"),
        ("                m.is_first_microbatch = True\n", "                m.is_first_microbatch = FLAG\n"),
        (
            "                self.modules_with_is_first_microbatch = []\n",
            "                self.modules_with_is_first_microbatch = other()\n",
        ),
    ],
    ids=["decorated", "a parameter more", "a decorated class", "another condition", "another flag", "other layers"],
)
def test_the_method_must_be_as_it_was_read(release: str, old: str, new: str) -> None:
    assert edited(release, old, new).verdict is Verdict.UNRECOGNISED
