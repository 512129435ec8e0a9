"""What to train on, and how rows are read."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Literal

from .families import FAMILIES

#: What a template's `strftime_now` gives unless told otherwise.
DEFAULT_DATE = "2026-01-01"
# What rows and the other options decide.
_RESERVED = {"messages", "tools", "documents", "add_generation_prompt", "enable_thinking", "thinking", "date"}


@dataclass(frozen=True)
class DataConfig:
    """The training conversations.

    Attributes:
        path: a .jsonl, .jsonl.gz or .parquet file, a folder of them (searched in depth, read in sorted order), or
            hf://NAME for what the datasets library loads, streamed: hf://owner/name, with ?split=train (the default),
            &name=CONFIG and &revision=COMMIT behind it where needed; or a folder made by draft-jax prepare.
        format: of a row. auto = by its keys: `messages` (OpenAI), `conversations` (ShareGPT), `input_ids`
            (ids with their mask), `text` (plain text). A named format refuses rows of another one.
        template: how a conversation becomes text. auto = the tokenizer's own template if it marks what the
            assistant generates, else the shipped template that renders the same text, else the tokenizer's own with
            turns told by its special tokens; own = the tokenizer's own in any case; chatml, smollm2, qwen2.5, qwen3,
            llama3, gemma3 = that one; anything else is the path of a jinja file with {% generation %} marks.
        markers: the family whose special tokens tell the turns of a template without marks: chatml, llama3, llama4,
            gemma, gemma4, glm, deepseek, harmony, kimi-k2, minimax-m2, inkling. auto = found from the tokenizer.
        verify_template: compare every row with the tokenizer's own template and stop at the first difference.
            Switch it off only when the draft will be served with another template than the tokenizer's.
        enable_thinking: handed to the template (as `thinking` too); None leaves it undefined, as a server does
            unless asked.
        template_options: further variables for the template, as a server's chat_template_kwargs: reasoning_effort,
            clear_thinking and what else it reads.
        date: YYYY-MM-DD, what a template that writes today's date is told; a date that moved would change the data
            of a run that is resumed.
        history: what becomes of earlier turns that the template rewrites once they are history (reasoning removed, an
            end token changed). fan_out = such a turn gets a row of its own that ends with it, as it was served;
            one_row = it is left unsupervised; last_turn = only the last turn of a conversation is supervised;
            as_rendered = every turn is supervised in the form it has in the whole conversation, served so or not.
        marker_text: rows with the text of a special token inside a user, system or tool message. as_served = the
            tokenizer makes a token of it, as it does in a server; refuse = the row is left out. Neither moves a mask.
        max_length: tokens kept of a conversation in training; longer ones are cut at the end and counted.
            Says nothing about the lengths the draft can serve.
        packing: none = one conversation a row; first_fit = as many as fit, see row_length (docs/data.md, "Packing").
        row_length: tokens of a packed row; None = max_length.
        min_loss_tokens: a sample with fewer supervised tokens keeps its place with an all-zero mask.
        duplicates: samples with the same ids and mask as an earlier one: keep them (counted) or drop them.
        sample_share: read about this share of the rows, chosen by content: the same rows in whatever files, order and
            process they come.
        sample_seed: another choice of rows for another seed.
        min_retention: least share of the rows read, dropped duplicates aside, that must be left to learn from; below
            it the run stops and says what cost most.
        prepared: folder in which draft-jax prepare leaves its results and training looks for one that fits.
        leading_assistant: what to do with assistant and tool turns before the first user turn: drop them
            (counted) or refuse the row.
        limit: read at most this many rows, from the start; None = all.
        shuffle: a new order every epoch; False = the order of the files.
        seed: of that order, and of which conversations are packed together.
    """

    path: str
    format: Literal["auto", "messages", "sharegpt", "tokens", "text"] = "auto"
    template: str = "auto"
    markers: str = "auto"
    verify_template: bool = True
    enable_thinking: bool | None = None
    template_options: Mapping[str, Any] = field(default_factory=dict)
    date: str = DEFAULT_DATE
    history: Literal["fan_out", "one_row", "last_turn", "as_rendered"] = "fan_out"
    marker_text: Literal["as_served", "refuse"] = "as_served"
    max_length: int = 4096
    packing: Literal["none", "first_fit"] = "none"
    row_length: int | None = None
    min_loss_tokens: int = 14
    duplicates: Literal["keep", "drop"] = "keep"
    sample_share: float = 1.0
    sample_seed: int = 0
    min_retention: float = 0.9
    prepared: str = "prepared"
    leading_assistant: Literal["drop", "refuse"] = "drop"
    limit: int | None = None
    shuffle: bool = True
    seed: int = 0

    def __post_init__(self):
        def require(condition: bool, name: str, remedy: str) -> None:
            if not condition:
                raise ValueError(f"data.{name} is {getattr(self, name)!r}; {remedy}")

        require(bool(self.path), "path", "give a .jsonl, .jsonl.gz or .parquet file, a folder of them or hf://NAME")
        formats = ("auto", "messages", "sharegpt", "tokens", "text")
        require(self.format in formats, "format", f"give one of {', '.join(formats)}")
        require(
            bool(self.template),
            "template",
            "give auto, own, a shipped template's name or the path of a jinja file",
        )
        markers = ("auto", *FAMILIES)
        require(self.markers in markers, "markers", f"give one of {', '.join(markers)}")
        histories = ("fan_out", "one_row", "last_turn", "as_rendered")
        require(self.history in histories, "history", f"give one of {', '.join(histories)}")
        require(self.marker_text in ("as_served", "refuse"), "marker_text", "give as_served or refuse")
        taken = ", ".join(sorted(_RESERVED & set(self.template_options)))
        require(not taken, "template_options", f"{taken} cannot be set here: rows or other options of data decide it")
        try:
            datetime.fromisoformat(self.date)
        except (TypeError, ValueError):
            require(False, "date", "give a day as YYYY-MM-DD")
        require(self.max_length >= 2, "max_length", "give at least 2: an anchor and one label")
        require(self.packing in ("none", "first_fit"), "packing", "give none or first_fit")
        if self.row_length is not None:
            require(self.packing != "none", "row_length", "it has no effect without data.packing: first_fit")
            require(
                self.row_length >= self.max_length,
                "row_length",
                f"a row must hold the longest conversation: give at least data.max_length ({self.max_length})",
            )
        require(self.min_loss_tokens >= 1, "min_loss_tokens", "give at least 1")
        require(self.duplicates in ("keep", "drop"), "duplicates", "give keep or drop")
        require(0 < self.sample_share <= 1, "sample_share", "give a share above 0, up to 1")
        require(0 <= self.sample_seed < 2**32, "sample_seed", "give a number from 0 to 2**32 - 1")
        require(0 <= self.min_retention <= 1, "min_retention", "give a share from 0 to 1")
        require(bool(self.prepared), "prepared", "give the name of a folder")
        require(self.leading_assistant in ("drop", "refuse"), "leading_assistant", "give drop or refuse")
        require(self.limit is None or self.limit >= 1, "limit", "give at least 1, or leave it out for all rows")
        require(0 <= self.seed < 2**32, "seed", "give a number from 0 to 2**32 - 1")

    @property
    def row_tokens(self) -> int:
        """L: tokens of a row of a batch."""
        return self.max_length if self.row_length is None else self.row_length
