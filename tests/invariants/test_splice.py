"""Random episodes, templates, tokenizers and hints: a branch is the trunk with the hint put in.

Whatever happens, no id that the student saw or wrote changes; and where the template renders the
trunk itself that way, the branch is what it renders with the hint in place.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from unit.chat.templates import FAMILIES, MERGES, template_of_family

from courtside.chat.hint_splicing import (
    SEPARATORS,
    HintPlacement,
    SpliceError,
    splice_hint,
    splice_hints_cumulatively,
)
from courtside.chat.incremental import IncrementalTemplate
from courtside.chat.messages import insert_context
from courtside.chat.template import ChatTemplate
from courtside.types import Branch, Hint, Message, Sample, Task, Trajectory

FRAGMENTS = [
    "ok",
    "It is.",
    "Hi",
    "tools\n",
    "{}",
    " ",
    "é",
    "𝄞",
    "\n\n",
    "s",
    "<|im_end|>",
    "\ufdd0",
]
FRAMES = ["<|im_start|>user\n", "<|eot|>", "</tool_response>", "\nassistant:\n", "e\u0301", "<|im_"]

contents = st.lists(st.sampled_from(FRAGMENTS + FRAMES), max_size=4).map("".join)
messages = st.builds(Message, role=st.sampled_from(["tool", "user", "system"]), content=contents)
hints = st.lists(st.sampled_from(FRAGMENTS + FRAMES), min_size=1, max_size=5).map("".join)
Answer = tuple[str, bool, bool]
answers = st.tuples(
    st.lists(st.sampled_from([*FRAGMENTS, "<think>\nHm\n</think>\n\n"]), max_size=3).map("".join),
    st.booleans(),  # letter by letter, or as the tokenizer would
    st.sampled_from([True, True, True, False]),  # with its end token, or cut off
)
rounds = st.lists(st.tuples(answers, st.lists(messages, min_size=1, max_size=2)), max_size=5)
prompts = st.tuples(
    st.lists(st.builds(Message, role=st.just("system"), content=contents), max_size=1),
    st.builds(Message, role=st.just("user"), content=contents),
).map(lambda parts: (*parts[0], parts[1]))


def make_sample(template: IncrementalTemplate, answer: Answer) -> Sample:
    text, by_letter, ended = answer
    renderer = template.renderer
    ids = [
        token
        for piece in (text if by_letter else [text])
        # Special words letter by letter: a student that wrote them as one token ended its turn.
        for word in ([piece] if "<|" not in piece else piece)
        for token in renderer.tokenizer(word, add_special_tokens=False)["input_ids"]
    ]
    ids += [min(renderer.eos_ids)] if ended else []
    stop: Any = "eos" if ended else "length"
    return Sample(token_ids=tuple(ids), logp=(-1.0,) * len(ids), stop=stop, text=text)


def played(
    template: IncrementalTemplate,
    prompt: tuple[Message, ...],
    talk: list[tuple[Answer, list[Message]]],
    last: Answer,
) -> tuple[Trajectory, list[list[Message]]]:
    """A trajectory, and for each of its turns the messages that it is made of."""
    task = Task(id="t", split="train", messages=prompt)
    built, turn_messages = [template.prompt_turn(task)], [list(prompt)]
    for answer, following in [*talk, (last, [])]:
        turn = template.assistant_turn(make_sample(template, answer))
        built.append(turn)
        turn_messages.append([Message(role="assistant", content=answer[0])])
        if following:
            closing = not template.is_ended(turn.token_ids)
            built.append(template.environment_turn(following, add_end_of_turn=closing))
            turn_messages.append(following)
    trajectory = Trajectory(
        id="e",
        task=task,
        turns=tuple(built),
        source="student",
        policy_version=0,
        temperature=1.0,
        stop="done",
    )
    return trajectory, turn_messages


def put_in(before: tuple[int, ...], after: tuple[int, ...]) -> bool:
    """Whether some stretch of `after` can be taken out so that `before` is left."""
    extra = len(after) - len(before)
    return extra > 0 and any(
        before == after[:at] + after[at + extra :] for at in range(len(before) + 1)
    )


def text_of(renderer: ChatTemplate, conversation: list[Message]) -> str:
    """By the template alone, up to and with the last answer's end token."""
    plain = [{"role": m.role, "content": m.content} for m in conversation]
    text = renderer.tokenizer.apply_chat_template(plain, tokenize=False)
    end = renderer.tokenizer.decode([min(renderer.eos_ids)])
    return str(text[: text.rindex(end) + len(end)])


def with_hint(
    turn_messages: list[list[Message]], hint: Hint, place: HintPlacement, role: Any
) -> list[list[Message]]:
    """Each conversation that a hint may make of what was said, up to and with its turn."""
    above, target = turn_messages[: hint.turn], turn_messages[hint.turn]
    before = [m for part in above for m in part]
    if place == "before_turn":
        return [[*before, Message(role=role, content=hint.text), *target]]
    if place == "system":
        later = before[len(turn_messages[0]) :]
        return [[*insert_context(turn_messages[0], hint.text, "system"), *later, *target]]
    last = before[-1]
    return [
        [*before[:-1], Message(role=last.role, content=last.content + sep + hint.text), *target]
        for sep in SEPARATORS
    ]


def check(
    template: IncrementalTemplate,
    trajectory: Trajectory,
    turn_messages: list[list[Message]],
    hint: Hint,
    twig: Branch,
    *,
    place: HintPlacement,
    role: Any,
) -> bool:
    """The invariants; whether the branch could also be compared with the template's own render."""
    target = trajectory.turns[hint.turn]
    num_target = len(target.token_ids)
    trunk = tuple(i for turn in trajectory.turns[: hint.turn + 1] for i in turn.token_ids)
    sequence = trajectory.token_ids[: twig.splice] + twig.token_ids
    assert sequence[len(sequence) - num_target :] == target.token_ids
    assert twig.scored[len(twig.scored) - num_target :] == target.completion_mask
    assert sum(twig.scored) == sum(target.completion_mask)
    if place == "system":
        later = trunk[len(trajectory.turns[0].token_ids) :]
        assert twig.splice == 0 and sequence[len(sequence) - len(later) :] == later
    else:
        assert put_in(trunk, sequence)
        begin = len(trunk) - num_target - len(trajectory.turns[hint.turn - 1].token_ids)
        assert begin <= twig.splice <= len(trunk) - num_target
        above = trajectory.turns[hint.turn - 1]
        assert twig.splice <= len(trunk) - num_target - above.num_generation_prompt_tokens
    # Only the template writes special tokens: the hint brings those of its own message, or none.
    special = set(template.renderer.tokenizer.all_special_ids)
    opened = sum(i in special for i in sequence) - sum(i in special for i in trunk)
    assert opened <= 4 if place == "before_turn" else opened <= (4 if place == "system" else 0)
    # The template's own render, where it renders the trunk as it was read and written.
    tokenizer = template.renderer.tokenizer
    plain = [m for part in turn_messages[: hint.turn + 1] for m in part]
    end = () if template.is_ended(target.token_ids) else (min(template.renderer.eos_ids),)
    if tokenizer.decode(trunk + end) != text_of(template.renderer, plain):
        return False
    thought = any("</think>" in m.content for m in plain[:-1])
    if (
        template.note
        and "thoughts" in template.note
        and thought
        and (place, role) == ("before_turn", "user")
    ):
        return False  # a question more: the template forgets the thinking above it, a branch not
    texts = [text_of(template.renderer, c) for c in with_hint(turn_messages, hint, place, role)]
    assert tokenizer.decode(sequence + end) in texts
    natural = [tuple(tokenizer(t, add_special_tokens=False)["input_ids"]) for t in texts]
    whole = tuple(
        tokenizer(text_of(template.renderer, plain), add_special_tokens=False)["input_ids"]
    )
    if whole == trunk + end and not any(f"<|{w}" in hint.text for w in ("im", "eot")):
        assert sequence + end in natural
    return True


def fuzz(
    num: int, choose: st.SearchStrategy[IncrementalTemplate], body: Callable[..., str], **extra: Any
) -> Counter[str]:
    outcomes: Counter[str] = Counter()

    @settings(max_examples=num, deadline=None, suppress_health_check=list(HealthCheck))
    @given(template=choose, prompt=prompts, talk=rounds, last=answers, data=st.data())
    def run(
        template: IncrementalTemplate, prompt: Any, talk: Any, last: Any, data: st.DataObject
    ) -> None:
        trajectory, turn_messages = played(template, prompt, talk, last)
        outcomes[body(template, trajectory, turn_messages, data)] += 1

    run()
    return outcomes


def hint_for(trajectory: Trajectory, data: st.DataObject) -> Hint:
    assistant_turns = [i for i, turn in enumerate(trajectory.turns) if turn.role == "assistant"]
    turn = data.draw(st.sampled_from(assistant_turns))
    return Hint(trajectory="e", turn=turn, text=data.draw(hints), source="human")


def one_branch(place: HintPlacement) -> Callable[..., str]:
    def body(
        template: IncrementalTemplate,
        trajectory: Trajectory,
        turn_messages: Any,
        data: st.DataObject,
    ) -> str:
        hint = hint_for(trajectory, data)
        role: Any = data.draw(st.sampled_from(["user", "system", "tool"]))
        try:
            twig = splice_hint(trajectory, hint, template, place=place, role=role, max_tokens=60)
        except SpliceError as error:
            return error.reason
        same = check(template, trajectory, turn_messages, hint, twig, place=place, role=role)
        return "compared" if same else "spliced"

    return body


every = st.builds(
    template_of_family, st.sampled_from(sorted(FAMILIES)), st.sampled_from(sorted(MERGES))
)


@pytest.mark.parametrize("place", ["before_turn", "last_message", "system"])
def test_a_branch_is_the_trunk_with_the_hint_spliced_in(place: HintPlacement) -> None:
    outcomes = fuzz(160, every, one_branch(place))
    total = outcomes.total()
    assert set(outcomes) <= {"compared", "spliced", "merge", "too_long", "empty"}
    assert outcomes["compared"] > total / 4, outcomes
    assert outcomes["compared"] + outcomes["spliced"] > total * 0.7, outcomes


def test_all_hints_at_once_are_the_trunk_with_each_spliced_in() -> None:
    def body(
        template: IncrementalTemplate,
        trajectory: Trajectory,
        turn_messages: Any,
        data: st.DataObject,
    ) -> str:
        assistant_turns = [i for i, turn in enumerate(trajectory.turns) if turn.role == "assistant"]
        chosen = data.draw(st.lists(st.sampled_from(assistant_turns), unique=True))
        several = [
            Hint(trajectory="e", turn=turn, text=data.draw(hints), source="human")
            for turn in chosen
        ]
        role: Any = data.draw(st.sampled_from(["user", "system", "tool"]))
        options: Any = {"role": role, "max_tokens": 60}
        try:
            whole = splice_hints_cumulatively(trajectory, several, template, **options)
        except SpliceError as error:
            with pytest.raises(SpliceError) as caught:
                splice_hint(trajectory, error.hint, template, place="before_turn", **options)
            assert caught.value.reason == error.reason
            return error.reason
        # Each hint adds what it adds on its own, where it adds it on its own.
        expected, shift = list(trajectory.token_ids), 0
        for hint in sorted(several, key=lambda h: h.turn):
            twig = splice_hint(trajectory, hint, template, place="before_turn", **options)
            target = trajectory.turns[hint.turn]
            end = sum(len(turn.token_ids) for turn in trajectory.turns[: hint.turn + 1])
            expected[twig.splice + shift : end + shift] = twig.token_ids
            shift += twig.splice + len(twig.token_ids) - end
            (positions,) = [p for turn, p in whole.scored if turn == hint.turn]
            assert tuple(whole.token_ids[p] for p in positions) == target.token_ids
        assert whole.token_ids == tuple(expected)
        return "spliced"

    outcomes = fuzz(80, every, body)
    assert outcomes["spliced"] > outcomes.total() * 0.5, outcomes


@pytest.fixture(scope="module")
def embedded() -> IncrementalTemplate:
    from courtside.engines.loading import load_tokenizer

    tokenizer = load_tokenizer("smollm2-135m")
    return IncrementalTemplate(
        ChatTemplate(tokenizer, name="smollm2-135m", eos_ids=[tokenizer.eos_token_id])
    )


@pytest.mark.parametrize("place", ["before_turn", "last_message", "system"])
def test_the_embedded_model(embedded: IncrementalTemplate, place: HintPlacement) -> None:
    assert embedded.note is None
    outcomes = fuzz(50, st.just(embedded), one_branch(place))
    assert outcomes["compared"] > outcomes.total() * 0.5, outcomes
