"""phalanx.DistributedDataParallel sits torch's tests of its own class, at world size 2.

On phalanx's groups, which average gradients where they lie: all tests, those in `SLOW` by
``make slow``. On Gloo's,
where buckets are copied and reduced while backward runs: those in `ON_GLOO`. In ``make slow``,
torch's class sits a few as well, which shows that they ask nothing that a CPU has not. The rest,
and more ranks, are left to

    python -m tests.conformance.exam --backend gloo --ddp phalanx --world-size 3 --check
"""

import ast
from collections.abc import Iterator

import pytest

from . import _ddp
from ._runner import Result
from .ddp_expectations import FAILS, PASSES, RELEASES, complaint, expected_names, unknown_names
from .exam import Exam
from .expectations import torch_release

WORLD_SIZE = 2

ON_GLOO = (
    "test_DistributedDataParallelCPU",
    "test_DistributedDataParallelCPU_grad_is_view",
    "test_accumulate_gradients_no_sync",
    "test_accumulate_gradients_no_sync_grad_is_view",
    "test_ddp_create_graph",
    "test_ddp_grad_div_uneven_inputs",
    "test_ddp_shared_grad_acc_unused_params",
    "test_different_graph_across_ranks",
    "test_output_unused_in_loss_dict_module",
    "test_static_graph_multi_forward",
    "test_undefined_grad_parity_unused_parameters",
)

# Takes a C++ compiler 7 to 16 s, left to the command above.
COMPILES = "test_ddp_compile_static_graph"
# Convolves 1000 x 1000 pixels, for 10 s of CPU; test_ddp_grad_div_uneven_inputs and
# test_ddp_uneven_inputs_stop_iteration_sync_bn join ranks whose inputs are uneven, too.
SLOW = {"test_ddp_uneven_inputs"}

# One for each reason why phalanx's class fails a test that torch's passes.
BY_TORCH = (
    "test_DistributedDataParallel_requires_grad",
    "test_ddp_broadcast_buffer_via_hook",
    "test_ddp_broadcast_buffers_deprecation_warning",
    "test_ddp_bucket_cap_mb_list",
    "test_ddp_build_debug_param_to_name_mapping",
    "test_ddp_ignore_params_arg",
    "test_ddp_profiling_torch_profiler",
    "test_ddp_python_error_logged",
    "test_ddp_sync_module_states",
    "test_ddp_unused_params_rebuild_buckets_exception",
    "test_invalid_static_graph",
)

pytestmark = pytest.mark.skipif(
    torch_release() not in RELEASES, reason=f"the table does not know torch {torch_release()}; see {__package__}"
)


@pytest.fixture(scope="module")
def exam() -> Iterator[Exam]:
    with Exam("phalanx", WORLD_SIZE, ddp=_ddp.PHALANX) as exam:
        yield exam


@pytest.fixture(scope="module")
def exam_on_gloo() -> Iterator[Exam]:
    with Exam("gloo", WORLD_SIZE, ddp=_ddp.PHALANX) as exam:
        yield exam


@pytest.fixture(scope="module")
def exam_of_torch() -> Iterator[Exam]:
    with Exam("gloo", WORLD_SIZE, ddp=_ddp.TORCH) as exam:
        yield exam


def test_the_table_has_every_test(exam: Exam) -> None:
    assert unknown_names(exam.names) == []


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW))
        for name in sorted({*expected_names(WORLD_SIZE)} - {COMPILES})
    ],
)
def test_a_test_comes_out_as_the_table_has_it(exam: Exam, name: str) -> None:
    problem = complaint(_ddp.PHALANX, exam.run(name))
    assert problem is None, problem


@pytest.mark.parametrize("name", ON_GLOO)
def test_it_passes_on_gloo_too(exam_on_gloo: Exam, name: str) -> None:
    problem = complaint(_ddp.PHALANX, exam_on_gloo.run(name))
    assert problem is None, problem


@pytest.mark.slow
@pytest.mark.parametrize("name", BY_TORCH)
def test_torch_passes_what_differs(exam_of_torch: Exam, name: str) -> None:
    assert name in FAILS
    problem = complaint(_ddp.TORCH, exam_of_torch.run(name))
    assert problem is None, problem


@pytest.mark.parametrize(
    ("name", "outcome", "detail", "want"),
    [
        (PASSES[0], "passed", "", None),
        (PASSES[0], "failed", "", "where it has to pass"),
        (PASSES[0], "skipped", "", "where it has to pass"),
        ("test_invalid_static_graph", "failed", "AssertionError: RuntimeError not raised", None),
        ("test_invalid_static_graph", "failed", "another error", "does not show 'RuntimeError not raised'"),
        ("test_invalid_static_graph", "passed", "", "out of date"),
        ("test_invalid_static_graph", "skipped", "", "out of date"),
    ],
)
def test_what_is_not_in_the_table_is_a_complaint(name: str, outcome: str, detail: str, want: str | None) -> None:
    problem = complaint(_ddp.PHALANX, Result(name, outcome, 0.1, detail))  # type: ignore[arg-type]
    assert problem is None if want is None else want in str(problem)


def test_a_name_that_only_one_side_has_is_a_complaint() -> None:
    names = {*PASSES, *FAILS, "test_new"} - {PASSES[0]}
    assert unknown_names(names) == [
        f"{PASSES[0]}: this torch's exam has no such test",
        "test_new: put it into PASSES or FAILS",
    ]


@pytest.mark.parametrize(
    ("source", "want"),
    [
        ("x = f().cuda(rank)", "x = f()"),
        ("x = f().to(self.rank)", "x = f().to('cpu')"),
        ("x = f(device=self.rank)", "x = f(device='cpu')"),
        ("x = f(device=y.device)", "x = f(device=y.device)"),
        ("x = torch.device(f'cuda:{i}')", "x = torch.device('cpu')"),
        ("torch.cuda.set_device(1)", "None"),
        ("x = nn.parallel.DistributedDataParallel(y, device_ids=[rank])", "x = phalanx.DistributedDataParallel(y)"),
        ("x = torch.nn.SyncBatchNorm(2)", "x = phalanx.SyncBatchNorm(2)"),
        ("from torch.nn.parallel import DistributedDataParallel", "from phalanx import DistributedDataParallel"),
    ],
)
def test_what_is_written_for_gpus_runs_on_a_cpu(source: str, want: str) -> None:
    tree = _ddp._Replace().visit(_ddp._OnCpu().visit(ast.parse(source)))
    assert ast.unparse(tree) == want


def test_what_depends_on_private_parts_is_left_out() -> None:
    source = """
def test(self, net):
    with net.join():
        data = net._get_ddp_logging_data()
        first = data['x']
        self.assertTrue(first)
        self.assertTrue(net.module)
"""
    tree = _ddp._LookAway({"_get_ddp_logging_data"}).visit(ast.parse(source))
    assert ast.unparse(tree).count("pass") == 3
    assert "self.assertTrue(net.module)" in ast.unparse(tree)


def test_tests_that_never_come_to_the_class_are_dropped() -> None:
    source = """
class _DistTestBase:
    def _make(self): return torch.nn.parallel.DistributedDataParallel(nn.Linear(1, 1))
    def _train(self): self._make()
    def test_direct(self): DistributedDataParallel(nn.Linear(1, 1))
    def test_by_helpers(self): self._train()
    def test_reduce(self): dist.all_reduce(torch.ones(1))
"""
    tree = _ddp._OnlyDdpTests().visit(ast.parse(source))
    names = [node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    assert names == ["_make", "_train", "test_direct", "test_by_helpers"]
