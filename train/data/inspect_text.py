"""Inspected records as text for a terminal: supervised tokens coloured, or between brackets without colours."""

from collections.abc import Iterable

from .inspection import RecordView, SampleView, ServedTurn, TokenView

# Characters that move a cursor or colour a terminal, or that a page would swallow, are shown by their pictures.
_CONTROLS = {code: 0x2400 + code for code in range(32) if chr(code) not in "\t\n"} | {127: 0x2421}
_GREEN, _GREY, _OFF = "\x1b[42;30m", "\x1b[90m", "\x1b[0m"


def record_text(record: RecordView, colour: bool) -> str:
    """One record: its training rows, then what a server would send."""
    lines = [f"== {record.place}"]
    if record.refused:
        return "\n".join([*lines, f"   refused: {visible(record.refused)}"])
    for number, sample in enumerate(record.samples, start=1):
        lines += [f"-- row {number} of {len(record.samples)}: {describe(sample)}", tokens_text(sample.tokens, colour)]
    for turn in record.served:
        lines += [f"-- answer {turn.turn}: {verdict(turn, len(record.samples))}"]
        if turn.prompt:
            lines += [f"   a server sends {turn.prompt_tokens} tokens, ending in {turn.prompt[-60:]!r}"]
    return "\n".join(lines)


def visible(text: str) -> str:
    """Text of the data with its control characters, other than tab and newline, as ␀ to ␡."""
    return text.translate(_CONTROLS)


def verdict(turn: ServedTurn, rows: int) -> str:
    """The verdict on a turn, with the row where there are several."""
    return turn.verdict + (f" (row {turn.row + 1})" if turn.row is not None and rows > 1 else "")


def describe(sample: SampleView) -> str:
    """Numbers of a training row in one line."""
    ids, mask = sample.judged.sample.input_ids, sample.judged.sample.loss_mask
    text = f"{visible(sample.id)}, {len(ids):,} tokens, {int(mask.sum()):,} supervised"
    if sample.judged.truncated:
        text += f", cut from {sample.length:,}"
    if sample.judged.zeroed:
        text += f", mask zeroed: {sample.judged.zeroed}"
    return "".join([text, *(f"; {name}: {count}" for name, count in sample.notes.items())])


def tokens_text(tokens: Iterable[TokenView], colour: bool) -> str:
    """The tokens as one text. With colours: supervised on green, special tokens grey. Without: supervised between
    ⟦ and ⟧."""
    parts, inside = [], False
    for token in tokens:
        text = visible(token.text)
        if colour:
            style = _GREEN if token.supervised else _GREY if token.special else ""
            shown = text.replace("\n", f"⏎{_OFF if style else ''}\n{style}")
            parts.append(f"{style}{shown}{_OFF}" if style else shown)
            continue
        if token.supervised != inside:
            parts.append("⟦" if token.supervised else "⟧")
            inside = token.supervised
        parts.append(text)
    return "".join(parts) + ("⟧" if inside else "")
