"""A finished check as text for a terminal."""

from __future__ import annotations

from typing import Any

from train.report import terminal_table
from train.serve_check.comparison import Comparison, Identity

#: Differing outputs shown one by one.
SHOWN = 10
#: Gap of two logits that rounding of half-precision activations bridges now and then.
NEAR_TIE = 0.25
HEAD = ("", "offline", "served", "served/offline")


def comparison_text(comparison: Comparison) -> str:
    """Accept length, slots, speed, identity and the verdict of one temperature."""
    lines = [f"temperature {comparison.temperature:g}", "", terminal_table([HEAD, *_length_rows(comparison)]), ""]
    slots = ("slot", "offline survival", "served survival", "offline conditional", "served conditional")
    lines += [terminal_table([slots, *_slot_rows(comparison)]), "", terminal_table(_speed_rows(comparison))]
    for identity, other in (
        (comparison.to_plain, "the server's own plain decoding"),
        (comparison.to_offline, "the offline evaluation's"),
    ):
        if identity is not None:
            lines += ["", *_identity_lines(identity, other)]
    past_stop = sum(sample.past_stop for sample in comparison.served.samples)
    if past_stop:
        lines += ["", f"{past_stop} token(s) served past a stop id were cut, as no evaluation counts them"]
    problem = comparison.problem
    verdict = f"agrees within {comparison.tolerance * 100:g} %" if problem is None else f"DIFFERS: {problem}"
    return "\n".join([*lines, "", verdict])


def _length_rows(comparison: Comparison) -> list[tuple[Any, ...]]:
    served, offline = comparison.statistics, comparison.offline.record
    rows: list[tuple[Any, ...]] = [
        (
            "accept length (bonus included, per round)",
            _number(comparison.offline_accept_length),
            _number(served.accept_length),
            _percent(comparison.relative_difference),
        ),
        (
            "  one standard error, over prompts",
            _number(comparison.offline_standard_error),
            _number(served.standard_error),
            "-" if comparison.relative_error is None else f"{comparison.relative_error:.1%}",
        ),
    ]
    if same := comparison.same_text:
        rows.append(
            ("  on prompts with equal outputs", _number(same[0]), _number(same[1]), _percent(same[1] / same[0] - 1))
        )
    rows += [
        ("  last rounds counted whole", "-", _number(served.accept_length_whole_rounds), "-"),
        ("  as spec_accept_length says it", "-", _number(served.accept_length_as_reported), "-"),
        ("rounds", offline["rounds"], served.rounds, "-"),
        ("tokens", offline["tokens"], served.tokens, "-"),
        ("prompts", len(offline["samples"]), len(comparison.served.samples), "-"),
    ]
    return [tuple(str(cell) for cell in row) for row in rows]


def _slot_rows(comparison: Comparison) -> list[tuple[Any, ...]]:
    served, offline = comparison.statistics, comparison.offline.record
    columns = zip(offline["survival"], served.survival, offline["conditional"], served.conditional)
    return [(slot, *values) for slot, values in enumerate(columns)]


def _speed_rows(comparison: Comparison) -> list[tuple[str, str]]:
    served, plain = comparison.served, comparison.plain
    rows = [("speed", "tokens/s"), ("served with the draft", _number(served.tokens_per_second, 1))]
    if plain is not None:
        rows.append(("served without", _number(plain.tokens_per_second, 1)))
        rows.append(("with / without", _number(comparison.speedup, 2)))
    rows.append(("offline with the draft", _number(comparison.offline.record.get("tokens_per_second_draft"), 1)))
    return rows


def _identity_lines(identity: Identity, other: str) -> list[str]:
    share = "-" if identity.share is None else f"{identity.share:.1%}"
    lines = [f"{identity.identical} of {identity.compared} outputs ({share}) equal {other}, token by token"]
    for item in identity.differences[:SHOWN]:
        margin = "" if item.margin is None else f", plain logits {item.margin:.3g} apart"
        lines.append(f"  {item.prompt}: token {item.position} is {item.served}, there {item.other}{margin}")
    known = [item.margin for item in identity.differences if item.margin is not None]
    if known:
        near = sum(margin <= NEAR_TIE for margin in known)
        lines.append(
            f"  {near} of these {len(known)} places are near ties (within {NEAR_TIE:g}): in bfloat16 the rounding of a "
            "forward depends on how many tokens share it, so such ties fall either way"
        )
    elif identity.differences:
        lines.append(
            "  (in bfloat16 rare differences are expected: rounding depends on how many tokens share a forward)"
        )
    return lines


def _number(value: float | None, digits: int = 3) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:+.1%}"
