"""A canvas that becomes an SVG file: boxes, cells, arrows and text in the colors that all pictures share.

A canvas is 400 units wide. Text of 11 units and more stays readable where the page is 360 pixels wide. Each picture has
a background of its own, so it reads the same on a light and on a dark page.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from html import escape

WIDTH = 400
_SHOWN_WIDTH = 560  # width in pixels on a page that has room

INK = "#1f2328"
GREY = "#59636e"
LINE = "#8b949e"
PALE = "#f3f5f7"
PAPER = "#ffffff"
RED = "#c4232b"
SUM = "#3d4550"
RANKS = ("#1f6fb2", "#b8560b", "#1a7f4b", "#8250c4")  # contrast with white: 4.5:1 and more; distinct to the color-blind
TINTS = ("#e3effa", "#fbeadb", "#dff3e7", "#efe6fb")

_SANS = "system-ui,-apple-system,'Segoe UI',Roboto,'Noto Sans',Arial,sans-serif"
_MONO = "ui-monospace,SFMono-Regular,Menlo,Consolas,'DejaVu Sans Mono',monospace"

Draw = Callable[["Canvas"], None]
PICTURES: dict[str, tuple[str, int, Draw]] = {}


def picture(name: str, description: str, height: int) -> Callable[[Draw], Draw]:
    """Register a function that draws the picture `name` onto a canvas of `height` units."""

    def register(draw: Draw) -> Draw:
        PICTURES[name] = (description, height, draw)
        return draw

    return register


def svg_of(name: str) -> str:
    """Return the SVG text of a registered picture."""
    description, height, draw = PICTURES[name]
    canvas = Canvas(name.replace("_", " "), description, height)
    draw(canvas)
    return canvas.svg()


def _num(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")


class Canvas:
    """Shapes in the order in which they were drawn; `svg` returns the file."""

    def __init__(self, title: str, description: str, height: int) -> None:
        self.height = height
        self._title, self._description = title, description
        self._shapes: list[str] = []

    def text(
        self,
        x: float,
        y: float,
        text: str,
        *,
        size: float = 12,
        anchor: str = "start",
        color: str = INK,
        bold: bool = False,
        mono: bool = False,
    ) -> None:
        """Write one line whose baseline is `y`; `anchor` is start, middle or end."""
        kind = "m" if mono else "s"
        more = "".join(
            [
                f' text-anchor="{anchor}"' if anchor != "start" else "",
                f' fill="{color}"' if color != INK else "",
                ' font-weight="600"' if bold else "",
            ]
        )
        place = f'x="{_num(x)}" y="{_num(y)}" font-size="{_num(size)}"'
        self._shapes.append(f'<text class="{kind}" {place}{more}>{escape(text, quote=False)}</text>')

    def lines(self, x: float, y: float, lines: Sequence[str], *, step: float = 15, **how: object) -> None:
        """Write several lines below each other."""
        for i, line in enumerate(lines):
            self.text(x, y + i * step, line, **how)  # type: ignore[arg-type]

    def heading(self, text: str, y: float = 22, x: float = 14) -> None:
        self.text(x, y, text, size=13, bold=True)

    def code(self, text: str, y: float = 22, x: float = 14) -> None:
        self.text(x, y, text, size=13, bold=True, mono=True)

    def box(
        self,
        x: float,
        y: float,
        w: float,
        h: float,
        *,
        fill: str = PAPER,
        stroke: str = LINE,
        radius: float = 5,
        dashed: bool = False,
        width: float = 1.2,
        label: str | None = None,
        color: str = INK,
        size: float = 12,
        bold: bool = False,
        mono: bool = False,
    ) -> None:
        """Draw a rectangle, with a label in its middle."""
        dash = ' stroke-dasharray="4 3"' if dashed else ""
        self._shapes.append(
            f'<rect x="{_num(x)}" y="{_num(y)}" width="{_num(w)}" height="{_num(h)}" rx="{_num(radius)}"'
            f' fill="{fill}" stroke="{stroke}" stroke-width="{_num(width)}"{dash}/>'
        )
        if label is not None:
            lines = label.split("\n")
            step = size + 3
            first = y + h / 2 + size * 0.36 - step * (len(lines) - 1) / 2
            self.lines(
                x + w / 2, first, lines, step=step, anchor="middle", color=color, size=size, bold=bold, mono=mono
            )

    def rank(self, x: float, y: float, rank: int, *, w: float = 50, h: float = 24, label: str | None = None) -> None:
        """Draw a rank's box in its color."""
        label = f"rank {rank}" if label is None else label
        color = RANKS[rank % 4]
        self.box(x, y, w, h, fill=color, stroke=color, label=label, color=PAPER, bold=True)

    def cell(
        self, x: float, y: float, label: str, rank: int | None, *, w: float = 26, h: float = 24, size: float = 12
    ) -> None:
        """Draw an element in the color of the rank that it comes from; None: a sum over all ranks."""
        color = SUM if rank is None else RANKS[rank % 4]
        self.box(x, y, w, h, fill=color, stroke=PAPER, radius=4, label=label, color=PAPER, bold=True, size=size)
        if rank is None:  # a stripe in each rank's color
            for i, stripe in enumerate(RANKS):
                self.bar(x + 3 + i * (w - 6) / 4, y + h - 4.5, (w - 6) / 4, 2.5, stripe)

    def empty(self, x: float, y: float, *, w: float = 26, h: float = 24) -> None:
        """Draw an element whose value does not matter."""
        self.box(x + 1, y + 1, w - 2, h - 2, fill=PALE, stroke=LINE, dashed=True, radius=4, width=1)

    def bar(self, x: float, y: float, w: float, h: float, fill: str) -> None:
        self._shapes.append(f'<rect x="{_num(x)}" y="{_num(y)}" width="{_num(w)}" height="{_num(h)}" fill="{fill}"/>')

    def dot(self, x: float, y: float, radius: float, fill: str) -> None:
        self._shapes.append(f'<circle cx="{_num(x)}" cy="{_num(y)}" r="{_num(radius)}" fill="{fill}"/>')

    def cylinder(self, x: float, y: float, w: float, h: float, label: str) -> None:
        """Draw a disk."""
        r = 7
        side = h - 2 * r
        self._shapes.append(
            f'<path d="M{_num(x)} {_num(y + r)}v{_num(side)}a{_num(w / 2)} {r} 0 0 0 {_num(w)} 0v{_num(-side)}"'
            f' fill="{PALE}" stroke="{GREY}" stroke-width="1.2"/>'
            f'<ellipse cx="{_num(x + w / 2)}" cy="{_num(y + r)}" rx="{_num(w / 2)}" ry="{r}"'
            f' fill="{PAPER}" stroke="{GREY}" stroke-width="1.2"/>'
        )
        lines = label.split("\n")
        self.lines(x + w / 2, y + h / 2 + 10 - 7 * (len(lines) - 1), lines, step=14, anchor="middle", size=11)

    def line(
        self,
        points: Sequence[tuple[float, float]],
        *,
        color: str = LINE,
        width: float = 1.2,
        dashed: bool = False,
    ) -> None:
        dash = ' stroke-dasharray="4 3"' if dashed else ""
        path = " ".join(f"{_num(x)},{_num(y)}" for x, y in points)
        self._shapes.append(
            f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="{_num(width)}"{dash}/>'
        )

    def arrow(
        self,
        *points: tuple[float, float],
        color: str = GREY,
        width: float = 1.6,
        dashed: bool = False,
        both: bool = False,
    ) -> None:
        """Draw a line through `points` with a head at its end, or at both ends."""
        ends = [(points[-1], points[-2])] + ([(points[0], points[1])] if both else [])
        cut = list(points)
        for (x, y), (from_x, from_y) in ends:
            length = math.hypot(x - from_x, y - from_y)
            dx, dy = (x - from_x) / length, (y - from_y) / length
            base = (x - 7 * dx, y - 7 * dy)
            cut[cut.index((x, y))] = (x - 5 * dx, y - 5 * dy)
            corners = [(x, y), (base[0] - 4 * dy, base[1] + 4 * dx), (base[0] + 4 * dy, base[1] - 4 * dx)]
            path = " ".join(f"{_num(a)},{_num(b)}" for a, b in corners)
            self._shapes.append(f'<polygon points="{path}" fill="{color}"/>')
        self.line(cut, color=color, width=width, dashed=dashed)

    def svg(self) -> str:
        """Return the file: a title and a description for screen readers, a background, the shapes."""
        shown_height = round(self.height * _SHOWN_WIDTH / WIDTH)
        head = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {self.height}" width="{_SHOWN_WIDTH}"'
            f' height="{shown_height}" role="img">',
            f"<title>{escape(self._title, quote=False)}</title>",
            f"<desc>{escape(self._description, quote=False)}</desc>",
            f"<style>svg{{fill:{INK}}}.s{{font-family:{_SANS}}}.m{{font-family:{_MONO}}}</style>",
            f'<rect x=".5" y=".5" width="{WIDTH - 1}" height="{self.height - 1}" rx="8"'
            f' fill="{PAPER}" stroke="#d0d7de"/>',
        ]
        return "\n".join([*head, *self._shapes, "</svg>", ""])
