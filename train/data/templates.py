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
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment

from .summary import DataError

SHIPPED = ("chatml", "smollm2", "qwen3")
_FOLDER = Path(__file__).parent / "chat_templates"
# Unicode noncharacters: reserved for use inside one process, never text.
_OPEN, _CLOSE = "\ufdd0", "\ufdd1"
_MARKS = re.compile(f"[{_OPEN}{_CLOSE}]")
_PROBE = [{"role": "user", "content": "?"}]


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


def _environment() -> _Environment:
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
    environment.globals["strftime_now"] = lambda pattern: datetime.now().strftime(pattern)
    return environment


class ChatTemplate:
    """One compiled template with the variables it is given beside the messages.

    Attributes:
        name: for messages to people.
        source: the jinja text.
        marked: whether it has generation marks.
        reads_tools: whether it looks at the tools of a row at all.
    """

    def __init__(self, name: str, source: str, variables: Mapping[str, Any] | None = None):
        """Compiles it.

        Args:
            name: how errors call it.
            source: jinja.
            variables: special tokens by name (`bos_token`, ...) and options such as `enable_thinking`.

        Raises:
            TemplateError: the jinja does not compile.
        """
        self.name = name
        self.source = source
        self._variables = dict(variables or {})
        self._environment = _environment()
        try:
            self._template = self._environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise TemplateError(f"chat template {name}, line {error.lineno}: {error.message}") from error
        self.marked = self._environment.marks_in_source > 0
        self.reads_tools = "tools" in source
        self._generation_prompt: str | None = None

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
        self._environment.marks_written = 0
        try:
            raw = self._template.render(
                messages=messages,
                tools=tools,
                documents=None,
                add_generation_prompt=prompt,
                **self._variables,
            )
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


def read_template(name: str, variables: Mapping[str, Any] | None = None) -> ChatTemplate:
    """A shipped template by name, or a jinja file by path.

    Raises:
        TemplateError: there is no such template, or it marks nothing (never a mask of zeros instead).
    """
    if name in SHIPPED:
        source = shipped_source(name)
    else:
        path = Path(name)
        if not path.is_file():
            raise TemplateError(
                f"data.template {name!r} is neither a shipped template ({', '.join(SHIPPED)}) nor a file"
            )
        source = path.read_text(encoding="utf-8")
    template = ChatTemplate(name, source, variables)
    if not template.marked:
        raise TemplateError(
            f"chat template {name} has no generation marks, so nothing says what the assistant wrote; put "
            "{% generation %} after the assistant header and {% endgeneration %} after the turn's end token"
        )
    return template
