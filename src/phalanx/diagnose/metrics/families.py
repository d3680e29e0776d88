"""The table of all metrics, and how a scrape fills it. Names follow the conventions of Prometheus."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
)


class _Family(NamedTuple):
    """A metric; besides `labels`, every metric has the labels ``job`` and ``host``."""

    kind: Any
    about: str
    labels: tuple[str, ...] = ()


_RANK = ("rank",)
FAMILIES: Mapping[str, _Family] = {
    "phalanx_job": _Family(InfoMetricFamily, "The job's launcher, the folder of its logs, and the version of Phalanx."),
    "phalanx_job_ranks": _Family(GaugeMetricFamily, "Number of ranks on all hosts."),
    "phalanx_rank_up": _Family(GaugeMetricFamily, "1 while the rank's process lives, else 0.", _RANK),
    "phalanx_rank_state_seconds": _Family(
        GaugeMetricFamily,
        "Time since which the rank is in its state, as phalanx top shows it; 0 if unknown.",
        ("rank", "state"),
    ),
    "phalanx_step": _Family(GaugeMetricFamily, "Number of the newest optimizer step.", _RANK),
    "phalanx_steps_planned": _Family(GaugeMetricFamily, "Number of the training's last step."),
    "phalanx_last_step_timestamp_seconds": _Family(GaugeMetricFamily, "Time at which the last step ended.", _RANK),
    "phalanx_steps": _Family(CounterMetricFamily, "Optimizer steps, including repeated ones.", _RANK),
    "phalanx_samples": _Family(CounterMetricFamily, "Samples of these steps, over all ranks of the job."),
    "phalanx_logged_value": _Family(
        GaugeMetricFamily, "Last value that the Trainer has logged, such as loss, lr or validation/accuracy.", ("name",)
    ),
    "phalanx_collective_duration_seconds": _Family(
        HistogramMetricFamily, "Time from the call of a collective to its return, over the host's ranks.", ("op",)
    ),
    "phalanx_collective_bytes": _Family(
        CounterMetricFamily, "Bytes of the rank's tensors in collectives.", ("rank", "op")
    ),
    "phalanx_waiting_seconds": _Family(CounterMetricFamily, "Time in collectives and messages.", _RANK),
    "phalanx_phase_seconds": _Family(CounterMetricFamily, "Time in each phase of the steps.", ("rank", "phase")),
    "phalanx_straggler_cost_ratio": _Family(
        GaugeMetricFamily, "Time that a rank costs the others, as a fraction of a step; 0 if it is not slow.", _RANK
    ),
    "phalanx_restarts": _Family(CounterMetricFamily, "Attempts after the first one."),
    "phalanx_losses": _Family(CounterMetricFamily, "Ranks or hosts whose loss ended an attempt."),
    "phalanx_recovery_seconds": _Family(
        CounterMetricFamily, "Time from losses to the next completed step, by phase.", ("phase",)
    ),
    "phalanx_snapshot_step": _Family(GaugeMetricFamily, "Step of the newest snapshot in memory."),
    "phalanx_snapshot_timestamp_seconds": _Family(GaugeMetricFamily, "Time of the scrape that found it first."),
    "phalanx_snapshot_size_bytes": _Family(GaugeMetricFamily, "Memory of the part of the host's first rank."),
    "phalanx_replicated_step": _Family(GaugeMetricFamily, "Step of the newest snapshot that other hosts have."),
    "phalanx_replicas": _Family(GaugeMetricFamily, "Number of other hosts that have that snapshot."),
    "phalanx_replicas_wanted": _Family(GaugeMetricFamily, "Number of other hosts that should have it."),
    "phalanx_checkpoint_step": _Family(GaugeMetricFamily, "Step of the Trainer's newest checkpoint on disk."),
    "phalanx_checkpoint_timestamp_seconds": _Family(GaugeMetricFamily, "Time at which that checkpoint was saved."),
    "phalanx_rank_cpus": _Family(GaugeMetricFamily, "CPUs that the rank has used since the last scrape.", _RANK),
    "phalanx_rank_resident_memory_bytes": _Family(GaugeMetricFamily, "Resident memory of the rank's process.", _RANK),
    "phalanx_rank_gpu_memory_bytes": _Family(GaugeMetricFamily, "Memory that the rank has on a GPU.", ("rank", "gpu")),
    "phalanx_record_events": _Family(CounterMetricFamily, "Events in the rank's black box.", _RANK),
    "phalanx_record_events_read": _Family(
        CounterMetricFamily, "Events that scrapes have read; they stand for all events.", _RANK
    ),
}
"""All metrics by name; the text format appends ``_total``, ``_info`` or ``_bucket``."""


class Families:
    """The metrics of one scrape."""

    def __init__(self) -> None:
        self._found: dict[str, Any] = {}

    def add(self, name: str, labels: Sequence[str], value: Any) -> None:
        """Add a sample; a value of None is unknown and left out.

        Args:
            labels: Values of the labels job and host, then those of the metric.
        """
        if value is not None:
            self._family(name).add_metric(labels, value)

    def add_histogram(self, name: str, labels: Sequence[str], bounds: Iterable[float], counts: Sequence[float],
                      total: float) -> None:  # fmt: skip
        """Add a histogram; `counts` has one number for each bound, and a last one for values above all bounds."""
        so_far, buckets = 0.0, []
        for bound, count in zip([*map(str, bounds), "+Inf"], counts, strict=True):
            so_far += count
            buckets.append((bound, so_far))
        self._family(name).add_metric(labels, buckets, total)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._found.values())

    def _family(self, name: str) -> Any:
        if name not in self._found:
            family = FAMILIES[name]
            self._found[name] = family.kind(name, family.about, labels=("job", "host", *family.labels))
        return self._found[name]
