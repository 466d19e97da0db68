"""Extending a sample by many tokens at a time equals appending them one by one."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from support.tiny_model import tiny_tokenizer

from courtside.engines.base import Sampling
from courtside.engines.generation.sampler import SampleBuffer

TOKENIZER = tiny_tokenizer()


@given(
    ids=st.lists(st.integers(1, 12), max_size=12),
    eos=st.frozensets(st.integers(1, 12), max_size=3),
    stop=st.lists(st.text("abc", min_size=1, max_size=2), max_size=1),
)
def test_extending_equals_appending_one_by_one(
    ids: list[int], eos: frozenset[int], stop: list[str]
) -> None:
    sampling = Sampling(max_new_tokens=12, stop=tuple(stop))
    at_once, one_by_one = (
        SampleBuffer(2, sampling, eos=eos, tokenizer=TOKENIZER) for _ in range(2)
    )
    logps = [-0.5 * i for i in range(len(ids))]
    at_once.extend(1, ids, logps)
    for token, logp in zip(ids, logps, strict=True):
        if not one_by_one.append([1], [token], [logp]):
            break
    assert at_once.samples() == one_by_one.samples()
