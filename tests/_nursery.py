"""Started by `tests.forked`: imports what programs of tests import, and forks one for each that is asked for."""

import json
import os
import select
import socket
import sys

import sympy  # noqa: F401 torch._dynamo, which a program may want, imports it for half a second
import torch.distributed

import phalanx.backend.groups
import phalanx.session.session  # noqa: F401
from phalanx._plugin import autoload
from phalanx.launch.processes.pages import share_pages


def become_a_program(channel):
    """Fork programs until the tests end; return the code of one, as that program."""
    channel.send(json.dumps([os.getpid(), None]).encode())
    running = {}
    while True:
        ready, _, _ = select.select([channel, *running], [], [])
        for ended in running.keys() & ready:
            _, status = os.waitpid(running[ended], 0)
            channel.send(json.dumps([running.pop(ended), os.waitstatus_to_exitcode(status)]).encode())
            os.close(ended)
        if channel not in ready:
            continue
        message, fds, _, _ = socket.recv_fds(channel, 1 << 20, 3)
        if not message:
            os._exit(0)
        child = os.fork()
        if child == 0:
            for own in running:
                os.close(own)
            channel.close()
            return _settle(json.loads(message), fds)
        for fd in fds:
            os.close(fd)
        running[os.pidfd_open(child)] = child
        channel.send(json.dumps([child, None]).encode())


def _settle(asked, fds):
    for number, fd in enumerate(fds):
        os.dup2(fd, number)
        os.close(fd)
    before = os.environ.get("PYTHONPATH")
    os.environ.clear()
    os.environ.update(asked["environ"])
    os.chdir(asked["folder"])
    sys.dont_write_bytecode = bool(os.environ.get("PYTHONDONTWRITEBYTECODE"))
    if (path := os.environ.get("PYTHONPATH")) and path != before:
        sys.path[1:1] = path.split(os.pathsep)
    first, *rest = asked["args"]
    if first == "-c":
        source, *rest = rest
        name, sys.path[0] = "<string>", ""
    elif first == "-m":
        module, *rest = rest
        name, sys.path[0] = "<string>", asked["folder"]
        source = f"import runpy; runpy._run_module_as_main({module!r})"
    else:
        name, sys.path[0] = first, os.path.dirname(first)
        with open(first) as script:
            source = script.read()
        globals()["__file__"] = first
    sys.argv = [first, *rest]
    sys.orig_argv = [sys.executable, *asked["args"]]
    autoload()  # as torch does at the end of its import
    return compile(source, name, "exec", dont_inherit=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    share_pages()
    exec(become_a_program(socket.socket(fileno=int(sys.argv[1]))))
