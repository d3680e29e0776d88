"""A `Trainer` whose process outlives the failure of another rank."""

from __future__ import annotations

import re

import pytest

from tests.launch.jobs import run_job

pytestmark = pytest.mark.usefixtures("warm_jobs")

SCRIPT = """
import torch, phalanx
from torch import nn
from torch.utils.data import TensorDataset

phalanx.seed_everything(0)
inputs = torch.randn(600, 8)
data = TensorDataset(inputs, inputs.sum(1, keepdim=True))
model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
print("process", os.getpid(), flush=True)

class Kill:
    def on_step(self, trainer):
        if DIES and trainer.step == 8 and RANK == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            os.kill(os.getpid(), signal.SIGKILL)

BEFORE
trainer = phalanx.Trainer(
    model, optimizer, nn.functional.mse_loss, scheduler=scheduler, scheduler_interval="epoch", max_epochs=3,
    global_batch_size=100, num_workers=1, snapshot_every=1, callbacks=[Kill()], **MORE,
)
trainer.fit(data, data)
print("result", sum(parameter.double().sum().item() for parameter in model.parameters()).hex(), flush=True)
"""


def script(dies, before="", more=""):
    return SCRIPT.replace("DIES", str(dies)).replace("BEFORE", before).replace("MORE", f"dict({more})")


def result_of(done):
    assert done.returncode == 0, done.stderr
    [result] = set(re.findall(r"result (\S+)", done.stdout))
    return result


@pytest.mark.slow
@pytest.mark.parametrize("more", ["", "divide_optimizer='always', clip_norm=1.0"], ids=["plain", "divided"])
def test_a_run_goes_on_in_the_processes_that_did_not_fail_to_the_same_bits(tmp_path, more):
    done = run_job(tmp_path, script(True, more=more), "--max-restarts", "1")
    assert_kept(done)
    (tmp_path / "undisturbed").mkdir()
    assert result_of(done) == result_of(run_job(tmp_path / "undisturbed", script(False, more=more)))


def assert_kept(done):
    assert "phalanx run: rank 0 goes on in the same process" in done.stderr
    assert done.stdout.count("process ") == 3
    assert re.search(r"resuming after step [78] from memory", done.stdout)


@pytest.mark.slow
def test_a_trainer_behind_init_goes_on_in_its_process_and_the_scripts_session_is_that_of_the_new_group(tmp_path):
    before = "session = phalanx.init('phalanx', timeout=50).__enter__()"
    after = "; print('sum', session.gather(torch.tensor([session.rank])).sum().item(), trainer.session is session)"
    after += "; session.__exit__(None, None, None); print('group', torch.distributed.is_initialized())"
    sources = [
        script(dies, before=before).replace("trainer.fit(data, data)", f"trainer.fit(data, data){after}")
        for dies in (True, False)
    ]
    done = run_job(tmp_path, sources[0], "--max-restarts", "1")
    assert_kept(done)
    assert done.stdout.count("sum 1 True") == done.stdout.count("group False") == 2
    (tmp_path / "undisturbed").mkdir()
    assert result_of(done) == result_of(run_job(tmp_path / "undisturbed", sources[1]))


@pytest.mark.slow
def test_a_trainer_behind_collectives_of_the_script_is_started_anew(tmp_path):
    done = run_job(tmp_path, script(True, before="phalanx.init().barrier()"), "--max-restarts", "1")
    assert "phalanx run: rank 0 can't be kept: the script has used its process group before Trainer()" in done.stderr
    assert done.stdout.count("process ") == 4
    assert result_of(done)


DIES_AT_THE_END = """
class Kill:
    def on_evaluation(self, trainer):
        if DIES and trainer.step == STEPS and RANK == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            os.kill(os.getpid(), signal.SIGKILL)

MORE["callbacks"] = [Kill()]
"""


@pytest.mark.parametrize("num_steps", [8, 12], ids=["in an epoch", "at its end"])
def test_a_run_that_fails_behind_its_last_step_is_evaluated_and_saved_after_all(tmp_path, num_steps):
    results = []
    for dies in (True, False):
        folder = tmp_path / str(dies)
        folder.mkdir()
        more = DIES_AT_THE_END.replace("DIES", str(dies)).replace("STEPS", str(num_steps))
        source = SCRIPT.replace("max_epochs=3", "max_epochs=4").replace("callbacks=[Kill()], ", "")
        source = source.replace("trainer.fit(data, data)", "print(trainer.fit(data, data))")
        source = source.replace("DIES", "False").replace(
            "BEFORE", f"MORE = dict(max_steps={num_steps}, folder='run')\n{more}"
        )
        done = run_job(folder, source, "--max-restarts", "1")
        assert ("restart 1 of 1" in done.stderr) == dies
        assert "already finished" not in done.stdout
        assert (folder / "run" / "checkpoints" / "latest").read_text().strip() == f"step-{num_steps:08}"
        evaluated = set(re.findall(r"(\{'loss.*)", done.stdout))
        results.append((result_of(done), evaluated))
    assert results[0] == results[1]
    assert len(results[0][1]) == 1
