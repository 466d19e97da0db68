"""Questions that fail are counted, and stop a run only when they are many."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from sampled_drafts import draft

from courtside.chat.model_client import Reply
from courtside.chat.reply_failures import Failure, FailureMonitor
from courtside.drafts.prompts import parse_whole
from courtside.drafts.queries import Answer, Interview, Query, TeacherClient
from courtside.engines.base import PromptSize, Sampling
from courtside.errors import DraftFailuresError
from courtside.progress import ProgressMeter
from courtside.types import Message, Sample, Task, TokenUsage

QUERIES = [Query(draft=draft(2, n), prompt=Message(role="user", content=f"{n}?")) for n in range(4)]


def interview(answer: Callable[[int], Answer | Failure], fraction: float = 0.5) -> Interview[str]:
    def client(queries: Sequence[Query], *, max_failures: int) -> list[Answer | Failure]:
        return [answer(n) for n in range(len(queries))]

    return Interview(
        client=client,
        parse=parse_whole,
        monitor=FailureMonitor(name="drafts[0] (rewrite)", max_fraction=fraction),
    )


def reply(text: str, **fields: Any) -> Answer:
    return Answer(reply=Reply(text=text, input_tokens=9, output_tokens=2, **fields), model="m")


FAILED = Failure(kind="no_answer", details="ConnectError")


def test_what_cannot_be_used_is_counted() -> None:
    answers = [reply("good"), reply(" "), reply("cut", is_truncated=True), FAILED]
    result = interview(lambda n: answers[n], 1.0)(QUERIES)
    assert result.answers == {QUERIES[0].draft.id: "good"}
    assert dict(result.counts) == {
        "requests": 4, "dropped/unparsed": 1, "dropped/truncated": 1, "dropped/no_answer": 1,
    }  # fmt: skip
    assert result.usage == {"m": TokenUsage(27, 6)}, "garbage was paid for, too"


def test_too_many_failures_stop_the_run() -> None:
    ask = interview(lambda n: FAILED if n < 2 else reply("good"))
    for _ in range(20):  # half of them is not more than half
        ask(QUERIES)
    with pytest.raises(DraftFailuresError, match=r"(?s)drafts\[0\] \(rewrite\): 3 of the last 4.*"
                       r"no_answer 3.*ConnectError.*same folder"):  # fmt: skip
        interview(lambda n: FAILED if n < 3 else reply("good"))(QUERIES)


def test_few_failures_do_not_stop_it_unless_all_fail() -> None:
    interview(lambda n: FAILED if n < 2 else reply("good"), 0.1)(QUERIES)
    with pytest.raises(DraftFailuresError, match="1 of the last 1 questions"):
        interview(lambda n: FAILED)(QUERIES[:1])
    interview(lambda n: FAILED, 1.0)(QUERIES)
    assert interview(lambda n: FAILED)([]).answers == {}


def test_a_client_may_give_up_when_the_run_will_stop_in_any_case() -> None:
    limits: list[int] = []

    def client(queries: Sequence[Query], *, max_failures: int) -> list[Answer | Failure]:
        limits.append(max_failures)
        return [reply("good")] * len(queries)

    for fraction in (0.0, 0.5, 0.75, 1.0):
        monitor = FailureMonitor(name="d", max_fraction=fraction)
        Interview(client=client, parse=parse_whole, monitor=monitor)(QUERIES)
    assert limits == [2, 2, 3, 4]


def test_failures_add_up_over_steps() -> None:
    ask = interview(lambda n: FAILED if n == 0 else reply("good"), 0.2)
    with pytest.raises(DraftFailuresError):
        for _ in range(3):
            ask(QUERIES)


class Writer:
    def __init__(self) -> None:
        self.seeds: list[int] = []
        self.tasks: list[Task] = []

    def measure_prompt(self, task: Task) -> PromptSize:
        return PromptSize(
            model="big", num_tokens=90 if "1?" in task.messages[0].content else 5,
            context_length=100,
        )  # fmt: skip

    def write(
        self, tasks: Sequence[Task], sampling: Sampling, seeds: Sequence[int]
    ) -> list[Sample]:
        self.tasks += tasks
        self.seeds += seeds
        return [Sample(token_ids=(1, 2), logp=(), stop="length", text="x") for _ in tasks]


def test_the_teacher_is_asked_what_fits_it() -> None:
    writer = Writer()
    ask = TeacherClient(
        teacher=writer, sampling=Sampling(max_new_tokens=20), purpose="rewrite", seed=3,
        progress=ProgressMeter(),
    )  # fmt: skip
    results = ask(QUERIES, max_failures=0)
    assert [isinstance(r, Failure) for r in results] == [False, True, False, False]
    assert isinstance(results[1], Failure) and "90 tokens" in results[1].details
    first = results[0]
    assert isinstance(first, Answer) and first.reply.is_truncated and first.model == "big"
    assert (first.reply.input_tokens, first.reply.output_tokens) == (5, 2)
    assert len({*writer.seeds}) == 3, "a seed of its own for each draft"
    assert writer.tasks[0].id == QUERIES[0].draft.task.id, "with the task's tags and fields"
    alone = Writer()
    TeacherClient(
        teacher=alone, sampling=Sampling(max_new_tokens=20), purpose="rewrite", seed=3,
        progress=ProgressMeter(),
    )(QUERIES[3:], max_failures=0)  # fmt: skip
    assert alone.seeds == writer.seeds[2:], "whatever else is in the batch"
