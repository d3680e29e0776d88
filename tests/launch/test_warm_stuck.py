"""Warm processes that are stopped, stuck, dead or short of something: the job runs all the same, and holds nothing."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest

from tests.launch.jobs import LIMIT_S
from tests.launch.test_orphans import ends
from tests.launch.warm_jobs import HELLO, servers, sockets


@pytest.mark.slow
def test_the_warm_process_may_end_once_it_has_said_go(warm):
    environ = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    warm(HELLO, env=environ)
    (there,) = servers()
    program = f"""if True:
        import os, signal, sys
        from phalanx.launch.warm import client
        from phalanx.wire.packets import PacketSocket
        from tests.launch.test_orphans import ends

        def send(channel, packet, fds=(), send=PacketSocket.send):
            if packet == "files":
                os.kill({there}, signal.SIGKILL)
                assert ends({there})
            return send(channel, packet, fds)

        PacketSocket.send = send
        print(client.hand_over("run", sys.argv[1:]))
    """
    words = warm.command(HELLO)
    command = [sys.executable, "-c", program, *words[words.index("run") + 1 :]]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, env=environ)
    assert (done.returncode, done.stdout) == (0, "[rank 0] hello 0\n")


@pytest.mark.slow
def test_a_stopped_process_gets_no_job_and_no_descriptor(warm):
    warm(HELLO)
    (stopped,) = servers()
    os.kill(stopped, signal.SIGSTOP)
    given_up = subprocess.Popen(warm.command(HELLO), stdout=subprocess.PIPE)
    time.sleep(1.0)
    given_up.kill()
    assert given_up.communicate(timeout=LIMIT_S) == (b"", None)  # nobody else holds the pipe
    done = warm(HELLO)
    assert done.stdout == "[rank 0] hello 0\n"
    assert f"phalanx: the warm process {stopped} does not answer; it gets no more jobs\n" in done.stderr
    assert stopped in servers()
    assert len(servers()) == 2
    os.kill(stopped, signal.SIGCONT)
    assert ends(stopped)


def test_list_and_stop_do_not_wait_for_a_stopped_process(warm):
    warm(HELLO)
    (stopped,) = servers()
    os.kill(stopped, signal.SIGSTOP)
    (_, listed) = warm.phalanx("warm", "--list").stdout.splitlines()
    assert listed.split() == [str(stopped), "-", "-", "-", "-", "does", "not", "answer"]
    assert warm.phalanx("warm", "--stop").stdout == f"ended pid {stopped}\n"
    assert ends(stopped)
    assert sockets() == []


def test_a_mute_socket_holds_nobody_up(warm):
    folder = Path(os.environ["XDG_RUNTIME_DIR"], "phalanx")
    folder.mkdir(mode=0o700)
    path = folder / "1.sock"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as mute:
        mute.bind(str(path))
        mute.listen(0)
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as other:
            other.connect(str(path))
            warm.phalanx("warm", "--list")
            assert not path.exists()
            assert warm(HELLO).stdout == "[rank 0] hello 0\n"
            assert len(servers()) == 1


def test_a_mute_socket_that_takes_connections_holds_nobody_up(warm):
    folder = Path(os.environ["XDG_RUNTIME_DIR"], "phalanx")
    folder.mkdir(mode=0o700)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as mute:
        mute.bind(str(folder / "1.sock"))
        mute.listen(5)
        done = warm(HELLO)
    assert done.stdout == "[rank 0] hello 0\n"
    assert f"phalanx: the warm process {os.getpid()} does not answer; it gets no more jobs\n" in done.stderr
    assert len(servers()) == 1


@pytest.mark.parametrize("flag", ["--list", "--stop"])
def test_a_process_that_was_killed_is_not_reported_as_living(warm, flag):
    warm(HELLO)
    (pid,) = servers()
    os.kill(pid, signal.SIGKILL)
    assert ends(pid)
    assert warm.phalanx("warm", flag).stdout == "no warm process\n"
    assert sockets() == []


def test_a_process_that_imports_for_ever_can_be_ended(warm, tmp_path):
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "torch.py").write_text("import time; time.sleep(1000)")
    environ = {**os.environ, "PYTHONPATH": str(tmp_path / "own")}
    with subprocess.Popen(warm.command(HELLO), env=environ, stderr=subprocess.DEVNULL) as job:
        while not (pids := servers()):
            time.sleep(0.05)
        (_, listed) = warm.phalanx("warm", "--list").stdout.splitlines()
        assert listed.split() == [str(pids[0]), "-", "-", "-", "-", "still", "importing"]
        assert warm.phalanx("warm", "--stop").stdout == f"ended pid {pids[0]}\n"
        assert ends(pids[0])
        job.kill()


def test_an_import_that_prints_megabytes_ends(warm):
    environ = {**os.environ, "LD_DEBUG": "bindings"}
    with open(os.devnull, "w") as null:
        done = subprocess.run(  # the loader prints each symbol that it binds, in every process of the job
            warm.command(HELLO), env=environ, stdout=subprocess.PIPE, stderr=null, text=True, timeout=LIMIT_S
        )
    assert done.returncode == 0
    assert "[rank 0] hello 0\n" in done.stdout
    assert len(servers()) == 1


def test_a_job_that_can_not_begin_says_why(warm):
    program = """if True:
        import sys
        from phalanx.launch.warm import client
        from phalanx.wire.packets import PacketSocket

        def send(channel, packet, fds=(), send=PacketSocket.send):
            if isinstance(packet, dict):
                packet["fds"] = [1 << 30]  # a number that no descriptor can have
            return send(channel, packet, fds)

        PacketSocket.send = send
        print(client.hand_over("run", sys.argv[1:]))
    """
    environ = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    warm(HELLO, env=environ)
    words = warm.command(HELLO)
    command = [sys.executable, "-c", program, *words[words.index("run") + 1 :]]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, env=environ)
    assert done.stdout == """["can't start the job: [Errno 22] Invalid argument"]\n"""
    assert len(servers()) == 1


def test_an_environment_that_is_too_large_for_a_packet_starts_no_process(warm):
    environ = {**os.environ, **{f"LARGE_{number}": "x" * 100_000 for number in range(12)}}
    done = warm(HELLO, env=environ)
    assert done.stdout == "[rank 0] hello 0\n"
    why = "the environment, the arguments and the open files can't be passed on: Message too long"
    assert f"phalanx run: no warm start: {why}\n" in done.stderr
    assert servers() == []


def test_more_open_files_than_a_packet_takes_are_passed_on(warm):
    fds = [os.open(__file__, os.O_RDONLY) for _ in range(300)]
    try:
        done = warm(f"import os; print(all(os.path.samefile(f'/proc/self/fd/{{fd}}', {__file__!r}) for fd in {fds}))",
                    pass_fds=fds)  # fmt: skip
    finally:
        for fd in fds:
            os.close(fd)
    assert done.stdout == "[rank 0] True\n"
    assert len(servers()) == 1


@pytest.mark.slow
def test_a_zip_on_the_path_that_was_rewritten_is_read_anew(warm, tmp_path):
    environ = {**os.environ, "PYTHONPATH": str(tmp_path / "own.zip")}
    for number in range(2):
        with zipfile.ZipFile(tmp_path / "own.zip", "w") as archive:
            archive.writestr("padding.py", "#" * 100 * number)
            archive.writestr("own.py", f"number = {number}")
        assert warm("import own; print(own.number)", env=environ).stdout == f"[rank 0] {number}\n"
    assert len(servers()) == 1
