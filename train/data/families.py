"""How the model families mark turns: which special tokens open, end and interrupt what the model writes.

Each entry is what a reader of token ids needs to tell the model's own tokens from everything else, whatever the rest
of the template looks like. It is used where a tokenizer's own template carries no generation marks.
"""

# ruff: noqa: RUF001 (DeepSeek's markers are written with fullwidth bars)
import re
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class Family:
    """The turn markers of one family.

    Attributes:
        name: as in `data.markers`.
        opens: pattern of the header that a server writes to make the model begin a turn.
        ends: tokens the model writes to end its turn.
        borrowed: markers of the turn that comes next which the model writes itself to stop, so they count as its own.
        closes: markers of other turns that end a turn without being written by the model.
        resumes: tokens after which the model goes on with no header of its own (the end of a tool result).
        reopens: pattern that, right behind an ending token, shows that the model itself went on with another message.
        continues: the model may write its own header again inside a turn.
        think: (opening, closing) texts the model writes around its reasoning; used where the template cannot render
            the reasoning of the answer that is being served. The one whose opening the prompt ends with is taken.
        think_if_opened: take it only there; models of one family write it in several forms otherwise.
        stop, stop_after_calls: token to append where a conversation ends without the stop token the model wrote.
    """

    name: str
    opens: str
    ends: tuple[str, ...]
    borrowed: tuple[str, ...] = ()
    closes: tuple[str, ...] = ()
    resumes: tuple[str, ...] = ()
    reopens: str = ""
    continues: bool = False
    think: tuple[tuple[str, str], ...] = ()
    think_if_opened: bool = False
    stop: str = ""
    stop_after_calls: str = ""
    #: Tokens a tokenizer must have for this family to be considered.
    needs: tuple[str, ...] = ()

    @cached_property
    def tokens(self) -> tuple[str, ...]:
        """Every special token that the reading of turns depends on."""
        return tuple(dict.fromkeys((*self.needs, *self.ends, *self.borrowed, *self.closes, *self.resumes)))

    @cached_property
    def scanner(self) -> re.Pattern[str]:
        """Finds the next marker; the name of the group is its kind."""
        kinds = [("open", self.opens)]
        for kind, tokens in (
            ("end", self.ends),
            ("borrowed", self.borrowed),
            ("resume", self.resumes),
            ("close", self.closes),
        ):
            if tokens:
                kinds.append((kind, "|".join(map(re.escape, tokens))))
        return re.compile("|".join(f"(?P<{kind}>{pattern})" for kind, pattern in kinds))


_THINK = ("<think>", "</think>")
_THINK_LINES = ("<think>\n", "\n</think>\n\n")

_ALL = (
    Family(
        "chatml",
        opens=r"<\|im_start\|>assistant\n",
        ends=("<|im_end|>",),
        closes=("<|im_start|>",),
        think=(_THINK_LINES,),
        think_if_opened=True,
        needs=("<|im_start|>", "<|im_end|>"),
    ),
    Family(
        "llama3",
        opens=r"<\|start_header_id\|>assistant<\|end_header_id\|>\n\n",
        ends=("<|eot_id|>", "<|eom_id|>"),
        closes=("<|start_header_id|>",),
        needs=("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    ),
    Family(
        "llama4",
        opens=r"<\|header_start\|>assistant<\|header_end\|>\n\n",
        ends=("<|eot|>", "<|eom|>"),
        closes=("<|header_start|>",),
        needs=("<|header_start|>", "<|header_end|>", "<|eot|>"),
    ),
    Family(
        "gemma",
        opens=r"<start_of_turn>model\n",
        ends=("<end_of_turn>",),
        closes=("<start_of_turn>",),
        needs=("<start_of_turn>", "<end_of_turn>"),
    ),
    Family(
        # A model that calls tools stops by opening the tool's response itself; the response stands inside the
        # model's turn, which goes on behind it.
        "gemma4",
        opens=r"<\|turn>model\n",
        ends=("<turn|>",),
        borrowed=("<|tool_response>",),
        closes=("<|turn>",),
        resumes=("<tool_response|>",),
        think=(("<|channel>thought\n", "\n<channel|>"),),
        needs=("<|turn>", "<turn|>"),
    ),
    Family(
        # No token of its own ends a turn: the model writes the marker of whoever speaks next.
        "glm",
        opens=r"<\|assistant\|>",
        ends=("<|endoftext|>",),
        borrowed=("<|user|>", "<|observation|>"),
        closes=("<|system|>",),
        think=(_THINK,),
        stop="<|user|>",
        stop_after_calls="<|observation|>",
        needs=("<|assistant|>", "<|user|>", "<|observation|>"),
    ),
    Family(
        "deepseek",
        opens="<｜Assistant｜>",
        ends=("<｜end▁of▁sentence｜>",),
        closes=("<｜User｜>", "<｜tool▁outputs▁begin｜>", "<｜tool▁output▁begin｜>"),
        resumes=("<｜tool▁outputs▁end｜>", "<｜tool▁output▁end｜>"),
        think=(_THINK, _THINK_LINES),
        needs=("<｜Assistant｜>", "<｜User｜>", "<｜end▁of▁sentence｜>"),
    ),
    Family(
        # One answer is several messages: the model writes the header of the second one itself.
        "harmony",
        opens=r"<\|start\|>assistant",
        ends=("<|return|>", "<|call|>", "<|end|>"),
        closes=("<|start|>",),
        reopens=r"<\|start\|>assistant",
        needs=("<|start|>", "<|end|>", "<|return|>", "<|call|>"),
    ),
    Family(
        "kimi-k2",
        opens=r"<\|im_assistant\|>[^<]*<\|im_middle\|>",
        ends=("<|im_end|>",),
        closes=("<|im_user|>", "<|im_system|>", "<|im_assistant|>"),
        think=(_THINK,),
        needs=("<|im_assistant|>", "<|im_user|>", "<|im_middle|>", "<|im_end|>"),
    ),
    Family(
        "minimax-m2",
        opens=r"\]~b\]ai\n",
        ends=("[e~[",),
        closes=("]~b]",),
        needs=("]~b]", "[e~["),
    ),
    Family(
        # Reasoning and answer are messages of one turn; the header of the second is the model's own, and a turn may
        # be followed by the next one with no end token in between.
        "inkling",
        opens=r"<\|message_model\|>",
        ends=("<|content_model_end_sampling|>",),
        closes=("<|message_user|>", "<|message_tool|>", "<|message_system|>"),
        continues=True,
        stop="<|content_model_end_sampling|>",
        needs=("<|message_model|>", "<|message_user|>"),
    ),
)

FAMILIES: dict[str, Family] = {family.name: family for family in _ALL}


def header_end(family: Family, prompt: str) -> int | None:
    """Where the header of the turn that a prompt asks for ends; None if the prompt ends without asking for one."""
    markers = list(family.scanner.finditer(prompt))
    return markers[-1].end() if markers and markers[-1].lastgroup in ("open", "resume") else None


def turn_spans(family: Family, text: str) -> list[tuple[int, int]]:
    """Reads off the parts of a rendered conversation that lie in the model's turns.

    The text of messages must hold none of the family's tokens (see `FamilyTemplate`); what is left of them then are
    the tokens the template wrote.

    Args:
        family: whose markers.
        text: a rendered conversation.

    Returns:
        [start, end) in characters, in order, disjoint: from behind the header to the end of the stop token.
    """
    spans = []
    start, resumed, position = -1, False, 0
    while (mark := family.scanner.search(text, position)) is not None:
        position = mark.end()
        kind = mark.lastgroup
        if start < 0:
            if kind in ("open", "resume"):
                start, resumed = mark.end(), kind == "resume"
            continue
        if kind == "open":
            if family.continues:
                continue
            end = mark.start()
        elif kind == "end":
            again = re.compile(family.reopens).match(text, mark.end()) if family.reopens else None
            if again:
                position = again.end()
                continue
            end = mark.end()
        elif kind == "borrowed":
            end = mark.end()
        else:
            end = mark.start()
        written = mark.start() > start
        if written or not resumed:
            spans.append((start, end))
        start = -1
        if kind in ("open", "resume"):
            start, resumed = mark.end(), kind == "resume"
    if start >= 0 and (len(text) > start or not resumed):
        spans.append((start, len(text)))
    return spans
