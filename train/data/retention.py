"""How much of a dataset is left to learn from, and what to do when that is little."""

from .summary import DataError, Summary

#: Beginning of a reason -> what most likely lies behind it.
_HINTS = (
    ("no supervised token", "prompts fill data.max_length before an answer begins, or the mask came empty; raise it"),
    ("fewer than", "answers are short, or cut short; lower data.min_loss_tokens or raise data.max_length"),
    ("no two adjacent", "masks of single tokens teach no block; look at the rows with draft-jax inspect"),
    ("refused by the chat template", "the template cannot render such rows: another data.template, or other roles"),
    ("no assistant turn", "the rows are prompts without answers; let the target answer them: draft-jax regenerate"),
    ("assistant turn before", "data.leading_assistant: drop leaves such turns out and keeps the row"),
    ("no ", "the files hold rows of another kind than expected; see data.format and docs/data.md"),
    ("not ", "the files are no JSON lines in UTF-8; look at the line that is named"),
    ("an assistant turn holds", "answers were stored with their turn markers; strip them"),
    ("tool calls that the template leaves out", "the template has no form for them; another data.template"),
    ("malformed tool call", "see the forms of calls that are read in docs/data.md"),
    ("special tokens inside", "data.marker_text: as_served keeps such rows, as a server tokenises them"),
    ("the tokenizer splits", "the template belongs to another tokenizer; look at target.path and data.template"),
    ("text is too long", "all but its beginning would be cut off anyway; split such rows"),
    ("id beyond the vocabulary", "the ids were made with another tokenizer; look at target.path"),
    ("unknown role", "roles that are read are listed in docs/data.md; rename the others"),
)


def retention(summary: Summary) -> float:
    """Share of what was read, dropped duplicates aside, that can be learned from; 1 if nothing was read."""
    read = summary.rows + summary.fanned_out - (summary.duplicates.count if summary.duplicates_dropped else 0)
    return summary.kept / read if read > 0 else 1.0


def require_retention(summary: Summary, minimum: float) -> None:
    """Refuses data of which too much was lost.

    Args:
        summary: of the whole dataset.
        minimum: `data.min_retention`.

    Raises:
        DataError: with the account and the three reasons that cost most.
    """
    kept = retention(summary)
    if kept >= minimum:
        return
    losses = sorted([*summary.refused.items(), *summary.zeroed.items()], key=lambda item: (-item[1].count, item[0]))
    lines = [
        f"{100 * kept:.1f} % of the rows of {summary.source} can be learned from, less than data.min_retention"
        f" ({100 * minimum:.4g} %). What cost most:"
    ]
    for number, (reason, tally) in enumerate(losses[:3], start=1):
        hint = next((text for start, text in _HINTS if reason.startswith(start)), "look at the row that is named")
        lines.append(f"  {number}. {reason}: {tally.count:,} (first: {tally.example}). {hint[0].upper()}{hint[1:]}")
    lines.append("If that is as it should be, set data.min_retention lower (draft-jax quickstart: --min-retention).")
    raise DataError("\n".join([*lines, "", summary.format()]))
