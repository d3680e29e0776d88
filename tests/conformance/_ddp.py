"""Rewrite the exam's tests of DistributedDataParallel so that phalanx's class sits them, on a CPU.

Nearly all of them are written for one GPU per rank, yet few ask anything of a GPU: a rank's
number serves as the device of whatever the test makes. So the tree of the exam changes thus:

* tests that never come to the class are dropped: its replacement could not change them;
* ``x.cuda(...)``, ``x.to(rank)`` and ``device=rank`` leave or put `x` on the CPU, as do
  ``"cuda"`` and ``torch.device(...)``; ``device_ids`` and ``output_device`` are left out,
  and ``torch.cuda.set_device(...)`` and the like do nothing;
* the decorators that count GPUs let every test through, as do those that name troubles of
  torch's build machines;
* for `PHALANX`, ``nn.parallel.DistributedDataParallel`` and ``nn.SyncBatchNorm`` become
  phalanx's classes, as in a script whose author changes the import, and the few statements
  in `PRIVATE_PARTS` go.

Without the last step, torch's class sits the same tests: what it passes, a CPU can do.
"""

import ast
import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

PHALANX = "phalanx"
TORCH = "torch"

# Methods that test behaviour and on the way look at private parts of torch's class. What
# depends on those is left out for phalanx's class, so that the rest is tested.
PRIVATE_PARTS = {
    "_run_uneven_inputs_test": {"_authoritative_rank", "_get_ddp_logging_data"},
    "test_ddp_remove_autograd_hooks": {"_remove_autograd_hooks"},
    "test_different_graph_across_ranks": {"_get_ddp_logging_data"},
}

_CLASSES = ("DistributedDataParallel", "SyncBatchNorm")

# How decorators begin that name troubles of torch's build machines, most of them with GPUs.
_TROUBLES = ("unittest.skip", "skip_but_pass_in_sandcastle(")

# Expressions that the exam uses as a GPU's index.
_INDICES = {"rank", "self.rank", "device_id", "torch.cuda.current_device()"}


def open_gates(common: ModuleType) -> None:
    """Let tests run that ``common_distributed`` keeps to machines with enough GPUs."""
    common.skip_if_no_gpu = _let_through  # type: ignore[attr-defined]
    common.skip_if_lt_x_gpu = lambda *_, **__: _let_through  # type: ignore[attr-defined]
    common.init_multigpu_helper = lambda world_size, _: {r: [r] for r in range(world_size)}  # type: ignore[attr-defined]


def _let_through(test: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(test)
    def call(self: object) -> None:  # the exam asks a decorated test for what it wraps
        test(self)

    return call


def rewrite(tree: ast.Module, package: str) -> ast.Module:
    """Return the exam with the tests of DistributedDataParallel alone, for the class of `package`.

    Raises:
        RuntimeError: A method of `PRIVATE_PARTS` does not look at what is said there.
    """
    tree = _OnlyDdpTests().visit(tree)
    tree = _OnCpu().visit(tree)
    if package == PHALANX:
        replace = _Replace()
        tree = replace.visit(tree)
        tree.body.insert(0, ast.Import([ast.alias(PHALANX)]))
        if replace.looked_away != set(PRIVATE_PARTS):
            missing = ", ".join(sorted(set(PRIVATE_PARTS) - replace.looked_away))
            raise RuntimeError(f"PRIVATE_PARTS in {__name__} is out of date for this release of torch: {missing}")
    return tree


class _OnlyDdpTests(ast.NodeTransformer):
    """Drops the tests that neither make nor name the class, themselves or by a helper of their test case."""

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        if node.name != "_DistTestBase":
            return self.generic_visit(node)
        methods = {child.name: child for child in node.body if isinstance(child, ast.FunctionDef)}
        node.body = [
            child
            for child in node.body
            if not (isinstance(child, ast.FunctionDef) and child.name.startswith("test_"))
            or _comes_to_class(child, methods)
        ]
        return node


def _comes_to_class(test: ast.FunctionDef, methods: dict[str, ast.FunctionDef]) -> bool:
    seen, todo = {test.name}, [test]
    while todo:
        for node in ast.walk(todo.pop()):
            name = getattr(node, "attr", getattr(node, "id", None))
            if name == _CLASSES[0]:
                return True
            if name in methods and name not in seen:
                seen.add(name)
                todo.append(methods[name])
    return False


class _OnCpu(ast.NodeTransformer):
    """Puts what the exam puts on a rank's GPU on the CPU."""

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        # Other decorators stay as they are: they name backends and features.
        node.decorator_list = [gate for gate in node.decorator_list if not ast.unparse(gate).startswith(_TROUBLES)]
        node.body = [self.visit(child) for child in node.body]
        return node

    def visit_Assign(self, node: ast.Assign) -> ast.AST:
        if ast.unparse(node) in ("device = self.rank", "device_id = self.rank"):
            node.value = _constant("cpu", node)
        return self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        node.keywords = [word for word in node.keywords if word.arg not in ("device_ids", "output_device")]
        called = ast.unparse(node.func)
        if called == "torch.cuda.current_device":
            return _constant("cpu", node)
        if called == "torch.cuda.stream":
            return ast.copy_location(ast.parse("nullcontext()", mode="eval").body, node)
        if called.startswith("torch.cuda."):
            return _constant(None, node)
        if called == "torch.device":
            node.args, node.keywords = [_constant("cpu", node)], []
            return node
        if isinstance(node.func, ast.Attribute) and node.func.attr == "cuda":
            return self.visit(node.func.value)
        if called.endswith(".to") and node.args and ast.unparse(node.args[0]) in _INDICES:
            node.args[0] = _constant("cpu", node)
        for word in node.keywords:
            if word.arg == "device" and (ast.unparse(word.value) in _INDICES or _is_number(word.value)):
                word.value = _constant("cpu", node)
        return self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        return _constant("cpu", node) if node.value in ("cuda", "cuda:0") else node

    def visit_JoinedStr(self, node: ast.JoinedStr) -> ast.AST:
        return _constant("cpu", node) if ast.unparse(node)[2:].startswith("cuda:") else node


class _Replace(ast.NodeTransformer):
    """Makes torch's classes those of phalanx, by whichever name the exam calls them."""

    def __init__(self) -> None:
        self.looked_away: set[str] = set()

    def visit_ImportFrom(self, node: ast.ImportFrom) -> ast.AST:
        if any(alias.name in _CLASSES for alias in node.names):
            assert len(node.names) == 1, ast.unparse(node)
            node.module = PHALANX
        return node

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        if node.attr in _CLASSES:
            node.value = ast.copy_location(ast.Name(PHALANX, ast.Load()), node)
            return node
        return self.generic_visit(node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        if node.name in PRIVATE_PARTS:
            look_away = _LookAway(PRIVATE_PARTS[node.name])
            look_away.visit(node)
            if look_away.num_left_out:
                self.looked_away.add(node.name)
        return self.generic_visit(node)


class _LookAway(ast.NodeTransformer):
    """Leaves out the statements that mention `names`, and those that need what such a statement assigns."""

    def __init__(self, names: set[str]) -> None:
        self.names = set(names)
        self.num_left_out = 0

    def _visit_simple(self, node: ast.stmt) -> ast.AST:
        if not any(getattr(part, "attr", getattr(part, "id", None)) in self.names for part in ast.walk(node)):
            return node
        self.num_left_out += 1
        for target in getattr(node, "targets", []):
            self.names |= {part.id for part in ast.walk(target) if isinstance(part, ast.Name)}
        return ast.copy_location(ast.Pass(), node)

    visit_Expr = visit_Assign = visit_Return = _visit_simple


def _constant(value: Any, like: ast.AST) -> ast.Constant:
    return ast.copy_location(ast.Constant(value), like)


def _is_number(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, int)
