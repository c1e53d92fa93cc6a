"""The page of docs/ about patches of other libraries, made of the receipts of `other_patches.py`. Standard library only."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from patched_libraries import READ_IN_SOURCE

ORDERS = {"before": "patched before the import", "after": "patched after it"}
NOT_NAMED = ", **not named**"
MOST = 3
INTRODUCTION = """\
# Patches of other libraries

Other libraries replace functions of Megatron-Core, Liger and Transformer Engine, too. Such a patch can take the place of a
seam, or of a function that a probe read before an overlay was installed on it. This page lists the names that five
libraries replace, and the result of `audit()` afterwards. Each set of patches ran in two processes: it was applied before
`import megacpp_overlays` in one, and after it in the other. Overlays that are off by default were on.

`make other-patches` measures all of it again and writes this page; receipts are in
[other-patches.json](other-patches.json).
Versions: {versions}.
It needs no GPU. Transformer Engine is its Python half, as released; its compiled half is not there
(`proof/launchers/engine_python_half.py`), and no step of a model is run.

- *Wraps*: the new function holds the old one in its closure, its defaults or its globals, or the new class derives from the
  old. It may call the old one always, sometimes or never.
- *Matters to*: the overlays whose probe returns another finding when the body of the old function is removed from the source.
  A replacement that matters to no overlay changes no decision, and the audit says nothing of it.
- *Not named*: the replacement matters and the audit does not name it. That is a defect of this package.
- Only names of modules and classes are compared. A method that is put on one object, such as by verl's `patch_fused_forward(model)`, is
  not seen here and not by the audit.
"""


def markdown(found: Mapping[str, Any]) -> str:
    """Return the page."""
    named = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    parts = [INTRODUCTION.format(versions=named), "## At a glance\n", *glance(found["libraries"])]
    for library, each in found["libraries"].items():
        parts += ["", f"## {library}", "", *section(each), *in_source(library)]
    return "\n".join(parts) + "\n"


def glance(libraries: Mapping[str, Any]) -> list[str]:
    """Return a table with a row for each library."""
    rows = []
    for library, found in libraries.items():
        matter = [each for each in found["replaced"] if each["matters_to"]]
        conflicts = [sorted({each["id"] for each in found[order] if is_new_conflict(each)}) for order in ORDERS]
        rows.append(
            [
                f"[{library}](#{anchor(library)})",
                str(len(found["replaced"])),
                str(len(matter)),
                str(sum(each["calls_original"] for each in found["replaced"])),
                *(code(each) or "-" for each in conflicts),
            ]
        )
    head = ["library", "names replaced", "of these matter", "wrap the original"]
    return table([*head, *(f"new conflicts, {words}" for words in ORDERS.values())], rows)


def section(found: Mapping[str, Any]) -> list[str]:
    """Return the lines about one library."""
    lines = names(found)
    if counted := found["replaced_elsewhere"]:
        lines += [
            "",
            f"Names of other packages: {', '.join(f'{count} of `{name}`' for name, count in counted.items())}.",
        ]
    if derived := found["derived"]:
        bases = {each["base"] for each in derived}
        lines += [
            "",
            f"{len(derived)} classes derive from {len(bases)} classes of upstream and override methods. A subclass is asked "
            "for by a model's own specification, and replaces no name.",
        ]
    for order, words in ORDERS.items():
        lines += ["", f"### {words[0].upper()}{words[1:]}", "", *said(found[order])]
    return lines


def in_source(library: str) -> list[str]:
    """Return the lines about patches that were read in the source of a library."""
    read = READ_IN_SOURCE.get(library, ())
    return ["", "### Read in its source, not run", "", *(f"- {line}" for line in read)] if read else []


def names(found: Mapping[str, Any]) -> list[str]:
    """Return the table of replaced names."""
    if not found["replaced"]:
        return ["It replaces no name that a probe could read."]
    rows = [
        [
            f"`{short(each['module'])}` `{each['symbol']}`",
            f"`{each['now'].replace('<locals>.', '')}`",
            "yes" if each["calls_original"] else "no",
            code(sorted({part[0] for part in each["matters_to"]})) or "-",
            *(audit_of(each, found[order]) if order in each["orders"] else "not replaced" for order in ORDERS),
        ]
        for each in found["replaced"]
    ]
    steps = list(dict.fromkeys(each["step"] for each in found["replaced"]))
    head = ["name", "replaced by", "wraps", "matters to", *(f"audit, {words}" for words in ORDERS.values())]
    return [f"Applied: {code(steps)}.", "", *table(head, rows)]


def audit_of(name: Mapping[str, Any], decisions: Sequence[Mapping[str, Any]]) -> str:
    """Return the words of an audit about the parts that a replaced name matters to."""
    words = set()
    for part in name["matters_to"]:
        decision = decision_of(part, decisions)
        words.add(
            f"{decision['decision'] if decision else 'as without'}{'' if is_named(decision, name) else NOT_NAMED}"
        )
    return "; ".join(sorted(words)) or "-"


def decision_of(part: Iterable[str], decisions: Iterable[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """Return the decision about a part, where it is another one than without the patches."""
    return next((each for each in decisions if [each["id"], each["module"]] == [*part]), None)


def is_named(decision: Mapping[str, Any] | None, name: Mapping[str, Any]) -> bool:
    """Return whether a decision is another one than without the patches, and names the new function or its place."""
    return decision is not None and any(each in decision["reason"] for each in (name["now"], name["place"]) if each)


def said(decisions: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return the table of decisions that are others than without the patches."""
    rows = [
        [f"`{each['id']}`", f"`{short(each['module'])}`", each["stock"], each["decision"], clipped(each["reason"])]
        for each in decisions
    ]
    if not rows:
        return ["Every decision is the same as without the patches."]
    return table(["overlay", "part", "without", "with", "reason"], rows)


def is_new_conflict(decision: Mapping[str, Any]) -> bool:
    """Return whether a part is a conflict, and was none without the patches."""
    return bool(decision["decision"] == "conflict" != decision["stock"])


def clipped(reason: str) -> str:
    """Return the first sentences of a reason, for a cell."""
    parts = reason.split("; ")
    more = f"; and {len(parts) - MOST} more" if len(parts) > MOST else ""
    return ("; ".join(parts[:MOST]) + more).replace("|", "\\|").replace("<", "&lt;")


def short(module: str) -> str:
    """Return a module without the package that nearly all are of."""
    return module.removeprefix("megatron.core.")


def code(ids: Iterable[str]) -> str:
    """Return ids as code."""
    return ", ".join(f"`{each}`" for each in ids)


def anchor(title: str) -> str:
    """Return the anchor of a heading."""
    return re.sub(r"[^a-z0-9-]+", "", title.lower().replace(" ", "-"))


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Return a table."""
    return [f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *rows)]
