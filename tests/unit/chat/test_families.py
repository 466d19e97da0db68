"""The chat templates of 47 families: prompts, turns, hints, tools and thoughts, each against what
the template renders by itself."""

from __future__ import annotations

import json
from typing import Any

import pytest
from support.chat_templates import FAMILIES, family_source, family_template
from support.template_survey import (
    PAGE,
    find_hint_problem,
    find_result_keys,
    generation_prompt,
    page_with_table,
    play,
    tool_message,
)

from courtside.chat.answer_boundary import common_prefix_length
from courtside.chat.chat_log_rendering import trajectory_from_chat_log
from courtside.chat.hint_splicing import HintRole, splice_hint
from courtside.chat.incremental import IncrementalTemplate
from courtside.errors import ModelError, TaskError
from courtside.types import Hint, Message, Task

families = pytest.mark.parametrize("name", FAMILIES)
CUT = "\ufdd0"
ASK, FOLLOW_UP = (Message(role="user", content=text) for text in ("Is it?", "Was it?"))
SYSTEM = Message(role="system", content="Be kind.")
CALL: dict[str, Any] = {
    "id": "abcdefghi",
    "type": "function",
    "function": {"name": "add", "arguments": {"a": 1}},
}


def says(text: str, *calls: Any) -> Message:
    extra = json.dumps({"tool_calls": list(calls)}) if calls else ""
    return Message(role="assistant", content=text, extra=extra)


def stock(template: IncrementalTemplate, *messages: Message, prompt: bool, **args: Any) -> str:
    """The template's text by the tokenizer's own call."""
    trees = [
        {"role": m.role, "content": m.content, **(json.loads(m.extra) if m.extra else {})}
        for m in messages
    ]
    text = template.renderer.tokenizer.apply_chat_template(
        trees, add_generation_prompt=prompt, tokenize=False, **args
    )
    return str(text)


def decode(template: IncrementalTemplate, ids: Any) -> str:
    return str(template.renderer.tokenizer.decode(ids))


# ── prompts and answers ──────────────────────────────────────────────────────────────────────────


@families
def test_a_prompt_is_what_the_template_makes_of_it(name: str) -> None:
    template = family_template(name)
    prompt = [SYSTEM, ASK] if template.renderer.takes_system else [ASK]
    ids = template.renderer.prompt_ids(prompt)
    assert decode(template, ids) == stock(template, *prompt, prompt=True)
    span = template.render_prompt(prompt)
    assert span.token_ids == ids
    text = decode(template, ids[: len(ids) - span.num_generation_prompt_tokens])
    bare = stock(template, *prompt, prompt=False)
    assert bare in (text, text + template.renderer.tokenizer.eos_token)


@families
def test_an_answer_is_what_the_template_makes_of_it_and_ends(name: str) -> None:
    """Thoughts first, where the generation prompt has opened them."""
    template = family_template(name)
    renderer = template.renderer
    opened, closed = FAMILIES[name].thinking or ("", "")
    is_opened = bool(opened) and generation_prompt(template).rstrip().endswith(opened.strip())
    text = f"{opened}Hm.{closed}It is." if is_opened else "It is."
    answer = renderer.completion_ids([ASK], text)
    assert answer[-1] in renderer.eos_ids and not renderer.eos_ids & set(answer[:-1])
    sampled = decode(template, renderer.prompt_ids([ASK]) + answer)
    whole = stock(template, ASK, says(text), prompt=False)
    if name == "deepseek-r1":  # no answer of which keeps its thoughts
        end = renderer.tokenizer.eos_token
        assert sampled.endswith(f"<｜Assistant｜><think>\nHm.\n</think>\n\nIt is.{end}")
    elif name in ("glm4", "glm4.5"):
        assert sampled == f"{whole}<|user|>"
    elif name == "gemma4":  # the empty thoughts are in the generation prompt alone
        assert sampled.endswith("<|turn>model\n<|channel>thought\n<channel|>It is.<turn|>")
    else:
        assert whole.startswith(sampled)


# ── turn by turn ─────────────────────────────────────────────────────────────────────────────────


@families
def test_turn_by_turn_is_the_whole_conversation_or_the_note_says_so(name: str) -> None:
    template = family_template(name)
    renderer = template.renderer
    head = [SYSTEM, ASK] if renderer.takes_system else [ASK]
    third = Message(role="user", content="Will it?")
    opened, closed = FAMILIES[name].thinking or ("", "")
    texts = [f"{opened}Hm.{closed}{text}" for text in ("It is.", "It was.", "It will.")]
    try:
        answers = [renderer.completion_ids([ASK], text) for text in texts]
    except ModelError:  # thoughts that the template leaves out
        answers = [renderer.completion_ids([ASK], text[-8:].strip(".\n") + ".") for text in texts]
        texts = [text[-8:].strip(".\n") + "." for text in texts]
    turns = [
        template.render_prompt(head),
        template.render_continuation([FOLLOW_UP], prompt=head),
        template.render_continuation([third], prompt=head),
    ]
    grown = sum((turn.token_ids + answer for turn, answer in zip(turns, answers, strict=True)), ())
    conversation = [*head, says(texts[0]), FOLLOW_UP, says(texts[1]), third, says(texts[2])]
    whole = stock(template, *conversation, prompt=False)
    change = template.history_change
    same = whole.startswith(decode(template, grown)) or decode(template, grown).startswith(whole)
    assert same == (change is None or change.answers == "calls")
    if change is not None:
        assert template.note is not None and name in template.note
        num_thoughts = decode(template, grown).count("Hm.")
        if opened and num_thoughts:
            assert (whole.count("Hm.") < num_thoughts) == change.drops_thoughts


@pytest.mark.parametrize(
    ("name", "message", "expected"),
    [
        ("llama2", FOLLOW_UP, "<s>[INST] Was it? [/INST]"),
        ("phi3", FOLLOW_UP, "\n<|user|>\nWas it?<|end|>\n<|assistant|>\n"),
        ("gpt-oss", FOLLOW_UP, "<|start|>user<|message|>Was it?<|end|><|start|>assistant"),
        (
            "gpt-oss",
            tool_message(name="add"),
            '<|start|>functions.add to=assistant<|channel|>commentary<|message|>"42"<|end|>'
            "<|start|>assistant",
        ),
        ("glm4", FOLLOW_UP, "\nWas it?<|assistant|>\n"),
        ("glm4", tool_message(), "\n42<|assistant|>\n"),
        ("glm4.5", tool_message(), "\n<tool_response>\n42\n</tool_response><|assistant|>"),
        (
            "mistral-v3",
            tool_message(tool_call_id="abcdefghi"),
            '[TOOL_RESULTS] {"content": 42, "call_id": "abcdefghi"}[/TOOL_RESULTS]',
        ),
        (
            "gemma4",
            tool_message(name="add"),
            'response:add{value:<|"|>42<|"|>}<tool_response|>',
        ),
        (
            "deepseek-r1",
            tool_message(),
            "<｜tool▁outputs▁begin｜><｜tool▁output▁begin｜>42<｜tool▁output▁end｜>"
            "<｜tool▁outputs▁end｜>",
        ),
        ("deepseek-r1", FOLLOW_UP, "<｜User｜>Was it?<｜Assistant｜><think>\n"),
        (
            "minimax-m2",
            tool_message(),
            "\n]~b]tool\n<response>42</response>[e~[\n]~b]ai\n<think>\n",
        ),
        (
            "command-r7b",
            FOLLOW_UP,
            "<|START_OF_TURN_TOKEN|><|USER_TOKEN|>Was it?<|END_OF_TURN_TOKEN|>"
            "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>",
        ),
    ],
)
def test_what_follows_an_answer(name: str, message: Message, expected: str) -> None:
    template = family_template(name)
    assert decode(template, template.render_continuation([message]).token_ids) == expected


@pytest.mark.parametrize(
    ("name", "before", "expected"),
    [
        ("gpt-oss", "user", "<|end|>"),
        ("gpt-oss", "tool", "<|call|>"),
        ("glm4", "user", "<|user|>"),
        ("glm4", "tool", "<|observation|>"),
        ("gemma4", "tool", "<|tool_response>"),
        ("qwen3", "tool", "<|im_end|>"),
        ("olmo3", "user", "<|im_end|>"),
        ("nemotron-nano-v2", "user", "\n<SPECIAL_12>"),
        ("llama2", "user", " </s>"),
    ],
)
def test_an_answer_that_ran_into_its_limit_ends_as_the_next_message_wants(
    name: str, before: Any, expected: str
) -> None:
    template = family_template(name)
    assert decode(template, template.end_of_turn_ids(before=before)) == expected


@pytest.mark.parametrize(
    ("name", "opening"),
    [
        ("smollm3", "<|im_start|>assistant\n<think>\n\n</think>\n"),
        ("nemotron-nano-v2", "<SPECIAL_11>Assistant\n<think></think>"),
    ],
)
def test_a_prompt_that_switches_thinking_off_does_so_for_every_turn(
    name: str, opening: str
) -> None:
    template = family_template(name)
    off = [Message(role="system", content="Be kind. /no_think"), ASK]
    for prompt, changes in ((off, True), ([SYSTEM, ASK], False)):
        span = template.render_continuation([FOLLOW_UP], prompt=prompt)
        assert decode(template, span.token_ids).endswith(opening) == changes
    turn = template.environment_turn([FOLLOW_UP], add_end_of_turn=False, prompt=off)
    assert decode(template, turn.token_ids).endswith(opening)
    assert "Be kind" not in decode(template, turn.token_ids)


# ── hints ────────────────────────────────────────────────────────────────────────────────────────


@families
@pytest.mark.parametrize("role", ["user", "system", "tool"])
def test_a_hint_before_its_turn_is_what_the_template_makes_of_both(
    name: str, role: HintRole
) -> None:
    template = family_template(name)
    trajectory = play(template, FOLLOW_UP)
    hint = Hint(trajectory="e", turn=1, text="Look it up.", source="human")
    if find_hint_problem(template, role) is not None:
        with pytest.raises(ModelError, match=r"hints\.(position|role) = '"):
            splice_hint(trajectory, hint, template, place="before_turn", role=role, max_tokens=999)
            splice_hint(
                trajectory, Hint(trajectory="e", turn=3, text="Look.", source="human"),
                template, place="before_turn", role=role, max_tokens=999,
            )  # fmt: skip
        return
    branch = splice_hint(trajectory, hint, template, place="before_turn", role=role, max_tokens=999)
    sequence = trajectory.token_ids[: branch.splice] + branch.token_ids
    expected = stock(template, ASK, Message(role=role, content="Look it up."), prompt=True)
    answer = decode(template, trajectory.turns[1].token_ids)
    assert decode(template, sequence) == expected + answer


@families
def test_a_hint_inside_the_message_above_has_a_place_everywhere(name: str) -> None:
    template = family_template(name)
    keys = find_result_keys(template)[0]
    for message in (FOLLOW_UP, *([] if keys is None else [tool_message(**keys)])):
        trajectory = play(template, message)
        hint = Hint(trajectory="e", turn=3, text="Look it up.", source="human")
        branch = splice_hint(
            trajectory, hint, template, place="last_message", role="user", max_tokens=99
        )
        sequence = trajectory.token_ids[: branch.splice] + branch.token_ids
        num_same = common_prefix_length(sequence, trajectory.token_ids)
        num_added = len(sequence) - len(trajectory.token_ids)
        assert sequence[num_same + num_added :] == trajectory.token_ids[num_same:]
        assert "Look it up." in decode(template, sequence[num_same - 1 : num_same + num_added + 1])


@families
def test_a_hint_in_the_system_prompt_is_what_the_template_makes_of_it(name: str) -> None:
    template = family_template(name)
    trajectory = play(template, FOLLOW_UP)
    hint = Hint(trajectory="e", turn=3, text="Look it up.", source="human")
    if not template.renderer.takes_system:
        with pytest.raises(ModelError, match="takes no system message: put the text into"):
            splice_hint(trajectory, hint, template, place="system", role="user", max_tokens=999)
        return
    branch = splice_hint(trajectory, hint, template, place="system", role="user", max_tokens=999)
    prompt = stock(template, Message(role="system", content="Look it up."), ASK, prompt=True)
    later = decode(template, [i for turn in trajectory.turns[1:] for i in turn.token_ids])
    assert branch.splice == 0 and decode(template, branch.token_ids) == prompt + later


# ── tools ────────────────────────────────────────────────────────────────────────────────────────

TOOLS = [{"type": "function", "function": {"name": "add", "description": "Adds.",
          "parameters": {"type": "object", "properties": {}}}}]  # fmt: skip


CALLS_WITHOUT_THE_PROMPT = {
    "glm4", "qwen3-thinking-2507", "olmo3-think", "nemotron-nano-v2", "minimax-m2",
}  # fmt: skip
"""A call in history does not begin as the generation prompt ends: with thoughts, say."""


@families
def test_a_recorded_call_and_its_result_are_what_the_template_makes_of_them(name: str) -> None:
    template = family_template(name)
    if not (template.renderer.takes_tools and template.renderer.renders_tool_calls):
        offered = Message(role="user", content="?", tools=json.dumps(TOOLS))
        with pytest.raises(ModelError, match="does not render `tool"):
            template.renderer.prompt_ids([offered, says("", CALL), tool_message()])
        return
    ask = Message(role="user", content="Is it?", tools=json.dumps(TOOLS))
    task = Task(id="t", split="train", messages=(ask,))
    log = [
        {"role": "user", "content": "Is it?"},
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "content": "42", "tool_call_id": "abcdefghi", "name": "add"},
    ]
    result = Message(role="tool", content="42", extra=json.dumps({k: log[2][k] for k in
                     ("tool_call_id", "name")}))  # fmt: skip
    arguments_as_text = name.startswith("deepseek")
    call = CALL | {"function": {"name": "add", "arguments": json.dumps({"a": 1})}}
    whole = stock(
        template, ask, says("", call if arguments_as_text else CALL), result,
        prompt=True, tools=TOOLS,
    )  # fmt: skip
    if name in CALLS_WITHOUT_THE_PROMPT:
        with pytest.raises(TaskError, match=r"generation prompt .* but this message does not"):
            trajectory_from_chat_log(task, log, template, id="a")
        return
    trajectory = trajectory_from_chat_log(task, log, template, id="a")
    empty = template.renderer.boundary.empty_thoughts
    assert bool(empty) == (name == "gemma4")
    assert decode(template, trajectory.token_ids).replace(empty, "") == whole


@families
def test_what_a_result_lacks_is_named(name: str) -> None:
    template = family_template(name)
    keys, _ = find_result_keys(template)
    for key in keys or ():
        with pytest.raises(ModelError, match=f"Give the message a {key} .*tool_role = false"):
            template.render_continuation([tool_message()])
    if keys is not None:
        ids = template.render_continuation([tool_message(**keys)]).token_ids
        assert "42" in decode(template, ids)
        assert all(value in decode(template, ids) for value in keys.values())


# ── switches and the date ────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("name", "args", "end"),
    [
        ("qwen3", {"enable_thinking": False}, "assistant\n<think>\n\n</think>\n\n"),
        ("qwen3.5", {"enable_thinking": False}, "assistant\n<think>\n\n</think>\n\n"),
        ("smollm3", {"enable_thinking": False}, "assistant\n<think>\n\n</think>\n"),
        ("glm4.5", {"enable_thinking": False}, "/nothink<|assistant|>\n<think></think>"),
        ("deepseek-v3.1", {"thinking": True}, "<｜Assistant｜><think>"),
        ("gemma4", {"enable_thinking": True}, "<|turn>model\n"),
    ],
)
def test_a_switch_holds_for_every_turn_and_text(name: str, args: dict[str, Any], end: str) -> None:
    template, plain = family_template(name, **args), family_template(name)
    for ids in (
        template.renderer.prompt_ids([ASK]),
        template.render_continuation([FOLLOW_UP]).token_ids,
    ):
        assert decode(template, ids).endswith(end)
    assert not decode(plain, plain.renderer.prompt_ids([ASK])).endswith(end)
    expected = stock(template, ASK, prompt=True, **args)
    assert decode(template, template.renderer.prompt_ids([ASK])) == expected


@pytest.mark.parametrize(
    ("name", "args", "empty", "last"),
    [
        ("qwen3", {"enable_thinking": False}, "<think>\n\n</think>\n\n", True),
        ("qwen3.5", {"enable_thinking": False}, "<think>\n\n</think>\n\n", True),
        ("gemma4", {}, "<|channel>thought\n<channel|>", False),
        ("smollm3", {"enable_thinking": False}, "", False),
        ("deepseek-v3.1", {}, "", False),
    ],
)
def test_recorded_conversations_with_thinking_off(
    name: str, args: dict[str, Any], empty: str, last: bool
) -> None:
    """Each answer follows the empty thoughts of its generation prompt, as in a rollout; history
    lacks them, but for those of the last answer."""
    template = family_template(name, **args)
    assert template.renderer.boundary.empty_thoughts == empty
    task = Task(id="t", split="train", messages=(ASK,))
    talk = [ASK, says("It is."), FOLLOW_UP, says("It was.")]
    log = [{"role": m.role, "content": m.content} for m in talk]
    trajectory = trajectory_from_chat_log(task, log, template, id="a")
    for turn in (0, 2):
        assert decode(template, trajectory.turns[turn].token_ids).endswith(empty)
    assert [turn.text for turn in trajectory.turns[1::2]] == ["It is.", "It was."]
    whole = stock(template, *talk, prompt=False, **args)
    text = decode(template, trajectory.token_ids)
    if empty:
        assert text.count(empty) == 2 and whole.count(empty) == last
        text, whole = (x.replace(empty, "") for x in (text, whole))
    assert whole.startswith(text)
    if FAMILIES[name].thinking is not None and name != "smollm3":
        thoughtful = {"role": "assistant", "content": "<think>\nHm.\n</think>\n\nYes."}
        with pytest.raises(TaskError, match=r"leaves text of this message out|does not follow it"):
            trajectory_from_chat_log(task, [log[0], thoughtful, *log[2:]], template, id="a")


def test_thoughts_that_are_dropped_where_a_switch_opens_them_are_noted() -> None:
    template = family_template("deepseek-v3.1", thinking=True)
    assert template.history_change is not None and template.history_change.drops_thoughts
    answer = template.renderer.completion_ids([ASK], "<think>Hm.</think>It is.")
    assert decode(template, answer) == "Hm.</think>It is.<｜end▁of▁sentence｜>"
    with pytest.raises(ModelError, match=r"renders the prompt differently.*chat_template_args"):
        template.renderer.completion_ids([ASK], "It is.")


def test_thoughts_that_a_template_would_silently_leave_out_of_a_text() -> None:
    renderer = family_template("deepseek-v3.1").renderer
    with pytest.raises(ModelError, match=r"leaves text of an answer out.*chat_template_args"):
        renderer.completion_ids([ASK], "<think>Hm.</think>It is.")


@pytest.mark.parametrize(
    ("name", "args", "says_reads"),
    [
        ("llama3", {"enable_thinking": False}, r"reads no variable of that name \(it reads: none"),
        ("qwen3", {"reasoning_effort": "low"}, r"it reads: enable_thinking\)"),
        ("qwen3", {"text": "x"}, r"it reads: enable_thinking\)"),
        ("qwen3", {"messages": "x"}, "rendering sets that variable itself; remove it"),
        ("llama3", {"bos_token": "x"}, "rendering sets that variable itself; remove it"),
        ("gpt-oss", {"strftime_now": "x"}, "set chat_template_date"),
    ],
)
def test_a_variable_that_a_template_does_not_read_is_refused(
    name: str, args: dict[str, Any], says_reads: str
) -> None:
    with pytest.raises(ModelError, match=rf"student\.chat_template_args\..*{says_reads}"):
        family_template(name, **args)


# ── the fixtures and their table ─────────────────────────────────────────────────────────────────


@families
def test_every_fixture_says_where_its_facts_are_from(name: str) -> None:
    first_line = family_source(name).partition("\n")[0]
    assert first_line.startswith("{#- ") and first_line.endswith(" -#}") and ":" in first_line


def test_the_table_of_the_documentation_is_what_the_templates_do() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert page == page_with_table(page), "run python scripts/template_table.py"
