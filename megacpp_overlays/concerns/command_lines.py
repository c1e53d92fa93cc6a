"""Arguments of Megatron-LM, read from the words of a command or from the text of a shell script.

A script is not run. Values that it takes from its environment are unknown, and so is the outcome of a condition. A missing argument
has its default only where all arguments are known: the launcher is one of Megatron-LM's own, and no other source may add arguments.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from megacpp_overlays.concerns import shell_words
from megacpp_overlays.concerns.configuration import UNKNOWN, Configuration, Values, Vocabulary, possible
from megacpp_overlays.concerns.features import PROGRAM, PROGRAMS
from megacpp_overlays.concerns.plain_values import plain_value
from megacpp_overlays.frozen import NamedTuple

_FLAG = re.compile(r"--[A-Za-z][\w-]*")
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)\+?=(.*)", re.DOTALL)
_VARIABLE = re.compile(r"\$(?:\{([A-Za-z_]\w*)(?:\[[@*]\])?\}|([A-Za-z_]\w*))")
_OPENS, _CLOSES = frozenset({"if", "case", "for", "while", "until"}), frozenset({"fi", "esac", "done"})
_PREFIXES = frozenset({"then", "else", "do", "{", "!", "export", "local", "declare", "readonly", "exec", "time"})
_SAYS = frozenset({"echo", "printf", "cat", "ls", "[", "[[", "test"})
"""Commands whose words are for a reader."""
_PATH = re.compile(r"[\w./:=-]*\$\{?\w+\}?[/:.][^$`]*|[\w.-]*/[^-]*")
"""A word with a variable in it that is a path, or the address of something, and no argument."""
_NEGATED = re.compile(r"(?:no|disable)_(.+)")
_NAMED_OTHERWISE = {"no_rope_fusion": "apply_rope_fusion"}
"""Switches that turn another argument off, by the name of that."""
_TAKES_A_VALUE = re.compile(
    r"--(?!no-|disable-|use-|is-|async-|auto-|freeze-|account-for-|output-|mtp-detach|optimizer-cpu|ckpt-|biencoder|dataloader-fast)"
    r"[\w-]*-?(?:path|dir|file|model|type|size|name|project|iters|interval|samples|steps|length|layers|heads|groups|experts|topk|coeff"
    r"|std|decay|beta1|beta2|prefix|entity|format|backend|style|ratio|pattern|method|granularity|rank|impl|lr|seed|load|save|split"
    r"|embeddings|workers|channels|dim)(?<!profile)"
)
"""Arguments of Megatron-LM that are no switches, by the ends of their names: a variable behind one is its value."""
_FROM_ELSEWHERE = ("use_checkpoint_args", "use_mp_args_from_checkpoint_args", "yaml_cfg")
"""Arguments that have others read from somewhere else."""
_MOST = 4096
"""Most words in the value of a variable."""


class _Word(NamedTuple):
    """A word of a command."""

    text: str | None
    """None for a value that only the environment of a script has."""
    may_be_missing: bool = False
    may_be_more: bool = False
    """Whether the word may expand to further arguments."""


def from_words(words: Sequence[str], origin: str) -> Configuration:
    """Return the configuration of a command, such as `sys.argv`, or of a file with nothing but arguments."""
    return _configuration([[_Word(each) for each in words]], origin)


def from_script(text: str, origin: str) -> Configuration:
    """Return the configuration of a shell script, or of a file of arguments.

    Raises:
        ValueError: a quote or a bracket is not closed.
    """
    script = _Script(text)
    launches = [each for each in script.commands if _programs(each)]
    launches = launches or [each for each in script.variables.values() if _programs(each)]
    if launches:
        return _configuration(launches, origin)
    words = [word for each in script.commands for word in each]
    if not script.variables and all(each[0].text and _FLAG.match(each[0].text) for each in script.commands):
        return _configuration([words], origin)
    kept = [word for each in script.variables.values() for word in each]
    return _configuration([[*kept, _Word("--"), *words, _Word(None, may_be_more=True)]], origin)


class _Script:
    """The commands of a script with variables in place, and the variables."""

    def __init__(self, text: str) -> None:
        self.commands: list[list[_Word]] = []
        self.variables: dict[str, list[_Word]] = {}
        self._depth = 0
        for command in shell_words.commands(text):
            self._read(command)

    def _read(self, command: shell_words.Command) -> None:
        words = list(command.words)
        while words and words[0] in _PREFIXES:
            words.pop(0)
        first = words[0] if words else ""
        self._depth += first in _OPENS or "{" in command.words
        is_sure = not (self._depth or command.may_not_run)
        while words and (found := _ASSIGNMENT.fullmatch(words[0])):
            name, value = found.groups()
            if value == "(":
                after = words.index(")") if ")" in words else len(words)
                self._assign(name, words[1:after], is_sure=is_sure)
                words = words[after + 1 :]
            else:
                self._assign(name, [value], is_sure=is_sure)
                words.pop(0)
        if words and first not in _OPENS | _CLOSES and words[0] not in _SAYS:
            self.commands.append(self._all_expanded(words, is_sure=is_sure))
        if first in _CLOSES or "}" in command.words:
            self._depth = max(0, self._depth - 1)

    def _assign(self, name: str, values: Sequence[str], *, is_sure: bool) -> None:
        known = self.variables.setdefault(name, [])
        known += self._all_expanded(values, is_sure=is_sure)
        del known[_MOST:]

    def _all_expanded(self, words: Sequence[str], *, is_sure: bool) -> list[_Word]:
        pairs = zip(words, ["", *words], strict=False)
        return [each for word, before in pairs for each in self._expanded(word, before, is_sure=is_sure)][:_MOST]

    def _expanded(self, word: str, before: str, *, is_sure: bool) -> list[_Word]:
        """Return the words that a word expands to.

        Args:
            word: the word.
            before: the word before it, whose value it may be.
            is_sure: whether the command runs.
        """
        if len(pieces := word.split()) > 1 and any(_FLAG.match(each) or each.endswith(".py") for each in pieces):
            return self._all_expanded(pieces, is_sure=is_sure)
        if not set("$`") & set(word):
            return [_Word(word, not is_sure)]
        if word.endswith(".py") and "$" not in (name := word.rsplit("/", 1)[-1]):
            return [_Word(name, not is_sure)]
        is_value = bool(_TAKES_A_VALUE.fullmatch(before) or _PATH.fullmatch(word))
        if (named := _FLAG.match(word)) is not None:
            return [_Word(named[0], not is_sure), _Word(None, not is_sure)]
        whole = _VARIABLE.fullmatch(word)
        known = self.variables.get(whole[1] or whole[2]) if whole else None
        if not known or is_value:
            return [_Word(_only(known or ()), not is_sure or _may_be_missing(known or ()), may_be_more=not is_value)]
        if len(known) > 1 and not any(each.text and _FLAG.match(each.text) for each in known):
            return [_Word(_only(known), not is_sure, may_be_more=any(each.may_be_more for each in known))]
        return [_Word(each.text, each.may_be_missing or not is_sure, each.may_be_more) for each in known]


def _only(words: Sequence[_Word]) -> str | None:
    """Return the text of a variable; None if it is set to several."""
    texts = {each.text for each in words}
    return texts.pop() if len(texts) == 1 else None


def _may_be_missing(words: Sequence[_Word]) -> bool:
    return all(each.may_be_missing for each in words)


def _programs(command: Sequence[_Word]) -> list[str]:
    """Return the Python files of a command by their names, those of Megatron-LM if there are any."""
    names = [each.text.rsplit("/", 1)[-1] for each in command if each.text and each.text.endswith(".py")]
    return [each for each in names if each in PROGRAMS] or names


def _configuration(commands: Sequence[Sequence[_Word]], origin: str) -> Configuration:
    """Return the configuration of a command, or the union of the configurations of several if it is unknown which one runs."""
    own = [each for each in commands if {*_programs(each)} & {*PROGRAMS}]
    commands = own or commands
    programs = {name for each in commands for name in _programs(each)}
    values = possible(*(_values(_behind_program(each)) for each in commands))
    is_closed = not any(word.may_be_more for each in commands for word in _behind_program(each))
    if any(key in values for key in _FROM_ELSEWHERE):
        values = {key: (*each, UNKNOWN) for key, each in values.items()}
        is_closed = False
    if len(commands) > 1:  # an argument that one of them lacks has its default there
        everywhere = set.intersection(*({*_values(_behind_program(each))} for each in commands))
        values = {key: each if key in everywhere else (*each, UNKNOWN) for key, each in values.items()}
    if len(programs) == 1 and programs <= {*PROGRAMS}:
        values[PROGRAM] = (*programs,)
    return Configuration(
        origin=origin,
        vocabulary=Vocabulary.ARGUMENTS,
        values=values,
        has_defaults=is_closed and programs <= {*PROGRAMS},
    )


def _behind_program(command: Sequence[_Word]) -> Sequence[_Word]:
    """Return the words after the program of a command; the words before it belong to a process launcher."""
    names = _programs(command)
    places = [number for number, each in enumerate(command) if names and each.text and each.text.endswith(names[0])]
    return command[places[0] + 1 :] if places else command


def _values(words: Sequence[_Word]) -> Values:
    """Return the values of arguments; one that may be missing from the command has `UNKNOWN` as a further value."""
    found: dict[str, list[object]] = {}
    sure: set[str] = set()
    for name, given, is_sure in _arguments(words):
        key, value = _key_and_value(name, given)
        found.setdefault(key, []).append(value)
        sure |= {key} if is_sure else set()
    return {key: tuple(each) if key in sure else (*each, UNKNOWN) for key, each in found.items()}


def _arguments(words: Sequence[_Word]) -> Iterator[tuple[str, list[str | None], bool]]:
    """Yield each argument with its values, and whether it is surely there."""
    name, given, is_sure = "", list[str | None](), True
    for word in (*words, _Word("--")):
        text = word.text
        if text is not None and (text == "--" or _FLAG.match(text)):
            if name:
                yield name, given, is_sure
            name, equals, value = text.partition("=")
            given, is_sure = [value] if equals else [], not word.may_be_missing
        else:
            given.append(text)
            is_sure = is_sure and not word.may_be_missing


def _key_and_value(name: str, given: Sequence[str | None]) -> tuple[str, object]:
    key = name.lstrip("-").replace("-", "_")
    values = [UNKNOWN if each is None else plain_value(each) for each in given]
    if not values:
        if key in _NAMED_OTHERWISE:
            return _NAMED_OTHERWISE[key], False
        negated = _NEGATED.fullmatch(key)
        return (negated[1], False) if negated else (key, True)
    if UNKNOWN in values:
        return key, UNKNOWN
    return key, values[0] if len(values) == 1 else tuple(values)


def of_mapping(values: Mapping[str, object], origin: str) -> Configuration:
    """Return the configuration of a mapping whose keys are written as arguments: `--num-layers: 2`."""
    words: list[str] = []
    for key, value in values.items():
        if value is False or value is None:
            continue
        words += [key] if value is True else [key, *map(str, value if isinstance(value, list) else [value])]
    return from_words(words, origin)
