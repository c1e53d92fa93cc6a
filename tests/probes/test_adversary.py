"""Mutants of the texts that probes read: some seventy, the same in each run. `make adversary` runs thirty thousand."""

from __future__ import annotations

import ast
import dataclasses
from collections.abc import Callable
from random import Random

import pytest
from adversary.bases import FEW, Base, base, bases, sources
from adversary.campaign import judged, known_bodies, outcome
from adversary.judging import GONE, INSTALLED, RAISED, RETIRED, judge
from adversary.mutants import IN_CLASS, KINDS, MEMBERS, REBINDS, Module, Mutant, mutants
from adversary.otherwise import WAYS
from adversary.outline import Outline, hits
from probing import Texts, ask

from megacpp_overlays.frozen import replace
from megacpp_overlays.loader import registry
from megacpp_overlays.model import Body, Erratum, Finding, Proof, Replacement, Verdict
from megacpp_overlays.overlays import float16_optimizer_state_ids
from megacpp_overlays.source import fingerprint, forms
from megacpp_overlays.source.findings import absent, at, broken
from megacpp_overlays.source.trees import SourceTree

PART = float16_optimizer_state_ids.OVERLAY
MODULE, CLASS = PART.target.module, PART.target.symbol
METHOD = f"{CLASS}.sharded_state_dict"
(SHAPE,) = PART.repairs
TEXT = f'''
"""A module."""

import torch


def helper(x):
    return x + 1


class Base:
    pass


class {CLASS}(Base):
    def sharded_state_dict(self, model, first=1, second=2):
        """Say what it does."""
        if model is None:
            return {{}}
        for each in range(first):
            total = helper(each) + second
        return convert(first, total)

    def other(self):
        return 1
'''


TEXTS, OF_EACH = 67, 2
"""Texts that are mutated, by parts of overlays in order of their names, and mutants of each."""


@pytest.fixture(scope="module")
def few() -> list[Base]:
    return bases(registry.load(), FEW)


@pytest.mark.unmeasured
def test_no_mutant_is_installed_on_or_retired_by_luck_and_none_raises(few: list[Base]) -> None:
    found = outcome(judged(few, TEXTS * OF_EACH, seed=24, chunk=OF_EACH))

    assert not found.violations, "\n\n".join(text for texts in found.offenders.values() for text in texts)
    assert found.rows.keys() >= {f"{each.id}/{each.target.module.rpartition('.')[2]}" for each in OFFLINE}
    assert sum(row.verdicts["UNRECOGNISED"] for row in found.rows.values()) > TEXTS


OFFLINE = [each for each in registry.load() if each.target.distribution == "liger-kernel" or each.id.startswith("dsa")]


@pytest.fixture(scope="module")
def broken_trees(few: list[Base]) -> list[Base]:
    """One text for each part, on which its seams are installed."""
    found = {each.name: each for each in few if each.seams}
    assert len(found) >= 14
    return list(found.values())


@pytest.mark.unmeasured
@pytest.mark.parametrize("way", WAYS)
def test_no_seam_is_installed_on_another_kind_of_repair(way: str, broken_trees: list[Base], grid_size: str) -> None:
    """Of every day each way is tried on some parts, and each part in one way."""
    wrong, ways = [], [*WAYS]
    for each in broken_trees if grid_size == "all" else broken_trees[ways.index(way) :: len(ways)]:
        for place in sorted(each.seams, key=str):
            text = each.tree.texts[place.module]
            assert text is not None
            if way == "case handled before" and place.symbol in SURROUNDED:
                continue
            if place.symbol not in (module := Module(text)).outline.definitions:
                continue
            found = ask(each.part.probe, Texts({place.module: WAYS[way](module, place.symbol)}, each.tree))
            still_replaced = found.verdict is Verdict.BROKEN and place in dataclasses.replace(each, finding=found).seams
            if still_replaced or found.verdict is Verdict.FIXED:
                wrong.append(f"{each.name} {each.release} {place.symbol}: {found.summary()}")

    assert not wrong


SURROUNDED = {
    "DistributedOptimizer._copy_model_params_to_main_params",
    "GPTDataset.__getitem__",
    "_fused_qk_topk_lighting_with_streaming_sparse_kl",
    "_load_base_checkpoint",
    "get_rng_state",
}
"""A repair at the beginning of these runs as before, or the seam takes a way that is right without it; their tests show that."""


@pytest.mark.parametrize(
    "edit",
    [
        lambda module: module.with_((module.outline.definitions[METHOD], under_a_flag(module))),
        lambda module: module.text + f"\n\nif FLAG:\n    {CLASS}.sharded_state_dict = older\n",
        lambda module: module.text.replace(
            "    def state_dict(", "    def __getattribute__(self, name): ...\n\n    def state_dict("
        ),
    ],
    ids=["defined under a flag", "set under a flag", "looked up in another way"],
)
def test_a_known_method_that_does_not_run_is_not_broken_in_a_known_way(edit: Callable[[Module], str]) -> None:
    (release,) = [each.open() for each in sources(["megatron_core-0.19.2-"]) if each.name.startswith("megatron")]
    source = release.module(MODULE)
    assert source is not None
    assert ask(PART.probe, release).verdict is Verdict.BROKEN

    found = ask(PART.probe, Texts({MODULE: edit(Module(source.text))}, release))

    assert found.verdict is Verdict.UNRECOGNISED


def under_a_flag(module: Module) -> str:
    return "if FLAG:\n        " + module.code(module.outline.definitions[METHOD]).replace("\n", "\n    ")


# The adversary can fail


def fooled(probe: Callable[[SourceTree], Finding]) -> Erratum:
    return replace(PART, probe=probe)


def believes_in_a_name(tree: SourceTree) -> Finding:
    source = tree.module(MODULE)
    if source is None or f"class {CLASS}" not in source.text:
        return absent("there is no such class")
    fingerprint.fingerprint(source.function(METHOD)) if "raise" not in source.text else None
    return broken(SHAPE, at(source, ast.Pass(), "there is such a class"))


def takes_it_for_repaired(tree: SourceTree) -> Finding:
    source = tree.module(MODULE)
    if source is None or f"class {CLASS}" not in source.text:
        return absent("there is no such class")
    seen = at(source, ast.Pass(), "there is such a class")
    return Finding(
        verdict=Verdict.FIXED, shape=None, evidence=(seen,), repair=(Body(MODULE, METHOD),), proof=Proof.READ
    )


def leaves(tree: SourceTree) -> Finding:
    source = tree.module(MODULE)
    if source is not None and source.text != TEXT:
        raise SystemExit(3)
    return absent("it is as it was")


@pytest.mark.parametrize(
    ("probe", "violations"),
    [(believes_in_a_name, {INSTALLED, GONE}), (takes_it_for_repaired, {RETIRED, GONE}), (leaves, {RAISED})],
)
def test_a_credulous_probe_is_found_out(probe: Callable[[SourceTree], Finding], violations: set[str]) -> None:
    made = base(fooled(probe), "made up", Texts({MODULE: TEXT}))

    found = outcome(judged([made], 90, seed=1))

    assert set(found.violations) == violations
    assert all(found.violations[each] >= 3 for each in violations)
    assert all(f"--- {MODULE}" in text for texts in found.offenders.values() for text in texts)


def test_a_mutant_that_means_the_same_may_keep_its_verdict() -> None:
    made = base(fooled(takes_it_for_repaired), "made up", Texts({MODULE: TEXT}))

    same = judge(made, MODULE, Mutant("layout", "", TEXT, TEXT.replace("is None:\n", "is None:  # nothing\n\n")), {})
    docstring = judge(made, MODULE, Mutant("layout", "", TEXT, TEXT.replace("Say what", "Say otherwise what")), {})
    other = judge(made, MODULE, Mutant("operand", "", TEXT, TEXT.replace("return 1", "return 2")), {})
    changed = judge(made, MODULE, Mutant("operand", "", TEXT, TEXT.replace("+ second", "- second")), {})

    assert [(each.violation, each.is_equal) for each in (same, docstring)] == [(None, True)] * 2
    assert (other.violation, other.is_equal) == (None, False)
    assert (changed.violation, changed.verdict) == (RETIRED, Verdict.FIXED)


def test_a_mutant_may_be_the_text_of_another_release() -> None:
    newer = TEXT.replace("second=2", "second=3")
    one, other = (base(fooled(takes_it_for_repaired), "made up", Texts({MODULE: text})) for text in (TEXT, newer))

    found = judge(one, MODULE, Mutant("operand", "", TEXT, newer), known_bodies([one, other]))

    assert (found.violation, found.verdict) == (None, Verdict.FIXED)


@pytest.mark.parametrize(
    ("changed", "violation"), [(("return 1", "return 2"), None), (("+ second", "- second"), INSTALLED)]
)
def test_a_probe_may_leave_a_changed_body_to_upstream_and_no_other(
    changed: tuple[str, str], violation: str | None
) -> None:
    other = f"{CLASS}.other"

    def narrows(tree: SourceTree) -> Finding:
        source = tree.module(MODULE)
        assert source is not None
        for symbol in (METHOD, other):
            forms.fingerprint(source.function(symbol))  # the adversary records each function that is fingerprinted
        shape = "both" if source.text == TEXT else "without other"
        return broken(shape, at(source, ast.Pass(), "there is such a class"))

    method, second = (Replacement(symbol=each, make=lambda original, _: original) for each in (METHOD, other))
    part = replace(fooled(narrows), replacements={"both": (method, second), "without other": (method,)})
    made = base(part, "made up", Texts({MODULE: TEXT}))

    found = judge(made, MODULE, Mutant("operand", "", TEXT, TEXT.replace(*changed)), {})

    assert (found.violation, found.verdict) == (violation, Verdict.BROKEN)


# Mutants


def test_the_same_seed_gives_the_same_mutants_and_each_has_a_description() -> None:
    made = bases_of_a_text()
    first, again, other = (
        [(each.mutant.text, each.base.release) for each in judged([made], 60, seed=s)] for s in (1, 1, 2)
    )
    few = [each.mutant for each in judged([made], 18, seed=1)]

    assert first == again
    assert first != other
    assert {each.kind for each in few} == set(KINDS)
    assert all(each.label and each.hunk().startswith("---") for each in few)


def bases_of_a_text() -> Base:
    return base(fooled(believes_in_a_name), "made up", Texts({MODULE: TEXT}))


def test_processes_share_the_mutants_of_a_seed_between_them() -> None:
    made = bases_of_a_text()
    alone = [each.mutant.text for each in judged([made], 100, seed=3)]

    shared = [each.mutant.text for turn in range(3) for each in judged([made], 100, seed=3, turn=turn, turns=3)]

    assert len(alone) == 100
    assert sorted(shared) == sorted(alone)


def test_mutants_can_be_parsed_and_say_which_names_they_change() -> None:
    source, rng = mutants(TEXT, Random(5), [METHOD]), Random(6)
    before = Outline(TEXT)
    for mutant in (next(source) for _ in range(400)):
        changed = before.changed(Outline(mutant.text)) | mutant.rebound
        assert mutant.is_harmless or changed or mutant.kind in {"comment and string", "operand"}, mutant.hunk()
    assert rng.random() < 1


@pytest.mark.parametrize("code", [*REBINDS.values()], ids=[*REBINDS])
def test_every_way_to_rebind_a_name_is_python(code: str) -> None:
    compile(code.format(n="name"), "mutant", "exec")


@pytest.mark.parametrize("code", [*MEMBERS.values(), *IN_CLASS.values()])
def test_every_way_to_change_a_class_is_python(code: str) -> None:
    compile(code.format(c="Layer", m="forward"), "mutant", "exec")


@pytest.mark.parametrize(
    ("changed", "symbol", "hit"),
    [
        ({"Layer.forward"}, "Layer.forward", True),
        ({"Layer.forward"}, "Layer", True),
        ({"Layer"}, "Layer.forward", True),
        ({"Layer.forward"}, "Layer.other", False),
        ({"helper"}, "Layer", False),
        ({"helper"}, "", True),
        ({"*"}, "Layer", True),
        (set(), "", False),
    ],
)
def test_a_change_hits_only_symbols_that_it_reaches(changed: set[str], symbol: str, hit: bool) -> None:
    assert hits(frozenset(changed), symbol) is hit
