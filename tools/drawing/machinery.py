"""What a job is made of: processes, shared memory, hosts, snapshots, and what happens when a rank dies."""

from __future__ import annotations

from drawing.canvas import GREY, INK, PALE, PAPER, RANKS, RED, SUM, TINTS, Canvas, picture


@picture(
    "job",
    "A job on two hosts: on each, phalanx run supervises two ranks that share memory; a bridge joins the hosts.",
    288,
)
def job(canvas: Canvas) -> None:
    for host in range(2):
        x = 12 + 196 * host
        canvas.box(x, 12, 180, 216, fill=PALE, stroke=INK, radius=10, width=1.4)
        canvas.text(x + 12, 32, f"host {host}", bold=True)
        canvas.box(
            x + 12, 42, 156, 40, fill=PAPER, stroke=GREY, label="phalanx run\nstarts, watches, restarts", size=11
        )
        for i in range(2):
            rank = 2 * host + i
            middle = x + 49 + 82 * i
            canvas.arrow((middle, 82), (middle, 102))
            canvas.box(x + 12 + 82 * i, 104, 74, 54, fill=TINTS[rank], stroke=RANKS[rank])
            canvas.rank(x + 18 + 82 * i, 110, rank, w=62)
            canvas.text(middle, 150, "train.py", anchor="middle", size=11, mono=True)
            canvas.arrow((middle, 158), (middle, 182), color=RANKS[rank], both=True)
        canvas.box(x + 12, 184, 156, 32, fill=SUM, stroke=SUM, color=PAPER, bold=True, label="shared memory")
    canvas.arrow((180, 200), (220, 200), color=RED, width=3, both=True)
    canvas.line([(200, 204), (200, 238)], color=RED, width=1)
    canvas.text(200, 252, "bridge: Gloo or MPI", anchor="middle", color=RED, bold=True)
    canvas.text(200, 274, "A host's data crosses the bridge once.", anchor="middle", size=11, color=GREY)


@picture(
    "launch",
    "Who starts whom: phalanx run starts the reaper, the reaper the forker, and the forker forks the ranks.",
    318,
)
def launch(canvas: Canvas) -> None:
    boxes = (
        ("phalanx run", "supervisor: signals, screen, logs, restarts; no torch"),
        ("reaper", "only watches: ends the job if others are killed"),
        ("forker", "imports torch once, forks the ranks, reaps them"),
    )
    for i, (name, role) in enumerate(boxes):
        y = 14 + 62 * i
        canvas.box(14, y, 372, 44, fill=PALE, stroke=GREY)
        canvas.text(26, y + 18, name, bold=True, mono=i == 0)
        canvas.text(26, y + 35, role, size=11, color=GREY)
        canvas.arrow((120, y + 44), (120, y + 61))
    for rank in range(2):
        x = 14 + 106 * rank
        canvas.box(x, 200, 98, 62, fill=TINTS[rank], stroke=RANKS[rank])
        canvas.rank(x + 18, 207, rank, w=62)
        canvas.text(x + 49, 252, "train.py", anchor="middle", size=11, mono=True)
    canvas.arrow((63, 182), (63, 199))
    canvas.box(
        240,
        200,
        146,
        62,
        dashed=True,
        fill=PAPER,
        label="standby forker:\nready for a restart,\nscript's imports done",
        size=11,
    )
    canvas.lines(
        14,
        284,
        ["Nothing outlives the job: whichever of the three is left", "when the others are killed ends every rank."],
    )


@picture(
    "recovery",
    "Recovery: rank 1 is killed, rank 0 raises RankFailed, both start again and load the last snapshot.",
    304,
)
def recovery(canvas: Canvas) -> None:
    canvas.heading("kill -9 of rank 1 under phalanx run --max-restarts")
    for rank in range(2):
        y = 44 + 40 * rank
        canvas.rank(12, y, rank)
        canvas.box(
            68, y + 2, 92 - 12 * rank + (12 if rank == 0 else 0), 20, fill=RANKS[rank], stroke=RANKS[rank], radius=2
        )
        for i in range(4):
            canvas.line([(84 + 18 * i, y + 2), (84 + 18 * i, y + 22)], color=PAPER, width=1)
        canvas.box(262, y + 2, 124, 20, fill=RANKS[rank], stroke=RANKS[rank], radius=2)
        canvas.text(324, y + 16, "training goes on", size=11, anchor="middle", color=PAPER)
        canvas.box(216, y + 2, 44, 20, fill=TINTS[rank], stroke=RANKS[rank], radius=2, label="load", size=11)
    canvas.text(155, 101, "✕", size=18, color=RED, anchor="middle", bold=True)
    canvas.text(14, 148, "launcher", size=11, color=GREY)
    canvas.box(176, 132, 36, 22, fill=SUM, stroke=SUM, radius=2, label="fork", size=11, color=PAPER)
    canvas.arrow((160, 112), (176, 131), color=RED)
    canvas.arrow((208, 131), (222, 108))
    steps = (
        ("1", "rank 1 dies: its pidfd tells every rank of its host"),
        ("2", "rank 0 raises RankFailed, which names rank 1, and ends"),
        ("3", "the standby forks new ranks: torch is imported already"),
        ("4", "all load the newest snapshot that every rank has whole"),
        ("5", "same samples, same order: the same weights at the end"),
    )
    for i, (number, text) in enumerate(steps):
        canvas.dot(22, 178 + 22 * i, 8.5, SUM)
        canvas.text(22, 182 + 22 * i, number, size=11, anchor="middle", color=PAPER, bold=True)
        canvas.text(38, 182 + 22 * i, text, size=11.5)
    canvas.text(14, 294, "time →", size=11, color=GREY)


@picture(
    "snapshot",
    "Two tiers: snapshots in memory that the launcher holds, every few steps, and checkpoints on disk, written behind.",
    316,
)
def snapshot(canvas: Canvas) -> None:
    for rank in range(2):
        x = 14 + 162 * rank
        canvas.rank(x, 14, rank, w=150)
        canvas.box(x, 40, 150, 26, fill=TINTS[rank], stroke=RANKS[rank], label="model, optimizer, place", size=11)
        canvas.arrow((x + 75, 66), (x + 75, 106), color=RANKS[rank])
        canvas.text(x + 82, 90, "snapshot", mono=True, size=11)
    canvas.box(6, 108, 328, 66, fill=PALE, stroke=INK)
    canvas.text(170, 125, "memory of phalanx run: two regions a rank", size=11, anchor="middle")
    for rank in range(2):
        for region, label in enumerate(("step 41", "step 42")):
            fill, color = ((TINTS[rank], INK), (RANKS[rank], PAPER))[region]
            x = 22 + 162 * rank + 70 * region
            canvas.box(x, 134, 66, 28, fill=fill, stroke=RANKS[rank], label=label, color=color, size=11)
    canvas.text(14, 192, "survives the death of any rank", size=11, color=GREY)
    canvas.arrow((326, 53), (366, 53), (366, 253), (292, 253), color=GREY, dashed=True)
    canvas.text(358, 214, "save, in the background", size=11, anchor="end")
    canvas.cylinder(110, 222, 180, 62, "step-00000040\na file a rank, manifest")
    canvas.text(14, 304, "survives the death of the host; any number of ranks loads it", size=11, color=GREY)


@picture(
    "memory_map",
    "The shared memory of a host: a header, and per group a control block, stages, mailboxes and channels, with sizes.",
    352,
)
def memory_map(canvas: Canvas) -> None:
    canvas.heading("What a group of n ranks has in shared memory")
    rows = (
        ("control block", "1 KiB · n + 8 B · n²", "who is there, what each calls; ≤ 48 bytes of data", False),
        ("stages", "128 KiB · n", "messages up to 64 KiB, in one synchronisation", False),
        ("mailboxes", "384 KiB · n", "larger ones in chunks of 64 KiB, 6 slots a rank", True),
        ("channels", "264 KiB each", "send and recv: one for each pair and direction", True),
    )
    for i, (name, size, what, is_lazy) in enumerate(rows):
        y = 36 + 48 * i
        canvas.box(14, y, 372, 42, fill=PAPER if is_lazy else PALE, stroke=GREY, dashed=is_lazy)
        canvas.text(26, y + 18, name, bold=True)
        canvas.text(374, y + 18, size, anchor="end", size=12)
        canvas.text(26, y + 34, what, size=11, color=GREY)
    canvas.text(14, 246, "Dashed: allocated with the first message that needs it.", size=11, color=GREY)
    canvas.heading("A rank's line of the control block: 64 bytes, one cache line", y=276)
    x = 14.0
    for label, num_bytes, fill in (
        ("seq", 4, SUM),
        ("what", 4, GREY),
        ("detail", 8, GREY),
        ("payload: 48 bytes", 48, RANKS[0]),
    ):
        width = {4: 42, 8: 58, 48: 230}[num_bytes]
        canvas.box(x, 286, width, 26, fill=fill, stroke=PAPER, radius=2, label=label, color=PAPER, size=11)
        x += width
    canvas.lines(
        14,
        330,
        ["Its rank alone writes it. seq is written last,", "and that is what peers wait for."],
        size=11,
        step=14,
    )


@picture(
    "hosts",
    "all_reduce over two hosts of two ranks: reduce-scatter on each host, exchange along two rails, all-gather.",
    330,
)
def hosts(canvas: Canvas) -> None:
    canvas.heading("all_reduce over two hosts of two ranks")
    stages = (
        ("1  reduce-scatter", (("Σ01", ""), ("", "Σ01"), ("Σ23", ""), ("", "Σ23"))),
        ("2  exchange and add", (("Σ", ""), ("", "Σ"), ("Σ", ""), ("", "Σ"))),
        ("3  all-gather", (("Σ", "Σ"), ("Σ", "Σ"), ("Σ", "Σ"), ("Σ", "Σ"))),
    )
    for host in range(2):
        canvas.box(10 + 196 * host, 34, 184, 256, fill=PALE, stroke=INK, radius=10)
        canvas.text(20 + 196 * host, 51, f"host {host}", size=11, bold=True)
        for i in range(2):
            canvas.rank(24 + 196 * host + 82 * i, 58, 2 * host + i, w=72)
    for i, (name, halves) in enumerate(stages):
        y = 112 + 62 * i
        for host in range(2):
            canvas.text(22 + 196 * host, y - 8, name, size=11.5, bold=True)
        for rank, pair in enumerate(halves):
            x = 24 + 196 * (rank // 2) + 82 * (rank % 2)
            for half, label in enumerate(pair):
                if not label:
                    canvas.empty(x + 36 * half, y, w=36)
                elif label == "Σ":
                    canvas.cell(x + 36 * half, y, label, None, w=36)
                else:
                    first = RANKS[2 * (rank // 2)]
                    second = RANKS[2 * (rank // 2) + 1]
                    canvas.box(
                        x + 36 * half,
                        y,
                        36,
                        24,
                        fill=GREY,
                        stroke=PAPER,
                        radius=4,
                        label=label,
                        color=PAPER,
                        bold=True,
                        size=11,
                    )
                    canvas.bar(x + 36 * half + 3, y + 19.5, 15, 2.5, first)
                    canvas.bar(x + 36 * half + 18, y + 19.5, 15, 2.5, second)
    for rail in range(2):
        from_x, to_x = 42 + 82 * rail + 36 * rail, 238 + 82 * rail + 36 * rail
        y = 206 + 7 * rail
        canvas.arrow((from_x, 199), (from_x, y), (to_x, y), (to_x, 199), color=RED, both=True, width=1.8)
    canvas.text(14, 310, "Red: the only bytes between the hosts. Rail 0 joins", size=11)
    canvas.text(14, 323, "ranks 0 and 2, rail 1 ranks 1 and 3; each carries half.", size=11)
