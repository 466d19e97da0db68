"""Faults of servers: what is tried again, what moves elsewhere, and what stops with a reason."""

from __future__ import annotations

import json
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.served_engines import (
    PROMPT,
    SAMPLING,
    SCORED,
    make_engine,
    make_student,
    make_sync,
    requests,
    sample_with,
)
from support.vllm_stand_in import (
    GENERATE,
    VllmStandIn,
    generated,
    prompt_logps,
    respond,
    uniform_rows,
)

from courtside.engines.base import SampleRequest, Sampling, ScoreRequest
from courtside.engines.served.engine import hash_ids
from courtside.engines.served.pool import ReplicaPool
from courtside.engines.served.probe import probe_servers
from courtside.engines.served.replicas import choose_replica
from courtside.engines.served.requests import Request
from courtside.errors import RecipeError, RunError
from courtside.progress import ProgressMeter
from courtside.recipe.server import ServerConfig
from courtside.types import VersionSpan

KEY = "sk-secret-0123456789"


@pytest.fixture
def servers() -> Iterator[list[VllmStandIn]]:
    both = [VllmStandIn(), VllmStandIn()]
    yield both
    for server in both:
        server.close()


def fail_first(count: int, response: Any) -> Callable[[int, str, Any], Any]:
    """The first requests to generate after the engine was made."""
    remaining = [count]

    def fault(number: int, path: str, body: Any) -> Any:
        if path != GENERATE or not remaining[0]:
            return "none"
        remaining[0] -= 1
        return response

    return fault


@pytest.mark.parametrize(
    "response",
    [
        None,
        respond({"error": "starting"}, 503),
        respond({"error": "slow down"}, 429, Retry_After="0"),
        generated([], [], "abort"),
    ],
    ids=["connection dropped", "503", "429", "aborted"],
)
def test_after_a_passing_fault_the_request_is_sent_again(
    response: Any, servers: list[VllmStandIn]
) -> None:
    engine = make_engine(servers[0].url)
    servers[0].fault = fail_first(2, response)
    samples = engine.sample(requests(3), SAMPLING)
    assert [s.token_ids for s in samples] == [(5, 5, 5)] * 3


def test_a_lasting_fault_ends_with_url_reason_and_fix(servers: list[VllmStandIn]) -> None:
    engine = make_engine(servers[0].url, max_retries=2)
    servers[0].fault = fail_first(99, respond({"error": "broken"}, 500))
    with pytest.raises(
        RunError,
        match=rf"teacher.server.urls: no answer after 3 tries, the last to "
        rf"{servers[0].url}: status 500.*broken.*max_retries.*same command again",
    ):
        engine.sample(requests(1), SAMPLING)  # fmt: skip
    assert servers[0].fault(0, GENERATE, None) != "none"


def test_work_moves_away_from_a_dead_replica_and_comes_back(servers: list[VllmStandIn]) -> None:
    first, second = servers
    engine = make_engine(first.url, second.url)
    before = first.num_samples()
    first.fault = lambda n, path, body: None
    assert len(engine.sample(requests(12), SAMPLING)) == 12
    second_only = second.num_samples()
    first.fault = lambda n, path, body: "none"
    deadline = time.monotonic() + 5
    num_before = first.num_samples()
    while first.num_samples() == num_before and time.monotonic() < deadline:
        engine.sample(requests(12), SAMPLING)
        time.sleep(0.02)
    assert first.num_samples() > num_before > before and second_only >= 12


def test_a_hung_server_is_left_after_the_timeout(servers: list[VllmStandIn]) -> None:
    first, second = servers
    engine = make_engine(first.url, second.url, timeout=1)
    stop = threading.Event()

    def hang(number: int, path: str, body: Any) -> Any:
        stop.wait(60)

    first.fault = hang
    start = time.monotonic()
    assert len(engine.sample(requests(6), SAMPLING)) == 6
    assert time.monotonic() - start < 250
    stop.set()


def hang_on_samples(server: VllmStandIn, stop: threading.Event) -> None:
    def hang(number: int, path: str, body: Any) -> Any:
        if path == GENERATE:
            stop.wait(60)
        return "none"

    server.fault = hang


@pytest.mark.parametrize("hedge_after", [0.2, "auto"])
def test_a_hung_server_costs_a_moment_and_not_the_timeout(
    hedge_after: Any, servers: list[VllmStandIn], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each answer is there once, by whichever server gave it."""
    monkeypatch.setattr("courtside.engines.served.hedging.FLOOR", 0.2)
    first, second = servers
    engine = make_engine(first.url, second.url, timeout=120, hedge_after=hedge_after)
    engine.sample(requests(16), SAMPLING)  # what an answer takes
    stop = threading.Event()
    hang_on_samples(first, stop)
    start = time.monotonic()
    samples = engine.sample(requests(24), SAMPLING)
    assert time.monotonic() - start < 250
    stop.set()
    assert len(samples) == 24 and {s.token_ids for s in samples} == {(5, 5, 5)}
    hedges = engine.pool.hedges
    assert hedges.num_hedged >= hedges.num_won > 0
    assert all(replica.num_assigned == 0 for replica in engine.pool.replicas)
    assert not any(replica.slots.locked() for replica in engine.pool.replicas)


def test_busy_servers_get_no_request_twice(servers: list[VllmStandIn]) -> None:
    """Where the others have no slot, and where answers take as long as they always do."""

    def slow(number: int, path: str, body: Any) -> Any:
        time.sleep(0.3)
        return "none"

    engine = make_engine(*(s.url for s in servers), hedge_after=0.1, max_concurrency=1)
    for server in servers:
        server.fault = slow
    before = sum(server.num_samples() for server in servers)
    engine.sample(requests(6), SAMPLING)
    num_sent = sum(server.num_samples() for server in servers) - before
    # One server may have four of the six, and the other is idle for the last two.
    assert num_sent <= 6 + engine.pool.hedges.num_hedged <= 8, "at most the last ones"
    usual = make_engine(*(s.url for s in servers))
    usual.sample(requests(20), SAMPLING)
    assert usual.pool.hedges.num_hedged == 0


def test_the_slower_of_two_answers_may_fail(servers: list[VllmStandIn]) -> None:
    """And where both fail, the request is sent again as any other."""
    first, second = servers
    engine = make_engine(first.url, second.url, hedge_after=0.1, max_retries=3)
    stop = threading.Event()

    def hang_then_fail(number: int, path: str, body: Any) -> Any:
        stop.wait(0.4)
        return respond({"error": "broken"}, 500)

    first.fault = hang_then_fail
    assert len(engine.sample(requests(8), SAMPLING)) == 8
    second.fault = hang_then_fail
    with pytest.raises(RunError, match="no answer after 5 tries"):
        engine.sample(requests(1), SAMPLING)
    stop.set()


def rows(ids: tuple[int, ...], change: Any) -> Any:
    plain = uniform_rows(list(ids))
    change(plain)
    return prompt_logps(plain)


BAD_SAMPLES = {
    "no JSON": ((200, {}, b"{oops"), "something that is no JSON"),
    "another protocol": (respond({"text": "Hi"}), "no answer of vLLM"),
    "HTML": ((200, {}, b"<html>proxy</html>"), "no answer of vLLM's: <html>"),
    "fewer log-probs": (generated([5, 5, 5], [-1.0, -1.0]), "3 sampled ids and 2 log-probs"),
    "NaN": (generated([5, 5, 5], [-1.0, float("nan"), -1.0]), "the log-prob nan for the sampled"),
    "minus infinity": (generated([5] * 3, [-1.0, -9999.0, -1.0]), "the log-prob -9999"),
    "too many tokens": (generated([5] * 4, [-1.0] * 4), "4 tokens where 3 were asked for"),
    "ends early": (generated([5, 6], [-1.0] * 2, "stop"), "ends after 2 of 3.*generation-config"),
    "ids out of range": (generated([5, 6, 999], [-1.0] * 3), "sampled ids 5 to 999 of 258"),
}  # fmt: skip
BAD_SCORES = {
    "a row too few": (lambda r: r.pop(), "2 rows of log-probs for 3 tokens"),
    "no row": (lambda r: r.__setitem__(2, None), "no log-probs at position 2"),
    "another token": (lambda r: r.__setitem__(2, {"9": r[2]["5"]}), "no log-prob for the id 5"),
    "NaN": (lambda r: r[1]["4"].update(logprob=float("nan")), "the log-prob nan for the id 4"),
    "positive": (lambda r: r[1]["4"].update(logprob=0.5), "the log-prob 0.5 for the id 4"),
    "no number": (lambda r: r[1]["4"].update(logprob=None), "as log-probs at position 1"),
}


@pytest.mark.parametrize(("response", "reason"), BAD_SAMPLES.values(), ids=BAD_SAMPLES)
def test_garbage_is_never_used(response: Any, reason: str, servers: list[VllmStandIn]) -> None:
    engine = make_engine(servers[0].url)
    servers[0].fault = fail_first(1, response)
    with pytest.raises(RunError, match=rf"{GENERATE} answered with .*{reason}.*Nothing of it"):
        engine.sample(requests(1), SAMPLING)


@pytest.mark.parametrize(("change", "reason"), BAD_SCORES.values(), ids=BAD_SCORES)
def test_wrong_scores_are_never_used(change: Any, reason: str, servers: list[VllmStandIn]) -> None:
    engine = make_engine(servers[0].url)
    servers[0].fault = fail_first(1, rows(SCORED.token_ids, change))
    with pytest.raises(RunError, match=rf"{servers[0].url}{GENERATE} answered with .*{reason}"):
        engine.score([SCORED])


def test_likeliest_tokens_must_be_all_there(servers: list[VllmStandIn]) -> None:
    engine = make_engine(servers[0].url)
    two = {"4": {"logprob": -1.0, "rank": 1}, "7": {"logprob": -2.0, "rank": 3}}
    servers[0].fault = fail_first(1, prompt_logps([None, two, two]))
    with pytest.raises(RunError, match="1 of the 2 likeliest tokens at position 1"):
        engine.score([SCORED], want="top_k", top_k=2)


def test_a_sequence_without_a_scored_token_has_empty_scores(servers: list[VllmStandIn]) -> None:
    engine = make_engine(servers[0].url)
    nothing = ScoreRequest(token_ids=(3, 4), scored=(False, False))
    (scores,) = engine.score([nothing], want="top_k", top_k=2)
    assert scores.top_ids_TK is not None and scores.top_logp_TK is not None
    assert scores.logp_T.shape == (0,)
    assert scores.top_ids_TK.shape == (0, 2) and not scores.top_ids_TK.is_floating_point()
    assert engine.score([]) == [] and engine.sample([], SAMPLING) == []


def test_another_temperature_is_refused(servers: list[VllmStandIn]) -> None:
    engine = make_engine(servers[0].url)
    hot = ScoreRequest(token_ids=(3, 4), scored=(False, True), temperature=0.7)
    with pytest.raises(RecipeError, match=r"temperature 0.7, .*rollout.temperature = 1"):
        engine.score([hot])


def test_a_refused_request_is_not_sent_again(servers: list[VllmStandIn]) -> None:
    engine = make_engine(servers[0].url)
    before = servers[0].num_samples()
    servers[0].fault = fail_first(9, respond({"error": "bad request"}, 400))
    with pytest.raises(
        RunError, match=r"refused the request courtside-\S+ \(status 400\).*bad request"
    ):
        engine.sample(requests(1), SAMPLING)
    assert servers[0].num_samples() == before + 1


def test_at_most_max_concurrency_requests_are_under_way(servers: list[VllmStandIn]) -> None:
    def slow(number: int, path: str, body: Any) -> Any:
        time.sleep(0.05)
        return "none"

    engine = make_engine(servers[0].url, max_concurrency=3)
    servers[0].fault, servers[0].most_under_way = slow, 0
    engine.sample(requests(9), SAMPLING)
    assert servers[0].most_under_way == 3


def test_samples_of_a_prompt_and_turns_of_an_episode_stay_together(
    servers: list[VllmStandIn],
) -> None:
    """Where no server has more than its share of the requests, and none is hedged."""
    engine = make_engine(servers[0].url, servers[1].url, hedge_after=60.0)
    for server in servers:
        server.bodies.clear()
    homes: dict[str, list[tuple[int, ...]]] = {server.url: [] for server in servers}
    for prompt in ((3, 4, i) for i in range(200)):
        replica = choose_replica(engine.pool.replicas, hash_ids(prompt))
        assert replica is not None
        homes[replica.url].append(prompt)
    # By turns, so that neither server is ever ahead of the other.
    pairs = [*zip(*homes.values(), strict=False)][:4]
    session = engine.session(8)
    requests = [SampleRequest(prompt_ids=ids, seed=0) for pair in pairs for ids in pair]
    for _ in range(3):
        session.sample(range(8), requests, SAMPLING)
    for server in servers:
        bodies = [body["token_ids"] for path, body in server.bodies if path == GENERATE]
        assert Counter(tuple(ids[:3]) for ids in bodies) == dict.fromkeys(homes[server.url][:4], 3)
        assert {len(ids) for ids in bodies} == {3, 8, 13}, "each turn sends the whole conversation"


def test_a_replica_with_more_than_its_share_passes_work_on(servers: list[VllmStandIn]) -> None:
    pool = ReplicaPool(ServerConfig(urls=tuple(s.url for s in servers), model="tiny"), field="f")
    chosen: Counter[str] = Counter()
    for _ in range(40):
        replica = choose_replica(pool.replicas, "one prompt")
        assert replica is not None
        replica.num_assigned += 1
        chosen[replica.url] += 1
    assert sorted(chosen.values()) == [15, 25]
    least = min(pool.replicas, key=lambda r: r.num_assigned)
    assert choose_replica(pool.replicas, None) is least
    pool.close()


def test_an_interrupted_caller_leaves_no_request_behind(servers: list[VllmStandIn]) -> None:
    engine = make_engine(servers[0].url, timeout=30)
    stop = threading.Event()

    def hang(number: int, path: str, body: Any) -> Any:
        stop.wait(60)
        return "none"

    servers[0].fault = hang
    handler = signal.signal(signal.SIGALRM, raise_in_caller)
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    start = time.monotonic()
    try:
        with pytest.raises(Interrupted):
            engine.sample(requests(4), SAMPLING)
    finally:
        signal.signal(signal.SIGALRM, handler)
    assert time.monotonic() - start < 25
    stop.set()
    servers[0].fault = lambda n, path, body: "none"
    assert len(engine.sample(requests(2), SAMPLING)) == 2
    assert all(replica.num_assigned == 0 for replica in engine.pool.replicas)


class Interrupted(Exception):
    pass


def raise_in_caller(*_: Any) -> None:
    raise Interrupted


# ── the key ──────────────────────────────────────────────────────────────────────────────────────


def test_the_key_comes_from_the_environment_and_is_in_no_message(
    servers: list[VllmStandIn], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TEACHER_KEY", KEY)
    engine = make_engine(servers[0].url, api_key_env="TEACHER_KEY", max_retries=0)
    assert all(h["Authorization"] == f"Bearer {KEY}" for h in servers[0].headers)
    names = [h["X-Request-Id"] for h in servers[0].headers]
    assert len(set(names)) == len(names) and all(n.startswith("courtside-") for n in names)
    for status in (401, 500):
        servers[0].fault = fail_first(1, respond({"error": f"not {KEY}"}, status))
        with pytest.raises(RunError) as error:
            engine.sample(requests(1), SAMPLING)
        assert KEY not in str(error.value) and "***" in str(error.value)
    assert KEY not in engine.pool.config.model_dump_json()
    monkeypatch.delenv("TEACHER_KEY")
    with pytest.raises(RecipeError, match=r"teacher.server.api_key_env = 'TEACHER_KEY'.*not set"):
        make_engine(servers[0].url, api_key_env="TEACHER_KEY")


# ── what a server can do ─────────────────────────────────────────────────────────────────────────


def test_another_model_or_other_log_probs_are_refused(servers: list[VllmStandIn]) -> None:
    server = servers[0]
    pool = ReplicaPool(ServerConfig(urls=(server.url,), model="other"), field="rollout.server")
    with pytest.raises(RecipeError, match=r"rollout.server.model = 'other': .* serves \['tiny'\]"):
        probe_servers(pool, probe_ids=PROMPT)

    def give_logits(number: int, path: str, body: Any) -> Any:
        fields = body["sampling_params"] if path == GENERATE else {"prompt_logprobs": 0}
        return "none" if "prompt_logprobs" in fields else generated([5], [2.0])

    server.fault = give_logits
    with pytest.raises(RecipeError, match=r"gives logits.*--logprobs-mode processed_logprobs"):
        make_engine(server.url)


# ── adapters ─────────────────────────────────────────────────────────────────────────────────────


def read_logp(server: VllmStandIn) -> Callable[[str], float]:
    """What is in the adapter's file, so that a server computes with what it loaded."""

    def logp(model: str) -> float:
        file = Path(server.adapters[model]) / "adapter_model.safetensors"
        return float(json.loads(file.read_text()))

    return logp


def test_each_version_has_a_name_and_folder_of_its_own(
    servers: list[VllmStandIn], tmp_path: Path
) -> None:
    engine = make_engine(servers[0].url, servers[1].url)
    for server in servers:
        server.version_logp = read_logp(server)
    logp = [-1.0]
    sync = make_sync(engine, tmp_path, lambda: logp[0])
    published = set()
    for version in range(3):
        logp[0] = -1.0 - 0.01 * version
        adapter = sync.publish(version)
        published.add(adapter.name)
        assert {Path(s.adapters[adapter.name]).name for s in servers} == {adapter.name}
        assert [set(s.adapters) for s in servers] == [{adapter.name}] * 2, "older ones are gone"
        assert [p.name for p in tmp_path.iterdir()] == [adapter.name]
    engine.pool.close()
    assert [set(s.adapters) for s in servers] == [set()] * 2, "the last one is given back"
    assert len(published) == 3


def test_versions_that_are_still_sampled_with_stay_loaded(
    servers: list[VllmStandIn], tmp_path: Path
) -> None:
    engine = make_engine(servers[0].url)
    servers[0].version_logp = read_logp(servers[0])
    logp = [-1.0]
    sync = make_sync(engine, tmp_path, lambda: logp[0], max_staleness=2)
    names = []
    for version in range(5):
        logp[0] = -1.0 - 0.01 * version
        names.append(sync.publish(version).name)
        assert set(servers[0].adapters) == set(names[-3:]), "and no more"
        assert {p.name for p in tmp_path.iterdir()} == set(names[-3:])
    assert [weights.version for weights in sync.retained] == [2, 3, 4]
    servers[0].restart()
    sync.pool.ask_each(sync._try_to_prepare)  # it does not know yet
    body = engine.facts.route.score_body(names[2], SCORED.token_ids, 0)
    answer = sync.pool.ask_all([Request(path=GENERATE, body=body, parse=dict)])
    assert answer and set(servers[0].adapters) == set(names[-3:]), "older ones as well"
    engine.pool.close()
    assert not servers[0].adapters, "all are given back"


def test_a_fork_samples_with_the_weights_that_it_has_pinned(
    servers: list[VllmStandIn], tmp_path: Path
) -> None:
    engine = make_engine(servers[0].url)
    student = make_student(engine, make_sync(engine, tmp_path, lambda: -1.0, max_staleness=1))
    fork = student.fork(ProgressMeter())
    fork.pinned = first = student.weights
    student.load_weights(1)
    requests = [SampleRequest(prompt_ids=(1, 2), seed=0)]
    for sampler, weights in ((fork, first), (student, student.sync.current)):
        (sample,) = sampler.sample(requests, SAMPLING)
        assert sample.policy_versions == (VersionSpan(0, 3, weights.version),)
        assert servers[0].bodies[-1][1]["model"] == weights.name
    assert first.version == 0 and student.weights.version == 1


def test_log_probs_of_another_distribution_are_refused(
    servers: list[VllmStandIn], tmp_path: Path
) -> None:
    """A server that leaves the temperature out of its log-probs, as vLLM does by default."""

    def answer_raw(number: int, path: str, body: Any) -> Any:
        fields = body["sampling_params"] if path == GENERATE else {"prompt_logprobs": 0}
        return "none" if "prompt_logprobs" in fields else generated([5], [-1.0])

    servers[0].fault = answer_raw
    engine = make_engine(servers[0].url)
    assert engine.facts.logprobs == "raw"
    student = make_student(engine, make_sync(engine, tmp_path, lambda: -1.0))
    for changed in (Sampling(max_new_tokens=3, temperature=0.7), replace(SAMPLING, top_p=0.9)):
        with pytest.raises(RecipeError, match=r"--logprobs-mode processed_logprobs"):
            student.check_sampling(changed)
    for plain in (SAMPLING, Sampling(max_new_tokens=3, temperature=0.0, top_k=5)):
        student.check_sampling(plain)


def test_a_sync_that_changed_nothing_stops_the_run(
    servers: list[VllmStandIn], tmp_path: Path
) -> None:
    """The difference is far below what rounding may be; only the change tells."""
    engine = make_engine(servers[0].url)
    logp = [-1.0]
    sync = make_sync(engine, tmp_path, lambda: logp[0])
    servers[0].version_logp = lambda model: -1.0  # whatever was loaded
    sync.publish(0)
    logp[0] = -1.001
    with pytest.raises(RunError, match=r"student's weights of step 1: the trainer's log-probs "
                       r"changed, and theirs changed by 0%"):  # fmt: skip
        sync.publish(1)


def test_a_server_of_another_model_stops_before_the_first_sample(
    servers: list[VllmStandIn], tmp_path: Path
) -> None:
    engine = make_engine(servers[0].url)
    sync = make_sync(engine, tmp_path, lambda: -1.2)
    with pytest.raises(RunError, match=r"step 0: .* differ by 0.2 nats.*the student starts from"):
        sync.publish(0)


def test_a_restarted_server_gets_the_adapter_again(
    servers: list[VllmStandIn], tmp_path: Path
) -> None:
    engine = make_engine(servers[0].url)
    sync = make_sync(engine, tmp_path, lambda: -1.0)
    adapter = sync.publish(0)
    servers[0].adapters.clear()
    (sample,) = sample_with(engine, adapter.name)
    assert sample.token_ids == (5, 5, 5) and adapter.name in servers[0].adapters


def test_a_replica_that_was_away_gets_the_adapter_when_it_returns(
    servers: list[VllmStandIn], tmp_path: Path
) -> None:
    first, second = servers
    engine = make_engine(first.url, second.url)
    sync = make_sync(engine, tmp_path, lambda: -1.0)
    sync.publish(0)
    first.fault = lambda n, path, body: None
    adapter = sync.publish(1)
    assert adapter.name in second.adapters and adapter.name not in first.adapters
    first.fault = lambda n, path, body: "none"
    deadline = time.monotonic() + 5
    while adapter.name not in first.adapters and time.monotonic() < deadline:
        sample_with(engine, adapter.name, 8)
    assert adapter.name in first.adapters


def test_a_folder_that_the_server_does_not_see_is_named(
    servers: list[VllmStandIn], tmp_path: Path
) -> None:
    engine = make_engine(servers[0].url)
    sync = make_sync(engine, tmp_path, lambda: -1.0)
    missing = respond({"error": {"message": "No adapter found for <path>"}}, 404)
    servers[0].fault = lambda n, path, body: missing if "load_lora" in path else "none"
    with pytest.raises(RunError, match=rf"does not see {tmp_path}.*teacher.server.sync_folder"):
        sync.publish(0)
