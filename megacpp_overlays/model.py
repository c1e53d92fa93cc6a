"""Data model of the project: verdicts, findings, overlays and gates, decisions.

Standard library only, no side effects. Every class is frozen: a new decision replaces the old record and does not edit it.
The import of this package creates all of these classes, so none is a dataclass: a small one is a named tuple, one with many
fields is a `Frozen` record.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from megacpp_overlays.errors import RegistryError
from megacpp_overlays.frozen import Frozen, FrozenValue, NamedTuple

if TYPE_CHECKING:
    from megacpp_overlays.source.trees import SourceTree


class Verdict(enum.Enum):
    """The verdict of a probe on the installed source."""

    BROKEN = "BROKEN"
    FIXED = "FIXED"
    ABSENT = "ABSENT"
    UNRECOGNISED = "UNRECOGNISED"


class Decision(enum.Enum):
    """The action that the loader took on a verdict."""

    ARMED = "armed"
    """The hook waits; the target has not been imported yet."""
    ACTIVE = "active"
    """Every seam is installed, every live binding leads to it, and the self-test passed."""
    RETIRED = "retired"
    """Upstream no longer has the defect: its repair was read or witnessed, and is the loaded code. Nothing was installed."""
    ABSENT = "absent"
    """The target is not in this environment or not in this version; nothing was installed."""
    DISABLED = "disabled"
    """Switched off, or only observed; nothing was installed."""
    GATED = "gated"
    """The installed combination cannot work, and no seam can repair it; the reason names the remedy."""
    UNPROVED = "unproved"
    """The probe does not recognise upstream, and its reproducer has not run on it yet; nothing was installed."""
    CONFLICT = "conflict"
    """The code was not recognised, or a step of the installation failed; upstream is unchanged."""


UNDECIDED = frozenset({Decision.CONFLICT, Decision.UNPROVED})
"""Decisions that end a strict run: nothing was installed, and the defect may be there."""


class Proof(enum.Enum):
    """The proof of a verdict that does not rest on the probe alone. Source that only looks repaired is UNRECOGNISED."""

    READ = "read"
    """Every body that holds the repair, or that the repair goes through, has the fingerprint of one that was read before."""
    WITNESSED = "witnessed"
    """The reproducer was run on this source in this environment: it saw no defect (FIXED), no code that could have the defect
    (ABSENT), or a defect that the overlay repairs (BROKEN)."""
    LEARNED = "learned"
    """The reproducer was run on this release when this package was built."""


class Body(NamedTuple):
    """A definition that holds a repair, or that the repair goes through: a function, a method, a class or an imported name.

    An empty symbol is the whole module.
    """

    module: str
    symbol: str

    def __str__(self) -> str:
        return f"{self.module}.{self.symbol}" if self.symbol else self.module


class ReadingKind(enum.Enum):
    """The kind of definition that a probe read."""

    FUNCTION = "function"
    CLASS = "class"
    IMPORT = "import"


class Reading(NamedTuple):
    """A definition that a finding was read from, and where its code begins; see `source.readings`."""

    module: str
    symbol: str
    kind: ReadingKind
    line: int
    """First line of the definition, decorators included, or of the import."""
    wrappers: int = 0
    """Number of wrappers that the decorators of a function account for."""
    origin: str = ""
    """`module:name` that an imported name is taken from."""

    def __str__(self) -> str:
        return f"{self.module}.{self.symbol}"


class Text(NamedTuple):
    """A shipped file that holds a repair and is not Python, such as C++, with the hash of the compared text."""

    path: str
    sha256: str

    def __str__(self) -> str:
        return self.path


class Evidence(NamedTuple):
    """One observation of a probe, with its file and line."""

    seen: str
    file: str | None = None
    line: int | None = None

    def __str__(self) -> str:
        if self.file is None:
            return self.seen
        name = self.file.rsplit("/", 1)[-1]
        return f"{self.seen} ({name}:{self.line})" if self.line else f"{self.seen} ({name})"


class Finding(FrozenValue):
    """The result of a probe: a verdict, the name of the recognised shape, and the evidence.

    A BROKEN finding must name its shape, because the shape selects the seams. A FIXED finding must name its proof and the
    place of the repair, because a team deletes its own patch on that verdict.
    """

    verdict: Verdict
    shape: str | None
    evidence: tuple[Evidence, ...]
    repair: tuple[Body | Text, ...] = ()
    """Place of the repair. For FIXED: the bodies that were compared. For a source that looks repaired: the bodies to compare."""
    proof: Proof | None = None
    """Proof of FIXED, or of another verdict that the reproducer showed; None for a verdict of the probe."""
    looks_repaired: bool = False
    """Whether an UNRECOGNISED source has the structure of a repair, though its form is not on record."""
    unpublished: bool = False
    """Whether the repair was read, but is in a tree that is no published release here."""
    candidates: tuple[str, ...] = ()
    """Shapes whose seams can be placed in an UNRECOGNISED source, see `loader.contract`; the reproducer shows which one repairs."""
    read: tuple[Reading, ...] = ()
    """Definitions that the probe asked for. The loader records them and compares the running process with them."""

    def __post_init__(self) -> None:
        if self.verdict is Verdict.BROKEN and not self.shape:
            raise ValueError("a BROKEN finding must name the shape that it recognised")
        if not self.evidence:
            raise ValueError("a finding without evidence is a guess")
        if self.verdict is Verdict.FIXED and self.proof is None:
            raise ValueError("FIXED says how it was proved")
        if self.verdict is not Verdict.FIXED and self.proof is Proof.READ:
            raise ValueError("nothing but FIXED is proved by reading")
        if self.verdict is Verdict.UNRECOGNISED and self.proof is not None:
            raise ValueError("what is UNRECOGNISED is not proved")
        if (self.looks_repaired or self.candidates) and self.verdict is not Verdict.UNRECOGNISED:
            raise ValueError("only what is UNRECOGNISED merely looks repaired, or has candidates")
        if self.unpublished and not self.looks_repaired:
            raise ValueError("only a repair is one that was read in no release")
        if bool(self.repair) is not (self.verdict is Verdict.FIXED or self.looks_repaired):
            raise ValueError("a repair, proved or not, and nothing else, names the bodies that hold it")

    def summary(self) -> str:
        """Return the evidence as one line."""
        return "; ".join(str(item) for item in self.evidence)


class Observation(NamedTuple):
    """The result of a witness or a self-test that ran the loaded target."""

    broken: bool
    seen: str


class Target(NamedTuple):
    """The upstream code that an overlay is for: a distribution, a module in it, and a qualified symbol in the module."""

    distribution: str
    module: str
    symbol: str

    def __str__(self) -> str:
        return f"{self.module}.{self.symbol}"


class Replacement(NamedTuple):
    """One declared seam: the symbol to replace, and a factory of the replacement.

    `make(original, module)` gets the plain function that is there now (unwrapped from staticmethod,
    classmethod or property) and the target module; it returns the replacement function. It may
    import torch and kernels: the target has imported them already.
    """

    symbol: str
    make: Callable[[Callable[..., Any], ModuleType], Callable[..., Any]]


class Thread(NamedTuple):
    """An upstream issue or pull request, with its state when it was last checked."""

    repository: str
    number: int
    state: str

    def __str__(self) -> str:
        return f"{self.repository}#{self.number} ({self.state})"


_Kind = TypeVar("_Kind", bound="Erratum")


class Erratum(Frozen):
    """The declaration of one upstream defect and its remedy: an `Overlay` repairs it, a `Gate` warns of it.

    A field that every declaration must fill has no default; fields that repeat another one in other words have one. There is no
    field for the end of an erratum: it ends when its probe says FIXED.

    Raises:
        RegistryError: `retired` is given, a separate check that overlays declared up to 0.1: delete it.
    """

    remedy: ClassVar[Decision]
    """The decision for a broken shape that it answers."""
    installs: ClassVar[bool]
    """Whether it may change anything in a process."""
    kind: ClassVar[str]
    """Its kind as a word for users: overlay or gate."""
    untreated: ClassVar[str]
    """Heading of `breaks` on a page: the condition under which the defect does its harm."""
    advice: ClassVar[str]
    """Heading of a sentence of `unsupported` on a page."""

    id: str
    """Lower-case words joined by hyphens; also the name in logs, variables and the ledger."""
    pack: int
    """Number of the upstream problem in the inventory."""
    title: str
    """Its effect, in one short sentence."""
    target: Target
    probe: Callable[[SourceTree], Finding]
    """Pure, standard library only: source in, finding out."""
    unsupported: Mapping[str, str]
    """Broken shapes that are known but not repaired, each with a sentence: the reason, or for a gate the remedy."""
    breaks: str
    """The failure without it, for the log line."""
    retire_when: str
    """The condition for deleting it: the repair that upstream has once the probe says FIXED."""
    threads: tuple[Thread, ...]
    last_validated: str
    """Date, host and versions of the last validation."""
    brief: str = ""
    """The repaired behaviour, in few words for its line in a log: `gradients with reduction="none"`. If it is empty, the line
    has the beginning of the title."""
    until: str = ""
    """`retire_when` in as few words."""
    symptoms: tuple[str, ...] = ()
    """Symptoms of the defect, in the words of an experiment log or of a traceback: `grad_norm is 0`. The command
    `symptom` searches them, and docs/symptoms.md lists them."""
    concerns: str = ""
    """Features of a model that the defect needs, as a predicate of `concerns.features`: `mla and tensor_parallel`, or
    `every model`. An empty predicate counts as every model. No decision and no installation reads it."""

    def __new__(cls: type[_Kind], **fields: object) -> _Kind:
        """Refuse a field of 0.1 by name, because the error about an unknown argument would not name the remedy."""
        if "retired" in fields:
            raise RegistryError(
                f"{fields.get('id')} declares `retired`, which has gone: an overlay is due when its probe says FIXED. "
                "Delete the argument and the function that it names"
            )
        return object.__new__(cls)

    @property
    def variable(self) -> str:
        """Name of the environment variable that switches it off."""
        return variable_for(self.id)

    @property
    def off_by_default(self) -> bool:
        """Whether it stays off until its variable says `on`."""
        return False

    @property
    def repairs(self) -> Mapping[str, tuple[Replacement, ...]]:
        """Seams by broken shape."""
        return {}

    @property
    def companions(self) -> tuple[str, ...]:
        """Distributions that it concerns, in addition to that of the target."""
        return ()

    @property
    def functions(self) -> tuple[Callable[..., Any], ...]:
        """Every function of the declaration. With the fields, they determine the code that runs."""
        return (self.probe,)

    def answers(self, shape: str | None) -> bool:
        """Return whether it has a remedy for a broken shape that the probe named."""
        raise NotImplementedError


class Overlay(Erratum):
    """The declaration of one runtime fix: seams for each repaired shape, and checks that the seams work.

    A defect that upstream has in several modules, at once or one after the other, is declared in *parts*: one
    declaration for each target module, with the same id, pack, title, breaks, retire_when and threads. Each part is
    decided on its own. All parts share one switch, and an audit leaves out idle parts where another part has work.
    """

    remedy = Decision.ACTIVE
    installs = True
    kind = "overlay"
    untreated = "Without it"
    advice = "Left alone"

    replacements: Mapping[str, tuple[Replacement, ...]]
    """Seams by broken shape. A broken shape that is not listed ends in conflict."""
    witness: Callable[[ModuleType], Observation] | None
    """Cheap check of the loaded target before installing; must agree with the finding."""
    self_test: Callable[[ModuleType], Observation]
    """The same check through the public entry after installing; must report not broken."""
    opt_in: bool
    """Whether it stays off until its variable says `on`, because it changes more than the defect."""
    needs: tuple[str, ...] = ()
    """Ids of the overlays that this one depends on: without their repair it does harm. It is installed only where each of them
    is active, or is not needed because upstream is right or has no such code. It is taken out when that ends. Most need nothing."""
    needs_parts: tuple[str, ...] = ()
    """Target modules of other parts of the same overlay that this part depends on: without them it has no effect, or does harm.
    The rule is that of `needs`. Dependencies have no cycle: code that several parts need is in a part that needs none of them."""

    @property
    def off_by_default(self) -> bool:
        """Whether it stays off until its variable says `on`."""
        return self.opt_in

    @property
    def repairs(self) -> Mapping[str, tuple[Replacement, ...]]:
        """Seams by broken shape."""
        return self.replacements

    @property
    def functions(self) -> tuple[Callable[..., Any], ...]:
        """Every function that the declaration brings."""
        makes = [each.make for replacements in self.replacements.values() for each in replacements]
        return (self.probe, self.self_test, *([self.witness] if self.witness else []), *makes)

    def depends_on(self, other: Erratum) -> bool:
        """Return whether this overlay may be installed only while another overlay, or another part of its own, is."""
        if other.id == self.id:
            return other.target.module in self.needs_parts
        return other.id in self.needs

    def answers(self, shape: str | None) -> bool:
        """Return whether there are seams for a broken shape."""
        return shape in self.replacements


class Gate(Erratum):
    """The declaration of a combination that cannot work: it installs nothing, and warns the user when torch is imported.

    The probe reads source and needs no import of the target, so the warning comes before the first compile of a run. The probe
    says BROKEN where the combination is installed, and `unsupported` names every such shape, each with its remedy.
    """

    remedy = Decision.GATED
    installs = False
    kind = "gate"
    untreated = "If nothing is done"
    advice = "What to do"

    beside: tuple[str, ...]
    """Distributions of the combination, in addition to that of the target."""
    decided_by: str | None = None
    """The distribution among `beside` whose release decides whether the combination works; None for that of the target."""
    elsewhere: Callable[[], str | None] | None = None
    """Returns the reason why this host is not concerned, such as that it has other GPUs, or None if it is. It is called only
    where the combination is installed: a matrix and a mutant are the same on every host. None if every host is concerned."""

    @property
    def functions(self) -> tuple[Callable[..., Any], ...]:
        """Every function that the declaration brings."""
        return (self.probe, *([self.elsewhere] if self.elsewhere else []))

    @property
    def companions(self) -> tuple[str, ...]:
        """Distributions of the combination, in addition to that of the target."""
        return self.beside

    def answers(self, shape: str | None) -> bool:
        """Return whether there is advice for a broken shape."""
        return shape in self.unsupported


def variable_for(overlay_id: str) -> str:
    """Return the environment variable of an overlay id: `scale-pad` -> `MEGACPP_OVERLAY_SCALE_PAD`."""
    return "MEGACPP_OVERLAY_" + overlay_id.upper().replace("-", "_")


class Record(Frozen):
    """One decision of this process, with the data to check it."""

    overlay: Erratum
    decision: Decision
    reason: str
    finding: Finding | None = None
    version: str | None = None
    """Version or origin of the target as it is here, such as `0.19.2`."""
    source_sha256: str | None = None
    """Hash of the text of the target module."""
    seams: tuple[str, ...] = ()
    """Qualified names that are bound to a seam now."""
    rebound: tuple[str, ...] = ()
    """Stale aliases that were found by identity and are bound to the seam now."""
    calls: tuple[tuple[str, int], ...] = ()
    """Seams, with the number of calls of each in this process so far; a seam that does not count its calls is left out."""
    around: tuple[str, ...] = ()
    """Third-party code in the place of a seam, around it or next to it, by names that are the same in all processes."""

    @property
    def verdict(self) -> str:
        """The verdict as text, or `-` if no probe has run."""
        return self.finding.verdict.value if self.finding else "-"

    @property
    def proof(self) -> str | None:
        """The proof of the verdict as text; None for a verdict of the probe alone."""
        return self.finding.proof.value if self.finding and self.finding.proof else None

    @property
    def shape(self) -> str:
        """The recognised shape, or `-`."""
        return (self.finding.shape if self.finding else None) or "-"
