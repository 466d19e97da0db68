"""The steps that plans are held to, small: every case does the job."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest


@pytest.mark.parametrize("case", ["4b-lean", "8b-lora"])
def test_a_case_trains_what_it_says(
    case: str, import_benchmark: Callable[[str], ModuleType]
) -> None:
    benchmark: Any = import_benchmark("plan_steps")
    record = benchmark.measure(Namespace(case=case, tiny=True))
    job = benchmark.TINY
    assert record["num_trained_tokens"] == job.prompts * job.samples * job.new_tokens
    assert record["overrides"] == list(benchmark.CASES[case].overrides)
    # Two layers of 32: an adapter of rank 32 has more weights than they have.
    width, inner, heads = 32, 64, 4 * 16
    sizes = [(width, heads), (width, heads // 2), (width, heads // 2), (heads, width)]
    sizes += [(width, inner), (width, inner), (inner, width)]
    num_adapter = 2 * sum(32 * (i + o) for i, o in sizes)
    assert (record["num_trainable"] == num_adapter) == ("lora" in case)
    assert all(record["phases"][phase] > 0 for phase in ("rollout", "teacher", "update"))
