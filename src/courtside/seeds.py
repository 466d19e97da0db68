"""Seeds and ids without state: every seed is a function of the run's seed and where it is used.

A resumed run therefore needs no saved generator state: step 17 has the same seeds in every
process.
"""

import hashlib


def seed_for(seed: int, *where: int | str) -> int:
    """63 bits for the place named by `where`; unrelated places get unrelated seeds."""
    text = "/".join(str(part) for part in (seed, *where))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def trajectory_id(step: int, index: int, sample: int) -> str:
    """Of one sample of the batch's task `index`; ids sort in the order of the batch."""
    return f"{step:06d}-{index:03d}-{sample}"


def sample_group(id: str) -> str:
    """What the ids of one prompt's samples share; a task that is in a batch twice has two groups.

    >>> sample_group(trajectory_id(3, 1, 0))
    '000003-001'
    """
    return id.rpartition("-")[0]
