"""``python -m tests.libraries.foreign CHECKOUTS [WORD ...]``: other people's tests, on Gloo and in its place.

CHECKOUTS is a folder that has ``ignite`` and ``pytorch-lightning`` in it, of `VERSIONS`, as their authors publish them.
Beside phalanx, it takes their packages, pytest with pytest-xdist, pytest-timeout and pytest-rerunfailures,
scikit-learn, torchvision and psutil. A WORD picks the programs whose names have it. Each runs twice: as it is, and with
PHALANX_REPLACE=gloo. The output of both is kept in ``CHECKOUTS/results``; the exit code is 1 if a test is lost.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import psutil

VERSIONS = {"accelerate": "1.15.0", "ignite": "0.5.5", "lightning": "2.6.5"}
"""Releases with which the list in the guide was made."""
_LIMIT_S = 300
_IGNITE = """
    distributed/test_auto.py distributed/utils/test_native.py engine/test_custom_events.py engine/test_deterministic.py
    engine/test_engine.py handlers/test_checkpoint.py handlers/test_ema_handler.py metrics/test_accumulation.py
    metrics/test_confusion_matrix.py metrics/test_loss.py metrics/test_metric.py
"""
_LIGHTNING = """
    tests_fabric/plugins/precision/test_amp_integration.py tests_fabric/strategies/test_ddp_integration.py
    tests_fabric/strategies/launchers/test_multiprocessing_integration.py tests_fabric/utilities/test_distributed.py
    tests_pytorch/callbacks/test_stochastic_weight_avg.py tests_pytorch/strategies/launchers/test_multiprocessing.py
    tests_pytorch/strategies/test_ddp_integration.py tests_pytorch/trainer/flags/test_overfit_batches.py
    tests_pytorch/trainer/logging_/test_distributed_logging.py tests_pytorch/trainer/properties/test_get_model.py
"""
_ACCELERATE = "test_cli test_distributed_data_loop test_ops test_script test_sync"


class Program(NamedTuple):
    """Somebody's program: its command, the folder that it runs in, and what is set for it."""

    name: str
    command: list[str]
    folder: Path
    environ: Mapping[str, str]


class Ending(NamedTuple):
    """How a program ended: its exit code, None where it hung; and how each of its tests did, if it has any."""

    code: int | None
    tests: Counter[tuple[str, str]]

    def __str__(self) -> str:
        counted = Counter(how for how, _ in self.tests.elements())
        said = ", ".join(f"{counted[how]} {how.lower()}" for how in sorted(counted))
        return said or ("hangs" if self.code is None else f"exit code {self.code}")


def programs(checkouts: Path) -> Iterator[Program]:
    """Yield all programs."""
    on_two = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m"]
    for name in _ACCELERATE.split():
        command = [*on_two, f"accelerate.test_utils.scripts.{name}"]
        yield Program(f"accelerate {name}", command, checkouts, {"ACCELERATE_USE_CPU": "true"})
    pytest = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-rA", "-q", "--tb=line", "--color=no"]
    each = [*pytest, "--dist=each", "--tx", f"2*popen//python={sys.executable}", "-m", "distributed"]
    for path in _IGNITE.split():
        yield Program(f"ignite {path}", [*each, f"tests/ignite/{path}"], checkouts / "ignite", {"WORLD_SIZE": "2"})
    for path in _LIGHTNING.split():
        suite, _, file = path.partition("/")
        folder = checkouts / "pytorch-lightning" / "tests" / suite
        yield Program(f"lightning {path}", [*pytest, "-W", "ignore", "--timeout", "120", file], folder, {})


def run(program: Program, added: Mapping[str, str], log: Path) -> Ending:
    """Run a program, with its output in a file."""
    ours = {name: value for name, value in os.environ.items() if not name.startswith("PHALANX_")}
    environ = {**ours, "OMP_NUM_THREADS": "1", **program.environ, **added}
    with log.open("w") as output:
        process = subprocess.Popen(
            program.command, cwd=program.folder, env=environ, stdout=output, stderr=subprocess.STDOUT
        )
        code: int | None = None
        try:
            code = process.wait(_LIMIT_S)
        except subprocess.TimeoutExpired:
            for one in [*psutil.Process(process.pid).children(recursive=True), process]:
                one.kill()
            process.wait()
    found = re.findall(r"^(PASSED|FAILED|ERROR) (\S+)", log.read_text(errors="replace"), re.MULTILINE)
    return Ending(code, Counter(found))


def main() -> None:
    """Run what was asked for, and print a line for each program."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("checkouts", type=Path)
    parser.add_argument("words", nargs="*", metavar="word")
    asked = parser.parse_args()
    checkouts = asked.checkouts.resolve()
    (checkouts / "results").mkdir(exist_ok=True)
    num_lost = 0
    for program in programs(checkouts):
        if asked.words and not any(word in program.name for word in asked.words):
            continue
        log = checkouts / "results" / re.sub(r"\W+", "_", program.name)
        gloo = run(program, {}, log.with_suffix(".gloo.txt"))
        ours = run(program, {"PHALANX_REPLACE": "gloo"}, log.with_suffix(".replaced.txt"))
        lost = {name for how, name in gloo.tests - ours.tests if how == "PASSED"}
        is_lost = bool(lost) or (gloo.code == 0 and ours.code != 0)
        num_lost += is_lost
        print(
            f"{'LOST' if is_lost else 'kept'}  {program.name}: Gloo {gloo}; replaced {ours}", *sorted(lost), flush=True
        )
    sys.exit(1 if num_lost else 0)


if __name__ == "__main__":
    main()
