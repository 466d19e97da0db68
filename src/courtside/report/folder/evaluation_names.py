"""File names of stored evaluations: `step-000008-student.held_out-test.parquet`."""

from __future__ import annotations

import re
from typing import NamedTuple, cast

from courtside.types import Evaluation, Split

FILE_NAME = re.compile(r"step-(\d+)-([\w.]+)-(train|validation|test)\.parquet")


class EvaluationName(NamedTuple):
    step: int
    policy: str
    """`student`, `teacher` or `student:SUITE`."""
    split: Split

    @classmethod
    def of(cls, evaluation: Evaluation) -> EvaluationName:
        return cls(evaluation.step, evaluation.policy, evaluation.split)

    @classmethod
    def parse(cls, file_name: str) -> EvaluationName | None:
        """None: not the name of such a file."""
        match = FILE_NAME.fullmatch(file_name)
        if match is None:
            return None
        return cls(int(match[1]), match[2].replace(".", ":"), cast(Split, match[3]))

    @property
    def file_name(self) -> str:
        # A suite's name is an identifier.
        policy = self.policy.replace(":", ".")
        return f"step-{self.step:06d}-{policy}-{self.split}.parquet"
