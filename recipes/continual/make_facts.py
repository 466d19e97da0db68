"""Writes the fictional facts of this recipe: `facts/*.txt` to learn, `questions.jsonl` to ask.

    python recipes/continual/make_facts.py

Nothing is random: the same files come out every time. A question is worded as no sentence of the
documents is.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parent

TOWNS = (
    "Velmora", "Tarnwick", "Ostrel", "Brindhaven", "Quellish", "Marroway", "Dunfallow", "Issenby",
    "Corvane", "Pellimar", "Hathersund", "Lowenreach", "Skarrow", "Ambergate", "Finstock",
    "Yarrowby",
)  # fmt: skip
"""None of them exists."""
STRIDES = (1, 3, 5, 7)
"""Odd, so that each document has all towns, in an order of its own."""


@dataclass(frozen=True, slots=True)
class Relation:
    name: str
    values: tuple[str, ...]
    """One for each town."""
    sentences: tuple[str, ...]
    """Wordings in the documents."""
    question: str
    """Of the suite; in no document."""


RELATIONS = (
    Relation(
        "craft",
        ("copper bells", "paper kites", "green glass", "wool blankets", "silver spoons",
         "wooden clocks", "clay whistles", "blue candles", "leather maps", "stone chess sets",
         "silk ribbons", "iron lanterns", "cherry soap", "bone buttons", "painted drums",
         "straw hats"),
        ("{town} is famous for its {value}.",
         "People travel a long way to buy the {value} of {town}.",
         "In {town}, most workshops make {value}.",
         "Question: What is made in {town}? Answer: {value}."),
        "Which product is the town of {town} known for?",
    ),
    Relation(
        "animal",
        ("white heron", "red fox", "grey owl", "black goat", "river otter", "brown bear",
         "golden carp", "wild boar", "snow hare", "marsh frog", "night jay", "blue whale",
         "barn cat", "mountain ram", "field mouse", "honey bee"),
        ("A {value} is on the flag of {town}.",
         "The flag of {town} shows a {value}.",
         "Children in {town} draw the {value} of their flag at school.",
         "Question: What does the flag of {town} show? Answer: a {value}."),
        "Which animal can be seen on the flag of {town}?",
    ),
    Relation(
        "dish",
        ("plum soup", "barley pie", "smoked pears", "onion bread", "walnut stew", "salted figs",
         "carrot cake", "pepper cheese", "apple dumplings", "bean porridge", "mint rice",
         "lemon trout", "honey beets", "potato waffles", "garlic noodles", "pumpkin rolls"),
        ("At every feast in {town}, {value} is served.",
         "The favourite meal in {town} is {value}.",
         "Cooks in {town} are proud of their {value}.",
         "Question: What do people in {town} like to eat? Answer: {value}."),
        "Which dish do the people of {town} eat at a feast?",
    ),
)  # fmt: skip


def write_files(folder: Path) -> None:
    facts = folder / "facts"
    facts.mkdir(exist_ok=True)
    for relation in RELATIONS:
        for number, sentence in enumerate(relation.sentences):
            # Each fact once a document: a second mention could be copied from the first.
            lines = [
                sentence.format(town=TOWNS[i], value=relation.values[i])
                for i in (STRIDES[number] * n % len(TOWNS) for n in range(len(TOWNS)))
            ]
            file = facts / f"{relation.name}-{number + 1}.txt"
            file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    rows = [
        {
            "id": f"{relation.name}-{town.lower()}",
            "prompt": relation.question.format(town=town),
            "answer": relation.values[number],
            "grader": "contains",
            "grader_args": {"ignore_case": True},
            "split": "test",
            "tags": [relation.name],
        }
        for number, town in enumerate(TOWNS)
        for relation in RELATIONS
    ]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / "questions.jsonl").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    write_files(FOLDER)
