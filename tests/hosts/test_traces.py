"""What hosts record is shown on one clock, which their launchers have measured."""

from __future__ import annotations

import contextlib
import gzip
import json

import pytest

from phalanx import cli
from tests.namespaces import hosts, node_command

pytestmark = pytest.mark.usefixtures("needs_hosts", "warm_hosts")
LATE = """
import time, torch, torch.distributed as dist
dist.init_process_group("phalanx")
for _ in range(20):
    time.sleep(0.1 * dist.get_rank())
    dist.all_reduce(torch.ones(9))
dist.destroy_process_group()
"""


def test_an_arrow_leads_from_the_late_rank_of_one_host_to_that_of_another(tmp_path, monkeypatch, capsys):
    (tmp_path / "late.py").write_text(LATE)
    with hosts(2) as made, contextlib.ExitStack() as stack:
        started = []
        for host in made:
            command = [*node_command("2", made[0], 29511), "--log-dir", str(tmp_path / host.name), "late.py"]
            started.append(stack.enter_context(host.start(command, cwd=tmp_path)))
        assert [job.wait(timeout=60) for job in started] == [0, 0]
    monkeypatch.chdir(tmp_path)
    assert cli.main(["trace", *(host.name for host in made)]) == 0
    assert "by the launchers' heartbeats" in capsys.readouterr().out
    trace = json.loads(gzip.decompress((tmp_path / "trace.json.gz").read_bytes()))
    (clock,) = trace["otherData"]["clocks"][1:]
    assert clock["within_us"] < 50_000
    starts = [event["pid"] for event in trace["traceEvents"] if event["ph"] == "s" and event["name"] == "waited for"]
    assert starts.count(1) >= 19
