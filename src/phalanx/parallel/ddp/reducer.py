"""Reducer: averages gradients over the ranks, bucket by bucket, while backward runs.

When a gradient is complete, the hook of its parameter (`_on_gradient`) counts the gradient for its bucket (see
`buckets`). A bucket starts to average once all of its gradients have arrived, and the means are stored in the
parameters' ``.grad``. If a parameter gets no gradient, its bucket stays incomplete until backward ends, and starts then
(`_finish`).
"""

from __future__ import annotations

import dataclasses
import functools
import time
import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from phalanx import _torch
from phalanx._errors import warn_caller
from phalanx._text import listed
from phalanx._torch import current_graph_task_id, queue_callback
from phalanx._torch.nested import tensors_in
from phalanx.data.epochs import repeated_orders
from phalanx.parallel.ddp.buckets import BoundHook, Bucket, CoalescedBucket, Division, make_buckets
from phalanx.parallel.ddp.replica import Replica
from phalanx.parallel.ddp.uneven_inputs import add_hint
from phalanx.record.loop import Loop


@dataclasses.dataclass(slots=True)
class _Pass:
    """A backward pass whose gradients are averaged: expected, or running."""

    task: int | None = None  # id that the autograd engine gave the pass; None before it runs
    node: Any = None  # autograd node at which this backward pass reached the model's output
    armed: bool = False  # whether a forward pass has asked that the next backward pass be averaged
    reached: bool = False  # whether a parameter got a gradient
    next: int = 0  # index of the bucket to start next; buckets start in order
    num_arrived: dict[nn.Parameter, int] = dataclasses.field(default_factory=dict)


class Reducer:
    """Averages a model's gradients in the backward pass of each output that is passed to `expect_backward`.

    The reducer's hooks are removed from the parameters when nothing refers to the reducer any longer. The class is not
    a module, because setting an attribute of a module takes a microsecond.

    Args:
        replica: Model whose gradients are averaged over the ranks that have a copy of it.
        bucket_cap_mb: MiB of gradients that are reduced together.
        as_view: Whether gradients become views of their buckets.
        comm_hook: Function that averages a bucket; None: the reducer averages it.
        warns_of_unused: Whether to warn once about each parameter that no gradient reaches.

    Attributes:
        loop: Recorder of the passes, for the black box.
        averaged: Parameters whose gradients are averaged: those that require a gradient and, for one more averaged
            pass, newly frozen ones, because this rank may have accumulated a gradient for them.

    Raises:
        ValueError: A parameter has an optimizer that steps within backward.
    """

    def __init__(
        self,
        replica: Replica,
        *,
        bucket_cap_mb: float,
        as_view: bool,
        comm_hook: BoundHook | None,
        warns_of_unused: bool,
    ) -> None:
        self.loop: Loop = Loop()
        self._replica = replica
        self._bucket_cap_mb = bucket_cap_mb
        self._as_view = as_view
        self._comm_hook = comm_hook
        self._warns_of_unused = warns_of_unused
        self._named: set[nn.Parameter] = set()  # parameters that an earlier warning has named
        self._all = dict(replica.parameters())
        self._averaging_s = self._waiting_s = 0.0
        self._division: Division | None = None
        self._buckets: list[Bucket] = []
        self._may_hold: set[nn.Parameter] = set()  # parameters trained at any time since gradients were last averaged
        self._must_build = False
        self._handles: dict[nn.Parameter, Any] = {}
        weakref.finalize(self, _remove_all, self._handles).atexit = False
        self._build()

    def _build(self) -> None:
        """Make buckets for the parameters that may have a gradient to average, and register a hook on each."""
        parameters = self._all
        self._parameters = list(parameters.values())
        self._is_trained = [p.requires_grad for p in self._parameters]
        self._may_hold.update(p for p in self._parameters if p.requires_grad)
        self._must_build = False
        self._names = {p: name for name, p in parameters.items() if p in self._may_hold}
        self.averaged: list[nn.Parameter] = list(self._names)
        if any(hasattr(p, _torch.MARK_STEPS_IN_BACKWARD) for p in self.averaged):
            raise ValueError(
                f"rank {dist.get_rank()}: DistributedDataParallel: a parameter has an optimizer that steps within "
                "backward, before gradients are averaged; call optimizer.step() after backward() instead"
            )
        accumulated = self._names.keys() & {p for bucket in self._buckets for p in bucket.used}
        self._buckets = make_buckets(
            self.averaged,
            self._replica.group,
            self._bucket_cap_mb,
            sparse=self._replica.sparse_parameters(),
            as_view=self._as_view,
            hooked=self._comm_hook is not None,
        )
        self.divide(self._division)
        self._bucket_of = {p: bucket for bucket in self._buckets for p in bucket.parameters}
        for parameter in accumulated:
            self._bucket_of[parameter].used.add(parameter)
        self._expected: dict[nn.Parameter, int] = {}  # how often each parameter's gradient arrived in the last pass
        self._pass = _Pass()
        for parameter in self._handles.keys() - self._names.keys():
            self._handles.pop(parameter).remove()
        this = weakref.ref(self)  # a hook must not keep the reducer alive

        def on_gradient(parameter: Tensor) -> None:
            if (reducer := this()) is not None:
                reducer._on_gradient(parameter)

        for parameter in self.averaged:
            if parameter not in self._handles:
                self._handles[parameter] = parameter.register_post_accumulate_grad_hook(on_gradient)

    # ---- before a pass ---------------------------------------------------------------------------------------------

    def remove_hooks(self) -> None:
        """Stop averaging the model's gradients for good."""
        _remove_all(self._handles)

    def name_newcomers(self) -> None:
        """Warn once about each trained parameter that was added to the model after it was wrapped."""
        names = self._replica.newcomers()
        if names and self._replica.group.size() > 1:
            some = listed([repr(name) for name in names], 8)
            warn_caller(  # the text is the same on every rank, so the launcher shows it once
                f"DistributedDataParallel: gradients of {some} are not averaged, because they were added after "
                "the model was wrapped, so each rank trains its own. Wrap the model, or make its Trainer, last; or "
                "call remove_hooks() and wrap it again"
            )

    def follow_freezing(self) -> None:
        """Rebuild the buckets if a parameter was frozen or unfrozen."""
        if self._must_build or [p.requires_grad for p in self._parameters] != self._is_trained:
            self._build()

    def _let_frozen_go(self) -> None:
        """Drop parameters that were frozen before this pass: their accumulated gradients are averaged by now."""
        if len(self.averaged) > sum(self._is_trained):
            trained = zip(self._parameters, self._is_trained, strict=True)
            self._may_hold = {p for p, is_trained in trained if is_trained}
            self._must_build = True

    def use_comm_hook(self, comm_hook: BoundHook) -> None:
        """Let `comm_hook` average the buckets from now on."""
        self._comm_hook = comm_hook
        self._build()

    def expect_backward(self, output: Any) -> None:
        """Average the gradients of the next backward pass, which begins at the tensors of the model's output."""
        if self._pass.task is not None and self._pass.task != current_graph_task_id():
            self._abandon()
        self._pass.armed = True
        this = weakref.ref(self)

        def begin(_: Tensor) -> None:
            if (reducer := this()) is not None:
                reducer._begin()

        for _, tensor in tensors_in(output):
            if tensor.grad_fn is not None:
                tensor.register_hook(begin)

    def expect_nothing(self) -> None:
        """Leave the gradients of the next backward pass as they are, to be averaged with those of a later pass."""
        self._pass.armed = False

    # ---- while backward runs ---------------------------------------------------------------------------------------

    def _begin(self) -> None:
        """Begin a pass, when gradients first reach an output of the model."""
        task = current_graph_task_id()
        if task == self._pass.task:
            return
        if self._pass.task is not None:
            self._abandon()
        self._pass = _Pass(task, _torch.current_autograd_node())
        self.loop.begin_backward()
        for bucket in self._buckets:
            if bucket.overlaps:
                bucket.num_awaited = sum(self._expected[p] for p in bucket.parameters) if self._expected else -1
        queue_callback(functools.partial(self._finish, task))

    def _abandon(self) -> None:
        """Forget a backward pass that is still running, or that ended in an error; its gradients stay."""
        for bucket in self._buckets:
            if bucket.started:
                bucket.wait()  # not skipped, because other ranks take part in the average
        self._pass = _Pass()

    def _on_gradient(self, parameter: Any) -> None:
        """Record a gradient that was just added to ``parameter.grad``, in the thread that runs backward."""
        bucket = self._bucket_of[parameter]
        bucket.used.add(parameter)
        if not self._pass.reached:
            if self._pass.task is None:
                if not self._pass.armed:
                    return
                self._begin()  # not begun before, because the model's output held no tensor for the hook
            self._pass.reached = True
        if not bucket.overlaps:
            return
        if bucket.started:
            raise RuntimeError(
                f"rank {dist.get_rank()}: DistributedDataParallel: {self._names[parameter]!r} got another gradient "
                "after its bucket was reduced: it is used more often than in the backward pass before. Give "
                "reentrant checkpoints use_reentrant=False, or wrap the model with a larger bucket_cap_mb"
            )
        num_arrived = self._pass.num_arrived
        times = num_arrived[parameter] = num_arrived.get(parameter, 0) + 1
        if self._expected and times <= self._expected[parameter]:
            bucket.num_awaited -= 1
        while self._pass.next < len(self._buckets) and self._buckets[self._pass.next].num_awaited == 0:
            self._start_next()

    def _start_next(self) -> None:
        bucket = self._buckets[self._pass.next]
        bucket.load()
        bucket.start(self._comm_hook)
        self._pass.next += 1

    # ---- when backward has ended -----------------------------------------------------------------------------------

    def _finish(self, task: int) -> None:
        """Start the remaining buckets, wait for all, and store the means."""
        if task != self._pass.task:
            self._pass = _Pass()  # another backward pass ran within this one and averaged only its own gradients
        elif not self._pass.reached and not _fills_grads(self._pass.node):
            self._pass = _Pass(armed=True)
            self.loop.end_phase()
            return  # the pass was torch.autograd.grad()
        begin_s = time.perf_counter()
        try:
            while self._pass.next < len(self._buckets):
                self._start_next()
            for bucket in self._buckets:
                bucket.store()
                self._waiting_s += bucket.waited_s
            self._averaging_s += time.perf_counter() - begin_s
        except Exception as error:
            add_hint(error, "averaging gradients at the end of backward()")
            raise
        finally:
            unused = self._end_pass()
            self.loop.end_averaging()
        repeated_orders.count_pass()
        if unused and self._warns_of_unused:
            self._warn_of_unused(unused)

    def _end_pass(self) -> list[nn.Parameter]:
        """Record for the next pass how often each gradient arrived; return the parameters that no gradient reached."""
        num_arrived, self._pass = self._pass.num_arrived, _Pass()
        unused: list[nn.Parameter] = []
        for bucket in self._buckets:
            if bucket.overlaps:
                self._expected.update((p, num_arrived.get(p, 1)) for p in bucket.parameters)
            if len(bucket.used) < len(bucket.parameters):
                unused += [p for p in bucket.parameters if p.requires_grad and p not in bucket.used]
            bucket.used.clear()
        self._let_frozen_go()
        return unused

    def _warn_of_unused(self, parameters: list[nn.Parameter]) -> None:
        """Warn about the parameters that no earlier warning has named."""
        fresh = [p for p in parameters if p not in self._named]
        if not fresh:
            return
        self._named.update(fresh)
        some = listed([self._names[p] for p in fresh], 8)
        warn_caller(  # the text is the same on every rank, so the launcher shows it once
            f"DistributedDataParallel: no gradient reached {some} in this backward pass. "
            "They count as zeros where another rank has a gradient, and stay as they are where none has. "
            "If that is meant, make it DistributedDataParallel(model, find_unused_parameters=True), which a Trainer "
            "takes, too; if not, look for an output that the loss leaves out"
        )

    # ---- other requests --------------------------------------------------------------------------------------------

    def average_zeros(self) -> None:
        """Contribute zeros to a pass of the other ranks, and store the means."""
        self.follow_freezing()
        for bucket in self._buckets:
            bucket.used.clear()
            bucket.load_nothing()
            bucket.start(self._comm_hook)
        for bucket in self._buckets:
            for parameter in bucket.parameters:
                parameter.grad = None
            bucket.store()  # an optimizer within join(), such as ZeroRedundancyOptimizer, needs the means
        self._let_frozen_go()

    def divide(self, division: Division | None) -> None:
        """Average only the elements that each rank needs, if gradients are averaged in place; None: average all."""
        self._division = division
        for bucket in self._buckets:
            if isinstance(bucket, CoalescedBucket):
                bucket.division = division

    def scale(self, factor: float) -> None:
        """Multiply the means of the following passes by a factor."""
        for bucket in self._buckets:
            bucket.scale = factor

    def norm(self, device: torch.device) -> Tensor:
        """Return the 2-norm of all averaged gradients together, a tensor of shape () on the device."""
        norms = [bucket.norm().to(device) for bucket in self._buckets]
        return torch.linalg.vector_norm(torch.stack(norms))

    def take_averaging_s(self) -> float:
        """Return the seconds spent averaging at the ends of backward passes since the last call."""
        taken, self._averaging_s = self._averaging_s, 0.0
        return taken

    def take_waiting_s(self) -> float:
        """Return the seconds of averaging that were spent waiting for other ranks since the last call."""
        taken, self._waiting_s = self._waiting_s, 0.0
        return taken


def _fills_grads(node: Any) -> bool:
    """Return whether ``backward()``, rather than ``torch.autograd.grad()``, reached `node`."""
    while following := [below for below, _ in node.next_functions if below is not None]:
        node = following[0]
    try:
        return _torch.will_engine_execute_node(node)  # backward() reaches every leaf
    except RuntimeError:
        return False  # autograd.grad() was called for this leaf


def _remove_all(handles: dict[nn.Parameter, Any]) -> None:
    while handles:
        handles.popitem()[1].remove()
