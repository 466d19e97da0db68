"""Versions, platform and command line of a run, without host or user names."""

from __future__ import annotations

import os
import platform
import shlex
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

PACKAGES = ("courtside", "torch", "transformers", "peft", "pydantic", "pyarrow", "vllm")


def collect_versions() -> dict[str, str | int | None]:
    """None: not installed or unknown."""
    program, *arguments = sys.argv or [""]
    return {
        "python": platform.python_version(),
        **{package: _package_version(package) for package in PACKAGES},
        "platform": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cpu_count": os.cpu_count(),
        # The program's folder often contains a user name.
        "command": shlex.join([Path(program).name, *arguments]),
    }


def _package_version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
