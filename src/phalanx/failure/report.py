"""Reports of a failure: the last screen of ``phalanx run``, and the error that `phalanx.spawn` raises.

People read the last 24 rows of 80 columns, so the report fits into that space. From top to bottom it shows the cause,
the user's frames, the message, one line for all ranks that ended alike, the log and the hint. If space runs out, outer
frames are dropped first, until the frames take at most half of the rows for frames and message. Then the middle of the
message is dropped, and not its end, because its last line often says what to do.
"""

from __future__ import annotations

import itertools
import signal
from collections.abc import Sequence

from phalanx._text import named, shortened, signal_name
from phalanx.failure.ending import Ending, RankError, alike, find_culprit
from phalanx.failure.folding import COLUMNS, ROWS, fold, num_rows, short_path
from phalanx.failure.hints import explanation_for, hint_for
from phalanx.failure.last_words import owner_of, site_of
from phalanx.failure.tracebacks import find_last_block
from phalanx.failure.victims import is_victim
from phalanx.record.notes import words_of_checkpoints

_MAX_OTHERS = 4
_OTHERS_ROWS = 2  # rows for each of the other ranks
_MAX_ROWS = 14  # rows of the culprit's traceback; the interpreter prints the caller's traceback above it


def report(culprit: Ending, outcomes: Sequence[Ending], *, hint: str, resume: str = "") -> str:
    """Return the last words of a job that failed: the cause, then what became of the other ranks, on one screen.

    Args:
        resume: Words for how to resume the training; empty if there are none.
    """
    where = f"{culprit.host}:" if culprit.host else ""
    others = [shortened(line, _OTHERS_ROWS * COLUMNS - 2) for line in _others(culprit, outcomes)]
    if len(others) > _MAX_OTHERS:
        others[_MAX_OTHERS:] = ["others: see the logs"]
    explained = explanation_for(culprit)
    after = [*others, f"log: {where}{culprit.log}", *filter(None, [resume])]
    after += [f"hint: {hint}{explained}"] if hint else []
    code = f"; exit code {culprit.exit_code}" if culprit.signal else ""
    head = f"phalanx run: {culprit.describe()}{code}{'' if hint else explained}"
    rows_left = ROWS - 1 - num_rows(head) - sum(num_rows(f"  {line}") for line in after)
    lines = [head, *(f"  {line}" for line in [*fold(culprit.last_words.lines, rows_left), *after])]
    return "\n".join(lines) + "\n"


def words_of_resuming(culprit: Ending, outcomes: Sequence[Ending]) -> str:
    """Return how the user resumes a job in which a rank was killed; "" if no Trainer has run."""
    if culprit.signal != signal.SIGKILL:
        return ""
    saved = next(filter(None, (words_of_checkpoints(outcome.folder) for outcome in outcomes)), "")
    return f"to resume, start it again: {saved}; --max-restarts N does so automatically" if saved else ""


def brief_report(culprit: Ending) -> str:
    """Return what failed and why, for a job that continues."""
    return "\n".join([culprit.describe(), *(f"  {line}" for line in fold(culprit.last_words.lines, ROWS // 2))])


def _others(culprit: Ending, outcomes: Sequence[Ending]) -> list[str]:
    """Return what became of the other ranks except those that hung, with one line for all that ended alike."""
    groups: dict[str, list[int]] = {}
    for outcome in outcomes:
        if outcome.rank != culprit.rank and not outcome.ok and not outcome.hung:
            groups.setdefault(_in_brief(outcome, culprit), []).append(outcome.rank)
    lines = []
    for what, ranks in sorted(groups.items(), key=lambda group: min(group[1])):
        lines.append(f"{named('rank', ranks)}: {what}")
    return lines


def _in_brief(outcome: Ending, culprit: Ending) -> str:
    words = outcome.last_words
    if words.kind and (outcome.ended_by_us or outcome.raised):
        if is_victim(words) and not culprit.is_victim:
            return f"{words.name}, because of it"
        if alike(words, culprit.last_words):
            return "the same error"
        message = words.message.removeprefix(f"rank {outcome.rank}: ")  # the line already begins with the rank
        said = f"{words.name}: {message}" if message else words.name
        return f"ended because of it; before: {said}" if outcome.ended_by_us and outcome.exitcode != 1 else said
    if outcome.ended_by_us and not outcome.killed_by_another:
        return "ended because of it"
    return f"killed by {signal_name(outcome.signal)}" if outcome.signal else f"exit code {outcome.exitcode}"


# ---------------------------------------------------------------- as an exception


def first_true_failure(outcomes: Sequence[Ending], timeout_s: float = 0.0, *, max_rows: int = _MAX_ROWS) -> RankError:
    """Return the error that names the cause and the ends of the other ranks, with one line for all that ended alike.

    Args:
        outcomes: Outcomes of all ranks, at least one of which has failed.
        timeout_s: Time limit of the ranks, for the line that names ranks that hung.
        max_rows: Number of rows of the user's frames and the message; `RankError.traceback` has all frames.
    """
    culprit = find_culprit(outcomes)
    assert culprit is not None
    lines = heads(culprit, outcomes, timeout_s)
    if culprit.error is not None:
        lines += folded(culprit, max_rows)
        if hint := hint_for(culprit, outcomes):
            lines.append(f"  hint: {hint}{explanation_for(culprit)}")
    else:
        for outcome in outcomes if culprit.hung else [culprit]:
            if outcome.last_words.lines and (outcome.hung or not culprit.hung):
                lines += [f"--- rank {outcome.rank}:", outcome.traceback.rstrip()]
    return RankError("\n".join(lines), culprit, outcomes)


def heads(culprit: Ending, outcomes: Sequence[Ending], timeout_s: float) -> list[str]:
    """Return the lines that say which rank was the cause, and what became of the other ranks."""
    lines = [f"{headline(culprit)} [world_size {len(outcomes)}]"]
    if hung := [outcome.rank for outcome in outcomes if outcome.hung]:
        why = f"limit {timeout_s:g} s passed" if culprit.hung else f"rank {culprit.rank} failed"
        lines.append(f"  {why}; hung: ranks {hung}")
    return lines + [f"  {line}" for line in _others(culprit, outcomes)]


def headline(culprit: Ending) -> str:
    """Return which rank ended, and how; for an exception, also where, and the source line if there is no message."""
    words = culprit.last_words
    site = site_of(words.lines[::-1]) if culprit.hung else words.site  # the stack of a hang begins with its last call
    path, _, number = site.rpartition(":")
    if (culprit.error is None and not culprit.hung) or not path or owner_of(path):
        return str(culprit)
    said = str(culprit)
    if not words.message and (source := _source_at(words.lines, path, number)):
        said += f": {source}"
    place = f"{short_path(path)}:{number}"
    return said if f"at {place}" in said else f"{said}, at {place}"


def _source_at(lines: Sequence[str], path: str, number: str) -> str:
    """Return the source line that a traceback shows below a frame; empty if it shows none."""
    frame = f'File "{path}", line {number},'
    after = [below.strip() for line, below in itertools.pairwise(lines) if line.strip().startswith(frame)]
    return after[-1] if after and not after[-1].startswith("File ") else ""


def folded(culprit: Ending, max_rows: int) -> list[str]:
    """Return the user's frames and the message without its first line, which the headline has."""
    block = find_last_block(culprit.last_words.lines)
    if block is None:
        return []
    shown = fold(block.lines, max_rows)
    heads = [n for n, line in enumerate(shown) if line.startswith(f"{block.kind}:") or line == block.kind]
    number = heads[-1] if heads else 0  # the last exception of a chain ended the rank
    return [*shown[:number], *(f"  {line}" for line in shown[number + 1 :])]
