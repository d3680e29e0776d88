"""What phalanx.DistributedDataParallel makes of each of torch's tests of its own class, on a CPU; see `_ddp`.

A test is in `PASSES` or in `FAILS`, where its entry says why and what its output must show:
a test that fails for another reason is a complaint, as is one that passes, one that this
torch's exam has not, and one that the table has not.

What torch's class fails of them on Gloo is in `TORCH_FAILS`: the other failures are not the
rewriting's doing.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ._ddp import PHALANX
from ._runner import Result
from .expectations import torch_release

# Whose exam the table describes.
RELEASES = ("2.13", "2.15")


@dataclass(frozen=True)
class Failure:
    """Why phalanx's class fails a test, and a text that the test's output then has."""

    reason: str
    shows: str


PASSES: tuple[str, ...] = (
    "test_DistributedDataParallelCPU",
    "test_DistributedDataParallelCPU_grad_is_view",
    "test_DistributedDataParallel_SyncBatchNorm",
    "test_DistributedDataParallel_SyncBatchNorm_2D_Input",
    "test_DistributedDataParallel_SyncBatchNorm_Channels_Last",
    "test_DistributedDataParallel_SyncBatchNorm_Diff_Input_Sizes_Running_Value",
    "test_DistributedDataParallel_SyncBatchNorm_Diff_Input_Sizes_gradient",
    "test_DistributedDataParallel_SyncBatchNorm_No_Affine",
    "test_DistributedDataParallel_SyncBatchNorm_Single_Input_Per_Process",
    "test_DistributedDataParallel_SyncBatchNorm_half",
    "test_DistributedDataParallel_non_default_stream",
    "test_DistributedDataParallel_with_amp_and_grad_is_view",
    "test_accumulate_gradients_no_sync",
    "test_accumulate_gradients_no_sync_allreduce_hook",
    "test_accumulate_gradients_no_sync_allreduce_with_then_hook",
    "test_accumulate_gradients_no_sync_grad_is_view",
    "test_compute_bucket_assignment_by_size_sparse_error_without_logger",
    "test_ddp_broadcast_buffer",
    "test_ddp_compile_static_graph",
    "test_ddp_create_graph",
    "test_ddp_forward_backward_hook",
    "test_ddp_grad_div_uneven_inputs",
    "test_ddp_hook_parity_allreduce",
    "test_ddp_hook_parity_allreduce_process_group",
    "test_ddp_hook_parity_post_localSGD",
    "test_ddp_hook_parity_powerSGD",
    "test_ddp_hook_pickling_powerSGD",
    "test_ddp_inference",
    "test_ddp_init_sync_buffers_with_forward_sync_buffers_false",
    "test_ddp_join_model_equivalence",
    "test_ddp_join_respects_forward_sync_buffers_false",
    "test_ddp_model_diff_num_params_across_ranks",
    "test_ddp_model_diff_shape_across_ranks",
    "test_ddp_namedtuple",
    "test_ddp_new_tensor_in_fwd",
    "test_ddp_new_tensor_in_fwd_static_graph",
    "test_ddp_remove_autograd_hooks",
    "test_ddp_returns_tensor_with_no_grad",
    "test_ddp_shared_grad_acc_unused_params",
    "test_ddp_static_graph_nested_types",
    "test_ddp_sync_bn_training_vs_eval",
    "test_ddp_uneven_input_exception",
    "test_ddp_uneven_input_join_disable",
    "test_ddp_uneven_inputs",
    "test_ddp_uneven_inputs_stop_iteration_sync_bn",
    "test_ddp_zero_output_features",
    "test_different_graph_across_ranks",
    "test_grads_same_across_ranks_with_no_sync",
    "test_output_unused_in_loss_dict_module",
    "test_output_unused_in_loss_tuple_module",
    "test_post_localSGD_optimizer_parity",
    "test_post_localSGD_optimizer_parity_grad_is_view",
    "test_post_localSGD_optimizer_parity_with_hierarchical_sgd",
    "test_post_localSGD_optimizer_parity_with_hierarchical_sgd_grad_is_view",
    "test_post_localSGD_optimizer_step_reload",
    "test_stateless_api_with_ddp",
    "test_static_graph_multi_forward",
    "test_undefined_grad_parity_unused_parameters",
    "test_verify_model_across_rank_with_logger",
    "test_verify_model_across_rank_without_logger",
)

_RAISES = "torch's class raises when a parameter got no gradient; phalanx's averages what there is and names them"
_STATIC = "torch's class raises when a static graph changes; to phalanx's all graphs are alike"
_REDUCER = "looks at torch's reducer or calls its private parts"
_LOGGED = "looks at what torch's class logs about itself"
_IGNORED = "names the parameters to ignore by a private method of torch's class"
_BUFFER_HOOK = "hands the buffers to a hook, by a private method of torch's class"
_IN_BACKWARD = "optimizers that step within backward, a private function of torch, are not supported"
_PRECISION = "mixed_precision, a private option, is refused"
_OPTION = "an option that is refused: phalanx chooses buckets by itself"
_PROFILED = "looks in a profile for torch's all_reduce of each bucket and for the broadcast when it rebuilds buckets"
_GPU = "asks for the index of a GPU"
_NCCL = "reads what NCCL leaves in a profile"


def _lacks(name: str) -> str:
    return f"'DistributedDataParallel' object has no attribute '{name}'"


_STEPS_WITHIN = "a parameter has an optimizer that steps within backward"
_NO_IGNORED = "has no attribute '_set_params_and_buffers_to_ignore_for_model'"

FAILS: Mapping[str, Failure] = {
    "test_DistributedDataParallel": Failure(_REDUCER, _lacks("_set_static_graph")),
    "test_DistributedDataParallel_requires_grad": Failure(
        "expects RuntimeError where nothing is to be trained; it is a ValueError", "ValueError: rank 0: Distributed"
    ),
    "test_compute_bucket_assignment_by_size_sparse_error_with_logger": Failure(_LOGGED, _lacks("logger")),
    "test_ddp_apply_optim_in_backward": Failure(_IN_BACKWARD, _STEPS_WITHIN),
    "test_ddp_apply_optim_in_backward_grad_as_bucket_view_false": Failure(_IN_BACKWARD, _STEPS_WITHIN),
    "test_ddp_apply_optim_in_backward_ignored_params": Failure(_IN_BACKWARD, _NO_IGNORED),
    "test_ddp_broadcast_buffer_via_hook": Failure(_BUFFER_HOOK, _lacks("_register_buffer_comm_hook")),
    "test_ddp_broadcast_buffers_deprecation_warning": Failure(
        "broadcast_buffers is not deprecated", "0 not greater than 0"
    ),
    "test_ddp_bucket_cap_mb_list": Failure(_OPTION, "bucket_cap_mb_list is not supported"),
    "test_ddp_buffer_hook_allreduce": Failure(_BUFFER_HOOK, _lacks("_register_buffer_comm_hook")),
    "test_ddp_buffer_hook_allreduce_return_future": Failure(_BUFFER_HOOK, _lacks("_register_buffer_comm_hook")),
    "test_ddp_build_debug_param_to_name_mapping": Failure(_REDUCER, _lacks("_build_params_for_reducer")),
    "test_ddp_build_debug_param_to_name_mapping_requires_grad": Failure(_REDUCER, _lacks("_build_params_for_reducer")),
    "test_ddp_comm_hook_logging": Failure(_LOGGED, _lacks("_get_ddp_logging_data")),
    "test_ddp_control_flow_different_across_ranks": Failure(_RAISES, _lacks("reducer")),
    "test_ddp_control_flow_same_across_ranks": Failure(_RAISES, _lacks("reducer")),
    "test_ddp_device": Failure(_GPU, "None is not 0"),
    "test_ddp_device_mesh_initialization": Failure("looks for the attribute device_mesh", _lacks("device_mesh")),
    "test_ddp_has_finalized": Failure(_RAISES, _lacks("_check_reducer_finalized")),
    "test_ddp_ignore_params_arg": Failure(_IGNORED, _NO_IGNORED),
    "test_ddp_logging_data_cpu": Failure(_LOGGED, _lacks("_set_ddp_runtime_logging_sample_rate")),
    "test_ddp_logging_data_gpu": Failure(_LOGGED, _lacks("_set_ddp_runtime_logging_sample_rate")),
    "test_ddp_multiple_nested_unused_params_err_ignore_params": Failure(_RAISES, _NO_IGNORED),
    "test_ddp_multiple_nested_unused_params_error": Failure(_RAISES, "Expected error was not raised!"),
    "test_ddp_native_mixed_precision_grad_as_bucket_view_no_set_grad_none": Failure(_PRECISION, "mixed_precision is"),
    "test_ddp_native_mixed_precision_grad_as_bucket_view_set_grad_to_none": Failure(_PRECISION, "mixed_precision is"),
    "test_ddp_native_mixed_precision_ignored_params": Failure(_PRECISION, _NO_IGNORED),
    "test_ddp_native_mixed_precision_no_grad_as_bucket_view_no_set_grad_none": Failure(
        _PRECISION, "mixed_precision is"
    ),
    "test_ddp_native_mixed_precision_no_grad_as_bucket_view_set_grad_to_none": Failure(
        _PRECISION, "mixed_precision is"
    ),
    "test_ddp_profiling_autograd_profiler": Failure(_PROFILED, ", in _test_ddp_profiling"),
    "test_ddp_profiling_execution_trace": Failure(_NCCL, "!= 'nccl'"),
    "test_ddp_profiling_torch_profiler": Failure(_PROFILED, ", in _test_ddp_profiling"),
    "test_ddp_python_error_logged": Failure(_LOGGED, _lacks("_get_ddp_logging_data")),
    "test_ddp_sink_noclone": Failure(_REDUCER, _lacks("_set_ddp_sink_clone")),
    "test_ddp_sync_module_states": Failure(
        "passes torch's function for copying state an attribute of torch's class", _lacks("broadcast_bucket_size")
    ),
    "test_ddp_unused_params_rebuild_buckets_exception": Failure(_RAISES, "DDP unused parameters error not raised"),
    "test_detect_ddp_is_actually_static": Failure(_REDUCER, _lacks("reducer")),
    "test_get_data_parallel_params": Failure(_IGNORED, _NO_IGNORED),
    "test_invalid_static_graph": Failure(_STATIC, "RuntimeError not raised"),
    "test_skip_all_reduce_unused_parameters": Failure(_OPTION, "skip_all_reduce_unused_params is not supported"),
    "test_static_graph_api_cpu": Failure(_STATIC, _lacks("_set_static_graph")),
    "test_sync_bn_logged": Failure(_LOGGED, _lacks("_get_ddp_logging_data")),
}

# Tests of one release that this table leaves out.
_NOT_ON: Mapping[str, Mapping[str, str]] = {
    "2.13": {
        "test_ddp_hook_pickling_powerSGD": "skipped there, as flaky",
        "test_ddp_uneven_inputs": "convolves 1000 x 1000 pixels there: minutes on a CPU",
    }
}

_NO_SYNC_BATCH_NORM = "torch's SyncBatchNorm wants a GPU"
_WANTS_STREAMS = "what torch's class needs for it wants a GPU"

TORCH_FAILS: Mapping[str, str] = {
    "test_DistributedDataParallel": "reloaded after _set_static_graph(); torch skips it on Linux, issue 77317",
    "test_DistributedDataParallel_SyncBatchNorm": _NO_SYNC_BATCH_NORM,
    "test_DistributedDataParallel_SyncBatchNorm_2D_Input": _NO_SYNC_BATCH_NORM,
    "test_DistributedDataParallel_SyncBatchNorm_Channels_Last": _NO_SYNC_BATCH_NORM,
    "test_DistributedDataParallel_SyncBatchNorm_Diff_Input_Sizes_Running_Value": _NO_SYNC_BATCH_NORM,
    "test_DistributedDataParallel_SyncBatchNorm_Diff_Input_Sizes_gradient": _NO_SYNC_BATCH_NORM,
    "test_DistributedDataParallel_SyncBatchNorm_No_Affine": _NO_SYNC_BATCH_NORM,
    "test_DistributedDataParallel_SyncBatchNorm_Single_Input_Per_Process": _NO_SYNC_BATCH_NORM,
    "test_DistributedDataParallel_SyncBatchNorm_half": _NO_SYNC_BATCH_NORM,
    "test_ddp_apply_optim_in_backward": _WANTS_STREAMS,
    "test_ddp_apply_optim_in_backward_grad_as_bucket_view_false": _WANTS_STREAMS,
    "test_ddp_apply_optim_in_backward_ignored_params": _WANTS_STREAMS,
    "test_ddp_device": _GPU,
    "test_ddp_has_finalized": "ranks wait for one that has failed; torch skips it on Linux, issue 102751",
    "test_ddp_inference": _NO_SYNC_BATCH_NORM,
    "test_ddp_logging_data_gpu": _GPU,
    "test_ddp_native_mixed_precision_grad_as_bucket_view_no_set_grad_none": _WANTS_STREAMS,
    "test_ddp_native_mixed_precision_grad_as_bucket_view_set_grad_to_none": _WANTS_STREAMS,
    "test_ddp_native_mixed_precision_ignored_params": _WANTS_STREAMS,
    "test_ddp_native_mixed_precision_no_grad_as_bucket_view_no_set_grad_none": _WANTS_STREAMS,
    "test_ddp_native_mixed_precision_no_grad_as_bucket_view_set_grad_to_none": _WANTS_STREAMS,
    "test_ddp_profiling_execution_trace": _NCCL,
    "test_ddp_sync_bn_training_vs_eval": _NO_SYNC_BATCH_NORM,
    "test_ddp_uneven_inputs_stop_iteration_sync_bn": _NO_SYNC_BATCH_NORM,
    "test_sync_bn_logged": _NO_SYNC_BATCH_NORM,
}


def expected_names(world_size: int) -> list[str]:
    """Return the tests to sit at this world size on this release of torch, sorted."""
    left_out = set(_NOT_ON.get(torch_release(), ()))
    if world_size % 2:
        left_out |= {name for name in PASSES if "hierarchical" in name}  # pairs of ranks
    return sorted({*PASSES, *FAILS} - left_out)


def unknown_names(names: Iterable[str]) -> list[str]:
    """Return a complaint for each name that either the exam or the table does not have."""
    exam, table = set(names), {*PASSES, *FAILS}
    return [
        *(f"{name}: this torch's exam has no such test" for name in sorted(table - exam)),
        *(f"{name}: put it into PASSES or FAILS" for name in sorted(exam - table)),
        *(f"{name} is both in PASSES and FAILS" for name in sorted(FAILS.keys() & PASSES)),
    ]


def complaint(package: str, result: Result) -> str | None:
    """Return what is wrong with the result of `package`'s class, or None if it is as expected."""
    name, outcome = result.name, result.outcome
    if package == PHALANX and (failure := FAILS.get(name)):
        if outcome != "failed":
            return f"{name} {outcome}: its entry in FAILS is out of date"
        if failure.shows not in result.detail:
            return f"{name} failed, but its output does not show {failure.shows!r}:\n{result.detail}"
        return None
    if package != PHALANX and name in TORCH_FAILS:
        return None if outcome == "failed" else f"{name} {outcome}: its entry in TORCH_FAILS is out of date"
    return None if outcome == "passed" else f"{name} {outcome}, where it has to pass:\n{result.detail}"
