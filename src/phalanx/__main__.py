"""The command ``phalanx``, and ``python -m phalanx``."""

import signal
import sys

if __name__ == "__main__" and not getattr(sys.flags, "safe_path", False):
    del sys.path[0]  # the current folder: a json.py there belongs to the script, not to us


def main() -> int:
    """Run one subcommand and return the exit code; see `phalanx.cli.main`."""
    on_interrupt = signal.getsignal(signal.SIGINT)
    if on_interrupt is signal.default_int_handler:  # its exception would show an import, or get lost in one
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    if sys.argv[1:2] == ["run"]:
        from phalanx.launch.warm import client

        if client.is_asked_for(sys.argv):
            client.hand_over("run", sys.argv[2:])  # and end as it ends, before anything else is imported
    from phalanx.cli import main

    signal.signal(signal.SIGINT, on_interrupt)
    return main()


if __name__ == "__main__":
    sys.exit(main())
