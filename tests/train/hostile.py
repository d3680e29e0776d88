"""metrics.jsonl as nobody should write it: what any reader of it must survive."""

from __future__ import annotations

import json
import math
import tempfile
from html.parser import HTMLParser
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from phalanx.train.report.metrics import MetricsLog, read_metrics, write_csv
from phalanx.train.report.report import write_report

NUMBERS = st.one_of(
    st.sampled_from([0, 1, -1, 1e308, -1e308, 1e300, 5e-324, 1e-310, math.nan, math.inf, -math.inf]),
    st.sampled_from([10**400, -(10**400), 2**63, 2**53, 1e15, True]),
    st.floats(),
    st.integers(),
)
TEXTS = st.one_of(
    st.text(max_size=8),
    st.sampled_from(["<script>alert(1)</script>", "\x1b[31m\x1b]0;x\x07", "\ud800", "\0", "9" * 5000]),
)
VALUES = st.recursive(
    st.one_of(NUMBERS, TEXTS, st.none()),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(TEXTS, inner, max_size=3)),
    max_leaves=6,
)
TABLES = st.lists(st.lists(NUMBERS, max_size=3), max_size=3)
PHASES = st.dictionaries(st.sampled_from(["data", "forward", "<b>"]), NUMBERS, max_size=3)
USUAL = {
    "time": st.floats(1.7e9, 1.8e9),
    "kind": st.sampled_from(["start", "step", "epoch", "evaluation", "save", "preempted", "end"]),
    "attempt": st.integers(0, 2),
    "step": st.integers(1, 4),
    "loss": NUMBERS,
    "lr": NUMBERS,
    "samples_per_s": NUMBERS,
    "accuracy": NUMBERS,
    "epoch": NUMBERS,
    "phases_s": PHASES,
    "phases_by_rank": TABLES,
    "spread": st.lists(NUMBERS, max_size=3),
    "resumed_from": st.one_of(st.none(), st.fixed_dictionaries({"step": NUMBERS, "source": TEXTS}), VALUES),
    "origin": st.dictionaries(st.one_of(TEXTS, st.sampled_from(["logs", "loader workers"])), VALUES, max_size=2),
    "settings": st.dictionaries(TEXTS, VALUES, max_size=2),
    "signal": st.one_of(NUMBERS, VALUES),
    "world_size": VALUES,
    "backend": VALUES,
}
_REQUIRED = ("time", "kind", "attempt", "step")
RECORDS = st.fixed_dictionaries(
    {name: USUAL[name] for name in _REQUIRED},
    optional={name: values for name, values in USUAL.items() if name not in _REQUIRED},
)
ODD_RECORDS = st.builds(lambda record, odd: record | odd, RECORDS, st.dictionaries(st.sampled_from([*USUAL]), VALUES))
LINES = st.one_of(
    *[RECORDS.map(lambda record: json.dumps(record).encode())] * 6,
    *[ODD_RECORDS.map(lambda record: json.dumps(record).encode())] * 2,
    st.binary(max_size=40),
    st.sampled_from([b"[" * 100_000, b'{"a":' * 5000, b'{"time": ' + b"9" * 10_000 + b"}", b"\xff\xfe", b"null"]),
)


class _Tags(HTMLParser):
    def handle_starttag(self, tag, attrs):
        assert tag not in ("script", "b")
        assert not [name for name, _ in attrs if name.startswith("on")]


def read_all(lines: list[bytes]) -> None:
    """Do all that is done with the log of a run; fail if anything but what is documented comes of it."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "metrics.jsonl").write_bytes(b"\n".join(lines))
        records = read_metrics(folder)
        write_csv(folder)
        if records:
            page = write_report(folder).read_text()
            _Tags().feed(page)
            assert not set(page) & {"\0", "\x1b", "\x07"}
        else:
            with pytest.raises(ValueError, match="nothing recorded yet"):
                write_report(folder)
        log = MetricsLog(folder)
        log.write("start", resumed_from=None)
        log.close()
        assert read_metrics(folder)[-1]["attempt"] == log.attempt
        assert len(read_metrics(folder)) == len(records) + 1


def fuzz(num_runs: int) -> None:
    """Let that many logs be read."""
    checks = [HealthCheck.too_slow, HealthCheck.data_too_large]
    run = settings(max_examples=num_runs, deadline=None, suppress_health_check=checks, database=None)
    run(given(st.lists(LINES, min_size=1, max_size=8))(read_all))()
