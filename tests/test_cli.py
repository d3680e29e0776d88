"""The command line: what it accepts, and the one line with which it refuses."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import phalanx.checkpoint
from phalanx import cli
from phalanx.cli import main
from tests.train.runs import FakeRun

PHALANX = [sys.executable, "-m", "phalanx"]


def run_phalanx(*args, **options):
    return subprocess.run([*PHALANX, *args], capture_output=True, text=True, timeout=60, **options)


COMMANDS = tuple(cli._COMMANDS)


@pytest.fixture
def refused(capsys):
    """Check that a call is refused with its usage, a line with the mistake, and the call that was meant, if any."""

    def check(args, said, right=""):
        code = main(args)
        assert_refused(code, *capsys.readouterr(), said, right)

    return check


def assert_refused(code, out, err, said, right=""):
    usage, mistake, *more = err.splitlines()
    assert (code, out, more) == (2, "", []), err
    assert usage.startswith("usage: phalanx ")
    assert said in mistake
    assert ("ight: phalanx " in mistake) == bool(right), mistake
    assert mistake.endswith((f"; right: {right}", f"? Right: {right}") if right else said), mistake


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ([], "no command given; phalanx --help lists them"),
        (["fly"], "unknown command 'fly'; phalanx --help lists all"),
        (["train", "x.py"], "unknown command 'train'; phalanx --help lists all"),
        (["run"], "no script given"),
        (["run", "-n3", "x.py"], "unknown flag -n3: a flag of the script comes after the script"),
        (["run", "--steps", "5", "hello.py"], "unknown flag --steps: a flag of the script comes after the script"),
        (["run", "--max-restarts", "hello.py"], "needs a value: --max-restarts N, got the script 'hello.py'"),
        (["run", "--max-restarts", "a.py", "--lr", "1"], "needs a value: --max-restarts N, got the script 'a.py'"),
        (["tune", "--log-dir", "hello.py"], "--log-dir needs a value: --log-dir FOLDER, got the script 'hello.py'"),
        (["run", "python", "-u", "hello.py"], "give the script alone, without 'python' and its options"),
        (["--log-dir=hello.py"], "unknown flag --log-dir"),
        (["attach", "0", "train", "2"], "unexpected argument 'train'"),
        (["attach", "0", "train", "--job", "2"], "unexpected argument 'train'"),
        (["run", "-m", "no_such_module"], "no module named 'no_such_module'"),
        (["run", "-m", "helo.there"], "no module named 'helo'"),
        (["run", "--nproc-per-node", "two", "x.py"], "or MIN:MAX with MIN <= MAX, got 'two'"),
        (["run", "--nproc-per-node"], "--nproc-per-node needs a value: --nproc-per-node N|MIN:MAX"),
        (["run", "--run-path", "x.py"], "the script always runs as python runs it: leave it out"),
        (["run", "--hosts", "a,b", "x.py"], "on every node, with --nnodes, --node-rank and --master-addr"),
        (["run", "--nproc-per-node", "2", "--version"], "--version stands alone: phalanx --version"),
        (["run", "--nnodes", "2", "x.py"], "2 nodes need --master-addr HOST, the same on all, where node 0 listens"),
        (["run", "--no-python", "no-such-program"], "no program 'no-such-program' on the PATH"),
        (["why", "--foo"], "unknown flag --foo"),
        (["report"], "missing FOLDER"),
        (["report", "one", "two"], "unexpected argument 'two'"),
        (["ckpt"], "no command given"),
        (["ckpt", "list"], "unknown command 'list', did you mean ls?"),
        (["ckpt", ".", "1"], "'.' is a folder, not a command"),
        (["ckpt", "diff", "a b", "1", "2", "3"], "two folders are needed, got 'a b' 1 2 3"),
        (["ckpt", "ls", "x", "--version"], "--version stands alone: phalanx --version"),
        (["doctor", "now"], "unexpected argument 'now'"),
        (["explain", "xylophone"], "no entry 'xylophone'; phalanx explain lists all"),
        (["tune"], "no script given"),
        (["verify-resume"], "no script given"),
        (["check", "--resume", "--steps", "3", "x.py"], "runs the whole script; --steps is for its first steps"),
        (["warm"], "name --list or --stop"),
        # Nobody knows which of two words is the wrong one.
        (["run", "--role", "helo.py", "helo.py"], "did you mean hello.py?"),
    ],
    ids=lambda value: "_".join(value) if isinstance(value, list) else "",
)
def test_a_mistake_shows_the_usage_and_no_call_that_is_not_the_users(refused, tmp_path, monkeypatch, args, said):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "hello.py").touch()
    refused(args, said)


@pytest.mark.parametrize(
    ("args", "said", "right"),
    [
        ("rn train.py", "unknown command 'rn', did you mean run?", "run train.py"),
        ("train.py --lr 1 'a b'", "'train.py' is a script, not a command", "run train.py --lr 1 'a b'"),
        (
            "run --nproc 3 x.py --nproc-per-node 4",
            "unknown flag --nproc, did",
            "run --nproc-per-node 3 x.py --nproc-per-node 4",
        ),
        ("run --np=3 x.py -v", "unknown flag --np: the number of ranks", "run --nproc-per-node=3 x.py -v"),
        ("run --max-restarts 1 helo.py 'a b'", "no script 'helo.py' in ", "run --max-restarts 1 hello.py 'a b'"),
        ("run 'my folder/helo.py' -x", "no script 'my folder/helo.py' in ", "run 'my folder/hello.py' -x"),
        ("run --nnodes 1 python hello.py -m", "give the script alone, without 'python'", "run --nnodes 1 hello.py -m"),
        ("run --no-pin -m hello.py 2", "-m takes a module, got the file 'hello.py'", "run --no-pin hello.py 2"),
        ("check helo.py --nproc 4", "no script 'helo.py' in ", "check hello.py --nproc 4"),
        ("tune --seconds 9 helo.py", "no script 'helo.py' in ", "tune --seconds 9 hello.py"),
        ("run -m helo 3", "no module named 'helo', did you mean hello?", "run -m hello 3"),
        ("run -m foldr", "no module named 'foldr', did you mean folder?", "run -m folder"),
        ("tune --jason=1 hello.py", "unknown flag --jason, did you mean --json?", "tune --json=1 hello.py"),
        ("attach 0 train", "'train' is no rank: --job names the job", "attach 0 --job train"),
        ("ckpt 'my folder'", "'my folder' is a folder, not a command", "ckpt ls 'my folder'"),
        ("ckpt list x", "unknown command 'list', did you mean ls?", "ckpt ls x"),
        ("ckpt verfy x", "unknown command 'verfy', did you mean verify?", "ckpt verify x"),
        ("ckpt verify x --al", "unknown flag --al, did you mean --all?", "ckpt verify x --all"),
        ("doctor --jsn", "unknown flag --jsn, did you mean --json?", "doctor --json"),
        ("explain timeuot", "no entry 'timeuot', did you mean timeout?", "explain timeout"),
    ],
)
def test_a_mistake_shows_the_users_own_call_with_the_wrong_word_corrected(
    refused, tmp_path, monkeypatch, args, said, right
):
    monkeypatch.chdir(tmp_path)
    for name in ("hello.py", "my folder/hello.py", "folder/__init__.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    refused(shlex.split(args), said, f"phalanx {right}")


@pytest.mark.parametrize("command", ["run x.py", "run /x.py", "run -m x", "tune x.py", "check x.py"])
def test_a_folder_that_has_been_removed_is_named(refused, tmp_path, monkeypatch, command):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    refused(command.split(), "the current folder has been removed: cd to another")


@pytest.mark.parametrize("args", [["fly"], ["run", "missing.py"]])
def test_the_process_of_a_command_ends_with_the_code_of_a_mistake(tmp_path, args):
    done = run_phalanx(*args, cwd=tmp_path)
    said = (
        "unknown command 'fly'; phalanx --help lists all"
        if args == ["fly"]
        else f"no script 'missing.py' in '{tmp_path}'"
    )
    assert_refused(done.returncode, done.stdout, done.stderr, said)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_tells_the_version(capsys, name):
    for args in (["--version"], [name, "--version"]):
        with contextlib.suppress(SystemExit):
            assert main(args) == 0
        assert capsys.readouterr() == (f"phalanx {phalanx.__version__}\n", "")


def test_ctrl_c_while_the_command_itself_is_imported_leaves_no_traceback(tmp_path):
    (tmp_path / "shlex.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGINT)\nquote = join = str\n")
    done = run_phalanx("run", "train.py", env={**os.environ, "PYTHONPATH": str(tmp_path)})
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, "", "")


def test_a_misspelt_variable_is_named_without_a_call_that_would_not_mend_it(monkeypatch, capsys):
    monkeypatch.setenv("PHALANX_STAL_S", "1")
    assert main(["run", "train.py"]) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last == "phalanx run: unknown environment variable PHALANX_STAL_S, did you mean PHALANX_STALL_S?"


def test_a_script_that_cannot_run_is_refused_with_what_would_help(tmp_path, monkeypatch, refused):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my tool.sh").touch(mode=0o644)
    refused(["run", "."], "the folder '.' has no __main__.py; name a script in it")
    tool = "'./my tool.sh'"
    refused(["run", "--no-python", "./my tool.sh"], f"{tool} is not executable; chmod +x {tool} makes it so")


def test_a_folder_for_logs_that_can_not_be_written_is_a_refused_argument(tmp_path, capfd):
    (tmp_path / "x.py").touch()
    assert main(["run", "--log-dir", "/proc/x", str(tmp_path / "x.py")]) == 2
    assert capfd.readouterr().err == "phalanx run: can't write to --log-dir '/proc/x': No such file or directory\n"


@pytest.mark.parametrize("flag", ["--nproc-per-node", "--nproc_per_node"])
def test_flags_take_dashes_and_underscores_and_the_rest_is_the_scripts(tmp_path, flag):
    script = tmp_path / "script.py"
    script.write_text("import sys; print(*sys.argv[1:])\n")
    done = run_phalanx("run", "--no-preload", flag, "2", "--", str(script), "--nproc-per-node", "9", "--", "-x")
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [
        "[rank 0] --nproc-per-node 9 -- -x",
        "[rank 1] --nproc-per-node 9 -- -x",
    ]


def test_a_module_and_a_program_can_be_run(tmp_path):
    (tmp_path / "job.py").write_text("import os; print(__name__, os.environ['RANK'])\n")
    run = ["run", "--nproc-per-node=1", "--no-preload"]
    assert run_phalanx(*run, "-m", "job", cwd=tmp_path).stdout == "[rank 0] __main__ 0\n"
    assert run_phalanx(*run, "--no-python", "echo", "hello").stdout == "[rank 0] hello\n"


def test_help_is_no_mistake_and_fits_80_columns(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    commands = [[], *([name] for name in COMMANDS), ["run", "--nproc-per-node", "2"]]
    commands += [["ckpt", name] for name in ("ls", "show", "verify", "diff", "export")]
    for command in commands:
        helps = []
        for args in ([*command, "-h"], [*command, "--help"], ["help", *command]):
            try:
                code = main(args)
            except SystemExit as ended:
                code = ended.code
            out, err = capsys.readouterr()
            assert (code, err) == (0, ""), args
            assert max(map(len, out.splitlines())) <= 80, out
            helps.append(out)
        assert helps[0].startswith("usage: phalanx ")
        assert "  -h, --help\n      show this help" in helps[0]
        assert helps == [helps[0]] * 3


def test_a_dry_run_prints_the_plan_and_starts_nothing(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("open('started', 'w')\n")
    done = run_phalanx("run", "--dry-run", "--nproc-per-node", "3", "script.py", "x", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "--nproc-per-node" in done.stdout
    assert "3 ranks x 1 thread" in done.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["script.py"]


def test_the_supervisor_imports_neither_torch_nor_anything_heavy():
    code = "import sys, phalanx.cli; print([m for m in ('torch', 'numpy') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout == "[]\n", done.stderr


def test_every_command_prints_names_that_the_output_cannot_encode(tmp_path):
    folder = tmp_path / os.fsdecode("größe-".encode() + b"\xff")
    run = FakeRun(folder)
    run.start()
    run.steps(1, 3)
    (folder / "train.py").write_text("print('trained')\n")
    phalanx.checkpoint.save(folder / "ckpt", {"größe": torch.ones(3)}, step=1)

    printing = [
        ["report", folder],
        ["ckpt", "show", folder / "ckpt"],
        ["ckpt", "export", folder / "ckpt", folder / "out.safetensors"],
        ["run", "--dry-run", "--nproc-per-node", "1", folder / "train.py"],
    ]
    running = ["run", "--no-preload", "--nproc-per-node", "1", "--log-dir", folder / "logs", folder / "train.py"]
    calls = [(encoding, args) for encoding in ("utf-8", "ascii") for args in printing] + [("ascii", running)]
    # One interpreter for all, so that torch is imported once.
    code = (
        "import sys, phalanx.cli\n"
        f"for encoding, args in {[(encoding, [os.fspath(arg) for arg in args]) for encoding, args in calls]!a}:\n"
        "    sys.stdout.reconfigure(encoding=encoding, errors='strict')\n"
        "    code = phalanx.cli.main(args)\n"
        "    print('exit code', code, flush=True)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=300)
    assert done.stdout.count(b"exit code 0\n") == len(calls), done
    assert Path(os.fsdecode(done.stdout.splitlines()[0])) == folder / "report.html"
    assert "größe-\\udcff/logs".encode() in done.stderr


_COMMANDS = [
    ["--help"],
    ["--version"],
    ["run", "--help"],
    ["run", "--dry-run", "--nproc-per-node", "2", "train.py"],
    ["report", "run"],
    ["tune", "--help"],
    ["check", "--help"],
    ["attach", "--help"],
    ["doctor", "--help"],
    ["doctor", "--no-engines"],
    ["explain"],
    ["explain", "timeout"],
    ["trace", "--help"],
    ["ckpt", "--help"],
    ["ckpt", "show", "--help"],
    ["ckpt", "show", "run/ckpt"],
]


@pytest.fixture
def folder_with_a_run(tmp_path):
    run = FakeRun(tmp_path / "run")
    run.start()
    run.steps(1, 3)
    (tmp_path / "train.py").write_text("print('trained')\n")
    phalanx.checkpoint.save(tmp_path / "run" / "ckpt", {"weight": torch.ones(3)}, step=1)
    phalanx.checkpoint.wait()
    return tmp_path


@pytest.mark.parametrize(
    ("unbuffered", "commands"),
    [("", _COMMANDS), ("1", [*_COMMANDS[1:5], _COMMANDS[-1]])],
    ids=["buffered", "unbuffered"],
)
def test_every_command_ends_quietly_when_its_reader_has_gone(folder_with_a_run, unbuffered, commands):
    read_end, write_end = os.pipe()
    os.close(read_end)
    ended = outputs_of(commands, write_end, unbuffered, folder_with_a_run)
    assert ended == [(b"", 141)] * len(commands)


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_every_command_says_in_a_line_that_its_output_has_no_room(folder_with_a_run, unbuffered):
    commands = _COMMANDS[1:5]  # run says it in words of its own
    ended = outputs_of(commands, os.open("/dev/full", os.O_WRONLY), unbuffered, folder_with_a_run)
    assert ended == [(b"phalanx: the output can't be written: No space left on device\n", 1)] * len(commands)


def outputs_of(commands, write_end, unbuffered, folder):
    """Return what commands write to stderr, and their exit codes, with an output that is closed here."""
    started = [
        subprocess.Popen(
            [*PHALANX, *args],
            stdout=write_end,
            stderr=subprocess.PIPE,
            cwd=folder,
            env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
        )
        for args in commands
    ]
    os.close(write_end)
    return [(done.communicate(timeout=120)[1], done.returncode) for done in started]


def test_every_command_ends_quietly_after_ctrl_c():
    # It comes as early as it can, while modules are imported, which is where a person meets the traceback.
    program = """
import os, signal, sys
module = ""
class Interrupt:
    def find_spec(self, name, path, target=None):
        if name == module:
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Interrupt())
from phalanx import cli
for command, (*_, module, _) in cli._COMMANDS.items():
    module = f"phalanx.{module}"
    assert module not in sys.modules
    if (child := os.fork()) == 0:
        sys.exit(cli.main([command, "nothing.py"]))
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code == 130, (command, code)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_a_message_that_nobody_reads_is_no_traceback(tmp_path):
    read_end, write_end = os.pipe()
    os.close(read_end)
    done = subprocess.run([*PHALANX, "fly"], stdout=write_end, stderr=write_end, timeout=60)
    os.close(write_end)
    assert done.returncode == 141
