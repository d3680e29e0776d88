"""A second warden, prepared while the ranks run: it has imported what their script imports, so a restart is quick.

The first one knows nothing of the script. Once the ranks train, rank 0 tells which modules of the standard library and
of installed packages they have; the next attempt is forked from a process that has them too.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import sys
import sysconfig
from collections.abc import Mapping

from phalanx import _env
from phalanx.launch.job import Job
from phalanx.launch.output import Screen
from phalanx.launch.ranks import Output
from phalanx.launch.warden_client import Warden

_NAME = "modules.json"


@dataclasses.dataclass
class Standby:
    """A warden that gets ready, with all that the supervisor needs to make it the one that it uses.

    Attributes:
        environ: Of its ranks.
        log: File that says how it went.
        is_ready: It may be used: it has imported everything, and its forks can go on as ranks.
    """

    warden: Warden
    output: Output
    environ: Mapping[str, str]
    log: str
    is_ready: bool = False
    is_useless: bool = False

    @classmethod
    def start(
        cls,
        job: Job,
        environ: Mapping[str, str],
        rank_folder: str,
        screen: Screen,
        log: str,
        descriptors: tuple[int, int],
    ) -> Standby:
        """Start one that imports what the rank of that folder has noted."""
        output = Output(screen, b"", log, live=False, shown=False)  # what an import says, the ranks have said
        warden = Warden(
            job.command,
            environ,
            preload=True,
            output_fd=output.rank_fd,
            descriptors=descriptors,
            modules_file=os.path.abspath(os.path.join(rank_folder, _NAME)),
        )
        output.hand_over()
        return cls(warden, output, environ, log)

    def hear(self) -> None:
        """Take in what the warden says."""
        for packet in self.warden.channel.receive():
            self.is_ready = packet.get("can_go_on", False)
            self.is_useless = not self.is_ready
            with contextlib.suppress(OSError), open(self.log, "a") as file:
                file.write(f"{'ready' if self.is_ready else 'of no use'}: {packet}\n")


def is_noted(rank_folder: str) -> bool:
    """Whether the rank of that folder has noted its modules."""
    return os.path.exists(os.path.join(rank_folder, _NAME))


def note_modules() -> None:
    """Tell the supervisor which installed modules this rank has imported; called once it trains.

    Nothing happens outside ``phalanx run``, or when no restart is allowed.
    """
    environ = _env.environment()
    folder = os.path.dirname(environ.get("TORCHELASTIC_ERROR_FILE", ""))
    if environ.get("LOCAL_RANK") != "0" or not environ.get(_env.SNAPSHOT_VARIABLE) or not os.path.isdir(folder):
        return
    places = tuple({sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib")})
    names = []
    for name, module in list(sys.modules.items()):
        spec = getattr(module, "__spec__", None)
        is_ours = name.partition(".")[0] == "phalanx"  # knows which rank and which attempt it is in
        if spec is not None and spec.name == name and str(spec.origin).startswith(places) and not is_ours:
            names.append(name)
    path = os.path.join(folder, _NAME)
    with contextlib.suppress(OSError):  # a full disk: restarts are slower
        with open(f"{path}.part", "w") as file:
            json.dump(names, file)
        os.rename(f"{path}.part", path)
