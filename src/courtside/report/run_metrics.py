"""What a monitor knows of a run, as families of Prometheus metrics."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from courtside import __version__
from courtside.report.exposition import Kind, MetricFamily
from courtside.report.run_monitor import RunMonitor

Labels = Mapping[str, str]
Samples = Iterable[tuple[Labels, float]]


def describe_metrics(monitor: RunMonitor) -> Iterator[MetricFamily]:
    """`docs/operations.md` lists them."""
    yield from _describe_progress(monitor)
    yield from _describe_costs(monitor)
    yield from _describe_results(monitor)
    yield from _describe_servers(monitor)


def _describe_progress(monitor: RunMonitor) -> Iterator[MetricFamily]:
    health, phase = monitor.health(), monitor.progress.phase
    labels = {"run": monitor.run_name, "version": __version__}
    yield _gauge("run_info", "The run folder's name, and the version.", [(labels, 1)])
    numbers = {
        "steps_done": (health.steps_done, "Optimizer steps done."),
        "steps_planned": (health.steps_planned, "Optimizer steps of the whole run."),
        "progress_age_seconds": (health.seconds_since_progress, "Since anything progressed."),
        "stalled": (health.status == "stalled", "1: /health answers with 503."),
    }
    if phase is not None:
        numbers |= {
            "phase_progress_ratio": (phase.fraction, "Share of the phase's work that is done."),
            "phase_sampled_tokens": (phase.num_tokens, "Tokens sampled so far in the phase."),
        }
    for name, (number, text) in numbers.items():
        yield _gauge(name, text, [({}, number)])
    open_seconds = [({"phase": health.phase}, health.phase_seconds)]
    yield _gauge("phase_open_seconds", "Since the phase that is running began.", open_seconds)


def _describe_costs(monitor: RunMonitor) -> Iterator[MetricFamily]:
    """Of all processes of the run, as of the last step or evaluation."""
    costs = monitor.totals.items()
    seconds = [({"phase": name}, cost.seconds) for name, cost in costs]
    yield _counter("phase_seconds_total", "Seconds spent, by phase.", seconds)
    tokens = [({"phase": name, "direction": "input"}, cost.input_tokens) for name, cost in costs]
    tokens += [({"phase": name, "direction": "output"}, cost.output_tokens) for name, cost in costs]
    yield _counter(
        "phase_tokens_total", "Input of forward passes, and sampled output, by phase.", tokens
    )
    flops = [({"phase": name}, cost.flops) for name, cost in costs]
    yield _counter("phase_flops_total", "Estimated FLOPs, by phase.", flops)


def _describe_results(monitor: RunMonitor) -> Iterator[MetricFamily]:
    row = [({"key": key}, value) for key, value in monitor.row.items() if value is not None]
    yield _gauge("step_metric", "Metrics of the last step, as in metrics.jsonl.", row)
    alarms = [({"kind": kind}, number) for kind, number in monitor.num_alarms.items()]
    yield _counter("alarms_total", "Alarms since this process began, by kind.", alarms)
    scores = [
        ({"policy": policy, "split": split}, evaluation.mean_score)
        for (policy, split), evaluation in monitor.scores.items()
    ]
    yield _gauge("evaluation_score", "Mean score of the last evaluation of its kind.", scores)


def _describe_servers(monitor: RunMonitor) -> Iterator[MetricFamily]:
    replicas = [
        ({"server": replica.server, "url": replica.url}, replica)
        for replica in monitor.progress.replicas
    ]
    up = [(labels, not replica.is_blocked) for labels, replica in replicas]
    yield _gauge("server_up", "0: the replica failed, and gets no request for a while.", up)
    assigned = [(labels, replica.num_assigned) for labels, replica in replicas]
    yield _gauge("server_requests", "Requests that wait for a replica or are under way.", assigned)
    for name, field, text in (
        ("answers", "num_answered", "Requests that a replica answered."),
        ("answer_seconds", "answer_seconds", "From sending to the answer, added up."),
        ("failures", "num_failed", "Attempts without a usable answer, which are retried."),
        ("hedges", "num_hedged", "Requests that another replica got, too, as this one was slow."),
    ):
        samples = [(labels, getattr(replica, field)) for labels, replica in replicas]
        yield _counter(f"server_{name}_total", text, samples)


def _gauge(name: str, text: str, samples: Samples) -> MetricFamily:
    return _make_family(name, "gauge", text, samples)


def _counter(name: str, text: str, samples: Samples) -> MetricFamily:
    return _make_family(name, "counter", text, samples)


def _make_family(name: str, kind: Kind, text: str, samples: Samples) -> MetricFamily:
    numbers = [(labels, float(value)) for labels, value in samples]
    return MetricFamily(name=f"courtside_{name}", kind=kind, help=text, samples=numbers)
