"""The command as it is typed: alone, on two hosts, with a torch that is broken; its JSON and its exit codes."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from phalanx._command_line import UsageError
from phalanx.doctor.doctor import read_role
from phalanx.doctor.finding import LEVELS, Finding
from phalanx.doctor.report import merged
from tests.clusters._machines import PHALANX, machines
from tests.diagnose.asked import asked

NODES = ["--nnodes", "2", "--node-rank", "1", "--master-addr", "10.0.0.1"]


def doctor(*args, **options):
    return subprocess.run([*PHALANX, "doctor", *args], capture_output=True, text=True, timeout=120, **options)


def check_format(told):
    assert set(told) == {
        "format_version", "phalanx", "time", "seconds", "host", "num_hosts", "hosts", "findings", "level", "exit_code",
    }  # fmt: skip
    for finding in told["findings"]:
        assert set(finding) == {"topic", "level", "found", "todo", "facts", "host"}
        assert finding["level"] in LEVELS
        assert finding["todo"] or finding["level"] in ("ok", "note")
    assert told["exit_code"] == int(told["level"] == "problem")


def test_one_host_alone_is_examined_with_every_engine():
    done = doctor("--json", "--nproc-per-node", "1")
    told = json.loads(done.stdout)
    check_format(told)
    topics = {finding["topic"]: finding for finding in told["findings"]}
    problems = [finding for finding in told["findings"] if finding["level"] == "problem"]
    assert done.returncode == told["exit_code"] == int(bool(problems)), problems
    assert {"memory", "freed memory", "limits", "shared memory", "/dev/shm", "CPUs", "NUMA", "threads", "GPU"} <= set(
        topics
    )
    assert {"network", "own name", "versions"} <= set(topics)
    engines = {f["facts"]["engine"]: f["facts"] for f in told["findings"] if f["topic"] == "all_reduce"}
    assert {"phalanx", "gloo"} <= set(engines)
    assert all(0 < facts["seconds"] < 10 for facts in engines.values())
    assert told["hosts"][0]["host"] == 0


@pytest.mark.parametrize(
    ("torch", "said"),
    [
        ("raise ImportError('libcudart.so.13: cannot open')", "libcudart.so.13"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGILL)", "it ended with SIGILL"),
    ],
)
def test_a_broken_torch_is_a_problem_and_the_rest_is_told(tmp_path, torch, said):
    (tmp_path / "torch.py").write_text(torch)
    program = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); from phalanx.cli import main; sys.exit(main())"
    environ = {"PYTHONPATH": str(tmp_path), "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", program, "doctor", "--no-engines", "--nproc-per-node", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environ)
    assert done.returncode == 1, done.stderr
    lines = done.stdout.splitlines()
    assert any(line.startswith("problem  torch") and said in line for line in lines)
    assert any(line.startswith("ok") and " memory " in line for line in lines)
    assert lines[-1].startswith("phalanx doctor: 1 host, 1 problem")
    assert lines[-1].endswith("exit code 1")


def test_two_hosts_are_examined_and_the_first_prints_all(needs_hosts, tmp_path):
    with machines(tmp_path) as made:
        flags = ["--nnodes", "2", "--master-addr", made.hosts[0].address, "--master-port", "29500", "--no-engines"]
        command = [*PHALANX, "doctor", *flags, "--nproc-per-node", "1", "--timeout", "60", "--node-rank"]
        started = [
            made.start(number, [*command, *args], stderr=subprocess.PIPE)
            for number, args in enumerate((["0", "--json"], ["1"]))
        ]
        (out, err), (other_out, other_err) = [process.communicate(timeout=150) for process in started]
    told = json.loads(out)
    check_format(told)
    assert [process.returncode for process in started] == [0, 0], (told, err, other_err)
    assert [host["name"] for host in told["hosts"]] == ["host-a", "host-b"]
    assert {finding["host"] for finding in told["findings"]} == {0, 1, None}
    assert [f["level"] for f in told["findings"] if f["topic"] == "all_reduce" and f["host"] is None] == ["ok"]
    assert other_out == "phalanx doctor: host 1 is done; host 0 (10.77.0.1) prints its findings\n"


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--nnodes", "2"], "2 nodes need --master-addr HOST"),
        (["--nnodes", "2", "--master-addr", "a", "--node-rank", "2"], "--node-rank must lie in [0, 2)"),
        (["--timeout", "0"], "--timeout must be seconds"),
        (["--jsn"], "did you mean --json?"),
    ],
)
def test_a_mistake_shows_the_usage(args, said):
    done = asked(".", "doctor", *args)
    assert (done.returncode, done.stdout) == (2, "")
    assert said in done.stderr
    assert done.stderr.startswith("usage: phalanx doctor ")
    assert done.stderr.count("\n") == 2


def test_help_names_its_flags():
    done = doctor("--help")
    assert done.returncode == 0
    assert all(flag in done.stdout for flag in ("--json", "--timeout", "--no-engines", "--nnodes", "--master-addr"))


def test_the_flags_of_the_job_say_where_this_host_stands():
    role, is_json = read_role([*NODES, "--nproc-per-node", "3", "train.py", "--json"], {})
    assert not is_json  # after the script it is the script's
    assert (role.num_hosts, role.node_rank, role.serves) == (2, 1, False)
    assert (role.master_addr, role.master_port, role.num_local_ranks) == ("10.0.0.1", 29500, 3)


@pytest.mark.parametrize("job", [["train.py", "--lr", "1"], ["-m", "package.train"], ["--no-python", "tool"]])
def test_the_line_of_the_job_may_end_in_its_script_but_in_no_other_word(job):
    assert read_role(job, {})[0].num_hosts == 1
    with pytest.raises(UsageError, match="unexpected argument 'now'"):
        read_role(["--timeout", "3", "now"], {})


def test_a_scheduler_says_where_this_host_stands():
    slurm = {"SLURM_PROCID": "3", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_NUM_NODES": "2"}
    slurm |= {"SLURM_NODEID": "1", "SLURM_LOCALID": "0", "SLURM_STEP_TASKS_PER_NODE": "2(x2)", "SLURM_JOB_ID": "5"}
    slurm |= {"SLURM_STEP_NODELIST": "gpu[03-04]"}
    role, _ = read_role([], slurm)
    assert (role.num_hosts, role.node_rank, role.master_addr, role.serves) == (2, 1, "gpu03", False)
    assert read_role([], {**slurm, "SLURM_LOCALID": "1"}) == (None, False)  # a second task on that node


def test_with_c10d_the_host_of_the_endpoint_is_the_first():
    flags = ["--nnodes", "1:4", "--rdzv-backend", "c10d", "--rdzv-endpoint"]
    assert read_role([*flags, "127.0.0.1:29400"], {})[0].serves
    role, _ = read_role([*flags, "192.0.2.77:29400"], {})
    assert (role.serves, role.is_counted, role.least_hosts, role.num_hosts) == (False, True, 1, 4)


def test_a_flag_of_the_doctor_is_none_of_phalanx_run():
    with pytest.raises(UsageError, match="unknown environment variable PHALANX_TIMEOUT"):
        read_role([], {"PHALANX_TIMEOUT": "3"})


def test_what_is_well_on_all_hosts_is_one_line_and_what_is_not_is_told_of_each():
    def of(host, level, found, topic="memory"):
        return Finding(topic=topic, level=level, found=found, host=host)

    findings = [of(0, "ok", "8 GiB"), of(1, "ok", "9 GiB"), of(2, "ok", "8 GiB"), of(3, "warning", "1 GiB")]
    rows = merged(
        [*findings, of(0, "ok", "eth0", "network"), of(1, "ok", "eth0", "network"), of(None, "ok", "x", "reach")]
    )
    assert [(finding.found, hosts) for finding, hosts in rows] == [
        ("8 GiB (host 0; the others are similar)", "hosts 0-2"),
        ("1 GiB", "host 3"),
        ("eth0", "hosts 0 and 1"),
        ("x", "job"),
    ]
