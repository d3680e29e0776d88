"""What the forge reads at the root: links lead to files, forms and the citation are what their readers expect."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

REPOSITORY = Path(__file__).parents[1]
FORMS = [path for path in sorted(REPOSITORY.glob(".github/ISSUE_TEMPLATE/*.yml")) if path.stem != "config"]


@pytest.mark.parametrize("name", ["CONTRIBUTING.md", "SECURITY.md"])
def test_links_lead_to_files_that_exist(name):
    links = re.findall(r"\]\(([^)#]+)", (REPOSITORY / name).read_text())
    assert [link for link in links if not (REPOSITORY / link).is_file()] == []


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
