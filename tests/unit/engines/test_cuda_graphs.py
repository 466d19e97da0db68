"""When steps are captured, replayed and run eagerly, with a stand-in for CUDA's graphs."""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.sampling_cases import REQUESTS, assert_equal_samples, make_engine

from courtside.engines.base import Sampling
from courtside.engines.generation.cuda_graphs import WARMUP_STEPS, CudaGraphs, StepGraph

Step = Callable[[], None]


class FakeGraphs:
    """Runs a step as often as a real capture does; a replay calls it."""

    def __init__(self, make_error: Callable[[], BaseException] | None = None):
        self.make_error, self.num_captures, self.num_replays = make_error, 0, 0

    def capture(self, step: Step) -> Any:
        self.num_captures += 1
        for _ in range(WARMUP_STEPS):
            step()
        if self.make_error is not None:
            raise self.make_error()

        def replay() -> None:
            self.num_replays += 1
            step()

        return SimpleNamespace(replay=replay)


# ── a step ───────────────────────────────────────────────────────────────────────────────────────


def counting_step() -> tuple[torch.Tensor, Step]:
    count = torch.zeros(1)
    return count, lambda: count.add_(1) and None


def test_a_step_is_captured_once_and_warm_up_leaves_its_state_alone() -> None:
    graphs: Any = FakeGraphs()
    count, step = counting_step()
    graph = StepGraph(graphs)
    for n in range(1, 4):
        graph.run(step, [count])
        assert int(count) == n
    assert (graphs.num_captures, graphs.num_replays) == (1, 3)


def test_without_graphs_a_step_runs_eagerly() -> None:
    count, step = counting_step()
    StepGraph(None).run(step, [count])
    assert int(count) == 1


def test_a_failed_capture_falls_back_to_the_eager_step_with_one_warning() -> None:
    graphs: Any = FakeGraphs(lambda: RuntimeError("operation not permitted when capturing"))
    count, step = counting_step()
    graph = StepGraph(graphs)
    with pytest.warns(UserWarning, match="runs eagerly: operation not permitted") as warnings:
        for n in range(1, 4):
            graph.run(step, [count])
            assert int(count) == n
    assert len(warnings) == 1 and graphs.num_captures == 1


def test_the_warning_names_the_cause_and_not_the_failed_end_of_the_capture() -> None:
    error = RuntimeError("the previous error invalidated the capture")
    error.__context__ = RuntimeError("a kernel was loaded")
    graphs: Any = FakeGraphs(lambda: error)
    with pytest.warns(UserWarning, match="a kernel was loaded"):
        StepGraph(graphs).run(lambda: None)


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("full"), KeyboardInterrupt()])
def test_out_of_memory_and_interrupts_are_raised_and_the_next_run_captures_again(
    error: BaseException,
) -> None:
    graphs: Any = FakeGraphs(lambda: error)
    count, step = counting_step()
    graph = StepGraph(graphs)
    with pytest.raises(type(error)):
        graph.run(step, [count])
    assert int(count) == 0, "the state is restored"
    graphs.make_error = None
    graph.run(step, [count])
    assert int(count) == 1 and graphs.num_replays == 1


def test_an_error_of_the_step_itself_is_raised() -> None:
    def broken() -> None:
        raise ValueError("a broken step")

    graphs: Any = FakeGraphs()
    with pytest.raises(ValueError, match="a broken step"):
        StepGraph(graphs).run(broken)


@pytest.mark.parametrize("fails", [False, True])
def test_replayed_and_fallen_back_rollouts_sample_what_the_eager_loop_samples(fails: bool) -> None:
    sampling = Sampling(max_new_tokens=20)
    engine = make_engine(continuous=True)
    graphs: Any = FakeGraphs((lambda: RuntimeError("no graph for this")) if fails else None)
    engine._kv_pool.graphs = graphs
    expected = make_engine(continuous=False).sample(REQUESTS, sampling)
    with pytest.warns(UserWarning, match="no graph for this") if fails else nullcontext():
        assert_equal_samples(engine.sample(REQUESTS, sampling), expected)
    assert_equal_samples(engine.sample(REQUESTS, sampling), expected)
    assert graphs.num_captures == 2, "one for prefill, one for decoding"
    assert (graphs.num_replays == 0) == fails
    graphs.make_error = None  # the next step is captured again
    assert_equal_samples(
        engine.sample(REQUESTS, Sampling(max_new_tokens=19)),
        make_engine(continuous=False).sample(REQUESTS, Sampling(max_new_tokens=19)),
    )
    assert graphs.num_captures == 3 and graphs.num_replays > 0


# ── a capture ────────────────────────────────────────────────────────────────────────────────────


class FakeCuda:
    """torch.cuda as far as a capture uses it; like CUDA it fails to end an invalid capture, and to
    begin one in a pool whose graphs are all gone."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.stream, self.is_capturing, self.is_invalid = "default", False, False
        self.recording: list[Any] = []
        self.released: list[Any] = []
        self.num_pools = self.num_ended = self.num_emptied = 0
        self.num_graphs: Counter[Any] = Counter()
        """Of each pool that has had one."""
        for name, value in {
            "Stream": lambda: "capture",
            "synchronize": lambda: None,
            "empty_cache": self.empty_cache,
            "current_device": lambda: 0,
            "stream": self.enter_stream,
            "CUDAGraph": lambda: FakeGraph(self),
            "graph_pool_handle": self.new_pool,
        }.items():
            monkeypatch.setattr(torch.cuda, name, value)
        monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", self.end, raising=False)
        monkeypatch.setattr(
            torch._C, "_cuda_releasePool", lambda _, pool: self.released.append(pool), raising=False
        )
        zeros = torch.zeros
        monkeypatch.setattr(torch, "zeros", lambda *shape, device: zeros(*shape))

    def new_pool(self) -> tuple[int, int]:
        self.num_pools += 1
        return (0, self.num_pools)

    def empty_cache(self) -> None:
        assert not self.is_capturing
        self.num_emptied += 1

    @contextmanager
    def enter_stream(self, stream: Any) -> Iterator[None]:
        previous, self.stream = self.stream, stream
        try:
            yield
        finally:
            self.stream = previous

    def leave_pool(self, pool: Any) -> None:
        self.num_graphs[pool] -= 1

    def end(self, device: int, pool: Any) -> None:
        if pool not in self.recording:
            raise RuntimeError("not currently recording to mempool_id")
        self.recording.remove(pool)


class FakeGraph:
    def __init__(self, cuda: FakeCuda):
        self.cuda = cuda

    def replay(self) -> None: ...

    def capture_begin(self, pool: Any, *, capture_error_mode: str) -> None:
        cuda = self.cuda
        pool = pool or cuda.new_pool()
        assert cuda.stream == "capture" and capture_error_mode == "thread_local"
        assert pool not in cuda.recording, "already recording to mempool_id"
        assert not gc.isenabled(), "a collection would invalidate the capture"
        if cuda.num_graphs.get(pool) == 0:
            raise RuntimeError("use_count > 0 INTERNAL ASSERT FAILED")
        cuda.num_graphs[pool] += 1
        weakref.finalize(self, cuda.leave_pool, pool)
        self.pool = pool
        cuda.recording.append(pool)
        cuda.is_capturing, cuda.is_invalid = True, False

    def capture_end(self) -> None:
        cuda = self.cuda
        cuda.is_capturing = False
        if cuda.is_invalid:
            raise RuntimeError("capture invalidated")  # the pool stays as it is
        cuda.recording.remove(self.pool)
        cuda.num_ended += 1


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    return FakeCuda(monkeypatch)


def test_a_step_runs_eagerly_before_its_capture_and_no_garbage_is_collected_in_it(
    cuda: FakeCuda,
) -> None:
    runs: list[tuple[bool, bool]] = []
    CudaGraphs().capture(lambda: runs.append((cuda.is_capturing, gc.isenabled())))
    assert runs == [(False, True)] * WARMUP_STEPS + [(True, False)]
    assert gc.isenabled() and cuda.stream == "default"


@pytest.mark.parametrize("raises", [True, False])
def test_an_invalidated_capture_is_cleaned_up_and_the_next_one_works(
    cuda: FakeCuda, raises: bool
) -> None:
    def invalidate() -> None:
        if cuda.is_capturing:
            cuda.is_invalid = True
            if raises:
                raise RuntimeError("operation not permitted when stream is capturing")

    graphs = CudaGraphs()
    with pytest.raises(RuntimeError, match="capture invalidated") as failure:
        graphs.capture(invalidate)
    assert raises == ("not permitted" in str(failure.value.__context__))
    assert not cuda.recording and cuda.released == [(0, 1)], "the pool is left and released"
    assert cuda.stream == "default" and gc.isenabled()
    assert cuda.num_ended == 1, "a capture that ends resets the generator"
    graphs.capture(lambda: None)
    assert cuda.num_ended == 2


def test_a_step_that_raises_in_a_valid_capture_releases_no_pool_twice(cuda: FakeCuda) -> None:
    def interrupt() -> None:
        if cuda.is_capturing:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        CudaGraphs().capture(interrupt)
    assert not cuda.recording and not cuda.released and gc.isenabled()


@pytest.mark.parametrize("num_failures", [0, 1, 2])
def test_only_a_capture_that_finds_no_memory_empties_the_cache(
    cuda: FakeCuda, num_failures: int
) -> None:
    """What is cached is what the update allocates next."""
    failures = ["out of memory"] * num_failures

    def allocate() -> None:
        if cuda.is_capturing and failures:
            raise torch.OutOfMemoryError(failures.pop())

    with pytest.raises(torch.OutOfMemoryError) if num_failures == 2 else nullcontext():
        CudaGraphs().capture(allocate)
    assert cuda.num_emptied == min(num_failures, 1)
    assert not cuda.recording and cuda.stream == "default" and gc.isenabled()


def test_graphs_share_a_pool_as_long_as_one_of_them_is_there(cuda: FakeCuda) -> None:
    """Its memory is given up with the last one: a capture into it would fail."""
    graphs = CudaGraphs()
    first = graphs.capture(lambda: None)
    second = graphs.capture(lambda: None)
    del first
    third = graphs.capture(lambda: None)
    assert cuda.num_pools == 1 and cuda.num_graphs[(0, 1)] == 2
    del second, third
    graphs.capture(lambda: None)
    assert cuda.num_pools == 2


def test_the_last_graph_of_a_pool_may_be_garbage_until_just_before_a_capture(
    cuda: FakeCuda,
) -> None:
    graphs = CudaGraphs()
    cycle: list[Any] = [graphs.capture(lambda: None)]
    cycle.append(cycle)
    del cycle
    graphs.capture(gc.collect)
    assert cuda.num_pools == 2
