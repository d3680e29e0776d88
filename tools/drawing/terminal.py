"""Turns what a program has written to a terminal into the lines on its screen, and these lines into an SVG file."""

from __future__ import annotations

import re
from dataclasses import dataclass
from html import escape

COLUMNS = 80
_CELL_W, _CELL_H, _MARGIN = 7.2, 17, 14
_INK, _DIM, _PAPER, _FRAME = "#e6edf3", "#9aa4af", "#0d1117", "#30363d"
_MONO = "ui-monospace,SFMono-Regular,Menlo,Consolas,'DejaVu Sans Mono',monospace"
_COLORS = ("#484f58", "#ff7b72", "#3fb950", "#d29922", "#58a6ff", "#bc8cff", "#39c5cf", "#e6edf3")
_ESCAPE = re.compile(r"\x1b\[([?\d;]*)([A-Za-z])|\x1b.|[\r\n\b\x07]")


@dataclass(frozen=True)
class Style:
    color: str = _INK
    bold: bool = False


def _indexed(number: int) -> str:
    """Return one of xterm's 256 colors."""
    if number < 16:
        return _COLORS[number % 8]
    if number >= 232:
        return "#" + f"{max(8 + 10 * (number - 232), 72):02x}" * 3  # the darkest grays would not show on our background
    parts = divmod((number - 16) // 6, 6), (number - 16) % 6
    return "#" + "".join(f"{0 if part == 0 else 55 + 40 * part:02x}" for part in (*parts[0], parts[1]))


class Screen:
    """Understands what phalanx, rich and torch write: colors, carriage returns, erasing, moving up."""

    def __init__(self) -> None:
        self.rows: list[list[tuple[str, Style]]] = [[]]
        self._x, self._y, self._style = 0, 0, Style()

    def write(self, text: str) -> None:
        place = 0
        for found in _ESCAPE.finditer(text):
            self._put(text[place : found.start()])
            place = found.end()
            if found[2]:
                self._control(found[1], found[2])
            elif found[0] == "\r":
                self._x = 0
            elif found[0] == "\n":
                self._x, self._y = 0, self._y + 1
                if self._y == len(self.rows):
                    self.rows.append([])
        self._put(text[place:])

    def _put(self, text: str) -> None:
        for char in text:
            if self._x == COLUMNS:
                self.write("\r\n")
            row = self.rows[self._y]
            row.extend([(" ", Style())] * (self._x + 1 - len(row)))
            row[self._x] = (char, self._style)
            self._x += 1

    def _control(self, arguments: str, letter: str) -> None:
        numbers = [int(number) for number in arguments.split(";") if number.isdigit()]
        if letter == "m":
            self._set_style(numbers or [0])
        elif letter == "A":
            self._y = max(self._y - (numbers or [1])[0], 0)
        elif letter == "K":
            if numbers and numbers[0] == 2:
                self.rows[self._y] = []
            else:
                del self.rows[self._y][self._x :]

    def _set_style(self, numbers: list[int]) -> None:
        color, bold = self._style.color, self._style.bold
        while numbers:
            number = numbers.pop(0)
            if number == 0:
                color, bold = _INK, False
            elif number in (1, 22):
                bold = number == 1
            elif number == 2:
                color = _DIM
            elif 30 <= number <= 37 or 90 <= number <= 97:
                color = _COLORS[number % 10]
            elif number == 39:
                color = _INK
            elif number == 38 and numbers[:1] == [5]:
                color = _indexed(numbers[1])
                del numbers[:2]
        self._style = Style(color, bold)

    def text(self) -> str:
        return "\n".join("".join(char for char, _ in row).rstrip() for row in self.rows).rstrip()


def _runs(row: list[tuple[str, Style]]) -> list[tuple[int, str, Style]]:
    """Return the pieces of a row that have one style each: column, text without surrounding blanks, and style."""
    runs: list[tuple[int, str, Style]] = []
    for column, (char, style) in enumerate(row):
        if runs and runs[-1][2] == style and runs[-1][0] + len(runs[-1][1]) == column:
            runs[-1] = (runs[-1][0], runs[-1][1] + char, style)
        else:
            runs.append((column, char, style))
    stripped = [(at + len(text) - len(text.lstrip()), text.strip(), style) for at, text, style in runs]
    return [run for run in stripped if run[1]]


def svg_of(screen: Screen, title: str, description: str) -> str:
    """Return the screen as an SVG file; each run of a style keeps its columns, whatever the reader's font."""
    rows = list(screen.rows)
    while rows and not _runs(rows[-1]):
        rows.pop()
    width, height = COLUMNS * _CELL_W + 2 * _MARGIN, len(rows) * _CELL_H + 2 * _MARGIN
    shapes = []
    for i, row in enumerate(rows):
        for column, text, style in _runs(row):
            x, y = _MARGIN + column * _CELL_W, _MARGIN + i * _CELL_H + 13
            more = f' fill="{style.color}"' if style.color != _INK else ""
            more += ' font-weight="700"' if style.bold else ""
            shapes.append(
                f'<text x="{x:.1f}" y="{y}" textLength="{len(text) * _CELL_W:.1f}"{more}>'
                f"{escape(text, quote=False).replace('  ', chr(160) * 2)}</text>"
            )
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height}" width="{width * 1.1:.0f}"'
            f' height="{height * 1.1:.0f}" role="img">',
            f"<title>{escape(title, quote=False)}</title>",
            f"<desc>{escape(description, quote=False)}</desc>",
            f"<style>text{{font:12px {_MONO};white-space:pre}}svg{{fill:{_INK}}}</style>",
            f'<rect x=".5" y=".5" width="{width - 1:g}" height="{height - 1}" rx="8" fill="{_PAPER}"'
            f' stroke="{_FRAME}"/>',
            *shapes,
            "</svg>",
            "",
        ]
    )
