"""GPUs as nvidia-smi tells them, by a program of that name which stands in for it."""

from __future__ import annotations

import contextlib
import time

import pytest

from phalanx.diagnose.top.gpu import Gpu, Gpus, gpus_by_process

ANSWERS = """#!/bin/sh
case "$1" in
  --query-gpu=*) echo "GPU-a, 0, 73, 20000" ;;
  --query-compute-apps=*) echo "71, GPU-a, 12288" ;;
esac
"""


@pytest.fixture
def install(tmp_path, monkeypatch):
    """``install(script)`` puts it where nvidia-smi is looked for."""
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")

    def write(script: str) -> None:
        (tmp_path / "nvidia-smi").write_text(script)
        (tmp_path / "nvidia-smi").chmod(0o755)

    return write


def test_the_gpus_of_a_process_are_those_that_nvidia_smi_names(install):
    install(ANSWERS)
    with contextlib.closing(Gpus()) as gpus:
        assert gpus.of(71) == ()
        gpus.look(wait_s=30)
        assert gpus.of(71) == (Gpu(0, 73.0, 12 << 30),)
        assert gpus.of(72) == ()


def test_a_program_that_does_not_answer_is_not_waited_for_and_ended_with_the_watch(install):
    install("#!/bin/sh\nexec sleep 100\n")
    begun = time.monotonic()
    with contextlib.closing(Gpus()) as gpus:
        gpus.look()
        gpus.look(wait_s=0.1)
        assert gpus.of(71) == ()
    assert time.monotonic() - begun < 20


def test_one_that_fails_names_no_gpu(install):
    install("#!/bin/sh\necho Failed to initialize NVML\nexit 9\n")
    with contextlib.closing(Gpus()) as gpus:
        gpus.look(wait_s=30)
        assert gpus.of(71) == ()


def test_answers_of_nvidia_smi_are_read_and_rubbish_is_skipped():
    cards = "GPU-a, 0, 73, 20000\nGPU-b, 1, [N/A], 0\nFailed to initialize NVML\n"
    processes = "71, GPU-a, 12288\n71, GPU-b, [N/A]\n72, GPU-c, 5\nno, GPU-a, 1\n"
    assert gpus_by_process(cards, processes) == {71: (Gpu(0, 73.0, 12 << 30), Gpu(1, None, None))}
    assert gpus_by_process("", "") == {}
