"""A host that loses a rank for good goes on with fewer, from memory, and takes it back."""

from __future__ import annotations

import os
import signal

import pytest

from tests.hosts.test_replicas import LIMIT_S, TRAIN, await_fact, check_went_on, digest_of_undisturbed, jobs, launch
from tests.namespaces import hosts

__all__ = ["jobs"]  # a fixture
pytestmark = pytest.mark.usefixtures("needs_hosts", "warm_hosts")

# The last rank can't start while there is a file that says so. Two ranks remove it if another file says so: it is gone
# when the launcher tries three ranks again. Once the last rank is back, the job ends after 23 more steps.
SCRIPT = """
import os, pathlib
if os.environ["WORLD_SIZE"] == "2" and os.path.exists("mends"):
    pathlib.Path("broken").unlink(missing_ok=True)
IS_LAST = os.environ["GROUP_RANK"] == "1" and os.environ["LOCAL_RANK"] == "1"
if IS_LAST and os.path.exists("broken"):
    os.kill(os.getpid(), 9)
""" + TRAIN.replace("every, ", "if IS_LAST: say(pid=os.getpid())\nevery, ", 1).replace(
    "if found and steps_after", "if found and size == 3"
)


def lose_a_rank_for_good(jobs, made, folder, nodes, *flags):
    """Start a job of a rank on the first host and two on the second, which loses one; return what is loaded then."""
    common = {"steps_after": 23, "script": SCRIPT, "endpoint": made[0]}
    launch(jobs, made[:1], folder, nodes, **common)
    launch(jobs, made[1:], folder, nodes, "--nproc-per-node", "1:2", *flags, **common)
    pid = await_fact(jobs[1], "pid")["pid"]
    safe = await_fact(jobs[0], "safe")["safe"]
    (folder / "broken").touch()
    os.kill(pid, signal.SIGKILL)
    loaded = await_fact(jobs[0], "loaded")
    assert (loaded["size"], loaded["source"]) == (2, "memory")
    assert loaded["loaded"] >= safe
    return loaded


def test_a_rank_that_can_not_come_back_is_gone_on_without_and_taken_back_later(jobs, tmp_path):
    with hosts(2) as made:
        (tmp_path / "mends").touch()
        before = lose_a_rank_for_good(jobs, made, tmp_path, "2", "--regrow-after", "1")
        loaded = await_fact(jobs[0], "loaded")
        assert (loaded["size"], loaded["source"]) == (3, "memory")
        assert loaded["loaded"] > before["loaded"]
        facts = [await_fact(job, "digest") for job in jobs]
        assert {it["digest"] for it in facts} == {digest_of_undisturbed(facts[0]["step"])}
        said = [job.communicate(timeout=LIMIT_S)[1] for job in jobs]
        assert [job.returncode for job in jobs] == [0, 0], said
        assert "host-b: going on with 1 rank, before 2: rank 2 failed before any progress" in said[0]
        assert "host-b: going on with 2 ranks, before 1: planned restart, which does not count" in said[0]
        assert "restart 3 of 3" not in said[0]


def test_a_host_with_fewer_ranks_than_before_has_its_part_on_another(jobs, tmp_path):
    with hosts(2) as made:
        lose_a_rank_for_good(jobs, made, tmp_path, "1:2")
        safe = await_fact(jobs[0], "safe")["safe"]
        made[1].kill()
        check_went_on(jobs[0], 1, safe)
        await_fact(jobs[0], "step")


TRAINER = """
import os, sys, time, torch, phalanx
from torch.utils.data import TensorDataset

if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and os.environ["RANK"] == "2":
    sys.exit(9)

class Callback:
    def on_step(self, trainer):
        time.sleep(0.05 if os.environ["WORLD_SIZE"] == "2" else 0)  # the rank comes back before the end

phalanx.init()
model = torch.nn.Linear(8, 8)
options = {"max_steps": 200, "save_every": 10**9, "callbacks": [Callback()], "folder": "run", "global_batch_size": 12}
trainer = phalanx.Trainer(model, torch.optim.Adam(model.parameters()), torch.nn.functional.mse_loss, **options)
trainer.fit(TensorDataset(torch.ones(48, 8), torch.ones(48, 8)))
"""


@pytest.mark.slow
def test_a_trainer_without_kept_processes_repeats_no_step_when_a_rank_is_taken_back(jobs, tmp_path):
    with hosts(2) as made:
        common = {"script": TRAINER, "endpoint": made[0]}
        launch(jobs, made[:1], tmp_path, "2", "--no-keep", **common)
        launch(jobs, made[1:], tmp_path, "2", "--no-keep", "--nproc-per-node", "1:2", "--regrow-after", "1", **common)
        said = [job.communicate(timeout=LIMIT_S)[1] for job in jobs]
        assert [job.returncode for job in jobs] == [0, 0], said
        assert all("no step repeated" in text and "Mismatch" not in text for text in said), said
