"""Rollouts of a small model in a fresh process: `python cold_start_cases.py CASE DEVICE`."""

from __future__ import annotations

import gc
import sys
import warnings
from typing import Any

import torch
from support.gpu_models import qwen3
from support.tiny_model import tiny_tokenizer

from courtside.engines.base import SampleRequest, Sampling
from courtside.engines.generation.cuda_graphs import CudaGraphs
from courtside.engines.generation.kv_cache import DecodeStep
from courtside.engines.local import LocalEngine
from courtside.types import Sample

PROMPTS = [(0, 5, 9), (0, 7, 7, 7, 30, 31), (0, 40), tuple(2 + i % 250 for i in range(70))]
REQUESTS = [SampleRequest(prompt_ids=PROMPTS[n % 4], seed=n) for n in range(12)]
CAPTURE_FAILED = "CUDA graph capture failed"
SAMPLINGS = [Sampling(max_new_tokens=24), Sampling(max_new_tokens=20, top_p=0.9)]


def make_engine(device: torch.device, *, graphs: bool = True) -> LocalEngine:
    engine = LocalEngine(
        qwen3().to(device), tiny_tokenizer(), name="small", autocast=torch.bfloat16
    )
    engine.uses_continuous_batching = True
    if not graphs:
        engine._kv_pool.graphs = None
    return engine


def assert_equal_samples(samples: list[Sample], expected: list[Sample]) -> None:
    assert [s.token_ids for s in samples] == [s.token_ids for s in expected]
    for sample, reference in zip(samples, expected, strict=True):
        torch.testing.assert_close(
            torch.tensor(sample.logp), torch.tensor(reference.logp), atol=1e-3, rtol=0
        )


def is_replayed(engine: LocalEngine, sampling: Sampling) -> bool:
    """Whether the decode step of this sampling has a graph."""
    steps = [
        step
        for cache in engine._kv_pool._caches.values()
        for (key, *_), step in cache.decode_steps.items()
        if key == sampling
    ]
    assert steps
    return all(step._graph._graph is not None for step in steps)


def watch_kernel_loading(device: torch.device) -> list[str]:
    """Names of the Triton kernels that are loaded during a capture from now on."""
    names: list[str] = []
    if device.type == "cuda":
        from triton.compiler.compiler import CompiledKernel

        load = CompiledKernel._init_handles

        def watched(self: Any) -> None:
            if self.module is None and torch.cuda.is_current_stream_capturing():
                names.append(self.name)
            load(self)

        CompiledKernel._init_handles = watched
    return names


def sample_with_an_empty_triton_cache(device: torch.device) -> None:
    """Captures come first, so that no eager rollout has loaded the kernels before."""
    loaded = watch_kernel_loading(device)
    engine = make_engine(device)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=CAPTURE_FAILED)
        # Twice: the graph of a prefill is captured when its shape occurs again.
        samples = [engine.sample(REQUESTS, sampling) for sampling in SAMPLINGS * 2]
    assert not loaded, f"loaded during a capture: {loaded}"
    eager = make_engine(device, graphs=False)
    for sampling, sampled in zip(SAMPLINGS * 2, samples, strict=True):
        assert_equal_samples(sampled, eager.sample(REQUESTS, sampling))
        assert is_replayed(engine, sampling) == (device.type == "cuda")


def collect_garbage_during_captures(device: torch.device) -> None:
    """Every forward pass of a capture leaves a dead graph behind and allocates until the garbage
    collector would run."""
    engine = make_engine(device)
    is_capturing = torch.cuda.is_current_stream_capturing if device.type == "cuda" else bool
    graphs = []
    for _ in range(16 if device.type == "cuda" else 0):
        graphs.append(torch.cuda.CUDAGraph())
        with torch.cuda.graph(graphs[-1]):
            torch.zeros(1, device=device)
    num_dropped = 0

    def drop_graph(module: Any, args: Any) -> None:
        nonlocal num_dropped
        if is_capturing():
            cycle: list[Any] = [graphs.pop()]
            cycle.append(cycle)
            del cycle
            [[] for _ in range(100_000)]
            num_dropped += 1

    engine.model.get_input_embeddings().register_forward_pre_hook(drop_graph)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=CAPTURE_FAILED)
        samples = [engine.sample(REQUESTS, SAMPLINGS[0]) for _ in range(2)]
    gc.collect()
    # Rounded alike: each rollout prefills as the other engine's of the same number.
    eager = make_engine(device, graphs=False)
    for sampled in samples:
        assert_equal_samples(sampled, eager.sample(REQUESTS, SAMPLINGS[0]))
    assert num_dropped >= 2 or device.type != "cuda", "prefill and decode graphs"


def fail_a_capture(device: torch.device) -> None:
    """A decode step that synchronizes cannot be captured: it falls back, and the next one works."""
    engine, eager = make_engine(device), make_engine(device, graphs=False)
    step = DecodeStep._step

    def synchronize(self: DecodeStep) -> None:
        step(self)
        self.count_B.sum().item()

    DecodeStep._step = synchronize  # type: ignore[method-assign]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        samples = engine.sample(REQUESTS, SAMPLINGS[0])
    DecodeStep._step = step  # type: ignore[method-assign]
    if device.type == "cuda":
        messages = [str(w.message) for w in caught if CAPTURE_FAILED in str(w.message)]
        assert len(messages) == 1, messages
        assert not is_replayed(engine, SAMPLINGS[0])
        assert not torch.cuda.is_current_stream_capturing()
        assert torch.cuda.current_stream() == torch.cuda.default_stream()
    assert_equal_samples(samples, eager.sample(REQUESTS, SAMPLINGS[0]))
    assert torch.rand(8, device=device).std() > 0, "the generator has left capture mode"
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=CAPTURE_FAILED)
        samples = engine.sample(REQUESTS, SAMPLINGS[1])
    assert_equal_samples(samples, eager.sample(REQUESTS, SAMPLINGS[1]))
    assert is_replayed(engine, SAMPLINGS[1]) == (device.type == "cuda")


def capture_when_all_memory_is_cached(device: torch.device) -> None:
    """The allocator cannot free what it caches while a step is captured."""
    if device.type != "cuda":
        return
    limit = 2**31
    torch.cuda.set_per_process_memory_fraction(limit / torch.cuda.mem_get_info()[1])
    torch.empty(int(0.95 * limit), dtype=torch.uint8, device=device)
    assert torch.cuda.memory_reserved() > 0.9 * limit
    total = torch.zeros((), device=device)

    def step() -> None:
        total.add_(torch.ones(limit // 32, device=device).sum())  # an eighth of the limit

    graph = CudaGraphs().capture(step)
    total.zero_()
    graph.replay()
    assert total.item() == limit // 32
    assert torch.cuda.memory_reserved() < 0.5 * limit, "what was cached has been freed"


CASES = {f.__name__: f for f in (sample_with_an_empty_triton_cache, collect_garbage_during_captures,
                                 fail_a_capture, capture_when_all_memory_is_cached)}  # fmt: skip

if __name__ == "__main__":
    CASES[sys.argv[1]](torch.device(sys.argv[2]))
