"""Suites of other projects that start processes for each test end the same with ``pytest --fast-ranks``.

Those whose processes import torch end earlier.

``python -m pytest -s -m integrations tests/libraries/test_foreign_suites.py`` prints the times.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

import pytest

_PROGRAMS = Path(__file__).parent / "programs"
_DOWNLOADS = Path(__file__).parents[2] / "build" / "suites"
_LIMIT_S = 600


class Suite(NamedTuple):
    """Tests of another project.

    Attributes:
        sdist: Release whose source distribution has the files, if it is there that the files are.
        package: Installed one that has the files; if there is none either, they are in ``programs``.
        files: Of the folder that this means.
        words: Pick the tests that start processes, as ``-k`` does.
        num_passed: Of its tests, on a machine without a GPU.
        least_ratio: How many times less time it takes at least, on a busy machine; the guide has those of an idle one.
            0: it takes no less, since its processes need no torch and the server has it.
    """

    sdist: str
    package: str
    files: tuple[str, ...]
    words: str
    num_passed: int
    least_ratio: int


_OF_TORCH = ("all_reduce_max", "all_reduce_min", "all_reduce_product", "reduce_max", "reduce_min", "reduce_product")

_SUITES = {
    "ignite": Suite(
        "pytorch-ignite==0.5.5",
        "",
        ("tests/ignite/distributed/utils/test_native.py", "tests/ignite/distributed/comp_models/test_native.py"),
        "spawn_gloo",
        6,
        2,
    ),
    "torch": Suite("", "", ("torch_on_gloo.py",), " or ".join(f"test_{name}" for name in _OF_TORCH), 6, 2),
    "dask": Suite("", "dask", ("tests/test_multiprocessing.py",), "", 21, 0),
}


def unpacked(sdist):
    """Return the folder of a source distribution, which pip fetches once."""
    name, _, version = sdist.partition("==")
    folder = _DOWNLOADS / f"{name.replace('-', '_')}-{version}"
    if not folder.exists():
        _DOWNLOADS.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--no-deps"]
        command += ["--no-binary", name, "--dest", str(_DOWNLOADS), sdist]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=_LIMIT_S)
        assert done.returncode == 0, f"pip can't fetch {sdist}:\n{done.stdout}"
        with tarfile.open(_DOWNLOADS / f"{folder.name}.tar.gz") as archive:
            archive.extractall(_DOWNLOADS, filter="data")
    return folder


def prepared(suite, tmp_path):
    """Return the folder in which a suite runs, and its files."""
    if suite.sdist:
        folder = unpacked(suite.sdist)
        return folder, [folder / file for file in suite.files]
    if suite.package:  # it runs elsewhere: a package's own modules would stand in the way of Python's
        package = Path(importlib.util.find_spec(suite.package).origin).parent
        return tmp_path, [package / file for file in suite.files]
    # Outside this project, whose settings pytest would find.
    return tmp_path, [shutil.copy(_PROGRAMS / file, tmp_path) for file in suite.files]


def results(suite, tmp_path, *options):
    """Return each test's outcome, the seconds that all of them took, and what pytest printed."""
    folder, files = prepared(suite, tmp_path)
    report, scratch = tmp_path / "report.xml", tmp_path / "scratch"
    scratch.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-k", suite.words]
    command += ["--rootdir", str(folder), "--junitxml", str(report), *options, *map(str, files)]
    of_torch = {"BACKEND": "gloo", "WORLD_SIZE": "2", "TEMP_DIR": str(scratch)}
    environ = {**os.environ, **of_torch} if "torch_on_gloo.py" in suite.files else dict(os.environ)
    done = subprocess.run(
        command,
        cwd=folder,
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=_LIMIT_S,
    )
    assert done.returncode == 0, done.stdout
    cases = list(ElementTree.parse(report).iter("testcase"))
    outcomes = {(case.get("classname"), case.get("name")): [child.tag for child in case] for case in cases}
    assert len(outcomes) == len(cases)
    return outcomes, sum(float(case.get("time")) for case in cases), done.stdout


@pytest.mark.parametrize("suite", _SUITES.values(), ids=list(_SUITES))
def test_each_test_ends_the_same_and_those_of_torch_in_less_time(tmp_path, suite):
    as_ever, slow_s, _ = results(suite, tmp_path)
    forked, fast_s, output = results(suite, tmp_path, "--fast-ranks")
    print(f"\n{suite.files}: {len(forked)} tests, {slow_s:.1f} s as ever, {fast_s:.1f} s with --fast-ranks")
    assert forked == as_ever
    assert list(forked.values()).count([]) == suite.num_passed
    assert "are not faster" not in output  # of a line that says why processes were started as ever
    assert slow_s > suite.least_ratio * fast_s
