"""Every notebook runs from its first cell to its last, and none is committed with outputs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
NOTEBOOKS = sorted((EXAMPLES / "notebooks").glob("*.ipynb"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_committed_without_outputs(path):
    for cell in json.loads(path.read_text())["cells"]:
        assert not cell.get("outputs")
        assert cell.get("execution_count") is None


# A process of its own: a client leaves sockets behind, and a kernel that sees pytest's variables does not show what the
# ranks print.
_CLIENT = """
import sys, nbformat
from nbclient import NotebookClient

notebook = nbformat.read(sys.argv[1], as_version=4)
NotebookClient(notebook, timeout=60, kernel_name="python3").execute(cwd=".")
nbformat.write(notebook, "executed.ipynb")
"""


def run_notebook(name, folder):
    """Return what each code cell has printed or shown, as text."""
    if find_spec("nbclient") is None or find_spec("ipykernel") is None:
        pytest.skip("nbclient or ipykernel is not installed")
    for file in EXAMPLES.glob("*.py"):
        (folder / file.name).symlink_to(file)
    place = folder / "notebooks"
    place.mkdir()
    kept = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
    environ = {
        **kept,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{kept['PATH']}",
        "IPYTHONDIR": str(folder / "ipython"),
        "JUPYTER_DATA_DIR": str(folder / "jupyter"),
    }
    command = [sys.executable, "-c", _CLIENT, str(EXAMPLES / "notebooks" / f"{name}.ipynb")]
    done = subprocess.run(command, cwd=place, env=environ, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    shown = []
    for cell in json.loads((place / "executed.ipynb").read_text())["cells"]:
        texts = [
            output.get("text") or output.get("data", {}).get("text/plain", "") for output in cell.get("outputs", ())
        ]
        if cell["cell_type"] == "code":
            shown.append("".join(line for text in texts for line in text))
    return shown


def test_the_first_collectives(tmp_path):
    _, hello, add_up, pass_around, disagree = run_notebook("first_collectives", tmp_path)
    assert hello == "['rank 0 of 2', 'rank 1 of 2']"
    assert "rank 3: [4.0, 40.0] -> [10.0, 100.0]" in add_up
    assert "rank 2: weights [1.0, 1.0], squares [0, 1, 4, 9]" in pass_around
    assert "rank 0: broadcast(float32, count=4, src=0)" in disagree


@pytest.mark.slow
@pytest.mark.skipif(find_spec("sklearn") is None, reason="the digits are scikit-learn's")
def test_training_shows_curves_and_report(tmp_path):
    shown = run_notebook("train_digits", tmp_path)
    assert "epoch 5, step 115" in shown[1]
    assert "<Figure" in shown[2]
    assert "IFrame" in shown[3]
    assert (tmp_path / "notebooks" / "runs" / "notebook" / "report.html").exists()
    assert shown[4].strip().endswith("17258")
