"""Any damage to a file of a checkpoint is noticed, and the previous checkpoint is loaded."""

from __future__ import annotations

import base64
import hashlib
import itertools
import json
import os
import shutil
import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import phalanx
import phalanx.checkpoint as ckpt
from phalanx import CheckpointError
from phalanx.checkpoint.disk import folder
from phalanx.checkpoint.state.blocks import _do_tile
from phalanx.checkpoint.state.image import Part, fill, lay_out
from tests.checkpoint._tools import flip_bit, save

FILES = ("rank_00000.safetensors", "manifest.json")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A folder with checkpoints of steps 1 and 2."""
    folder = tmp_path_factory.mktemp("whole")
    for number in (1, 2):
        save(folder, {"x": torch.full((2000,), float(number)), "epoch": number}, number, metric=1e-7)
    return folder


@pytest.fixture(scope="module")
def damaged(whole, tmp_path_factory):
    """``damaged(damage, name)``: the same, with `damage` done to a file of step 2."""
    folder = tmp_path_factory.mktemp("damaged")

    def make(damage, name):
        shutil.copytree(whole, folder, dirs_exist_ok=True)
        damage(folder / "step-00000002" / name)
        return folder

    return make


def assert_gives_way(folder, is_whole=False):
    state = {"x": torch.zeros(2000), "epoch": 0}
    with pytest.warns(UserWarning, match=r"step-00000002.*The checkpoint of step 1 is loaded instead"):
        assert ckpt.load(folder, state) == ckpt.Loaded(1, "disk")
    assert state["epoch"] == 1
    assert state["x"].eq(1).all()
    assert is_whole or "step-00000002" in ckpt.verify(folder)[0]
    with pytest.raises(CheckpointError, match="step-00000002"):
        ckpt.load(folder, state, 2)


@pytest.mark.parametrize("name", FILES)
@settings(max_examples=50)
@given(where=st.floats(0, 1, exclude_max=True))
def test_one_flipped_bit_anywhere_is_noticed(damaged, name, where):
    assert_gives_way(damaged(lambda path: flip_bit(path, int(where * 8 * path.stat().st_size)), name))


@pytest.mark.parametrize("name", FILES)
@settings(max_examples=50)
@given(where=st.floats(0, 1, exclude_max=True))
def test_a_file_that_ends_too_early_is_noticed(damaged, name, where):
    assert_gives_way(
        damaged(lambda path: path.write_bytes(path.read_bytes()[: int(where * path.stat().st_size)]), name)
    )


def put_fifo(path):
    path.unlink()
    os.mkfifo(path)


def put_link_to_device(path):
    path.unlink()
    path.symlink_to("/dev/zero")


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("put", [put_fifo, put_link_to_device])
def test_what_is_no_regular_file_is_not_read(whole, tmp_path, put, name):
    folder = tmp_path / "own"
    shutil.copytree(whole, folder)
    put(folder / "step-00000002" / name)
    assert_gives_way(folder)
    assert "Not a regular file" in ckpt.verify(folder)[0]


@pytest.mark.parametrize("name", FILES)
def test_a_torn_file_is_noticed(damaged, name):
    """Its end was never written: it has the length, and zeros."""

    def tear(path):
        data = path.read_bytes()
        path.write_bytes(data[: len(data) // 2].ljust(len(data), b"\0"))

    assert_gives_way(damaged(tear, name))


@pytest.mark.parametrize("name", FILES)
def test_a_missing_file_is_noticed(damaged, name):
    assert_gives_way(damaged(lambda path: path.unlink(), name))


@pytest.mark.parametrize("name", FILES)
def test_a_file_with_trailing_bytes_is_noticed(damaged, name):
    assert_gives_way(damaged(lambda path: path.write_bytes(path.read_bytes() + b" "), name))


def test_every_single_bit_of_the_manifest_counts(damaged):
    folder = damaged(lambda path: None, "manifest.json")
    text = (folder / "step-00000002" / "manifest.json").read_bytes()
    with open(folder / "step-00000002" / "manifest.json", "r+b", buffering=0) as file:
        for position in range(8 * len(text)):
            place, byte = position // 8, text[position // 8]
            os.pwrite(file.fileno(), bytes([byte ^ 1 << position % 8]), place)
            assert [checkpoint.step for checkpoint in ckpt.list_checkpoints(folder)] == [1], position
            os.pwrite(file.fileno(), bytes([byte]), place)
    assert not ckpt.verify(folder)


def test_a_manifest_of_another_step_is_noticed(damaged):
    assert_gives_way(damaged(lambda path: shutil.copy(path.parents[1] / "step-00000001" / path.name, path), FILES[1]))


def test_a_newer_format_is_named_as_such(damaged):
    from phalanx.checkpoint.disk.folder import _sign

    def date_forward(path):
        manifest = json.loads(path.read_text())
        del manifest["checksum"]
        path.write_text(_sign({**manifest, "format": 2}))

    with pytest.warns(UserWarning, match=r"was written by a newer phalanx \(format 2\)"):
        ckpt.load(damaged(date_forward, "manifest.json"), {"epoch": 0})


# ---------------------------------------------------------------- what somebody has written by hand, with right sums


def resign(path, change):
    """Change the manifest and sign it again."""
    manifest = json.loads(path.read_text())
    del manifest["checksum"]
    change(manifest)
    path.write_text(folder._sign(manifest))


def rewrite(path, change):
    """Change a file's header by `change(entries, metadata)`, with right sums in the manifest."""
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    entries = json.loads(data[8 : 8 + length])
    metadata = json.loads(entries["__metadata__"]["phalanx"])
    change(entries, metadata)
    entries["__metadata__"]["phalanx"] = json.dumps(metadata)
    text = json.dumps(entries).encode()
    text = text.ljust(-(-len(text) // 4096) * 4096 - 8 + (4 if change is shift else 0))
    data = len(text).to_bytes(8, "little") + text + data[8 + length :]
    path.write_bytes(data)
    signed = {"size_bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    resign(path.with_name("manifest.json"), lambda manifest: manifest["files"].update({path.name: signed}))


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m["files"].clear(),
        lambda m: m["files"].update({"rank_00001.safetensors": m["files"]["rank_00000.safetensors"]}),
        lambda m: m["files"].update({"../x": m["files"].pop("rank_00000.safetensors")}),
        lambda m: m.update(world_size=2),
        lambda m: m.update(world_size=10**18),
        lambda m: m.update(files=3),
        lambda m: m.update(format="new"),
        lambda m: m.update(saved_at=1e300),
        lambda m: m.update(metric=10**400),
        lambda m: m["files"]["rank_00000.safetensors"].update(size_bytes="1"),
        lambda m: m["files"]["rank_00000.safetensors"].pop("sha256"),
    ],
)
def test_a_manifest_that_makes_no_sense_gives_way(damaged, change):
    assert_gives_way(damaged(lambda path: resign(path, change), "manifest.json"))


def shift(entries, metadata):
    """`rewrite` puts the data behind a header of another length, where complex numbers are not aligned."""


def set_node(node):
    return lambda entries, metadata: metadata["tree"]["dict"].append(["evil", node])


OBJECTS = {"numpy": base64.b64encode(b"A" * 16).decode(), "dtype": "|O", "shape": [2], "scalar": False}


@pytest.mark.parametrize(
    "change",
    [
        shift,
        set_node(OBJECTS),  # whose bytes would be taken for addresses
        set_node({"numpy": OBJECTS["numpy"], "dtype": "i4,O", "shape": [1], "scalar": False}),
        set_node({"set": [{"list": []}]}),
        set_node({"dict": [[{"list": []}, 1]]}),
        set_node({"device": 3.5}),
        set_node({"tensor": "x"}),
        set_node({"tensor": "x", "shape": [2**40, 2**40], "dtype": "float32"}),
        set_node({"float": None}),
        set_node({}),
        lambda entries, metadata: metadata.pop("is_alike"),
        lambda entries, metadata: metadata.update(rank=1),
        lambda entries, metadata: metadata["blocks"].pop("x"),
        lambda entries, metadata: entries["x"].update(dtype="I32"),
        lambda entries, metadata: entries["x"].update(shape=[1000, 2.0]),
        lambda entries, metadata: entries["x"]["data_offsets"].reverse(),
        lambda entries, metadata: entries.update(y=entries["x"]),  # the same bytes twice
    ],
)
def test_a_file_that_makes_no_sense_gives_way(whole, damaged, change):
    def write(path):
        save(path.parents[1], {"x": torch.ones(2000), "z": torch.ones(3, dtype=torch.complex128), "epoch": 2}, 2)
        rewrite(path, change)

    state = {"x": torch.zeros(2000), "epoch": 0}
    with pytest.warns(UserWarning, match=r"step-00000002.*The checkpoint of step 1 is loaded instead"):
        assert ckpt.load(damaged(write, FILES[0]), state) == ckpt.Loaded(1, "disk")
    assert state["x"].eq(1).all()


def test_a_tensor_of_blocks_that_overlap_gives_way(damaged):
    """As many elements as are wanted, but some of them twice and some never."""

    def write(path):
        parts = [Part("x", (place,), torch.ones(1000)) for place in (0, 500)]
        node = {"tensor": "x", "shape": [2000], "dtype": "float32"}
        tree = {"dict": [["x", node], ["epoch", 2]]}
        metadata = {"step": 2, "rank": 0, "world_size": 1, "is_alike": True, "tree": tree}
        layout = lay_out(parts, metadata)
        data = bytearray(layout.size_bytes)
        fill(data, layout, parts)
        path.write_bytes(data)
        rewrite(path, lambda *_: 0)

    assert_gives_way(damaged(write, FILES[0]), is_whole=True)


def forge(path, tree, parts):
    """Write a file of that tree, with right sums, in place of the one of step 2."""
    layout = lay_out(parts, {"step": 2, "rank": 0, "world_size": 1, "is_alike": True, "tree": {"dict": tree}})
    data = bytearray(layout.size_bytes)
    fill(data, layout, parts)
    path.write_bytes(data)
    rewrite(path, lambda *_: 0)


def test_one_tensor_under_many_names_gives_way_at_once(damaged):
    def write(path):
        node = {"tensor": "x", "shape": [4_000], "dtype": "uint8"}
        parts = [Part("x", (place,), torch.ones(1, dtype=torch.uint8)) for place in range(4_000)]
        forge(path, [["epoch", 2], *([f"x{i}", node] for i in range(4_000))], parts)

    start = time.process_time()
    assert_gives_way(damaged(write, FILES[0]), is_whole=True)
    assert time.process_time() - start < 10  # 16,000,000 looks at a block


@pytest.mark.parametrize("rows", [1, 2])
def test_a_row_in_many_blocks_takes_linear_time(tmp_path, rows):
    num = 5000
    parts = [Part("x", (0, place), torch.ones(rows, 1, dtype=torch.uint8)) for place in range(num)]
    save(tmp_path, {"x": torch.zeros(2)}, 2)
    node = {"tensor": "x", "shape": [rows, num], "dtype": "uint8"}
    forge(tmp_path / "step-00000002" / FILES[0], [["x", node]], parts)
    state = {"x": None}
    start = time.process_time()
    assert ckpt.load(tmp_path, state) == ckpt.Loaded(2, "disk")
    assert time.process_time() - start < 4  # it took 19 s
    assert state["x"].sum() == rows * num


@settings(max_examples=300)
@given(st.data())
def test_blocks_are_taken_exactly_if_they_cover_each_element_once(data):
    whole = tuple(data.draw(st.lists(st.integers(0, 3), min_size=1, max_size=3)))
    edges = [st.tuples(*[st.integers(0, size)] * 2).map(sorted) for size in whole]
    boxes = data.draw(st.lists(st.tuples(*edges), max_size=4))
    if data.draw(st.booleans()):  # a grid, maybe one box short or one too many
        cuts = [sorted({0, size, data.draw(st.integers(0, size))}) for size in whole]
        boxes = [*itertools.product(*map(itertools.pairwise, cuts)), *boxes[:1]][data.draw(st.integers(0, 1)) :]
    counts = torch.zeros(whole, dtype=torch.int64)
    for box in boxes:
        counts[tuple(slice(*edge) for edge in box)] += 1
    blocks = [(tuple(low for low, _ in box), tuple(high - low for low, high in box)) for box in boxes]
    blocks = [block for block in blocks if 0 not in block[1]]
    assert _do_tile(blocks, ((0,) * len(whole), whole)) == bool(counts.eq(1).all())


def test_a_manifest_that_can_not_be_read_is_damage(damaged):
    def replace(path):
        path.unlink()
        path.mkdir()

    found = damaged(replace, FILES[1])
    try:
        assert_gives_way(found)
        assert [checkpoint.step for checkpoint in ckpt.list_checkpoints(found)] == [1]
    finally:
        (found / "step-00000002" / FILES[1]).rmdir()


def test_what_is_no_checkpoint_is_left_alone(whole, tmp_path):
    folder = shutil.copytree(whole, tmp_path / "copy")
    for name in ("step-9", "step-000000009", "step-٠٠٠٠٠٠٠٣", "step-00000003.bak", "notes"):
        (folder / name).mkdir()
    assert [checkpoint.step for checkpoint in ckpt.list_checkpoints(folder)] == [1, 2]
    save(folder, {"epoch": 4}, 4)
    assert {"step-9", "step-000000009", "step-٠٠٠٠٠٠٠٣", "step-00000003.bak", "notes"} <= {
        path.name for path in folder.iterdir()
    }


def test_a_trainer_that_goes_on_from_the_one_before_warns_at_the_line_of_the_script(tmp_path):
    def trainer(max_steps):
        layer = torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.01)
        options = {"max_steps": max_steps, "save_every": 2, "global_batch_size": 4, "folder": str(tmp_path)}
        return phalanx.Trainer(layer, optimizer, torch.nn.functional.mse_loss, **options)

    data = torch.utils.data.TensorDataset(torch.ones(16, 2), torch.ones(16, 1))
    with phalanx.init():
        trainer(4).fit(data)
        flip_bit(tmp_path / "checkpoints" / "step-00000004" / FILES[0], 8 * 2000)
        again = trainer(6)
        with pytest.warns(UserWarning, match=r"step-00000004.*The checkpoint of step 2 is loaded instead") as seen:
            again.fit(data)
    assert [one.filename for one in seen] == [__file__]
