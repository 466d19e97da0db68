"""Imports vLLM where packages that it never calls here are absent, and runs it in this process."""

from __future__ import annotations

import os
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

EXCLUDED = ("numba", "pycountry", "xgrammar")
"""Packages that vLLM imports and that sampling without a grammar never calls."""


class AbsentPackages:
    """Import hook: packages of `EXCLUDED` that are not installed become mocks."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        return ModuleSpec(name, self) if name.split(".")[0] in EXCLUDED else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = MagicMock(name=spec.name)
        module.__spec__, module.__path__ = spec, []
        module.__version__ = "0.0"
        return module

    def exec_module(self, module: ModuleType) -> None:
        return None


def prepare_vllm_import() -> None:
    """Call before anything imports vLLM."""
    os.environ |= {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
        "HF_HUB_OFFLINE": "1",
    }
    sys.meta_path.append(AbsentPackages())
