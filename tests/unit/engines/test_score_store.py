"""Scores on disk: what is found again, and what counts as not there."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path

import pytest
import torch
from support.score_store import (
    CPU,
    REQUEST,
    assert_equal,
    make_scores,
    make_store,
    write_and_read,
)
from support.tiny_model import tiny_model, tiny_tokenizer
from support.vllm_stand_in import VllmStandIn

from courtside.engines.base import BranchRequest, ScoreRequest, score_branches
from courtside.engines.local import LocalEngine
from courtside.engines.score_store import ScoreStore
from courtside.engines.served.engine import ServedEngine
from courtside.engines.served.pool import ReplicaPool
from courtside.engines.served.probe import probe_servers
from courtside.engines.stored_scores import StoredScoresEngine
from courtside.errors import RecipeError, RunError
from courtside.recipe.server import ServerConfig
from courtside.types import Branch


def test_scores_come_back_bit_for_bit_with_any_smaller_k(tmp_path: Path) -> None:
    store, scores = make_store(tmp_path), make_scores()
    assert store.read(REQUEST, top_k=3, device=CPU) is None
    store.write(REQUEST, scores)
    other_run = make_store(tmp_path)
    for k in (3, 1):
        assert_equal(other_run.read(REQUEST, top_k=k, device=CPU), scores, k=k)
    plain = other_run.read(REQUEST, top_k=0, device=CPU)
    assert plain is not None and plain.top_ids_TK is None and plain.logp_T.equal(scores.logp_T)
    assert other_run.read(REQUEST, top_k=4, device=CPU) is None, "more than is there"


@pytest.mark.parametrize(
    "other",
    [
        replace(REQUEST, token_ids=(3, 4, 5, 7)),
        replace(REQUEST, token_ids=(9, 4, 5, 6)),
        replace(REQUEST, scored=(False, True, True, True)),
        replace(REQUEST, temperature=0.7),
    ],
    ids=["token", "context", "scored tokens", "temperature"],
)
def test_whatever_differs_is_another_score(other: ScoreRequest, tmp_path: Path) -> None:
    store = make_store(tmp_path)
    store.write(REQUEST, make_scores())
    assert store.read(other, top_k=3, device=CPU) is None
    assert make_store(tmp_path, teacher="bigger").read(REQUEST, top_k=3, device=CPU) is None


def test_torn_and_foreign_files_count_as_not_there(tmp_path: Path) -> None:
    store, scores = make_store(tmp_path), make_scores()
    store.write(REQUEST, scores)
    (file,) = tmp_path.glob("??/*")
    whole = file.read_bytes()
    for content in (b"", whole[:10], whole[:-1], whole[:40] + b"\0" + whole[41:], os.urandom(99)):
        file.write_bytes(content)
        assert store.read(REQUEST, top_k=3, device=CPU) is None
    store.write(REQUEST, scores)
    assert_equal(store.read(REQUEST, top_k=3, device=CPU), scores, k=3)


def test_the_oldest_go_first_and_the_size_is_bounded(tmp_path: Path) -> None:
    size = len(next(iter(_write_scores(make_store(tmp_path / "one"), 1))).read_bytes())
    store = make_store(tmp_path / "many", max_bytes=10 * size)
    requests = [replace(REQUEST, token_ids=(3, 4, 5, i)) for i in range(12)]
    start = time.time() - 1000
    for i, request in enumerate(requests[:10]):
        store.write(request, make_scores(i))
        os.utime(store._locate(request), (start + i, start + i))
    assert store.read(requests[0], top_k=3, device=CPU) is not None, "used: no longer the oldest"
    store.write(requests[10], make_scores(10))
    present = [store.read(r, top_k=3, device=CPU) is not None for r in requests[:11]]
    assert present == [True, False, False, *[True] * 8]
    assert sum(f.stat().st_size for f in (tmp_path / "many").glob("??/*")) <= 10 * size
    abandoned = tmp_path / "many" / "aa"
    abandoned.mkdir(exist_ok=True)
    (abandoned / ".x.part").write_bytes(b"half")
    os.utime(abandoned / ".x.part", (start - 9000, start - 9000))
    make_store(tmp_path / "many")
    assert not (abandoned / ".x.part").exists()


def _write_scores(store: ScoreStore, num: int) -> list[Path]:
    for i in range(num):
        store.write(replace(REQUEST, token_ids=(3, 4, 5, i)), make_scores(i))
    return [*store.folder.glob("??/*")]


def test_several_processes_write_read_and_remove_at_once(tmp_path: Path) -> None:
    context = get_context("spawn")
    workers = [context.Process(target=write_and_read, args=(tmp_path, seed)) for seed in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert [worker.exitcode for worker in workers] == [0, 0, 0]
    assert not [*tmp_path.glob("??/.*")], "no unfinished file"
    assert sum(f.stat().st_size for f in tmp_path.glob("??/*")) <= 6000 + 3 * 400


def test_other_weights_under_the_same_name_are_refused(tmp_path: Path) -> None:
    make_store(tmp_path).check_teacher([-1.0, -2.0], max_difference=0.05)
    make_store(tmp_path).check_teacher([-1.04, -2.04], max_difference=0.05)
    for logps in ([-1.1, -2.1], [float("nan"), -2.0], [-1.0]):
        with pytest.raises(RecipeError, match=r"teacher.store.folder = .*another model of this"):
            make_store(tmp_path).check_teacher(logps, max_difference=0.05)
    make_store(tmp_path, teacher="else").check_teacher([-9.0], max_difference=0.05)


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match=r"teacher.store.folder = .*file.*cannot be written"):
        make_store(tmp_path / "file" / "folder")


# ── behind an engine ─────────────────────────────────────────────────────────────────────────────


class CountingEngine(LocalEngine):
    num_scored = 0

    def score(self, requests, **options):
        self.num_scored += len(requests)
        return super().score(requests, **options)

    def score_branches(self, requests, **options):
        self.num_scored += sum(1 + len(r.branches) for r in requests)
        return super().score_branches(requests, **options)


@pytest.fixture
def engine() -> CountingEngine:
    return CountingEngine(tiny_model(), tiny_tokenizer(), name="tiny")


def test_only_what_is_missing_is_asked(engine: CountingEngine, tmp_path: Path) -> None:
    stored = StoredScoresEngine(engine, make_store(tmp_path), device=CPU)
    requests = [replace(REQUEST, token_ids=(3, 4, i, 6)) for i in (5, 6, 5, 7)]
    expected = engine.score(requests, want="top_k", top_k=4)
    engine.num_scored = 0
    for num_asked in (3, 0):
        scores = stored.score(requests, want="top_k", top_k=4)
        assert engine.num_scored == num_asked
        for score, plain in zip(scores, expected, strict=True):
            assert score.top_ids_TK is not None and plain.top_ids_TK is not None
            assert score.top_ids_TK.equal(plain.top_ids_TK)
            torch.testing.assert_close(score.logp_T, plain.logp_T, atol=1e-5, rtol=0)
            torch.testing.assert_close(score.top_logp_TK, plain.top_logp_TK, atol=1e-5, rtol=0)
        engine.num_scored = 0
    stored.score([*requests, replace(REQUEST, token_ids=(8, 4, 5, 6))], want="top_k", top_k=2)
    assert engine.num_scored == 1


def test_hints_of_a_trajectory_are_scored_in_one_pass_and_read_one_by_one(
    engine: CountingEngine, tmp_path: Path
) -> None:
    stored = StoredScoresEngine(engine, make_store(tmp_path), device=CPU)
    branches = tuple(
        Branch(trajectory="t", turn=1, splice=2, token_ids=(hint, 5, 6), scored=(False, True, True))
        for hint in (20, 30)
    )
    request = BranchRequest(
        token_ids=(3, 4, 5, 6), branches=branches, scored=(False, False, True, True)
    )
    (first,) = score_branches(stored, [request], want="top_k", top_k=3)
    num_first, engine.num_scored = engine.num_scored, 0
    (second,) = score_branches(stored, [request], want="top_k", top_k=3)
    assert (num_first, engine.num_scored) == (3, 0)
    (plain,) = score_branches(engine, [request], want="top_k", top_k=3)
    assert first.trunk and second.trunk and plain.trunk
    for read_scores, fresh in zip(
        (second.trunk, *second.branches), (plain.trunk, *plain.branches), strict=True
    ):
        torch.testing.assert_close(read_scores.logp_T, fresh.logp_T, atol=1e-5, rtol=0)
        torch.testing.assert_close(read_scores.top_logp_TK, fresh.top_logp_TK, atol=1e-5, rtol=0)
    other = replace(request, branches=branches[:1])
    engine.num_scored = 0
    stored.score_branches([other], want="top_k", top_k=3)
    assert engine.num_scored == 0, "each branch is a score of its own"


def test_a_served_teacher_is_asked_once(tmp_path: Path) -> None:
    server = VllmStandIn()
    pool = ReplicaPool(ServerConfig(urls=(server.url,), model="tiny"), field="teacher.server")
    served = ServedEngine(
        pool, probe_servers(pool, probe_ids=(3, 4)), name="tiny", tokenizer=tiny_tokenizer(),
        eos_ids=frozenset({1}), vocab_size=258, context_length=512,
    )  # fmt: skip
    stored = StoredScoresEngine(served, make_store(tmp_path), device=CPU)
    assert stored.capabilities.top_k == served.capabilities.top_k == 20
    before = server.num_samples()
    for _ in range(2):
        (scores,) = stored.score([REQUEST])
        assert scores.logp_T.tolist() == [-1.0, -1.0] and server.num_samples() == before + 1
    pool.close()
    server.close()
