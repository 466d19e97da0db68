"""Engines: sampling and scoring by language models. Nothing here runs with versions too old."""

from courtside.engines.compatibility import refuse_old_versions

refuse_old_versions()
