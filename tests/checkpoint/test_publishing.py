"""What is published comes back as it was, old versions stay as they are, and what fails leaves the last one there."""

from __future__ import annotations

import dataclasses
import errno
import gc
import os
import pickle
import re
from collections import OrderedDict, namedtuple
from pathlib import Path

import pytest
import torch
from torch import nn

import phalanx
from phalanx import NotPublished, OutOfSharedMemory, PhalanxError
from phalanx._errors import ArgumentError
from phalanx.checkpoint.publication import contents, records
from phalanx.host.loans import Loans
from phalanx.host.shared_blocks import held_bytes
from phalanx.wire import places
from phalanx.wire.places import common_files
from tests.checkpoint._names import new_name
from tests.limited import limited_files

DTYPES = sorted(
    (
        dtype
        for dtype in {value for value in vars(torch).values() if isinstance(value, torch.dtype)}
        if not re.search(r"q|bcomplex|uint?[1-7]$|int[1-7]$|complex32|bits", str(dtype))
    ),
    key=str,
)


@pytest.fixture
def name():
    with new_name() as made:
        yield made
        gc.collect()


def newest(name):
    return phalanx.subscribe(name).latest()


def error_of(kind, call, *args, **options):
    """Return the error of a call, without the frames that would keep its tensors."""
    with pytest.raises(kind) as caught:
        call(*args, **options)
    return str(caught.value.with_traceback(None))


# ---- what comes back ---------------------------------------------------------------------------------------------


def test_a_nested_state_comes_back_with_its_values_and_types(name):
    state = {
        "model": OrderedDict(weight=torch.arange(6.0).view(2, 3), bias=torch.tensor(2.5)),
        "plain": [1, -(2**63), 2**64 - 1, 1.5, float("inf"), True, None, "wörter\n", (1, (2,)), {3: "drei", "x": {}}],
        "empty": [torch.zeros(0, 4), [], (), {}],
    }
    with phalanx.publish(state, name):
        found = newest(name).state
    assert found["plain"] == state["plain"]
    assert type(found["model"]) is OrderedDict
    assert torch.equal(found["model"]["weight"], state["model"]["weight"])
    assert (found["model"]["bias"].shape, found["model"]["bias"].item()) == ((), 2.5)
    assert (found["empty"][0].shape, found["empty"][1:]) == ((0, 4), [[], (), {}])


@pytest.mark.parametrize("state", [torch.ones(3), [1, 2], "a text", None], ids=["tensor", "list", "text", "None"])
def test_a_state_need_not_be_a_dictionary(name, state):
    with phalanx.publish(state, name):
        found = newest(name).state
    assert torch.equal(found, state) if isinstance(state, torch.Tensor) else found == state


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_keeps_its_bits(name, dtype):
    values = torch.arange(64, dtype=torch.uint8).view(dtype) if dtype != torch.bool else torch.tensor([True, False])
    with phalanx.publish([values, values[:0]], name):
        found, empty = newest(name).state
    assert (found.dtype, empty.dtype, empty.shape) == (dtype, dtype, (0,))
    assert torch.equal(found.view(torch.uint8), values.view(torch.uint8))


def test_tensors_that_are_not_contiguous_come_back_packed(name):
    base = torch.arange(24.0).to(torch.complex64).view(2, 3, 4) * (1 + 1j)
    kinds = {
        "strided": base[:, ::2],
        "transposed": base.permute(2, 0, 1),
        "expanded": torch.ones(1, 3).expand(2, 3),
        "channels": torch.rand(1, 3, 2, 2).to(memory_format=torch.channels_last),
        "conjugated": base.conj(),
        "negated": base.conj().imag,
        "parameter": nn.Parameter(torch.ones(2)),
    }
    with phalanx.publish(kinds, name):
        found = newest(name).state
    for kind, tensor in found.items():
        assert torch.equal(tensor, kinds[kind].detach()), kind
        assert (tensor.is_contiguous(), tensor.requires_grad, tensor.is_conj(), tensor.is_neg()) == (True, *[False] * 3)


def test_tied_weights_stay_tied_and_parts_of_a_tensor_are_copied_apart(name):
    weight = torch.rand(4, 4)
    with phalanx.publish({"in": weight, "out": weight, "view": weight.view(4, 4), "row": weight[0]}, name):
        found = newest(name).state
    assert found["in"].data_ptr() == found["out"].data_ptr() == found["view"].data_ptr() != found["row"].data_ptr()
    assert torch.equal(found["row"], weight[0])


def test_a_model_is_published_as_its_state_dict(name):
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    with phalanx.publish(model, name):
        other = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
        other.load_state_dict(newest(name).state)
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), other.state_dict().values(), strict=True))


def test_a_state_that_was_read_in_inference_mode_or_for_another_device_can_be_trained(name):
    with phalanx.publish(torch.ones(3), name), phalanx.subscribe(name) as subscription:
        with torch.inference_mode(), torch.device("meta"):
            weight = subscription.latest().state
        assert weight.is_cpu
        weight.requires_grad_().sum().backward()
        assert weight.grad.tolist() == [1.0, 1.0, 1.0]
        del weight


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (
            lambda: torch.empty(2, device="meta"),
            r"a\.0 is .* on the meta device, .*published: give it memory",
        ),
        (
            lambda: torch.eye(2).to_sparse(),
            r"a\.0 is .*sparse_coo, .*published: make it a dense one",
        ),
        (
            lambda: torch.quantize_per_tensor(torch.ones(2), 1.0, 0, torch.qint8),
            r"a\.0 is .*quantized, .*make it a dense one",
        ),
        (
            lambda: torch.zeros(2, dtype=torch.uint8).view(torch.qint8),  # torch copies it as if it had a quantizer
            r"a\.0 is a tensor of qint8, which can't be loaded: save a view as uint8",
        ),
        (object, r"a\.0 is a object, which can't be published without pickling: use plain values and tensors"),
        (lambda: {(object(),): 1}, r"a\.0 has the key <object.*, which can't be published; use strings or numbers"),
    ],
    ids=["meta", "sparse", "quantized", "as quantized", "object", "key"],
)
@pytest.mark.filterwarnings("ignore:.*quantize:UserWarning")
def test_what_can_not_be_published_is_refused_by_its_place_and_the_last_version_stays(name, make, words):
    value = make()
    assert re.search(words, error_of(TypeError, phalanx.publish, {"a": [value]}, name))
    with phalanx.publish({"a": [1]}, name) as publication:
        message = error_of(TypeError, publication.update, {"a": [value]})
        assert message.startswith(f"publish('{name}'): a.0 ")
        assert (newest(name).version, newest(name).state) == (1, {"a": [1]})


def publish_a_part(rank, world_size):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    part = distribute_tensor(torch.ones(2), init_device_mesh("cpu", (1,)), [Shard(0)])
    with new_name() as name:
        return error_of(TypeError, phalanx.publish, {"weight": part}, name)


def test_a_dtensor_is_refused_with_the_call_that_gathers_it(run_ranks):
    [message] = run_ranks(publish_a_part, 1)
    assert "weight is a DTensor, of which this rank has a part: gather it first, as get_model_state_dict(" in message


@pytest.mark.parametrize("name", ["", "a/b", "../a", "a.b", "a\0b", "ü", "a b", "a\n", "x" * 300])
def test_a_name_that_can_be_none_is_refused_in_words(name):
    for message in (error_of(ValueError, phalanx.publish, 1, name), error_of(ValueError, phalanx.subscribe, name)):
        assert re.search(r"^(publish|subscribe): name must have 1 to 100 of the letters", message)
        assert len(message) < 200


def test_wrong_arguments_are_refused_in_words(name):
    assert "name must be a text such as 'policy', got int" in error_of(TypeError, phalanx.publish, {}, 7)
    assert "max_versions must lie in [2, 1000], got 1" in error_of(
        ValueError, phalanx.publish, {}, name, max_versions=1
    )
    assert "timeout_s must be more than 0 s, got 0 s" in error_of(ValueError, phalanx.subscribe, name, timeout_s=0)
    wait = phalanx.subscribe(name).wait
    assert "must be a number of seconds or a timedelta, got 'x'" in error_of(ValueError, wait, timeout_s="x")
    assert "newer_than must be the number of a version, got 'x'" in error_of(TypeError, wait, newer_than="x")


def test_what_can_be_published_can_be_read(name):
    renamed = namedtuple("Renamed", ["x", "def"], rename=True)
    assert_back(
        name, renamed(1, 2), lambda state: (type(state).__name__, state._asdict()) == ("Renamed", {"x": 1, "_1": 2})
    )
    deep = None
    for _ in range(199):
        deep = {"a": deep}
    assert_back(name, deep, lambda state: repr(state) == repr(deep))
    assert "nested too deeply" in error_of(ValueError, phalanx.publish, {"a": deep}, name)


def assert_back(name, state, is_it):
    with phalanx.publish(state, name):
        assert is_it(newest(name).state)


# ---- versions ----------------------------------------------------------------------------------------------------


def test_a_version_that_is_held_stays_as_it_is_while_others_follow(name):
    subscription = phalanx.subscribe(name)
    publication = phalanx.publish(torch.full((1000,), 1.0), name)
    held = {1: subscription.latest()}
    for version in range(2, 8):
        assert phalanx.publish(torch.full((1000,), float(version)), name) is publication
        assert publication.version == version
        found = subscription.wait(timeout_s=60)
        assert found is subscription.latest()
        if version in (2, 5):
            held[version] = found
    assert all(torch.equal(one.state, torch.full((1000,), float(number))) for number, one in held.items())
    assert subscription.latest().state[0] == 7.0
    assert not subscription.has_ended
    publication.close()
    assert subscription.has_ended
    assert all(torch.equal(one.state, torch.full((1000,), float(number))) for number, one in held.items())
    subscription.close()


def test_blocks_are_used_again_and_follow_the_size_of_the_state(name):
    before = held_bytes().get("published", 0)
    with phalanx.publish(torch.zeros(1 << 16), name) as publication:
        for _ in range(5):
            publication.update(torch.zeros(1 << 16))
        assert held_bytes()["published"] - before < 3 * (1 << 18)
        kept = [newest(name)]
        for _ in range(3):  # each old version that is held takes one more
            publication.update(torch.zeros(1 << 16))
            kept.append(newest(name))
        assert held_bytes()["published"] - before > 4 * (1 << 18)
        del kept
        publication.update(torch.zeros(1 << 16))
        publication.update(torch.zeros(1 << 16))
        assert held_bytes()["published"] - before < 3 * (1 << 18)
        for size in (1 << 4, 1 << 18, 1 << 4):  # blocks that are too large or too small are given back
            for _ in range(2):
                publication.update(torch.ones(size))
            assert newest(name).state.sum() == size
        assert held_bytes()["published"] - before < 1 << 16
    gc.collect()
    assert held_bytes().get("published", 0) == before


def test_what_a_reader_writes_is_its_own(name):
    with phalanx.publish(torch.zeros(5000), name):
        mine, other = newest(name), newest(name)
        mine.state.fill_(7.0)
        assert other.state.sum() == newest(name).state.sum() == 0
        assert mine.state.sum() == 35_000


def test_numbers_go_on_after_the_end_and_a_subscription_follows_the_next_publication(name):
    with phalanx.publish("first", name), phalanx.subscribe(name) as subscription:
        assert subscription.wait(timeout_s=60).state == "first"
        phalanx.publish("second", name).close()
        with pytest.raises(NotPublished, match="has closed it at version 2") as caught:
            subscription.wait(timeout_s=60)
        facts = {fact: getattr(caught.value, fact) for fact in ("name", "pid", "version", "has_ended", "is_closed")}
        assert facts == {"name": name, "pid": os.getpid(), "version": 2, "has_ended": True, "is_closed": True}
        assert subscription.latest().state == "first"  # the second was closed before it looked
        with phalanx.publish("third", name) as publication:
            assert publication.version == 3
            assert subscription.wait(timeout_s=60).state == "third"
            assert subscription.wait(newer_than=0).version == 3


def test_a_publication_whose_numbers_began_anew_is_newer(name):
    with phalanx.subscribe(name) as subscription:
        publication = phalanx.publish("old", name)
        publication.update("old")
        assert subscription.latest().version == 2
        publication.close()
        for path in common_files(records.file_name(name)):  # as when the folder was removed
            Path(path).unlink(missing_ok=True)
        with phalanx.publish("new", name):
            assert (subscription.wait(timeout_s=60).state, subscription.latest().version) == ("new", 1)


def test_iterating_ends_when_the_publication_is_closed(name):
    publication, seen = phalanx.publish(1, name), []
    for one in phalanx.subscribe(name):
        seen.append(one.state)
        if one.state < 3:
            publication.update(one.state + 1)
        else:
            publication.close()
    assert seen == [1, 2, 3]


def test_an_exception_in_the_block_is_no_end_in_order(name):
    subscription = phalanx.subscribe(name)
    with pytest.raises(ZeroDivisionError), phalanx.publish(1, name):
        subscription.latest()
        raise ZeroDivisionError
    with pytest.raises(NotPublished, match="has ended after version 1 without closing it") as caught:
        subscription.wait(timeout_s=60)
    assert (caught.value.has_ended, caught.value.is_closed) == (True, False)


def test_a_wait_ends_at_its_time_and_says_what_there_is(name):
    subscription = phalanx.subscribe(name, timeout_s=0.01)
    message = error_of(NotPublished, subscription.wait)
    assert f"subscribe('{name}'): no version newer than 0 came within 0.01 s: nobody has published" in message
    assert "nobody has published under that name: call phalanx.publish" in error_of(NotPublished, subscription.latest)
    with phalanx.publish(1, name):
        assert subscription.wait().version == 1
        assert re.search(r"newer than 9 .* has published version 1", error_of(NotPublished, subscription.wait, 9, 0.01))
    subscription.close()
    assert "is closed: call phalanx.subscribe again" in error_of(ArgumentError, subscription.latest)


def test_errors_and_subscriptions_cross_processes(name):
    with phalanx.publish(1, name):
        subscription = pickle.loads(pickle.dumps(phalanx.subscribe(name, timeout_s=3.0)))
        assert (subscription.latest().state, subscription._timeout_s) == (1, 3.0)
    with pytest.raises(NotPublished) as caught:
        subscription.wait()
    error = pickle.loads(pickle.dumps(caught.value))
    assert (type(error), str(error), error.is_closed) == (NotPublished, str(caught.value), True)
    assert error.entry == "publisher-ended"


# ---- without a copy ----------------------------------------------------------------------------------------------


def no_copy(*_):
    raise AssertionError("a tensor was copied")


@pytest.mark.parametrize("kernel", ["new", "old"])
def test_buffers_are_published_where_they_lie_and_then_are_the_writers_own(name, kernel, monkeypatch):
    if kernel == "old":
        monkeypatch.setattr(Loans, "_moved", lambda *_: None)
    tied = torch.zeros(100_000)
    with phalanx.publish({"w": tied, "tied": tied, "step": 0}, name) as publication:
        monkeypatch.setattr(contents, "_fill", no_copy)
        kept = []
        for version in range(2, 7):
            state = publication.buffers()
            assert publication.buffers()["w"].data_ptr() == state["w"].data_ptr()
            state["w"].fill_(float(version))
            state["step"] = version
            assert publication.update(state) == version
            state["w"][::1000] = -1.0  # too late
            kept += [newest(name)] if version in (2, 4) else []
            assert newest(name).state["step"] == version
            assert torch.equal(newest(name).state["tied"], torch.full((100_000,), float(version)))
            assert state["w"][0] == -1.0
        assert [one.state["w"].unique().tolist() for one in kept] == [[2.0], [4.0]]


def test_buffers_in_other_places_are_copied(name):
    with phalanx.publish([torch.zeros(100), torch.zeros(100)], name) as publication:
        first, second = publication.buffers()
        first.fill_(1.0), second.fill_(2.0)
        publication.update([second, first])  # each would overwrite the other
        assert [one[0].item() for one in newest(name).state] == [2.0, 1.0]
        publication.update([first[1:], second[::2]])
        assert [(one[0].item(), len(one)) for one in newest(name).state] == [(1.0, 99), (2.0, 50)]
        publication.update([first, torch.full((100,), 3.0)])  # one lies there, the other is copied there
        assert [one[0].item() for one in newest(name).state] == [1.0, 3.0]
        publication.update([first, second])  # they have been published: ordinary tensors now
        assert [one[0].item() for one in newest(name).state] == [1.0, 3.0]


def test_buffers_outlive_their_publication(name):
    publication = phalanx.publish(torch.zeros(10_000), name)
    state = publication.buffers()
    del publication
    phalanx.publish(torch.zeros(1), name).close()
    assert state.fill_(1.0).sum() == 10_000


def test_buffers_that_can_not_be_called_back_are_not_used_again(name, monkeypatch):
    def refuse(self):
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    with phalanx.publish(torch.zeros(100), name) as publication:
        state = publication.buffers().fill_(1.0)
        with monkeypatch.context() as patch:
            patch.setattr(Loans, "call_back", refuse)
            assert "can't be made the writer's own: Cannot allocate" in error_of(
                OutOfSharedMemory, publication.update, state
            )
        assert newest(name).state.sum() == 0
        for value in (2.0, 3.0):
            publication.update(torch.full((100,), value))
            state.fill_(-1.0)
            assert newest(name).state.sum() == 100 * value


# ---- what goes wrong ---------------------------------------------------------------------------------------------


def test_versions_that_readers_hold_are_said_and_then_end_publishing_with_names(name, capfd):
    with phalanx.publish(torch.tensor(0), name, max_versions=5) as publication:
        held = [newest(name)]
        for state in range(1, 5):
            publication.update(torch.tensor(state))
            held.append(newest(name))
        said = capfd.readouterr().err
        assert said.count("phalanx: publish(") == 2  # three, and four
        assert re.search(rf"hold 3 old versions \(.*\): version 1 by process {os.getpid()} .*; version 2 by ", said)
        message = error_of(OutOfSharedMemory, publication.update, torch.tensor(5))
        assert re.search(r"hold 4 old versions .*: version 1 by process \d+.*version 4 by .* max_versions=5 ", message)
        assert "phalanx explain versions-held" in message
        assert error_of(OutOfSharedMemory, publication.buffers) == message
        assert newest(name).state == 4
        del held[1]
        assert publication.update(torch.tensor(6)) == 6
        assert [one.state.item() for one in held] == [0, 2, 3, 4]


def test_memory_that_is_short_leaves_the_last_version(name):
    with phalanx.publish("last", name) as publication:
        with limited_files(1 << 16):
            message = error_of(OutOfSharedMemory, publication.update, torch.zeros(1 << 20))
        assert re.search(r"no 4 MiB of shared memory for another version: .*; version 1 stays; free memory", message)
        assert (newest(name).state, publication.update("next")) == ("last", 2)


def test_a_record_that_can_not_be_written_leaves_the_last_version(name, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with phalanx.publish("last", name) as publication:
        for make in (lambda: "next", publication.buffers):
            state = make()
            with monkeypatch.context() as patched:
                patched.setattr(records, "write", full)
                message = error_of(PhalanxError, publication.update, state)
            assert "the file by which readers find it can't be written: [Errno 28] No space left" in message
            assert newest(name).state == "last"
        assert publication.update("other") == 2
        assert newest(name).state == "other"


def test_an_interrupt_in_the_copy_leaves_the_last_version(name, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    with phalanx.publish(torch.ones(3), name) as publication:
        with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
            patched.setattr(contents, "_fill", interrupted)
            publication.update(torch.zeros(3))
        assert newest(name).state.sum() == 3
        assert publication.update(torch.zeros(3)) == 2
        assert newest(name).state.sum() == 0


def test_an_interrupt_when_the_record_was_replaced_takes_that_back(name, monkeypatch):
    write = records.write

    def interrupted(*given):
        write(*given)
        monkeypatch.undo()
        raise KeyboardInterrupt

    with phalanx.publish(torch.ones(3), name) as publication, phalanx.subscribe(name) as subscription:
        monkeypatch.setattr(records, "write", interrupted)
        with pytest.raises(KeyboardInterrupt):
            publication.update(torch.zeros(3))
        assert (subscription.latest().version, subscription.latest().state.sum()) == (1, 3)
        assert publication.update(torch.zeros(3)) == 2
        assert (subscription.latest().version, subscription.latest().state.sum()) == (2, 0)


class Calling:
    """Calls something while its state is taken, as a signal handler may."""

    def __init__(self, call):
        self.call = call

    def state_dict(self):
        self.call()
        return {"a": 1}

    def load_state_dict(self, state):
        pass


def test_a_call_within_another_is_refused_and_a_close_within_one_comes_after_it(name):
    publication, said = phalanx.publish({}, name), []
    for method in (publication.buffers, lambda: publication.update({}), lambda: phalanx.publish({}, name)):
        assert publication.update(Calling(lambda call=method: said.append(error_of(ArgumentError, call)))) > 1
    assert all("was called while another call of this thread is at work" in one for one in said)
    assert len(said) == 3
    reader = phalanx.subscribe(name)
    assert publication.update(Calling(lambda: (publication.close(), said.append(reader.has_ended)))) == 5
    assert (said[-1], reader.has_ended) == (False, True)
    assert "has closed it at version 5" in error_of(NotPublished, reader.latest)


def test_a_closed_publication_says_so(name):
    with phalanx.publish(1, name) as publication:
        publication.close()
        for call in (lambda: publication.update(2), publication.buffers):
            assert f"publish('{name}') is closed: call phalanx.publish again" in error_of(ArgumentError, call)


def stale(record, **changes):
    """Return the record of a publisher that is no more."""
    return dataclasses.replace(record, **changes)


@pytest.mark.parametrize(
    "changes", [{"pid": 2**22 + 1}, {"fd": 10**6}, {"inode": 1}, {"pid": 1}], ids=["pid", "fd", "inode", "init"]
)
def test_a_record_that_is_stale_confuses_nobody(name, changes):
    with phalanx.publish("gone", name):
        record = records.find(name)
    records.write(name, stale(record, version=40, **changes))
    subscription = phalanx.subscribe(name)
    assert "has ended after version 40" in error_of(NotPublished, subscription.latest)
    assert "has ended after version 40" in error_of(NotPublished, subscription.wait, timeout_s=0.01)
    with phalanx.publish("new", name) as publication:
        assert publication.version == 41
        assert subscription.wait(timeout_s=60).state == "new"


def test_a_record_with_the_largest_number_or_an_odd_token_hides_nobody(name):
    with phalanx.publish("gone", name):
        record = records.find(name)
    records.write(name, dataclasses.replace(record, version=2**62))
    with phalanx.publish("new", name) as publication:
        assert (publication.version, newest(name).state) == (1, "new")
        records.write(name, dataclasses.replace(records.find(name), token="z" * 32))
        assert "nobody has published" in error_of(NotPublished, phalanx.subscribe(name).latest)


@pytest.mark.parametrize("text", [b"", b"{}", b"[1", b"\xff", b'{"pid": 1}', b"x" * 10_000], ids=range(6))
def test_a_record_that_is_garbled_is_none(name, text):
    folder = Path(places.in_common_folder(lambda folder: folder))
    (folder / records.file_name(name)).write_bytes(text)
    assert "nobody has published" in error_of(NotPublished, phalanx.subscribe(name).latest)
    with phalanx.publish(1, name):
        assert newest(name).state == 1


def test_a_block_that_is_garbled_is_refused(name):
    with phalanx.publish({"w": torch.ones(3)}, name) as publication:
        memory = publication._newest.block.memory
        start = bytes(memory[:]).index(b'"places"')
        for begin, text in ((start, b'"pl4ces"'), (start + 16, b"1e99"), (32, b"\xff" * 8), (40, b"\xff" * 8)):
            old = memory[begin : begin + len(text)]
            memory[begin : begin + len(text)] = text
            assert "it was not written by this version of phalanx" in error_of(PhalanxError, newest, name)
            memory[begin : begin + len(text)] = old
        assert newest(name).state["w"].sum() == 3


def test_what_another_user_or_everybody_may_write_is_not_believed(name, tmp_path, monkeypatch):
    monkeypatch.setattr(places, "common_folders", lambda: [str(tmp_path / "phalanx")])
    with phalanx.publish(1, name):
        (tmp_path / "phalanx").chmod(0o755)
        assert "nobody has published" in error_of(NotPublished, newest, name)
        assert "others own it, or may enter it" in error_of(PhalanxError, phalanx.publish, 2, name)
        (tmp_path / "phalanx").chmod(0o700)
        assert newest(name).state == 1
        if os.geteuid() == 0:
            os.chown(tmp_path / "phalanx" / records.file_name(name), 12345, 12345)
            assert "nobody has published" in error_of(NotPublished, newest, name)
            os.chown(tmp_path / "phalanx" / records.file_name(name), 0, 0)


def test_a_folder_that_fails_is_replaced_by_the_next(name, tmp_path, monkeypatch):
    (tmp_path / "open").mkdir(mode=0o755)
    monkeypatch.setattr(places, "common_folders", lambda: [str(tmp_path / "open"), str(tmp_path / "own")])
    with phalanx.publish(1, name):
        assert newest(name).state == 1
        assert (tmp_path / "own" / records.file_name(name)).stat().st_mode & 0o077 in (0o44, 0)
