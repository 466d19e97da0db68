"""Made-up run folders for the viewer, and how to ask its server. No model, no torch."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from starlette.testclient import TestClient
from unit.report.made_up import make_recipe
from unit.report.played import make_hinted_batch, make_hinted_update

from courtside.report.folder.folder import RunFolder
from courtside.types import Message, Scored
from courtside.viewer.app import viewer_app

TOKEN = "a-token"
SEND = {"x-courtside-token": TOKEN}
FIRST = "/api/batches/0/trajectories/0-0"

HOSTILE = "<script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">"


def start_run(path: Path, **changes: Any) -> RunFolder:
    tree: dict[str, Any] = {
        "tasks": {"kind": "toolbox"},
        "teacher": {"kind": "self", "weights": "live"},
        "reader": {"kind": "rules"},
        "losses": [{"kind": "divergence", "on": "hinted_turns"}],
    }
    return RunFolder.open(path, make_recipe(**tree | changes))


def store(folder: RunFolder, step: int, batch: Sequence[Scored] | None = None) -> None:
    scored = make_hinted_batch(step) if batch is None else batch
    update = make_hinted_update(step, scored)
    folder.record(step, scored, update, seconds={"rollout": 1.0}, store_trajectories=True)


def write_run(path: Path, *, steps: int = 2, **changes: Any) -> RunFolder:
    """Six episodes a step: `0-0` has errors in turns 1 and 7, `0-5` has none."""
    with start_run(path, **changes) as folder:
        for step in range(steps):
            store(folder, step)
    return RunFolder.read(path)


def recorded(scored: Scored, id: str) -> Scored:
    """The same conversation as one out of a data set, under the id of some step."""
    hints = tuple(
        replace(outcome, hint=replace(outcome.hint, trajectory=id)) for outcome in scored.hints
    )
    trajectory = replace(scored.trajectory, id=id, source="dataset", policy_version=None)
    return replace(scored, trajectory=trajectory, hints=hints)


def hostile(scored: Scored) -> Scored:
    """Everything that somebody else wrote tries to run a program."""
    trajectory = scored.trajectory
    message = Message(role="tool", content=HOSTILE)
    turns = tuple(
        replace(
            turn,
            text=f"{turn.text} {HOSTILE}",
            messages=(*turn.messages, message) if turn.role != "assistant" else (),
            events=tuple(
                replace(event, kind=HOSTILE, details={**event.details, "message": HOSTILE})
                for event in turn.events
            ),
        )
        for turn in trajectory.turns
    )
    task = replace(trajectory.task, messages=(Message(role="user", content=HOSTILE),))
    hint_outcomes = tuple(
        replace(outcome, hint=replace(outcome.hint, text=HOSTILE, source=HOSTILE, reason=HOSTILE))
        for outcome in scored.hints
    )
    return replace(
        scored, trajectory=replace(trajectory, turns=turns, task=task), hints=hint_outcomes
    )


# ── asking ──────────────────────────────────────────────────────────────────────────────────────


def opened(folder: RunFolder, hints: Path | None = None, host: str = "127.0.0.1") -> TestClient:
    app = viewer_app(folder, hints or folder.path / "hints.jsonl", host=host, token=TOKEN)
    return TestClient(app, base_url=f"http://{host}:8765")


def get(client: TestClient, path: str) -> Any:
    answer = client.get(path)
    assert answer.status_code == 200, answer.text
    return answer.json()


def put_hint(client: TestClient, path: str, text: str) -> Any:
    return client.put(path, json={"text": text}, headers=SEND)


def delete(client: TestClient, path: str) -> Any:
    return client.request("DELETE", path, json={}, headers=SEND)


def lines(folder: RunFolder) -> list[dict[str, Any]]:
    text = (folder.path / "hints.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]
