"""Accelerate's usual loop, in processes that Accelerate forks."""

import os
import runpy

from accelerate import debug_launcher


def train():
    runpy.run_path(os.path.join(os.path.dirname(__file__), "with_accelerate.py"))


if __name__ == "__main__":
    debug_launcher(train, num_processes=2)
