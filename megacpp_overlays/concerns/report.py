"""Report on the overlays that concern a model, with the reason where one does not: records, lines and plain data."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from megacpp_overlays.concerns.configuration import Configuration
from megacpp_overlays.concerns.predicates import Ternary, because, of_predicate
from megacpp_overlays.errors import RegistryError
from megacpp_overlays.frozen import NamedTuple
from megacpp_overlays.loader.lines import by_overlay
from megacpp_overlays.loader.overview import Line, wrapped
from megacpp_overlays.loader.rendering import ModelData
from megacpp_overlays.model import Decision, Erratum, Record


class Concern(NamedTuple):
    """Answer for one overlay or gate: does it concern a model, and why."""

    id: str
    answer: Ternary
    because: str
    """The features that decide a no; for undecided, the unknown features."""


class Concerns(NamedTuple):
    """Answers for every overlay and gate."""

    origin: str
    """Source of the configuration of the model."""
    by_id: Mapping[str, Concern]

    def is_concerned(self, overlay_id: str) -> bool:
        """Return whether an overlay may concern the model; one without an answer may."""
        concern = self.by_id.get(overlay_id)
        return concern is None or concern.answer.concerns


def concerns(declared: Iterable[Erratum], configuration: Configuration) -> Concerns:
    """Evaluate the predicates of declarations for a configuration."""
    predicates = {each.id: each.concerns for each in declared}
    found = {name: _concern(name, predicate, configuration) for name, predicate in predicates.items()}
    return Concerns(configuration.origin, found)


def _concern(name: str, predicate: str, configuration: Configuration) -> Concern:
    try:
        return Concern(name, of_predicate(predicate, configuration), ", ".join(because(predicate, configuration)))
    except RegistryError as error:  # only a plugin can declare a malformed predicate
        return Concern(name, Ternary.UNDECIDED, str(error))


def active(records: Sequence[Record]) -> list[str]:
    """Return the ids of active overlays, in order."""
    return [name for name, decision in by_overlay(records).items() if decision is Decision.ACTIVE]


def headline(found: Concerns, names: Sequence[str]) -> str:
    """Return how many of the named active overlays concern the model, in a sentence."""
    concerned = [each for each in names if found.is_concerned(each)]
    unsure = [each for each in concerned if found.by_id[each].answer is Ternary.UNDECIDED]
    doubt = f", {len(unsure)} of them perhaps" if unsure else ""
    return f"{len(concerned)} of {len(names)} active concern this model ({found.origin}){doubt}"


def line(found: Concerns, names: Sequence[str]) -> str:
    """Return a line for the log: the active overlays that concern the model, and those that do not."""
    parts = {answer: [each for each in names if found.by_id[each].answer is answer] for answer in Ternary}
    concerned = [*parts[Ternary.YES], *(f"{each} perhaps" for each in parts[Ternary.UNDECIDED])]
    others = f"; not {', '.join(parts[Ternary.NO])}" if parts[Ternary.NO] else ""
    return f"{headline(found, names)}: {', '.join(concerned) or 'none'}{others}"


def sentence(found: Concerns, overlay_id: str) -> str:
    """Return whether an overlay concerns the model, in a few words."""
    concern = found.by_id[overlay_id]
    return f"{concern.answer.value} ({concern.because})" if concern.because else concern.answer.value


def lines(found: Concerns, names: Sequence[str]) -> list[Line]:
    """Return the lines of an audit: the active overlays that concern the model, and the others with their reason."""
    shown = [Line(""), *(Line(each) for each in wrapped(headline(found, names), "", "  "))]
    for answer, word in ((Ternary.YES, "concern it"), (Ternary.UNDECIDED, "may"), (Ternary.NO, "do not")):
        by_reason: dict[str, list[str]] = {}
        for each in names:
            if found.by_id[each].answer is answer:
                by_reason.setdefault(found.by_id[each].because, []).append(each)
        for number, (reason, ids) in enumerate(by_reason.items()):
            text = f"{reason}: {', '.join(ids)}" if reason else ", ".join(ids)
            shown += [Line(each) for each in wrapped(text, f"  {'' if number else word:12}", " " * 16)]
    return shown


def from_dict(data: Mapping[str, Any]) -> Concerns:
    """Parse the output of `as_dict`; an unknown answer, of another version, is undecided."""
    known = {each.value: each for each in Ternary}
    because_of = data.get("because", {})
    return Concerns(
        data.get("origin", ""),
        {
            name: Concern(name, known.get(answer, Ternary.UNDECIDED), because_of.get(name, ""))
            for name, answer in data.get("concerns", {}).items()
        },
    )


def as_dict(found: Concerns) -> ModelData:
    """Return plain data with stable keys."""
    return {
        "origin": found.origin,
        "concerns": {name: each.answer.value for name, each in found.by_id.items()},
        "because": {name: each.because for name, each in found.by_id.items() if each.because},
    }
