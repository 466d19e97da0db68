"""A text game with Gymnasium's interface, and the wrapper that makes it an environment."""

import random

from courtside.hashing import split_of, task_id
from courtside.types import Event, Grade, Message, Observation, Task


class Corridor:
    """As another package has it: `reset` gives two values, `step` five."""

    actions = ("left", "right", "open")

    def reset(self, *, seed=None, options=None):
        self.door, self.position = random.Random(seed).randint(1, 4), 0
        return f"You are in a corridor. The door is {self.door} steps to the right.", {}

    def step(self, action):
        self.position += {"left": -1, "right": 1, "open": 0}[action]
        away = self.door - self.position
        if action == "open" and away == 0:
            return "The door opens. You are out.", 1.0, True, False, {}
        reward = -0.1 if action == "open" or self.position < 0 else 0.0
        return f"The door is {away} steps to the right.", reward, False, False, {"away": away}


class CorridorEnvironment:
    """One task for each seed."""

    def __init__(self, num_seeds: int = 200) -> None:
        self.size = num_seeds

    def task(self, index: int) -> Task:
        observation, _ = Corridor().reset(seed=index)
        prompt = f"{observation} Reply with one of: {', '.join(Corridor.actions)}."
        return Task(
            id=task_id("corridor", str(index)),
            split=split_of(str(index)),
            messages=(Message(role="user", content=prompt),),
            privileged={"actions": ", ".join(Corridor.actions)},
            grader_args={"seed": index},
        )

    def start(self, task: Task) -> "CorridorEpisode":
        return CorridorEpisode(task.grader_args["seed"])


class CorridorEpisode:
    def __init__(self, seed: int) -> None:
        self.game, self.solved = Corridor(), False
        self.game.reset(seed=seed)

    def step(self, reply: str) -> Observation:
        action = reply.strip().lower()
        if action not in Corridor.actions:  # the game would raise
            return answer("That is no action.", Event(kind="invalid_action"))
        observation, reward, terminated, truncated, info = self.game.step(action)
        self.solved = terminated
        events = (
            () if reward >= 0 else (Event(kind="bad_move", details={**info, "action": action}),)
        )
        return answer(observation, *events, done=terminated or truncated)

    def grade(self) -> Grade:
        return Grade(score=float(self.solved), passed=self.solved)


def answer(text: str, *events: Event, done: bool = False) -> Observation:
    return Observation(messages=(Message(role="user", content=text),), done=done, events=events)
