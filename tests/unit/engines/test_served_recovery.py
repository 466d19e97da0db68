"""What a fault of one server may not do: hold up the others, leave work behind, or stay unsaid."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors import SafetensorError
from support.served_engines import SAMPLING, make_engine, make_sync, requests, sample_with
from support.vllm_stand_in import GENERATE, VllmStandIn, respond

from courtside.engines.served.requests import RefusedError, Request
from courtside.engines.served.shared_folder import LOCK, SharedFolder
from courtside.errors import RunError, ServerError
from courtside.ranks import Failure

LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"


@pytest.fixture
def servers() -> Iterator[list[VllmStandIn]]:
    both = [VllmStandIn(), VllmStandIn()]
    yield both
    for server in both:
        server.close()


@pytest.fixture
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("courtside.engines.served.weight_sync.MIN_PATIENCE", 0.2)


def hang(server: VllmStandIn, *paths: str) -> Callable[[], None]:
    """As a stopped process does; returns what lets it go on."""
    go_on = threading.Event()

    def fault(number: int, path: str, body: Any) -> Any:
        if not paths or path in paths:
            go_on.wait(60)
        return "none"

    server.fault = fault
    return go_on.set


# ── new weights ──────────────────────────────────────────────────────────────────────────────────


@pytest.mark.usefixtures("patience")
def test_a_hung_server_does_not_hold_up_new_weights(
    servers: list[VllmStandIn], tmp_path: Path
) -> None:
    first, second = servers
    engine = make_engine(first.url, second.url, timeout=120)
    sync = make_sync(engine, tmp_path, lambda: -1.0)
    before = sync.publish(0)
    go_on = hang(first)
    start = time.monotonic()
    after = sync.publish(1)
    assert time.monotonic() - start < 30, "and not the timeout"
    assert set(second.adapters) == {after.name}
    assert {p.name for p in tmp_path.iterdir()} == {after.name}
    go_on()
    first.fault = lambda n, path, body: "none"
    deadline = time.monotonic() + 30
    while set(first.adapters) != {after.name} and time.monotonic() < deadline:
        sample_with(engine, after.name, 8)
    assert set(first.adapters) == {after.name}, "the new ones, and the old ones are gone"
    assert before.name != after.name
    engine.pool.close()
    assert not first.adapters and not second.adapters


def test_a_server_that_restarts_between_loading_and_the_check_gets_the_weights_again(
    servers: list[VllmStandIn], tmp_path: Path
) -> None:
    (server, _) = servers
    engine = make_engine(server.url)
    remaining = [1]

    def restart(number: int, path: str, body: Any) -> Any:
        if path == GENERATE and "prompt_logprobs" in body["sampling_params"] and remaining.pop():
            server.restart()
            remaining.append(0)
        elif path == GENERATE:
            remaining.append(0)
        return "none"

    server.fault = restart
    weights = make_sync(engine, tmp_path, lambda: -1.0).publish(0)
    assert weights.name in server.adapters


def test_weights_that_are_retired_while_a_server_reads_them_are_no_failure(
    servers: list[VllmStandIn], tmp_path: Path
) -> None:
    """A request of another thread may bring a slow server the weights of the step before."""
    first, second = servers
    engine = make_engine(first.url, second.url)
    sync = make_sync(engine, tmp_path, lambda: -1.0)
    first.fault = lambda n, path, body: respond({}, 503) if path == LOAD else "none"
    old = sync.publish(0)
    began, go_on = threading.Event(), threading.Event()

    def read_late(number: int, path: str, body: Any) -> Any:
        if path == LOAD and body["lora_name"] == old.name:
            began.set()
            go_on.wait(10)
            return respond({"error": {"message": "No adapter found for it"}}, 404)
        return "none"

    first.fault = read_late
    replica = engine.pool.replicas[0]
    preparing = engine.pool._start(sync._prepare(replica))
    assert began.wait(5)
    replica.blocked_until = time.monotonic() + 30
    new = sync.publish(1)
    go_on.set()
    preparing.result(5)
    assert set(first.adapters) == {new.name}


def test_a_full_disk_is_named_also_where_safetensors_finds_it(tmp_path: Path) -> None:
    folder = SharedFolder(tmp_path, field="rollout.server")

    def fail(work: Path) -> None:
        (work / "half").write_text("x")
        raise SafetensorError("No space left on device (os error 28)")

    with pytest.raises(ServerError, match=r"sync_folder = .*No space left.*with space"):
        folder.write("courtside-1", fail)
    assert not [*tmp_path.iterdir()]


def test_folders_of_a_process_that_was_killed_are_removed(tmp_path: Path) -> None:
    alive = SharedFolder(tmp_path, field="rollout.server")
    alive.write("courtside-alive-000001-1", lambda work: (work / "x").write_text(""))
    for name in ("courtside-dead-000001-1", ".courtside-dead-000002-2"):
        (tmp_path / name).mkdir()
        (tmp_path / name / LOCK).touch()  # nobody holds it
    (tmp_path / "courtside-mine").mkdir()  # a user's
    for path in tmp_path.iterdir():
        os.utime(path, (1, 1))
    SharedFolder(tmp_path, field="rollout.server")
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"courtside-alive-000001-1", "courtside-mine"}
    alive.remove("courtside-alive-000001-1")
    assert {path.name for path in tmp_path.iterdir()} == {"courtside-mine"}


# ── requests ─────────────────────────────────────────────────────────────────────────────────────


def test_a_server_that_hangs_in_the_first_batch_costs_no_timeout(
    servers: list[VllmStandIn], monkeypatch: pytest.MonkeyPatch
) -> None:
    """When it begins, nobody knows what an answer takes; the other server's answers tell."""
    monkeypatch.setattr("courtside.engines.served.hedging.FLOOR", 0.2)
    monkeypatch.setattr("courtside.engines.served.pool.RECHECK_SECONDS", 0.1)
    first, second = servers
    engine = make_engine(first.url, second.url, timeout=120)
    go_on = hang(first, GENERATE)
    start = time.monotonic()
    assert len(engine.sample(requests(12), SAMPLING)) == 12
    assert time.monotonic() - start < 30
    go_on()


def test_what_an_answer_takes_is_forgotten_after_an_outage(servers: list[VllmStandIn]) -> None:
    """And loading weights is no part of it."""
    hedges = make_engine(servers[0].url).pool.hedges
    for seconds in (900.0, *[4.0] * 300):
        hedges.add_answer("sample", seconds)
    assert hedges.seconds("sample") == 12.0
    engine = make_engine(servers[0].url)

    async def prepare(replica: Any) -> None:
        time.sleep(0.3)

    engine.pool.prepare = prepare
    engine.sample(requests(4), SAMPLING)
    (recent,) = engine.pool.hedges._recent.values()
    assert len(recent) == 4 and min(recent) < 0.3


def test_after_the_end_nothing_is_asked_and_nobody_waits(servers: list[VllmStandIn]) -> None:
    engine = make_engine(servers[0].url)
    engine.pool.close()
    for ask in (
        lambda: engine.sample(requests(1), SAMPLING),
        lambda: engine.pool.begin(Request(path="/version", parse=str)).result(1),
    ):
        with pytest.raises(RunError, match="the run has ended"):
            ask()


def test_a_hung_server_is_named_at_the_start(
    servers: list[VllmStandIn], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("courtside.engines.served.probe.FIRST_SECONDS", 0.2)
    go_on = hang(servers[0])
    start = time.monotonic()
    with pytest.raises(ServerError, match=rf"no answer after 3 tries.*{servers[0].url}"):
        make_engine(servers[0].url, timeout=120, max_retries=2)
    assert time.monotonic() - start < 30
    go_on()


def test_a_run_starts_without_a_server_that_joins_later(
    servers: list[VllmStandIn], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = servers
    first.fault = lambda n, path, body: None
    engine = make_engine(first.url, second.url)
    assert f"{first.url} is left alone" in caplog.text
    sync = make_sync(engine, tmp_path, lambda: -1.0)
    weights = sync.publish(0)
    sample_with(engine, weights.name, 4)
    paths = [path for path, _ in first.bodies]
    assert set(paths) == {"/v1/models"}, "nothing else before it has answered"
    first.fault = lambda n, path, body: "none"
    deadline = time.monotonic() + 30
    while not first.adapters and time.monotonic() < deadline:
        sample_with(engine, weights.name, 8)
    assert set(first.adapters) == {weights.name}
    joined = [path for path, _ in first.bodies][len(paths) :]
    assert joined.index("/version") < joined.index(LOAD), "asked what it can do, then used"
    engine.pool.close()


def test_a_server_that_joins_with_less_than_the_others_stops_the_run(
    servers: list[VllmStandIn],
) -> None:
    first, second = servers
    first.fault = lambda n, path, body: None
    engine = make_engine(first.url, second.url)
    fewer = respond({"error": {"message": "greater than max allowed: 5"}}, 400)
    first.fault = lambda n, path, body: fewer if "1000000" in str(body) else "none"
    with pytest.raises(ServerError, match=f"{first.url} did not answer .*max_logprobs = 5, not 20"):
        for _ in range(200):
            engine.sample(requests(8), SAMPLING)
            time.sleep(0.02)


def test_who_is_left_alone_and_who_is_back_is_said_once(
    servers: list[VllmStandIn], caplog: pytest.LogCaptureFixture
) -> None:
    first, second = servers
    engine = make_engine(first.url, second.url)
    first.fault = lambda n, path, body: None
    for _ in range(3):
        engine.sample(requests(8), SAMPLING)
        time.sleep(0.02)
    first.fault = lambda n, path, body: "none"
    deadline = time.monotonic() + 30
    while "again" not in caplog.text and time.monotonic() < deadline:
        engine.sample(requests(8), SAMPLING)
    messages = [record.getMessage() for record in caplog.records]
    assert [m.partition(first.url)[2][:8] for m in messages] == [" is left", " answers"], messages
    assert "RemoteProtocolError" in messages[0] and second.url not in caplog.text


def test_an_old_adapter_that_could_not_be_unloaded_is_given_back_in_the_end(
    servers: list[VllmStandIn], tmp_path: Path
) -> None:
    engine = make_engine(servers[0].url, max_retries=1)
    sync = make_sync(engine, tmp_path, lambda: -1.0)
    sync.publish(0)
    servers[0].fault = lambda n, path, body: None if path == UNLOAD else "none"
    sync.publish(1)
    assert len(servers[0].adapters) == 2
    servers[0].fault = lambda n, path, body: "none"
    engine.pool.close()
    assert not servers[0].adapters


def test_a_refusal_on_one_rank_is_told_by_the_others_without_a_traceback() -> None:
    refused = RefusedError("server: refused the request", status=400, text="")
    error = Failure.of(refused, 1).to_error()
    assert type(error) is ServerError
    assert str(error) == "rank 1: server: refused the request"
