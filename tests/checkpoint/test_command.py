"""``phalanx ckpt``: what it shows, compares and exports, and its errors."""

from __future__ import annotations

import contextlib
import fcntl
import gc
import os
import struct
import subprocess
import sys
import termios

import numpy
import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.fsdp import fully_shard

from phalanx import CheckpointError, cli
from phalanx.checkpoint import load
from phalanx.checkpoint.disk import folder as folders
from phalanx.testing import run_ranks
from tests.checkpoint._tools import assert_same, copy_of, flip_bit, model, save


def save_sharded(rank, world_size, folder):
    """Two steps of training, and a third that differs in one weight and one value."""
    module = model()
    wanted = copy_of(module)
    fully_shard(module)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    state = {"model": module, "optimizer": optimizer, "epoch": 1, "note": {"names": ["a", "b"], "loss": float("nan")}}
    save(folder, state, 10, metric=0.5)
    state["epoch"] = 2
    with torch.no_grad():
        next(iter(module.parameters())).add_(0.25)
    save(folder, state, 20)
    for parameter in module.parameters():  # as after a step, which would import for seconds
        optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
    save(folder, {**state, "array": numpy.zeros((3, 5)), "bytes": bytes(5000)}, 30)
    return wanted


def save_stages(rank, world_size, folder):
    save(folder, {"stage": torch.full((300, 300), float(rank))})


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved") / "c"
    [wanted, _] = run_ranks(save_sharded, 2, str(folder))
    run_ranks(save_stages, 2, str(folder.parent / "stages"))
    return folder, wanted


@pytest.fixture
def ckpt(capsys):
    """``ckpt(*args)``: exit code, lines of stdout, stderr."""

    def call(*args):
        code = cli.main(["ckpt", *map(str, args)])
        out, err = capsys.readouterr()
        return code, out.splitlines(), err

    return call


@pytest.fixture
def damaged(saved, tmp_path):
    """A copy in which a file of step 20 and the manifest of step 30 are damaged."""
    import shutil

    folder = shutil.copytree(saved[0], tmp_path / "damaged")
    flip_bit(folder / "step-00000020" / "rank_00001.safetensors", 8 * 4096)
    flip_bit(folder / "step-00000030" / "manifest.json", 99)
    return folder


def test_ls_has_a_line_for_each(saved, ckpt):
    code, lines, err = ckpt("ls", saved[0])
    assert (code, err) == (0, "")
    assert lines[0].split() == ["step", "saved", "size", "ranks", "metric", "state"]
    assert [line.split()[0] for line in lines[1:]] == ["10", "20", "30"]
    assert lines[1].split()[-3:] == ["2", "0.5", "complete"]
    assert lines[2].split()[-2:] == ["2", "complete"]


def test_the_folder_of_a_run_stands_for_its_checkpoints(saved, ckpt, tmp_path):
    (tmp_path / "checkpoints").symlink_to(saved[0])
    for name, *options in (["ls"], ["show", "--step", 10], ["verify", "--all"], ["diff", 10, 20]):
        assert ckpt(name, tmp_path, *options) == ckpt(name, saved[0], *options)
    assert ckpt("export", tmp_path, tmp_path / "m.pt")[0] == 0


def test_the_folder_of_one_checkpoint_stands_for_that_checkpoint(saved, ckpt):
    one = saved[0] / "step-00000010"
    [_, row], whole = ckpt("ls", one)[1], ckpt("ls", saved[0])[1]
    assert row.split() == whole[1].split()
    for options in ([], ["--all"], ["--step", 10]):
        assert ckpt("verify", one, *options) == (0, ["step 10: whole"], "")
    for name in ("show", "verify"):
        assert ckpt(name, one, "--step", 20)[2].endswith("has no checkpoint of step 20; it has steps 10\n")


def test_ls_names_damage_that_the_manifest_tells(damaged, ckpt):
    (damaged / "step-00000010" / "rank_00000.safetensors").write_bytes(b"short")
    code, lines, _ = ckpt("ls", damaged)
    assert code == 0
    assert " damaged: rank_00000.safetensors has 5 bytes instead of " in lines[1]
    assert lines[3].endswith(" damaged: manifest.json was altered")
    (damaged / "step-00000010" / "rank_00000.safetensors").unlink()
    assert ckpt("ls", damaged)[1][1].endswith("damaged: rank_00000.safetensors: No such file or directory")


def test_ls_claims_no_more_than_it_has_looked_at(damaged, ckpt, capsys):
    [_, _, altered, _] = ckpt("ls", damaged)[1]
    assert altered.endswith("complete"), "its sizes are right"
    assert ckpt("verify", damaged, "--step", 20)[0] == 1
    with contextlib.suppress(SystemExit):
        cli.main(["ckpt", "ls", "--help"])
    said = " ".join(capsys.readouterr().out.split())
    assert "complete: every file has its size (verify compares the bytes)" in said


def test_show_has_names_dtypes_shapes_and_values(saved, ckpt):
    code, lines, _ = ckpt("show", saved[0])
    assert code == 0
    assert lines[0].startswith("step 30, ")
    assert lines[0].endswith(" of 2 ranks; what rank 0 has saved:")
    rows = dict(line.split(None, 1) for line in lines[2:])
    assert rows["model.3.weight"] == "float32 [150, 150]"
    assert rows["optimizer.state.0.momentum_buffer"] == "float32 [150, 20]"
    assert rows["optimizer.param_groups.0.lr"] == "0.1"
    assert rows["epoch"] == "2"
    assert rows["note.names"] == "['a', 'b']"
    assert rows["note.loss"] == "nan"
    assert rows["array"] == "numpy <f8 [3, 5]"
    assert rows["bytes"] == "bytes [5000]"
    _, lines, _ = ckpt("show", saved[0], "--step", 10)
    assert dict(line.split(None, 1) for line in lines[2:])["epoch"] == "1"
    assert ckpt("show", saved[0] / "step-00000010")[1] == lines, "a checkpoint's own folder will do"


def test_verify_names_the_damaged_file(damaged, ckpt):
    assert ckpt("verify", damaged, "--step", 10) == (0, ["step 10: whole"], "")
    code, lines, _ = ckpt("verify", damaged)
    assert (code, len(lines)) == (1, 1)
    code, lines, _ = ckpt("verify", damaged, "--all")
    assert code == 1
    assert lines[0] == "step 10: whole"
    assert "step-00000020/rank_00001.safetensors was altered" in lines[1]
    assert "step-00000030/manifest.json was altered" in lines[2]


def test_diff_names_what_differs_and_by_how_much(saved, ckpt):
    code, lines, _ = ckpt("diff", saved[0], 10, 20)
    assert code == 1
    assert len(lines) == 2
    assert lines[0].startswith("model.0.weight")
    assert "by at most 0.25" in lines[0]
    assert lines[1].startswith("epoch")
    assert "1 and 2" in lines[1]
    assert ckpt("diff", saved[0] / "step-00000010", saved[0] / "step-00000020")[:2] == (code, lines)


def test_diff_of_equal_bits_is_none(saved, ckpt):
    code, lines, _ = ckpt("diff", saved[0], saved[0])
    assert code == 0
    assert lines[0].endswith("hold the same bits")


def test_diff_looks_at_every_element_and_every_kind(ckpt, tmp_path):
    one = {
        "array": numpy.zeros(5000),
        "scalar": numpy.float32(1),
        "bytes": bytes(5000),
        "nan": float("nan"),
        "list": [1],
    }
    one["tensor"] = torch.tensor([1.0, float("nan")])
    middle = numpy.arange(5000) == 2500
    other = {
        "array": middle * 1.0,
        "scalar": numpy.float32(2),
        "bytes": bytes(middle),
        "nan": float("nan"),
        "list": [1, 2],
    }
    other["more"] = other["tensor"] = torch.tensor([1.0, float("nan")])
    save(tmp_path, one, 1)
    save(tmp_path, other, 2)
    code, lines, _ = ckpt("diff", tmp_path, 1, 2)
    assert code == 1
    assert [line.split()[0] for line in lines] == ["array", "scalar", "bytes", "list", "more"]
    assert lines[0].endswith("numpy float64[5000] and numpy float64[5000]")
    assert lines[4].endswith("missing and there")


def test_export_makes_one_file_of_the_whole_model(saved, ckpt, tmp_path):
    folder, wanted = saved
    code, lines, _ = ckpt("export", folder, tmp_path / "m.safetensors", "--step", 10)
    assert code == 0
    assert f"{len(wanted)} tensors of step 10" in lines[0]
    got = load_file(tmp_path / "m.safetensors")
    assert_same({name: got[name] for name in wanted}, wanted)
    assert ckpt("export", folder, tmp_path / "m.pt", "--step", 10)[0] == 0
    fresh = model()
    fresh.load_state_dict(torch.load(tmp_path / "m.pt", weights_only=True))
    assert_same(copy_of(fresh), wanted)
    assert sorted(os.listdir(tmp_path)) == ["m.pt", "m.safetensors"]


def test_export_of_a_part(saved, ckpt, tmp_path):
    assert ckpt("export", saved[0], tmp_path / "o.safetensors", "--key", "optimizer.state")[0] == 0
    assert load_file(tmp_path / "o.safetensors")["0.momentum_buffer"].shape == (150, 20)


def test_export_of_ranks_that_differ_needs_one_named(saved, ckpt, tmp_path):
    stages = saved[0].parent / "stages"
    code, _, err = ckpt("export", stages, tmp_path / "s.safetensors")
    assert code == 2
    assert "each of 2 ranks has saved tensors of its own: choose one with --rank" in err
    assert ckpt("export", stages, tmp_path / "s.safetensors", "--rank", 1)[0] == 0
    assert load_file(tmp_path / "s.safetensors")["stage"].eq(1).all()


def test_every_dtype_is_exported_or_refused(ckpt, tmp_path):
    known = {str(dtype): torch.ones(3).to(dtype) for dtype in (torch.bfloat16, torch.float8_e4m3fn, torch.bool)}
    save(tmp_path / "c", {"known": known, "odd": torch.ones(2, dtype=torch.complex64)})
    assert ckpt("export", tmp_path / "c", tmp_path / "k.safetensors", "--key", "known")[0] == 0
    assert_same(dict(sorted(load_file(tmp_path / "k.safetensors").items())), dict(sorted(known.items())))
    code, _, err = ckpt("export", tmp_path / "c", tmp_path / "o.safetensors")
    assert code == 2
    assert "'odd' is torch.complex64, which safetensors does not support; export to a .pt file" in err


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["fly"], "unknown command 'fly'"),
        (["ls"], "missing FOLDER"),
        (["ls", "none"], "'none' is not a folder"),
        (["ls", "."], "'.' holds no checkpoint"),
        (["show", "none"], "'none' is not a folder"),
        (["show", "SAVED", "--step", "7"], "has no checkpoint of step 7; it has steps 10, 20, 30"),
        (["show", "SAVED", "--step", "x"], "--step must be a whole number of at least 0, got 'x'"),
        (["show", "SAVED", "--rank", "2"], "--rank must lie in [0, 2), got 2"),
        (["verify", "."], "holds no checkpoint"),
        (["verify", "SAVED", "--step", "7"], "has no checkpoint of step 7"),
        (["verify", "SAVED", "--step", "10", "--all"], "--step and --all contradict each other"),
        (["diff", "SAVED", "10", "x"], "a folder and two steps, or two folders are needed"),
        (["diff", "SAVED", "10", "7"], "has no checkpoint of step 7"),
        (["export", "SAVED", "m.bin"], "'m.bin' must end in .safetensors or .pt"),
        (["export", "SAVED", "m.pt", "--key", "net"], "the checkpoint has no 'net'; it has 'model', 'optimizer'"),
        (["export", "SAVED", "none/m.pt"], "there is no folder 'none' to write to; make it first: mkdir -p none"),
        (["export", "SAVED", "/dev/full/m.pt"], "there is no folder '/dev/full' to write to"),
        (["export", "SAVED", "/proc/m.pt"], "can't write '/proc/m.pt': No such file or directory"),
    ],
)
def test_a_mistake_is_one_line_and_one_in_the_call_shows_the_usage(saved, ckpt, tmp_path, monkeypatch, args, said):
    monkeypatch.chdir(tmp_path)
    code, lines, err = ckpt(*(str(saved[0]) if arg == "SAVED" else arg for arg in args))
    assert code == 2
    assert lines == []
    assert said in err
    *usage, line = err.splitlines()
    assert line.startswith("phalanx ckpt")
    is_in_call = any(word in line for word in ("unknown", "missing", "must be", "contradict", "are needed"))
    assert len(usage) == is_in_call
    assert all(first.startswith("usage: phalanx ckpt ") for first in usage)
    assert not list(tmp_path.iterdir())


def test_the_runs_of_a_folder_are_listed_and_otherwise_named(ckpt, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for run, step in (("runs/a/checkpoints", 1), ("runs/a/checkpoints", 2), ("runs/b", 3)):
        save(run, {"weight": torch.ones(3)}, step)
    (tmp_path / "runs/notes.txt").touch()
    assert ckpt("ls", "runs") == (
        0,
        ["run     checkpoints  newest step", "runs/a  2            2", "runs/b  1            3"],
        "",
    )
    code, _, said = ckpt("show", "runs")
    assert (code, said) == (
        2,
        "phalanx ckpt show: 'runs' holds no checkpoint, but the runs in it do; name one: runs/a, runs/b\n",
    )


def test_what_is_damaged_is_neither_shown_nor_exported(damaged, ckpt, tmp_path):
    for args in (["show", damaged, "--step", 20], ["export", damaged, tmp_path / "m.pt", "--step", 20]):
        code, lines, err = ckpt(*args)
        assert (code, lines) == (2, [])
        assert "rank_00001.safetensors was altered" in err
    assert ckpt("diff", damaged, 10, 20)[0] == 2


EVIL = "\x1b]0;owned\x07\x1b[2J\n\u202e\ud800[red]"


def test_no_name_and_no_value_of_a_checkpoint_reaches_the_terminal_as_more_than_text(ckpt, tmp_path):
    for number in (1, 2):
        save(tmp_path, {EVIL: {EVIL: number}, "t": [EVIL * number], "k": {(EVIL,): torch.ones(number)}}, number)
    for args in (["show", tmp_path], ["diff", tmp_path, 1, 2], ["export", tmp_path, tmp_path / "x.pt", "--key", "no"]):
        _, lines, err = ckpt(*args)
        shown = "".join(lines) + err.rstrip("\n")
        assert shown.isprintable()
        assert r"\x1b]0;owned\x07\x1b[2J\n\u202e\ud800[red]" in shown


def test_nor_does_it_reach_the_terminal_in_an_error(tmp_path):
    save(tmp_path, {EVIL: 1})
    with pytest.raises(CheckpointError) as caught:
        load(tmp_path, {"other": 1})
    assert str(caught.value).isprintable()
    module = torch.nn.Linear(1, 1)
    save(tmp_path, {"model": {**module.state_dict(), EVIL: torch.ones(1)}}, 2)
    with pytest.raises(CheckpointError, match="1 unexpected in it") as caught:
        load(tmp_path, {"model": module})
    assert "\x1b" not in str(caught.value)
    del caught
    gc.collect()  # the files that the tracebacks hold


@pytest.mark.parametrize("args", [["--help"], ["export", "--help"]])
def test_help_is_no_mistake(capsys, args):
    with contextlib.suppress(SystemExit):
        assert cli.main(["ckpt", *args]) == 0
    assert "phalanx ckpt export FOLDER OUT" in capsys.readouterr().out


def test_a_terminal_gets_a_table(saved):
    command = [sys.executable, "-m", "phalanx", "ckpt", "ls", str(saved[0])]
    shown = on_terminal(command)
    assert "│ 10 " in shown
    assert "│ complete" in shown


def on_terminal(command, num_columns=80):
    """Return what a command shows on a terminal of that width."""
    ours, theirs = os.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, num_columns, 0, 0))
    subprocess.run(command, stdout=theirs, stdin=theirs, check=True, timeout=60)
    shown = os.read(ours, 10_000).decode()
    os.close(ours)
    os.close(theirs)
    return shown


def test_a_narrow_terminal_cuts_no_reason_off(damaged):
    file = damaged / "step-00000010" / "rank_00000.safetensors"
    file.write_bytes(b"short")
    shown = on_terminal([sys.executable, "-m", "phalanx", "ckpt", "ls", str(damaged)])
    assert "…" not in shown
    last_column = "".join(line.rstrip().rstrip("│").rpartition("│")[2].strip() for line in shown.splitlines())
    assert "damaged:rank_00000.safetensorshas5bytesinsteadof" in last_column.replace(" ", "")


def test_a_save_that_is_under_way_is_mentioned(ckpt, tmp_path):
    folder = tmp_path / "run" / "checkpoints"
    folder.mkdir(parents=True)
    draft = folders.begin(str(folder), 3, 1, None)
    mark = folders.Writing(draft.path)
    code, lines, _ = ckpt("ls", tmp_path / "run")
    assert (code, lines[1].split()[0]) == (0, "3")
    assert lines[1].endswith("being saved by another process")
    code, _, said = ckpt("verify", tmp_path / "run")
    assert code == 2
    assert "holds no checkpoint yet: another process is saving step 3 there" in said
    kept = draft.path.replace("checkpoints", "..", 1)
    os.rename(draft.path, kept)
    save(folder, {"x": 1})
    os.rename(kept, draft.path)
    code, lines, _ = ckpt("ls", tmp_path / "run")
    assert [line.split()[0] for line in lines] == ["step", "1", "3"]
    code, _, said = ckpt("show", tmp_path / "run")
    assert code == 0
    assert "another process is saving step 3 there" in said
    assert said.rstrip().endswith("taking step 1")
    mark.end()
    assert len(ckpt("ls", tmp_path / "run")[1]) == 2
    assert ckpt("show", tmp_path / "run")[2] == ""


def test_what_reads_no_tensor_starts_without_torch(tmp_path):
    save(tmp_path / "c", {"model": model(), "epoch": 3, "size": torch.Size([2]), "dtype": torch.bfloat16})
    calls = [["ckpt", name, str(tmp_path / "c")] for name in ("ls", "show", "verify")]
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            f"import sys; from phalanx import cli; print([*map(cli.main, {calls})], 'torch' in sys.modules)",
        ],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout.splitlines()[-1] == "[0, 0, 0] False", done.stderr
    assert "torch.bfloat16" in done.stdout
