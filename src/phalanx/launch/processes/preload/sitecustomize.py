"""The forker's program: ``phalanx run`` puts this folder first on PYTHONPATH, and starts Python on the user's script.

Python imports this module when it starts, before it opens the script. The module imports torch once, and the process
stays here as the forker. Each rank is a fork that returns from :func:`serve_preloaded` and continues as ``python
script.py`` would: the interpreter itself runs the script, so ``__main__``, ``sys.argv``, ``sys.path`` and tracebacks
are those of a normal start. A warm process stays here, too: it was started without a user's script, and waits for jobs.
"""

import os
import sys

_LOADED_BEFORE = frozenset(sys.modules)
_HERE = os.path.dirname(os.path.abspath(__file__))
_PACKAGES = os.path.abspath(os.path.join(_HERE, *[".."] * 4))

# From here on, this folder must look as if it had never been on the path.
sys.path[:] = [path for path in sys.path if path != _HERE]
sys.path_importer_cache.pop(_HERE, None)
_rest = os.environ["PYTHONPATH"].partition(os.pathsep)[2]
if _rest:
    os.environ["PYTHONPATH"] = _rest
else:
    del os.environ["PYTHONPATH"]

sys.path.insert(0, _PACKAGES)  # the supervisor may have found phalanx on a path that we lack
try:
    if "PHALANX_WARM_SERVER" in os.environ:
        from phalanx.launch.warm.loader import serve_warm as serve
    else:
        from phalanx.launch.processes.forker import serve_preloaded as serve
except BaseException as error:  # Python's site module would ignore the error, and run the script here
    print(f"can't load phalanx from {_PACKAGES}: {error!r}", file=sys.stderr, flush=True)
    os._exit(1)

sys.path.remove(_PACKAGES)
serve(_LOADED_BEFORE)

# Now import the user's own sitecustomize. If there is none, the import fails as it would have failed without us; the
# site module expects that.
del sys.modules["sitecustomize"]
import sitecustomize  # type: ignore[import-not-found]  # noqa: E402, F401
