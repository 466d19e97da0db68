"""Tools: what they do, and which requests need them."""

from collections.abc import Mapping

from courtside.environments.toolbox.tools import dates, measures, notes, tables, texts
from courtside.environments.toolbox.tools.base import Tool

TOOLS: Mapping[str, Tool] = {
    **tables.TOOLS, **measures.TOOLS, **dates.TOOLS, **notes.TOOLS, **texts.TOOLS
}  # fmt: skip
"""By capability."""
