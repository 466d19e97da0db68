from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.tiny_model import tiny_tokenizer

from courtside.chat.messages import make_trajectory
from courtside.types import Grade, Message, Sample, Source, Task

TASK = Task(
    id="t",
    split="train",
    messages=(Message(role="system", content="Be kind."), Message(role="user", content="Hi")),
)
ids = st.lists(st.integers(0, 300), min_size=1, max_size=8).map(tuple)


@settings(deadline=None)
@given(prompt=ids, sampled=ids, source=st.sampled_from(["student", "teacher", "dataset"]))
def test_ids_pass_through_untouched(
    prompt: tuple[int, ...], sampled: tuple[int, ...], source: Source
) -> None:
    logp = tuple(-0.1 * i for i in range(len(sampled)))
    sample = Sample(token_ids=sampled, logp=logp, stop="eos", text="whatever a person reads")
    trajectory = make_trajectory(
        TASK, prompt, sample, id="x", source=source, policy_version=3, temperature=0.7,
        grade=Grade(score=1.0, passed=True, feedback=""),
    )  # fmt: skip
    assert trajectory.token_ids == prompt + sampled
    assert trajectory.completion_mask == (False,) * len(prompt) + (True,) * len(sampled)
    assert trajectory.completion_ids == sampled
    assert trajectory.sampler_logp == (None if source == "dataset" else logp)
    assert trajectory.response == "whatever a person reads"
    assert (trajectory.temperature, trajectory.stop, trajectory.policy_version) == (0.7, "eos", 3)


def test_tokens_that_no_tokenizer_would_choose_stay_as_they_were_written() -> None:
    """A model may write "\\n", "\\n" where the tokenizer has one token for both."""
    tokenizer = tiny_tokenizer(merges=(("Ċ", "Ċ"),))
    newline = tokenizer.convert_tokens_to_ids("Ċ")
    text = tokenizer.decode([newline, newline])
    assert tokenizer(text)["input_ids"] != [newline, newline]
    sample = Sample(token_ids=(newline, newline), logp=(-1.0, -2.0), stop="length", text=text)
    trajectory = make_trajectory(
        TASK, (5,), sample, id="x", source="student", policy_version=0, temperature=1.0, grade=None
    )
    assert trajectory.token_ids == (5, newline, newline)


def test_the_prompts_text_has_its_roles() -> None:
    sample = Sample(token_ids=(7,), logp=(0.0,), stop="eos", text="")
    trajectory = make_trajectory(
        TASK, (5,), sample, id="x", source="student", policy_version=0, temperature=1.0, grade=None
    )
    assert trajectory.turns[0].text == "system: Be kind.\n\nuser: Hi"


def test_a_log_prob_too_few_is_noticed() -> None:
    sample = Sample(token_ids=(7, 8), logp=(0.0,), stop="eos", text="")
    with pytest.raises(AssertionError):
        make_trajectory(
            TASK, (5,), sample, id="x", source="student", policy_version=0, temperature=1.0,
            grade=None,
        )  # fmt: skip
