"""Record of forms: add the form of upstream code that a release has, once its reproducer showed what is wrong with it.

A form of a release is told from its code alone, so a fork that edits something else is recognised by it without a reproducer; see
`source.forms`. FIXED is never added: outside of a release it has to be shown by a reproducer.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from packaging.version import Version

from megacpp_overlays.loader.decide import NOT_REPAIRED
from megacpp_overlays.model import Verdict
from megacpp_overlays.source import forms
from megacpp_overlays.source.forms import ANY
from megacpp_overlays.source.trees import SourceTree

_BROKEN = Verdict.BROKEN.value


def add(record: dict[str, Any], module: str, tree: SourceTree, release: str, learned: Mapping[str, Any] | None) -> None:
    """Add a release to the recorded form that it has; where it has none, its own form, if it was shown to be broken.

    Args:
        record: what is recorded of an overlay by the module of each part, which is changed.
        module: of the target of the part. One without a record is left alone: its probe asks for a structure.
        tree: the source of the release.
        release: a version, or the head of a branch such as `main d98e8a64dd`.
        learned: verdict and shape that the reproducer gave there, as in `learned.json`; None where it did not run.

    Raises:
        SourceError: a place cannot be read.
    """
    if module not in record:
        return
    kept, known = forms.parsed(record[module]), record[module]["forms"]
    same = forms.TreeDigests(tree).form(kept)
    if same is not None and learned is None:
        row = known[kept.forms.index(same)]
        row["trees"] = sorted(dict.fromkeys([*row["trees"], release]), key=_order)
    elif same is None and (shape := _repaired(learned)) is not None:
        like = next((each for each in known[::-1] if (each["verdict"], each["shape"]) == (_BROKEN, shape)), None)
        asked = like["digests"].split() if like else [""] * len(kept.places)
        taken = [
            ANY if each == ANY else forms.digest(tree, place) for place, each in zip(kept.places, asked, strict=True)
        ]
        known.append(
            {
                "digests": " ".join(taken),
                "repair": [],
                "seen": like["seen"] if like else [["its reproducer shows the defect", ""]],
                "shape": shape,
                "trees": [release],
                "verdict": _BROKEN,
            }
        )


def _repaired(learned: Mapping[str, Any] | None) -> str | None:
    """Return the shape whose seams were shown to repair a defect, or None."""
    if learned is None or learned["verdict"] != _BROKEN or learned["shape"] == NOT_REPAIRED:
        return None
    shape: str = learned["shape"]
    return shape


def _order(tree: str) -> tuple[bool, Version]:
    """Return what sorts releases before heads of branches, which stay in the order in which they were recorded."""
    is_head = " " in tree
    return is_head, Version("0" if is_head else tree)


def written(record: Mapping[str, Any]) -> str:
    """Return the text of the file of an overlay."""
    return json.dumps(record, indent=1, sort_keys=True) + "\n"
