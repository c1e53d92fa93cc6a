"""Settings of this process: all `variables`, read from the environment and checked.

An unknown name or value raises SettingsError at import, with the nearest known word: a typo must not leave a fix on that the
user wants off, or off that the user needs on. An empty value counts as not set. A variable or id of a retired overlay is accepted
and has no effect, because a launcher that still has it must start.
"""

from __future__ import annotations

import enum
import os
import sys
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

from megacpp_overlays import variables
from megacpp_overlays.errors import RequirementError, SettingsError
from megacpp_overlays.frozen import NamedTuple
from megacpp_overlays.model import variable_for

if TYPE_CHECKING:
    from megacpp_overlays.loader.requirements import Requirement

MODE = variables.MODE.name
DISABLE = variables.DISABLE.name
LOG = variables.LOG.name
PLUGINS = variables.PLUGINS.name
RECEIPTS = variables.RECEIPTS.name
WITNESSES = variables.WITNESSES.name
AUDIT = variables.AUDIT.name
VERIFY_RANKS = variables.VERIFY_RANKS.name
REQUIRE = variables.REQUIRE.name
CHILDREN = variables.CHILDREN.name
SAID = variables.SAID.name

_RANK_VARIABLES = ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK")
_ALL_IDS = "`megacpp-overlays audit`"
_EVERYTHING = frozenset({"*", "all", "1", "true", "yes", "on"})


class Mode(enum.Enum):
    """The mode of the whole package."""

    AUTO = "auto"
    OFF = "off"
    OBSERVE = "observe"
    STRICT = "strict"


class Switch(enum.Enum):
    """The switch of one overlay."""

    AUTO = "auto"
    OFF = "off"
    ON = "on"


class LogForm(enum.Enum):
    """The destination of the log."""

    STDERR = "stderr"
    LOGGING = "logging"
    JSON = "json"
    FILE = "file"


class LogLevel(enum.Enum):
    """The level of the log."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"


class Settings(NamedTuple):
    """All settings of the environment, read once."""

    mode: Mode = Mode.AUTO
    disabled: frozenset[str] = frozenset()
    enabled: frozenset[str] = frozenset()
    """Overlays that their variable switches on."""
    log: LogForm = LogForm.STDERR
    log_path: str | None = None
    log_level: LogLevel = LogLevel.INFO
    rank: int = 0
    receipts: str | None = None
    """Folder, as an absolute path."""
    witnesses: str | None = None
    """Folder, as an absolute path; None for the one in the cache folder of the user."""
    audit: str | None = None
    """File, as an absolute path."""
    config: str | None = None
    """File that configures the model, as an absolute path."""
    verify_ranks: bool = False
    """Whether ranks are compared as soon as they can be."""
    required: tuple[Requirement, ...] = ()
    """Decisions without which no optimizer takes its first step."""
    parent_is_armed: bool = False
    """Whether an armed process of this environment started this one, directly or through other processes."""
    said: frozenset[str] = frozenset()
    """Short hashes of the log lines of ancestor processes."""
    obsolete_variables: tuple[str, ...] = ()
    """Sentences about variables that name a retired overlay and can go."""
    of_kernels: Mapping[str, str] = variables.defaults_of_kernels()
    """Settings of kernels, by variable."""

    def switch(self, overlay_id: str) -> Switch:
        """Return the switch of one overlay."""
        if overlay_id in self.disabled:
            return Switch.OFF
        return Switch.ON if overlay_id in self.enabled else Switch.AUTO

    @property
    def waits_for_the_first_step(self) -> bool:
        """Whether a setting requires work before the first step of a run; see `processes.first_step`."""
        return bool(self.audit or self.verify_ranks or self.required)

    @classmethod
    def from_env(cls, env: Mapping[str, str], known_ids: Collection[str]) -> Settings:
        """Read and check every variable of this package.

        Args:
            env: usually `os.environ`.
            known_ids: ids of all registered overlays.

        Raises:
            SettingsError: a name or value is not known, or two settings contradict each other.
        """
        switches = {variable_for(overlay_id): overlay_id for overlay_id in known_ids}
        known = {*(setting.name for setting in variables.SETTINGS if setting is not variables.SWITCH), *switches}
        strange = {name for name in env if variables.is_ours(name)} - known
        words = _words(env, DISABLE)
        obsolete_variables = _obsolete_variables(env, strange, set(words) - set(known_ids))
        _refuse_unknown_names(strange - obsolete_variables.keys(), known)
        listed = {_known_id(word, known_ids) for word in words if word not in obsolete_variables}
        off, on = set(listed), set()
        for name, overlay_id in switches.items():
            if not env.get(name, "").strip():
                continue
            switch = Switch(variables.SWITCH.read(env, name))
            if switch is Switch.OFF:
                off.add(overlay_id)
            elif switch is Switch.ON:
                on.add(overlay_id)
            if switch is not Switch.OFF and overlay_id in listed:
                raise SettingsError(f"{name}={env[name]} but {DISABLE} lists {overlay_id}: remove one of the two")
        log = variables.LOG.read(env)
        is_path = log not in variables.LOG.values
        return cls(
            mode=Mode(variables.MODE.read(env)),
            disabled=frozenset(off),
            enabled=frozenset(on),
            log=LogForm.FILE if is_path else LogForm(log),
            log_path=log if is_path else None,
            log_level=LogLevel(variables.LOG_LEVEL.read(env)),
            rank=_rank(env),
            receipts=variables.RECEIPTS.read(env) or None,
            witnesses=variables.WITNESSES.read(env) or None,
            audit=variables.AUDIT.read(env) or None,
            config=variables.CONFIG.read(env) or None,
            verify_ranks=variables.VERIFY_RANKS.read(env) == "on",
            required=_requirements(env, known_ids),
            parent_is_armed=variables.CHILDREN.read(env) == this_environment(),
            said=frozenset(_words(env, SAID)),
            obsolete_variables=tuple(obsolete_variables[name] for name in sorted(obsolete_variables)),
            of_kernels={setting.name: setting.read(env) for setting in variables.OF_KERNELS},
        )


def this_environment() -> str:
    """Return the name of the environment that this interpreter belongs to.

    The prefix alone is not enough: every Python of a system has `/usr`. `startup/sitecustomize.py` computes the same name.
    """
    return f"{sys.implementation.cache_tag}:{os.path.realpath(sys.prefix)}"


def plugin_names(env: Mapping[str, str]) -> tuple[str, ...]:
    """Return the plugins that the environment asks for; they load before `Settings.from_env` runs."""
    return tuple(_words(env, PLUGINS))


def _words(env: Mapping[str, str], name: str) -> list[str]:
    return [word.strip() for word in env.get(name, "").split(",") if word.strip()]


def _requirements(env: Mapping[str, str], known_ids: Collection[str]) -> tuple[Requirement, ...]:
    texts = variables.REQUIRE.read(env).split()
    if not texts:
        return ()
    from megacpp_overlays.loader import requirements  # noqa: PLC0415 - only where something is required

    try:
        return tuple(requirements.parse(text, known_ids) for text in texts)
    except RequirementError as error:
        raise SettingsError(f"{REQUIRE}: {error}") from error


def _known_id(word: str, known_ids: Collection[str]) -> str:
    if word not in known_ids:
        raise SettingsError(f"{DISABLE} names {word}, which is no overlay; {_nearest_id(word, known_ids)}")
    return word


def _nearest_id(word: str, known_ids: Collection[str]) -> str:
    from megacpp_overlays.near_names import suggestion  # noqa: PLC0415 - only on the way to an error

    if word.lower() in _EVERYTHING:
        return suggestion(word, sorted(known_ids), f"{MODE}={Mode.OFF.value}", _ALL_IDS)
    # The word may be the name of its variable, or a part of that.
    spelt = word.lower().replace("_", "-").removeprefix(variable_for("").lower().replace("_", "-"))
    return suggestion(spelt, sorted(known_ids), where=_ALL_IDS)


def _refuse_unknown_names(strange: Collection[str], known: Collection[str]) -> None:
    for name in sorted(strange):
        from megacpp_overlays.near_names import suggestion  # noqa: PLC0415 - only on the way to an error

        family = next(prefix for prefix in variables.PREFIXES if name.upper().startswith(prefix))
        relatives = [each for each in known if each.startswith(family)]
        near = suggestion(name, sorted(relatives), where="docs/settings.md")
        raise SettingsError(f"{name} is no setting of megacpp_overlays; {near}")


def _obsolete_variables(env: Mapping[str, str], names: Collection[str], ids: Collection[str]) -> dict[str, str]:
    """Return the variables and ids of retired overlays, each with a sentence about it.

    Args:
        env: usually `os.environ`.
        names: variables of this package that belong to no overlay.
        ids: ids in the list of disabled overlays that belong to no overlay.
    """
    if not names and not ids:
        return {}
    from megacpp_overlays.loader import retired  # noqa: PLC0415 - only where there is something to look for

    found = {}
    for gone in retired.read():
        if (name := variable_for(gone.id)) in names:
            variables.SWITCH.read(env, name)
            found[name] = f"{gone}: {name} does nothing and can go"
        if gone.id in ids:
            found[gone.id] = f"{gone}: it can go from {DISABLE}"
    return found


def _rank(env: Mapping[str, str]) -> int:
    # Launchers set these variables and report invalid values themselves. Here an invalid value counts as unknown.
    for name in _RANK_VARIABLES:
        if env.get(name, "").isdecimal() and len(env[name]) < len("1000000000"):
            return int(env[name])
    return 0
