"""SVG elements of the plots: the document, text, bars, lines and curves.

The document has a title and a description for screen readers. Its style follows the reader's light or dark theme
(`prefers-color-scheme`), also where a browser shows the SVG as an image.
"""

from __future__ import annotations

from collections.abc import Iterable
from xml.sax.saxutils import escape

_STYLE = """\
.paper { fill: #ffffff } .text { fill: #1b1f24 } .quiet { fill: #57606a } .faint { stroke: #d8dde3 } .axis { stroke: #8b949e }
.ours { fill: #1f6feb } .peer { fill: #8b949e } .wrong { fill: #cf222e } .faint-bar { fill: #c3cad2 } .floor { stroke: #1a7f37 } .floor-text { fill: #1a7f37 }
.ours-line { stroke: #1f6feb } .wrong-line { stroke: #cf222e } .other-line { stroke: #1a7f37 }
.ours-text { fill: #1f6feb } .wrong-text { fill: #cf222e } .other-text { fill: #1a7f37 }
@media (prefers-color-scheme: dark) {
  .paper { fill: #14171a } .text { fill: #e6e8ea } .quiet { fill: #a3abb4 } .faint { stroke: #2f353b } .axis { stroke: #6e7681 }
  .ours { fill: #539bf5 } .peer { fill: #768390 } .wrong { fill: #ff7b72 } .faint-bar { fill: #454c54 } .floor { stroke: #57ab5a } .floor-text { fill: #7ee787 }
  .ours-line { stroke: #539bf5 } .wrong-line { stroke: #ff7b72 } .other-line { stroke: #57ab5a }
  .ours-text { fill: #539bf5 } .wrong-text { fill: #ff7b72 } .other-text { fill: #7ee787 }
}"""


def sheet(width: float, height: float, title: str, description: str, body: Iterable[str]) -> str:
    """Return an SVG document.

    Args:
        width: in pixels, without scaling.
        height: likewise.
        title: of the plot, for a screen reader and as a tooltip.
        description: of its content, in a sentence or two.
        body: its elements; later ones are drawn over earlier ones.
    """
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" width="{width:g}" height="{height:g}" '
            'role="img" aria-labelledby="title description" font-family="system-ui, sans-serif" font-size="13">',
            f'<title id="title">{escape(title)}</title>',
            f'<desc id="description">{escape(description)}</desc>',
            f"<style>{_STYLE}</style>",
            f'<rect class="paper" width="{width:g}" height="{height:g}"/>',
            *body,
            "</svg>\n",
        ]
    )


def text(
    x: float, y: float, words: str, *, kind: str = "text", size: int = 13, weight: int = 400, anchor: str = "start"
) -> str:
    """Return one line of text; `kind`, here and below, is a CSS class of `_STYLE`."""
    place = f'x="{x:.1f}" y="{y:.1f}"'
    return f'<text class="{kind}" {place} font-size="{size}" font-weight="{weight}" text-anchor="{anchor}">{escape(words)}</text>'


def bar(x: float, y: float, width: float, height: float, kind: str) -> str:
    """Return a bar whose left edge is at x, at least one pixel wide."""
    return f'<rect class="{kind}" x="{x:.1f}" y="{y:.1f}" width="{max(width, 1):.1f}" height="{height:g}" rx="2"/>'


def line(x1: float, y1: float, x2: float, y2: float, kind: str, width: float = 1) -> str:
    """Return a line."""
    return f'<line class="{kind}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke-width="{width:g}"/>'


def curve(points: Iterable[tuple[float, float]], kind: str, width: float = 1.6, *, dash: str = "") -> str:
    """Return a line through points; `dash` is the `stroke-dasharray` of SVG."""
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    dashes = f' stroke-dasharray="{dash}"' if dash else ""
    return f'<polyline points="{path}" fill="none" class="{kind}" stroke-width="{width:g}"{dashes}/>'
