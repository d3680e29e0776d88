"""``python -m phalanx.testing.fuzz``."""

import sys

from phalanx.testing.fuzz.command import main

if __name__ == "__main__":
    sys.exit(main())
