"""The words of the project as data: verdicts, findings, overlays and gates, decisions.

Standard library only, no effects. Everything here is frozen: a decision that was taken is not edited,
it is replaced by the next one. None of the classes is a dataclass, because an import of this package makes them all: what
is small is a named tuple, what has many fields is a `Frozen` record.
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
    """What a probe says about the code that is really there."""

    BROKEN = "BROKEN"
    FIXED = "FIXED"
    ABSENT = "ABSENT"
    UNRECOGNISED = "UNRECOGNISED"


class Decision(enum.Enum):
    """What the loader did about it."""

    ARMED = "armed"
    """The hook waits; the target has not been imported yet."""
    ACTIVE = "active"
    """Every seam is in, every live binding leads to it, and the self-test passed."""
    RETIRED = "retired"
    """Upstream no longer has the defect: its repair was read or witnessed, and is what is loaded. Nothing was installed."""
    ABSENT = "absent"
    """The target is not in this environment or not in this version; nothing was installed."""
    DISABLED = "disabled"
    """Switched off, or only observed; nothing was installed."""
    GATED = "gated"
    """What is installed together cannot work, and nothing can be replaced; the reason says what to do."""
    UNPROVED = "unproved"
    """The probe does not recognise upstream, and its reproducer has not run on it yet; nothing was installed."""
    CONFLICT = "conflict"
    """Something was not recognised or did not work; upstream is exactly as it was."""


UNDECIDED = frozenset({Decision.CONFLICT, Decision.UNPROVED})
"""Decisions with which a run that must not go on unrepaired ends: nothing was installed, and the defect may be there."""


class Proof(enum.Enum):
    """How a verdict is known where it is not the probe's alone. What only looks repaired is UNRECOGNISED."""

    READ = "read"
    """Every body that holds the repair, or that it goes through, is one that was read before, by fingerprint."""
    WITNESSED = "witnessed"
    """The reproducer was run on this very source in this environment: it saw no defect (FIXED), nothing that could have it
    (ABSENT), or a defect that the overlay repairs (BROKEN)."""
    LEARNED = "learned"
    """The same on this very release, when this package was made."""


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
    """How many wrappers the decorators of a function explain."""
    origin: str = ""
    """`module:name` that an imported name is taken from."""

    def __str__(self) -> str:
        return f"{self.module}.{self.symbol}"


class Text(NamedTuple):
    """A shipped file that holds a repair and is no Python, such as C++, with the hash of what was compared."""

    path: str
    sha256: str

    def __str__(self) -> str:
        return self.path


class Evidence(NamedTuple):
    """One thing a probe saw, and where."""

    seen: str
    file: str | None = None
    line: int | None = None

    def __str__(self) -> str:
        if self.file is None:
            return self.seen
        name = self.file.rsplit("/", 1)[-1]
        return f"{self.seen} ({name}:{self.line})" if self.line else f"{self.seen} ({name})"


class Finding(FrozenValue):
    """The answer of a probe: a verdict, the name of the shape it recognised, and what it saw.

    A BROKEN finding must name its shape, because the shape selects the seams. A FIXED one must say how that was proved
    and where the repair is: a team deletes its own patch on that word.
    """

    verdict: Verdict
    shape: str | None
    evidence: tuple[Evidence, ...]
    repair: tuple[Body | Text, ...] = ()
    """Where the repair is: for FIXED what was compared, for what looks repaired what would have to be."""
    proof: Proof | None = None
    """How FIXED was earned, or another verdict where its reproducer showed it; None where the probe says it."""
    looks_repaired: bool = False
    """Whether something UNRECOGNISED has the structure of a repair, though nobody read it."""
    unpublished: bool = False
    """Whether the repair was read, and is here in a tree that is no published release."""
    candidates: tuple[str, ...] = ()
    """Shapes whose seams can be placed in something UNRECOGNISED, see `loader.contract`; the reproducer tells which repairs."""
    read: tuple[Reading, ...] = ()
    """Definitions that the probe asked for. The loader records them, and holds the live process against them."""

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
    """What a witness or a self-test saw when it ran the loaded target."""

    broken: bool
    seen: str


class Target(NamedTuple):
    """What an overlay is about: a distribution, a module in it, and a qualified symbol in that."""

    distribution: str
    module: str
    symbol: str

    def __str__(self) -> str:
        return f"{self.module}.{self.symbol}"


class Replacement(NamedTuple):
    """One declared seam: the symbol to replace and how to make what replaces it.

    `make(original, module)` gets the plain function that is there now (unwrapped from staticmethod,
    classmethod or property) and the target module; it returns the function to put in its place. It may
    import torch and kernels: the target has imported them already.
    """

    symbol: str
    make: Callable[[Callable[..., Any], ModuleType], Callable[..., Any]]


class Thread(NamedTuple):
    """An upstream issue or pull request, and its state when somebody last looked."""

    repository: str
    number: int
    state: str

    def __str__(self) -> str:
        return f"{self.repository}#{self.number} ({self.state})"


_Kind = TypeVar("_Kind", bound="Erratum")


class Erratum(Frozen):
    """The declaration of one upstream defect, and of what to do about it: an `Overlay` repairs, a `Gate` warns.

    No field that each has something to say about has a default, but for those that say the same in other words. When an erratum is over is no field: it is when its probe says FIXED.

    Raises:
        RegistryError: `retired` is given, a check of its own that an overlay had up to 0.1: delete it.
    """

    remedy: ClassVar[Decision]
    """What is done about a broken shape that it answers."""
    installs: ClassVar[bool]
    """Whether it may change anything in a process."""
    kind: ClassVar[str]
    """What it is called."""
    untreated: ClassVar[str]
    """Head of `breaks` on a page: what the reader would have to leave out or do."""
    advice: ClassVar[str]
    """Head of a sentence of `unsupported` on a page."""

    id: str
    """Lower-case words joined by hyphens; also the name in logs, variables and the ledger."""
    pack: int
    """Number of the upstream problem in the inventory."""
    title: str
    """What it does, in one short sentence."""
    target: Target
    probe: Callable[[SourceTree], Finding]
    """Pure, standard library only: source in, finding out."""
    unsupported: Mapping[str, str]
    """Broken shapes that are known but not repaired, each with a sentence: why, or for a gate what to do about it."""
    breaks: str
    """What goes wrong without it, for the log line."""
    retire_when: str
    """The sentence that says when it is deleted: what upstream has once the probe says FIXED."""
    threads: tuple[Thread, ...]
    last_validated: str
    """Date, host and versions of the last validation."""
    brief: str = ""
    """What it repairs, in the few words that its line in a log has room for: `gradients with reduction="none"`. Without it
    the line has the beginning of the title."""
    until: str = ""
    """`retire_when` in as few words."""
    symptoms: tuple[str, ...] = ()
    """What a person sees who has the defect, in the words of an experiment log or of a traceback: `grad_norm is 0`. The command
    `symptom` searches them, and docs/symptoms.md lists them."""
    concerns: str = ""
    """Features of a model without which it has nothing to do, as a predicate of `concerns.features`: `mla and tensor_parallel`, or
    `every model`. Without one it is taken to concern every model. Nothing that decides or installs reads it."""

    def __new__(cls: type[_Kind], **fields: object) -> _Kind:
        """Refuse a field of 0.1 by name: the error about an unknown argument would not say what to do."""
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
        """Distributions that it is about, beside that of the target."""
        return ()

    @property
    def functions(self) -> tuple[Callable[..., Any], ...]:
        """Every function that the declaration brings: what runs is told by them and by the fields."""
        return (self.probe,)

    def answers(self, shape: str | None) -> bool:
        """Return whether it can do what it is there for where the probe named this broken shape."""
        raise NotImplementedError


class Overlay(Erratum):
    """The declaration of one runtime fix: seams for each shape that is repaired, and the tests that they hold.

    A defect that upstream keeps in several modules, at once or one after the other, is declared in *parts*: one
    declaration for each target module, alike in id, pack, title, breaks, retire_when and threads. Each part is
    decided on its own; the switch is one, and an audit leaves out parts that have nothing to do where another has.
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
    """The same question through the public entry after installing; must say not broken."""
    opt_in: bool
    """Whether it stays off until its variable says `on`, because it changes more than what is broken."""
    needs: tuple[str, ...] = ()
    """Ids of overlays without whose repair this one does harm. It goes in only where each of them is active, or upstream
    is right or has no such thing, and comes out when that ends. Most need nothing."""
    needs_parts: tuple[str, ...] = ()
    """Target modules of other parts of the same overlay without which this part has no effect, or does harm. The rule is
    that of `needs`. No circle: what several parts need is in a part that needs none of them."""

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
        """Return whether this one may be in only while another overlay, or another part of its own, is."""
        if other.id == self.id:
            return other.target.module in self.needs_parts
        return other.id in self.needs

    def answers(self, shape: str | None) -> bool:
        """Return whether there are seams for a broken shape."""
        return shape in self.replacements


class Gate(Erratum):
    """The declaration of a combination that cannot work: nothing is installed, and a run is told when it arms.

    It is read from source before anything is imported, so that a run is told before its first compile. Its probe says
    BROKEN where the combination is installed, and `unsupported` names every such shape, each with what to do about it.
    """

    remedy = Decision.GATED
    installs = False
    kind = "gate"
    untreated = "If nothing is done"
    advice = "What to do"

    beside: tuple[str, ...]
    """Distributions of the combination, beside that of the target."""
    decided_by: str | None = None
    """The one of them whose release decides whether the combination works; None where that of the target does."""
    elsewhere: Callable[[], str | None] | None = None
    """Says why this host is not concerned, such as that it has other GPUs, and None where it is. Asked only where the
    combination is installed; a matrix and a mutant are the same on every host. None where every host is concerned."""

    @property
    def functions(self) -> tuple[Callable[..., Any], ...]:
        """Every function that the declaration brings."""
        return (self.probe, *([self.elsewhere] if self.elsewhere else []))

    @property
    def companions(self) -> tuple[str, ...]:
        """Distributions of the combination, beside that of the target."""
        return self.beside

    def answers(self, shape: str | None) -> bool:
        """Return whether there is advice for a broken shape."""
        return shape in self.unsupported


def variable_for(overlay_id: str) -> str:
    """Return the environment variable of an overlay id: `scale-pad` -> `MEGACPP_OVERLAY_SCALE_PAD`."""
    return "MEGACPP_OVERLAY_" + overlay_id.upper().replace("-", "_")


class Record(Frozen):
    """One decision of this process, with everything a reader needs to check it."""

    overlay: Erratum
    decision: Decision
    reason: str
    finding: Finding | None = None
    version: str | None = None
    """Version or origin of the target as it is here, such as `0.19.2`."""
    source_sha256: str | None = None
    """Hash of the text of the target module."""
    seams: tuple[str, ...] = ()
    """Qualified names that lead to a seam now."""
    rebound: tuple[str, ...] = ()
    """Stale aliases that were found by identity and now lead to the seam too."""
    calls: tuple[tuple[str, int], ...] = ()
    """Seams, and how often each was called in this process so far; what does not count its calls is left out."""
    around: tuple[str, ...] = ()
    """What of somebody else's stands in the place of a seam, around it or beside it, by names that all processes share."""

    @property
    def verdict(self) -> str:
        """The verdict as text, or `-` where no probe has run."""
        return self.finding.verdict.value if self.finding else "-"

    @property
    def proof(self) -> str | None:
        """How the verdict was proved, as text; None where the probe says it."""
        return self.finding.proof.value if self.finding and self.finding.proof else None

    @property
    def shape(self) -> str:
        """The recognised shape, or `-`."""
        return (self.finding.shape if self.finding else None) or "-"
