"""The metrics endpoint of a run: in a format that Prometheus takes, and its health."""

from __future__ import annotations

import json
import math
import re
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.small_runs import small_recipe

from courtside.api import train
from courtside.errors import UserError
from courtside.progress import PhaseProgress, ProgressMeter, ReplicaCounts
from courtside.report.console import RunConsole
from courtside.report.exposition import MetricFamily, format_metrics
from courtside.report.metrics_server import MetricsServer
from courtside.report.run_metrics import describe_metrics
from courtside.report.run_monitor import RunMonitor

SAMPLE = re.compile(
    r'([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{((?:[a-zA-Z_]\w*="(?:[^"\\\n]|\\[\\"n])*",?)*)\})? (\S+)'
)
LABEL = re.compile(r'([a-zA-Z_]\w*)="((?:[^"\\\n]|\\[\\"n])*)"')
ESCAPES = {"\\\\": "\\", '\\"': '"', "\\n": "\n"}
Parsed = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def parse(text: str) -> Parsed:
    """Strictly, by Prometheus' description of its text format: each family has its HELP and TYPE
    right before its samples, in one block, and no sample comes twice."""
    assert text.endswith("\n")
    samples: Parsed = {}
    families, current, kind = set[str](), "", ""
    lines = iter(text.splitlines())
    for line in lines:
        if line.startswith("# HELP "):
            current = line.split(" ")[2]
            assert current not in families
            families.add(current)
            type_line = next(lines).split(" ")
            assert type_line[:3] == ["#", "TYPE", current]
            (kind,) = type_line[3:]
            assert kind in ("counter", "gauge")
            continue
        match = SAMPLE.fullmatch(line)
        assert match and match[1] == current, line
        labels = tuple(
            (name, re.sub(r'\\[\\"n]', lambda m: ESCAPES[m[0]], value))
            for name, value in LABEL.findall(match[2] or "")
        )
        value = float(match[3])
        assert (current, labels) not in samples
        assert kind != "counter" or value >= 0
        samples[current, labels] = value
    return samples


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def make_monitor(stall_seconds: float = 100.0) -> tuple[RunMonitor, Clock]:
    clock = Clock()
    return RunMonitor("mine", stall_seconds=stall_seconds, clock=clock), clock


def run_phase(monitor: RunMonitor, clock: Clock, name: str, seconds: float) -> None:
    monitor.phase(name)
    clock.now += seconds
    monitor.end_phase(name)


# ── the format ───────────────────────────────────────────────────────────────────────────────────


def test_labels_and_values_survive() -> None:
    awkward = 'a "b"\\ \n{c="d"} ü'
    values = {"nan": math.nan, "inf": math.inf, "low": -math.inf, "small": 1e-17, "whole": 3.0}
    samples = [({"key": key, "path": awkward}, value) for key, value in values.items()]
    family = MetricFamily(name="m", kind="gauge", help="line\nbreak \\", samples=samples)
    text = format_metrics([family, MetricFamily(name="e", kind="gauge", help="", samples=[])])
    parsed = parse(text)
    assert text.count("\n") == 2 + len(values) and "# TYPE e" not in text
    for key, value in values.items():
        number = parsed["m", (("key", key), ("path", awkward))]
        assert number == value or (math.isnan(number) and math.isnan(value))


@pytest.mark.parametrize(
    "text",
    [
        "a 1\n",
        "# HELP a b\n# TYPE a gauge\nb 1\n",
        '# HELP a b\n# TYPE a gauge\na{b="\\x"} 1\n',
        "# HELP a b\n# TYPE a gauge\na 1\na 2\n",
        "# HELP a b\n# TYPE a gauge\na 1",
    ],
)
def test_the_parser_is_strict(text: str) -> None:
    with pytest.raises(AssertionError):
        parse(text)


def test_servers_are_told_by_replica() -> None:
    monitor, _ = make_monitor()
    replicas = [
        ReplicaCounts(server="rollout.server", url="http://a:1", num_answered=4, num_failed=1,
                      num_hedged=2, answer_seconds=6.0, num_assigned=3),
        ReplicaCounts(server="rollout.server", url="http://b:1",
                      blocked_until=time.monotonic() + 60),
    ]  # fmt: skip
    monitor.watch(ProgressMeter(replicas=replicas))
    parsed = parse(format_metrics(describe_metrics(monitor)))
    a, b = ((("server", r.server), ("url", r.url)) for r in replicas)
    values = {"server_up": 1, "server_requests": 3, "server_answers_total": 4,
              "server_answer_seconds_total": 6, "server_failures_total": 1,
              "server_hedges_total": 2}  # fmt: skip
    assert {name: parsed[f"courtside_{name}", a] for name in values} == values
    assert parsed["courtside_server_up", b] == 0


# ── health ───────────────────────────────────────────────────────────────────────────────────────


def test_nothing_is_called_a_stall_before_the_phase_has_ended_three_times() -> None:
    monitor, clock = make_monitor()
    for num_ended in range(3):
        monitor.phase("rollout")
        clock.now += 150
        assert monitor.health().status != "stalled", num_ended
        monitor.end_phase("rollout")
    monitor.phase("rollout")
    clock.now += 1e6
    assert monitor.health().status == "stalled"


@pytest.mark.parametrize(("usual", "limit"), [(1.0, 100.0), (50.0, 300.0)])
def test_a_phase_stalls_after_six_times_its_usual_time_or_the_given_minutes(
    usual: float, limit: float
) -> None:
    monitor, clock = make_monitor(stall_seconds=100.0)
    for _ in range(3):
        run_phase(monitor, clock, "rollout", usual)
    monitor.phase("rollout")
    clock.now += limit
    assert monitor.health().status == "starting"
    clock.now += 1
    health = monitor.health()
    assert (health.status, health.phase, health.stalls_after_seconds) == (
        "stalled",
        "rollout",
        limit,
    )
    monitor.end_phase("rollout")
    assert monitor.health().status == "starting", "it went on"


def test_a_long_phase_that_progresses_is_no_stall() -> None:
    monitor, clock = make_monitor(stall_seconds=10.0)
    meter = ProgressMeter()
    monitor.watch(meter)
    for _ in range(3):
        run_phase(monitor, clock, "rollout", 1.0)
    monitor.phase("rollout")
    meter.phase = PhaseProgress(total=100, unit="answers")
    for _ in range(50):
        clock.now += 5
        meter.phase.num_tokens += 1
        assert monitor.health().status == "starting"
    clock.now += 11
    health = monitor.health()
    assert health.status == "stalled" and health.seconds_since_progress == 11


def test_a_finished_run_is_never_stalled() -> None:
    monitor, clock = make_monitor(stall_seconds=10.0)
    for _ in range(4):
        run_phase(monitor, clock, "rollout", 1.0)
    monitor.finish()
    clock.now += 1e6
    assert monitor.health().status == "finished"


@contextmanager
def serve(monitor: RunMonitor) -> Iterator[MetricsServer]:
    with MetricsServer(monitor, host="127.0.0.1", port=0) as server:
        yield server


def test_a_stall_is_503_and_the_process_is_alive() -> None:
    monitor, clock = make_monitor(stall_seconds=1.0)
    for _ in range(3):
        run_phase(monitor, clock, "update", 0.1)
    with serve(monitor) as server:
        assert httpx.get(f"{server.url}/health").status_code == 200
        monitor.phase("update")
        clock.now += 60
        answer = httpx.get(f"{server.url}/health")
        assert answer.status_code == 503 and answer.json()["phase"] == "update"
        assert httpx.get(f"{server.url}/live").json() == {"status": "alive"}
        assert httpx.get(f"{server.url}/else").status_code == 404
        assert httpx.post(f"{server.url}/metrics").status_code == 501
        metrics = parse(httpx.get(f"{server.url}/metrics").text)
        assert metrics["courtside_stalled", ()] == 1


def test_what_fails_in_a_request_stays_there(capfd: pytest.CaptureFixture[str]) -> None:
    monitor, _ = make_monitor()
    monitor.watch(None)  # type: ignore[arg-type]
    with serve(monitor) as server:
        with pytest.raises(httpx.TransportError):
            httpx.get(f"{server.url}/metrics")
        with socket.create_connection(("127.0.0.1", server.port)) as client:
            client.sendall(b"\x16\x03\x01 no HTTP\r\n\r\n")
        assert httpx.get(f"{server.url}/live").status_code == 200
    assert capfd.readouterr() == ("", "")


# ── in a run ─────────────────────────────────────────────────────────────────────────────────────


class Scraper(RunConsole):
    """Asks the endpoint when a step is done, and when the update runs."""

    def __init__(self) -> None:
        self.url = ""
        self.in_update: list[Parsed] = []
        self.after_steps: list[tuple[Any, Parsed]] = []

    def print_line(self, text: str) -> None:
        if match := re.match(r"metrics: (http://127\.0\.0\.1:\d+)/metrics", text):
            self.url = match[1]

    def phase(self, name: str) -> None:
        if name == "update":
            self.in_update.append(self.scrape())

    def end_phase(self, name: str) -> None:
        if name == "checkpoint":
            health = httpx.get(f"{self.url}/health").json()
            self.after_steps.append((health, self.scrape()))

    def scrape(self) -> Parsed:
        answer = httpx.get(f"{self.url}/metrics")
        assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
        return parse(answer.text)


def test_a_run_tells_what_its_folder_has(tiny_folder: Path, tmp_path: Path) -> None:
    scraper = Scraper()
    recipe = small_recipe(
        tiny_folder, tiny_folder,
        train={"steps": 2, "prompts_per_step": 2}, run={"metrics_port": 0, "checkpoint_every": 1},
    )  # fmt: skip
    folder = train(recipe, tmp_path / "run", console=scraper)
    health, metrics = scraper.after_steps[-1]
    assert (health["status"], health["steps_done"], health["steps_planned"]) == ("running", 2, 2)
    row = folder.metrics()[-1]
    for key, value in row.items():
        if value is not None:
            assert metrics["courtside_step_metric", (("key", key),)] == value, key
    assert metrics["courtside_steps_done", ()] == 2
    costs = folder.read_costs()
    for phase, direction, tokens in (
        ("rollout", "output", costs["rollout"].output_tokens),
        ("teacher", "input", costs["teacher"].input_tokens),
        ("update", "input", costs["update"].input_tokens),
    ):
        labels = (("phase", phase), ("direction", direction))
        assert metrics["courtside_phase_tokens_total", labels] == tokens > 0
    assert metrics["courtside_phase_seconds_total", (("phase", "rollout"),)] > 0
    assert metrics["courtside_evaluation_score", (("policy", "student"), ("split", "test"))] >= 0
    assert ("courtside_phase_open_seconds", (("phase", "update"),)) in scraper.in_update[0]
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{scraper.url}/live")


def test_the_endpoint_changes_nothing(tiny_folder: Path, tmp_path: Path) -> None:
    tree = {"train": {"steps": 2, "prompts_per_step": 2}}
    plain = train(small_recipe(tiny_folder, tiny_folder, **tree), tmp_path / "plain", quiet=True)
    settings = {"metrics_port": 0, "log_format": "json", "log_file": str(tmp_path / "log")}
    recipe = small_recipe(tiny_folder, tiny_folder, **tree, run=settings)
    watched = train(recipe, tmp_path / "watched", quiet=True)

    def numbers(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [{k: v for k, v in row.items() if "second" not in k} for row in rows]

    assert numbers(plain.metrics()) == numbers(watched.metrics())


def test_a_port_that_is_taken_is_an_error_before_the_run(tiny_folder: Path, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        recipe = small_recipe(tiny_folder, tiny_folder, run={"metrics_port": port})
        with pytest.raises(UserError, match=rf"run.metrics_port = {port}: cannot listen on '127.*"
                           r"in use.*Give another port"):  # fmt: skip
            train(recipe, tmp_path / "run", quiet=True)
    assert not (tmp_path / "run").exists()


def test_an_address_of_another_machine_is_an_error(tiny_folder: Path, tmp_path: Path) -> None:
    recipe = small_recipe(
        tiny_folder, tiny_folder, run={"metrics_port": 0, "metrics_host": "203.0.113.1"}
    )
    with pytest.raises(UserError, match=r"cannot listen on '203.0.113.1'.*run.metrics_host"):
        train(recipe, tmp_path / "run", quiet=True)


def test_a_json_round_trip_of_health() -> None:
    monitor, _ = make_monitor()
    with serve(monitor) as server:
        assert json.loads(httpx.get(f"{server.url}/health").text)["status"] == "starting"
