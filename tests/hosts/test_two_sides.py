"""A host that is started again behind a cut writes nothing of the job's, and joins it when the cut is mended."""

from __future__ import annotations

import subprocess

import pytest

from phalanx.checkpoint.disk.claim import read_note
from tests.hosts.test_real_hosts import LIMIT_S, PORT, jobs
from tests.launch.jobs import await_line
from tests.namespaces import hosts, node_command

__all__ = ["jobs"]  # a fixture
pytestmark = pytest.mark.usefixtures("needs_hosts", "warm_hosts")

TRAIN = """
import os, sys, torch, phalanx
from torch.utils.data import TensorDataset

class Callback:
    def on_step(self, trainer):
        if trainer.step % 20 == 0 and os.environ["LOCAL_RANK"] == "0":
            print("training on", os.environ["GROUP_WORLD_SIZE"], "hosts", flush=True)

model = torch.nn.Linear(2, 1)
options = {"max_steps": 10**9, "save_every": 20, "callbacks": [Callback()], "folder": "run", "global_batch_size": 8}
trainer = phalanx.Trainer(model, torch.optim.SGD(model.parameters(), lr=0.01), torch.nn.functional.mse_loss, **options)
trainer.fit(TensorDataset(torch.ones(32, 2), torch.ones(32, 1)))
"""


def launch(host, first, folder, nodes="1:3"):
    script = folder / "train.py"
    script.write_text(TRAIN)
    command = [*node_command(nodes, first, PORT), "--max-restarts", "9", "--rdzv-id", "job"]
    command += ["--log-dir", str(folder / host.name), str(script)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return host.start(command, {"OMP_NUM_THREADS": "1"}, cwd=folder, **pipes)


def test_a_job_that_is_begun_again_behind_a_cut_writes_nothing_and_joins_the_first(jobs, tmp_path):
    with hosts(3) as made:
        jobs += [launch(host, made[0], tmp_path) for host in made]
        for job in jobs:
            await_line(job.stdout, "training on 3 hosts")
        made[0].cut()
        jobs[0].kill()
        jobs[0].wait(LIMIT_S)
        for job in jobs[1:]:
            await_line(job.stdout, "training on 2 hosts")
        again = launch(made[0], made[0], tmp_path)
        jobs.append(again)
        said = await_line(again.stderr, "and joins it")
        assert "another side of this job trains in run: process " in said[-1]
        note = read_note(tmp_path / "run")
        assert note.host in (made[1].name, made[2].name)
        made[0].mend()
        for job in jobs[1:]:
            await_line(job.stdout, "training on 3 hosts")
        assert read_note(tmp_path / "run").job == note.job
        assert read_note(tmp_path / "run").epoch > note.epoch


@pytest.mark.slow
def test_of_two_hosts_none_goes_on_when_the_first_was_without_power_and_both_say_what_to_do(jobs, tmp_path):
    def start():
        return [launch(host, made[0], tmp_path, "1:2") for host in made]

    with hosts(2) as made:
        jobs += start()
        for job in jobs:
            for _ in range(4):  # the first checkpoint is on disk
                await_line(job.stdout, "training on 2 hosts")
        made[0].cut()  # first: its system tells nobody
        made[0].kill()
        await_line(jobs[1].stderr, "those that are left (host-b) are not a majority, so others may be continuing")
        made[0].mend()
        jobs.append(launch(made[0], made[0], tmp_path, "1:2"))
        for job in jobs[1:]:
            said = await_line(job.stderr, "host-a has been started again and can't tell what became of the job")
            assert "end this command on all, then start it again" in said[-1]
        for job in jobs[1:]:
            job.kill()
            assert "training on 1 hosts" not in job.communicate(timeout=LIMIT_S)[0]
        jobs += start()
        said = [line for job in jobs[-2:] for line in await_line(job.stdout, "training on 2 hosts")]
        assert any("from disk" in line for line in said), said
