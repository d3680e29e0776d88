"""Checkpoints on disk where the memory of several hosts has the state."""

from __future__ import annotations

import pytest

from phalanx.train import read_metrics, write_report
from tests.launch.jobs import LIMIT_S
from tests.launch.test_nodes import nodes

__all__ = ["nodes"]  # a fixture
pytestmark = pytest.mark.usefixtures("warm_jobs")

SCRIPT = """
import torch, phalanx
from torch.utils.data import TensorDataset

model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
options = dict(max_epochs=6, global_batch_size=8, snapshot_every=1, folder="run", MORE)
data = TensorDataset(torch.ones(32, 2), torch.ones(32, 1))
phalanx.Trainer(model, optimizer, torch.nn.functional.mse_loss, **options).fit(data)
"""
SAID = "the memory of 2 hosts has the state: checkpoints go to disk every 10 minutes rather than after every epoch"


@pytest.mark.parametrize(
    ("more", "flags", "steps"),
    [
        ("", ["--max-restarts", "1"], [4, 24]),
        pytest.param("save_every=8", ["--max-restarts", "1"], [8, 16, 24, 24], marks=pytest.mark.slow),
        pytest.param("", ["--max-restarts", "0"], [4, 8, 12, 16, 20, 24], marks=pytest.mark.slow),
    ],
    ids=["by default", "an interval is given", "nobody holds memory"],
)
def test_an_epoch_is_saved_once_in_a_while_where_memory_is_safe_and_nothing_else_is_asked(
    nodes,
    tmp_path,
    more,
    flags,
    steps,
):
    group = nodes(SCRIPT.replace("MORE", more))
    for _ in range(2):
        group.start(*flags, backend="c10d", nnodes="2")
        group.wait_for_rendezvous()
    ends = [job.communicate(timeout=LIMIT_S) for job in group.started]
    assert [job.returncode for job in group.started] == [0, 0], ends
    saved = [record["step"] for record in read_metrics(tmp_path / "run") if record["kind"] == "save"]
    assert saved == steps
    is_rare = steps == [4, 24]
    assert (SAID in "".join(out for out, _ in ends)) == is_rare
    assert ("Checkpoints on disk" in write_report(tmp_path / "run").read_text()) == is_rare
