"""What to train on, and how rows are read."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class DataConfig:
    """The training conversations.

    Attributes:
        path: a .jsonl or .jsonl.gz file, or a folder of them (searched in depth, read in sorted order).
        format: of a row. auto = by its keys: `messages` (OpenAI), `conversations` (ShareGPT), `input_ids`
            (ids with their mask). A named format refuses rows of another one.
        template: how a conversation becomes text. auto = the tokenizer's own template if it marks what the
            assistant generates, else the shipped template that renders the same text; chatml, smollm2, qwen3
            = that one; anything else is the path of a jinja file with {% generation %} marks.
        verify_template: compare every row with the tokenizer's own template and stop at the first difference.
            Switch it off only when the draft will be served with another template than the tokenizer's.
        enable_thinking: handed to the template; None leaves it undefined, as a server does unless asked.
        max_length: tokens kept of a conversation in training; longer ones are cut at the end and counted.
            Says nothing about the lengths the draft can serve.
        min_loss_tokens: a sample with fewer supervised tokens keeps its place with an all-zero mask.
        leading_assistant: what to do with assistant and tool turns before the first user turn: drop them
            (counted) or refuse the row.
        limit: read at most this many rows, from the start; None = all.
        shuffle: a new order every epoch; False = the order of the files.
        seed: of that order.
    """

    path: str
    format: Literal["auto", "messages", "sharegpt", "tokens"] = "auto"
    template: str = "auto"
    verify_template: bool = True
    enable_thinking: bool | None = None
    max_length: int = 4096
    min_loss_tokens: int = 14
    leading_assistant: Literal["drop", "refuse"] = "drop"
    limit: int | None = None
    shuffle: bool = True
    seed: int = 0

    def __post_init__(self):
        def require(condition: bool, name: str, remedy: str) -> None:
            if not condition:
                raise ValueError(f"data.{name} is {getattr(self, name)!r}; {remedy}")

        require(bool(self.path), "path", "give a .jsonl or .jsonl.gz file or a folder of them")
        formats = ("auto", "messages", "sharegpt", "tokens")
        require(self.format in formats, "format", f"give one of {', '.join(formats)}")
        require(
            bool(self.template),
            "template",
            "give auto, a shipped template's name or the path of a jinja file",
        )
        require(self.max_length >= 2, "max_length", "give at least 2: an anchor and one label")
        require(self.min_loss_tokens >= 1, "min_loss_tokens", "give at least 1")
        require(self.leading_assistant in ("drop", "refuse"), "leading_assistant", "give drop or refuse")
        require(self.limit is None or self.limit >= 1, "limit", "give at least 1, or leave it out for all rows")
        require(0 <= self.seed < 2**32, "seed", "give a number from 0 to 2**32 - 1")
