"""The live page of `phalanx top --web`: what it shows, in a real browser too, and whom it refuses."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import signal
import socket
import struct
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from phalanx.diagnose.stacks import find_py_spy
from phalanx.diagnose.top.rank import RankView
from phalanx.diagnose.top.watch import JobView
from phalanx.train.report.metrics import MetricsLog
from phalanx.wire.web_server import missing_packages
from tests.browser import Browser, needs_browser
from tests.diagnose.puppets import Puppets, until
from tests.launch.jobs import PHALANX_RUN, await_line, write_script

if missing_packages():
    pytest.skip(missing_packages(), allow_module_level=True)

from phalanx.diagnose.web import views
from phalanx.diagnose.web.logs import newest_lines
from phalanx.diagnose.web.pictures import _MOST_ENDED, _MOST_POINTS, Curve, Pictures, Seen
from phalanx.diagnose.web.web import _MOST_STREAMS, Site

pytestmark = pytest.mark.usefixtures("warm_jobs")

LIMIT_S = 60
ODD = f"<img src=x onerror=alert({os.getpid()})>"  # a name that no job of another test session has
TRAINS = """
    import torch, phalanx
    from torch import nn
    inputs = torch.randn(4000, 4)
    data = torch.utils.data.TensorDataset(inputs, inputs.sum(1, keepdim=True))
    class Waits:
        def on_step(self, trainer):
            while trainer.step == 40 and not os.path.exists("end"):
                time.sleep(0.01)
    print("<b>needle</b> in the hay", file=sys.stderr, flush=True)
    model = nn.Linear(4, 1)
    trainer = phalanx.Trainer(
        model, torch.optim.SGD(model.parameters(), 0.01), nn.functional.mse_loss, max_steps=45, global_batch_size=8,
        folder="runs/train", log_every=5, callbacks=[Waits()],
    )
    trainer.fit(data)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("web")


@pytest.fixture(scope="module")
def puppets(folder) -> Iterator[Puppets]:
    (folder / "puppets").mkdir()
    with Puppets(folder / "puppets") as job:
        job.wait_for_ranks()
        yield job


@pytest.fixture(scope="module")
def training(folder) -> Iterator[subprocess.Popen[bytes]]:
    """A job whose script has HTML in its name; its ranks wait after step 40 for the file ``end``."""
    command = [*PHALANX_RUN, "--nproc-per-node", "2", write_script(folder, TRAINS, f"{ODD}.py")]
    with subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as job:
        try:
            yield job
        finally:
            (folder / "end").touch()
            job.wait(LIMIT_S)


@contextlib.contextmanager
def served(*arguments: str) -> Iterator[str]:
    """Run ``phalanx top --web``; yield the address that it has printed."""
    command = [sys.executable, "-m", "phalanx", "top", "--web", "0", "--interval", "0.2", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as top:
        try:
            yield await_line(top.stdout, "http://")[-1].strip()
        finally:
            top.send_signal(signal.SIGINT)
            assert top.wait(LIMIT_S) == 0


@pytest.fixture(scope="module")
def url(puppets, training) -> Iterator[str]:
    with served() as address:
        until(lambda: get(address), lambda page: "puppet.py" in page and ", loss " in page)
        yield address


@pytest.fixture(scope="module")
def browser(tmp_path_factory) -> Iterator[Browser]:
    with Browser(tmp_path_factory.mktemp("browser")) as one:
        yield one


def get(address: str, **headers: str) -> str:
    asked = urllib.request.Request(address, headers=headers)
    with urllib.request.urlopen(asked, timeout=LIMIT_S) as answer:
        return answer.read().decode()


def refusal(address: str, **headers: str) -> int:
    with pytest.raises(urllib.error.HTTPError) as refused:
        get(address, **headers)
    refused.value.close()
    return refused.value.code


def follow_link(browser: Browser, text: str) -> None:
    """Click the link with this in its text or address, and wait for the new page to be kept up to date."""
    browser.until("Number(document.documentElement.dataset.updates) > 0")
    before = browser.run("location.href")
    wanted = json.dumps(text)
    browser.until(
        f"(() => {{ const link = [...document.links].find(one => (one.textContent + one.href).includes({wanted}));"
        " if (link) { link.focus(); link.click(); } return Boolean(link); })()"
    )
    browser.until(f"location.href !== {json.dumps(before)} && Number(document.documentElement.dataset.updates) > 0")


# ---------------------------------------------------------------- in a browser


@needs_browser
def test_two_jobs_are_shown_and_html_in_a_name_is_text(url, browser):
    browser.open(url)
    browser.until("Number(document.documentElement.dataset.updates) > 1")
    names = browser.run("[...document.querySelectorAll('h2 a')].map(one => one.textContent)")
    assert {"puppet.py", f"{ODD}.py"} <= {*names}
    assert browser.run("document.images.length") == 0
    assert browser.run("document.getElementById('link').textContent") == "This page is up to date."


@needs_browser
def test_a_job_has_curves_times_checkpoints_and_log_lines_that_are_searched(url, browser):
    browser.open(url)
    follow_link(browser, ODD)
    shown = browser.run("document.body.innerText")
    for words in ("Training loss", "Where the time goes", "Checkpoint on disk", "of 45"):
        assert words in shown
    browser.until("document.getElementById('lines').textContent.includes('<b>needle</b> in the hay')")
    browser.run("document.getElementById('filter').find.value = 'NEEDLE'")
    browser.run("document.getElementById('filter').rank.value = '1'")
    browser.run("document.getElementById('filter').find.dispatchEvent(new Event('input', {bubbles: true}))")
    browser.until("document.getElementById('lines').textContent === '[rank 1 stderr] <b>needle</b> in the hay'")


@needs_browser
@pytest.mark.skipif(not find_py_spy(), reason="py-spy is not installed")
def test_why_and_the_stack_are_told_when_asked(url, puppets, browser):
    puppets.order(0, "reduce")
    browser.open(url)
    follow_link(browser, f"job={puppets.pid}")
    browser.until("document.querySelector('header').innerText.includes('Rank 0 waits in all_reduce #1 for rank 1.')")
    browser.run("document.querySelector('[data-ask=why]').click()")
    browser.until("document.getElementById('answer').textContent.includes('rank 1 has not called all_reduce #1')")
    follow_link(browser, "rank 1")
    browser.run("document.querySelector('[data-ask=stacks]').click()")
    browser.until("document.getElementById('answer').textContent.includes('next_order')")
    assert "rank 0" not in browser.run("document.getElementById('answer').textContent")
    puppets.order(1, "reduce")


@needs_browser
@pytest.mark.parametrize(("width", "scheme"), [(360, "dark"), (1280, "light")])
def test_each_page_fits_its_window_in_light_and_dark(url, browser, width, scheme):
    browser.tell("Emulation.setDeviceMetricsOverride", width=width, height=800, deviceScaleFactor=1, mobile=False)
    browser.tell("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
    browser.open(url)
    browser.until("document.readyState === 'complete' && Number(document.documentElement.dataset.updates) > 0")
    for link in (ODD, "rank 0"):
        assert browser.run("document.documentElement.scrollWidth") <= width
        follow_link(browser, link)
    assert browser.run("document.documentElement.scrollWidth") <= width
    background = browser.run("getComputedStyle(document.body).backgroundColor")
    assert background == {"dark": "rgb(18, 20, 24)", "light": "rgb(246, 247, 249)"}[scheme]
    assert browser.run("[...document.querySelectorAll('input, button, pre')].every(one => one.labels?.length "
                       "|| one.textContent.trim() || one.getAttribute('aria-label'))")  # fmt: skip


@needs_browser
def test_a_rank_that_is_killed_while_it_is_looked_at_is_gone(tmp_path, browser):
    with Puppets(tmp_path) as job:
        ranks = job.wait_for_ranks()
        with served(str(job.pid)) as address:
            browser.open(address)
            follow_link(browser, "rank 1")
            assert "gone" not in browser.run("document.body.innerText")
            os.kill(ranks[1].pid, signal.SIGKILL)
            browser.until("document.body.innerText.includes('gone')")


@needs_browser
def test_a_job_that_ends_stays_with_its_report(folder, url, training, browser):
    browser.open(url)
    follow_link(browser, ODD)
    (folder / "end").touch()
    browser.until("document.querySelector('h1').innerText.toLowerCase().includes('ended')")
    browser.run("[...document.links].find(one => one.textContent === 'Its report').click()")
    browser.until("document.querySelector('footer')?.innerText.includes('metrics.jsonl')")
    assert browser.run("document.querySelector('strong.state').textContent") == "finished"


# ---------------------------------------------------------------- who is refused


def test_only_the_whole_address_under_a_local_name_is_answered(url):
    parts = urlsplit(url)
    token = parts.path.strip("/")
    base = f"http://{parts.netloc}"
    for path in ("/", "/wrong/", f"/{token[:-1]}/", f"/{token}x/", f"/{token}", "/%ff%fe/", f"/{token}/nothing"):
        assert refusal(base + path) == 404
    assert refusal(url, Host="evil.example") == 421
    assert "puppet.py" in get(url.replace("127.0.0.1", "localhost"))


def stream_of(url: str) -> tuple[socket.socket, str]:
    """Open a stream of events; return it and the status of the answer."""
    parts = urlsplit(url)
    stream = socket.create_connection((parts.hostname, parts.port), LIMIT_S)
    stream.sendall(f"GET {parts.path}events?view= HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
    return stream, stream.recv(12).decode()


def test_streams_are_limited_and_those_of_browsers_that_go_away_in_the_middle_are_freed(url):
    with contextlib.ExitStack() as opened:
        statuses = []
        while len(statuses) <= _MOST_STREAMS and "HTTP/1.1 503" not in statuses:
            stream, status = stream_of(url)
            opened.enter_context(stream)
            stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # closed with a reset
            statuses.append(status)
        assert len(statuses) > _MOST_STREAMS - 5  # pages of other tests may still be open
        assert statuses[-1] == "HTTP/1.1 503"
    until(lambda: status_of_stream(url), lambda status: status == "HTTP/1.1 200")


def status_of_stream(url: str) -> str:
    stream, status = stream_of(url)
    stream.close()
    return status


# ---------------------------------------------------------------- without a server


def rank_view(number: int, **changes: object) -> RankView:
    known = {
        "rank": number,
        "pid": 1000 + number,
        "state": "computing",
        "step_times_s": [],
        "gpus": (),
        "num_helpers": 0,
    }
    fields = {field.name: None for field in dataclasses.fields(RankView)}
    texts = {"what": "", "site": "", "note": "", "cost": 0.0}
    return RankView(**{**fields, **texts, **known, **changes})


def job_view(name: str, pid: int, ranks: list[RankView], **changes: object) -> JobView:
    known = {"launcher": "phalanx run", "seconds": 5.0, "folder": "", "state": "", "straggler": ""}
    return JobView(**{"name": name, "launcher_pid": pid, "world_size": len(ranks), "ranks": ranks, **known, **changes})


class FakeWatch:
    """A watch that sees what a test says."""

    def __init__(self, *jobs: JobView) -> None:
        self.jobs = [*jobs]

    def look(self) -> list[JobView]:
        return self.jobs


@pytest.fixture
def site():
    """``site(*jobs)`` returns a function that asks for a page: method, path and query give status, headers and text."""
    with contextlib.ExitStack() as ended:

        def make(*jobs: JobView):
            pictures = Pictures(FakeWatch(*jobs), 0.01)
            ended.callback(pictures.close)
            application = Site(pictures, "token")

            def ask(path: str, query: str = "", method: str = "GET"):
                told: list = []
                environ = {"PATH_INFO": f"/token/{path}", "QUERY_STRING": query, "REQUEST_METHOD": method}
                parts = application(environ, lambda *status_and_headers: told.extend(status_and_headers))
                return told[0], dict(told[1]), b"".join(parts).decode()

            return ask

        yield make


def test_all_that_comes_from_a_job_is_escaped(site):
    rank = rank_view(0, state="waiting", what=ODD, site=ODD, note=ODD)
    ask = site(job_view(ODD, 7, [rank], folder=ODD, straggler=ODD, launcher=ODD))
    for path, query in (("", ""), ("job", "job=7"), ("rank", "job=7&rank=0")):
        status, _, page = ask(path, query)
        assert status == "200 OK"
        assert ODD not in page
        assert "&lt;img" in page


def test_every_answer_has_a_strict_policy_and_is_not_kept(site):
    ask = site(job_view("train.py", 7, [rank_view(0)]))
    for path, query in (("", ""), ("live.js", ""), ("style.css", ""), ("nothing", ""), ("job", "job=8")):
        _, headers, _ = ask(path, query)
        assert "default-src 'none'; script-src 'self';" in headers["Content-Security-Policy"]
        assert headers["Cache-Control"] == "no-store"
        assert headers["Referrer-Policy"] == "no-referrer"


def test_pages_load_nothing_from_elsewhere_and_have_no_script_of_their_own(site):
    ask = site(job_view("train.py", 7, [rank_view(0)]))
    for path, query in (("", ""), ("job", "job=7"), ("rank", "job=7&rank=0")):
        page = ask(path, query)[2]
        assert re.findall(r"<script[^>]*>", page) == ['<script src="live.js" defer>']
        assert not re.search(r"(?:src|href)=\"(?:\w+:)?//", page)
        assert not re.search(r"<[^>]+\son\w+=", page)


@pytest.mark.parametrize(
    ("path", "query", "method", "status"),
    [
        ("why", "job=7", "GET", 404), ("stacks", "job=7", "PUT", 404), ("", "", "DELETE", 404),
        ("job", "job=8", "GET", 404), ("rank", "job=7&rank=5", "GET", 404), ("report", "job=7", "GET", 404),
        ("why", "job=8", "POST", 404), ("job", "job=" + "9" * 3000, "GET", 414), ("events", "view=job", "GET", 404),
    ],
)  # fmt: skip
def test_what_there_is_not_or_what_is_too_long_is_refused(site, path, query, method, status):
    ask = site(job_view("train.py", 7, [rank_view(0)]))
    ask("")
    assert ask(path, query, method)[0].startswith(str(status))


def test_a_job_that_has_ended_without_a_rank_is_told_as_ended(site):
    gone = job_view("train.py", 7, [rank_view(0, state="gone")])
    assert ">ended</strong>" in site(gone)("job", "job=7")[2]


def test_who_waits_for_whom_is_a_sentence():
    waiting = [rank_view(number, state="waiting", what="all_reduce #3") for number in (0, 2)]
    assert views.waits([*waiting, rank_view(1)]) == ["Ranks 0 and 2 wait in all_reduce #3 for rank 1."]
    assert views.waits([*waiting[:1], rank_view(1, state="gone")]) == ["Rank 0 waits in all_reduce #3."]


def test_curves_keep_their_spikes_and_forget_repeated_steps_in_bounded_memory():
    curve = Curve()
    for step in range(100_000):
        curve.add(step, 1e9 if step == 50_000 else step % 7)
    assert len(curve.points) <= _MOST_POINTS
    assert (50_000, 1e9) in curve.points
    curve.add(60_000, 3.0)
    assert curve.points[-1] == (60_000, 3.0)
    assert curve.points[-2][0] < 60_000


def test_values_that_are_not_finite_are_kept_apart(tmp_path, monkeypatch):
    log = MetricsLog(tmp_path)
    log.write("start", world_size=1)
    for step, loss in enumerate((1.0, float("nan"), float("inf"), 2.0), 1):
        log.write("step", step=step, loss=loss, name="text")
    job = Seen("7", job_view("train.py", 7, [rank_view(0)]))
    monkeypatch.setattr("phalanx.diagnose.training.trainer_folder_of", lambda pids: str(tmp_path))
    for record in job.records():
        job.add(record)
    log.close()
    assert [*job.curves] == ["loss"]
    assert "2 not finite" in views.job_page(job)["curves"]


def test_jobs_that_have_ended_are_forgotten_after_a_while():
    watch = FakeWatch()
    pictures = Pictures(watch, 0.01)
    try:
        for pid in range(1, 3 * _MOST_ENDED):
            pictures._take([job_view("train.py", pid, [rank_view(0)])])
        assert len(pictures.jobs) <= _MOST_ENDED + 1
    finally:
        pictures.close()


def test_log_lines_are_those_of_the_newest_attempt_and_bounded(tmp_path):
    for attempt in range(11):
        for rank in range(2):
            logs = tmp_path / f"attempt_{attempt}" / f"rank_{rank}"
            logs.mkdir(parents=True)
            (logs / "stdout.log").write_text(
                "".join(f"line {n} of {attempt}\n" for n in range(100_000 * (attempt == 10)))
            )
            (logs / "stderr.log").write_bytes(b"\x1b[31mred\xff\n")
    assert newest_lines(str(tmp_path), "1", "LINE 99999 ") == ["[rank 1] line 99999 of 10"]
    assert len(newest_lines(str(tmp_path), "", "")) <= 500
    assert newest_lines(str(tmp_path), "0", "red") == ["[rank 0 stderr] \\x1b[31mred\ufffd"]
    assert newest_lines(str(tmp_path), "../1", "") == newest_lines("", "", "") == []
