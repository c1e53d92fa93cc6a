"""Search and listing of symptoms, the words in which people describe a defect.

The score of an overlay is that of its best symptom, plus a small term for words in its other texts. A word has more weight if fewer
overlays have it. The score of a symptom is the share of its words and of the query's words that both have.
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
"""The minimum share of a query, by weight, that has to be found. A smaller share is a coincidence of one word."""
_OTHER_TEXTS = 0.25
"""The weight of words in title, defect and id, relative to those of a symptom."""
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
"""Synonyms by the stem that replaces them; the units of memory are synonyms, too."""
_MEANS = {word: meaning for meaning, words in _SYNONYMS.items() for word in words}


class FoundSymptom(NamedTuple):
    """An overlay that matches a query."""

    overlay: Erratum
    symptom: str
    """The overlay's symptom that is closest to the query."""
    score: float
    """Between 0 and 1: the share of the query that was found, by weight."""


def search(query: str, overlays: Sequence[Erratum], most: int = 5) -> list[FoundSymptom]:
    """Return the overlays that match a query, the best first.

    Args:
        query: the words of the user.
        overlays: every declaration; the parts of one overlay count once.
        most: maximum number of results.
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
    elsewhere = sum(weights[word] for word in (asked & other) - _words(best)) / total
    # Between overlays that match the same share of the query, the share of the symptom that is in the query decides.
    return FoundSymptom(overlay, best, min(1.0, share * (0.9 + 0.1 * of_symptom) + _OTHER_TEXTS * elsewhere))


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
        generated: the sentence that names the command that generates the page.
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
    """Return a symptom as the cell of a table: a sentence, with names of code marked as such."""
    first = text.split()[0]
    sentence = text if _CODE.fullmatch(first) else text[:1].upper() + text[1:]
    return _CODE.sub(lambda found: f"`{found[0]}`", sentence).replace("|", r"\|")


def area(symptom: str) -> str:
    """Return the heading that a symptom is listed under."""
    words = set(symptom.lower().replace(",", " ").replace(":", " ").split())
    return next(name for name, keys in _AREAS if not keys or any(_begins(words, key) for key in keys))


def _begins(words: Iterable[str], key: str) -> bool:
    return any(word.startswith(key) for word in words)
