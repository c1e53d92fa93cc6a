"""The one reader of the environment.

Variables:

    MEGACPP_OVERLAYS            auto (default) | off | observe | strict
    MEGACPP_OVERLAY_<ID>        auto (default) | off | on, one per overlay and gate; `on` is for overlays that are off
                                by default, and means auto for all others
    MEGACPP_OVERLAYS_DISABLE    comma-separated overlay ids, the same as off for each
    MEGACPP_OVERLAYS_LOG        stderr (default) | logging | json | a path with a slash in it
    MEGACPP_OVERLAYS_PLUGINS    comma-separated entry points to load from group megacpp_overlays.overlays
    MEGACPP_OVERLAYS_RECEIPTS   an absolute path: the folder in which this process says what it decided
    MEGACPP_OVERLAYS_CHILDREN   the environment whose Python processes arm at start-up; set by `reach_children` and
                                by `megacpp-overlays run`, never by hand

An empty value counts as not set. Anything unknown raises SettingsError: a typo must not leave a fix on
that somebody wanted off, or off that somebody needs on. What names a retired overlay is known: it says nothing any
more, and a launcher that still has it must start.
"""

from __future__ import annotations

import enum
import os
import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TypeVar

from megacpp_overlays.errors import SettingsError
from megacpp_overlays.model import variable_for

MODE = "MEGACPP_OVERLAYS"
DISABLE = "MEGACPP_OVERLAYS_DISABLE"
LOG = "MEGACPP_OVERLAYS_LOG"
PLUGINS = "MEGACPP_OVERLAYS_PLUGINS"
RECEIPTS = "MEGACPP_OVERLAYS_RECEIPTS"
CHILDREN = "MEGACPP_OVERLAYS_CHILDREN"

_PREFIX = "MEGACPP_OVERLAY"
_RANK_VARIABLES = ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK")


class Mode(enum.Enum):
    """The global setting."""

    AUTO = "auto"
    OFF = "off"
    OBSERVE = "observe"
    STRICT = "strict"


class Switch(enum.Enum):
    """The setting of one overlay."""

    AUTO = "auto"
    OFF = "off"
    ON = "on"


class LogForm(enum.Enum):
    """Where decision lines go."""

    STDERR = "stderr"
    LOGGING = "logging"
    JSON = "json"
    FILE = "file"


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Everything the environment says, read once."""

    mode: Mode = Mode.AUTO
    disabled: frozenset[str] = frozenset()
    enabled: frozenset[str] = frozenset()
    """Overlays that were asked for by name."""
    log: LogForm = LogForm.STDERR
    log_path: str | None = None
    rank: int = 0
    receipts: str | None = None
    """Folder, as an absolute path."""
    parent_is_armed: bool = False
    """A process of this environment was armed, said so, and started this one or one above it."""
    outlived: tuple[str, ...] = ()
    """Sentences about variables that name a retired overlay and can go."""

    def switch(self, overlay_id: str) -> Switch:
        """Return the switch of one overlay."""
        if overlay_id in self.disabled:
            return Switch.OFF
        return Switch.ON if overlay_id in self.enabled else Switch.AUTO

    @classmethod
    def from_env(cls, env: Mapping[str, str], known_ids: Collection[str]) -> Settings:
        """Read and check every variable of ours.

        Args:
            env: usually `os.environ`.
            known_ids: ids of all registered overlays.

        Raises:
            SettingsError: a name or value is not known, or two settings contradict each other.
        """
        switches = {variable_for(overlay_id): overlay_id for overlay_id in known_ids}
        known = {MODE, DISABLE, LOG, PLUGINS, RECEIPTS, CHILDREN, *switches}
        strange = {name for name in env if name.startswith(_PREFIX)} - known
        words = _words(env, DISABLE)
        outlived = _outlived(env, strange, set(words) - set(known_ids))
        _refuse_unknown_names(strange - outlived.keys(), known)
        listed = {_known_id(word, known_ids) for word in words if word not in outlived}
        off, on = set(listed), set()
        for name, overlay_id in switches.items():
            if not env.get(name, "").strip():
                continue
            switch = _choice(env, name, Switch, Switch.AUTO)
            if switch is Switch.OFF:
                off.add(overlay_id)
            elif switch is Switch.ON:
                on.add(overlay_id)
            if switch is not Switch.OFF and overlay_id in listed:
                raise SettingsError(f"{name}={env[name]} but {DISABLE} lists {overlay_id}: remove one of the two")
        form, path = _log(env)
        return cls(
            mode=_choice(env, MODE, Mode, Mode.AUTO),
            disabled=frozenset(off),
            enabled=frozenset(on),
            log=form,
            log_path=path,
            rank=_rank(env),
            receipts=_receipts(env),
            parent_is_armed=_parent_is_armed(env),
            outlived=tuple(outlived[name] for name in sorted(outlived)),
        )


def this_environment() -> str:
    """Return the name of the environment that this interpreter belongs to.

    The prefix alone is not enough: every Python of a system has `/usr`. `startup/sitecustomize.py` says the same.
    """
    return f"{sys.implementation.cache_tag}:{os.path.realpath(sys.prefix)}"


def plugin_names(env: Mapping[str, str]) -> tuple[str, ...]:
    """Return the plugins that the environment asks for; they load before `Settings.from_env` runs."""
    return tuple(_words(env, PLUGINS))


Choice = TypeVar("Choice", bound=enum.Enum)


def _choice(env: Mapping[str, str], name: str, kind: type[Choice], default: Choice) -> Choice:
    text = env.get(name, "").strip()
    if not text:
        return default
    values = [member.value for member in kind]
    if text.lower() not in values:
        raise SettingsError(f"{name}={text} is not known; {_nearest(text.lower(), values)}")
    return kind(text.lower())


def _log(env: Mapping[str, str]) -> tuple[LogForm, str | None]:
    text = env.get(LOG, "").strip()
    if "/" in text:  # a bare word is never a path, so a misspelt form cannot become a file
        return LogForm.FILE, text
    forms = [LogForm.STDERR, LogForm.LOGGING, LogForm.JSON]
    for form in forms:
        if text.lower() == form.value:
            return form, None
    if not text:
        return LogForm.STDERR, None
    hint = _nearest(text.lower(), [form.value for form in forms])
    raise SettingsError(f"{LOG}={text} is not known; {hint}, or a path with a slash in it (./{text})")


def _receipts(env: Mapping[str, str]) -> str | None:
    folder = env.get(RECEIPTS, "").strip()
    if folder and not os.path.isabs(folder):
        raise SettingsError(f"{RECEIPTS}={folder} is no absolute path, and children may start in any folder")
    return folder or None


def _parent_is_armed(env: Mapping[str, str]) -> bool:
    name = env.get(CHILDREN, "").strip()
    if name and not os.path.isabs(name.partition(":")[2]):
        raise SettingsError(
            f"{CHILDREN}={name} names no environment; unset it, and start the launcher with "
            f"`python -m megacpp_overlays run`, or call megacpp_overlays.reach_children() in it"
        )
    return name == this_environment()


def _words(env: Mapping[str, str], name: str) -> list[str]:
    return [word.strip() for word in env.get(name, "").split(",") if word.strip()]


def _known_id(word: str, known_ids: Collection[str]) -> str:
    if word not in known_ids:
        raise SettingsError(f"{DISABLE} names {word}, which is no overlay; {_nearest(word, known_ids)}")
    return word


def _refuse_unknown_names(strange: Collection[str], known: Collection[str]) -> None:
    for name in sorted(strange):
        raise SettingsError(f"{name} is no setting of megacpp_overlays; {_nearest(name, known)}")


def _outlived(env: Mapping[str, str], variables: Collection[str], ids: Collection[str]) -> dict[str, str]:
    """Return what names a retired overlay, each variable or id with a sentence about it.

    Args:
        env: usually `os.environ`.
        variables: names of ours that belong to no overlay.
        ids: ids in the list of disabled overlays that are no overlay's.
    """
    if not variables and not ids:
        return {}
    from megacpp_overlays.loader import retired  # noqa: PLC0415 - only where there is something to look for

    found = {}
    for gone in retired.read():
        if (name := variable_for(gone.id)) in variables:
            _choice(env, name, Switch, Switch.AUTO)
            found[name] = f"{gone}: {name} does nothing and can go"
        if gone.id in ids:
            found[gone.id] = f"{gone}: it can go from {DISABLE}"
    return found


def _nearest(word: str, known: Collection[str]) -> str:
    from difflib import get_close_matches  # noqa: PLC0415 - only on the way to an error

    choices = sorted(known)
    close = get_close_matches(word, choices, n=1, cutoff=0.5)
    meant = f"did you mean {close[0]}? " if close else ""
    return f"{meant}known: {', '.join(choices)}"


def _rank(env: Mapping[str, str]) -> int:
    # Launchers own these variables, so an odd value is theirs to report: it only means "cannot tell" here.
    for name in _RANK_VARIABLES:
        if env.get(name, "").isdecimal() and len(env[name]) < len("1000000000"):
            return int(env[name])
    return 0
