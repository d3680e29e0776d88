"""Only the process that has claimed a folder's newest epoch writes to it, even where locks do not reach other hosts."""

from __future__ import annotations

import json
import threading
from concurrent.futures import Future

import pytest

from phalanx import _env
from phalanx.checkpoint.disk import claim as claims
from phalanx.checkpoint.disk import folder as folders
from phalanx.checkpoint.disk.claim import Claim, OtherSide, fence_for, read_note


@pytest.fixture
def as_attempt(monkeypatch):
    """``as_attempt(job, number)`` makes this process a rank of an attempt of a job of several hosts."""

    def become(job, number, name="line"):
        told = {"job": job, "attempt": [1, number], "name": name}
        monkeypatch.setenv(_env.EPOCH_VARIABLE, json.dumps(told))

    return become


@pytest.fixture
def apart(monkeypatch):
    """Locks do not reach other hosts, each claim is of another kernel, and a second is a hundredth of one."""
    boots = iter(range(1000))
    monkeypatch.setattr(claims.fcntl, "flock", lambda *_: None)
    monkeypatch.setattr(claims, "_boot", lambda: f"boot {next(boots)}")
    monkeypatch.setattr(claims, "BEAT_S", 0.02)
    monkeypatch.setattr(claims, "SILENCE_S", 0.5)
    monkeypatch.setattr(claims, "_STALE_S", 0.04)


@pytest.fixture
def take():
    """``take(folder)`` returns a claim, or who holds the folder; what was claimed is released at the end."""
    taken = []

    def of(folder):
        one = Claim(str(folder), patience_s=0)
        taken.append(one)
        return one.take() or one

    yield of
    for one in taken:
        one.release()


def stop(claim):
    """Let a claim's process be stopped: it renews nothing any more."""
    claim._is_over.set()
    claim._beats.join()


def test_each_attempt_that_is_admitted_takes_the_next_epoch(tmp_path, take):
    for epoch in (1, 2, 3):
        claim = take(tmp_path)
        assert claim.fence.epoch == read_note(tmp_path).epoch == epoch
        claim.release()
        assert not read_note(tmp_path).is_open


def test_a_folder_that_another_host_renews_is_refused(tmp_path, take, as_attempt, apart):
    as_attempt("a", 1)
    first = take(tmp_path)
    as_attempt("b", 7)
    assert take(tmp_path).job == "a"
    first.check()
    assert read_note(tmp_path).epoch == 1


def test_a_folder_that_another_host_has_left_open_is_taken_once_it_is_silent(tmp_path, take, as_attempt, apart):
    as_attempt("a", 1)
    first = take(tmp_path)
    stop(first)
    as_attempt("b", 1)
    second = take(tmp_path)
    assert second.fence.epoch == 2
    with pytest.raises(OtherSide, match="epoch 2, and this one has 1"):
        first.check()  # it was only stopped, and goes on
    second.check()


def test_a_newer_attempt_of_the_job_takes_the_folder_at_once_and_an_older_one_never(tmp_path, take, as_attempt, apart):
    as_attempt("a", 1)
    first = take(tmp_path)
    as_attempt("a", 2)
    second = take(tmp_path)
    with pytest.raises(OtherSide):
        first.fence.check()
    second.fence.check()
    as_attempt("a", 1)
    assert take(tmp_path).attempt == (1, 2)


@pytest.mark.parametrize("num_takers", [2, 8])
def test_of_several_processes_that_take_a_folder_at_once_one_gets_it(tmp_path, take, as_attempt, apart, num_takers):
    as_attempt("", 1)
    at_once, got = threading.Barrier(num_takers), []

    def run():
        at_once.wait(10)
        got.append(take(tmp_path))

    threads = [threading.Thread(target=run) for _ in range(num_takers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert len(got) == num_takers
    assert sum(isinstance(one, Claim) for one in got) == 1


def test_a_claimer_that_died_before_it_wrote_its_note_is_passed_over(tmp_path, take, apart):
    (tmp_path / ".epoch-1").touch()
    assert take(tmp_path).fence.epoch == 2


@pytest.mark.parametrize(
    "text", [b"\xff[[[[", b"[]", b'{"pid": "x", "epoch": 1e99}', b'{"epoch": -3, "attempt": 5}', b""]
)
def test_a_file_that_is_not_a_note_is_no_obstacle(tmp_path, take, text):
    (tmp_path / ".lock").write_bytes(text)
    assert take(tmp_path).fence.epoch >= 1


@pytest.mark.parametrize("number", ["9" * 18, "9" * 17])
def test_a_claim_that_nobody_could_follow_is_named(tmp_path, take, apart, number):
    (tmp_path / f".epoch-{number}").touch()
    for _ in range(2):
        with pytest.raises(OSError, match=f"epoch-{number} was made by another program: remove it"):
            take(tmp_path)
    (tmp_path / f".epoch-{number}").unlink()
    assert take(tmp_path).fence.epoch == 1


def draft_of(folder, fence, step=5):
    """A checkpoint that all its ranks have written."""
    draft = folders.begin(str(folder), step, 1, None, fence)
    sha256 = Future()
    sha256.set_result("0" * 64)
    draft.write(0, memoryview(b"x" * 10), sha256)
    return draft


def test_an_older_epoch_publishes_nothing_and_the_manifest_tells_the_epoch(tmp_path, take, as_attempt, apart):
    as_attempt("a", 1)
    old = draft_of(tmp_path, take(tmp_path).fence)
    as_attempt("a", 2)
    new = draft_of(tmp_path, take(tmp_path).fence, step=6)
    with pytest.raises(OtherSide):
        old.publish()
    assert new.publish()
    assert folders.steps(str(tmp_path)) == [6]
    assert folders.read_manifest(str(tmp_path), 6).epoch == 2


def test_a_draft_that_passed_the_check_before_the_folder_was_taken_can_not_be_published_after(tmp_path, monkeypatch):
    draft = draft_of(tmp_path, None)
    monkeypatch.setattr(folders.Draft, "check_fence", lambda self: folders.sweep(self.folder))  # stopped just then
    with pytest.raises(FileNotFoundError):
        draft.publish()
    assert folders.steps(str(tmp_path)) == []


def test_a_script_of_several_hosts_claims_the_folder_of_its_checkpoints_once(tmp_path, as_attempt, apart):
    assert fence_for(str(tmp_path)) is None
    as_attempt("a", 1)
    fence = fence_for(str(tmp_path))
    assert fence == fence_for(str(tmp_path))
    first = claims._claimed.pop(str(tmp_path))
    try:
        as_attempt("b", 1)
        with pytest.raises(OtherSide, match="another side of this job trains in"):
            fence_for(str(tmp_path))
    finally:
        first.release()
