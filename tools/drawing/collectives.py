"""Who holds what before and after each collective, on four ranks; messages, groups and the ring."""

from __future__ import annotations

from collections.abc import Sequence

from drawing.canvas import GREY, INK, LINE, PALE, RANKS, SUM, TINTS, Canvas, picture

Cell = tuple[str, int | None] | None  # label and source rank (None: the sum over all ranks), or an empty place
_N = range(4)
_LETTERS = "ABCD"
_TOP = 58  # top edge of the first rank's row
_ROW = 34


def _before_and_after(
    canvas: Canvas, call: str, before: Sequence[Sequence[Cell]], after: Sequence[Sequence[Cell]], note: Sequence[str]
) -> None:
    """Draw two columns with a row per rank, and say in words what happened."""
    canvas.code(call)
    canvas.text(72, 46, "before", color=GREY)
    canvas.text(280, 46, "after", color=GREY)
    for rank in _N:
        y = _TOP + _ROW * rank
        canvas.rank(14, y, rank)
        for x, cells in ((72, before[rank]), (280, after[rank])):
            for i, cell in enumerate(cells):
                if cell is None:
                    canvas.empty(x + 27 * i, y)
                else:
                    canvas.cell(x + 27 * i, y, *cell)
    middle = _TOP + 2 * _ROW - 5
    canvas.arrow((196, middle), (264, middle), width=2)
    canvas.lines(14, _TOP + 4 * _ROW + 12, note, color=INK)


_HEIGHT = _TOP + 4 * _ROW + 42
_EMPTY: list[Cell] = [None]
_OWN: list[list[Cell]] = [[(str(rank + 1), rank)] for rank in _N]
_BLOCKS_OF_0: list[Cell] = [(letter, 0) for letter in _LETTERS]
_BLOCKS: list[list[Cell]] = [[(letter, rank) for letter in _LETTERS] for rank in _N]
_ALL: list[Cell] = [(letter, rank) for rank, letter in enumerate(_LETTERS)]


@picture("broadcast", "Broadcast: rank 0 has a tensor; afterwards all four ranks have it.", _HEIGHT)
def broadcast(canvas: Canvas) -> None:
    before: list[list[Cell]] = [[("A", 0)], _EMPTY, _EMPTY, _EMPTY]
    note = ["Every rank ends with rank 0's tensor.", "Model weights travel this way before training."]
    _before_and_after(canvas, "broadcast(tensor, src=0)", before, [[("A", 0)]] * 4, note)


@picture("scatter", "Scatter: rank 0 has four blocks; afterwards each rank has one of them.", _HEIGHT)
def scatter(canvas: Canvas) -> None:
    after: list[list[Cell]] = [[block] for block in _BLOCKS_OF_0]
    note = ["Rank 0 gives each rank one block of its list,", "itself included."]
    _before_and_after(canvas, "scatter(tensor, blocks, src=0)", [_BLOCKS_OF_0, *[_EMPTY] * 3], after, note)


@picture("gather", "Gather: each rank has one block; afterwards rank 0 has all four.", _HEIGHT)
def gather(canvas: Canvas) -> None:
    before: list[list[Cell]] = [[block] for block in _ALL]
    note = ["Rank 0 collects one block from every rank,", "in rank order. The others keep what they had."]
    _before_and_after(canvas, "gather(tensor, blocks, dst=0)", before, [_ALL, *before[1:]], note)


@picture("all_gather", "All-gather: each rank has one block; afterwards every rank has all four.", _HEIGHT)
def all_gather(canvas: Canvas) -> None:
    note = ["Like gather, but every rank gets the whole list,", "in rank order."]
    _before_and_after(canvas, "all_gather(blocks, tensor)", [[block] for block in _ALL], [_ALL] * 4, note)


@picture("reduce", "Reduce: the ranks hold 1, 2, 3 and 4; afterwards rank 0 holds their sum, 10.", _HEIGHT)
def reduce(canvas: Canvas) -> None:
    after: list[list[Cell]] = [[("10", None)], _EMPTY, _EMPTY, _EMPTY]
    note = ["Rank 0 ends with the sum: 1 + 2 + 3 + 4 = 10.", "Don't rely on what the other ranks hold afterwards."]
    _before_and_after(canvas, "reduce(tensor, dst=0)", _OWN, after, note)


@picture("all_reduce", "All-reduce: the ranks hold 1, 2, 3 and 4; afterwards every rank holds the sum, 10.", _HEIGHT)
def all_reduce(canvas: Canvas) -> None:
    note = ["Every rank ends with the sum: 1 + 2 + 3 + 4 = 10.", "Gradients are averaged this way."]
    _before_and_after(canvas, "all_reduce(tensor)", _OWN, [[("10", None)]] * 4, note)


@picture("reduce_scatter", "Reduce-scatter: each rank has blocks A to D; afterwards each has one block's sum.", _HEIGHT)
def reduce_scatter(canvas: Canvas) -> None:
    after: list[list[Cell]] = [[("Σ" + letter, None)] for letter in _LETTERS]
    note = ["Block A of all ranks is summed for rank 0,", "block B for rank 1, and so on."]
    _before_and_after(canvas, "reduce_scatter(tensor, blocks)", _BLOCKS, after, note)


@picture("all_to_all", "All-to-all: each rank sends one of its blocks A to D to each rank.", _HEIGHT)
def all_to_all(canvas: Canvas) -> None:
    after: list[list[Cell]] = [[(letter, rank) for rank in _N] for letter in _LETTERS]
    note = ["Every rank sends block A to rank 0, block B to", "rank 1, and so on: rows become columns."]
    _before_and_after(canvas, "all_to_all(received, blocks)", _BLOCKS, after, note)


@picture("barrier", "Barrier: ranks arrive at different times, wait, and all go on once the last has come.", _HEIGHT)
def barrier(canvas: Canvas) -> None:
    canvas.code("barrier()")
    canvas.text(72, 46, "time →", color=GREY)
    leaves = 262
    for rank, arrives in enumerate((150, 214, 254, 118)):
        y = _TOP + _ROW * rank
        canvas.rank(14, y, rank)
        canvas.box(72, y + 4, arrives - 72, 16, fill=RANKS[rank], stroke=RANKS[rank], radius=3)
        canvas.box(arrives, y + 4, leaves - arrives, 16, fill=PALE, dashed=True, radius=0, width=1)
        if leaves - arrives > 40:
            canvas.text((arrives + leaves) / 2, y + 16, "waits", size=11, anchor="middle", color=GREY)
        canvas.box(leaves + 4, y + 4, 384 - leaves - 4, 16, fill=RANKS[rank], stroke=RANKS[rank], radius=3)
    canvas.line([(leaves + 2, _TOP - 6), (leaves + 2, _TOP + 4 * _ROW - 4)], color=INK, width=2)
    note = ["Nobody leaves before everybody has arrived.", "No data is exchanged."]
    canvas.lines(14, _TOP + 4 * _ROW + 12, note)


def _ring_steps() -> list[tuple[str, list[list[int]], set[tuple[int, int]]]]:
    """Return each step's name, the number of ranks summed in each rank's chunks, and the chunks that just arrived."""
    counts = [[1] * 4 for _ in _N]
    steps = [("start", [row[:] for row in counts], set[tuple[int, int]]())]
    for phase, first in (("add", 0), ("copy", 1)):
        for step in range(3):
            moves = [
                ((rank + 1) % 4, (rank + first - step) % 4, counts[rank][(rank + first - step) % 4]) for rank in _N
            ]
            for to, chunk, num in moves:
                counts[to][chunk] = counts[to][chunk] + num if phase == "add" else num
            steps.append((f"{phase} {step + 1}", [row[:] for row in counts], {(to, chunk) for to, chunk, _ in moves}))
    assert all(num == 4 for row in counts for num in row)
    return steps


@picture(
    "ring_all_reduce",
    "Ring all-reduce on four ranks: three steps that add chunks up, three that pass on finished ones.",
    432,
)
def ring_all_reduce(canvas: Canvas) -> None:
    canvas.heading("Each step: pass one chunk to the next rank")
    for rank in _N:
        x = 62 + 84 * rank
        canvas.rank(x + 4, 36, rank, w=64)
        if rank < 3:
            canvas.arrow((x + 69, 48), (x + 87, 48), width=2)
    canvas.arrow((350, 61), (350, 70), (98, 70), (98, 61), width=2)
    for i, (name, counts, fresh) in enumerate(_ring_steps()):
        y = 84 + 40 * i + (8 if i > 0 else 0) + (8 if i > 3 else 0)
        canvas.text(14, y + 17, name, color=GREY)
        for rank in _N:
            for chunk in _N:
                num, x = counts[rank][chunk], 62 + 84 * rank + 18 * chunk
                is_done = num == 4
                fill = SUM if is_done else ("#c9ced4", "#aeb6bf", "#8b949e")[num - 1]
                new = (rank, chunk) in fresh
                canvas.box(
                    x,
                    y,
                    17,
                    26,
                    fill=fill,
                    stroke=RANKS[(rank + 3) % 4] if new else fill,
                    radius=3,
                    width=3 if new else 0,
                )
                color = "#ffffff" if num > 2 else INK
                canvas.text(x + 8.5, y + 17, str(num), size=12, anchor="middle", color=color, bold=True)
    y = 84 + 40 * 7 + 16
    canvas.lines(
        14,
        y + 10,
        [
            "Number: how many ranks are summed in the chunk.",
            "Frame: has just come from the rank of that colour.",
            "With n ranks, each sends 2 (n - 1) / n of the tensor.",
        ],
    )


@picture("point_to_point", "Messages between two ranks: send and recv wait; isend and irecv return at once.", 262)
def point_to_point(canvas: Canvas) -> None:
    for left, heading in ((14, "send / recv"), (212, "isend / irecv")):
        canvas.code(heading, x=left)
        canvas.rank(left, 34, 0)
        canvas.rank(left + 120, 34, 1)
        canvas.line([(left + 25, 60), (left + 25, 210)], color=RANKS[0], width=2)
        canvas.line([(left + 145, 60), (left + 145, 210)], color=RANKS[1], width=2)
    # Blocking: recv is called first, and sleeps until the message arrives.
    canvas.box(153, 78, 12, 62, fill=PALE, dashed=True, radius=0)
    canvas.text(148, 88, "recv", anchor="end", mono=True, size=11)
    canvas.text(148, 104, "waits", anchor="end", color=GREY, size=11)
    canvas.box(33, 124, 12, 16, fill=RANKS[0], stroke=RANKS[0], radius=0)
    canvas.text(50, 122, "send", mono=True, size=11)
    canvas.arrow((46, 132), (152, 138), color=RANKS[0], width=2)
    canvas.text(92, 156, "tensor", anchor="middle", color=RANKS[0], size=11)
    canvas.lines(14, 232, ["Both return when the", "tensor may be used again."], color=INK)
    # Asynchronous: both ranks start the operation, compute, and wait for it later.
    canvas.text(346, 78, "irecv", anchor="end", mono=True, size=11)
    canvas.text(248, 92, "isend", mono=True, size=11)
    canvas.dot(357, 74, 4, RANKS[1])
    canvas.dot(237, 88, 4, RANKS[0])
    canvas.arrow((242, 90), (352, 128), color=RANKS[0], width=2)
    for x, color, tint in ((237, RANKS[0], TINTS[0]), (357, RANKS[1], TINTS[1])):
        canvas.box(x - 6, 102 if x == 237 else 84, 12, 78 if x == 237 else 96, fill=tint, stroke=color, radius=0)
        canvas.dot(x, 190, 4, color)
    canvas.text(297, 150, "both compute", anchor="middle", color=GREY, size=11)
    canvas.text(246, 194, "wait()", mono=True, size=11)
    canvas.text(348, 194, "wait()", mono=True, size=11, anchor="end")
    canvas.lines(212, 232, ["Don't touch the tensor", "before wait() returns."], color=INK)
    canvas.line([(196, 20), (196, 244)])


@picture("process_groups", "Four ranks in a 2 by 2 mesh: the default group, two row groups and two column groups.", 300)
def process_groups(canvas: Canvas) -> None:
    canvas.heading("Ranks 0 to 3 as a mesh of rows and columns")
    canvas.box(14, 34, 240, 220, fill=PALE, stroke=INK, radius=10, width=1.6)
    canvas.text(24, 52, "default group: all ranks", size=11)
    for row in range(2):
        canvas.box(28, 72 + 88 * row, 212, 58, fill="#dbe9f7", stroke=RANKS[0], radius=8, width=1.6)
    for column in range(2):
        canvas.box(48 + 104 * column, 62, 68, 176, fill="none", stroke=RANKS[3], radius=8, dashed=True, width=1.8)
    for rank in range(4):
        canvas.rank(56 + 104 * (rank % 2), 88 + 88 * (rank // 2), rank, w=52, h=26)
    canvas.line([(268, 80), (290, 80)], color=RANKS[0], width=4)
    canvas.lines(298, 78, ["row groups", "{0, 1}, {2, 3}"], size=12)
    canvas.line([(268, 130), (290, 130)], color=RANKS[3], width=2, dashed=True)
    canvas.lines(298, 128, ["column groups", "{0, 2}, {1, 3}"], size=12)
    canvas.lines(268, 182, ["Rank 3 of the job is", "rank 1 in its row and", "rank 1 in its column."], size=12)
    canvas.lines(
        14,
        276,
        ["A collective of a group meets only that group's ranks;", "groups that share no rank run side by side."],
    )
    canvas.line([(14, 262), (386, 262)], color=LINE, width=0.6)
