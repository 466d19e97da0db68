"""The number of an episode → its tools, their names, and its requests.

Chance is drawn per question (which tools, which names, the n-th request), so the same number under
other `names` is the same episode with other names: a pair that can be compared.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from courtside.environments.seeded_random import SeededRandom
from courtside.environments.toolbox.tools import dates, measures, notes, tables, texts
from courtside.environments.toolbox.tools.base import Request, RequestDraft, Tool, ToolState
from courtside.environments.toolbox.tools.names import MADE_UP, NAMES
from courtside.hashing import split_of
from courtside.recipe import ToolboxTasks
from courtside.types import Split

TOOLS: Mapping[str, Tool] = {
    **tables.TOOLS, **measures.TOOLS, **dates.TOOLS, **notes.TOOLS, **texts.TOOLS
}  # fmt: skip
"""By capability."""
NUM_FIRST_NOTES = 2
"""There at the beginning, so that notes can be read where none can be written."""
MAX_DRAWS = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    split: Split
    tools: Mapping[str, str]
    """Capability → the name it is listed under, in the order of the list."""
    notes: Mapping[str, str]
    requests: tuple[Request, ...]


def split_of_index(number: int) -> Split:
    return split_of(f"toolbox {number}")


def make_plan(config: ToolboxTasks, number: int) -> Plan:
    split = split_of_index(number)
    key = f"toolbox {number}"
    capabilities = _listed(config, SeededRandom(f"{key} tools"))
    num_turns = SeededRandom(f"{key} turns").randint(*config.turn_range)
    world = ToolState()
    if notes.TOOLS.keys() & capabilities:
        world.notes.update(_first_notes(split, SeededRandom(f"{key} notes")))
    return Plan(
        split=split,
        tools=_names(config, capabilities, key),
        notes=dict(world.notes),
        requests=tuple(
            _request(capabilities, split, SeededRandom(f"{key} request {turn}"), world)
            for turn in range(num_turns)
        ),
    )


def _listed(config: ToolboxTasks, rng: SeededRandom) -> list[str]:
    capabilities: list[str] = list(dict.fromkeys(config.capabilities))
    listed = rng.choose_distinct(capabilities, config.num_tools)
    if "delete_note" in listed and "write_note" not in listed:
        others = [place for place, one in enumerate(listed) if one != "delete_note"]
        listed[rng.choice(others)] = "write_note"
    return listed


def _names(config: ToolboxTasks, capabilities: list[str], key: str) -> dict[str, str]:
    made_up = iter(SeededRandom(f"{key} made-up names").choose_distinct(MADE_UP, len(capabilities)))
    return {
        one: next(made_up)
        if SeededRandom(f"{key} made-up name of {one}").bernoulli(config.random_name_fraction)
        else _name(config, one, SeededRandom(f"{key} name of {one}"))
        for one in capabilities
    }


def _name(config: ToolboxTasks, capability: str, rng: SeededRandom) -> str:
    names = NAMES[capability]
    pool = {
        "seen": names.seen,
        "held_out": names.held_out,
        "all": (*names.seen, *names.held_out),
    }[config.names]
    if config.common_name_fraction is None or names.common not in pool:
        return rng.choice(pool)
    if rng.bernoulli(config.common_name_fraction):
        return names.common
    return rng.choice([name for name in pool if name != names.common])


def _first_notes(split: Split, rng: SeededRandom) -> dict[str, str]:
    found: dict[str, str] = {}
    while len(found) < NUM_FIRST_NOTES:
        arguments = _of_split("write_note", split, rng, ToolState()).arguments
        found[arguments["title"]] = arguments["text"]
    return found


def _request(capabilities: list[str], split: Split, rng: SeededRandom, world: ToolState) -> Request:
    """One that makes sense in the world as the requests before it leave it; it leaves its own."""
    possible = [one for one in capabilities if world.notes or not TOOLS[one].needs_notes]
    capability = rng.choice(possible)
    drawn = _of_split(capability, split, rng, world)
    text = rng.choice(drawn.phrases).format(**drawn.arguments)
    TOOLS[capability].run(world, drawn.arguments)
    return Request(capability=capability, text=text, arguments=drawn.arguments)


def _of_split(capability: str, split: Split, rng: SeededRandom, world: ToolState) -> RequestDraft:
    """A request about something that no other split asks this tool about."""
    for _ in range(MAX_DRAWS):
        drawn = TOOLS[capability].draw(rng, world)
        if drawn.topic is None or split_of(f"{capability} {drawn.topic}") == split:
            return drawn
    raise AssertionError(f"{capability} has no topics in {split}")
