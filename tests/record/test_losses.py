"""What is kept of losses, how it reads, and what black boxes tell of a rank's beginning."""

from __future__ import annotations

import dataclasses
import json

import pytest

from phalanx.failure.ending import Ending
from phalanx.failure.ends import load_ends, save_ends
from phalanx.failure.last_words import LastWords
from phalanx.failure.losses import Loss, folder_of, load_losses, save_loss, sign_of, who_of, words_of
from phalanx.record.beginning import Beginning, num_repeated, read_before
from phalanx.record.box import LOADED, LOADING, Box, Event
from phalanx.record.clocks import load_clocks, save_clocks

PHASES = {"noticed": 0.05, "ended": 0.1, "started": 0.14, "loaded": 0.06, "first step": 0.06}
KILLED = Loss(
    ending=Ending(rank=1, pid=7, exitcode=-9), at_s=1.0, phases_s=PHASES, step=812, loaded_step=811, num_repeated=1
)  # fmt: skip
NODE = Loss(
    ending=Ending(rank=4, pid=-1, host="host-c"), num_ranks=2, node_sign="silent", silent_s=2.04
)  # fmt: skip


def box_of(*events: tuple[str, str, int, int, int, int]) -> Box:
    """Return the box of events: kind, text, number, value, begin and end."""
    made = [
        Event(at, begun, ended, kind, "all_reduce" if kind == "collective" else "", text, "", 1, seq, value)
        for at, (kind, text, seq, value, begun, ended) in enumerate(events, 1)
    ]
    return Box(0, 2, 1, 1, "here", 0, len(made), tuple(made))


def beginning_of(box: Box) -> Beginning:
    beginning = Beginning()
    beginning.add(box)
    return beginning


def test_losses_are_kept_in_the_order_of_their_attempts_and_damaged_ones_are_left_out(tmp_path):
    for attempt, loss in ((10, NODE), (2, KILLED)):
        save_loss(loss, tmp_path, attempt)
    assert load_losses(tmp_path) == [KILLED, NODE]
    good = json.loads((folder_of(tmp_path, 2) / "loss.json").read_text())
    wrong = [{"at_s": 1e18}, {"at_s": float("nan")}, {"silent_s": "inf"}, {"phases_s": {"noticed": "1"}}]
    wrong += [{name: value} for name in ("step", "ending", "num_ranks") for value in ("x", float("inf"), 10**400)]
    for text in ("", "[]", '{"ending": {"rank": 1}}', *(json.dumps(good | one) for one in wrong)):
        (folder_of(tmp_path, 2) / "loss.json").write_text(text)
        assert load_losses(tmp_path) == [NODE], text


@pytest.mark.parametrize("code", ["Infinity", "NaN", "1e999", "true", "1" + "0" * 400, '"3"', "null", "[" * 100_000])
def test_ends_and_clocks_of_values_that_nobody_saved_are_left_out(tmp_path, code):
    end = Ending(rank=1, pid=2, exitcode=3, when_s=7.0)
    save_ends([end], tmp_path)
    save_clocks({"hb": (0.5, 0.001)}, tmp_path)
    assert (load_ends(tmp_path), load_clocks(tmp_path)) == ({1: end}, {"hb": (500_000_000, 1_000_000)})
    for facts in (f'"pid": {code}', f'"pid": 2, "ended_by_us": {code.replace("true", "1").replace("null", "1")}'):
        (tmp_path / "ends.json").write_text(f'[{{"rank": 1, {facts}}}]')
        assert load_ends(tmp_path) == {}
    (tmp_path / "clocks.json").write_text(f'{{"hb": [{code}, 0.001]}}')
    assert load_clocks(tmp_path) == {}


def test_what_is_kept_can_not_control_a_terminal(tmp_path):
    save_loss(dataclasses.replace(NODE, ending=Ending(rank=4, pid=-1, host="\x1b[31m")), tmp_path, 0)
    [loss] = load_losses(tmp_path)
    assert "\x1b" not in who_of(loss)


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        (KILLED, "resuming at step 812 after 0.41 s (noticed 0.05, ended 0.10, started 0.14, loaded 0.06, first step "
         "0.06); 1 step repeated"),
        (dataclasses.replace(KILLED, step=None, num_repeated=0), "resuming from step 811 after 0.41 s (noticed 0.05, "
         "ended 0.10, started 0.14, loaded 0.06, first step 0.06); no step repeated"),
        (dataclasses.replace(NODE, phases_s={"noticed": 12.04, "first collective": 0.5}),
         "resuming after 12.5 s (noticed 12.0, first collective 0.50)"),
        (dataclasses.replace(NODE, phases_s={"noticed": 12.04, "first collective": 0.5}, loaded_step=0),
         "resuming from the beginning after 12.5 s (noticed 12.0, first collective 0.50)"),
        (NODE, "no step has completed since"),
        (dataclasses.replace(NODE, phases_s={"noticed": 0.0, "ended": 1.5}, step=None),
         "no step has completed since (noticed 0.00 s, ended 1.50 s)"),
    ],
)  # fmt: skip
def test_a_recovery_in_words(loss, words):
    assert words_of(loss) == words


@pytest.mark.parametrize(
    ("loss", "who", "sign"),
    [
        (KILLED, "rank 1", "killed by SIGKILL"),
        (NODE, "node host-c (ranks 4 and 5)", "silent for 2.0 s"),
        (dataclasses.replace(NODE, num_ranks=1, node_sign="refused"), "node host-c (rank 4)", "its process has ended"),
        (dataclasses.replace(NODE, node_sign="left"), "node host-c (ranks 4 and 5)", "it could not reach the others"),
        (
            Loss(ending=Ending(rank=3, pid=7, exitcode=1, last_words=LastWords("ValueError"), host="b")),
            "rank 3 on b",
            "raised ValueError",
        ),
        (Loss(ending=Ending(rank=-1, pid=7, exitcode=7)), "the process that starts the ranks", "exit code 7"),
    ],
)
def test_who_was_lost_and_how_that_was_noticed(loss, who, sign):
    assert (who_of(loss), sign_of(loss)) == (who, sign)


def test_the_first_step_is_the_first_behind_the_checkpoint():
    box = box_of(
        ("collective", "default", 1, 1, 10, 11), ("phase", LOADING, 0, 0, 20, 30), ("note", LOADED, 40, 0, 31, 31),
        ("collective", "default", 2, 1, 35, 36), ("step", "of 100", 41, 8, 40, 50), ("step", "of 100", 42, 8, 51, 0),
    )  # fmt: skip
    seen = beginning_of(box)
    first = seen.first(read_before(None))
    assert first is not None
    assert (first.seq, first.ended_ns) == (41, 50)
    assert (seen.loading_ns, seen.loaded_step, seen.has_gap) == ((20, 30), 40, False)


def test_while_a_checkpoint_is_loaded_or_awaited_there_is_no_first_step():
    before = read_before(box_of(("phase", "snapshot", 40, 0, 1, 2), ("collective", "default", 1, 1, 3, 4)))
    early = box_of(("collective", "default", 1, 1, 10, 11))
    assert beginning_of(early).first(before) is None
    assert beginning_of(early).first(read_before(None)) is not None
    loading = box_of(("collective", "default", 1, 1, 10, 11), ("phase", LOADING, 0, 0, 20, 0))
    assert beginning_of(loading).first(read_before(None)) is None
    assert beginning_of(loading).loading_ns is None


def test_overwritten_events_are_a_gap():
    box = box_of(*[("collective", "default", n, 1, 10 * n, 10 * n + 1) for n in range(1, 60)])
    assert not beginning_of(box).has_gap
    assert beginning_of(box.with_events(box.events[30:])).has_gap


def test_steps_that_are_done_again_are_counted_by_their_numbers_or_by_what_followed_the_checkpoint():
    numbered = read_before(box_of(*[("step", "", n, 8, n, n + 1) for n in range(38, 43)], ("step", "", 43, 8, 43, 0)))
    first = box_of(("step", "", 41, 8, 1, 2)).events[0]
    assert num_repeated(numbered, first, 40) == 2
    assert num_repeated(read_before(None), first, 40) is None
    by_hand = read_before(
        box_of(
            ("step", "", 1, 0, 10, 20), ("phase", "snapshot", 70, 0, 18, 19),
            ("step", "", 2, 0, 20, 30), ("step", "", 3, 0, 30, 40), ("step", "", 4, 0, 40, 0),
        )
    )  # fmt: skip
    first = box_of(("step", "", 1, 0, 1, 2)).events[0]
    assert num_repeated(by_hand, first, 70) == 2
    assert num_repeated(by_hand, first, 60) is None
    assert num_repeated(by_hand, first, None) is None


def test_steps_that_a_script_has_taken_back_itself_are_not_counted():
    numbered = read_before(box_of(*[("step", "", n, 8, 1, 2) for n in (99, 100, 73, 74)]))
    assert num_repeated(numbered, box_of(("step", "", 73, 8, 1, 2)).events[0], 72) == 2
    by_hand = read_before(
        box_of(
            ("phase", "snapshot", 72, 0, 8, 9), ("step", "", 1, 0, 10, 20), ("step", "", 2, 0, 20, 30),
            ("note", LOADED, 72, 0, 35, 35), ("step", "", 3, 0, 40, 50), ("step", "", 4, 0, 50, 0),
        )
    )  # fmt: skip
    assert num_repeated(by_hand, box_of(("step", "", 1, 0, 1, 2)).events[0], 72) == 1
