"""Registry of the environment variables that a user sets: names, values, defaults, meanings.

`loader.settings` reads all of them at the import of this package and refuses an unknown variable, so a typo never leaves a
fix on that the user switched off. Kernels must not import the loader; they read the values that it found through `chosen`.

Some variables are not in the registry, because no run of a user reads them. None of them is refused: `MEGACPP_RELEASES_CACHE`
(the folder in which `megacpp-overlays matrix` keeps archives), `MEGACPP_KNOWN_UNTIL` (see `source.knowledge`), and
`MEGACPP_BROWSER`, `MEGACPP_REQUIRE_BROWSER` and `MEGACPP_MIMO_JSON`, which are for tests of this project.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping

from megacpp_overlays.errors import SettingsError
from megacpp_overlays.frozen import NamedTuple

PREFIXES = ("MEGACPP_OVERLAY", "MEGACPP_LINEAR_CE", "MEGACPP_SPARSE_ATTENTION")
"""Prefixes of the variables of this package. An unknown variable with such a prefix is an error."""

_YES = frozenset({"1", "true", "yes", "on", "enable", "enabled"})
_NO = frozenset({"0", "false", "no", "off", "none", "disable", "disabled"})
_LONGEST_NUMBER = 9


class Setting(NamedTuple):
    """One environment variable."""

    name: str
    meaning: str
    """One or two sentences."""
    default: str = ""
    """The value of an unset or empty variable; empty if there is no default."""
    values: tuple[str, ...] = ()
    """The words that it may hold, in any case."""
    form: str = ""
    """The form of other values that it may hold: `an absolute path`."""
    fits: Callable[[str], bool] = lambda _: False
    """Whether a text that is none of the words has that form."""
    meant: Callable[[str], str] = lambda _: ""
    """Returns the likely intended value for a refused text in lower case; empty if there is none."""
    advice: str = ""
    """End of the error message about `{text}`: the remedy, where the form alone does not show it."""
    compared_in: str = ""
    """The key of a rank's statement that holds it; empty where ranks may differ in it."""
    ranks: str = ""
    """The comparison between ranks, or the reason why they may differ in it."""

    def read(self, env: Mapping[str, str], name: str = "") -> str:
        """Return the checked value of an environment: a word in lower case, or a text of the right form.

        Args:
            env: usually `os.environ`.
            name: the variable, where this setting describes a family of them.

        Raises:
            SettingsError: the value is neither a known word nor of the right form.
        """
        name = name or self.name
        text = env.get(name, "").strip()
        if not text:
            return self.default
        if text.lower() in self.values:
            return text.lower()
        if self.fits(text):
            return text
        raise SettingsError(f"{name}={text} is {self._refusal(text)}")

    def _refusal(self, text: str) -> str:
        from megacpp_overlays.near_names import suggestion  # noqa: PLC0415 - only on the way to an error

        meant = self.meant(text.lower())
        advice = self.advice.format(text=text)
        if self.values:
            also = f", or {self.form}" if self.form else ""
            return f"not known; {suggestion(text.lower(), sorted(self.values), meant)}{also}{advice}"
        guess = f"; did you mean {meant}?" if meant else ""
        return f"not {self.form}{guess}{advice}"


def _yes_or_no(yes: str, no: str) -> Callable[[str], str]:
    return lambda text: yes if text in _YES else no if text in _NO else ""


def _is_amount(text: str) -> bool:
    # One spelling of each number, because ranks compare the texts of their values.
    return text.isdecimal() and text.isascii() and len(text) <= _LONGEST_NUMBER and not text.startswith("0")


def _in_mib(text: str) -> str:
    """Return `2GiB` as `2048`."""
    number = text.rstrip("gmib ")
    factor = 1024 if "g" in text[len(number) :] else 1
    number = number.lstrip("0")
    return str(int(number) * factor) if _is_amount(number) else ""


def _names_environment(text: str) -> bool:
    return os.path.isabs(text.partition(":")[2])


MODE = Setting(
    "MEGACPP_OVERLAYS",
    "The mode of the whole package. `auto` installs the overlays of present defects, `off` installs nothing, `observe` probes and reports "
    "but installs nothing, and `strict` is `auto` with an error where an overlay ends in conflict.",
    default="auto",
    values=("auto", "off", "observe", "strict"),
    meant=_yes_or_no("auto", "off"),
    compared_in="mode",
    ranks="Compared.",
)
SWITCH = Setting(
    "MEGACPP_OVERLAY_<ID>",
    "The switch of one overlay or gate: its id in capitals, with `_` for `-`. `off` leaves it out; `on` is for overlays "
    "that are off by default, and means `auto` for all others.",
    default="auto",
    values=("auto", "off", "on"),
    meant=_yes_or_no("on", "off"),
    compared_in="off",
    ranks="Compared: which overlays are off, however that was said.",
)
DISABLE = Setting(
    "MEGACPP_OVERLAYS_DISABLE",
    "Overlays and gates that are off; the same as `off` for the switch of each.",
    form="ids with commas between them",
    fits=lambda _: True,
    compared_in="off",
    ranks="Compared: which overlays are off, however that was said.",
)
PLUGINS = Setting(
    "MEGACPP_OVERLAYS_PLUGINS",
    "Entry points of the group `megacpp_overlays.overlays` whose overlays are loaded. None is loaded without being named.",
    form="names with commas between them",
    fits=lambda _: True,
    compared_in="decisions",
    ranks="Compared by their content: every overlay and the files that declare it.",
)
LOG = Setting(
    "MEGACPP_OVERLAYS_LOG",
    "The destination of the log of decisions: lines on stderr, the logger `megacpp_overlays`, JSON on stderr, or "
    "a file that is appended to, as JSON where its name ends in `.json` or `.jsonl`.",
    default="stderr",
    values=("stderr", "logging", "json"),
    form="a path with a slash in it",
    advice=" (./{text})",
    fits=lambda text: "/" in text,  # a bare word is never a path, so a misspelt form cannot become a file
    meant=_yes_or_no("stderr", "logging"),
    ranks="Not compared: a rank may tell its decisions in its own way, and computes the same.",
)
LOG_LEVEL = Setting(
    "MEGACPP_OVERLAYS_LOG_LEVEL",
    "The level of the log. `info` has a line for each overlay that is active, one that counts the decisions, and warnings; "
    "`debug` has every field of every decision, and `warning` has only the lines that need attention. JSON has "
    "every decision from `info` on, and the logger `megacpp_overlays` gets everything, each line at its level.",
    default="info",
    values=("debug", "info", "warning"),
    meant=lambda text: {"quiet": "warning", "error": "warning", "verbose": "debug"}.get(text, ""),
    ranks="Not compared: a rank may tell its decisions in its own way, and computes the same.",
)
RECEIPTS = Setting(
    "MEGACPP_OVERLAYS_RECEIPTS",
    "The folder in which this process and its children leave receipts of their decisions, for a parent that demands them. "
    "It is made for this user alone; one that others can write to is refused.",
    form="an absolute path",
    fits=os.path.isabs,
    advice=", and children may start in any folder",
    ranks="Not compared: ranks of several hosts may leave receipts in different places, and compute the same.",
)
WITNESSES = Setting(
    "MEGACPP_OVERLAYS_WITNESSES",
    "The folder in which `megacpp-overlays witness` keeps its witnesses, and from which a process reads them; without it "
    "`megacpp-overlays/witness` in the cache folder of the user. It must belong to the user, or to root as in an image, and no other "
    "user may write into it. Where it belongs to root, the witnesses of a user are kept in the cache folder.",
    form="an absolute path",
    fits=os.path.isabs,
    advice=", and processes may start in any folder",
    compared_in="decisions",
    ranks="Compared by the decisions: an overlay that is active or retired because it was witnessed, and one that is not, differ.",
)
AUDIT = Setting(
    "MEGACPP_OVERLAYS_AUDIT",
    "The file in which rank 0 leaves its audit as JSON before the first step of an optimizer, when ranks were compared, and "
    "at the end with how often each seam was called. `megacpp-overlays run --audit FILE` sets it.",
    form="an absolute path",
    fits=os.path.isabs,
    advice=", and ranks may start in any folder",
    ranks="Not compared: one rank writes it, and computes the same.",
)
CONFIG = Setting(
    "MEGACPP_OVERLAYS_CONFIG",
    "A file that configures the model of the run, of a kind that `megacpp-overlays audit --config` takes. An active overlay that does "
    "not concern that model has no line in the log. Arguments of Megatron-LM's own launchers are read without it.",
    form="an absolute path",
    fits=os.path.isabs,
    advice=", and ranks may start in any folder",
    ranks="Not compared: it changes lines of a log, and nothing that runs.",
)
VERIFY_RANKS = Setting(
    "MEGACPP_OVERLAYS_VERIFY_RANKS",
    "Whether ranks are compared, as by `verify_ranks()`, at the end of every `init_process_group`, without a line in the "
    "launcher. `megacpp-overlays run --verify-ranks` sets it.",
    default="off",
    values=("on", "off"),
    meant=_yes_or_no("on", "off"),
    ranks="Not compared: where it is off on some ranks, the others name them as missing.",
)
REQUIRE = Setting(
    "MEGACPP_OVERLAYS_REQUIRE",
    "Decisions without which no optimizer takes its first step: `ID=DECISION`, or `ID=DECISION,DECISION` where each will do. "
    "`megacpp-overlays run --require` sets it.",
    form="requirements with spaces between them",
    fits=lambda _: True,
    ranks="Not compared: a rank that requires nothing computes the same.",
)
CHILDREN = Setting(
    "MEGACPP_OVERLAYS_CHILDREN",
    "The environment whose Python processes arm at start-up. `reach_children` and `megacpp-overlays run` set it; do not "
    "set it by hand.",
    form="the name of an environment",
    fits=_names_environment,
    advice="; unset it, and start the launcher with `python -m megacpp_overlays run`, or call "
    "megacpp_overlays.reach_children() in it",
    ranks="Not compared: it says how a process was armed, and not which code it runs.",
)
SAID = Setting(
    "MEGACPP_OVERLAYS_SAID",
    "Short hashes of the log lines that this process and its parents have written, so that a child does not repeat them. "
    "A process sets it for its children; do not set it by hand.",
    form="hashes with commas between them",
    fits=lambda _: True,
    ranks="Not compared: it changes the log, and not the code that runs.",
)
LINEAR_CE_MEMORY_MIB = Setting(
    "MEGACPP_LINEAR_CE_MEMORY_MIB",
    "Extra memory in MiB that the backward pass of the fused linear cross entropy may take.",
    default="256",
    form="a whole number of MiB, 1 or more",
    fits=_is_amount,
    meant=_in_mib,
    compared_in="settings",
    ranks="Compared: it decides in which blocks sums are formed.",
)
LINEAR_CE_LOGITS = Setting(
    "MEGACPP_LINEAR_CE_LOGITS",
    "How the fused linear cross entropy handles its logits until the backward pass. `recompute` forms them a second "
    "time, `keep` holds them, and `auto` holds them if there is room for them twice at the first call.",
    default="recompute",
    values=("recompute", "keep", "auto"),
    meant=_yes_or_no("keep", "recompute"),
    compared_in="settings",
    ranks="Compared: it decides which products are formed, and how much memory a rank takes.",
)
LINEAR_CE_MASKED = Setting(
    "MEGACPP_LINEAR_CE_MASKED",
    "How the fused linear cross entropy handles tokens without a gradient in its backward pass, and tokens without a "
    "label in its forward pass. `compute` treats them like all others, `skip` leaves them out (on Hopper, in half precision), "
    "and `auto` skips them if at most three quarters of the tokens of the first backward pass have a gradient, or a label.",
    default="auto",
    values=("auto", "compute", "skip"),
    meant=_yes_or_no("skip", "compute"),
    compared_in="settings",
    ranks="Compared: it decides over which tokens sums are formed.",
)
SPARSE_ATTENTION_CHOICES = Setting(
    "MEGACPP_SPARSE_ATTENTION_CHOICES",
    "How attention over chosen keys handles indices that are neither -1 nor a key, or that a query chose twice. `trust` does "
    "not check them: the former count as no choice, the latter twice. `check` raises an error with the place of the index in the "
    "first call that has one; it waits for the device in each call, so it is for debugging.",
    default="trust",
    values=("trust", "check"),
    meant=_yes_or_no("check", "trust"),
    compared_in="settings",
    ranks="Compared: a rank that checks waits for its device in each call, and others wait for it.",
)
SMALL_CALLS = Setting(
    "MEGACPP_OVERLAYS_SMALL_CALLS",
    "Which function computes where an overlay saves memory, its kernels were not measured on the device, as on a CPU, and "
    "upstream's largest tensor has at most 256 MiB. `upstream` leaves such a call to upstream's function, which may be faster "
    "there; `overlay` serves it, with less memory.",
    default="upstream",
    values=("upstream", "overlay"),
    meant=_yes_or_no("overlay", "upstream"),
    compared_in="settings",
    ranks="Compared: both compute the same numbers, but round them otherwise.",
)

SETTINGS = (
    MODE,
    SWITCH,
    DISABLE,
    PLUGINS,
    LOG,
    LOG_LEVEL,
    RECEIPTS,
    WITNESSES,
    AUDIT,
    CONFIG,
    VERIFY_RANKS,
    REQUIRE,
    CHILDREN,
    SAID,
    LINEAR_CE_MEMORY_MIB,
    LINEAR_CE_LOGITS,
    LINEAR_CE_MASKED,
    SPARSE_ATTENTION_CHOICES,
    SMALL_CALLS,
)
"""Every setting; `SWITCH` describes a variable for each overlay and gate."""

OF_KERNELS = tuple(setting for setting in SETTINGS if setting.compared_in == "settings")
"""Settings that kernels read. No decision of an overlay shows them."""


def defaults_of_kernels() -> dict[str, str]:
    """Return the default values of the kernels' settings."""
    return {setting.name: setting.default for setting in OF_KERNELS}


def is_ours(name: str) -> bool:
    """Return whether a variable name belongs to this package, in any case; a name in lower case is a misspelt one."""
    return name.upper().startswith(PREFIXES)


_of_this_process: dict[str, str] = {}


def hand_down(values: Mapping[str, str]) -> None:
    """Store the checked settings of this process for kernels, which must not import the loader.

    Args:
        values: by the name of their variable.
    """
    _of_this_process.update(values)


def chosen(setting: Setting) -> str:
    """Return the value that a setting had at the import of this package, or its default."""
    return _of_this_process.get(setting.name, setting.default)
