"""The command ``phalanx``, and ``python -m phalanx``."""

import signal
import sys

if __name__ == "__main__" and not getattr(sys.flags, "safe_path", False):
    del sys.path[0]  # the current folder, in which a json.py of the user's would shadow the standard library's


def main() -> int:
    """Run one subcommand and return the exit code; see `phalanx.cli.main`."""
    on_interrupt = signal.getsignal(signal.SIGINT)
    # a KeyboardInterrupt during an import would print a traceback or get lost
    if on_interrupt is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    if sys.argv[1:2] == ["run"]:
        from phalanx.launch.warm import client

        if client.is_asked_for(sys.argv):
            client.hand_over("run", sys.argv[2:])  # returns only if no warm process accepts the job
    from phalanx.cli import main

    signal.signal(signal.SIGINT, on_interrupt)
    return main()


if __name__ == "__main__":
    sys.exit(main())
