"""The makers of `made_up` as fixtures."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from unit.report.made_up import (
    make_batch,
    make_evaluation,
    make_recipe,
    make_trajectory,
    make_update,
)

from courtside.recipe import Recipe
from courtside.types import Evaluation, Scored, Trajectory, Update


@pytest.fixture
def recipe() -> Callable[..., Recipe]:
    return make_recipe


@pytest.fixture
def trajectory() -> Callable[..., Trajectory]:
    return make_trajectory


@pytest.fixture
def batch() -> Callable[..., list[Scored]]:
    return make_batch


@pytest.fixture
def update() -> Callable[..., Update]:
    return make_update


@pytest.fixture
def evaluation() -> Callable[..., Evaluation]:
    return make_evaluation
