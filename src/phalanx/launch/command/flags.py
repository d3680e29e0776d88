"""The flags of ``phalanx run``, declared once.

Names and meanings are torchrun's, except for the last group, which torchrun lacks. Each flag can also be set in the
environment: ``--max-restarts`` by ``PHALANX_MAX_RESTARTS``, or by torchrun's ``PET_MAX_RESTARTS``. If both are set,
ours counts.

Source of the names: ``torch/distributed/run.py`` and ``torch/distributed/launch.py``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from phalanx._env import REPLACE_VARIABLE
from phalanx.host.block_pool import CHOICES
from phalanx.launch.command import flag_values as parse


@dataclasses.dataclass(frozen=True)
class Flag:
    """Flag of a command; without a `placeholder` it is a switch."""

    name: str
    help: str
    parse: Callable[[str], Any]
    placeholder: str = ""
    default: str = ""
    short: str = ""
    variable: str = ""

    @property
    def variables(self) -> tuple[str, ...]:
        """Environment variables of the flag, ours first."""
        if self.variable:
            return (self.variable,)
        word = self.name.upper().replace("-", "_")
        return f"PHALANX_{word}", f"PET_{word}"


@dataclasses.dataclass(frozen=True)
class Setting:
    """Value of a flag and its origin: ``--nnodes``, ``PET_NNODES``, ``Slurm`` or ``default``."""

    value: Any
    origin: str

    @property
    def is_given(self) -> bool:
        return self.origin != "default"


GROUPS: Mapping[str, tuple[Flag, ...]] = {
    "Ranks": (
        Flag(
            "nproc-per-node",
            "number of ranks on this node. auto: one per GPU, or without GPUs one per physical core or CPU of the "
            "cgroup's quota; cpu: one per CPU; gpu: one per GPU; MIN:MAX: MAX, or fewer after a failure if some ranks "
            "can't be restarted; on several nodes each has its own",
            parse.num_ranks,
            "N|MIN:MAX",
            "auto",
        ),
        Flag(
            "max-restarts", "number of times that all ranks are restarted after a failure", parse.at_least_0, "N", "0"
        ),
        Flag("module", "run a module, as python -m does", parse.switch, short="-m"),
        Flag("no-python", "run a program instead of a Python script", parse.switch),
        Flag("no-use-env", "pass --local-rank=N to the script, as torch.distributed.launch did", parse.switch),
        Flag("use-env", "let the script read LOCAL_RANK from the environment, which is the default", parse.switch),
        Flag("role", "role of the ranks, which they find in ROLE_NAME", str, "NAME", "default"),
        Flag(
            "start-method",
            "accepted without effect, since torchrun uses it for functions, not for scripts",
            parse.choice("spawn", "fork", "forkserver"),
            "NAME",
            "spawn",
        ),
    ),
    "Several nodes": (
        Flag("nnodes", "number of nodes, or the smallest and the largest number", parse.nodes, "N|MIN:MAX", "1:1"),
        Flag("node-rank", "number of this node, for the static rendezvous", parse.at_least_0, "N", "0"),
        Flag(
            "master-addr",
            "host of node 0; or hosts where nodes look for the job, in this order: HOST,HOST",
            parse.hosts,
            "HOST",
            "127.0.0.1",
        ),
        Flag(
            "master-port",
            "port on node 0 (default: a free one; with several nodes 29500)",
            parse.port_or_nothing,
            "PORT",
        ),
        Flag("local-addr", "address of this node (default: found automatically)", str, "HOST"),
        Flag("standalone", "run on this node only, whatever the environment says", parse.switch),
        Flag(
            "rdzv-backend", "rendezvous of the nodes: static or c10d", parse.choice("static", "c10d"), "NAME", "static"
        ),
        Flag(
            "rdzv-endpoint",
            "address of the rendezvous, or several in order: HOST:PORT,HOST:PORT (default: that of node 0)",
            parse.hosts,
            "HOST:PORT",
        ),
        Flag("rdzv-id", "name of the job, the same on all nodes", str, "NAME", "none"),
        Flag(
            "rdzv-conf",
            "further settings of the rendezvous, as torch's: last_call_timeout, join_timeout, is_host, "
            "keep_alive_interval, keep_alive_max_attempt",
            parse.rendezvous_settings,
            "KEY=VALUE,...",
        ),
        Flag(
            "monitor-interval",
            "accepted without effect: phalanx is notified, it does not poll",
            parse.seconds,
            "SECONDS",
            "0.1",
        ),
    ),
    "Output": (
        Flag("log-dir", "folder in which the run's folder is made (default: logs/<script>)", str, "FOLDER"),
        Flag(
            "redirects",
            "streams to hide from the screen: 1 stdout, 2 stderr, 3 both; of all local ranks, or of some (0:1,1:3). "
            "The logs have them in any case",
            parse.streams,
            "STREAMS",
            "0",
            "-r",
        ),
        Flag("tee", "streams to show even if they are redirected", parse.streams, "STREAMS", "0", "-t"),
        Flag("local-ranks-filter", "local ranks whose output is shown (default: all)", parse.local_ranks, "N,N"),
    ),
    "Ending": (
        Flag(
            "signals-to-handle",
            "signals to pass on to the ranks; SIGUSR1 and SIGUSR2 do not end the job",
            parse.signals,
            "NAMES",
            "SIGTERM,SIGINT,SIGHUP,SIGQUIT",
        ),
        Flag("shutdown-timeout", "seconds between SIGTERM and SIGKILL", parse.seconds, "SECONDS", "30"),
    ),
    "Beyond torchrun": (
        Flag(
            "replace-gloo",
            "run groups that ask for gloo, or for torch's CPU default, on phalanx, like PHALANX_REPLACE=gloo",
            parse.gloo,
            variable=REPLACE_VARIABLE,
        ),
        Flag(
            "verify",
            "repeat phalanx's operations on Gloo and compare, like PHALANX_VERIFY; gloo:K: every K-th",
            parse.verification,
            "gloo[:K]",
        ),
        Flag(
            "drain",
            "on several nodes: SIGTERM takes this one out of the job after the next snapshot, and the others continue",
            parse.switch,
        ),
        Flag(
            "no-keep",
            "with --max-restarts: restart every rank in a new process, even those that could continue in theirs",
            parse.switch,
        ),
        Flag(
            "drain-file",
            "as --drain, and this node also leaves when the file appears, or is touched if it was there before",
            str,
            "FILE",
        ),
        Flag(
            "drain-url",
            "as --drain, and this node also leaves when the address answers 200; aws, gcp and azure stand for the "
            "notices of these providers",
            parse.notice_url,
            "URL|aws|gcp|azure",
        ),
        Flag(
            "spares",
            "number of nodes beyond the maximum of --nnodes that wait to replace a lost node",
            parse.at_least_0,
            "N",
            "0",
        ),
        Flag(
            "replicas",
            "on several nodes: number of other nodes that keep a copy of each node's part of a sharded state; as many "
            "nodes can be lost at once without going back to disk; 0: none",
            parse.at_least_0,
            "N",
            "1",
        ),
        Flag(
            "host-label",
            "failure domain of this node, such as its rack: replicas go to nodes with another label if there are any",
            str,
            "NAME",
        ),
        Flag("no-preload", "import torch in each rank, instead of once for all", parse.switch),
        Flag(
            "warm",
            "fork the job from a process that has imported torch and stays for the next job; one is started if none "
            "fits (see phalanx warm)",
            parse.switch,
        ),
        Flag("warm-for", "seconds for which that process stays after its last job", parse.seconds, "SECONDS", "600"),
        Flag("no-pin", "let ranks run on any CPU", parse.switch),
        Flag(
            "memory",
            "what to do with memory that a rank frees. auto: kept for the next step, in huge pages, while memory is "
            "plentiful; default: as the C library does it",
            parse.choice(*CHOICES),
            "auto|default",
            "auto",
        ),
        Flag(
            "regrow-after",
            "seconds with fewer than MAX ranks on a node after which the job restarts with MAX, at the next snapshot; "
            "0: never",
            parse.seconds,
            "SECONDS",
            "60",
        ),
        Flag(
            "metrics",
            "serve the metrics of this node's ranks to Prometheus, on loopback unless HOST says otherwise; 0: on a "
            "free port",
            parse.address_or_nothing,
            "[HOST:]PORT",
        ),
        Flag("dry-run", "print what would be done, and where each value comes from", parse.switch),
    ),
}

FLAGS = {flag.name: flag for group in GROUPS.values() for flag in group}
