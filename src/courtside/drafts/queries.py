"""Questions about drafts to a model: the recipe's teacher, or a server.

Whatever goes wrong with one question (no answer, a prompt that does not fit, a reply that cannot be
parsed) is a counted drop. Only a large share of failures stops the run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from courtside.chat.model_client import Reply
from courtside.chat.reply_failures import Failure, FailureMonitor, quote_reply
from courtside.drafts.base import add_usage
from courtside.engines.base import PromptSize, Sampling
from courtside.progress import PhaseProgress, ProgressMeter
from courtside.seeds import seed_for
from courtside.types import Message, Sample, Task, TokenUsage, Trajectory

if TYPE_CHECKING:
    from courtside.chat.openai_client import OpenAIClient

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Query:
    draft: Trajectory
    prompt: Message


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    reply: Reply
    model: str


class Client(Protocol):
    def __call__(self, queries: Sequence[Query], *, max_failures: int) -> list[Answer | Failure]:
        """For each query, in their order; with more failures than that it may give up."""


class Writer(Protocol):
    """A teacher that samples; see `teacher.teacher.Teacher`."""

    def write(
        self, tasks: Sequence[Task], sampling: Sampling, seeds: Sequence[int]
    ) -> list[Sample]: ...

    def measure_prompt(self, task: Task) -> PromptSize: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class TeacherClient:
    """The recipe's teacher, with the context that it has of the task before any answer."""

    teacher: Writer
    sampling: Sampling
    purpose: str
    """Part of the seeds: the kind of the draft stage."""
    seed: int
    progress: ProgressMeter

    def __call__(self, queries: Sequence[Query], *, max_failures: int) -> list[Answer | Failure]:
        tasks = [replace(query.draft.task, messages=(query.prompt,)) for query in queries]
        sizes = [self.teacher.measure_prompt(task) for task in tasks]
        new = self.sampling.max_new_tokens
        fitting = [i for i, s in enumerate(sizes) if s.num_tokens + new <= s.context_length]
        self.progress.phase = PhaseProgress(total=len(fitting), unit="answers", max_tokens=new)
        samples = self.teacher.write(
            [tasks[i] for i in fitting],
            self.sampling,
            [seed_for(self.seed, self.purpose, queries[i].draft.id) for i in fitting],
        )
        replies = {
            i: Reply(
                text=sample.text,
                input_tokens=sizes[i].num_tokens,
                output_tokens=len(sample.token_ids),
                is_truncated=sample.stop == "length",
            )
            for i, sample in zip(fitting, samples, strict=True)
        }
        return [
            Answer(reply=replies[i], model=size.model)
            if i in replies
            else Failure(kind="too_long", details=_describe_size(size, new))
            for i, size in enumerate(sizes)
        ]


def _describe_size(size: PromptSize, new: int) -> str:
    return (
        f"the prompt has {size.num_tokens} tokens and the reply may have {new}, and {size.model} "
        f"takes {size.context_length}; lower max_new_tokens"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointClient:
    client: OpenAIClient
    progress: ProgressMeter

    def __call__(self, queries: Sequence[Query], *, max_failures: int) -> list[Answer | Failure]:
        prompts = [(query.prompt,) for query in queries]
        phase = self.progress.phase = PhaseProgress(total=len(prompts), unit="answers")

        def count_done() -> None:
            phase.finished += 1

        replies, errors = self.client.try_each(
            prompts, max_failures=max_failures, count_done=count_done
        )
        details = str(errors[0]) if errors else ""
        model = self.client.endpoint.model
        return [
            Failure(kind="no_answer", details=details)
            if reply is None
            else Answer(reply=reply, model=model)
            for reply in replies
        ]


# ── questions of a stage ─────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True, kw_only=True)
class Parsed(Generic[T]):
    answers: Mapping[str, T]
    """By the draft's id; those without a valid answer are counted."""
    counts: Counter[str]
    usage: Mapping[str, TokenUsage]


@dataclass(kw_only=True)
class Interview(Generic[T]):
    """Asks, parses, counts, and stops the run where too many questions fail."""

    client: Client
    parse: Callable[[str], T | None]
    monitor: FailureMonitor

    def __call__(self, queries: Sequence[Query]) -> Parsed[T]:
        counts = Counter({"requests": len(queries)})
        usage: dict[str, TokenUsage] = {}
        answers: dict[str, T] = {}
        failures: list[Failure | None] = []
        if not queries:
            return Parsed(answers={}, counts=counts, usage={})
        results = self.client(queries, max_failures=self.monitor.max_failures(len(queries)))
        for query, result in zip(queries, results, strict=True):
            failure = result if isinstance(result, Failure) else None
            if isinstance(result, Answer):
                reply = result.reply
                tokens = TokenUsage(reply.input_tokens, reply.output_tokens)
                usage = add_usage(usage, {result.model: tokens})
                value = None if reply.is_truncated else self.parse(reply.text)
                if value is None:
                    kind = "truncated" if reply.is_truncated else "unparsed"
                    failure = Failure(kind=kind, details=quote_reply(reply))
                else:
                    answers[query.draft.id] = value
            if failure is not None:
                counts[f"dropped/{failure.kind}"] += 1
            failures.append(failure)
        self.monitor.check(failures)
        return Parsed(answers=answers, counts=counts, usage=usage)
