"""Episodes of many turns, as many at a time as the KV cache holds.

Each episode has a row of the engine's session, whose KV cache persists over turns, so a turn costs
its own tokens. A finished episode's row goes to the next request (continuous batching). An
environment that raises, hangs or returns too much text affects its own episode, never the run.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from courtside.chat.incremental import PROBE_PROMPT, IncrementalTemplate
from courtside.engines.base import Engine, SampleRequest, Sampling, Session
from courtside.environments.base import Episode
from courtside.recipe import RolloutConfig
from courtside.rollout.episode_state import EpisodeRequest, EpisodeState
from courtside.rollout.mixing import choose_student_tasks, make_sampling, trajectory_id
from courtside.rollout.timeouts import call_all_with_timeout
from courtside.seeds import seed_for
from courtside.types import Observation, Sample, Task, Trajectory

EXPECTED_OBSERVATION = 96
"""Tokens of an environment's answer, for sizing the KV cache; an estimate, not a limit."""
EXPECTED_TURNS = 16


class EpisodeRollout:
    def __init__(
        self,
        *,
        engine: Engine,
        template: IncrementalTemplate,
        config: RolloutConfig,
        start: Callable[[Task], Episode],
        demonstrate: Callable[[Task, str], Trajectory] | None,
        context_length: int,
        seed: int,
    ):
        self.engine = engine
        self.template = template
        self.config = config
        self.limits = config.limits
        self.start = start
        self.demonstrate = demonstrate
        """(task, trajectory id) → the environment's demonstration, for off-policy tasks."""
        self.max_tokens = min(self.limits.tokens or context_length, context_length)
        self.seed = seed
        self.sampling = make_sampling(config)

    def __call__(self, tasks: Sequence[Task], step: int) -> list[Trajectory]:
        student_tasks = choose_student_tasks(self.config, tasks, seed=self.seed, step=step)
        requests = [
            EpisodeRequest(
                id=trajectory_id(step, index, sample),
                task=tasks[index],
                seed=seed_for(self.seed, "student", step, index, sample),
                start=self.start,
            )
            for index in sorted(student_tasks)
            for sample in range(self.config.samples_per_prompt)
        ]
        trajectories = self.run_episodes(requests, self.sampling, policy_version=step)
        if self.config.corrections:
            trajectories += [c for t in trajectories for c in self._make_corrections(t)]
        for index, task in enumerate(tasks):
            if index not in student_tasks:
                assert self.demonstrate is not None, "checked when the run was assembled"
                trajectories.append(self.demonstrate(task, trajectory_id(step, index, 0)))
        return sorted(trajectories, key=lambda trajectory: trajectory.id)

    def run_episodes(
        self, requests: Sequence[EpisodeRequest], sampling: Sampling, *, policy_version: int
    ) -> list[Trajectory]:
        """A trajectory for each request, in their order."""
        if not requests:
            return []
        row_capacity = self._row_capacity(requests, sampling)
        num_rows = min(len(requests), max(1, self.engine.max_batch_tokens // row_capacity))
        session = self.engine.session(num_rows, row_capacity=row_capacity)
        waiting, free_rows = deque(enumerate(requests)), deque(range(num_rows))
        running: dict[int, EpisodeState] = {}
        """By row of the session."""
        finished: dict[int, Trajectory] = {}
        while waiting or running:
            while waiting and free_rows:
                session.restart(row := free_rows.popleft())
                running[row] = EpisodeState.start(*waiting.popleft(), self.template)
            for row, state in list(running.items()):
                state.check_limits(
                    self.limits,
                    max_new_tokens=sampling.max_new_tokens,
                    max_tokens=self.max_tokens,
                )
                if state.stop is not None:
                    finished[state.index] = state.finish(
                        temperature=sampling.temperature, policy_version=policy_version
                    )
                    free_rows.append(row)
                    del running[row]
            if running and not (waiting and free_rows):
                self._run_turn(session, running, sampling)
        return [finished[index] for index in range(len(requests))]

    def _run_turn(
        self, session: Session, running: Mapping[int, EpisodeState], sampling: Sampling
    ) -> None:
        """One sample per row, and the environments' answers."""
        states = list(running.values())
        requests = [
            SampleRequest(
                prompt_ids=state.pending_ids,
                seed=seed_for(state.request.seed, "turn", state.num_assistant_turns),
            )
            for state in states
        ]
        samples = session.sample(list(running), requests, sampling)
        results = call_all_with_timeout(
            [_step(state.episode, sample) for state, sample in zip(states, samples, strict=True)],
            seconds=self.limits.step_seconds,
        )
        for state, sample, result in zip(states, samples, results, strict=True):
            state.add_turn(sample, result, self.template, self.limits)

    def _make_corrections(self, trajectory: Trajectory) -> Iterator[Trajectory]:
        """For each turn with an event that names the correct reply: a trajectory to imitate, with
        that reply in place of the turn."""
        for index, turn in enumerate(trajectory.turns):
            texts = [e.details["correct"] for e in turn.events if "correct" in e.details]
            if not texts:
                continue
            context = tuple(
                replace(t, completion_mask=(False,) * len(t.token_ids), sampler_logp=None)
                for t in trajectory.turns[:index]
            )
            ids = self.template.renderer.completion_ids((PROBE_PROMPT,), texts[0])
            reply = Sample(token_ids=ids, logp=(), stop="dataset", text=texts[0])
            yield replace(
                trajectory,
                id=f"{trajectory.id}+{index:03d}",
                turns=(*context, self.template.assistant_turn(reply)),
                source="dataset",
                policy_version=None,
                stop="dataset",
                grade=None,
            )

    def _row_capacity(self, requests: Sequence[EpisodeRequest], sampling: Sampling) -> int:
        """Expected tokens of the longest episode, within the context length."""
        longest_prompt = max(
            len(self.template.render_prompt(request.task.messages).token_ids)
            for request in requests
        )
        turns = self.limits.turns or EXPECTED_TURNS
        expected = longest_prompt + turns * (sampling.max_new_tokens + EXPECTED_OBSERVATION)
        return min(expected, self.max_tokens)


def _step(episode: Episode, sample: Sample) -> Callable[[], Observation]:
    return lambda: episode.step(sample.text)


def reply_passes(
    start: Callable[[Task], Episode],
    trajectory: Trajectory,
    turn: int,
    reply: str,
    *,
    seconds: float,
) -> bool:
    """Whether `reply`, in place of that turn, causes no event. The episode is replayed up to that
    turn: it follows from its task and the student's replies."""
    earlier_replies = [t.text for t in trajectory.turns[:turn] if t.role == "assistant"]

    def replay() -> Observation:
        episode = start(trajectory.task)
        for text in earlier_replies:
            episode.step(text)
        return episode.step(reply)

    (result,) = call_all_with_timeout([replay], seconds=seconds * (len(earlier_replies) + 1))
    return result.value is not None and not result.value.events
