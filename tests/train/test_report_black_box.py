"""The report shows what black boxes hold: who waited for whom, and the last moments before a failure."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from phalanx.failure.ending import Ending
from phalanx.failure.losses import Loss, save_loss
from phalanx.record.box import Box, load_boxes
from phalanx.train.report import plots
from phalanx.train.report.metrics import PHASES
from phalanx.train.report.report import write_report
from tests.browser import needs_browser, run_page
from tests.record.made import Job, save
from tests.train.runs import BEGAN_S, FakeRun
from tests.train.test_report import EVIL, Page, page_of

pytestmark = pytest.mark.usefixtures("warm_jobs")


def at(boxes: Sequence[Box], time_s: float) -> list[Box]:
    """Return the boxes as of a job that began at a time of day."""
    begin_ns = min(event.begun_ns for box in boxes for event in box.events)
    return [dataclasses.replace(box, realtime_less_monotonic_ns=int(time_s * 1e9) - begin_ns) for box in boxes]


def interrupted(boxes: Sequence[Box], text: str = "") -> list[Box]:
    """Return the boxes as of a job in which rank 1 never left "load data", and the others wait."""
    cut = []
    for box in boxes:
        (*_, last) = (event for event in box.events if event.text == "load data")
        events = list(box.events[: last.number])
        if box.rank == 1:
            events[-1] = last._replace(ended_ns=0, text=text or last.text)
        else:
            call = next(event for event in box.events[last.number :] if event.kind == "collective")
            events.append(call._replace(number=last.number + 1, ended_ns=0))
        cut.append(box.with_events(events))
    return cut


def run_of(folder: Path, boxes: Sequence[Box], *, ends: bool) -> FakeRun:
    run = FakeRun(folder, num_ranks=len(boxes))
    run.origin["logs"] = "launched"
    run.start()
    run.steps(1, 40)
    if ends:
        run.end(40)
    save(at(boxes, BEGAN_S + 1), folder / "launched" / "blackbox" / "attempt_0")
    return run


def test_boxes_are_saved_by_the_tests_as_launchers_save_them(tmp_path):
    boxes = Job(2, seed=1).boxes(7)
    save(boxes, tmp_path)
    assert load_boxes(tmp_path).boxes == boxes


def test_the_table_of_stragglers_says_who_is_slow_and_where(tmp_path):
    run_of(tmp_path, Job(4, slower={2: 0.22}, phase="load data", seed=3).boxes(200), ends=True)
    text = re.sub(r"\s+", " ", page_of(tmp_path).text)
    assert re.search(r"Rank 2 has cost 1\d% of the last 19\d steps; its data loading takes 2\.\dx the others'\.", text)
    assert re.search(r"rank 2 [\d.]+ m?s 1\d\.\d% data loading takes 2\.\dx the others' rank 3", text)
    assert "The last moments" not in text


def test_the_last_moments_before_a_failure_are_a_timeline(tmp_path):
    run_of(tmp_path, interrupted(Job(3, seed=4).boxes(30)), ends=False)
    page = page_of(tmp_path)
    text = re.sub(r"\s+", " ", page.text)
    assert "The last moments" in text
    assert re.search(r"rank 0 was in all_reduce #30 at train\.py:31: [\d.]+ .?s, did not end", text)
    assert re.search(r"rank 1 was in load data: [\d.]+ ms, did not end", text)
    assert "rank 0 was in all_reduce" in page.labels()
    places = [attrs for tag, attrs in page.elements if tag == "rect" and attrs["class"].startswith("part")]
    assert 100 < len(places) < 300
    assert all(float(one["x"]) >= 0 and float(one["x"]) + float(one["width"]) <= 1001 for one in places)


def colours_in(page: str) -> list[dict[str, str]]:
    """Return the colour of each name, for each legend of a page."""
    legends = re.findall(r'<ul class="legend".*?</ul>', page)
    assert legends
    return [{name: colour for colour, name in re.findall(r'<i class="([^"]+)"></i>([^<]+)', one)} for one in legends]


def test_a_phase_has_one_colour_on_the_whole_page_and_no_two_have_the_same(tmp_path):
    run_of(tmp_path, interrupted(Job(3, seed=4).boxes(30)), ends=False)
    steps, moments = colours_in(write_report(tmp_path).read_text())
    assert list(steps) == list(PHASES)
    for colours in (steps, moments):
        assert len(set(colours.values())) == len(colours)
    assert {"forward", "backward", "load data", "all_reduce"} <= moments.keys()
    same = {name: colour for name, colour in moments.items() if name in steps}
    assert same == {name: steps[name] for name in same}
    assert moments["load data"] == steps["data"]
    assert moments["all_reduce"] not in steps.values()


def test_more_names_than_colours_are_told_apart_by_paler_ones():
    colours = plots.colours_of([*PHASES, *map(str, range(8))])
    assert len(set(colours.values())) >= 12
    assert [colours[str(number)] for number in range(8)] == [
        "part8", "part9", "part10", "part11", "part8 again", "part9 again", "part10 again", "part11 again"
    ]  # fmt: skip
    style = Path(plots.__file__).with_name("report.css").read_text()
    for colour in {colour.removesuffix(" again") for colour in colours.values()}:
        assert len(re.findall(rf"--{colour}: #", style)) == 2, colour  # light and dark
        assert f".plot .{colour} {{" in style
        assert f" .{colour} {{ background: " in style.replace("\n", " ")


def test_a_box_that_is_damaged_is_named_and_the_others_are_shown(tmp_path):
    run_of(tmp_path, interrupted(Job(3, seed=4).boxes(30)), ends=False)
    path = tmp_path / "launched" / "blackbox" / "attempt_0" / "rank_2.box"
    path.write_bytes(path.read_bytes()[:-20])
    text = re.sub(r"\s+", " ", page_of(tmp_path).text)
    assert "rank 0 was in all_reduce #30" in text
    assert re.search(r"/rank_2\.box can't be read: ", text)


def test_boxes_of_another_time_are_not_shown(tmp_path):
    boxes = Job(2, seed=5).boxes(60)
    run = run_of(tmp_path, interrupted(boxes), ends=False)
    save(at(interrupted(boxes), BEGAN_S + 5000), run.folder / "launched" / "blackbox" / "attempt_0")
    assert "The last moments" not in page_of(tmp_path).text


def test_what_is_written_in_a_box_is_escaped(tmp_path):
    run_of(tmp_path, interrupted(Job(2, seed=6).boxes(60), EVIL), ends=False)
    html = write_report(tmp_path).read_text()
    assert "The last moments" in Page(html).text
    assert "<script" not in html


MEASURE = """
<script>
onload = () => {
  const found = [...document.querySelectorAll("iframe")].map(frame => {
    const page = frame.contentDocument, width = frame.contentWindow.innerWidth;
    const bars = [...page.querySelectorAll(".plot rect[class^=part]")];
    return {num: bars.length, colours: new Set(bars.map(bar => getComputedStyle(bar).fill)).size,
            beyond: page.documentElement.scrollWidth > width,
            outside: bars.filter(bar => bar.getBoundingClientRect().right > width).length};
  });
  document.body.textContent = JSON.stringify(found);
};
</script>
"""


@needs_browser
def test_a_browser_draws_the_bars_in_colours_on_any_width(tmp_path):
    run_of(tmp_path, interrupted(Job(4, seed=7).boxes(60)), ends=False)
    page = write_report(tmp_path).read_text().replace("&", "&amp;").replace('"', "&quot;")
    frames = "".join(
        f'<iframe srcdoc="{page}" style="width:{w}px;height:900px;border:0"></iframe>' for w in (360, 1200)
    )
    for found in run_page(tmp_path, frames + MEASURE):
        assert found["num"] > 100
        assert found["colours"] == 5  # four phases and the collective
        assert not found["beyond"]
        assert not found["outside"]


SCRIPT = """
import os
import torch
from torch import nn
import phalanx

class Dies:
    def on_step(self, trainer):
        if trainer.step == 60 and os.environ["RANK"] == "1":
            os.kill(os.getpid(), 9)

model = nn.Linear(4, 1)
data = torch.utils.data.TensorDataset(torch.ones(800, 4), torch.zeros(800, 1))
trainer = phalanx.Trainer(
    model, torch.optim.SGD(model.parameters(), 0.1), nn.functional.mse_loss, max_epochs=1, global_batch_size=8,
    folder="run", log_every=1, callbacks=(Dies(),),
)
trainer.fit(data)
"""


def test_a_real_run_whose_rank_is_killed_has_its_last_moments_in_the_report(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    phalanx = [sys.executable, "-m", "phalanx"]
    command = [*phalanx, "run", "--nproc-per-node", "2", "--max-restarts", "0", "train.py"]
    failed = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert failed.returncode == 137, failed
    subprocess.run([*phalanx, "report", "run"], cwd=tmp_path, check=True, capture_output=True, timeout=60)
    text = re.sub(r"\s+", " ", Page((tmp_path / "run" / "report.html").read_text()).text)
    assert "The last moments Attempt 0. The last " in text
    assert re.search(r"rank 1 had left \w+ #\d+", text) or re.search(r"rank 1 was in", text), text


def test_losses_are_a_table_and_bars_of_their_phases(tmp_path):
    run = run_of(tmp_path, Job(2, seed=8).boxes(7), ends=True)
    phases = {"noticed": 2.05, "ended": 0.1, "agreed": 0.05, "started": 0.14, "loaded": 0.06, "first step": 0.06}
    lost = Loss(
        ending=Ending(rank=4, pid=-1, host=EVIL), num_ranks=2, node_sign="silent", silent_s=2.05, at_s=BEGAN_S,
        phases_s=phases,         step=1_020, num_repeated=1,
    )  # fmt: skip
    fewer = {name: took_s for name, took_s in phases.items() if name != "agreed"}
    killed = Loss(ending=Ending(rank=1, pid=7, exitcode=-9), at_s=BEGAN_S + 1, phases_s=fewer, loaded_step=30)
    save_loss(lost, run.folder / "launched", 0)
    save_loss(killed, run.folder / "launched", 1)
    page = page_of(tmp_path)
    text = re.sub(r"\s+", " ", page.text)
    assert re.search(r"ranks 4 and 5\) silent for 2\.0 s 2\.05 s .* 2\.46 s at step 1,020 1 step repeated", text)
    assert re.search(r"rank 1 killed by SIGKILL 2\.05 s 100 ms 140 ms 60 ms 60 ms 2\.41 s from step 30", text)
    assert "<script" not in (tmp_path / "report.html").read_text()
    assert "rank 1: 2.41 s the recovery: noticed 2.05 s" in page.labels()


def test_losses_of_all_hosts_are_listed_once_and_the_host_that_can_not_be_reached_is_named(tmp_path):
    run = FakeRun(tmp_path, num_ranks=2)
    run.origin |= {"logs": "one", "logs of others": [["hb", "two"], [EVIL, "nowhere"]]}
    run.start()
    run.steps(1, 40)
    run.end(40)
    first = Loss(ending=Ending(rank=1, pid=-1, host="hb"), node_sign="silent", silent_s=2.0, at_s=BEGAN_S)
    second = Loss(ending=Ending(rank=0, pid=-1, host="ha"), node_sign="refused", at_s=BEGAN_S + 60)
    save_loss(first, run.folder / "one", 0)
    save_loss(dataclasses.replace(first, node_sign="left", at_s=BEGAN_S + 0.1), run.folder / "two", 3)
    save_loss(second, run.folder / "two", 4)
    text = re.sub(r"\s+", " ", page_of(tmp_path).text)
    assert text.count("node hb (rank 1)") == 2  # the table and the bars
    assert text.count("node ha (rank 0)") == 2
    assert "recorded theirs in run folders that are not on this host." in text
    assert "The launchers on hb" not in text
    assert "<script" not in (tmp_path / "report.html").read_text()


@pytest.mark.parametrize("is_lost", [False, True])
def test_a_restart_of_the_same_launch_without_a_loss_was_planned(tmp_path, is_lost):
    run = FakeRun(tmp_path, num_ranks=2)
    run.origin["logs"] = "launched"
    (tmp_path / "launched" / "blackbox").mkdir(parents=True)
    run.start()
    run.steps(1, 20)
    if is_lost:
        save_loss(Loss(ending=Ending(rank=1, pid=7, exitcode=1), at_s=run.time_s), tmp_path / "launched", 0)
    run.start({"step": 20, "source": "memory"})
    run.steps(21, 40)
    run.end(40)
    text = re.sub(r"\s+", " ", page_of(tmp_path).text)
    assert ("planned restart, last record at step 20" in text) is not is_lost
    assert ("interrupted, last record at step 20" in text) is is_lost
