"""Load torch's exam so that a backend sits it under its own name, with Gloo's rights.

The exam, ``torch/testing/_internal/distributed/distributed_test.py``, knows the
backends that ship with torch by name. ``BACKEND != "gloo"`` skips, so does
``@require_backend_is_available({"gloo"})``, and sets such as
``DistTestCases.backend_feature["ddp"]`` list who may sit. A backend that the exam has
never heard of would skip half of what makes sense on a CPU and look healthy.

So the exam's source is read, its syntax tree rewritten and the result executed under
the exam's own module name. Wherever the exam asks *is this backend Gloo?* or wants *a
Gloo group*, the name becomes that of the backend under test:

* comparisons whose left side is the global ``BACKEND``;
* the argument of ``@require_backend_is_available``;
* the constant ``dist.Backend.GLOO``: the lists of backends whose profiler events are
  checked, and helper groups made by ``new_group(backend=dist.Backend.GLOO)``;
* the sets in ``DistTestCases`` that hold Gloo hold the backend too.

``BACKEND`` itself is the true name, so ``init_process_group``, ``get_backend()`` and
profiler events like ``"phalanx:all_reduce"`` are exercised as a user would meet them,
and Gloo does no work behind the scenes. Lines and file names in tracebacks stay those
of torch. Every other mention of Gloo must be in `LEFT_ALONE`: a release of torch that
words a gate differently stops the exam with `ExamChanged` instead of skipping quietly.

Two gates keep every CPU backend but MPI out of tests that it could sit. They are opened
for Gloo as well, so that Gloo's result says what to expect:

* ``BACKEND != "mpi"`` alone, on the CPU tests of all_to_all, from when only MPI had it;
* ``@skip_if_small_worldsize``, on the tests of the group ``[1, 2]``: three ranks do.

One thing besides gates is changed: the exam's own barrier, made of files, which runs at
both ends of each test. It polls every `BARRIER_POLL_S` instead of every 0.1 s, and waits
`BARRIER_TIMEOUT_S` instead of 10 s for ranks that a busy machine keeps waiting.
"""

import ast
import importlib.util
import logging
import os
import sys
from pathlib import Path
from types import ModuleType

from . import _ddp

EXAM_MODULE = "torch.testing._internal.distributed.distributed_test"

BARRIER_POLL_S = 0.002
BARRIER_TIMEOUT_S = 60

# What the exam's mentions of Gloo outside gates are, as source text.
LEFT_ALONE = {
    # Asks which backend torch logged, to look at fields that only Gloo's C++ fills.
    "ddp_logging_data.get('backend_name') == 'gloo'",
    # Any list is refused as a backend's name.
    "dist.Backend(['gloo'])",
    # A test of NCCL beside Gloo, on GPUs.
    "dist.new_group(ranks=[0, 1], backend='gloo')",
}


class ExamChanged(RuntimeError):
    """This torch words its exam in a way that the rewriting does not know."""


class _Rename(ast.NodeTransformer):
    """Puts `backend` where the exam's gates and helper groups name Gloo."""

    def __init__(self, backend: str) -> None:
        self.backend = backend
        self.in_bool_op: set[ast.Compare] = set()
        self.num_gates = 0
        self.num_constants = 0
        self.num_polls = 0
        self.unknown: list[str] = []

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        if isinstance(node.left, ast.Name) and node.left.id == "BACKEND":
            return self._renamed(node, "gloo", *self._mpi_too(node))
        if ast.unparse(node) in LEFT_ALONE:
            return node
        return self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        if isinstance(node.func, ast.Name) and node.func.id == "require_backend_is_available":
            return self._renamed(node, "gloo")
        if ast.unparse(node) in LEFT_ALONE:
            return node
        return self.generic_visit(node)

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        if ast.unparse(node) == "dist.Backend.GLOO":
            self.num_constants += 1
            return ast.copy_location(ast.Constant(self.backend), node)
        return self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        if node.value == "gloo":
            self.unknown.append(f"line {node.lineno}")
        return node

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        if node.name == "Barrier":
            for child in ast.walk(node):
                if isinstance(child, ast.Call) and ast.unparse(child.func) == "time.sleep":
                    child.args = [ast.copy_location(ast.Constant(BARRIER_POLL_S), child)]
                    self.num_polls += 1
                elif isinstance(child, ast.FunctionDef) and child.name == "sync":
                    wait_for, timeout = child.args.defaults
                    child.args.defaults = [wait_for, ast.Constant(BARRIER_TIMEOUT_S)]
                    ast.copy_location(child.args.defaults[1], timeout)
        return self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.AST:
        """Leave MPI alone where a gate names several backends, Gloo among them."""
        for value in node.values:
            if isinstance(value, ast.Compare):
                self.in_bool_op.add(value)
        return self.generic_visit(node)

    def _mpi_too(self, node: ast.Compare) -> list[str]:
        alone = isinstance(node.ops[0], ast.NotEq) and node not in self.in_bool_op
        return ["mpi"] if alone else []

    def _renamed(self, node: ast.AST, *names: str) -> ast.AST:
        for child in ast.walk(node):
            if isinstance(child, ast.Constant) and child.value in names:
                child.value = self.backend
                self.num_gates += 1
        return node


def _give_rights(common: ModuleType, backend: str, world_size: int) -> None:
    """Let `backend` into what ``common_distributed`` keeps for others."""
    tables = common.DistTestCases
    for table in (tables.skip_collective, tables.backend_feature):
        for names in table.values():
            if "gloo" in names:
                names.add(backend)
    if world_size >= 3:
        common.skip_if_small_worldsize = lambda test: test  # type: ignore[attr-defined]


def load_exam(backend: str, world_size: int, ddp: str = "") -> ModuleType:
    """Return the exam's module, ready for `backend` at `world_size`.

    The exam fixes both while it is imported, so a process can load it once.

    Args:
        backend: Name under which torch knows the backend, for example ``"gloo"``.
        world_size: Ranks that will sit each test, at least 2.
        ddp: Whose DistributedDataParallel sits its tests, which are then all that there is:
            ``"phalanx"`` or ``"torch"``; see `_ddp`.

    Raises:
        ExamChanged: This torch's exam has a gate that the rewriting does not know.
        RuntimeError: The exam has been imported before.
    """
    if EXAM_MODULE in sys.modules:
        raise RuntimeError(f"{EXAM_MODULE} is already loaded in this process; use a fresh one")
    os.environ["BACKEND"] = backend
    os.environ["WORLD_SIZE"] = str(world_size)
    # Gates look at the prefix alone; each test sets the path before its ranks start.
    os.environ["INIT_METHOD"] = "file://"
    os.environ["PYTORCH_PRINT_REPRO_ON_FAILURE"] = "0"  # it would name this package's files
    os.environ.pop("CI", None)  # torch's tests skip by other rules on its build machines

    common = importlib.import_module("torch.testing._internal.common_distributed")
    logging.getLogger(common.__name__).setLevel(logging.WARNING)  # it tells of every fork
    _give_rights(common, backend, world_size)
    if ddp:
        _ddp.open_gates(common)
    spec = importlib.util.find_spec(EXAM_MODULE)
    assert spec is not None, "every wheel of torch ships the exam"
    assert spec.origin is not None
    rename = _Rename(backend)
    tree = rename.visit(ast.parse(Path(spec.origin).read_text(encoding="utf-8")))
    if rename.unknown or not (rename.num_gates and rename.num_constants and rename.num_polls):
        raise ExamChanged(
            f"{spec.origin} mentions Gloo in unknown places "
            f"({', '.join(rename.unknown) or 'none'}) or not in the known ones "
            f"({rename.num_gates} gates, {rename.num_constants} constants, {rename.num_polls} "
            f"polls): teach {__name__} about this release of torch"
        )
    if ddp:
        tree = _ddp.rewrite(tree, ddp)
    module = importlib.util.module_from_spec(spec)
    sys.modules[EXAM_MODULE] = module  # ranks pickle the exam's classes by this name
    exec(compile(ast.fix_missing_locations(tree), spec.origin, "exec"), module.__dict__)
    return module
