"""What Prometheus gets of running jobs, and that the dashboard and the alerts ask for nothing else."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from phalanx.checkpoint.memory import layout
from phalanx.diagnose.snapshots import held_in
from phalanx.diagnose.top.watch import Watch
from phalanx.failure.ending import Ending
from phalanx.failure.losses import Loss, save_loss
from phalanx.host.shared_blocks import unnamed_file
from phalanx.record.box import Event
from phalanx.wire.web_server import missing_packages
from tests.diagnose.puppets import Puppets, until
from tests.launch.jobs import PHALANX_RUN, await_line, write_script
from tests.record import made

if missing_packages():
    pytest.skip(missing_packages(), allow_module_level=True)

from prometheus_client.openmetrics.parser import text_string_to_metric_families

from phalanx.diagnose.metrics import metrics
from phalanx.diagnose.metrics.families import FAMILIES, Families
from phalanx.diagnose.metrics.totals import BOUNDS_S, Totals

pytestmark = pytest.mark.usefixtures("warm_jobs")

EXAMPLES = Path(__file__).parents[2] / "examples" / "clusters"
LIMIT_S = 60


@dataclasses.dataclass
class Scraped:
    """One scrape, read by Prometheus' own parser."""

    text: str

    def __post_init__(self) -> None:
        self.samples = [one for family in text_string_to_metric_families(self.text) for one in family.samples]

    def value(self, name: str, /, **labels: str) -> float | None:
        found = [one.value for one in self.samples if one.name == name and labels.items() <= one.labels.items()]
        assert len(found) <= 1, found
        return found[0] if found else None

    def labels(self, name: str, label: str) -> set[str]:
        return {one.labels[label] for one in self.samples if one.name == name}


def scrape(url: str) -> Scraped:
    asked = urllib.request.Request(url, headers={"Accept": "application/openmetrics-text; version=1.0.0"})
    with urllib.request.urlopen(asked, timeout=LIMIT_S) as answer:
        assert answer.headers["Content-Type"].startswith("application/openmetrics-text")
        return Scraped(answer.read().decode())


@contextlib.contextmanager
def job_with_metrics(folder: Path, source: str, *flags: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Run a script with ``--metrics 0``; yield the job, and the address that it has printed."""
    command = [*PHALANX_RUN, "--nproc-per-node", "2", "--metrics", "0", *flags, write_script(folder, source)]
    with subprocess.Popen(
        command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, text=True
    ) as job:
        url = await_line(job.stdout, "metrics at ")[-1].rpartition(" ")[2].strip()
        try:
            yield job, url
        finally:
            job.send_signal(signal.SIGTERM)
            job.communicate(timeout=LIMIT_S)


TRAINS = """
    import torch, phalanx
    from torch import nn
    inputs = torch.randn(4000, 4)
    data = torch.utils.data.TensorDataset(inputs, inputs.sum(1, keepdim=True))
    def step(model, batch):
        loss = nn.functional.mse_loss(model(batch[0]), batch[1])
        return {"loss": loss, "<b>odd": loss.detach() * 0 + float("inf")}
    class Waits:
        def on_step(self, trainer):
            if RANK == 1 and trainer.step == 20 and not os.path.exists("killed"):
                open("killed", "w").close()
                os.kill(os.getpid(), signal.SIGKILL)
            while trainer.step == 40 and not os.path.exists("end"):
                time.sleep(0.01)
    model = nn.Linear(4, 1)
    trainer = phalanx.Trainer(
        model, torch.optim.SGD(model.parameters(), 0.01), training_step=step, max_steps=60, global_batch_size=8,
        folder="runs/train", log_every=5, snapshot_every=5, callbacks=[Waits()],
    )
    trainer.fit(data)
"""


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Iterator[Scraped]:
    """What is scraped of a job that has lost a rank, has resumed, and waits after step 40 of 60."""
    folder = tmp_path_factory.mktemp("trained")
    with job_with_metrics(folder, TRAINS, "--max-restarts", "1") as (_, url):
        until(lambda: (folder / "killed").exists(), bool)
        scrape(url)
        yield until(
            lambda: scrape(url),
            lambda seen: (
                [seen.value("phalanx_step", rank=rank) for rank in "01"] == [40, 40]
                and seen.value("phalanx_logged_value", name="loss") is not None
            ),
        )
        (folder / "end").touch()


def test_a_training_is_told_with_job_host_and_rank(trained):
    assert trained.labels("phalanx_step", "job") == {"train.py"}
    assert trained.labels("phalanx_step", "host") == {socket.gethostname()}
    assert trained.labels("phalanx_step", "rank") == {"0", "1"}
    assert trained.value("phalanx_job_ranks") == 2
    assert trained.value("phalanx_steps_planned") == 60
    assert trained.value("phalanx_steps_total", rank="0") >= 20
    assert trained.value("phalanx_samples_total") == 8 * trained.value("phalanx_steps_total", rank="0")
    assert trained.value("phalanx_rank_resident_memory_bytes", rank="1") > 1 << 20
    assert trained.value("phalanx_phase_seconds_total", rank="0", phase="forward") > 0
    assert trained.value("phalanx_collective_bytes_total", rank="0", op="all_reduce") > 0
    assert trained.value("phalanx_waiting_seconds_total", rank="0") > 0


def test_values_that_are_no_finite_numbers_and_odd_names_are_told_as_they_are(trained):
    assert math.isfinite(trained.value("phalanx_logged_value", name="loss"))
    assert trained.value("phalanx_logged_value", name="<b>odd") == math.inf


def test_a_lost_rank_its_restart_and_the_phases_of_its_recovery_are_told(trained):
    assert [trained.value(f"phalanx_{name}_total") for name in ("losses", "restarts")] == [1, 1]
    assert {"noticed", "ended", "first step"} <= trained.labels("phalanx_recovery_seconds_total", "phase")
    assert [trained.value("phalanx_rank_up", rank=rank) for rank in "01"] == [1, 1]


def test_the_newest_snapshot_is_told_with_its_time(trained):
    assert trained.value("phalanx_snapshot_step") == 35  # that of step 40 is taken when the callback returns
    assert trained.value("phalanx_snapshot_timestamp_seconds") > 1.7e9
    assert trained.value("phalanx_snapshot_size_bytes") > 0


def test_the_buckets_of_a_histogram_add_up(trained):
    name, op = "phalanx_collective_duration_seconds", "all_reduce"
    buckets = [one.value for one in trained.samples if one.name == f"{name}_bucket" and one.labels["op"] == op]
    assert len(buckets) == len(BOUNDS_S) + 1
    assert buckets == sorted(buckets)
    assert buckets[-1] == trained.value(f"{name}_count", op=op) > 0


def test_the_dashboard_and_the_alerts_ask_for_metrics_that_there_are(trained):
    dashboard = json.loads((EXAMPLES / "grafana.json").read_text())
    asked = " ".join(target["expr"] for panel in dashboard["panels"] for target in panel["targets"])
    asked += (EXAMPLES / "alerts.yml").read_text()
    told = {one.name for one in trained.samples}
    only_on_several_hosts = {"phalanx_replicas", "phalanx_replicas_wanted"}
    only_on_disk = {"phalanx_checkpoint_timestamp_seconds"}
    assert {*re.findall(r"phalanx_\w+", asked)} - told <= only_on_several_hosts | only_on_disk
    assert only_on_several_hosts | only_on_disk <= FAMILIES.keys()


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
def test_promtool_finds_no_fault_in_the_alerts_the_configuration_and_the_metrics(trained):
    for arguments, given in (
        (["check", "rules", str(EXAMPLES / "alerts.yml")], ""),
        (["check", "config", "--syntax-only", str(EXAMPLES / "prometheus.yml")], ""),
    ):
        done = subprocess.run(["promtool", *arguments], input=given, capture_output=True, text=True, timeout=LIMIT_S)
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("language", ["en", "zh"])
def test_the_guide_names_all_metrics_and_no_others(language):
    guide = (EXAMPLES.parents[1] / "docs" / language / "guides" / "clusters" / "metrics.md").read_text()
    named = {*re.findall(r"`(phalanx_\w+)`", guide)}
    kinds = {"counter": "_total", "info": "_info"}
    assert named == {name + kinds.get(family.kind(name, "").type, "") for name, family in FAMILIES.items()}


def test_the_endpoint_survives_a_rank_and_tells_that_it_is_gone(tmp_path):
    source = """
        import torch.distributed as dist
        dist.init_process_group("phalanx")
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        dist.barrier()
        print(f"rank {RANK} is process {os.getpid()}", flush=True)
        while not os.path.exists("end"):
            time.sleep(0.01)
    """
    with job_with_metrics(tmp_path, source, "--shutdown-timeout", "60") as (job, url):
        pid = int(await_line(job.stdout, "rank 1 is process")[-1].split()[-1])
        until(lambda: scrape(url).value("phalanx_rank_up", rank="1"), lambda up: up == 1)
        os.kill(pid, signal.SIGKILL)
        seen = until(lambda: scrape(url), lambda seen: seen.value("phalanx_rank_up", rank="1") == 0)
        assert seen.value("phalanx_rank_up", rank="0") == 1
        (tmp_path / "end").touch()


def test_top_serves_the_metrics_of_jobs_that_run_without_them(tmp_path):
    with Puppets(tmp_path) as puppets:
        puppets.wait_for_ranks()
        command = [sys.executable, "-m", "phalanx", "top", str(puppets.pid), "--metrics", "0"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as top:
            url = await_line(top.stdout, "metrics at ")[-1].rpartition(" ")[2].strip()
            puppets.order(0, "steps 3")
            seen = until(lambda: scrape(url), lambda seen: seen.value("phalanx_steps_total", rank="0") == 3)
            assert seen.labels("phalanx_step", "job") == {"puppet.py"}
            top.send_signal(signal.SIGINT)
            assert top.wait(LIMIT_S) == 0


def test_only_get_of_metrics_under_a_local_name_is_answered(tmp_path):
    with job_with_metrics(tmp_path, "time.sleep(600)") as (_, url):
        for path, headers, code in (
            ("/", {}, 404),
            ("/metrics", {"Host": "evil.example"}, 421),
            ("/metrics", {"Host": "127.evil.example:80"}, 421),
            ("/metrics", {"Host": "["}, 421),
        ):
            asked = urllib.request.Request(url.replace("/metrics", path), headers=headers)
            with pytest.raises(urllib.error.HTTPError) as refused:
                urllib.request.urlopen(asked, timeout=LIMIT_S)
            assert refused.value.code == code
            refused.value.close()
        with urllib.request.urlopen(url.replace("127.0.0.1", "localhost"), timeout=LIMIT_S) as answer:
            assert b"phalanx_job_info" in answer.read()


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("ninety", "--metrics must be PORT or HOST:PORT, got 'ninety'"),
        (":90", "--metrics must be PORT or HOST:PORT, got ':90'"),
        ("70000", "--metrics must be PORT or HOST:PORT, got '70000'"),
        ("203.0.113.1:9461", "--metrics: address 203.0.113.1: Cannot assign requested address"),
    ],
)
def test_an_address_that_can_not_be_served_is_refused(tmp_path, address, said):
    command = [*PHALANX_RUN, "--metrics", address, write_script(tmp_path, "")]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode != 0
    assert said in done.stderr


def test_a_port_in_use_is_named_with_its_owner(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        command = [*PHALANX_RUN, "--metrics", str(port), write_script(tmp_path, "")]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 1
    assert f"--metrics: port {port} is taken by pid {os.getpid()}" in done.stderr
    assert "use another port" in done.stderr


def test_without_the_extra_the_command_says_what_to_type(monkeypatch):
    from phalanx.launch.run.metrics import listening_problem

    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert listening_problem("--metrics", "9461") == (
        "--metrics: prometheus-client and waitress are not installed: pip install 'phalanx-torch[web]'"
    )


# ---------------------------------------------------------------- counters


def box_of(num_steps: int, first: int = 0):
    """Return a box whose events before `first` were not read."""
    (box, _) = made.Job(2).boxes(num_steps)
    return box.with_events(box.events[first:])


def test_events_count_once_however_often_a_box_is_read():
    totals = Totals()
    totals.add(box_of(10))
    totals.add(box_of(10).with_events(()))
    totals.add(box_of(20, first=60))
    assert (totals.num_steps, totals.num_samples) == (20, 20 * 64)
    assert totals.num_events == totals.num_read == 120
    assert sum(totals.durations.values()) == 20
    assert totals.num_bytes == {"all_reduce": 20 * 4000}


def test_events_that_were_not_read_are_made_up_for_by_those_that_were():
    totals = Totals()
    totals.add(box_of(100, first=300))
    assert totals.num_steps == 100
    assert (totals.num_events, totals.num_read) == (600, 300)


def test_counters_go_on_with_the_next_process_of_a_rank():
    totals = Totals()
    totals.add(box_of(10))
    totals.add(dataclasses.replace(box_of(5), pid=7))
    assert totals.num_steps == 15


def test_an_operation_counts_when_it_has_ended():
    def event(ended_ns: int) -> Event:
        return Event(1, 10**9, ended_ns, "collective", "broadcast", "world", "", 1, 1, 3, dtype=1)

    box = dataclasses.replace(box_of(1), num_events=1)
    totals = Totals()
    totals.add(box.with_events([event(0)]))
    assert totals.wait_s == 0
    totals.add(box.with_events([event(3 * 10**9)]))
    assert totals.wait_s == 2
    assert totals.num_bytes == {"broadcast": 24}


def test_a_script_with_any_number_of_phases_makes_a_limited_number_of_series():
    totals = Totals()
    events = [Event(n + 1, 1, 2, "phase", "", f"phase {n}", "", 1, 1, 0) for n in range(1000)]
    totals.add(dataclasses.replace(box_of(1), num_events=1000).with_events(events))
    assert len(totals.phases_s) == 33
    assert totals.phases_s["other"] == pytest.approx(968e-9)


def test_sizes_of_elements_are_those_of_the_backend():
    from phalanx.backend.types import _ARITHMETIC, ITEM_BYTES

    sizes = [Event(1, 1, 2, "collective", "", "", "", 1, 1, 1, dtype=code).size_bytes for code in range(99)]
    assert sizes[: len(_ARITHMETIC)] == ITEM_BYTES[: len(_ARITHMETIC)]
    assert {*sizes[len(_ARITHMETIC) :]} == {1}


def test_a_time_is_as_long_ago_as_it_was_even_if_the_clock_has_been_set(monkeypatch):
    monkeypatch.setattr("time.monotonic", lambda: 100.0)
    for now_s in (1.7e9, 1.6e9):
        monkeypatch.setattr("time.time", lambda now_s=now_s: now_s)
        assert metrics._time_of(90.0) == now_s - 10
    assert metrics._time_of(0.0) is None


def test_replicas_are_told(monkeypatch):
    fd = unnamed_file("phalanx-snapshots")
    layout.want_replicas(fd, 2)
    layout.note_copied(fd, layout.Copied(0, 30, 1, 5))
    found = Families()
    metrics.JobMetrics("train.py")._add_snapshots(held_in(f"/proc/self/fd/{fd}"), ("train.py", "host"), found)
    os.close(fd)
    samples = {sample.name: sample.value for family in found for sample in family.samples}
    assert samples == {"phalanx_replicas_wanted": 2, "phalanx_replicas": 1, "phalanx_replicated_step": 30}


def test_two_jobs_of_one_script_have_names_of_their_own(tmp_path):
    with contextlib.closing(Watch("", 1.0, counts=True)) as watch:
        jobs = metrics.Jobs(watch)
        jobs._jobs["train.py", 1] = metrics.JobMetrics("train.py")
        assert [jobs._name("train.py", 2), jobs._name("other.py", 3)] == ["train.py (2)", "other.py"]


def test_phases_of_several_recoveries_add_up(tmp_path):
    for attempt, seconds in enumerate((1.0, 2.5)):
        save_loss(Loss(ending=Ending(rank=1, pid=9), phases_s={"noticed": seconds}), tmp_path, attempt)
    found = Families()
    metrics._add_losses(str(tmp_path), ("train.py", "host"), found)
    samples = {sample.name: sample.value for family in found for sample in family.samples}
    assert samples["phalanx_recovery_seconds_total"] == 3.5
    assert samples["phalanx_losses_total"] == 2
