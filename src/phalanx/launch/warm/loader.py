"""The program that the site hook runs in a warm process: imports what ranks share, then the code of the server."""

from __future__ import annotations

import gc
import json
import os
import sys
from collections.abc import Collection

from phalanx import _env
from phalanx.launch.processes.ahead import Imports
from phalanx.launch.processes.forker import SETTINGS_VARIABLE, import_shared


def serve_warm(loaded_before: Collection[str]) -> None:
    """Serve jobs; return only in their ranks, each of which then runs its script.

    Args:
        loaded_before: Modules that Python itself loads when it starts.
    """
    place = _env.take(_env.WARM_SERVER_VARIABLE)
    settings = json.loads(_env.take(SETTINGS_VARIABLE))
    environ = {**_env.environment(), **settings}
    imports = Imports()
    try:
        gc.disable()  # imports leave little garbage
        trouble = import_shared(imports, settings)
        shared = frozenset(name for name in sys.modules if not f"{name}.".startswith(f"{__package__}."))
        from phalanx.launch.processes.pages import share_pages
        from phalanx.launch.warm.server import WarmServer

        server = WarmServer(place, environ, imports, loaded_before, shared, trouble)
        share_pages()
        gc.enable()
        server.serve()
    except BaseException as error:  # Python's site module would ignore the error and run a script
        print(f"the warm process failed: {error!r}", file=sys.stderr, flush=True)
        os._exit(1)
