"""A custom environment: guess a number from answers of larger and smaller."""

import re

from courtside.hashing import split_of, task_id
from courtside.types import Event, Grade, Message, Observation, Task


class Guess:
    def __init__(self, high: int = 100) -> None:
        self.high = self.size = high

    def task(self, index: int) -> Task:
        content = f"{index + 1} of {self.high}"
        rules = f"I am thinking of a number from 1 to {self.high}. Reply with a guess."
        return Task(
            id=task_id("guess", content),
            split=split_of(content),
            messages=(Message(role="user", content=rules),),
            privileged={"secret": str(index + 1)},
            grader_args={"secret": index + 1},
        )

    def start(self, task: Task) -> "Game":
        return Game(task.grader_args["secret"])


class Game:
    def __init__(self, secret: int) -> None:
        self.secret = secret
        self.solved = False

    def step(self, reply: str) -> Observation:
        number = re.search(r"[0-9]{1,9}", reply)
        if number is None:
            text, event = "That is no number.", Event(kind="no_number", details={"reply": reply})
            return Observation(messages=(Message(role="user", content=text),), events=(event,))
        self.solved = int(number[0]) == self.secret
        side = "larger" if int(number[0]) < self.secret else "smaller"
        text = "Right!" if self.solved else f"My number is {side}."
        return Observation(messages=(Message(role="user", content=text),), done=self.solved)

    def grade(self) -> Grade:
        feedback = "" if self.solved else f"The number was {self.secret}."
        return Grade(score=float(self.solved), passed=self.solved, feedback=feedback)
