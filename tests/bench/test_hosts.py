"""The benchmark between hosts measures the link and Gloo, and says what it did."""

from __future__ import annotations

import json

import pytest

from tests.bench._run import run_bench
from tests.namespaces import why_no_hosts


def test_a_short_run_measures_the_link_and_gloo(tmp_path):
    if why_not := why_no_hosts():
        pytest.skip(f"no hosts here: {why_not}")
    given = ["--ranks-per-host", 2, "--rate", "1gbit", "--sizes", "4,1M", "--rounds", 1, "--engines", "gloo"]
    ops = "all_reduce,broadcast,all_gather,reduce_scatter,all_to_all,barrier"
    done = run_bench("bench.hosts", *given, "--ops", ops, "--out", tmp_path)
    assert done.returncode == 0, done.stderr
    assert "Plain TCP: " in done.stdout
    assert "2 hosts x 2 ranks" in done.stdout
    record = json.loads((tmp_path / "hosts.json").read_text())
    assert record["machine"]["link"]["round_trip_s"] > 1.5e-4  # of 0.2 ms
    assert record["machine"]["link"]["one_bytes_s"] < 1.02e9 / 8
    measured = [(result["op"], result["size_bytes"]) for result in record["results"]]
    assert measured == [(op, size) for op in ops.split(",") for size in ((0,) if op == "barrier" else (4, 1 << 20))]
    of_a_mebibyte = record["results"][measured.index(("all_reduce", 1 << 20))]
    assert of_a_mebibyte["engines"]["gloo"]["median_s"] > 8e-3  # the time of its bytes at 1 Gbit/s


def test_an_unknown_operation_is_named():
    done = run_bench("bench.hosts", "--ops", "all_reduce,nothing")
    assert done.returncode == 2
    assert "must be of all_reduce, broadcast" in done.stderr
