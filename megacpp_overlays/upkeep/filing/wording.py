"""A search for private text before publication: paths of a machine, addresses, keys, and entries of a private list.

A list has one phrase or /regular expression/ per line; `#` begins a comment, and `!text` allows a built-in finding.
Case does not count. Keys, and text that the list finds, are never printed.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from megacpp_overlays.errors import UpkeepError
from megacpp_overlays.repro.transcript import paths_in
from megacpp_overlays.upkeep.filing.checks import Spot, read_text

LIST = "private-words.txt"
"""Name of the list in a folder of packs; git ignores it."""

_SYSTEM_PATH = re.compile(r"/(?:usr|bin|sbin|lib\d*|etc|dev|proc|sys)/")
_HOME = re.compile(r"(?<![\w./])(?:/home/|/Users/|/root\b)[\w./-]*|\b[A-Za-z]:\\Users\\\w+")
_MAIL = re.compile(r"(?<![\w.+-])[\w.+-]+@(?:[A-Za-z0-9-]+\.)+[A-Za-z]{2,}\b")
_PUBLIC_MAIL = re.compile(r"(?:git|noreply)@.*|.*[@.]example\.(?:com|net|org)|.*noreply\.github\.com")
_HOST = re.compile(r"(?<![\w.-])(?:[A-Za-z0-9-]+\.)+(?:local|internal|intranet|corp|lan|home\.arpa)(?![\w(\[-]|\.\w)")
_PUBLIC_HOSTS = {"threading.local"}
_IPV4 = re.compile(r"(?<![\w.-])\d{1,3}(?:\.\d{1,3}){3}(?![\w-]|\.\d)")
_IPV6 = re.compile(r"(?<![\w:.])(?=[0-9A-Fa-f]*:)[0-9A-Fa-f:]{4,39}(?![\w:])")
_EXAMPLES = tuple(map(ipaddress.ip_network, ("192.0.2.0/24", "198.51.100.0/24", "203.0.113.0/24", "2001:db8::/32")))
_SECRET_NAME = re.compile(r"(?:^|_)(?:password|passwd|secret|token|api_?key|access_?key)(?:_|$)", re.IGNORECASE)
_ASSIGNED_VALUE = re.compile(
    r"(?<!\w)(\w+)(?=[\"']?\s*[=:]\s*[\"'][^\"'\s]{8,}[\"']"
    # Without quotes a value must have a digit, unlike a name in a program: as in an `export` or a file of variables.
    r"|\s*[=:]\s*(?=[\w/+.-]*\d)[\w/+.-]{16,})"
)
"""A name with a value that may be a password. `_SECRET_NAME` judges the name separately, so that a line is scanned once."""
_KEY = re.compile(
    r"\bgh[pousr]_[A-Za-z0-9]{20,}|\bgithub_pat_\w{20,}|\bglpat-[\w-]{20,}|\bhf_[A-Za-z0-9]{20,}|\bsk-[\w-]{20,}"
    r"|\bxox[abprs]-[\w-]{10,}|\b(?:AKIA|ASIA)[0-9A-Z]{16}\b|\bAIza[\w-]{30,}|\bpypi-[\w-]{30,}|\bnpm_[A-Za-z0-9]{30,}"
    r"|(?<![\w-])ey[JI][\w-]{10,}\.ey[JI][\w-]{10,}\.[\w-]+|-----BEGIN [A-Z ]*PRIVATE KEY-----"
    r"|(?i:\bBearer\s+[\w.~+/=-]{12,})"
)


@dataclass(frozen=True, slots=True)
class Words:
    """The entries of a private list."""

    patterns: tuple[tuple[int, re.Pattern[str]], ...] = ()
    """Each with its line in the list."""
    allowed: frozenset[str] = frozenset()
    """In lower case."""


def read_list(path: Path) -> Words:
    """Read a list of private words.

    Raises:
        UpkeepError: it cannot be read, or an expression is not valid; the message has the line number, not its text.
    """
    patterns, allowed = [], set()
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UpkeepError(f"the list of private words cannot be read: {path.name}: {error}") from error
    for number, line in enumerate(map(str.strip, lines), 1):
        if not line or line.startswith("#"):
            continue
        if line.startswith("!"):
            allowed.add(line[1:].strip().lower())
            continue
        expression = len(line) > 2 and line.startswith("/") and line.endswith("/")
        phrase = r"\s+".join(map(re.escape, line.split()))  # a phrase may go over the end of a line
        text = line[1:-1] if expression else rf"(?<!\w){phrase}(?!\w)"
        try:
            pattern = re.compile(text, re.IGNORECASE)
        except re.error as error:
            raise UpkeepError(f"{path.name}:{number} is no regular expression: {error.msg}") from None
        if pattern.search(""):
            raise UpkeepError(f"{path.name}:{number} is found everywhere: it matches an empty text")
        patterns.append((number, pattern))
    return Words(tuple(patterns), frozenset(allowed))


def search(files: Sequence[tuple[str, Path]], words: Words) -> list[Spot]:
    """Return every place that has private text.

    Args:
        files: printed name and path of each.
        words: a private list, searched in addition to the built-in patterns.
    """
    return [spot for name, path in files for spot in _in_file(name, path, words)]


def _in_file(name: str, path: Path, words: Words) -> Iterator[Spot]:
    text = read_text(path)
    over_lines = [
        (text.count("\n", 0, found.start()) + 1, number)
        for number, pattern in words.patterns
        for found in pattern.finditer(text)
        if "\n" in found[0]
    ]
    # A file is sent with its name, so the name is searched, too, and hidden where the list finds it.
    shown = f"****{path.suffix}" if any(pattern.search(path.name) for _, pattern in words.patterns) else name
    for number, line in enumerate((path.name, *text.splitlines())):
        begin_here = [f"**** (private: line {entry} of the list)" for at, entry in over_lines if at == number]
        for seen in dict.fromkeys((*_in_line(line, words), *begin_here)):
            yield Spot(shown, max(number, 1), seen if number else f"in its name: {seen}")


def _in_line(line: str, words: Words) -> Iterator[str]:
    for number, pattern in words.patterns:
        if pattern.search(line):
            yield f"**** (private: line {number} of the list)"
    if _is_key(line):
        yield "**** (a key or password)"
    for kind, find in _BUILT_IN.items():
        for found in find(line):
            hidden = any(pattern.search(found) for _, pattern in words.patterns) or _is_key(found)
            if found.lower() not in words.allowed and not hidden:
                yield f"{found} ({kind})"


def _is_key(text: str) -> bool:
    return bool(_KEY.search(text)) or any(_SECRET_NAME.search(found[1]) for found in _ASSIGNED_VALUE.finditer(text))


def _places(line: str) -> list[str]:
    return [found for found in paths_in(line) if not _SYSTEM_PATH.match(found) and not _HOME.match(found)]


def _mails(line: str) -> list[str]:
    return [found for found in _MAIL.findall(line) if not _PUBLIC_MAIL.fullmatch(found)]


def _hosts(line: str) -> list[str]:
    return [found for found in _HOST.findall(line) if found not in _PUBLIC_HOSTS]


def _addresses(line: str) -> list[str]:
    return [found for found in (*_IPV4.findall(line), *_IPV6.findall(line)) if _is_private(found)]


def _is_private(text: str) -> bool:
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return False
    is_public = address.is_loopback or address.is_unspecified or any(address in each for each in _EXAMPLES)
    return address.is_private and not is_public


_BUILT_IN: dict[str, Callable[[str], list[str]]] = {
    "home of a user": _HOME.findall,
    "path of a machine": _places,
    "private address": _addresses,
    "internal host": _hosts,
    "e-mail address": _mails,
}
