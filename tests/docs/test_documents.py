"""The pages name every field that ``phalanx why`` and ``phalanx top`` print with ``--json``."""

from __future__ import annotations

import dataclasses
import json
import re

import pytest

from phalanx.diagnose.jobs import Job
from phalanx.diagnose.stacks import Frame, Stacks, Thread
from phalanx.diagnose.top.gpu import Gpu
from phalanx.diagnose.top.rank import RankView
from phalanx.diagnose.top.top import as_json as top_document
from phalanx.diagnose.top.watch import JobView
from phalanx.diagnose.why.activity import Activity, Call, Look
from phalanx.diagnose.why.evidence import Evidence, RankSeen
from phalanx.diagnose.why.findings import find
from phalanx.diagnose.why.why import as_json as why_document
from phalanx.failure.ending import Ending
from phalanx.failure.losses import Loss
from tests.docs.blocks import REPOSITORY

MAPS = {"progress", "phases_s"}  # whose keys are no fields of ours


def fields(document: object) -> set[str]:
    """Return the names of all fields, at any depth."""
    if isinstance(document, list):
        return set().union(*map(fields, document)) if document else set()
    if not isinstance(document, dict):
        return set()
    return set(document).union(*(fields(value) for name, value in document.items() if name not in MAPS))


def why_fields() -> set[str]:
    frame = Frame("train", "train.py", 3, "")
    call = Call("all_reduce", "train.py:4", "default", 1)
    threads = (Thread(7, "main", is_active=True, owns_gil=False, frames=(frame,)),)
    doing = Activity(0, 7, call, frame=frame, other=frame, last=call, was_in=call)
    seen = (RankSeen(doing, Look(7, None, Stacks(threads))),)
    losses = (Loss(ending=Ending(rank=1, pid=7, exitcode=1)),)
    evidence = Evidence(Job("train.py", "torchrun", 1, 1, ()), seen, losses=losses)
    return fields(json.loads(why_document(evidence, find([doing]))))


def top_fields() -> set[str]:
    names = {field.name: None for field in dataclasses.fields(RankView)}
    rank = RankView(**{**names, "gpus": (Gpu(0, 1.0, 2),)})
    job = JobView(**{**{field.name: None for field in dataclasses.fields(JobView)}, "ranks": [rank]})
    return fields(json.loads(top_document([job])))


@pytest.mark.parametrize("language", ["en", "zh"])
@pytest.mark.parametrize(("page", "wanted"), [("why", why_fields), ("top", top_fields)])
def test_a_page_names_every_field_and_no_other(language, page, wanted):
    text = (REPOSITORY / "docs" / language / "guides" / f"{page}.md").read_text()
    title = {"en": "## The document", "zh": "## JSON"}[language]
    section = text.partition(title)[2].partition("\n## ")[0]
    rows = [row.split("|")[1:3] for row in section.splitlines() if row.startswith("| ") and "---" not in row]
    named = {word for row in rows for word in re.findall(r"`(\w+)`", row[0])}
    within = {word for row in rows for word in re.findall(r"`(\w+)`", row[1])}
    assert wanted() <= named | within, wanted() - named - within
    assert named <= wanted(), named - wanted()
