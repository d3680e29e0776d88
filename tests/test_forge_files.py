"""What the forge reads: links lead to files; forms, the citation and the workflow are what their readers expect."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.test_makefile import torches

REPOSITORY = Path(__file__).parents[1]
WORKFLOW = yaml.safe_load((REPOSITORY / ".github" / "workflows" / "tests.yml").read_text())
FORMS = [path for path in sorted(REPOSITORY.glob(".github/ISSUE_TEMPLATE/*.yml")) if path.stem != "config"]


@pytest.mark.parametrize("name", ["CONTRIBUTING.md", "GOVERNANCE.md", "SECURITY.md"])
def test_links_lead_to_files_that_exist(name):
    links = re.findall(r"\]\(([^)#]+)", (REPOSITORY / name).read_text())
    assert [link for link in links if not (REPOSITORY / link).is_file()] == []


def test_owners_are_named_for_files_that_exist():
    lines = (REPOSITORY / ".github" / "CODEOWNERS").read_text().splitlines()
    paths = [line.split()[0] for line in lines if line and not line.startswith("#")]
    assert paths[0] == "*"
    assert [path for path in paths[1:] if not (REPOSITORY / path.lstrip("/")).exists()] == []


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.stem)
def test_a_form_has_what_the_forge_requires(path):
    form = yaml.safe_load(path.read_text())
    assert form["name"]
    assert form["description"]
    fields = [field for field in form["body"] if field["type"] != "markdown"]
    assert all(field["attributes"]["label"] for field in fields)
    names = [field["id"] for field in fields]
    assert len(names) == len(set(names)) > 0


def test_the_citation_has_the_keys_that_its_format_requires():
    citation = yaml.safe_load((REPOSITORY / "CITATION.cff").read_text())
    assert citation["cff-version"] == "1.2.0"
    assert citation["message"]
    assert citation["title"] == "Phalanx"
    assert citation["authors"]
    assert f'license = "{citation["license"]}"' in (REPOSITORY / "pyproject.toml").read_text()


def test_the_workflow_runs_ci_on_every_python_and_every_torch_that_the_package_promises():
    assert WORKFLOW[True].keys() == {"push", "pull_request", "workflow_dispatch"}  # YAML reads on: so
    assert WORKFLOW["permissions"] == {"contents": "read"}
    matrix = WORKFLOW["jobs"]["versions"]["strategy"]["matrix"]["include"]
    project = (REPOSITORY / "pyproject.toml").read_text()
    pythons = re.findall(r'"Programming Language :: Python :: (3\.\d+)"', project)
    assert f'requires-python = ">={pythons[0]}"' in project
    assert list(dict.fromkeys(entry["python"] for entry in matrix)) == pythons
    assert sorted({entry["torch"] for entry in matrix}) == torches()


@pytest.mark.parametrize("name", ["all", "versions"])
def test_a_job_of_the_workflow_runs_ci_on_its_python_and_hands_its_settings_on(name):
    job = WORKFLOW["jobs"][name]
    assert job["runs-on"].startswith("ubuntu-")
    assert job["timeout-minutes"] <= 120
    (python,) = [step["with"]["python-version"] for step in job["steps"] if "python-version" in step.get("with", {})]
    assert python == {"all": "3.11", "versions": "${{ matrix.python }}"}[name]
    step = job["steps"][-1]
    assert step["run"].endswith(" .ci/run")
    kept = re.search(r"--preserve-env=(\S+)", step["run"])[1].split(",")
    assert kept == ["CI", *WORKFLOW["env"], *step.get("env", {})]
    assert step.get("env", {}) == {"all": {}, "versions": {"TORCH": "${{ matrix.torch }}"}}[name]
    assert os.access(REPOSITORY / ".ci" / "run", os.X_OK)


def test_ci_with_a_torch_runs_on_it_what_every_torch_must_pass(tmp_path):
    """In the place of make stands what tells how it was called."""
    make = tmp_path / "make"
    make.write_text('#!/bin/sh\necho "$@ on $TORCH with $PYTHON"\n')
    make.chmod(0o755)
    told = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "TORCH": "2.11.0", "PYTHON": "python3.12"}
    done = subprocess.run(["bash", ".ci/run"], cwd=REPOSITORY, env=told, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout) == (0, "torch on 2.11.0 with python3.12\n")


def test_tests_that_are_told_to_have_failed_without_a_change_exist():
    names = re.findall(r"`([\w/]+(?:/|\.py(?:::\w+)?))`", (REPOSITORY / "tests" / "README.md").read_text())
    assert len(names) > 30
    for path, _, name in (one.partition("::") for one in names):
        assert (REPOSITORY / "tests" / path).exists(), path
        assert not name or f"\ndef {name}(" in (REPOSITORY / "tests" / path).read_text(), name
