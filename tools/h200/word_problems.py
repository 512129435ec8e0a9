"""Grade-school word problems in the form of gsm8k, for a machine without network: word_problems.py COUNT > FILE.jsonl

Templates of this project (Apache-2.0) with names and numbers drawn from a fixed seed: the same COUNT problems every
time, a prefix of every larger set. They measure speed and drafts' acceptance, not a model's arithmetic.
"""

from __future__ import annotations

import json
import random
import sys

NAMES = (
    "Amara", "Ben", "Carla", "Diego", "Elena", "Farid", "Grace", "Hana", "Ivan", "Julia", "Kofi", "Lena", "Marco",
    "Nadia", "Omar", "Priya", "Quinn", "Rosa", "Samuel", "Tara", "Uma", "Viktor", "Wanda", "Xavier", "Yusuf", "Zoe",
)  # fmt: skip
THINGS = (
    "apples", "pencils", "marbles", "stickers", "cookies", "books", "tickets", "shells", "cards", "balloons", "muffins",
    "stamps",
)  # fmt: skip
PLACES = ("market", "school fair", "library", "farm", "bakery", "toy shop", "garden centre", "museum")

TEMPLATES = (
    "{A} has {a} {thing}. {B} gives {A} {b} more, and then {A} gives away {c} of them at the {place}. How many {thing} "
    "does {A} have left?",
    "At the {place}, {thing} cost ${d} each. {A} buys {e} of them and pays with a ${big} bill. How much change does "
    "{A} get back?",
    "{A} reads {e} pages every day and {B} reads {d} pages more than {A} every day. How many pages do they read "
    "together in {f} days?",
    "A box holds {e} {thing}. The {place} orders {a} boxes on Monday and {b} boxes on Tuesday, and sells {c} {thing}. "
    "How many {thing} are left?",
    "{A} earns ${e} an hour and works {f} hours a day for {d} days. {A} spends ${c} of it on {thing}. How much money "
    "is left?",
    "{A} bakes {f} trays of {e} {thing} each. {B} eats {d} of them and the rest are shared equally by {d} friends. How "
    "many does each friend get, and how many are left over?",
    "A train leaves with {big} passengers. At the first stop {a} get off and {b} get on; at the second stop twice as "
    "many get off as got on before. How many passengers are on the train now?",
    "{A} is {a} years old. {B} is {d} years younger than twice {A}'s age. How old will {B} be in {f} years?",
    "The {place} is {a} kilometres from {A}'s house. {A} cycles there and back {d} times a week. How many kilometres "
    "is that in {f} weeks?",
    "{A}, {B} and {C} collect {thing}. {A} has {a}, {B} has {d} times as many as {A}, and {C} has {c} fewer than {B}. "
    "How many {thing} do they have altogether?",
    "A tank holds {big} litres of water. It is filled at {e} litres a minute and leaks {d} litres a minute. {A} opens "
    "it for {f} minutes. How many more litres are needed to fill it?",
    "{A} saves ${e} every week. After {f} weeks {A} buys a present for {B} that costs ${c}, with a discount of 25 "
    "percent. How much money does {A} have then?",
    "A class of {a} pupils visits the {place}. Tickets cost ${d} for a pupil and twice as much for each of the {f} "
    "teachers. How much does the class pay in total?",
    "{A} plants {f} rows of {e} flowers. One fifth of all the flowers do not grow, and {B} picks {d} of the others. "
    "How many flowers are left in the garden?",
    "{A} runs {d} laps of {big} metres on Monday and half as far on Wednesday. How many metres does {A} run in both "
    "days together?",
    "There are {a} red, {b} blue and {c} green {thing} in a bag. {A} takes out half of the red ones and all of the "
    "green ones. What fraction of the {thing} that remain are blue?",
)
ASKED = "{question}\nPlease reason step by step, and put your final answer within \\boxed{{}}."


def problem(number: int) -> str:
    """The text of problem `number`, by itself."""
    random_ = random.Random(f"word problem {number}")
    first, second, third = random_.sample(NAMES, 3)
    low = random_.randint(3, 20)
    question = TEMPLATES[number % len(TEMPLATES)].format(
        A=first, B=second, C=third, thing=random_.choice(THINGS), place=random_.choice(PLACES),
        a=random_.randint(21, 60), b=random_.randint(5, 40), c=low, d=random_.randint(2, 9), e=random_.randint(10, 30),
        f=random_.randint(2, 8), big=random_.choice((200, 300, 400, 500)),
    )  # fmt: skip
    return ASKED.format(question=question)


def main(count: int) -> None:
    """Prints them, one JSON object a line."""
    for number in range(count):
        print(json.dumps({"id": f"word-problem-{number}", "task": "word-problems", "turns": [problem(number)]}))


if __name__ == "__main__":
    main(int(sys.argv[1]))
