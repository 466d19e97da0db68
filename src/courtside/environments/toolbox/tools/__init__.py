"""Tools: what they do, and which requests need them."""

from collections.abc import Mapping

from courtside.environments.toolbox.tools import measures, notes, tables
from courtside.environments.toolbox.tools.base import Tool

TOOLS: Mapping[str, Tool] = tables.TOOLS | measures.TOOLS | notes.NOTE_TOOLS | notes.TEXT_TOOLS
"""By capability."""
