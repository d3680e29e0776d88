"""A standby imports what a rank has imported, in the environment in which the rank has imported it."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap

import pytest

LIMIT_S = 60
# What a rank does; it says what a standby needs to do the same.
RANK = """
import json, os, sys
from phalanx.launch.processes.ahead import Log
os.environ["RANK"] = RANK
log = Log(["RANK"])
import early
os.environ["KIND"] = "late"
os.environ["PLACE"] = "/data/" + PLACE
import late
print(json.dumps(log.summary(["early", "late", "ranked", "placed"])))
"""
STANDBY = """
import json, os, sys
from phalanx.launch.processes.ahead import Hidden, Imports, replay
logs, left_out = json.load(sys.stdin)
imports = Imports()
unfit = sorted(replay(logs, imports, left_out))
said = []
Hidden(imports, (), lambda package, names: names and said.append([package, names]))
hidden = "early" not in sys.modules and "late" not in sys.modules
import early
os.environ["KIND"] = "late"
import late
print(json.dumps([unfit, hidden, early.KIND, late.KIND, os.environ["KIND"], said, late.__spec__.name]))
"""


@pytest.fixture
def run(tmp_path):
    """``run(program, what)`` runs it beside two packages that read their environment, and returns what it says."""
    reads = "import os\nKIND = os.environ.get('KIND')\n"
    (tmp_path / "early.py").write_text(reads)
    (tmp_path / "late.py").write_text(reads)

    def run(program, what=None):
        command = [
            sys.executable,
            "-c",
            f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n" + textwrap.dedent(program),
        ]
        done = subprocess.run(command, input=json.dumps(what), capture_output=True, text=True, timeout=LIMIT_S)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    return run


def log_of(run, rank="0", place="shared"):
    return run(RANK.replace("= RANK", f"= {rank!r}").replace("+ PLACE", f"+ {place!r}"))


def test_each_package_is_imported_with_the_settings_of_its_time(run):
    logs = [log_of(run, "0"), log_of(run, "1")]
    assert run(STANDBY, [logs, []]) == [[], True, None, "late", "late", [], "late"]


def test_a_package_that_has_read_what_differs_between_ranks_is_left_out(run, tmp_path):
    (tmp_path / "late.py").write_text("import os, ranked, placed\nKIND = os.environ.get('KIND')\n")
    (tmp_path / "ranked.py").write_text("import os\nRANK = os.environ.get('RANK')\n")
    (tmp_path / "placed.py").write_text("import os\nPLACE = os.environ.get('PLACE')\n")
    logs = [log_of(run, "0", "a"), log_of(run, "1", "b")]
    unfit = run(STANDBY, [logs, []])[0]
    assert unfit == ["late", "placed", "ranked"]
    assert run(STANDBY, [logs, unfit])[:4] == [[], True, None, "late"]


def test_a_script_that_sets_another_value_than_the_rank_before_is_told(run):
    logs = [log_of(run)]
    program = STANDBY.replace('"] = "late"', '"] = "other"')
    assert run(program, [logs, []])[5] == [["late", ["KIND"]]]


def test_a_copy_of_the_environment_reads_nothing(run):
    program = """
        import json, os
        from phalanx import _env
        os.environ["OWN"] = "1"
        seen = []
        stop = _env.watch_reads(lambda name, value: seen.append([name, value]))
        [dict(os.environ), os.environ.copy(), dict(os.environ.items()), [*os.environ]]
        os.environ.get("OWN"), "NOT SET" in os.environ
        stop()
        os.environ.get("OWN")
        print(json.dumps(seen))
    """
    assert run(program) == [["OWN", "1"], ["NOT SET", None]]
