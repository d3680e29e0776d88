"""``python -m phalanx``: the same as the command ``phalanx``."""

import sys

if not getattr(sys.flags, "safe_path", False):
    del sys.path[0]  # the current folder: a json.py that lies there is the script's, not ours

from phalanx.cli import main

if __name__ == "__main__":
    sys.exit(main())
