"""What data parallel, pipeline, tensor parallel and sharded training do with data, gradients and state."""

from __future__ import annotations

from drawing.canvas import GREY, INK, LINE, PALE, PAPER, RANKS, RED, SUM, TINTS, Canvas, picture

_MINUS, _TIMES = "\N{MINUS SIGN}", "\N{MULTIPLICATION SIGN}"


@picture(
    "data_parallel",
    "Data parallel training: each rank has a part of the data and a copy of the model; gradients are averaged.",
    330,
)
def data_parallel(canvas: Canvas) -> None:
    canvas.heading("One training step on two ranks")
    canvas.text(200, 48, "data set", anchor="middle", size=11, color=GREY)
    for i in range(10):
        canvas.cell(66 + 27 * i, 54, str(i), i // 5)
    for rank in range(2):
        x = 24 + 192 * rank
        middle = x + 80
        canvas.arrow((133 + 135 * rank, 80), (middle, 100), color=RANKS[rank])
        canvas.rank(x, 102, rank, w=160)
        canvas.box(x, 132, 160, 28, fill=TINTS[rank], stroke=RANKS[rank], label="the same model")
        canvas.arrow((middle, 160), (middle, 178), color=RANKS[rank])
        canvas.text(middle - 8, 174, "backward", size=11, color=GREY, anchor="end")
        canvas.box(x, 180, 160, 28, fill=TINTS[rank], stroke=RANKS[rank], label="gradients of its part")
        canvas.arrow((middle, 208), (middle, 228), color=RANKS[rank])
        canvas.arrow((middle, 258), (middle, 278))
        canvas.box(x, 280, 160, 28, label="the same step", fill=TINTS[rank], stroke=RANKS[rank])
    canvas.box(24, 230, 352, 28, fill=SUM, stroke=SUM, label="all_reduce: the average of both", color=PAPER, bold=True)
    canvas.text(
        200, 323, "Same start, same average, same step: the copies stay equal.", anchor="middle", size=11, color=GREY
    )


@picture(
    "ddp_buckets",
    "DDP collects gradients in buckets and averages them during backward; phalanx on CPUs averages once.",
    262,
)
def ddp_buckets(canvas: Canvas) -> None:
    canvas.heading("Buckets overlap with backward (GPUs, Gloo)")
    canvas.text(14, 60, "backward", color=GREY)
    for i, layer in enumerate(("layer 4", "layer 3", "layer 2", "layer 1")):
        canvas.box(82 + 58 * i, 46, 56, 22, fill=TINTS[0], stroke=RANKS[0], radius=3, label=layer, size=11)
    canvas.text(14, 112, "average", color=GREY)
    for x, name in ((200, "bucket 0"), (310, "bucket 1")):
        canvas.box(x, 98, 74, 22, fill=SUM, stroke=SUM, radius=3, label=name, color=PAPER, size=11)
        canvas.arrow((x - 3, 68), (x + 10, 97), color=RANKS[0])
    canvas.text(82, 90, "hooks fill a bucket;", size=11, color=GREY)
    canvas.text(82, 104, "a full one starts", size=11, color=GREY)
    canvas.line([(14, 138), (386, 138)], width=0.6)
    canvas.heading("phalanx on CPUs: one call after backward", y=162)
    canvas.text(14, 190, "backward", color=GREY)
    for i, layer in enumerate(("layer 4", "layer 3", "layer 2", "layer 1")):
        canvas.box(82 + 58 * i, 176, 56, 22, fill=TINTS[0], stroke=RANKS[0], radius=3, label=layer, size=11)
    canvas.text(14, 222, "average", color=GREY)
    canvas.box(316, 208, 40, 22, fill=SUM, stroke=SUM, radius=3, label="all", color=PAPER, size=11)
    canvas.arrow((313, 198), (326, 207), color=RANKS[0])
    canvas.text(82, 222, "no copy into buckets", size=11, color=GREY)
    canvas.text(14, 252, "time →", size=11, color=GREY)


@picture(
    "sampler",
    "A distributed sampler: the shuffled order of an epoch, and which positions of it each of three ranks reads.",
    262,
)
def sampler(canvas: Canvas) -> None:
    order = (3, 7, 0, 9, 5, 1, 8, 2, 6, 4)
    canvas.heading("Ten samples, three ranks, one epoch")
    canvas.text(14, 46, "the epoch's order, the same on every rank", size=11, color=GREY)
    for i, sample in enumerate(order):
        canvas.cell(62 + 28 * i, 54, str(sample), i % 3)
    for rank in range(3):
        y = 100 + 32 * rank
        canvas.rank(14, y, rank)
        mine = order[rank::3]
        for i, sample in enumerate(mine):
            canvas.cell(76 + 28 * i, y, str(sample), rank)
        if len(mine) < 4:
            padding, from_rank = order[rank - 1], rank - 1
            canvas.box(160, y, 26, 24, fill=TINTS[from_rank], stroke=RANKS[rank], dashed=True, label=str(padding))
        canvas.text(200, y + 16, f"positions {rank}, {rank + 3}, {rank + 6}, …", size=11, color=GREY)
    canvas.lines(
        14,
        212,
        [
            "Training: the first samples of the order are repeated",
            "(dashed) until every rank has as many as the others.",
            "Evaluation, with pad=False: each sample exactly once.",
        ],
    )


@picture(
    "sync_batch_norm",
    "Synchronized batch normalization: two ranks combine mean and variance and normalize with the same values.",
    304,
)
def sync_batch_norm(canvas: Canvas) -> None:
    canvas.heading("Statistics over the batch of all ranks")
    for rank, samples in enumerate(((1, 3), (5, 7))):
        x, middle = 24 + 192 * rank, 104 + 192 * rank
        canvas.rank(x, 36, rank, w=160)
        for i, sample in enumerate(samples):
            canvas.cell(middle - 29 + 30 * i, 66, str(sample), rank, w=28)
        canvas.arrow((middle, 90), (middle, 106), color=RANKS[rank])
        canvas.box(x, 108, 160, 26, fill=TINTS[rank], stroke=RANKS[rank], label=f"mean {sum(samples) // 2}, variance 1")
        canvas.arrow((middle, 134), (middle, 152), color=RANKS[rank])
        canvas.arrow((middle, 182), (middle, 200))
        values = [f"{(sample - 4) / 5**0.5:+.2f}".replace("-", _MINUS) for sample in samples]
        for i, value in enumerate(values):
            canvas.cell(middle - 55 + 57 * i, 202, value, rank, w=54)
    canvas.box(24, 154, 352, 28, fill=SUM, stroke=SUM, color=PAPER, bold=True, label="all ranks: mean 4, variance 5")
    canvas.lines(
        14,
        250,
        [
            f"Plain BatchNorm would map both batches to {_MINUS}1 and +1,",
            "and each rank would keep running statistics of its own.",
            "Backward sums the gradients of mean and variance, too.",
        ],
    )


@picture(
    "data_parallel_threads",
    "DataParallel runs threads of one process and copies the model each step; DDP runs one process per device.",
    304,
)
def data_parallel_threads(canvas: Canvas) -> None:
    canvas.code("DataParallel", x=14)
    canvas.code("DistributedDataParallel", x=205)
    canvas.line([(196, 14), (196, 290)], width=0.8)
    canvas.box(14, 36, 172, 186, fill=PALE, stroke=INK, width=1.6)
    canvas.text(100, 54, "one process, one GIL", anchor="middle", size=11)
    canvas.box(26, 64, 148, 30, fill=PAPER, stroke=RED, label="GPU 0: model", size=12)
    for i in range(2):
        x = 26 + 78 * i
        canvas.arrow((x + 35, 94), (x + 35, 128), color=RED, both=True)
        canvas.box(x, 130, 70, 44, fill=PAPER, stroke=LINE, label=f"thread {i}\nGPU {i}", size=11)
    canvas.lines(26, 192, ["scatter, copy the model,", "gather: every step"], size=11, color=RED)
    for rank in range(2):
        x = 208 + 90 * rank
        canvas.box(x, 36, 82, 132, fill=TINTS[rank], stroke=RANKS[rank], width=1.6)
        canvas.rank(x + 8, 46, rank, w=66)
        canvas.box(x + 8, 78, 66, 30, fill=PAPER, stroke=RANKS[rank], label=f"GPU {rank}", size=12)
        canvas.box(x + 8, 114, 66, 44, fill=PAPER, stroke=RANKS[rank], label="own copy,\nkept", size=11)
        canvas.arrow((x + 41, 168), (x + 41, 186), color=RANKS[rank], both=True)
    canvas.box(208, 188, 172, 34, fill=SUM, stroke=SUM, color=PAPER, bold=True, label="gradients only", size=12)
    canvas.lines(14, 246, ["Threads take turns in", "Python; GPU 0 has most", "of the memory and work."], size=12)
    canvas.lines(
        208, 246, ["Processes don't wait for", "each other in Python; also", "across hosts, and on CPUs."], size=12
    )


def _one_f_one_b(num_stages: int, num_batches: int, is_gpipe: bool) -> list[list[tuple[int, str, int]]]:
    """Return each stage's passes as (start, kind, micro-batch); a forward pass takes 1 unit of time, a backward 2."""
    plans: list[list[tuple[str, int]]] = []
    for stage in range(num_stages):
        warm_up = num_batches if is_gpipe else min(num_stages - stage, num_batches)
        plan = [("F", i) for i in range(warm_up)]
        for i in range(num_batches):
            plan.append(("B", i))
            if warm_up + i < num_batches:
                plan.append(("F", warm_up + i))
        plans.append(plan)
    done: dict[tuple[int, str, int], int] = {}
    clock = [0] * num_stages
    drawn: list[list[tuple[int, str, int]]] = [[] for _ in range(num_stages)]
    while any(plans):
        for stage, plan in enumerate(plans):
            if not plan:
                continue
            kind, i = plan[0]
            if kind == "F":
                needs = (stage - 1, "F", i) if stage else None
            else:
                needs = (stage + 1, "B", i) if stage + 1 < num_stages else (stage, "F", i)
            if needs is not None and needs not in done:
                continue
            start = max(clock[stage], done[needs] if needs is not None else 0)
            clock[stage] = done[stage, kind, i] = start + (1 if kind == "F" else 2)
            drawn[stage].append((start, kind, i))
            plan.pop(0)
    return drawn


@picture(
    "pipeline",
    "Pipeline schedules on four ranks with four micro-batches: GPipe and 1F1B, with the time in which ranks wait.",
    352,
)
def pipeline(canvas: Canvas) -> None:
    unit = 15.4
    for top, name, is_gpipe in (
        (0, "GPipe: all forward, then all backward", True),
        (148, "1F1B: backward as soon as it can", False),
    ):
        canvas.heading(name, y=top + 22)
        for stage, steps in enumerate(_one_f_one_b(4, 4, is_gpipe)):
            y = top + 34 + 27 * stage
            canvas.rank(12, y, stage, w=48, h=23)
            canvas.box(64, y, 21 * unit, 23, fill=PALE, stroke=PALE, radius=0)
            for start, kind, i in steps:
                length = 1 if kind == "F" else 2
                fill = RANKS[stage] if kind == "F" else TINTS[stage]
                color = PAPER if kind == "F" else INK
                canvas.box(
                    64 + start * unit,
                    y,
                    length * unit,
                    23,
                    fill=fill,
                    stroke=PAPER if kind == "F" else RANKS[stage],
                    radius=2,
                    width=1,
                    label=str(i),
                    color=color,
                    size=11,
                )
    canvas.lines(
        14,
        312,
        [
            "Dark: forward of a micro-batch. Light: backward. Grey: waits.",
            "Same time; 1F1B: rank 3 keeps activations of one, not of four.",
        ],
        size=11,
    )
    canvas.text(14, 344, "time →", size=11, color=GREY)


@picture(
    "tensor_parallel",
    "Tensor parallelism on two ranks: layers split by columns, then by rows, and one all_reduce.",
    306,
)
def tensor_parallel(canvas: Canvas) -> None:
    canvas.heading("Two linear layers, half of each on either rank")
    for rank in range(2):
        y = 40 + 96 * rank
        canvas.box(8, y - 6, 384, 88, fill=TINTS[rank], stroke=RANKS[rank], width=1)
        canvas.rank(16, y, rank)
        canvas.box(22, y + 30, 38, 40, label="x", fill=PAPER, bold=True)
        canvas.text(72, y + 55, _TIMES, size=15, anchor="middle")
        for half in range(2):
            fill = RANKS[rank] if half == rank else PAPER
            canvas.box(84 + 26 * half, y + 20, 26, 58, fill=fill, stroke=RANKS[rank], radius=0)
        canvas.text(110, y + 14, "columns of A", size=11, anchor="middle")
        canvas.arrow((146, y + 50), (166, y + 50), color=RANKS[rank])
        canvas.box(
            170,
            y + 30,
            24,
            40,
            fill=RANKS[rank],
            stroke=RANKS[rank],
            color=PAPER,
            bold=True,
            label=f"h{rank}",
            radius=2,
        )
        canvas.text(208, y + 55, _TIMES, size=15, anchor="middle")
        for half in range(2):
            fill = RANKS[rank] if half == rank else PAPER
            canvas.box(222, y + 22 + 28 * half, 48, 28, fill=fill, stroke=RANKS[rank], radius=0)
        canvas.text(246, y + 14, "rows of B", size=11, anchor="middle")
        canvas.arrow((278, y + 50), (298, y + 50), color=RANKS[rank])
        canvas.cell(302, y + 32, f"part {rank}", rank, w=48, h=36, size=12)
    canvas.line([(354, 90), (370, 90), (370, 186), (354, 186)], color=SUM, width=2)
    canvas.arrow((370, 140), (370, 231), color=SUM, width=2)
    canvas.box(238, 232, 148, 28, fill=SUM, stroke=SUM, color=PAPER, bold=True, label="all_reduce: sum")
    canvas.lines(14, 244, ["Each rank has the whole x,", "but half of the weights."])
    canvas.text(14, 290, "Forward adds up once for both layers; so does backward.")


@picture(
    "zero",
    "Which of parameters, gradients and optimizer state each of two ranks holds: DDP, ZeroRedundancyOptimizer, FSDP2.",
    330,
)
def zero(canvas: Canvas) -> None:
    for rank in range(2):
        canvas.rank(150 + 122 * rank, 14, rank, w=112)
    rows = (
        ("DistributedData-", "Parallel", (True, True, True)),
        ("ZeroRedundancy-", "Optimizer", (True, True, False)),
        ("… with shared", "parameters", (None, True, False)),
        ("FSDP2", "(fully_shard)", (False, False, False)),
    )
    names = ("params", "grads", "state")
    for i, (first, second, whole) in enumerate(rows):
        y = 48 + 66 * i
        canvas.lines(14, y + 24, [first, second], size=12, bold=True)
        if whole[0] is None:
            canvas.box(
                150, y, 234, 17, fill="#c9ced4", stroke=SUM, radius=2, label="parameters: one copy per host", size=11
            )
        for rank in range(2):
            x = 150 + 122 * rank
            for j, (name, is_whole) in enumerate(zip(names, whole, strict=True)):
                if is_whole is None:
                    continue
                top = y + 19 * j
                canvas.box(x, top, 112, 17, fill=PALE, stroke=LINE, radius=2, width=0.8)
                start = 0 if is_whole else 56 * rank
                length = 112 if is_whole else 56
                canvas.box(x + start, top, length, 17, fill=RANKS[rank], stroke=RANKS[rank], radius=2, width=0.8)
                where = x + 56 if is_whole else x + 28 + 56 * rank
                canvas.text(where, top + 12.5, name, size=11, anchor="middle", color=PAPER)
        canvas.line([(14, y + 61), (386, y + 61)], width=0.5)
    canvas.text(14, 322, "Full bar: all of it. Half bar: a half. State: the optimizer's.", size=11, color=GREY)
