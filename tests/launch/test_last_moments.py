"""Once all ranks have ended, no signal changes what the job's end was."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import time

import pytest

from phalanx.launch.processes import forker
from phalanx.wire.packets import PacketSocket
from tests.launch.jobs import LIMIT_S, PHALANX_RUN, write_script

pytestmark = pytest.mark.usefixtures("warm_jobs")

STORM = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGQUIT)


def storm_at_the_end(folder, code, *flags, signals=STORM):
    """Run a job; send `signals` again and again from the end of its ranks on; return its exit code and stderr."""
    source = f"print(os.getpid(), flush=True)\nsys.stdin.readline()\nos._exit({code})"
    command = [*PHALANX_RUN, "--nproc-per-node", "1", "--no-preload", *flags, write_script(folder, source)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, cwd=folder, **pipes) as job:
        pidfd = os.pidfd_open(int(job.stdout.readline().split()[-1]))
        job.stdin.close()
        ended = select.select([pidfd], [], [], LIMIT_S)[0]
        os.close(pidfd)
        assert ended
        while job.poll() is None:
            for sig in signals:
                job.send_signal(sig)
        return job.returncode, job.stderr.read().decode()


@pytest.mark.parametrize("code", [0, 3, 75])
def test_a_storm_of_signals_after_the_end_of_the_ranks_changes_no_exit_code(tmp_path, code):
    for _ in range(3):
        ended, err = storm_at_the_end(tmp_path, code)
        assert ended == code, err
        assert "Traceback" not in err


def test_a_signal_between_attempts_ends_the_job(tmp_path):
    code, err = storm_at_the_end(tmp_path, 3, "--max-restarts", "1000", signals=[signal.SIGTERM])
    assert code == 128 + signal.SIGTERM, err
    assert "SIGTERM: the ranks are not started again" in err or "SIGTERM: ending 1 rank" in err


def test_a_rank_begins_once_its_supervisor_has_been_told_of_it():
    """Else a rank that ends at once is taken for one that runs, by whoever asks before its forker has spoken."""
    order, write = os.pipe()
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if (pid := os.fork()) == 0:
        send = PacketSocket.send

        def send_late(channel, packet):
            if "started" in packet:
                time.sleep(0.1)  # the forker has no CPU
                os.write(write, b"told ")
            send(channel, packet)

        PacketSocket.send = send_late
        ours.close()
        forker.serve(theirs, lambda packet: (os.write(write, b"begun"), os._exit(0)))
    theirs.close()
    streams = [os.open(os.devnull, os.O_RDWR) for _ in range(3)]
    start = {"start": 0, "environ": {}, "cpus": [], "argument": "", "descriptors": [1024, 1024]}
    socket.send_fds(ours, [json.dumps(start).encode()], streams)
    for fd in (write, *streams):
        os.close(fd)
    packets = [json.loads(ours.recv(1 << 16)) for _ in range(3)]
    assert [next(iter(packet)) for packet in packets] == ["ready", "started", "ended"]
    ours.close()
    assert os.waitpid(pid, 0)[1] == 0
    assert os.read(order, 100) == b"told begun"
    os.close(order)
