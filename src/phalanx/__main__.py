"""The command ``phalanx``, and ``python -m phalanx``."""

import signal
import sys

if __name__ == "__main__" and not getattr(sys.flags, "safe_path", False):
    del sys.path[0]  # the current folder: a json.py that lies there is the script's, not ours


def main() -> int:
    """Run one subcommand and return the exit code; see `phalanx.cli.main`."""
    on_interrupt = signal.getsignal(signal.SIGINT)
    if on_interrupt is signal.default_int_handler:  # whose exception shows where an import stood, or is lost in one
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from phalanx.cli import main

    signal.signal(signal.SIGINT, on_interrupt)
    return main()


if __name__ == "__main__":
    sys.exit(main())
