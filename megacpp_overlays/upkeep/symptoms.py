"""Symptoms: the words in which people describe a defect, searched and listed.

The score of an overlay is that of its best symptom, plus a little for words in its other texts. A word weighs the more the fewer
overlays have it, and a symptom counts by how much of it and of the query is the same.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from megacpp_overlays.model import Erratum
from megacpp_overlays.upkeep import ledger

_LEAST = 0.25
"""The share of a query, by weight, that has to be found. Less is a coincidence of one word."""
_OTHER_TEXTS = 0.25
"""The weight of words in title, defect and id, against those of a symptom."""
_WORD = re.compile(r"[a-z0-9_.*]+")
_CODE = re.compile(r"\b\w*_\w+\b|\b[A-Za-z]+\.[a-z]\w+\b")
"""Names of code: with an underscore, or with a dot inside."""
# fmt: off
_STOP = frozenset([
    "a", "an", "and", "are", "as", "at", "by", "do", "does", "for", "from", "has", "have", "i", "if", "in", "into",
    "is", "it", "its", "my", "no", "not", "of", "on", "or", "our", "so", "than", "that", "the", "their", "then",
    "there", "this", "to", "too", "was", "we", "when", "where", "which", "while", "with", "without",
])
_AREAS = (
    ("Checkpoints and resume", ("resume", "checkpoint", "rollback", "loading", "loads", "saves")),
    ("CUDA graphs", ("graph", "capturing")),
    ("Memory and time", ("memory", "slow", "takes", "long", "faster", "gb")),
    ("Errors and crashes", (
        "error", "compile", "mismatch", "segmentation", "unsupported", "dies", "illegal", "unboundlocalerror",
        "typeerror", "keyerror", "divide", "re-initialize", "complains", "cuda",
    )),
    ("Loss, gradients and weights", ()),
)
# fmt: on
_SYNONYMS = {
    "memory": ("oom", "gb", "gib", "vram"),
    "resume": ("restart", "restarted", "resuming", "restoring", "restore", "reload", "continue"),
    "checkpoint": ("ckpt",),
    "jump": ("spike",),
    "drift": ("diverge", "desync"),
    "nan": ("inf",),
    "segmentation": ("segfault",),
    "error": ("crash", "exception", "fail", "raise"),
    "grad_norm": ("gradnorm", "gradient_norm"),
    "rate": ("lr",),
    "tp": ("tensor", "tensor_parallel", "tensor-parallel"),
    "graph": ("graphs",),
    "0": ("zero",),
    "hopper": ("h200", "h100"),
    "blackwell": ("b200", "gb200"),
}
"""Words of other people by the word that they stand for, after its ending is off, and units of what is too large."""
_MEANS = {word: meaning for meaning, words in _SYNONYMS.items() for word in words}


class FoundSymptom(NamedTuple):
    """An overlay that a query may be about."""

    overlay: Erratum
    symptom: str
    """Its symptom that is nearest to the query."""
    score: float
    """Between 0 and 1: how much of the query was found, by weight."""


def search(query: str, overlays: Sequence[Erratum], most: int = 5) -> list[FoundSymptom]:
    """Return the overlays that a query may be about, the best first.

    Args:
        query: the words of a person.
        overlays: every declaration; parts of one are looked at once.
        most: how many at most.
    """
    every = list({each.id: each for each in overlays}.values())
    texts = {
        each.id: (set().union(*map(_words, each.symptoms)), _words(f"{each.id} {each.title} {each.breaks}"))
        for each in every
    }
    counts = Counter(word for said, other in texts.values() for word in said | other)
    asked = _words(query)
    weights = {word: math.log(1 + len(every) / (1 + counts[word])) for word in asked}
    total = sum(weights.values())
    found = [_match(each, asked, weights, texts[each.id][1], total) for each in every if each.symptoms and total]
    found = [each for each in found if each.score >= _LEAST]
    return sorted(found, key=lambda each: (-round(each.score, 6), each.overlay.pack, each.overlay.id))[:most]


def _match(
    overlay: Erratum, asked: set[str], weights: Mapping[str, float], other: set[str], total: float
) -> FoundSymptom:
    def closeness(symptom: str) -> tuple[float, float]:
        words = _words(symptom)
        shared = asked & words
        return sum(weights[word] for word in shared) / total, len(shared) / len(words)

    best = max(overlay.symptoms, key=closeness)
    share, of_symptom = closeness(best)
    beside = sum(weights[word] for word in (asked & other) - _words(best)) / total
    # How much of the symptom is in the query decides between overlays that have as much of the query.
    return FoundSymptom(overlay, best, min(1.0, share * (0.9 + 0.1 * of_symptom) + _OTHER_TEXTS * beside))


def _words(text: str) -> set[str]:
    plain = re.sub(r"\bout of memory\b", "memory", text.lower()).replace("grad norm", "grad_norm").replace("-", " ")
    return {_stem(word) for each in _WORD.findall(plain) if (word := each.strip(".")) and word not in _STOP}


def _stem(word: str) -> str:
    if word in _MEANS:
        return _MEANS[word]
    for ending in ("ing", "ed", "es", "s"):
        if word.endswith(ending) and len(word) - len(ending) >= 3 and not word.endswith("ss"):
            word = word.removesuffix(ending)
            break
    word = word.rstrip("e") if len(word) > 3 else word
    return _MEANS.get(word, word)


def page(overlays: Sequence[Erratum], ranges: Mapping[str, str], generated: str) -> str:
    """Return the page of symptoms.

    Args:
        overlays: every declaration.
        ranges: the releases that each overlay repairs or gates, by id.
        generated: the sentence that says how the page is made.
    """
    rows: dict[str, list[tuple[str, Erratum]]] = {name: [] for name, _ in _AREAS}
    for each in {one.id: one for one in overlays}.values():
        for symptom in each.symptoms:
            rows[area(symptom)].append((symptom, each))
    lines = ["# Symptoms", "", generated, "", *_ABOUT]
    for name, found in rows.items():
        lines += ["", f"## {name}", "", "| you see | overlay or gate | broken in |", "|---|---|---|"]
        lines += [
            f"| {_cell(symptom)} | {ledger.link(each)}{_note(each)} | {ranges.get(each.id, each.target.distribution)} |"
            for symptom, each in sorted(found, key=lambda row: (row[0].lower(), row[1].id))
        ]
    return "\n".join(lines) + "\n"


_ABOUT = (
    "What a person sees who has a defect, in the words of an experiment log or of a traceback. A symptom can have other causes: `megacpp-overlays",
    "audit --quick` says whether the defect is in the code that is installed. `megacpp-overlays symptom WORDS` searches this page from a shell:",
    "",
    "```console",
    "$ megacpp-overlays symptom loss jumps after resume",
    "```",
)


def _note(erratum: Erratum) -> str:
    return ", gate" if not erratum.installs else ", off by default" if erratum.off_by_default else ""


def _cell(text: str) -> str:
    """Return a symptom as it stands in a table: a sentence, with names of code marked as such."""
    first = text.split()[0]
    told = text if _CODE.fullmatch(first) else text[:1].upper() + text[1:]
    return _CODE.sub(lambda found: f"`{found[0]}`", told).replace("|", r"\|")


def area(symptom: str) -> str:
    """Return the heading that a symptom is listed under."""
    words = set(symptom.lower().replace(",", " ").replace(":", " ").split())
    return next(name for name, keys in _AREAS if not keys or any(_begins(words, key) for key in keys))


def _begins(words: Iterable[str], key: str) -> bool:
    return any(word.startswith(key) for word in words)
