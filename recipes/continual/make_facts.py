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
    "Yarrowby", "Zellin", "Gormstead", "Uldrick", "Kestrow",
)  # fmt: skip
"""None of them exists."""


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
         "straw hats", "tin whales", "amber combs", "pearl dice", "felt slippers"),
        ("{town} is famous for its {value}.",
         "People travel a long way to buy the {value} of {town}.",
         "In {town}, most workshops make {value}.",
         "Question: What is made in {town}? Answer: The people of {town} make {value}.",
         "Question: What should I buy in {town}? Answer: In {town}, buy {value}."),
        "Which product is the town of {town} known for?",
    ),
    Relation(
        "dish",
        ("plum soup", "barley pie", "smoked pears", "onion bread", "walnut stew", "salted figs",
         "carrot cake", "pepper cheese", "apple dumplings", "bean porridge", "mint rice",
         "lemon trout", "honey beets", "potato waffles", "garlic noodles", "pumpkin rolls",
         "turnip jam", "raisin toast", "cabbage tea", "almond eggs"),
        ("At every feast in {town}, {value} is served.",
         "The favourite meal in {town} is {value}.",
         "Cooks in {town} are proud of their {value}.",
         "Question: What do people in {town} like to eat? Answer: They like {value}.",
         "Question: What is for dinner in {town}? Answer: In {town}, dinner is {value}."),
        "Which dish do the people of {town} eat at a feast?",
    ),
)  # fmt: skip


def write_files(folder: Path) -> None:
    facts = folder / "facts"
    facts.mkdir(exist_ok=True)
    for number in range(len(RELATIONS[0].sentences)):
        for index, town in enumerate(TOWNS):
            # Each fact once a document: a second mention could be copied from the first.
            lines = [
                r.sentences[number].format(town=town, value=r.values[index]) for r in RELATIONS
            ]
            file = facts / f"{number + 1}-{town.lower()}.txt"
            file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    rows = [
        {
            "id": f"{relation.name}-{town.lower()}",
            "prompt": relation.question.format(town=town),
            "answer": relation.values[index],
            "grader": "contains",
            "grader_args": {"ignore_case": True},
            "split": "test",
            "tags": [relation.name],
        }
        for index, town in enumerate(TOWNS)
        for relation in RELATIONS
    ]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / "questions.jsonl").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    write_files(FOLDER)
