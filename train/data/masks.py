"""Which tokens the assistant generates: from marked character spans to a mask over tokens.

The rule is 1 on every token the model writes itself, its end-of-turn token included; 0 on headers, on what
the generation prompt writes for it (an opening think tag, an empty think block) and on what the template
writes after the turn. Positions come from the template's marks and the tokenizer's offsets, never from
searching the text, so whatever stands inside a message cannot move them.
"""

from collections.abc import Sequence

import numpy as np

Span = tuple[int, int]


def without_generation_prompt(text: str, spans: Sequence[Span], generation_prompt: str) -> list[Span]:
    """Moves the start of each span past the part of the generation prompt that lies inside it.

    A template marks from one fixed place, say after the header. Whether a think tag behind it is written by
    the model or for it depends on the generation prompt in use, so that decides, not the tag itself.

    Args:
        text: of the conversation.
        spans: what the template marked, [start, end) in characters.
        generation_prompt: what a server writes to begin a turn.
    """
    moved = []
    for start, end in spans:
        # the longest part of the prompt before the mark such that the rest of it follows
        for before in range(min(len(generation_prompt), start), -1, -1):
            inside = generation_prompt[before:]
            if text.startswith(inside, start) and text.endswith(generation_prompt[:before], 0, start):
                start = min(start + len(inside), end)
                break
        moved.append((start, end))
    return moved


def token_mask(offsets: np.ndarray, spans: Sequence[Span]) -> tuple[np.ndarray, int]:
    """The mask over tokens.

    A token counts only if all of its text lies in one span. One that the header and the answer share (the
    newline of the header merged with a newline the answer begins with) is never produced in serving, where
    the header arrives as tokens of its own; it gets 0 and is counted.

    Args:
        offsets: int [T, 2]: characters of each token. A token without width (a blank that the tokenizer
            trimmed) stands for the characters before its place.
        spans: [start, end), in order, disjoint.

    Returns:
        mask int8 [T], and the number of tokens that straddle an edge of a span.
    """
    first, last = offsets[:, 0], offsets[:, 1]
    flat = first == last
    mask = np.zeros(len(offsets), np.int8)
    straddling = 0
    for start, end in spans:
        inside = np.where(flat, (first > start) & (last <= end), (first >= start) & (last <= end))
        touching = ~flat & (first < end) & (last > start)
        mask[inside] = 1
        straddling += int(np.count_nonzero(touching & ~inside))
    return mask, straddling


def has_adjacent_pair(mask: np.ndarray) -> bool:
    """Whether two neighbours are supervised: what an anchor and its first label need (dspark_spec 2.1)."""
    return bool(np.any(mask[1:] & mask[:-1]))
