"""Flags and plans: torchrun's own parser says what they mean, a table says what is refused."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed.run as torchrun
from torch.distributed.elastic.multiprocessing import Std

from phalanx import _env, _settings
from phalanx._command_line import UsageError
from phalanx.launch.command.flag_parser import run_parser
from phalanx.launch.command.flags import FLAGS
from phalanx.launch.command.plan import make_plan


@pytest.fixture
def script(tmp_path, monkeypatch):
    (tmp_path / "train.py").touch()
    monkeypatch.chdir(tmp_path)
    return "train.py"


def job_of(line, environ=None):
    return make_plan(line.split(), environ or {}).job


def streams_of(setting, num_ranks):
    """What torchrun makes of -r or -t, as our numbers."""
    return tuple((setting.get(rank, 0) if isinstance(setting, dict) else setting) for rank in range(num_ranks))


@pytest.mark.parametrize(
    "line",
    [
        "train.py",
        "--nproc-per-node 3 train.py --nproc-per-node 9 -m x",
        "--nproc_per_node=3 --nnodes=1 train.py",
        "--nproc-per-node cpu train.py",
        "--nnodes 2 --node-rank 1 --master-addr host --master-port 123 train.py",
        "--nnodes 2:2 --node_rank=0 --master_addr=host train.py",
        "--nnodes 3 --rdzv-endpoint host:400 --rdzv-id here --node-rank 2 train.py",
        "--nnodes 1:4 --rdzv-backend c10d --rdzv-endpoint host:29400 --rdzv-id 7 --max-restarts 3 train.py",
        "--nnodes 2:4 --rdzv_backend=c10d --rdzv_endpoint=host:1 --rdzv-conf timeout=5,join_timeout=9 train.py",
        "--monitor-interval 2.5 --role trainer --max_restarts=2 --local-addr me train.py",
        "--nproc-per-node 4 -r 3 train.py",
        "--nproc-per-node 2 -r 0:1,1:2 -t 1:2 train.py",
        "--nproc-per-node 2 --redirects=2 --tee 3 --log-dir logs train.py",
        "--nproc-per-node 3 --local-ranks-filter 0,2 train.py",
        "--signals-to-handle SIGTERM,SIGUSR1 --start-method fork train.py",
        "-m train a b",
        "--module train --module",
        "--no-python echo hello",
        "--standalone --nproc-per-node 2 train.py",
    ],
)
def test_flags_mean_what_they_mean_to_torchrun(script, line, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # torchrun would set it in this process
    args = torchrun.parse_args(line.split())
    oracle_nproc = args.nproc_per_node
    if args.master_port is None:
        args.master_port = 29500
    want, _, want_args = torchrun.config_from_args(args)
    job = job_of(line)
    if "--nproc" in line or oracle_nproc != "1":  # our default is auto
        assert job.num_local_ranks == want.nproc_per_node
    assert (job.min_nodes, job.max_nodes) == (want.min_nodes, want.max_nodes)
    assert (job.max_restarts, job.role) == (want.max_restarts, want.role)
    assert job.local_addr == (want.local_addr or "")
    assert ",".join(sig.name for sig in job.signals) == want.signals_to_handle
    if want.max_nodes > 1:
        assert (job.rdzv_backend, job.rdzv_endpoint, job.run_id) == (
            want.rdzv_backend,
            want.rdzv_endpoint,
            want.run_id,
        )
        if want.rdzv_backend == "static":
            assert job.node_rank == want.rdzv_configs.pop("rank")
        assert {"timeout": 900, **job.rdzv_conf} == {"timeout": 900, **want.rdzv_configs}  # its default
    logs = want.logs_specs
    assert job.log_dir == (args.log_dir or "")
    assert job.redirects == streams_of(Std.from_str(args.redirects), job.num_local_ranks)
    assert job.tees == streams_of(Std.from_str(args.tee), job.num_local_ranks)
    assert set(job.shown_ranks or ()) == set(logs._local_ranks_filter or ())
    given = [arg for arg in want_args if arg != "-u"]
    assert list(job.command[-len(given) :]) == given if given else True


@pytest.mark.parametrize(
    ("environ", "line", "restarts"),
    [
        ({}, "train.py", 0),
        ({"PET_MAX_RESTARTS": "1"}, "train.py", 1),
        ({"PET_MAX_RESTARTS": "1", "PHALANX_MAX_RESTARTS": "2"}, "train.py", 2),
        ({"PET_MAX_RESTARTS": "1", "PHALANX_MAX_RESTARTS": "2"}, "--max-restarts=3 train.py", 3),
    ],
)
def test_the_command_line_wins_over_our_variable_and_that_over_torchruns(script, environ, line, restarts):
    assert job_of(line, environ).max_restarts == restarts


@pytest.mark.parametrize("text", ["1", "true", "YES"])
def test_a_switch_can_be_set_in_the_environment(script, text):
    assert not job_of("train.py", {"PHALANX_NO_PRELOAD": text}).preload
    assert job_of("train.py", {"PHALANX_NO_PRELOAD": "0"}).preload


SLURM = {
    "SLURM_JOB_ID": "12",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "1",
    "SLURM_NTASKS": "2",
    "SLURM_NODEID": "1",
    "SLURM_NNODES": "2",
    "SLURM_TASKS_PER_NODE": "1(x2)",
    "SLURM_STEP_NODELIST": "gpu[07-08]",
}


def test_a_slurm_step_of_one_task_per_node_is_this_jobs_nodes(script):
    environ = SLURM
    plan = make_plan(["--nproc-per-node", "2", "train.py"], environ)
    job = plan.job
    assert (job.max_nodes, job.node_rank, job.rdzv_backend) == (2, 1, "static")
    port = job.rdzv_endpoint.rpartition(":")[2]
    assert job.rdzv_endpoint == f"gpu07:{port},gpu08:{port}"
    assert plan.settings["nnodes"].origin == "Slurm"
    alone = job_of("--standalone train.py", environ)
    assert alone.max_nodes == 1


def test_the_spares_are_among_the_nodes_that_a_scheduler_has_started(script):
    three = {**SLURM, "SLURM_NTASKS": "3", "SLURM_NNODES": "3", "SLURM_TASKS_PER_NODE": "1(x3)"}
    job = job_of("--spares 1 train.py", three | {"SLURM_STEP_NODELIST": "gpu[07-09]"})
    assert (job.min_nodes, job.max_nodes, job.spares, job.rdzv_backend) == (2, 2, 1, "c10d")
    assert [place.partition(":")[0] for place in job.rdzv_endpoint.split(",")] == ["gpu07", "gpu08", "gpu09"]


@pytest.mark.parametrize(
    ("line", "endpoint"),
    [
        ("--nnodes 2 --master-addr a,b --master-port 7 train.py", "a:7,b:7"),
        ("--nnodes 2 --master-addr a,b train.py", "a:29500,b:29500"),
        ("--nnodes 2 --rdzv-endpoint a:1,b,[::1]:3 train.py", "a:1,b:29500,[::1]:3"),
        ("--nnodes 1:2 --rdzv-backend c10d --rdzv-endpoint a,b:3 train.py", "a:29400,b:3"),
        ("--nnodes 2 --spares 1 --master-addr a,b train.py", "a:29400,b:29400"),
    ],
)
def test_nodes_may_meet_at_several_places(script, line, endpoint):
    assert job_of(line).rdzv_endpoint == endpoint


NUM_RANKS = ("-n", "-np", "--np", "--nprocs", "--procs", "--gpus", "--ngpus", "--num_processes", "--world-size")
MPI = {f"OMPI_COMM_WORLD_{name}": "4" for name in ("SIZE", "LOCAL_SIZE")} | {
    f"OMPI_COMM_WORLD_{name}": "0" for name in ("RANK", "LOCAL_RANK")
}


@pytest.mark.parametrize(
    ("line", "environ", "said"),
    [
        ("", {}, "no script given"),
        ("--nproc 2 train.py", {}, "unknown flag --nproc, did you mean --nproc-per-node?"),
        ("--max-restart 2 train.py", {}, "did you mean --max-restarts?"),
        *((f"{flag} 2 train.py", {}, "the number of ranks on this node is --nproc-per-node") for flag in NUM_RANKS),
        ("-H a,b train.py", {}, "start phalanx run on every node"),
        ("--run-path train.py", {}, "leave it out"),
        ("--logs-specs x train.py", {}, "--log-dir, --redirects and --tee: leave it out"),
        ("--event-log-handler=x train.py", {}, "no events of torchelastic are recorded: leave it out"),
        ("--virtual-local-rank train.py", {}, "every rank keeps its own LOCAL_RANK: leave it out"),
        ("--verbose train.py", {}, "unknown flag --verbose"),
        ("-m train.py", {}, "-m takes a module, got the file 'train.py'"),
        ("python train.py", {}, "give the script alone, without 'python'"),
        ("-x train.py", {}, "unknown flag -x"),
        ("--nproc-per-node 0 train.py", {}, "--nproc-per-node must be a whole number of at least 1, auto, cpu or gpu"),
        ("--nproc-per-node 2.5 train.py", {}, "got '2.5'"),
        ("--nproc-per-node", {}, "--nproc-per-node needs a value: --nproc-per-node N"),
        ("--standalone=1 train.py", {}, "--standalone takes no value, got '1'"),
        ("--nnodes 3:2 train.py", {}, "--nnodes must be N or MIN:MAX"),
        ("--nnodes 1:2:3 train.py", {}, "got '1:2:3'"),
        ("--master-port 70000 train.py", {}, "a port from 0 to 65535, got '70000'"),
        ("--max-restarts -1 train.py", {}, "got '-1'"),
        ("--shutdown-timeout inf train.py", {}, "got 'inf'"),
        ("--start-method thread train.py", {}, "spawn or fork or forkserver"),
        ("-r 7 train.py", {}, "-r must be 0, 1 (stdout)"),
        ("--nproc-per-node 2 -r 5:1 train.py", {}, "--redirects names local rank 5, which must lie in [0, 2)"),
        ("--nproc-per-node 2 --local-ranks-filter 0,2 train.py", {}, "names local rank 2"),
        ("--local-ranks-filter zero train.py", {}, "got 'zero'"),
        ("--signals-to-handle SIGKILL train.py", {}, "SIGTERM,SIGUSR1, got 'SIGKILL'"),
        ("--rdzv-backend etcd train.py", {}, "must be static or c10d, got 'etcd'"),
        ("--rdzv-conf timeout train.py", {}, "KEY=VALUE"),
        ("--rdzv-conf timeout=nan train.py", {}, "timeout must be a number that is not negative"),
        ("--rdzv-conf keep_alive_interval=-1 train.py", {}, "keep_alive_interval must be a number"),
        ("--rdzv-conf is_host=maybe train.py", {}, "is_host must be true or false"),
        ("-m --no-python train", {}, "-m and --no-python exclude each other"),
        ("--use-env --no-use-env train.py", {}, "exclude each other"),
        ("--standalone --nnodes 2 train.py", {}, "a job of one node"),
        ("--replicas 1 train.py", {}, "but this job has at most 1 node (--nnodes): leave it out"),
        (
            "--nnodes 1:3 --replicas 3 train.py",
            {},
            "needs 3 other nodes, but this job has at most 3 nodes",
        ),
        ("--nnodes 2 train.py", {}, "2 nodes need --master-addr HOST"),
        ("--nnodes 2 --master-addr h --node-rank 2 train.py", {}, "--node-rank must lie in [0, 2), got 2"),
        ("--nnodes 1:2 --master-addr h train.py", {}, "1:2 needs --rdzv-backend c10d"),
        ("--nnodes 1:2 --rdzv-backend c10d train.py", {}, "needs --rdzv-endpoint HOST:PORT"),
        ("--nnodes 2 --rdzv-endpoint host:port train.py", {}, "HOST:PORT, got 'host:port'"),
        ("--spares -1 train.py", {}, "--spares must be a whole number of at least 0, got '-1'"),
        ("--spares 1 --nnodes 3:2 train.py", {}, "--nnodes must be N or MIN:MAX with 1 <= MIN <= MAX"),
        ("--spares 1 --nnodes 2 --rdzv-backend static --master-addr h train.py", {}, "--spares needs nodes without"),
        ("--spares 1 --nnodes 2 train.py", {}, "needs --rdzv-endpoint HOST:PORT"),
        ("--spares 1 train.py", {}, "--spares is for jobs of at least 2 nodes"),
        ("--spares 1 train.py", SLURM, "--spares is for jobs of at least 2 nodes"),
        ("--spares 2 train.py", SLURM, "--spares 2, and Slurm started 2 nodes in all"),
        ("--master-addr a,,b --nnodes 2 train.py", {}, "must be one host, or several as HOST,HOST"),
        ("--drain-url ftp://x train.py", {}, "must be a URL of http, or aws, gcp, azure"),
        ("--drain-url http:// train.py", {}, "must be a URL of http, or aws, gcp, azure"),
        ("--drain-url http://[::1 train.py", {}, "must be a URL of http, or aws, gcp, azure"),
        ("--drain-url http://host:x/ train.py", {}, "must be a URL of http, or aws, gcp, azure"),
        ("--nproc-per-node gpu train.py", {"CUDA_VISIBLE_DEVICES": ""}, "no GPU is visible"),
        ("missing.py", {}, "no script 'missing.py'"),
        ("-m no_such_package.part", {}, "no module named 'no_such_package'"),
        ("--no-python no-such-program", {}, "no program 'no-such-program'"),
        ("train.py", {"PHALANX_NPROC_PER_NODE": "two"}, "PHALANX_NPROC_PER_NODE must be a whole number"),
        ("train.py", {"PET_NNODES": "x"}, "PET_NNODES must be"),
        (
            "train.py",
            {"PHALANX_NPROC": "2"},
            "unknown environment variable PHALANX_NPROC, did you mean PHALANX_NPROC_PER_NODE?",
        ),
        ("train.py", {"PHALANX_STALL_S": "soon"}, "PHALANX_STALL_S must be a number"),
        ("train.py", {"PHALANX_NO_PIN": "maybe"}, "PHALANX_NO_PIN must be 1 or 0"),
        ("--nproc-per-node 4 train.py", MPI, "Open MPI started phalanx run 4 times on this node"),
        ("train.py", {"SLURM_JOB_ID": "1", "SLURM_JOB_NUM_NODES": "2"}, "srun --ntasks-per-node=1 phalanx run"),
    ],
)
def test_a_mistake_is_refused_in_one_line(script, line, environ, said):
    with pytest.raises(UsageError) as error:
        make_plan(line.split(), environ)
    assert said in str(error.value)
    assert "\n" not in str(error.value)


def test_every_flag_is_an_environment_variable_that_ranks_do_not_take_for_a_misspelling():
    flags = {flag.variables[0] for flag in FLAGS.values()}
    assert flags == {f"PHALANX_{name}" for name in _env._FLAGS.split()}
    assert flags < _env.LAUNCH_VARIABLES  # beside what ranks are told
    _settings.read_settings(dict.fromkeys(_env.LAUNCH_VARIABLES, "1") | {_env.VERIFY_VARIABLE: "gloo"})


@pytest.mark.parametrize(
    ("line", "remark"),
    [
        ("train.py --epochs 3 --role big", ""),
        ("train.py --node_rank 3", ""),  # its own
        (
            "train.py --nproc_per_node=4",
            "--nproc_per_node stands after the script, so it goes to the script and has no effect",
        ),
        (
            "train.py --max-restarts 3 --nnodes 2",
            "--max-restarts, --nnodes stand after the script, so they go to the script and have",
        ),
    ],
)
def test_flags_behind_a_script_that_does_not_know_them_get_a_remark(tmp_path, monkeypatch, line, remark):
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text('parser.add_argument("--node-rank")\n')
    found = make_plan(["--nproc-per-node", "1", *line.split()], {}).job.remark
    assert found.startswith(remark) if remark else not found


def test_the_variable_that_somebody_takes_for_that_of_replace_gloo_is_answered_with_the_right_one(script):
    with pytest.raises(UsageError, match="PHALANX_REPLACE_GLOO: set PHALANX_REPLACE=gloo"):
        make_plan([script], {"PHALANX_REPLACE_GLOO": "1"})
    environ = {**os.environ, "PHALANX_REPLACE_GLOO": "1"}
    done = subprocess.run([sys.executable, "-c", "import torch"], env=environ, capture_output=True, text=True)
    advice = "set PHALANX_REPLACE=gloo; Gloo is not replaced"
    assert done.stderr == f"phalanx: PHALANX_REPLACE_GLOO is not a variable of phalanx: {advice}\n"


def test_the_help_names_every_flag_in_80_columns():
    text = run_parser().format_help()
    assert all(f"--{name}" in text for name in FLAGS)
    assert max(map(len, text.splitlines())) <= 80


def test_variables_that_kubernetes_sets_for_a_service_of_our_name_are_not_ours(script):
    service = {
        "PHALANX_SERVICE_HOST": "10.0.0.1",
        "PHALANX_SERVICE_PORT_HTTP": "80",
        "PHALANX_PORT": "tcp://10.0.0.1:80",
        "PHALANX_PORT_80_TCP_ADDR": "10.0.0.1",
        "PHALANX_MASTER_PORT": "tcp://10.0.0.1:80",
    }
    assert job_of("train.py", service).master_port == 0


def test_one_node_has_a_run_id_of_its_own(script):
    assert job_of("train.py").run_id != job_of("train.py").run_id
    assert job_of("--rdzv-id mine train.py").run_id == "mine"


def test_the_plan_tells_where_each_value_came_from(script):
    plan = make_plan(
        ["--dry-run", "--nproc-per-node", "2", "--no-pin", "-r3", "train.py", "a b"],
        {"PHALANX_MAX_RESTARTS": "2", "PET_ROLE": "trainer", "OMP_NUM_THREADS": "1"},
    )
    assert plan.is_dry
    rows = {line.split("  ")[0]: line.split() for line in plan.describe().splitlines()}
    assert rows["nproc-per-node"][1:] == ["2", "--nproc-per-node"]
    assert rows["redirects"][1:] == ["3", "-r"]
    assert rows["max-restarts"][1:] == ["2", "PHALANX_MAX_RESTARTS"]
    assert rows["role"][1:] == ["trainer", "PET_ROLE"]
    assert rows["rdzv-backend"][1:] == ["static", "default"]
    assert rows["local rank 1"][3:] == ["1", "thread", "any", "CPU"]
    assert "train.py" in rows["command"]
