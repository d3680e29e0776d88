"""The time of an all_reduce against its size, from the record in docs/numbers."""

from __future__ import annotations

import json
import math
from pathlib import Path

from drawing.canvas import GREY, RANKS, SUM, Canvas, picture

_RECORD = Path(__file__).resolve().parents[2] / "docs" / "numbers" / "collectives.json"
_NUM_RANKS = 2
_ENGINES = (("Gloo", RANKS[0]), ("Open MPI", RANKS[2]), ("phalanx", "#c4232b"))
_LEFT, _RIGHT, _TOP, _BOTTOM = 54, 384, 40, 250


def _lines() -> dict[str, list[tuple[float, float]]]:
    """Return for each engine the sizes in bytes and the seconds of an all_reduce."""
    table = json.loads(_RECORD.read_text(encoding="utf-8"))["tables"][0]
    names = [name for name, _ in table["columns"]]
    lines: dict[str, list[tuple[float, float]]] = {}
    for engine, _ in _ENGINES:
        lines[engine] = sorted(
            (row[names.index("size")], row[names.index(engine)])
            for row in table["rows"]
            if row[names.index("operation")] == "all_reduce"
            and row[names.index("ranks")] == _NUM_RANKS
            and row[names.index(engine)] is not None
        )
    return lines


@picture("speed", f"Time of an all_reduce on {_NUM_RANKS} ranks against its size: phalanx, Gloo and Open MPI.", 296)
def speed(canvas: Canvas) -> None:
    lines = _lines()
    points = [point for line in lines.values() for point in line]
    low_x, high_x = (math.log2(f(size for size, _ in points)) for f in (min, max))
    low_y, high_y = (f(math.log10(s) for _, s in points) for f in (min, max))
    first, last = math.floor(low_y), math.ceil(high_y)

    def place(size: float, seconds: float) -> tuple[float, float]:
        x = _LEFT + (math.log2(size) - low_x) / (high_x - low_x) * (_RIGHT - _LEFT)
        return x, _BOTTOM - (math.log10(seconds) - first) / (last - first) * (_BOTTOM - _TOP)

    canvas.heading(f"all_reduce of float32 on {_NUM_RANKS} ranks")
    for power in range(first, last + 1):
        y = place(2**low_x, 10.0**power)[1]
        canvas.line([(_LEFT, y), (_RIGHT, y)], color="#d8dee4", width=0.8)
        unit, factor = ("s", 0) if power >= 0 else ("ms", 3) if power >= -3 else ("µs", 6)
        canvas.text(_LEFT - 6, y + 4, f"{10 ** (power + factor)} {unit}", size=11, anchor="end", color=GREY)
    for exponent, label in ((2, "4 B"), (10, "1 KiB"), (16, "64 KiB"), (22, "4 MiB"), (28, "256 MiB")):
        if low_x <= exponent <= high_x:
            x = place(2.0**exponent, 10.0**first)[0]
            canvas.line([(x, _TOP), (x, _BOTTOM)], color="#d8dee4", width=0.8)
            canvas.text(min(x, _RIGHT - 18), _BOTTOM + 16, label, size=11, anchor="middle", color=GREY)
    canvas.line([(_LEFT, _BOTTOM), (_RIGHT, _BOTTOM)], color=SUM)
    for i, (engine, color) in enumerate(_ENGINES):
        places = [place(*point) for point in lines[engine]]
        if not places:
            continue
        canvas.line(places, color=color, width=2.2)
        for x, y in places:
            canvas.dot(x, y, 3, color)
        canvas.line([(70 + 106 * i, 282), (88 + 106 * i, 282)], color=color, width=3)
        canvas.text(94 + 106 * i, 286, engine, color=color, bold=True)
