"""One prompt as it was decoded: its rounds, its tokens, its time."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

from train.evaluate.accounting import Round

TokenKind = Literal["first", "draft", "target"]


@dataclass
class Seconds:
    """Wall-clock seconds of one decoding, compilation and warm-up excluded.

    Prompts are decoded side by side: each is charged an equal share of every step it took part in, so that the sum
    over prompts is the time that passed.

    `prefill` is the target on the prompt and the draft's context of it; `draft` and `target` are the rounds;
    `other` is everything else in the loop (sampling, bookkeeping, transfers).
    """

    prefill: float = 0.0
    draft: float = 0.0
    target: float = 0.0
    total: float = 0.0

    @property
    def other(self) -> float:
        return max(0.0, self.total - self.prefill - self.draft - self.target)

    def add(self, more: Seconds) -> None:
        self.prefill += more.prefill
        self.draft += more.draft
        self.target += more.target
        self.total += more.total

    def to_json(self) -> dict[str, float]:
        return {name: round(value, 6) for name, value in {**asdict(self), "other": self.other}.items()}


@dataclass
class SampleResult:
    """One prompt decoded with the draft (and, when asked, without).

    Attributes:
        prompt: the prompt's id.
        prompt_tokens: its length.
        first_token: sampled from the prefill; part of the output, of no round.
        rounds: settled rounds, in order.
        finish: "eos" or "length".
        seconds: of decoding with the draft.
        plain_tokens: output of plain decoding, None when not asked for.
        plain_seconds: of plain decoding.
        task: name of the task the prompt belongs to.
        text: the prompt's last message, for reports.
        max_new_tokens: what it was allowed; the output ends there, whatever the last round committed.
    """

    prompt: str
    prompt_tokens: int
    first_token: int
    rounds: list[Round]
    finish: str
    seconds: Seconds
    plain_tokens: list[int] | None = None
    plain_seconds: Seconds | None = None
    task: str = ""
    text: str = ""
    max_new_tokens: int | None = None

    @property
    def output_tokens(self) -> list[int]:
        """All generated ids, the first token included."""
        tokens = [self.first_token, *(token for item in self.rounds for token in item.tokens)]
        return tokens[: self.max_new_tokens]

    @property
    def token_kinds(self) -> list[TokenKind]:
        """For each output token: the prefill's first one, an accepted draft, or the target's own."""
        kinds: list[TokenKind] = ["first"]
        for item in self.rounds:
            kinds.extend("draft" for _ in range(item.accepted))
            kinds.extend("target" for _ in range(item.length - item.accepted))
        return kinds[: self.max_new_tokens]

    def pieces(self, tokenizer) -> list[dict[str, str]]:
        """The output as readable pieces `{"text", "kind"}` for a report.

        Text is cut where the decoded prefix grows, so a character made of several tokens appears once, with
        the token that completes it.
        """
        pieces: list[dict[str, str]] = []
        ids: list[int] = []
        shown = ""
        for token, kind in zip(self.output_tokens, self.token_kinds):
            ids.append(token)
            text = tokenizer.decode(ids)
            if text.endswith("�"):  # an incomplete character: wait for the token that completes it
                continue
            pieces.append({"text": text[len(shown) :], "kind": kind})
            shown = text
        if ids and text != shown:
            pieces.append({"text": text[len(shown) :], "kind": kind})
        return pieces

    def to_json(self) -> dict[str, Any]:
        return {
            "prompt": self.prompt,
            "task": self.task,
            "text": self.text,
            "prompt_tokens": self.prompt_tokens,
            "finish": self.finish,
            "output_tokens": self.output_tokens,
            "rounds": [_round_json(item) for item in self.rounds],
            "seconds": self.seconds.to_json(),
            "plain_tokens": self.plain_tokens,
            "plain_seconds": self.plain_seconds.to_json() if self.plain_seconds else None,
        }


def _round_json(item: Round) -> dict[str, Any]:
    record: dict[str, Any] = {"proposed": item.proposed, "accepted": item.accepted, "committed": item.length}
    if item.drafts:
        record["drafts"] = list(item.drafts)
    if item.confidence_logits is not None:
        record["confidence_logits"] = [round(float(value), 6) for value in item.confidence_logits]
    return record
