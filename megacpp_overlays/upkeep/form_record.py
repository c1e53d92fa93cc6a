"""Updates of the record of forms: add the form of a release's upstream code after its reproducer has shown the defect.

A form is recognised from its code alone, so a fork that edits other code is recognised by the form without a reproducer; see
`source.forms`. FIXED is never added, because outside of a release a reproducer has to show it.
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
    """Add a release to the recorded form that matches its code, or record a new form if its code was shown to be broken.

    Args:
        record: the recorded forms of an overlay, by the module of each part; changed in place.
        module: the module of the part's target. A module without a record is skipped: its probe checks a structure instead.
        tree: the source of the release.
        release: a version, or the head of a branch such as `main d98e8a64dd`.
        learned: verdict and shape from the reproducer on this release, as in `learned.json`; None where it did not run.

    Raises:
        SourceError: a place of the form cannot be read.
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
    """Return a sort key that puts releases before heads of branches, which stay in the order of recording."""
    is_head = " " in tree
    return is_head, Version("0" if is_head else tree)


def written(record: Mapping[str, Any]) -> str:
    """Return the text of an overlay's file of forms."""
    return json.dumps(record, indent=1, sort_keys=True) + "\n"
