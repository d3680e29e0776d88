"""report.html: right for every run, well-formed, complete in itself, harmless."""

from __future__ import annotations

import math
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

import phalanx.train
from phalanx import cli
from phalanx.train.report import plots
from phalanx.train.report.metrics import MetricsLog
from phalanx.train.report.report import write_report
from tests.train.runs import FakeRun

EVIL = "<script>alert(1)</script>\" onload='x' &amp;"
VOID = ("meta",)


class Page(HTMLParser):
    """A parsed page: its text, its elements; fails on a tag that is not closed."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self._open: list[str] = []
        self.feed(html)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        assert len(attrs) == len(dict(attrs)), f"{tag} has an attribute twice"
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self._open.pop() == tag

    def handle_data(self, data):
        self.text += " " + data

    def labels(self) -> str:
        return "\n".join(attrs["aria-label"] for _, attrs in self.elements if "aria-label" in attrs)


def page_of(folder: Path) -> Page:
    return Page(write_report(folder).read_text())


def restarted_run(folder: Path, **options) -> FakeRun:
    run = FakeRun(folder, **options)
    run.start()
    run.steps(1, 57)
    run.start({"step": 55, "source": "memory"})
    run.steps(56, 120)
    run.evaluate(120, loss=0.5, accuracy=0.875)
    run.write("preempted", step=130, signal=15)
    run.start({"step": 130, "source": "disk"}, gap_s=7200)
    run.steps(131, 299)
    run.write("epoch", step=299, epoch=2, loss=0.012, first_step=200)
    run.evaluate(299, loss=0.625, accuracy=0.75)
    run.end(299)
    return run


def test_a_run_is_told_with_its_figures_curves_restarts_and_settings(tmp_path):
    restarted_run(tmp_path / "digits")
    page = page_of(tmp_path / "digits")
    text = re.sub(r"\s+", " ", page.text)
    for said in (
        "digits", "finished", "Steps 299", "Epoch 3 of 3", "Validation accuracy 0.875 best (highest), at step 120",
        "Validation loss 0.5 best (lowest), at step 120", "Ranks 2 phalanx", "Attempts 3", "2 h 0 min with gaps",
        "1 2026-11-18 11:06:48 UTC interrupted, last record at step 57 step 55, from memory 2 ranks 2.5 s",
        "preempted by SIGTERM, last record at step 130 step 130, from disk 2 ranks 2 h 0 min", "precision bf16",
        "rank 1", "It takes 85 ms; up to the exchange, the slowest rank takes 3% longer",
        "Exchange: averaging gradients", "Training loss 0.012 mean of epoch 3, step 299",
        "command python train.py --epochs 3", "optimizer SGD(lr=0.1)", "Logs of the ranks: ../logs",
    ):  # fmt: skip
        assert said in text, said
    assert "Training loss from step 1 to 299: from 1.961" in page.labels()
    assert "restarts at steps 55, 130" in page.labels()
    assert "rank 1: 85 ms a step: data 6 ms, forward 20 ms, backward 40 ms, exchange 10 ms" in page.labels()


@pytest.mark.parametrize(
    ("state", "said"),
    [
        ("finished", "All training is done"),
        ("preempted", "It was preempted"),
        ("running", "as it was at"),
        ("interrupted", "ended early"),
    ],
)
def test_the_state_of_a_run_is_known(tmp_path, state, said):
    run = FakeRun(tmp_path)
    run.start()
    run.steps(1, 3)
    if state == "finished":
        run.end(3)
    elif state == "preempted":
        run.write("preempted", step=3, signal=10)
    log = MetricsLog(tmp_path) if state == "running" else None
    text = page_of(tmp_path).text
    if log is not None:
        log.close()
    assert f" {state} " in text
    assert said in text


def only_started(run):
    run.start()


def one_step(run):
    run.start()
    run.steps(7, 7)


def nothing_finite(run):
    run.start()
    run.steps(1, 5, loss=math.nan, samples_per_s=math.inf, grad_norm=-math.inf)
    run.evaluate(5, loss=math.nan)


def huge_and_tiny(run):
    run.start()
    run.steps(1, 2, loss=1e30, lr=1e-12)
    run.steps(3, 4, loss=1e-30, lr=0)
    run.evaluate(4, negative=-1e6)


def no_time_at_all(run):
    run.start()
    run.steps(1, 2, phases_by_rank=[[0.0] * 6, [0.0] * 6], spread=[0.0, 0.0])


def bare_records(run):
    run.attempt = 0
    run.write("step", step=1)
    run.write("evaluation", step=1, note="text", flag=True)
    run.write("news", step="soon")


@pytest.mark.parametrize("fill", [only_started, one_step, nothing_finite, huge_and_tiny, no_time_at_all, bare_records])
def test_an_odd_run_has_a_page_too(tmp_path, fill):
    fill(FakeRun(tmp_path))
    assert "Key figures" in page_of(tmp_path).text


@pytest.mark.parametrize(
    ("loading", "workers", "words"),
    [
        (
            [0.0, 0.03],
            0,
            "Rank 1 loads its data itself in 30% of a step; 1 worker per rank would be enough",
        ),
        ([0.05, 0.0], 3, "Rank 0 waits for 3 loader workers in 50% of a step; 8 workers per rank would be enough"),
        ([0.001, 0.0], 0, ""),
        ([0.05, 0.05], None, ""),
        ([0.05, 0.05], 10**400, ""),
    ],
)
def test_it_says_how_many_workers_would_be_enough(tmp_path, loading, workers, words):
    run = FakeRun(tmp_path)
    run.origin["loader workers"] = workers
    run.start()
    by_rank = [[seconds, 0.02, 0.0, 0.0, 0.0, 0.08 - seconds, 0.0, 0.0] for seconds in loading]
    run.steps(1, 5, phases_by_rank=by_rank)
    text = page_of(tmp_path).text
    assert words in text
    assert ("would be enough, if there are CPUs" in text) == bool(words)


def test_values_that_are_not_finite_are_counted_and_break_the_line(tmp_path):
    run = FakeRun(tmp_path)
    run.start()
    run.steps(1, 10)
    run.steps(11, 12, loss=math.nan)
    run.steps(13, 20)
    html = write_report(tmp_path).read_text()
    assert "2 not finite" in Page(html).text
    loss = re.search(r'<path class="line" d="([^"]*)"', html).group(1)
    assert loss.count("M") == 2


def test_of_a_metric_whose_best_is_not_known_the_last_is_shown(tmp_path):
    run = FakeRun(tmp_path / "run", monitor="cost", mode="min")
    run.start()
    run.steps(1, 2)
    for step, value in enumerate((2.0, 1.0, 3.0), start=1):
        run.evaluate(step, cost=value, width=value)
    page = write_report(run.folder).read_text()
    assert "Validation cost</dt><dd>1<small>best (lowest), at step 2" in page
    assert "Validation width</dt><dd>3<small>last, at step 3" in page


def test_a_start_that_found_the_run_finished_changes_no_number(tmp_path):
    restarted_run(tmp_path).time_s += 3600
    alone = FakeRun(tmp_path, num_ranks=1, max_epochs=2)
    alone.attempt = 2
    alone.time_s += 7200
    alone.start({"step": 299, "source": "disk"})
    alone.end(299)
    text = re.sub(r"\s+", " ", page_of(tmp_path).text)
    for said in ("Ranks 2 phalanx", "Attempts 3", "Epoch 3 of 3", "2 h 0 min with gaps", "finished"):
        assert said in text, said


def test_a_restart_on_one_rank_is_told_in_the_singular(tmp_path):
    run = FakeRun(tmp_path, num_ranks=1)
    for resumed in (None, {"step": 2, "source": "disk"}):
        run.start(resumed)
        run.steps(1, 3)
    text = re.sub(r"\s+", " ", page_of(tmp_path).text)
    assert "step 2, from disk 1 rank 2.5 s" in text
    assert "1 ranks" not in text


def test_of_many_ranks_the_slowest_are_shown(tmp_path):
    run = FakeRun(tmp_path, num_ranks=40)
    run.start()
    run.steps(1, 2)
    page = page_of(tmp_path)
    assert "Of 40 ranks, the 16 slowest are shown" in page.text
    assert "rank 39:" in page.labels()
    assert "rank 23:" not in page.labels()


def test_a_long_run_has_a_small_page_and_keeps_its_spikes(tmp_path):
    points = [(step, 1.0 if step != 54_321 else 9.0) for step in range(100_000)]
    html = plots.curve("Loss", points, {}, steps=(0, 100_000))
    assert len(html) < 40_000
    line = re.search(r'<path class="line" d="M([^"]*)"', html).group(1)
    heights = [float(point.split()[1]) for point in line.split("L")]
    assert sorted(heights)[0] < 100 < 900 < sorted(heights)[1]
    assert "highest 9 at step 54,321" in html


def test_the_page_needs_no_other_file_no_script_and_no_network(tmp_path):
    restarted_run(tmp_path / "run")
    html = write_report(tmp_path / "run").read_text()
    page = Page(html)
    assert not re.search(r"https?:|//[a-z]|url\(|@import", html)
    assert not {"script", "link", "img", "iframe", "object", "embed", "base"} & {tag for tag, _ in page.elements}
    assert not [attrs for _, attrs in page.elements if {"src", "srcset", "action"} & attrs.keys()]
    assert [attrs["href"] for _, attrs in page.elements if "href" in attrs] == ["./../logs"]


def test_whatever_comes_from_the_run_is_escaped(tmp_path):
    run = FakeRun(tmp_path / "<script>alert(1)<b>", **{EVIL: EVIL})
    run.start()
    names = [EVIL, "b", "c", "d", "e", "f"]
    run.steps(1, 3, phases_s=dict.fromkeys(names, 1.0))
    run.write("evaluation", step=2, epoch=0, **{EVIL: 0.5})
    run.write("preempted", step=3, signal=EVIL)
    run.attempt += 1
    resumed = {"step": 3, "source": EVIL}
    origin = {EVIL: EVIL, "logs": "//host/javascript:" + EVIL}
    run.write("start", world_size=EVIL, backend=EVIL, settings={EVIL: [EVIL]}, resumed_from=resumed, origin=origin)
    run.steps(4, 5, phases_s=dict.fromkeys(names, 1.0))
    page = page_of(run.folder)
    assert "script" not in {tag for tag, _ in page.elements}
    assert not [name for _, attrs in page.elements for name in attrs if name.startswith("on")]
    assert page.text.count("<script>alert(1)</script>") >= 10
    links = [attrs["href"] for _, attrs in page.elements if "href" in attrs]
    assert all(re.fullmatch(r"\./[\w./%~-]*", link) and not link.startswith(".//") for link in links), links
    assert "<script>alert(1)</script>" in page.labels()


def test_headings_and_names_are_there_for_who_does_not_see_the_page(tmp_path):
    restarted_run(tmp_path)
    page = page_of(tmp_path)
    headings = [tag for tag, _ in page.elements if re.fullmatch("h[1-6]", tag)]
    assert headings[0] == "h1"
    assert headings.count("h1") == 1
    assert headings.count("h2") == 6
    ids = [attrs["id"] for _, attrs in page.elements if "id" in attrs]
    assert len(ids) == len(set(ids))
    assert {attrs["aria-labelledby"] for tag, attrs in page.elements if tag == "section"} <= set(ids)
    images = [attrs for tag, attrs in page.elements if tag == "svg" or attrs.get("role") == "img"]
    assert images
    assert all(attrs.get("aria-label") for attrs in images)
    assert dict(page.elements)["html"] == {"lang": "en"}


def contrast(one: str, other: str) -> float:
    """The ratio of WCAG 2.2."""

    def luminance(colour: str) -> float:
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    dark, light = sorted((luminance(one), luminance(other)))
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_colours_stand_out_enough(scheme):
    css = Path(phalanx.train.__file__).with_name("report").joinpath("report.css").read_text()
    blocks = re.findall(r":root \{(.*?)\}", css, re.DOTALL)
    colours = dict(re.findall(r"--(\w+): (#\w{6});", blocks[scheme == "dark"]))
    for ground in ("page", "card"):
        for name in ("text", "soft", "good", "busy", "bad"):
            assert contrast(colours[name], colours[ground]) >= 4.5, (name, ground)
    for name in ("line", "mark", *(f"part{number}" for number in range(6))):
        assert contrast(colours[name], colours["card"]) >= 3, name


# ---- phalanx report --------------------------------------------------------------------------------------------------


def test_phalanx_report_prints_where_the_page_is(tmp_path):
    restarted_run(tmp_path / "run")
    command = [sys.executable, "-m", "phalanx", "report", str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{tmp_path}/run/report.html\n", "")
    assert (tmp_path / "run" / "report.html").stat().st_size > 10_000


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ([], "missing FOLDER"),
        (["a", "b"], "unexpected argument 'b'"),
        (["nowhere"], "no metrics.jsonl in 'nowhere': name the folder of a run"),
        (["empty"], "nothing recorded yet in 'empty'"),
    ],
)
def test_a_mistake_is_one_line(tmp_path, monkeypatch, capsys, args, said):
    monkeypatch.chdir(tmp_path)
    MetricsLog("empty").close()
    code = cli.main(["report", *args])
    out, err = capsys.readouterr()
    assert (code, out) == (2, "")
    *usage, line = err.splitlines()
    assert usage == ["usage: phalanx report FOLDER"] * (len(args) != 1)
    assert line == f"phalanx report: {said}"


def test_a_report_needs_no_torch(tmp_path):
    restarted_run(tmp_path)
    code = "import sys; from phalanx.cli import main; main(['report', sys.argv[1]]); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines()[-1:] == ["False"], done.stderr


def test_names_of_the_package_are_loaded_when_they_are_used():
    assert phalanx.train.write_report is write_report
    assert "read_metrics" in dir(phalanx.train)
    with pytest.raises(AttributeError, match="no attribute 'reed'"):
        phalanx.train.reed  # noqa: B018
