"""Places of recorded forms: code that differs from a form in one place alone is not recognised."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
from edited_code import archive
from packaging.version import Version
from places import WHEELS
from probing import ParsedOnce, Texts, ask, parsed_once
from releases import only
from trees import STAND_INS

from megacpp_overlays.loader import registry
from megacpp_overlays.model import Erratum, Verdict
from megacpp_overlays.source import forms
from megacpp_overlays.source.file_trees import DirectoryTree
from megacpp_overlays.source.forms import ANY, MISSING, Form

PARTS = {
    f"{each.id} {each.target.module.rpartition('.')[2]}": each
    for each in registry.load()
    if each.id in forms.overlays() and each.target.module in forms.read(each.id)
}
ON_MAIN = {
    *("cp-local-loss-mean", "expert-bias-padding-mask", "explicit-tp-groups", "fsdp-optimizer-under-update"),
    *("fully-reshardable-padding", "gathered-logits-loss", "hybrid-mtp-aux-loss", "latent-moe-fc2-init"),
    *("mamba-packed-seq-idx", "mamba3-mimo-gqa-backward", "mla-rope-head-blocks", "mla-rope-key-gradient"),
    *("mtp-roll-padded-boundaries", "mtp-token-counts-local", "mtp-z-loss", "pipeline-padding-mask"),
    *("quant-recipe-stale-weights", "residual-norm-recompute-alias", "seq-aux-loss-packed", "tp-attention-sinks"),
    *("tp-label-smoothing", "tp-norm-gradients"),
}
"""Overlays whose records have the newest code of upstream's branches."""

WITH_FORMS = [each for each in STAND_INS if not each.startswith("sparse_mla")]
"""Stand-ins that recorded forms are of; `fp8-quantized-unwrap` asks its target by patterns."""


def archives(part: Erratum, version: str) -> list[str]:
    name = f"{part.target.distribution.replace('-', '_')}-{version}"
    return [f"{name}{end}" for end in ("-", ".tar") if [*WHEELS.glob(f"{name}{end}*")]]


def releases_of(part: Erratum) -> dict[str, Form]:
    """Return the newest kept release of each recorded form of a part, newest first."""
    found = {}
    for form in forms.record(part.id, part.target.module).forms:
        kept = [each for each in form.trees if " " not in each and archives(part, each)]
        if kept:
            found[max(kept, key=Version)] = form
    return {version: found[version] for version in sorted(found, key=Version, reverse=True)}


ALL = [(name, version) for name, part in PARTS.items() for version in releases_of(part)]
DAILY = [(name, next(iter(found))) for name, part in PARTS.items() if (found := releases_of(part))]
"""The newest release of each part."""


def places_of(part: Erratum, form: Form) -> Iterator[str]:
    """Yield the places in modules that a form has and depends on."""
    places = forms.record(part.id, part.target.module).places
    for place, digest in zip(places, form.digests, strict=True):
        if digest not in {ANY, MISSING} and "//" not in place:
            yield place


def changed(tree: ParsedOnce, place: str) -> Texts:
    """Return a tree with one more statement in a place that is a function, or else with the place's name bound again."""
    module, _, symbol = place.partition(":")
    source = tree.module(module)
    assert source is not None
    name = symbol.rstrip("*#")
    lines = source.text.splitlines(keepends=True)
    for node in source.bindings.definitions(name) if name else []:
        if isinstance(node, ast.FunctionDef) and node.body[0].lineno > node.lineno:
            last = node.body[-1]
            lines.insert(last.lineno - 1, " " * last.col_offset + "changed()\n")
            return Texts({module: "".join(lines)}, tree)
    return Texts({module: f"{source.text}\n\n{name or 'something'} = changed\n"}, tree)


def recognised(part: Erratum, form: Form, tree: ParsedOnce) -> list[str]:
    """Return the places that can change without making the tree unrecognised."""
    places = places_of(part, form)
    return [place for place in places if ask(part.probe, changed(tree, place)).verdict is not Verdict.UNRECOGNISED]


@pytest.mark.unmeasured
@pytest.mark.parametrize(("name", "version"), only(ALL, DAILY))
def test_no_place_of_a_release_may_change(name: str, version: str) -> None:
    """`test_forms.py` shows of each kind of edit that it changes a place, and that the place is named."""
    part = PARTS[name]
    form, tree = releases_of(part)[version], archive(archives(part, version)[0])
    if ask(part.probe, tree).verdict is not form.verdict:
        pytest.skip("it is decided by another distribution, too, which this tree is without")

    assert recognised(part, form, tree) == []


@pytest.mark.unmeasured
@pytest.mark.parametrize("stand_in", WITH_FORMS)
def test_nor_may_one_of_code_that_no_release_has(stand_in: str) -> None:
    tree = parsed_once(STAND_INS[stand_in])
    found = {}
    for name, part in PARTS.items():
        form = forms.TreeDigests(tree).form(forms.record(part.id, part.target.module))
        if form is not None and form.verdict is ask(part.probe, tree).verdict is Verdict.BROKEN:
            found[name] = recognised(part, form, tree)

    assert [name for name, places in found.items() if places] == []
    assert found


@pytest.mark.unmeasured
@pytest.mark.parametrize(("name", "version"), only(ALL, DAILY))
def test_no_module_may_be_missing(name: str, version: str) -> None:
    part = PARTS[name]
    form, tree = releases_of(part)[version], archive(archives(part, version)[0])
    modules = {place.partition(":")[0] for place in places_of(part, form)}

    found = {each: ask(part.probe, Texts({each: None}, tree)).verdict for each in modules}

    assert {*found.values()} <= {Verdict.ABSENT, Verdict.UNRECOGNISED}, found


@pytest.mark.parametrize("name", PARTS)
def test_each_symbol_that_a_seam_replaces_is_a_place_of_each_broken_form(name: str) -> None:
    part = PARTS[name]
    module = part.target.module
    record = forms.record(part.id, module)
    for form in record.forms:
        held = {place.rstrip("*#") for place, digest in zip(record.places, form.digests, strict=True) if digest != ANY}
        symbols = {each.symbol for each in part.repairs.get(form.shape or "", ())}
        for each in symbols:
            cls = each.rpartition(".")[0]  # an inherited method is held by its class
            assert not held.isdisjoint({f"{module}:", f"{module}:{each}", f"{module}:{cls or each}"}), (
                each,
                form.trees,
            )


@pytest.mark.parametrize("name", [name for name, part in PARTS.items() if part.id in ON_MAIN])
def test_given_trees_are_recognised(name: str, upstream_trees: list[Path]) -> None:
    for path in upstream_trees:
        found = ask(PARTS[name].probe, DirectoryTree(path))
        assert found.verdict is not Verdict.UNRECOGNISED, (path, found.summary())
