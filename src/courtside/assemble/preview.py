"""What a run would train on, as tokens, before it: a prompt, the teacher's context, a hinted turn.

Only tokenizers are loaded. Where a text does not exist before the student has answered, a stand-in
takes its place, and says so.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from courtside.assemble.chat_templates import load_teacher_template
from courtside.assemble.inputs import Inputs, load_inputs
from courtside.assemble.recordings import Recordings
from courtside.chat.answer_boundary import PROBE_PROMPT, common_prefix_length
from courtside.chat.hint_splicing import SpliceError, splice_hint
from courtside.chat.incremental import IncrementalTemplate
from courtside.chat.privileged_context import insert_context_text, task_context
from courtside.chat.template import ChatTemplate
from courtside.environments.base import HostedEnvironment
from courtside.environments.guard import EnvironmentFault
from courtside.errors import TaskError
from courtside.reader.human import hinted_task_ids
from courtside.reader.loading import make_reader
from courtside.recipe import Recipe
from courtside.recipe.reader import CombinedReaderConfig, HumanReaderConfig, RuleReaderConfig
from courtside.recipe.takeover import TakeoverConfig
from courtside.recipe.teacher import SelfTeacherConfig
from courtside.tasks.base import FiniteSource
from courtside.types import Hint, Observation, Sample, Task, Trajectory

REPLIES = (
    "I am not sure.",
    '<tool_call>\n{"name": "no_such_tool", "arguments": {}}\n</tool_call>',
    "no_such_tool()",
)
"""Stand-ins for a student's turn; the first that the reader has a hint for is shown."""
STAND_IN = "…"
MAX_RENDERED = 64
"""Recorded trajectories among which one with a hint is looked for."""

Use = Literal["context", "added", "trains"]
"""Seen by student and teacher; seen by the teacher alone; trained."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PreviewToken:
    id: int
    text: str
    use: Use


@dataclass(frozen=True, slots=True, kw_only=True)
class PreviewSequence:
    title: str
    about: str
    tokens: tuple[PreviewToken, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Preview:
    model: str
    context_length: int
    sequences: tuple[PreviewSequence, ...]
    notes: tuple[str, ...]
    """What a user should know before the run starts."""


def make_preview(recipe: Recipe) -> Preview:
    inputs = load_inputs(recipe, trains=True)
    notes = [*inputs.notes]
    task = _first_task(recipe, inputs)
    sequences = [*_preview_prompt(recipe, inputs, task)]
    sequences += _preview_teachers(recipe, inputs, task)
    if recipe.takeover is not None and recipe.takeover.endpoint is not None:
        sequences.append(_preview_endpoint(recipe.takeover, inputs, task))
    if recipe.reader is not None:
        hinted = _preview_hint(recipe, inputs, task)
        sequences += [hinted] if isinstance(hinted, PreviewSequence) else []
        notes += [hinted] if isinstance(hinted, str) else []
    return Preview(
        model=recipe.student.model,
        context_length=inputs.settings.context_length,
        sequences=tuple(sequences),
        notes=tuple(notes),
    )


def _first_task(recipe: Recipe, inputs: Inputs) -> Task:
    """Of the first step; with hints of a person, the first that they are for."""
    if isinstance(inputs.tasks, FiniteSource) and recipe.human_readers:
        reader = make_reader(recipe.human_readers[0], seed=recipe.seed)
        named_ids = {id for human in recipe.human_readers for id in hinted_task_ids(human)}
        tasks = sorted(inputs.tasks.train_tasks, key=lambda task: task.id not in named_ids)
        for task in tasks[:MAX_RENDERED]:
            trajectory = _recorded(recipe, inputs, task)
            if trajectory is not None and reader([trajectory]).hints:
                return task
    return inputs.tasks.batch(0, 1)[0]


# ── the student's and the teacher's prompt ───────────────────────────────────────────────────────


def _preview_prompt(recipe: Recipe, inputs: Inputs, task: Task) -> Iterator[PreviewSequence]:
    template, where = inputs.template, f"task {task.id}"
    recorded = _recorded(recipe, inputs, task)
    if recorded is not None:
        trains = recipe.reader is None or any(x.on != "hinted_turns" for x in recipe.losses)
        mask = [trains and chosen for chosen in recorded.completion_mask]
        about = f"{where}, as it is recorded"
        yield _sequence("student: recorded turns", about, template, recorded.token_ids, trains=mask)
        return
    prompt = template.prompt_ids(task.messages)
    answers = (
        ("completion", task.completion, task.completion_thoughts),
        ("rejected", task.rejected, task.rejected_thoughts),
    )
    if recipe.trains_on_data:
        for name, text, thoughts in answers:
            if text is not None:
                ids = template.completion_ids(task.messages, text, thoughts)
                mask = [False] * len(prompt) + [True] * len(ids)
                about, title = f"{where}, with its {name}", f"student: prompt and {name}"
                yield _sequence(title, about, template, prompt + ids, trains=mask)
    if recipe.rollout.student_fraction_range[1] > 0:
        new = recipe.rollout.max_new_tokens
        about = f"{where}; up to {new} tokens are sampled after it, and those train"
        if recipe.tasks.is_environment:
            about = f"{where}; turns of up to {new} tokens are sampled after it"
        yield _sequence("student: prompt", about, template, prompt)


def _preview_endpoint(config: TakeoverConfig, inputs: Inputs, task: Task) -> PreviewSequence:
    """What a server is told that takes over, in the student's tokens: its own are not known."""
    assert config.endpoint is not None
    template, messages = inputs.template, task.messages
    if config.context is not None and (text := task_context(config.context, task)) is not None:
        messages = insert_context_text(config.context, task, text)
    ids, plain = template.prompt_ids(messages), template.prompt_ids(task.messages)
    about = (
        f"sent to {config.endpoint.base_url} as messages, here as the student's template renders "
        "them; what the student does not see is marked"
    )
    title = f"take-over by {config.endpoint.model}: prompt"
    return _sequence(title, about, template, ids, added=_added(template, plain, ids))


def _preview_teachers(recipe: Recipe, inputs: Inputs, task: Task) -> Iterator[PreviewSequence]:
    plain = inputs.template.prompt_ids(task.messages)
    for config in recipe.model_teachers:
        if config.context is None and config.chat_template_args is None:
            continue
        messages = task.messages
        about = "what the teacher sees and the student does not is marked"
        if config.context is not None:
            text = task_context(config.context, task)
            if text is None:
                assert config.context.kind != "system"
                text = config.context.template.replace("{text}", STAND_IN)
                about += f"; {STAND_IN} stands for the {config.context.kind}, known after an answer"
            messages = insert_context_text(config.context, task, text)
        template = load_teacher_template(config, recipe, inputs.template)
        ids = template.prompt_ids(messages)
        name = f"self:{config.weights}" if isinstance(config, SelfTeacherConfig) else config.model
        title = f"teacher {name}: prompt"
        yield _sequence(title, about, template, ids, added=_added(template, plain, ids))


def _added(template: ChatTemplate, plain: Sequence[int], longer: Sequence[int]) -> range:
    """Positions of `longer` that `plain` does not have, where it is `plain` with ids inserted."""
    start = common_prefix_length(plain, longer)
    num_suffix = common_prefix_length(plain[::-1], longer[::-1])
    end = len(longer) - min(num_suffix, min(len(plain), len(longer)) - start)
    if start >= end:
        return range(0)
    # Several places may give the same ids; a message begins with a special token.
    special = set(template.tokenizer.all_special_ids)
    for shift in range(start):
        if longer[start - shift] in special:
            return range(start - shift, end - shift)
        if longer[start - shift - 1] != longer[end - shift - 1]:
            break
    return range(start, end)


# ── a hinted turn ────────────────────────────────────────────────────────────────────────────────


def _preview_hint(recipe: Recipe, inputs: Inputs, task: Task) -> PreviewSequence | str:
    """The sequence, or a note on why there is none."""
    recorded = _recorded(recipe, inputs, task)
    candidates = (
        [recorded] if recorded is not None else [*_stand_in_trajectories(inputs, task, REPLIES)]
    )
    trajectory, hint, about = _find_hint(recipe, candidates)
    try:
        branch = splice_hint(
            trajectory,
            hint,
            inputs.incremental,
            place=recipe.hints.position,
            role=recipe.hints.role or "user",
            max_tokens=inputs.settings.context_length,
        )
    except SpliceError as error:
        return f"the hint cannot be inserted ({error.reason}): {error}"
    turns = trajectory.turns[: hint.turn + 1]
    plain = tuple(id for turn in turns for id in turn.token_ids)
    ids = trajectory.token_ids[: branch.splice] + branch.token_ids
    num_turn_tokens = len(turns[-1].token_ids)
    contexts = (sequence[: len(sequence) - num_turn_tokens] for sequence in (plain, ids))
    added = _added(inputs.template, *contexts)
    trains = (*[False] * branch.splice, *branch.scored)
    title = f"teacher: turn {hint.turn} with its hint"
    return _sequence(title, about, inputs.template, ids, trains=trains, added=added)


def _find_hint(recipe: Recipe, trajectories: Sequence[Trajectory]) -> tuple[Trajectory, Hint, str]:
    """A trajectory with a hint of the recipe's reader, or else with an example of one."""
    assert recipe.reader is not None
    stand_in = any(t.source != "dataset" and t.policy_version is None for t in trajectories)
    about = "the student's turn is a stand-in" if stand_in else "of a recorded turn"
    readers = (
        recipe.reader.readers
        if isinstance(recipe.reader, CombinedReaderConfig)
        else (recipe.reader,)
    )
    local = [r for r in readers if isinstance(r, HumanReaderConfig | RuleReaderConfig)]
    for config in local:  # the others call a model or a user's code
        reader = make_reader(config, seed=recipe.seed)
        for trajectory in trajectories:
            for hint in reader([trajectory]).hints:
                return trajectory, hint, f"{about}; hint of {hint.source}"
    rules = [rule for r in local if isinstance(r, RuleReaderConfig) for rule in r.rules]
    text = rules[0].template if rules else f"Reminder: {STAND_IN}"
    trajectory = trajectories[0]
    hint = Hint(trajectory=trajectory.id, turn=1, text=text, source="example")
    return trajectory, hint, f"{about}, and so is the hint: no rule or line applies to it"


def _recorded(recipe: Recipe, inputs: Inputs, task: Task) -> Trajectory | None:
    """None: the student samples."""
    if not recipe.tasks.is_recorded:
        return None
    context_length = inputs.settings.context_length
    return Recordings(recipe, inputs.tasks, inputs.incremental, context_length).load(task)


def _stand_in_trajectories(
    inputs: Inputs, task: Task, replies: Sequence[str]
) -> Iterator[Trajectory]:
    for reply in replies if inputs.environment is not None else replies[:1]:
        yield _stand_in_trajectory(inputs.environment, inputs.incremental, task, reply)


def _stand_in_trajectory(
    environment: HostedEnvironment | None, template: IncrementalTemplate, task: Task, reply: str
) -> Trajectory:
    """The prompt, one reply, and what the environment answers."""
    ids = template.renderer.completion_ids((PROBE_PROMPT,), reply)
    sample = Sample(token_ids=ids, logp=(), stop="eos", text=reply)
    observation = None if environment is None else _step(environment, task, reply)
    reported = () if observation is None else (observation.events, observation.decision)
    turns = [template.prompt_turn(task), template.assistant_turn(sample, *reported)]
    if observation is not None and observation.messages:
        answer = template.environment_turn(
            observation.messages, add_end_of_turn=False, prompt=task.messages
        )
        turns.append(answer)
    return Trajectory(
        id=task.id,
        task=task,
        turns=tuple(turns),
        source="student",
        policy_version=None,
        temperature=1.0,
        stop="turns",
    )


def _step(environment: HostedEnvironment, task: Task, reply: str) -> Observation:
    try:
        return environment.start(task).step(reply)
    except EnvironmentFault as fault:
        raise TaskError(
            f"{fault} (task {task.id}, reply {reply!r}). `courtside check-env` plays it without a "
            "model"
        ) from fault


def _sequence(
    title: str,
    about: str,
    template: ChatTemplate,
    ids: Sequence[int],
    *,
    trains: Sequence[bool] | None = None,
    added: Collection[int] = (),
) -> PreviewSequence:
    """`trains`: None: no token does. `added`: positions that only the teacher sees."""
    columns = zip(ids, template.pieces(ids), trains or [False] * len(ids), strict=True)
    tokens = []
    for position, (id, piece, on) in enumerate(columns):
        use: Use = "trains" if on else "added" if position in added else "context"
        tokens.append(PreviewToken(id=id, text=piece, use=use))
    return PreviewSequence(title=title, about=about, tokens=tuple(tokens))
