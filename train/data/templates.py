"""Chat templates that mark what the assistant generates.

A template is the jinja that Transformers' tokenizers carry, with `{% generation %}...{% endgeneration %}`
around everything the model writes itself. Rendering gives the text and the character spans inside those
marks.

Why not `apply_chat_template(return_assistant_tokens_mask=True)`: it finds a span by the length of the text
written before the mark, which is wrong inside a jinja macro; it marks a token that the header and the answer
share; and older versions lose tokens whose first character carries no offset. Here the marks leave two
characters in the text that no text may hold, and the spans are read off those, wherever the mark stood.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment

from .config import DEFAULT_DATE
from .summary import DataError

if TYPE_CHECKING:
    from .families import Family

SHIPPED = ("chatml", "smollm2", "qwen2.5", "qwen3", "llama3", "gemma3")
_FOLDER = Path(__file__).parent / "chat_templates"
# Unicode noncharacters: reserved for use inside one process, never text.
_OPEN, _CLOSE = "\ufdd0", "\ufdd1"
_MARKS = re.compile(f"[{_OPEN}{_CLOSE}]")
_PROBE = [{"role": "user", "content": "?"}]
# gpt-oss names the reasoning of a turn `thinking` where the others say `reasoning_content`.
_READS_THINKING = re.compile(r"""message\.thinking|["']thinking["'] in message""")
_READS_REASONING = re.compile(r"reasoning_content|message\.reasoning|" + _READS_THINKING.pattern)
_LOOKS_FOR_TAGS = re.compile(r"""["']</think>["'] in|split\(["']</think>["']""")
PROBE_CALL: dict[str, Any] = {
    "id": "c",
    "type": "function",
    "function": {"name": "get_probe", "arguments": {"x": "y"}},
}


class TemplateError(DataError):
    """A template that cannot be used at all, whatever the row."""


class RenderError(Exception):
    """A template that does not take this conversation; the message is the template's own word."""


@dataclass(frozen=True)
class Rendered:
    """Text of a conversation.

    Attributes:
        text: what is tokenised.
        spans: [start, end) in characters of what the assistant generates, in order, disjoint.
    """

    text: str
    spans: tuple[tuple[int, int], ...]


class _Environment(ImmutableSandboxedEnvironment):
    """Counts generation marks, so that a stray one in the text is noticed."""

    marks_in_source = 0
    marks_written = 0


class _GenerationMarks(Extension):
    """`{% generation %}`: writes the two marks around its body."""

    tags = {"generation"}  # noqa: RUF012 (jinja's own interface)
    environment: _Environment

    def parse(self, parser):
        line = next(parser.stream).lineno
        self.environment.marks_in_source += 1
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

    def _mark(self, caller) -> str:
        self.environment.marks_written += 1
        return _OPEN + caller() + _CLOSE


def _environment(date: datetime) -> _Environment:
    """The environment chat templates are written for: Transformers' settings, filters and globals."""

    def raise_exception(message):
        raise jinja2.TemplateRuntimeError(message)

    def tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
        # jinja's own filter escapes HTML, which no model was trained on
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    environment = _Environment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationMarks, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = date.strftime
    return environment


class ChatTemplate:
    """One compiled template with the variables it is given beside the messages.

    Attributes:
        name: for messages to people.
        source: the jinja text.
        marked: whether it has generation marks.
        reads_tools: whether it looks at the tools of a row at all.
        reads_clock: whether it writes the date, see `variables`.
        family: whose special tokens tell the spans, where no generation marks do (see `FamilyTemplate`).
    """

    family: "Family | None" = None

    def __init__(self, name: str, source: str, variables: Mapping[str, Any] | None = None):
        """Compiles it.

        Args:
            name: how errors call it.
            source: jinja.
            variables: special tokens by name (`bos_token`, ...) and options such as `enable_thinking`; `date`
                (YYYY-MM-DD) is not handed on but is what `strftime_now` formats.

        Raises:
            TemplateError: the jinja does not compile.
        """
        self.name = name
        self.source = source
        self._variables = dict(variables or {})
        self._environment = _environment(datetime.fromisoformat(self._variables.pop("date", DEFAULT_DATE)))
        try:
            self._template = self._environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise TemplateError(f"chat template {name}, line {error.lineno}: {error.message}") from error
        self.marked = self._environment.marks_in_source > 0
        self.reads_tools = "tools" in source
        self.reads_clock = "strftime_now" in source
        self._reads_thinking = _READS_THINKING.search(source) is not None
        self._reads_reasoning = _READS_REASONING.search(source) is not None
        self._looks_for_tags = _LOOKS_FOR_TAGS.search(source) is not None
        self._generation_prompt: str | None = None

    @property
    def marks_turns(self) -> bool:
        """Whether a rendering says which part of it the model writes."""
        return self.marked

    def with_reasoning_fields(self, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Messages whose reasoning stands in tags in the content -> with the reasoning in its own field.

        Only where the template reads the field and does not look for the tags itself; a second, empty block would
        appear otherwise. Contents that hold the closing tag alone (the prompt wrote the other) count as well.
        """
        given = [dict(message) for message in messages]
        if not self._reads_reasoning or self._looks_for_tags:
            return given
        for message in given:
            if message["role"] == "assistant" and "reasoning_content" not in message:
                before, tag, answer = message["content"].partition("</think>")
                if tag:
                    message["reasoning_content"] = before.rpartition("<think>")[2].strip("\n")
                    message["content"] = answer.lstrip("\n")
        return given

    def messages_for(self, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Messages in normal form -> in the form this template reads."""
        given = [dict(message) for message in messages]
        for message in given:
            if self._reads_thinking and "reasoning_content" in message:
                message["thinking"] = message.pop("reasoning_content")
            if message.get("tool_calls") and not message["content"] and self._wants_null_content:
                message["content"] = None
        return given

    @cached_property
    def _wants_null_content(self) -> bool:
        """Whether it renders tool calls only beside a content that is null, as the OpenAI interface has it.

        Tried, not read off the source: others fail on null.
        """

        def renders_calls(content: str | None) -> bool:
            turn: dict[str, Any] = {"role": "assistant", "content": content, "tool_calls": [PROBE_CALL]}
            try:
                return PROBE_CALL["function"]["name"] in self._write([*_PROBE, turn], None, False)
            except Exception:  # a template is a program of others
                return False

        return not renders_calls("") and renders_calls(None)

    def _write(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping] | None, prompt: bool) -> str:
        return self._template.render(
            messages=messages, tools=tools, documents=None, add_generation_prompt=prompt, **self._variables
        )

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping] | None = None,
        *,
        prompt: bool = False,
    ) -> Rendered:
        """Renders a conversation.

        Args:
            messages: in the normal form of `formats`.
            tools: JSON schemas, or None.
            prompt: end with the generation prompt, as a server does that asks for the next turn.

        Raises:
            RenderError: the template does not take it, or the text holds the characters the marks are made
                of.
        """
        given = self.messages_for(messages)
        self._environment.marks_written = 0
        try:
            raw = self._write(given, tools, prompt)
        except Exception as error:  # a template is a program of others: whatever it raises is its refusal
            raise RenderError(f"{type(error).__name__}: {error}") from error
        pieces, spans, start, length = [], [], None, 0
        position = 0
        for mark in _MARKS.finditer(raw):
            pieces.append(raw[position : mark.start()])
            length += mark.start() - position
            position = mark.end()
            if (mark[0] == _OPEN) != (start is None):
                raise RenderError("generation marks are nested, or the text holds U+FDD0 or U+FDD1")
            if start is None:
                start = length
            else:
                spans.append((start, length))
                start = None
        pieces.append(raw[position:])
        if len(spans) != self._environment.marks_written or start is not None:
            raise RenderError("the text holds U+FDD0 or U+FDD1, or the template dropped a generation mark")
        return Rendered("".join(pieces), tuple(spans))

    @property
    def generation_prompt(self) -> str:
        """What the template writes to make the model begin a turn, as `<|im_start|>assistant\\n`.

        Raises:
            TemplateError: it cannot be found by rendering one user turn with it and without it.
        """
        if self._generation_prompt is None:
            try:
                without = self.render(_PROBE).text
                with_prompt = self.render(_PROBE, prompt=True).text
            except RenderError as error:
                raise TemplateError(f"chat template {self.name} does not take one user turn: {error}") from error
            if not with_prompt.startswith(without) or with_prompt == without:
                raise TemplateError(
                    f"chat template {self.name} does not append a generation prompt: with it a user turn "
                    f"renders as {with_prompt!r}, without it as {without!r}"
                )
            self._generation_prompt = with_prompt[len(without) :]
        return self._generation_prompt


def shipped_source(name: str) -> str:
    """The jinja text of a template of this package, one of SHIPPED."""
    return (_FOLDER / f"{name}.jinja").read_text(encoding="utf-8")


def template_source(name: str) -> str:
    """The jinja text of a shipped template by name, or of a file by path.

    Raises:
        TemplateError: there is no such template.
    """
    if name in SHIPPED:
        return shipped_source(name)
    path = Path(name)
    if not path.is_file():
        raise TemplateError(f"data.template {name!r} is neither a shipped template ({', '.join(SHIPPED)}) nor a file")
    return path.read_text(encoding="utf-8")


def read_template(name: str, variables: Mapping[str, Any] | None = None) -> ChatTemplate:
    """A shipped template by name, or a jinja file by path.

    Raises:
        TemplateError: there is no such template, or it marks nothing (never a mask of zeros instead).
    """
    template = ChatTemplate(name, template_source(name), variables)
    if not template.marked:
        raise TemplateError(
            f"chat template {name} has no generation marks, so nothing says what the assistant wrote; put "
            "{% generation %} after the assistant header and {% endgeneration %} after the turn's end token, or name "
            "the family of its special tokens in data.markers"
        )
    return template
