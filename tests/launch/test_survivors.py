"""Processes that outlive the failure of another rank: `phalanx.resilient`."""

from __future__ import annotations

import re

import pytest

import phalanx
from tests.launch.jobs import LIMIT_S, await_line, run_job
from tests.launch.test_nodes import nodes  # noqa: F401 a fixture

pytestmark = pytest.mark.usefixtures("warm_jobs")

TRAIN = """
import torch, phalanx
import torch.distributed as dist
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
data = torch.randn(2000, 8)
attempt = lambda: int(os.environ["TORCHELASTIC_RESTART_COUNT"])
print("began", os.getpid(), flush=True)

def die(step, rank, at=12):
    if attempt() == 0 and rank == 1 and step == at:
        os.kill(os.getpid(), signal.SIGKILL)

def train():
    with phalanx.init(BACKEND) as session:
        wrapped = WRAPPER(model)
        state = {"model": model, "optimizer": optimizer, "step": 0}
        loaded = phalanx.checkpoint.load("folder", state, missing="ignore")
        print(f"attempt {attempt()} from {loaded and loaded.step} in {os.getpid()} of {session.world_size}", flush=True)
        while state["step"] < 20:
            begin = (state["step"] * session.world_size + session.rank) * 8
            inputs = data[begin : begin + 8]
            (wrapped(inputs) - inputs.sum(1, keepdim=True)).square().mean().backward()
            DISTURB(state["step"], session.rank)
            optimizer.step()
            optimizer.zero_grad()
            state["step"] += 1
            SNAPSHOT
    return sum(parameter.double().sum().item() for parameter in model.parameters())
"""
RUN = """
print("result", phalanx.resilient(train).hex(), flush=True)
"""
OURS = {"BACKEND": '"phalanx"', "WRAPPER": "phalanx.DistributedDataParallel"}
TORCHS = {"BACKEND": '"gloo"', "WRAPPER": "nn.parallel.DistributedDataParallel"}
SNAPSHOT = 'phalanx.checkpoint.snapshot("folder", state, state["step"])'


def script(ways=OURS, disturb="die", snapshot=SNAPSHOT, end=RUN):
    source = TRAIN + end
    for name, text in {**ways, "DISTURB": disturb, "SNAPSHOT": snapshot}.items():
        source = re.sub(rf"\b{name}\b", text, source)
    return source


def results_of(done):
    assert done.returncode == 0, done.stderr
    return set(re.findall(r"result (\S+)", done.stdout))


def pids_of(text, rank):
    """Return the processes that were this rank, by attempt."""
    return {int(n): pid for n, pid in re.findall(rf"\[rank {rank}\] attempt (\d+) from \S+ in (\d+)", text)}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The results of a job that nobody disturbs; both ways average the gradients of two ranks to the same bits."""
    return results_of(run_job(tmp_path_factory.mktemp("undisturbed"), script(disturb="(lambda *_: None)")))


@pytest.mark.parametrize("ways", [OURS, TORCHS], ids=["phalanx", "torch's wrapper on gloo"])
def test_a_rank_that_is_not_to_blame_goes_on_in_its_process_to_the_same_bits(tmp_path, ways, undisturbed):
    done = run_job(tmp_path, script(ways), "--max-restarts", "2")
    assert "phalanx run: rank 0 goes on in the same process" in done.stderr
    assert done.stdout.count("began") == 3
    for rank in range(2):
        before, after = (pids_of(done.stdout, rank)[attempt] for attempt in (0, 1))
        assert (before == after) == (rank != 1)
        assert f"[rank {rank}] attempt 1 from 12 in" in done.stdout
    assert len(results_of(done)) == 1
    assert results_of(done) == undisturbed


def test_each_attempt_of_a_kept_process_has_its_own_logs_and_black_box(tmp_path):
    done = run_job(tmp_path, script(), "--max-restarts", "2")
    assert done.returncode == 0, done.stderr
    for attempt, words in enumerate(("attempt 0 from None", "attempt 1 from 12")):
        [log] = tmp_path.glob(f"logs/*/*/attempt_{attempt}/rank_0/stdout.log")
        assert words in log.read_text()
        assert log.read_text().count("attempt") == 1
        boxes = [box.name for box in tmp_path.glob(f"logs/*/*/blackbox/attempt_{attempt}/*.box")]
        assert sorted(boxes) == ["rank_0.box", "rank_1.box"]


@pytest.mark.parametrize(
    ("words", "change"),
    [
        ("there is no snapshot or checkpoint yet", {"snapshot": "pass"}),
        ("a process group was made before", {"end": '\nphalanx.init("phalanx")\n' + RUN}),
        ("resilient or fit() was called before", {"end": "\nphalanx.resilient(lambda: None)\n" + RUN}),
    ],
)
def test_a_process_that_can_not_go_on_is_started_anew_and_the_launcher_says_why(tmp_path, words, change):
    done = run_job(tmp_path, script(**change), "--max-restarts", "1")
    assert len(results_of(done)) == 1
    assert re.search(rf"phalanx run: rank 0 can't be kept: .*{re.escape(words)}", done.stderr), done.stderr
    assert "same process" not in done.stderr
    assert pids_of(done.stdout, 0)[0] != pids_of(done.stdout, 0)[1]


def test_the_rank_that_takes_a_dead_ones_place_finds_the_port_of_its_server_free(tmp_path):
    serve = """
import socket, subprocess
if RANK == 1:
    server = socket.create_server(("127.0.0.1", attempt() and int(open("port").read())))
    open("port", "w").write(str(server.getsockname()[1]))
    subprocess.Popen(["sleep", "1000"], pass_fds=[server.fileno()], start_new_session=True, stdout=subprocess.DEVNULL,
                     stderr=subprocess.DEVNULL)
    server.close()
"""
    done = run_job(tmp_path, script(end=serve + RUN), "--max-restarts", "1")
    assert len(results_of(done)) == 1
    assert "phalanx run: rank 0 goes on in the same process" in done.stderr


def test_no_process_is_kept_if_the_user_does_not_want_it(tmp_path):
    done = run_job(tmp_path, script(), "--max-restarts", "1", "--no-keep")
    assert len(results_of(done)) == 1
    assert "kept" not in done.stderr
    assert "same process" not in done.stderr
    assert pids_of(done.stdout, 0)[0] != pids_of(done.stdout, 0)[1]


def test_a_rank_that_does_not_come_to_a_collective_is_started_anew(tmp_path):
    busy = """
def stay(step, rank):
    die(step, rank)
    while attempt() == 0 and rank == 2 and step == 12:
        time.sleep(0.01)
"""
    done = run_job(tmp_path, script(disturb="stay", end=busy + RUN), "--max-restarts", "1", num_ranks=3)
    assert len(results_of(done)) == 1
    assert "rank 2 can't be kept: no collective or snapshot within 2 s, so it is started anew" in done.stderr
    assert "phalanx run: rank 0 goes on in the same process" in done.stderr


def test_a_failure_that_no_attempt_follows_ends_every_rank_as_ever(tmp_path):
    done = run_job(tmp_path, script(disturb="(lambda *_: die(*_) or die_again(*_))", end="""
def die_again(step, rank):
    if attempt() == 1 and step == 15:
        if rank == 0:
            os._exit(7)
        time.sleep(3600)  # so that it does not notice the end of the other before it is told to end
""" + RUN), "--max-restarts", "1")  # fmt: skip
    assert done.returncode == 7, done.stderr
    assert "phalanx run: rank 0 goes on in the same process" in done.stderr
    assert "rank 1: ended because of it" in done.stderr


def test_processes_are_kept_on_all_nodes_when_a_rank_of_one_fails(tmp_path, nodes):  # noqa: F811
    group = nodes(script())
    for _ in range(2):
        group.start("--max-restarts", "1", backend="c10d")
    ends = group.finish()
    assert [code for code, _, _ in ends] == [0, 0], ends
    text = "".join(out for _, out, _ in ends)
    kept = [rank for rank in range(4) if pids_of(text, rank)[0] == pids_of(text, rank)[1]]
    assert kept == [0, 2, 3]
    assert len(set(re.findall(r"result (\S+)", text))) == 1


UNTIL_LOST = """
import torch, phalanx, phalanx.checkpoint as ckpt
weight = torch.zeros(70_000)

def train():
    with phalanx.init("phalanx") as session:
        state = {"weight": weight, "step": 0}
        loaded = ckpt.load("c", state, missing="ignore")
        print("from", loaded and loaded.source, session.world_size, os.getpid(), flush=True)
        while loaded is None:
            torch.distributed.barrier()
            weight.add_(1)
            state["step"] += 1
            ckpt.snapshot("c", state, state["step"])
            if state["step"] == 3:
                print("ready", flush=True)
            time.sleep(0.01)
        return weight[0].item() == state["step"] >= 2

print("set back", phalanx.resilient(train), flush=True)
"""


GO_ON = (  # the ranks of each of two nodes, once they are alone
    "ranks 0 and 1 go on in the same process",
    "ranks 2 and 3 go on in the same process, now as ranks 0 and 1",
)


@pytest.mark.parametrize("lost", [0, 1], ids=["that others met at", "another"])
def test_the_processes_of_a_node_outlive_another_node(nodes, lost):  # noqa: F811
    group = nodes(UNTIL_LOST)
    for _ in range(2):
        group.start("--max-restarts", "1", backend="c10d", nnodes="1:2")
        group.wait_for_rendezvous()
    living = group.started[1 - lost]
    out = "".join(await_line(living.stdout, "ready"))
    group.started[lost].kill()
    rest, err = living.communicate(timeout=LIMIT_S)
    assert living.returncode == 0, err
    assert f"phalanx run: {GO_ON[1 - lost]}\n" in err, err
    begun = re.findall(r"from (\w+) (\d) (\d+)", out + rest)
    before = {pid for source, size, pid in begun if (source, size) == ("None", "4")}
    assert before == {pid for source, size, pid in begun if (source, size) == ("memory", "2")}
    assert len(before) == 2
    assert (out + rest).count("set back True") == 2


FIT = """
import torch, phalanx
from torch.utils.data import TensorDataset

class Callback:
    def on_step(self, trainer):
        size = torch.distributed.get_world_size()
        print("step", trainer.step, "of", size, "in", os.getpid(), flush=True)
        time.sleep(0.01)

phalanx.init()
model = torch.nn.Linear(8, 8)
options = {"max_steps": 10**9, "callbacks": [Callback()], "folder": "run", "global_batch_size": 8}
trainer = phalanx.Trainer(model, torch.optim.SGD(model.parameters(), 0.1), torch.nn.functional.mse_loss, **options)
trainer.fit(TensorDataset(torch.ones(32, 8), torch.ones(32, 8)))
"""


@pytest.mark.parametrize("leaving", [0, 1], ids=["that others met at", "another"])
def test_a_trainers_processes_of_a_node_outlive_one_that_is_told_to_go(nodes, leaving):  # noqa: F811
    group = nodes(FIT)
    for _ in range(2):
        group.start("--max-restarts", "1", "--drain", backend="c10d", nnodes="1:2")
        group.wait_for_rendezvous()
    goes, stays = group.started[leaving], group.started[1 - leaving]
    out = "".join(await_line(stays.stdout, "step 5 of 4"))
    goes.terminate()
    out += "".join(await_line(stays.stdout, " of 2 in "))
    stays.terminate()
    rest, err = stays.communicate(timeout=LIMIT_S)
    assert stays.returncode == 75, err
    assert f"phalanx run: {GO_ON[1 - leaving]}\n" in err, err
    assert "no step repeated" in err
    assert "restart 1" not in err
    before, after = (re.findall(rf"step (\d+) of {size} in (\d+)", out + rest) for size in (4, 2))
    assert {pid for _, pid in before} == {pid for _, pid in after}
    assert len({pid for _, pid in after}) == 2
    assert min(int(step) for step, _ in after) == max(int(step) for step, _ in before) + 1
    assert goes.communicate(timeout=LIMIT_S)[1].count("phalanx run: this node has left the job; exit code 75") == 1
    assert goes.returncode == 75


def test_a_rank_that_is_alone_keeps_its_process_when_a_host_joins(nodes):  # noqa: F811
    alone = {**OURS, "WRAPPER": "(lambda model: model)"}  # whose backward has collectives, also alone
    source = script(alone, disturb="(lambda *_: None)").replace(
        "< 20", "< (1_000_000 if session.world_size == 1 else 20)"
    )
    source = source.replace("optimizer.step()", "optimizer.step(); time.sleep(0.01)")
    group = nodes(source)
    flags = ("--nproc-per-node", "1", "--max-restarts", "3", "--rdzv-conf", "last_call_timeout=1")
    first = group.start(*flags, backend="c10d", nnodes="1:2")
    assert "began" in first.stdout.readline()
    assert "attempt 0 from None" in first.stdout.readline()
    group.start(*flags, backend="c10d", nnodes="1:2")
    (code, out, err), _ = group.finish()
    assert code == 0, err
    assert "rank 0 goes on in the same process" in err
    assert "can't be kept" not in err
    assert "began" not in out


def test_a_process_that_was_kept_puts_only_its_present_rank_before_a_traceback(tmp_path):
    fails = "if attempt() == 1 and state['step'] == 18: raise ValueError('of its own')\n            " + SNAPSHOT
    done = run_job(tmp_path, script(snapshot=fails), "--max-restarts", "1")
    assert "rank 0 goes on in the same process" in done.stderr
    [log] = tmp_path.glob("logs/train/*/attempt_1/rank_0/stderr.log")
    assert "[rank0]: ValueError: of its own" in log.read_text().splitlines()


def generate():
    yield 1


async def await_nothing():
    return 1


@pytest.mark.parametrize("train", [generate, await_nothing])
def test_a_function_that_runs_later_is_refused(train):
    with pytest.raises(TypeError, match="a generator or a coroutine function, so calling it trains nothing"):
        phalanx.resilient(train)
