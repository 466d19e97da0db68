"""Growing a conversation turn by turn, and what templates do to one."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from unit.chat.templates import (
    ALTERNATING,
    FAMILIES,
    HEADERS,
    MERGES,
    NO_TOOLS,
    OPENS_THINKING,
    SYSTEM_FIRST,
    make_template,
    template_of_family,
    tokenizer_for,
)

from courtside.chat.incremental import IncrementalTemplate
from courtside.chat.messages import NONCHARACTERS, unused_noncharacters
from courtside.chat.template import ChatTemplate
from courtside.errors import ModelError, TaskError
from courtside.types import Event, Message, Role, Sample, Task

TEMPLATE = template_of_family("chatml")
TOKENIZER = TEMPLATE.renderer.tokenizer
START, END = TOKENIZER.convert_tokens_to_ids(["<|im_start|>", "<|im_end|>"])
SYSTEM = Message(role="system", content="Be kind.")
HI = Message(role="user", content="Hi")
RESULT = Message(role="tool", content="42.")

families = pytest.mark.parametrize("family", FAMILIES)
nexts = st.lists(
    st.builds(
        Message,
        role=st.sampled_from(["tool", "user", "system"]),
        content=st.sampled_from(["", "ok", "é.", "A.\n", "{}", "<|im_end|>", "\ufdd0<|eot|>"]),
    ),
    min_size=1,
    max_size=3,
)


def says(text: str) -> Message:
    return Message(role="assistant", content=text)


def stock(
    template: IncrementalTemplate, messages: list[Message], *, begin: bool
) -> tuple[int, ...]:
    """The template's text by the tokenizer's own call."""
    plain = [{"role": m.role, "content": m.content} for m in messages]
    tokenizer = template.renderer.tokenizer
    text = tokenizer.apply_chat_template(plain, add_generation_prompt=begin, tokenize=False)
    return tuple(tokenizer(text, add_special_tokens=False)["input_ids"])


# ── ids ──────────────────────────────────────────────────────────────────────────────────────────


def test_between_two_answers() -> None:
    between = TEMPLATE.render_continuation([RESULT, HI])
    assert TOKENIZER.decode(between.token_ids) == (
        "\n<|im_start|>tool\n42.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    opening = between.token_ids[-between.num_generation_prompt_tokens :]
    assert TOKENIZER.decode(opening) == "<|im_start|>assistant\n"


@pytest.mark.parametrize(
    ("family", "merges"),
    # The one pair left out has a test of its own below: the same text in other tokens.
    [(f, m) for f in FAMILIES for m in MERGES if (f, m) != ("headers", "breaks")],
)
def test_a_conversation_that_grew_is_what_the_template_makes_of_it(
    family: str, merges: str
) -> None:
    template = template_of_family(family, merges)
    answers = ["It is.", "Call f", "Done!"]
    whole = [SYSTEM, HI, says(answers[0]), RESULT, says(answers[1]), RESULT, HI, says(answers[2])]
    stretches = [
        template.render_prompt([SYSTEM, HI]),
        template.render_continuation([RESULT]),
        template.render_continuation([RESULT, HI]),
    ]
    grown: tuple[int, ...] = ()
    for stretch, answer in zip(stretches, answers, strict=True):
        answer_ids = template.renderer.tokenizer(answer, add_special_tokens=False)["input_ids"]
        grown += stretch.token_ids + tuple(answer_ids) + template.end_of_turn_ids()
    assert grown == stock(template, whole, begin=False)[: len(grown)]


@settings(deadline=None, max_examples=60)
@given(
    family=st.sampled_from(sorted(FAMILIES)),
    merges=st.sampled_from(sorted(MERGES)),
    special_ids=nexts,
)
def test_no_text_can_close_or_open_a_message(
    family: str, merges: str, special_ids: list[Message]
) -> None:
    template = template_of_family(family, merges)
    special = set(template.renderer.tokenizer.all_special_ids)

    def marks(messages: list[Message]) -> list[int]:
        return [i for i in template.render_continuation(messages).token_ids if i in special]

    assert marks(special_ids) == marks([Message(role=m.role, content="plain") for m in special_ids])


@families
def test_the_opening_is_what_the_template_adds_for_an_answer(family: str) -> None:
    template = template_of_family(family)
    for stretch, before in [
        (template.render_prompt([SYSTEM, HI]), stock(template, [SYSTEM, HI], begin=False)),
        (template.render_continuation([RESULT]), None),
    ]:
        opening = template.renderer.tokenizer.decode(
            stretch.token_ids[-stretch.num_generation_prompt_tokens :]
        )
        assert opening == {
            "headers": "<|header|>assistant<|/header|>\n\n",
            "no_breaks": "<|im_start|>assistant:",
            "words": "\nassistant:\n",
        }.get(family, "<|im_start|>assistant\n")
        if before is not None:
            assert stretch.token_ids[: -stretch.num_generation_prompt_tokens] == before


def test_a_token_across_the_edge_counts_to_the_opening() -> None:
    template = template_of_family("words", "greedy")
    between = template.render_continuation([HI])
    opening = template.renderer.pieces(between.token_ids[-between.num_generation_prompt_tokens :])
    assert opening[0] == "\n\n", "the message's own line break is in that token"


def test_the_cost_of_a_turn_does_not_depend_on_how_many_went_before() -> None:
    """Nothing of the conversation is even passed; a long one takes as long as its texts."""
    template = template_of_family("thinking", "breaks")
    template.render_continuation([RESULT])
    begin = time.perf_counter()
    for n in range(200):
        template.render_continuation([replace(RESULT, content=f"{RESULT.content} {n}")])
    assert time.perf_counter() - begin < 2.0


def test_what_was_rendered_once_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    template = template_of_family("chatml")
    ask, other = (Message(role="user", content=text) for text in ("So?", "Not so?"))
    first = [
        template.render_prompt([ask]),
        template.render_continuation([ask]),
        template.render_prompt([other]),
    ]
    assert len({stretch.token_ids for stretch in first}) == 3
    monkeypatch.setattr(template.renderer, "render", None)
    assert [
        template.render_prompt((ask,)),
        template.render_continuation((ask,)),
        template.render_prompt([other]),
    ] == first


# ── records ──────────────────────────────────────────────────────────────────────────────────────


def test_turns_carry_their_messages_and_opening() -> None:
    task = Task(id="t", split="train", messages=(SYSTEM, HI))
    prompt = TEMPLATE.prompt_turn(task)
    assert prompt.role == "prompt" and prompt.messages == task.messages
    assert prompt.token_ids == TEMPLATE.renderer.prompt_ids(task.messages)
    assert prompt.text == "system: Be kind.\n\nuser: Hi"
    sample = Sample(token_ids=(70, END), logp=(-1.0, -0.5), stop="eos", text="x")
    event = Event(kind="tool_not_found")
    answer = TEMPLATE.assistant_turn(sample, [event])
    assert (answer.token_ids, answer.sampler_logp) == ((70, END), (-1.0, -0.5))
    assert answer.completion_mask == (True, True) and answer.events == (event,)
    environment = TEMPLATE.environment_turn([RESULT], add_end_of_turn=False)
    assert environment.role == "environment" and environment.messages == (RESULT,)
    assert environment.token_ids == TEMPLATE.render_continuation([RESULT]).token_ids
    assert (
        environment.num_generation_prompt_tokens
        == prompt.num_generation_prompt_tokens
        == len("s" + "assistant" + "\n")
    )
    assert not any(prompt.completion_mask + environment.completion_mask)
    assert environment.text == "tool: 42."


def test_an_answer_that_ran_into_its_limit_is_closed_by_the_environment() -> None:
    assert (
        TEMPLATE.is_ended((70, END)) and not TEMPLATE.is_ended((70,)) and not TEMPLATE.is_ended(())
    )
    closed = TEMPLATE.environment_turn([RESULT], add_end_of_turn=True)
    assert closed.token_ids == (END, *TEMPLATE.render_continuation([RESULT]).token_ids)
    assert not any(closed.completion_mask)


def test_the_end_token_is_the_templates_not_just_any_of_the_models() -> None:
    tokenizer = tokenizer_for(HEADERS)
    start, end = tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|eot|>"])
    template = IncrementalTemplate(ChatTemplate(tokenizer, name="tiny", eos_ids=[start, end]))
    assert template.end_of_turn_ids() == (end,)


def test_what_a_template_puts_before_the_end_token_closes_too() -> None:
    spaced = make_template(FAMILIES["chatml"].replace("<|im_end|>", "\n<|im_end|>"))
    assert spaced.renderer.tokenizer.decode(spaced.end_of_turn_ids()) == "\n<|im_end|>"
    assert spaced.note is None


# ── what templates do ────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("family", sorted(set(FAMILIES) - {"thinking"}))
def test_no_note_where_conversations_only_grow(family: str) -> None:
    assert template_of_family(family).note is None


def test_a_note_where_earlier_thinking_is_left_out() -> None:
    note = template_of_family("thinking").note
    assert note is not None
    assert "three answers with thoughts" in note
    assert r"after 'sistant\n' it has ['I', 't', ' ', 'i'], not ['<', 't', 'h', 'i']" in note


def test_no_note_where_the_opening_begins_to_think_and_history_keeps_it() -> None:
    """No student answers without closing the block; with thoughts, the template keeps them."""
    assert make_template(OPENS_THINKING).note is None


def test_a_note_where_the_same_text_is_other_tokens() -> None:
    """GPT-2's pattern gives the last of two line breaks to the word behind them."""
    note = template_of_family("headers", "breaks").note
    assert note is not None and r"it has ['\n', '\n', 'I', 't'], not ['\n\n', 'I'" in note


@pytest.mark.parametrize(
    ("source", "role", "says"),
    [
        (ALTERNATING, "tool", "refuses messages with roles .*alternate.*Say it as 'user'"),
        (ALTERNATING, "system", "no 'system' message may follow an 'assistant' one"),
        (
            NO_TOOLS,
            "tool",
            "does not render a 'tool' message that follows an 'assistant' one",
        ),
        (SYSTEM_FIRST, "system", "moves a 'system' message that follows an 'assistant' one"),
    ],
)
def test_a_role_that_has_no_place_is_named_with_a_fix(source: str, role: Role, says: str) -> None:
    template = make_template(source)
    template.render_continuation([HI])
    with pytest.raises(ModelError, match=says):
        template.render_continuation([Message(role=role, content="42.")])


def test_two_messages_of_one_role_where_roles_alternate() -> None:
    with pytest.raises(ModelError, match=r"no 'user' message may follow a 'user'.*Join the"):
        make_template(ALTERNATING).render_continuation([HI, HI])


def test_an_answer_that_only_ends_with_the_conversation() -> None:
    """The end token of the message behind it must not be taken for its own."""
    source = FAMILIES["chatml"].replace(
        "'<|im_end|>\n'",
        "('' if m['role'] == 'assistant' and not loop.last else '<|im_end|>') + '\n'",
    )
    template = make_template(source)
    with pytest.raises(ModelError, match="holds no end token"):
        template.render_continuation([HI])
    with pytest.raises(ModelError, match="holds no end token"):
        _ = template.end_of_turn_ids()


def test_a_template_that_changes_messages_for_the_generation_prompt() -> None:
    source = FAMILIES["chatml"].replace(
        "m['content'] +",
        "m['content'] + ('!' if add_generation_prompt and loop.index > 1 else '')+",
    )
    with pytest.raises(ModelError, match="changes messages where it adds a generation prompt"):
        make_template(source).render_prompt([SYSTEM, HI])


def test_a_template_that_says_things_twice() -> None:
    source = FAMILIES["chatml"].replace("m['content']", "m['content'] * (messages | length - 1)")
    source = source.replace("(messages | length - 1)", "[1, messages | length - 1] | max")
    with pytest.raises(ModelError, match="does not render an earlier message exactly once"):
        make_template(source).render_continuation([HI])


def test_marks_are_never_taken_from_the_texts() -> None:
    held = Message(role="tool", content="", extra=f'["{NONCHARACTERS[0]}"]', tools=NONCHARACTERS[1])
    assert unused_noncharacters([Message(role="user", content=NONCHARACTERS[2]), held], 2) == list(
        NONCHARACTERS[3:5]
    )
    with pytest.raises(TaskError, match="32 of Unicode's noncharacters"):
        unused_noncharacters([Message(role="user", content="".join(NONCHARACTERS))])
