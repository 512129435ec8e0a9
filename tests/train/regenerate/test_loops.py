"""The loop rule, on shares counted by hand and on texts."""

import random

import pytest

from train.regenerate.config import LoopRule
from train.regenerate.loops import is_loop, repeated_share


def test_share_by_hand():
    rule = LoopRule(ngram=2, count=2, share=0.5)
    # pieces: ab bc ca ab bd; only ab occurs twice: words 0, 1, 3, 4 of 6
    assert repeated_share(["a", "b", "c", "a", "b", "d"], rule) == pytest.approx(4 / 6)
    assert repeated_share(["a", "a", "a"], rule) == 1.0  # overlapping pieces cover a word once
    assert repeated_share(["a", "b", "c", "d"], rule) == 0.0
    assert repeated_share([], rule) == 0.0


def words(number: int, seed: int = 0) -> str:
    draw = random.Random(seed)
    return " ".join(f"w{draw.randrange(5000)}" for _ in range(number))


@pytest.mark.parametrize(
    ("text", "loop"),
    [
        ("", False),
        ("I am. " * 3, False),
        ("I am. " * 40, True),
        (words(3000), False),
        (words(3000) + " and again and again" * 40, True),  # a short circle at the end of a long answer
        (words(100) + (" " + words(400, 1)) * 5, True),  # a long circle
        ("我们认为这个问题很重要。" * 20, True),
        ("\n".join(f"| {n} | {n * n} | {n * 7 + 3} |" for n in range(200)), False),  # a table
        ("for i in range(3):\n    print(i)\n" * 3 + words(60), False),  # said three times, then on
        ("E." * 200, True),
    ],
)
def test_texts(text, loop):
    assert is_loop(text, LoopRule()) is loop


def test_a_stricter_rule_finds_less():
    text = words(60) + " over and over and over again, my friend" * 6
    assert is_loop(text, LoopRule(share=0.3))
    assert not is_loop(text, LoopRule(share=0.95))
    assert not is_loop(text, LoopRule(count=10))
