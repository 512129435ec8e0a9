"""Does a text run in circles?

A model that loops says the same piece over and over until it is cut. The rule: among the last words of the text, the
pieces of `ngram` words that occur at least `count` times cover at least `share` of the words. It is asked of the last
128, 512, 2048 and 8192 words, so that short circles at the end of a long answer are seen as well as long ones. A circle
longer than 8192 / count words escapes, and so does one the model left again.
"""

from __future__ import annotations

import re
from collections import Counter

from .config import LoopRule

_WINDOWS = (128, 512, 2048, 8192)
# Scripts written without blanks (Thai, kana, CJK) are taken character by character, everything else word by word.
_UNSPACED = "\u0e00-\u0e7f\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff"
_WORDS = re.compile(f"[{_UNSPACED}]|[^\\W{_UNSPACED}]+|[^\\w\\s]")


def is_loop(text: str, rule: LoopRule) -> bool:
    """Whether a text repeats itself at its end by the rule above."""
    words = _WORDS.findall(text)
    for window in _WINDOWS:
        last = words[-window:]
        if len(last) < rule.ngram * rule.count:  # `count` pieces side by side do not fit
            return False
        if repeated_share(last, rule) >= rule.share:
            return True
        if len(last) < window:
            return False
    return False


def repeated_share(words: list[str], rule: LoopRule) -> float:
    """The share of words that lie in a piece occurring at least `count` times."""
    starts = range(len(words) - rule.ngram + 1)
    pieces = [tuple(words[i : i + rule.ngram]) for i in starts]
    often = Counter(pieces)
    covered, end = 0, 0
    for start, piece in zip(starts, pieces):
        if often[piece] >= rule.count:
            covered += start + rule.ngram - max(start, end)
            end = start + rule.ngram
    return covered / len(words) if words else 0.0
