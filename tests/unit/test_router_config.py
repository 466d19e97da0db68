"""Router replay and the load-balancing loss in a recipe: what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.small_runs import small_recipe

from courtside.errors import RecipeError

REPLAY = {"model": "m", "router_replay": True}
BALANCE = {"model": "m", "router_aux_loss_coef": 0.01}
SERVER = {"server": {"urls": ["http://localhost:8001"], "model": "small"}}


@pytest.mark.parametrize(
    ("student", "changes", "message"),
    [
        (REPLAY, {"rollout": SERVER},
         "student.router_replay takes the experts .* a server's are not requested. Remove it, or "
         "rollout.server"),
        (BALANCE, {"rollout": SERVER}, "student.router_aux_loss_coef takes the experts"),
        (REPLAY, {"rollout": {"mixed_sampling": {"top_k": 4}}},
         "student.router_replay takes .* rollout.mixed_sampling records none. Remove one"),
        (REPLAY, {"rollout": {"student_fraction": 0.0, "off_policy_source": "teacher"}},
         "student.router_replay takes .* samples nothing from it. Remove it"),
        (BALANCE, {"losses": [{"kind": "divergence", "name": "router_aux"}]},
         "losses: 'router_aux' is the name of the loss of student.router_aux_loss_coef"),
        ({"model": "m", "router_aux_loss_coef": -1.0}, {}, "router_aux_loss_coef"),
    ],
)  # fmt: skip
def test_it_is_refused_with_a_fix(
    student: dict[str, Any], changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(RecipeError, match=message):
        small_recipe(Path("m"), Path("t"), student=student, **changes)


def test_both_are_off_by_default() -> None:
    student = small_recipe(Path("m"), Path("t")).student
    assert not student.router_replay and student.router_aux_loss_coef == 0
