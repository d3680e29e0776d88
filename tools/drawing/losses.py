"""How long each phase takes after the loss of a host, in two real runs."""

from __future__ import annotations

from drawing.canvas import GREY, INK, RANKS, RED, SUM, Canvas, picture

# Seconds of each phase, as phalanx run printed them for the script of bench.recovery. The three hosts, with one rank
# each, were namespaces of one busy machine with two cores.
_RUNS = {
    "host-c is killed: connections are refused": {
        "noticed": 0.05, "ended": 0.15, "agreed": 0.20, "started": 1.02, "loaded": 0.08, "first collective": 0.00,
    },
    "host-c is cut off: it is silent for 2 s": {
        "noticed": 2.02, "ended": 0.19, "agreed": 0.09, "started": 0.81, "loaded": 0.13, "first collective": 0.02,
    },
}  # fmt: skip
_COLOURS = (RED, RANKS[1], RANKS[3], RANKS[0], RANKS[2], SUM)
_LEFT, _RIGHT = 14, 386


@picture(
    "loss_phases",
    "Two bars of the phases after the loss of a host: noticed, ended, agreed, started, loaded, first collective. "
    "Silence takes two seconds to notice, a refused connection almost none.",
    196,
)
def loss_phases(canvas: Canvas) -> None:
    canvas.heading("After the loss of one of three hosts")
    unit = (_RIGHT - _LEFT) / max(sum(phases.values()) for phases in _RUNS.values())
    for row, (title, phases) in enumerate(_RUNS.items()):
        y, x = 46 + 54 * row, float(_LEFT)
        canvas.text(_LEFT, y, title, size=11.5, color=INK)
        for color, took_s in zip(_COLOURS, phases.values(), strict=True):
            canvas.bar(x, y + 6, took_s * unit, 20, color)
            x += took_s * unit
        canvas.text(_RIGHT, y, f"{sum(phases.values()):.2f} s", size=11.5, anchor="end", bold=True)
    for place, (color, name) in enumerate(zip(_COLOURS, next(iter(_RUNS.values())), strict=True)):
        x, y = _LEFT + 126 * (place % 3), 158 + 20 * (place // 3)
        canvas.bar(x, y - 9, 12, 10, color)
        canvas.text(x + 18, y, name, size=11.5, color=GREY)
