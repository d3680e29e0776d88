"""Ranks that save until they are killed."""

from __future__ import annotations

import os
import random
import time

import torch

import phalanx.checkpoint as ckpt
from phalanx.testing import reached, spawn_ranks

LIMIT_S = 60


def save_for_ever(rank, world_size, folder):
    """Save every step of a state that is the same number everywhere; the file `done` tells how far."""
    state = {"x": torch.zeros(500_000), "mine": torch.zeros(10), "step": 0}
    found = ckpt.load(folder, state)
    first = found.step + 1 if found else 1
    if found:
        assert state["x"].eq(found.step).all()
        assert state["mine"].eq(found.step + rank / 2).all()
        assert state["step"] == found.step
    done = os.open(f"{os.path.dirname(folder)}/done-{rank}", os.O_WRONLY | os.O_CREAT)
    reached("loaded", found.step if found else 0)
    for step in range(first, 1_000_000):
        state["x"].fill_(step)
        state["mine"].fill_(step + rank / 2)
        state["step"] = step
        ckpt.save(folder, state, step, keep={"keep_last": 3})
        os.pwrite(done, b"%8d" % step, 0)


def kill_savers(folder, num_kills, seed):
    """Kill all ranks at random moments, each time going on from the newest; return how many steps were lost by each."""
    rng = random.Random(seed)
    lost = []
    saved = 0
    for number in range(num_kills + 1):
        with spawn_ranks(save_for_ever, 2, str(folder / "c")) as ranks:
            loaded = ranks.wait_until_reached("loaded")
            assert len(set(loaded)) == 1
            if number:
                lost.append(saved - loaded[0])
                assert loaded[0] >= saved - 1, f"seed {seed}, kill {number}: {loaded[0]} loaded, {saved} was saved"
            time.sleep(rng.random() * 0.15)  # the moment is what is random here
            for rank in range(2):
                ranks.kill(rank)
            ranks.join(LIMIT_S)
        saved = max(int(path.read_bytes() or 0) for path in folder.glob("done-*"))
        parts = [name for name in os.listdir(folder / "c") if name.startswith(".")] if (folder / "c").exists() else []
        assert len(parts) <= 2, parts  # one on its way, one being removed: what was there before is swept
    return lost
