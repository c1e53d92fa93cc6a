"""The notes of a pack as they would be posted: what GitHub would make of README.md as the body of an issue.

Tables and fences follow https://github.github.com/gfm/. A link that is relative to the notes leads nowhere once they
are an issue, except that to a file that is attached. A bare #12 is a thread of the repository that is posted to, and
@name outside of code sends somebody a message.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from urllib.parse import unquote, urlsplit

from markdown_it import MarkdownIt
from markdown_it.rules_block.table import escapedSplit
from markdown_it.token import Token

SECTIONS = ("Target", "Problem", "Solution", "Changed surfaces", "Testing evidence", "Upstream state", "Reproduce")
LONGEST = 20
"""Lines of the reproducer that may stand in the notes; the rest is attached."""

_HARMLESS = {"br", "details", "kbd", "sub", "summary", "sup"}
"""Tags that GitHub renders as they are meant; of others it drops the tag, or the text with it."""
_TAG = re.compile(r"</?([A-Za-z][\w-]*)")
_MENTION = re.compile(r"(?<![\w/.`])@[A-Za-z0-9][\w-]*(?:/[\w-]+)?")
_BARE_THREAD = re.compile(r"(?<![\w/&])#(\d+)\b")
_DELIMITERS = re.compile(r"(?=.*\|)\|?\s*:?-+:?\s*(?:\|\s*:?-+:?\s*)*\|?\s*")
_UNDEFINED = re.compile(r"\[[^\[\]]+\](?:\[[^\[\]]*\]|\([^()]+\))")


@dataclass(frozen=True, slots=True)
class Flaw:
    """A line of the notes, from 1, and what is wrong with it."""

    line: int
    text: str


class Notes:
    """The notes of a pack as Markdown."""

    def __init__(self, text: str) -> None:
        self.lines = text.split("\n")
        self._tokens = MarkdownIt("commonmark").enable(["table", "strikethrough"]).parse(text)

    def flaws(self, *, attached: Collection[str], elsewhere: Collection[int]) -> list[Flaw]:
        """Return what would not survive, by line.

        Args:
            attached: names of the files that are posted with the notes.
            elsewhere: numbers of threads that the pack has in other repositories only.
        """
        found = [*self._fences(), *self._tables(), *self._headings(), *self._sections(), *self._html()]
        found += [*self._links(attached), *self._words(elsewhere)]
        return sorted(found, key=lambda flaw: flaw.line)

    def pasted(self, reproducer: str) -> list[Flaw]:
        """Return the blocks of code that are too long and repeat the reproducer."""
        known = {line.strip() for line in reproducer.splitlines() if line.strip()}
        found = []
        for token in self._tokens:
            lines = [line.strip() for line in token.content.splitlines() if line.strip()]
            if token.type in {"fence", "code_block"} and len(lines) > LONGEST:
                same = sum(line in known for line in lines)
                if same > len(lines) // 2:
                    found.append(Flaw(_line(token), f"{same} lines of the reproducer are pasted here: attach the file"))
        return found

    def _fences(self) -> Iterator[Flaw]:
        for token in self._tokens:
            if token.type == "fence" and token.map is not None:
                first, end = token.map
                last = self.lines[end - 1].lstrip(" >\t").rstrip()
                closed = end - first > 1 and set(last) == {token.markup[0]} and len(last) >= len(token.markup)
                if not closed:
                    yield Flaw(first + 1, "this code fence is never closed")

    def _tables(self) -> Iterator[Flaw]:
        columns: int | None = None
        for token in self._tokens:
            if token.type == "inline" and any(map(_DELIMITERS.fullmatch, token.content.split("\n"))):
                yield Flaw(_line(token), "this is no table: its head has not as many columns as the line below it")
            if token.type == "table_open":
                columns = None
            if token.type == "tr_open" and token.map is not None:
                cells = _cells(self.lines[token.map[0]])
                columns = columns or cells
                if cells != columns:
                    yield Flaw(_line(token), f"this row has {cells} cells and the table {columns} columns")

    def _headings(self) -> Iterator[Flaw]:
        before = 0
        for token in self._tokens:
            if token.type == "heading_open":
                level = int(token.tag[1])
                if level == 1 and before:
                    yield Flaw(_line(token), "there is a second title")
                if level > before + 1:
                    yield Flaw(_line(token), f"a heading of level {level} follows level {before}")
                before = level

    def _sections(self) -> Iterator[Flaw]:
        bodies: dict[str, list[str]] = {}
        name = None
        for index, token in enumerate(self._tokens):
            if token.type == "heading_open":
                name = self._tokens[index + 1].content.strip() if token.tag == "h2" else name
                if token.tag == "h2":
                    bodies.setdefault(str(name), [])
            elif name is not None and token.content.strip() and self._tokens[index - 1].type != "heading_open":
                bodies[name].append(token.content)
        for wanted in SECTIONS:
            if wanted not in bodies:
                yield Flaw(1, f"there is no section {wanted}")
            elif not bodies[wanted]:
                yield Flaw(1, f"section {wanted} is empty")

    def _html(self) -> Iterator[Flaw]:
        for line, token in self._each():
            if token.type in {"html_block", "html_inline"}:
                tags = {tag.lower() for tag in _TAG.findall(token.content)}
                if not tags:
                    yield Flaw(line, f"{token.content.strip()[:40]} is HTML that nobody sees")
                for tag in sorted(tags - _HARMLESS):
                    yield Flaw(line, f"<{tag}> is read as HTML and vanishes: put it in code, or write it as Markdown")

    def _links(self, attached: Collection[str]) -> Iterator[Flaw]:
        anchors = {
            _slug(self._tokens[at + 1].content) for at, each in enumerate(self._tokens) if each.type == "heading_open"
        }
        for line, token in self._each():
            target = str(token.attrs.get("href" if token.type == "link_open" else "src", ""))
            if token.type not in {"link_open", "image"}:
                continue
            parts = urlsplit(target)
            if parts.scheme in {"http", "https"} and parts.netloc:
                continue
            if parts.scheme or parts.netloc:
                yield Flaw(line, f"{target} is no address on the web")
            elif not parts.path:
                if parts.fragment not in anchors:
                    yield Flaw(line, f"{target or 'an empty link'} leads to no heading")
            elif unquote(parts.path).removeprefix("./") not in attached:
                yield Flaw(line, f"{target} is relative, and no file that is attached: it leads nowhere in an issue")

    def _words(self, elsewhere: Collection[int]) -> Iterator[Flaw]:
        for line, token in self._each():
            if token.type != "text":
                continue
            for mention in _MENTION.findall(token.content):
                yield Flaw(line, f"{mention} sends a message to somebody of that name: put it in code")
            for reference in _UNDEFINED.findall(token.content):
                yield Flaw(line, f"{reference} is a link without an address")
            for number in _BARE_THREAD.findall(token.content):
                if int(number) in elsewhere:
                    yield Flaw(line, f"#{number} is of another repository: write owner/name#{number}")

    def _each(self) -> Iterator[tuple[int, Token]]:
        """Yield every token below the blocks, and blocks of HTML, with their lines."""
        for token in self._tokens:
            line = _line(token)
            if token.type != "inline":
                yield line, token
            for child in token.children or ():
                yield line, child
                line += child.type in {"softbreak", "hardbreak"}


def _line(token: Token) -> int:
    return token.map[0] + 1 if token.map else 1


def _cells(row: str) -> int:
    cells = escapedSplit(row.strip(" >\t"))
    return len(cells) - (not cells[0].strip()) - (len(cells) > 1 and not cells[-1].strip())


def _slug(heading: str) -> str:
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")
