"""Rates the installed engines and an all_reduce with each; runs the all_reduce over MPI, which needs no torch."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

from phalanx._env import REPLACE_VARIABLE, replaces_gloo
from phalanx._text import counted, in_units, joined, measured, shortened
from phalanx.doctor import mpi_rank
from phalanx.doctor.exercise import SIZE_BYTES
from phalanx.doctor.finding import Finding, note, ok, problem, warning
from phalanx.host.cpus import has_module

_SLOW_IMPORT_S = 10.0
# Prefixes of variables that another launcher may have set for this process; the doctor's own mpirun would obey them.
_FOREIGN = ("OMPI_", "PMI_", "PMIX_", "PRTE_", "SLURM_", "MPI_LOCAL", "HYDI_", "HYDRA_", "I_MPI_")
_ADVICE = {
    "phalanx": "see /dev/shm, shared memory and limits above; the message says which system call failed",
    "gloo": "see GLOO_SOCKET_IFNAME and this host's own name above",
    "nccl": "NCCL_DEBUG=INFO shows what it tries; see NCCL_SOCKET_IFNAME and the GPUs above",
}


def judge_torch(told: Mapping[str, Any] | None, died: str) -> list[Finding]:
    """Rate the import of torch and the installed versions.

    Args:
        told: Facts from the process that imports torch; None if that process sent nothing.
        died: Description of how that process died; empty if it is alive.
    """
    todo = f"{os.path.basename(sys.executable)} -c 'import torch' shows the full error; reinstall torch 2.11 or newer"
    if told is None or "error" in told:
        return [problem("torch", f"import torch: {told['error'] if told else died}", todo)]
    there = [name for name in ("gloo", "nccl", "mpi") if told[name]]
    found = (
        f"torch {told['torch']}, phalanx {told['phalanx']}, Python {told['python']}; engines in torch: "
        f"{', '.join(there) or 'none'}"
    )
    findings = [ok("versions", found, **told)]
    if "backend_error" in told:
        todo = "reinstall phalanx-torch with the pip of this Python"
        findings.append(problem("versions", f"phalanx's backend can't be loaded: {told['backend_error']}", todo))
    if told["import_s"] > _SLOW_IMPORT_S:
        todo = "put the environment on a local disk: every rank not forked by phalanx run waits this long"
        findings.append(note("versions", f"import torch took {measured(told['import_s'])}", todo))
    return findings


def judge_replacement(told: Mapping[str, Any], word: str) -> Finding:
    """Return a finding: whether phalanx replaces Gloo, and what asked for the replacement.

    Args:
        told: Facts from the process that imports torch.
        word: Value of PHALANX_REPLACE.
    """
    origin = told["replaced_by"]
    if origin:
        return ok("gloo", f"phalanx replaces Gloo ({origin}={word})", replaced_by=origin)
    if not word:
        return ok("gloo", f"Gloo itself; {REPLACE_VARIABLE}=gloo replaces it with phalanx", replaced_by="")
    try:
        replaces_gloo(word)
    except ValueError as error:
        found = f"{REPLACE_VARIABLE} {error}, got {word!r}: Gloo is not replaced"
        return problem("gloo", found, f"{REPLACE_VARIABLE}=gloo")
    found = f"{REPLACE_VARIABLE}={word} is set, and torch has not loaded phalanx: Gloo is not replaced"
    return problem("gloo", found, "unset TORCH_DEVICE_BACKEND_AUTOLOAD; see phalanx's line on stderr at import torch")


def judge_engine(result: Mapping[str, Any]) -> Finding:
    """Rate the all_reduce of one engine."""
    engine, size = result["engine"], result.get("world_size", 2)
    if "error" in result:
        return problem("all_reduce", f"{engine} on {size} local ranks: {result['error']}", _ADVICE.get(engine, ""))
    what = f"{engine}: {in_units(SIZE_BYTES)} on {counted(size, 'local rank')} in {measured(result['seconds'])}"
    return ok("all_reduce", what, engine=engine, world_size=size, size_bytes=SIZE_BYTES, seconds=result["seconds"])


def judge_death(died: str, engine: str) -> Finding:
    """Return the finding that the process with torch died while it tried `engine`, which is "" if it tried none."""
    during = f" while {engine} was tried" if engine else ""
    return problem("torch", f"the process that tries the engines{during}: {died}", _ADVICE.get(engine, "see above"))


def judge_gpus(gpus: Mapping[str, Any], versions: Mapping[str, Any], num_seen: int) -> list[Finding]:
    """Compare the GPUs that torch sees with the number of GPUs that the system reports, `num_seen`."""
    devices = gpus.get("devices", [])
    if "error" in gpus:
        return [problem("GPU", f"asking for the GPUs: {gpus['error']}", "nvidia-smi; the driver may hang")]
    if not devices and num_seen and not versions["cuda"]:
        todo = "install a torch for CUDA or ROCm: pytorch.org/get-started"
        return [warning("GPU", f"the system has {num_seen}, and this torch is built for CPUs alone", todo)]
    if not devices and num_seen:
        todo = "nvidia-smi; a driver as new as torch's CUDA, and CUDA_VISIBLE_DEVICES"
        return [warning("GPU", f"the system has {num_seen}, and torch can use none: {gpus.get('reason', '')}", todo)]
    if not devices:
        return [ok("GPU", "none", num_gpus=0)]
    names = ", ".join(f"{one['name']} ({in_units(one['size_bytes'])})" for one in devices)
    return [ok("GPU", f"{names}; NCCL {gpus['nccl'] or 'missing'}", devices=devices, nccl=gpus["nccl"])]


# ---------------------------------------------------------------- MPI


def find_mpirun() -> str | None:
    return shutil.which("mpirun") or shutil.which("mpiexec")


def examine_mpi(environ: Mapping[str, str], deadline_s: float) -> list[Finding]:
    """Run an all_reduce of mpi4py on two ranks under ``mpirun``."""
    mpirun, has_mpi4py = find_mpirun(), has_module("mpi4py")
    if not mpirun or not has_mpi4py:
        missing = joined([*["mpirun"] * (not mpirun), *["mpi4py"] * (not has_mpi4py)])
        return [ok("MPI", f"not tried: no {missing} (needed for training over MPI only)")]
    done = _run([mpirun, "-n", "2", sys.executable, "-m", mpi_rank.__name__], mpi_environment(environ), deadline_s)
    return [judge_mpi(*done, deadline_s=deadline_s)]


def mpi_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment for an ``mpirun`` on this host alone, whichever launcher started this process."""
    ours = {
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "OMPI_MCA_rmaps_base_oversubscribe": "1",  # two ranks even on one core
        "OMPI_MCA_mpi_yield_when_idle": "1",
        "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",  # Open MPI 5
        "OMP_NUM_THREADS": "1",
    }
    return {name: text for name, text in environ.items() if not name.startswith(_FOREIGN)} | ours


def judge_mpi(code: int | None, out: str, err: str, *, deadline_s: float) -> Finding:
    """Rate the all_reduce over MPI.

    Args:
        code: Exit code of ``mpirun``; None if ``mpirun`` was still running at the deadline.
        out: Text that ``mpirun`` wrote to stdout.
        err: Text that ``mpirun`` wrote to stderr.
        deadline_s: Time limit of the run.
    """
    told = [json.loads(line.partition(mpi_rank.TOLD)[2]) for line in out.splitlines() if mpi_rank.TOLD in line]
    if len(told) == 2 and told[0]["size"] == 1:
        return problem(
            "MPI",
            f"mpirun's two ranks are each a world of one: mpi4py is built for another MPI ({told[0]['library']})",
            "pip install --force-reinstall --no-binary=mpi4py mpi4py, with this mpirun's mpicc on the PATH",
        )
    if code is None:
        return problem("MPI", f"mpirun -n 2 did not end within {deadline_s:g} s", "mpirun -n 2 hostname; see own name")
    if code or len(told) != 1:
        lines = [line.strip(" -*") for line in err.splitlines() if line.strip(" -*")]
        todo = "mpirun -n 2 python -c 'from mpi4py import MPI' shows the full error"
        return problem("MPI", f"mpirun -n 2 ended with exit code {code}: {shortened(' '.join(lines), 200)}", todo)
    if not told[0]["is_right"]:
        return problem("MPI", f"a wrong sum from {told[0]['library']}", "another version of it")
    seconds = told[0]["seconds"]
    what = f"mpi: {in_units(SIZE_BYTES)} on 2 local ranks in {measured(seconds)} ({told[0]['library']})"
    return ok("all_reduce", what, engine="mpi", world_size=2, size_bytes=SIZE_BYTES, seconds=seconds)


def _run(command: list[str], environ: dict[str, str], deadline_s: float) -> tuple[int | None, str, str]:
    with subprocess.Popen(
        command,
        env=environ,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
    ) as process:
        try:
            out, err = process.communicate(timeout=deadline_s)
        except subprocess.TimeoutExpired:
            process.terminate()  # mpirun then ends its ranks
            try:
                out, err = process.communicate(timeout=2)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                out, err = process.communicate()
            return None, out, err
        return process.returncode, out, err
