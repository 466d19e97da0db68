"""Plans an episode from its number: tools, their names, and requests.

Each decision (which tools, which names, the n-th request) has a random stream of its own, so the
same number with other `names` is the same episode with other names: a pair to compare.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from courtside.environments.seeded_random import SeededRandom
from courtside.environments.toolbox.tools import dates, measures, notes, tables, texts
from courtside.environments.toolbox.tools.base import Request, RequestDraft, Tool, ToolState
from courtside.environments.toolbox.tools.names import INVENTED_NAMES, NAMES
from courtside.hashing import split_of
from courtside.recipe import ToolboxTasks
from courtside.types import Split

TOOLS: Mapping[str, Tool] = {
    **tables.TOOLS, **measures.TOOLS, **dates.TOOLS, **notes.TOOLS, **texts.TOOLS
}  # fmt: skip
"""By capability."""
NUM_FIRST_NOTES = 2
"""Initial notes, so that episodes without a writing tool can read some."""
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
    capabilities = _choose_tools(config, SeededRandom(f"{key} tools"))
    num_turns = SeededRandom(f"{key} turns").randint(*config.turn_range)
    state = ToolState()
    if notes.TOOLS.keys() & capabilities:
        state.notes.update(_first_notes(split, SeededRandom(f"{key} notes")))
    return Plan(
        split=split,
        tools=_names(config, capabilities, key),
        notes=dict(state.notes),
        requests=tuple(
            _request(capabilities, split, SeededRandom(f"{key} request {turn}"), state)
            for turn in range(num_turns)
        ),
    )


def _choose_tools(config: ToolboxTasks, rng: SeededRandom) -> list[str]:
    capabilities: list[str] = list(dict.fromkeys(config.capabilities))
    listed_tools = rng.choose_distinct(capabilities, config.num_tools)
    if "delete_note" in listed_tools and "write_note" not in listed_tools:
        candidates = [index for index, name in enumerate(listed_tools) if name != "delete_note"]
        listed_tools[rng.choice(candidates)] = "write_note"
    return listed_tools


def _names(config: ToolboxTasks, capabilities: list[str], key: str) -> dict[str, str]:
    invented = iter(
        SeededRandom(f"{key} made-up names").choose_distinct(INVENTED_NAMES, len(capabilities))
    )
    return {
        name: next(invented)
        if SeededRandom(f"{key} made-up name of {name}").bernoulli(config.random_name_fraction)
        else _name(config, name, SeededRandom(f"{key} name of {name}"))
        for name in capabilities
    }


def _name(config: ToolboxTasks, capability: str, rng: SeededRandom) -> str:
    names = NAMES[capability]
    pool = {
        "seen": names.seen_names,
        "held_out": names.held_out,
        "all": (*names.seen_names, *names.held_out),
    }[config.names]
    if config.common_name_fraction is None or names.common not in pool:
        return rng.choice(pool)
    if rng.bernoulli(config.common_name_fraction):
        return names.common
    return rng.choice([name for name in pool if name != names.common])


def _first_notes(split: Split, rng: SeededRandom) -> dict[str, str]:
    first_notes: dict[str, str] = {}
    while len(first_notes) < NUM_FIRST_NOTES:
        arguments = _draft_of_split("write_note", split, rng, ToolState()).arguments
        first_notes[arguments["title"]] = arguments["text"]
    return first_notes


def _request(capabilities: list[str], split: Split, rng: SeededRandom, state: ToolState) -> Request:
    """A request that makes sense in `state`, which its solution then changes."""
    possible = [name for name in capabilities if state.notes or not TOOLS[name].needs_notes]
    capability = rng.choice(possible)
    draft = _draft_of_split(capability, split, rng, state)
    text = rng.choice(draft.phrases).format(**draft.arguments)
    TOOLS[capability].run(state, draft.arguments)
    return Request(capability=capability, text=text, arguments=draft.arguments)


def _draft_of_split(
    capability: str, split: Split, rng: SeededRandom, state: ToolState
) -> RequestDraft:
    """A request about a topic that no other split has for this tool."""
    for _ in range(MAX_DRAWS):
        draft = TOOLS[capability].draft_request(rng, state)
        if draft.topic is None or split_of(f"{capability} {draft.topic}") == split:
            return draft
    raise AssertionError(f"{capability} has no topics in {split}")
