"""Which episodes there are: the same everywhere, disjoint splits, names as asked for."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any, get_args

import pytest

import courtside
from courtside.environments.tool_calls import CallFormat
from courtside.environments.toolbox.environment import Toolbox, make_plan
from courtside.environments.toolbox.episode import Plan
from courtside.environments.toolbox.tools.base import Request
from courtside.environments.toolbox.tools.names import INVENTED_NAMES, NAMES
from courtside.errors import TaskError
from courtside.hashing import SeededRandom
from courtside.recipe.tasks import CapabilityName, ToolboxTasks
from courtside.tasks.loading import make_task_source

ALL = get_args(CapabilityName)


def config(**settings: Any) -> ToolboxTasks:
    return ToolboxTasks.model_validate({"kind": "toolbox", **settings})


def plans(count: int, **settings: Any) -> list[Plan]:
    return [make_plan(config(**settings), number) for number in range(count)]


# ── chance ───────────────────────────────────────────────────────────────────────────────────────


def test_dice_are_fixed_for_ever() -> None:
    # A change here would change every episode, and with it what earlier runs were tested on.
    rng = SeededRandom("a key")
    assert [rng.randbelow(10) for _ in range(8)] == [1, 7, 4, 3, 3, 7, 8, 8]


def test_dice_are_fair() -> None:
    rng = SeededRandom("fair")
    counts = Counter(rng.randint(1, 6) for _ in range(6000))
    assert set(counts) == set(range(1, 7)) and all(abs(n - 1000) < 150 for n in counts.values())
    assert sum(rng.bernoulli(0.3) for _ in range(5000)) == pytest.approx(1500, abs=150)
    assert not any(rng.bernoulli(0) for _ in range(100)) and all(
        rng.bernoulli(1) for _ in range(100)
    )
    assert sorted(rng.choose_distinct("abcd", 4)) == list("abcd")


PROGRAM = """
import hashlib
from courtside.recipe.tasks import ToolboxTasks
from courtside.environments.toolbox.environment import Toolbox
box = Toolbox(ToolboxTasks(kind="toolbox", turns=(2, 30)))
print(hashlib.sha256(repr([box.task(i) for i in (0, 7, 10**11)]).encode()).hexdigest())
"""


def test_two_processes_make_the_same_episodes() -> None:
    root = Path(courtside.__file__).parents[1]
    environment = {**os.environ, "PYTHONPATH": str(root), "PYTHONHASHSEED": "3"}
    other = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment, check=True, capture_output=True, text=True
    ).stdout.strip()
    box = Toolbox(config(turns=(2, 30)))
    expected = repr([box.task(i) for i in (0, 7, 10**11)])
    assert other == hashlib.sha256(expected.encode()).hexdigest()


# ── splits ───────────────────────────────────────────────────────────────────────────────────────


def request_key(request: Request) -> str:
    """What a request wants; where a note is meant, which one."""
    about = request.arguments.get("title", sorted(request.arguments.items()))
    return f"{request.capability} {about}"


def test_no_request_is_in_two_splits() -> None:
    keys: dict[str, set[str]] = {"train": set(), "validation": set(), "test": set()}
    for plan in plans(1500, capabilities=ALL, num_tools=6):
        for request in plan.requests:
            if request.capability != "list_notes":  # always the same one
                keys[plan.split].add(request_key(request))
    assert all(len(requests) > 200 for requests in keys.values())
    assert not keys["train"] & keys["validation"]
    assert not keys["train"] & keys["test"]
    assert not keys["validation"] & keys["test"]


def test_sources_draw_from_their_split() -> None:
    source = make_task_source(config(), seed=1)
    batches = [source.batch(step, 16) for step in range(10)]
    assert batches[3] == make_task_source(config(), seed=1).batch(3, 16)
    assert {task.split for batch in batches for task in batch} == {"train"}
    assert len({task.id for batch in batches for task in batch}) > 150
    test = source.held_out("test", 64)
    assert {task.split for task in test} == {"test"} and len({task.id for task in test}) == 64
    assert test == make_task_source(config(), seed=2).held_out("test", 64)


def test_an_id_stands_for_an_episode() -> None:
    box = Toolbox(config())
    ids = {box.task(number).id for number in range(300)}
    assert len(ids) == 300
    variants = (
        config(tool_call_format="plain"), config(names="all"), config(retries=1),
        config(tool_role=False), config(max_result_chars=50), config(turns=5), config(num_tools=5),
    )  # fmt: skip
    assert len({Toolbox(plan).task(3).id for plan in (box.config, *variants)}) == len(variants) + 1
    # A reward changes no episode: arms that differ in it are compared on the same tasks.
    assert Toolbox(config(reward="all")).task(3) == box.task(3)
    # Few possible episodes: the same one under several numbers has one id.
    tiny = Toolbox(config(turns=1, num_tools=1, capabilities=["weather"]))
    assert len({tiny.task(number).id for number in range(3000)}) < 2000


# ── contents ─────────────────────────────────────────────────────────────────────────────────────


def test_turns_and_tools_are_as_asked_for() -> None:
    assert {len(plan.requests) for plan in plans(200, turns=(2, 5))} == {2, 3, 4, 5}
    assert {len(plan.requests) for plan in plans(5, turns=200)} == {200}
    for plan in plans(50, num_tools=3, capabilities=["weather", "price", "contact", "weather"]):
        assert set(plan.tools) == {"weather", "price", "contact"}
    for plan in plans(100, num_tools=5, capabilities=ALL):
        assert len(plan.tools) == len(set(plan.tools.values())) == 5
        assert {request.capability for request in plan.requests} <= set(plan.tools)
    orders = {
        tuple(plan.tools) for plan in plans(50, num_tools=2, capabilities=["price", "convert"])
    }
    assert len(orders) == 2, "the order of the list differs, too"


def test_every_capability_is_asked_for() -> None:
    asked_for = Counter(
        r.capability for plan in plans(300, capabilities=ALL) for r in plan.requests
    )
    assert set(asked_for) == set(ALL)


def test_phrasings_vary() -> None:
    texts = {r.text.split(" ")[0] for plan in plans(200) for r in plan.requests}
    assert len(texts) > 15
    openings = {r.text for plan in plans(300) for r in plan.requests if "Berlin" in r.text}
    assert len(openings) >= 3


def test_notes_written_earlier_are_read_back() -> None:
    built_on = 0
    for plan in plans(200, turns=8, capabilities=["write_note", "read_note", "append_note"],
                     num_tools=3):  # fmt: skip
        titles: set[str] = set()
        for request in plan.requests:
            title = request.arguments["title"]
            built_on += request.capability != "write_note" and title in titles
            if request.capability == "write_note":
                titles.add(title)
            assert title in titles | set(plan.notes)
    assert built_on > 200


def test_deleting_never_runs_out_of_notes() -> None:
    for plan in plans(60, turns=60, num_tools=2, capabilities=["delete_note", "write_note",
                                                              "read_note"]):  # fmt: skip
        assert "delete_note" not in plan.tools or "write_note" in plan.tools


# ── names ────────────────────────────────────────────────────────────────────────────────────────


def listed(**settings: Any) -> list[tuple[str, str]]:
    return [pair for plan in plans(400, **settings) for pair in plan.tools.items()]


def test_names_come_from_where_they_should() -> None:
    seen_names, held_out, both = (listed(names=names) for names in ("seen", "held_out", "all"))
    assert {name for _, name in seen_names} == {
        n for c, _ in seen_names for n in NAMES[c].seen_names
    }
    assert {name for _, name in held_out} == {n for c, _ in seen_names for n in NAMES[c].held_out}
    assert {name for _, name in both} == {n for _, n in seen_names} | {n for _, n in held_out}


@pytest.mark.parametrize(("share", "expected"), [(None, 0.2), (0.0, 0.0), (0.9, 0.9), (1.0, 1.0)])
def test_the_common_name_is_listed_as_often_as_asked(share: float | None, expected: float) -> None:
    pairs = listed(common_name_fraction=share)
    common = [name == NAMES[capability].common for capability, name in pairs]
    assert sum(common) / len(common) == pytest.approx(expected, abs=0.04)


def test_the_same_number_under_other_names_is_the_same_episode() -> None:
    for seen_names, held_out in zip(plans(50), plans(50, names="held_out"), strict=True):
        assert seen_names.requests == held_out.requests and seen_names.notes == held_out.notes
        assert list(seen_names.tools) == list(held_out.tools)
        assert not set(seen_names.tools.values()) & set(held_out.tools.values())


# ── tasks ────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("call_format", ["json", "plain"])
def test_the_prompt_lists_the_tools_and_is_short(call_format: CallFormat) -> None:
    box = Toolbox(config(tool_call_format=call_format))
    for number in range(100):
        task = box.task(number)
        system, user = task.messages
        assert (system.role, user.role) == ("system", "user")
        names = make_plan(box.config, number).tools.values()
        assert task.privileged["tools"] == ", ".join(names)
        lines = system.content.splitlines()[-4:]
        assert [line.split("(")[0].split(" ")[0] for line in lines] == list(names)
        # About four characters a token; 200 tokens are the aim.
        assert len(system.content) < 450
        assert task.grader is None and task.tags == ("toolbox", call_format, "seen names")


def test_lists_are_written_in_the_style_of_calls() -> None:
    [plan] = plans(1, num_tools=1, capabilities=["convert"])
    [name] = plan.tools.values()
    plain, as_json = (
        Toolbox(config(num_tools=1, capabilities=["convert"], tool_call_format=call_format)).task(0)
        for call_format in ("plain", "json")
    )
    assert plain.messages[0].content.endswith(f"Tools:\n{name}(value, unit, to): convert units")
    assert plain.privileged["signatures"] == f"{name}(value, unit, to)"
    assert (
        f'{name} {{"value": number, "unit": string, "to": string}}' in as_json.messages[0].content
    )


def test_tags_tell_which_names() -> None:
    for names, tag in (("seen", "seen names"), ("held_out", "held-out names")):
        assert tag in Toolbox(config(names=names)).task(0).tags
    assert "mixed names" in Toolbox(config(names="all", num_tools=8)).task(0).tags


def test_without_a_tool_role_all_is_said_by_the_user() -> None:
    box = Toolbox(config(tool_role=False))
    [message] = box.task(0).messages
    assert message.role == "user"
    assert message.content == "\n\n".join(m.content for m in Toolbox(config()).task(0).messages)


def test_a_task_of_other_settings_is_refused() -> None:
    task = Toolbox(config()).task(3)
    with pytest.raises(TaskError, match=r"not one of this toolbox.*section"):
        Toolbox(config(turns=5)).start(task)
    with pytest.raises(TaskError, match="not one of this toolbox"):
        Toolbox(config()).start(courtside.Task(id="x", split="train", messages=task.messages))


def test_made_up_names_belong_to_nobody_and_differ_within_an_episode() -> None:
    all_names = {name for names in NAMES.values() for name in (*names.seen_names, *names.held_out)}
    assert not all_names & set(INVENTED_NAMES) and len(set(INVENTED_NAMES)) == 1600
    mixed = config(num_tools=8, random_name_fraction=0.5)
    num_made_up = 0
    for number in range(200):
        listed = list(make_plan(mixed, number).tools.values())
        assert len(set(listed)) == 8
        num_made_up += sum(name in INVENTED_NAMES for name in listed)
    assert num_made_up / 1600 == pytest.approx(0.5, abs=0.04)
    plain = config(num_tools=8)
    for number in range(20):  # the others keep the names that they had
        before, now = make_plan(plain, number).tools, make_plan(mixed, number).tools
        assert all(now[plan] in (before[plan], *INVENTED_NAMES) for plan in now)
    tags = {Toolbox(mixed).task(number).tags[-1] for number in range(20)}
    assert tags <= {"mixed names", "made-up names", "seen names"} and "mixed names" in tags
