"""A tokenizer's own template, read by the special tokens of its family instead of by generation marks."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from .families import FAMILIES, Family, turn_spans
from .templates import ChatTemplate, Rendered, RenderError

# A Unicode noncharacter that stands in for every character of a marker inside a message.
_STAND_IN = "\ufdd2"


class FamilyTemplate(ChatTemplate):
    """Renders with any template; the spans are those between the family's special tokens.

    A message may hold the text of such a token, which a server's tokenizer then makes a real one of. It must not move
    a span, so spans are read from a second rendering whose messages have their markers replaced, character for
    character; apart from those characters the two must be the same.
    """

    family: Family

    def __init__(self, name: str, source: str, variables: Mapping[str, Any] | None, family: Family):
        super().__init__(name, source, variables)
        self.family = family
        self._markers = re.compile("|".join(map(re.escape, sorted(family.tokens, key=len, reverse=True))))

    @property
    def marks_turns(self) -> bool:
        return True

    def render(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping] | None = None, *, prompt: bool = False
    ) -> Rendered:
        """See ChatTemplate.render.

        Raises:
            RenderError: it does not take the conversation, or treats messages with markers inside differently.
        """
        text = super().render(messages, tools, prompt=prompt).text
        plain_messages, plain_tools = self._plain(messages), self._plain(tools)
        if plain_messages == messages and plain_tools == tools:
            return Rendered(text, tuple(turn_spans(self.family, text)))
        plain = super().render(plain_messages, plain_tools, prompt=prompt).text
        if not _same_but_for_stand_ins(plain, text):
            raise RenderError("the template treats special tokens inside messages in a way of its own")
        return Rendered(text, tuple(turn_spans(self.family, plain)))

    def marker_count(self, text: str) -> int:
        """How many of the family's special tokens a tokenizer must find in a text."""
        return len(self._markers.findall(text))

    def _plain(self, value: Any) -> Any:
        """The same value with the markers in its texts replaced."""
        if isinstance(value, str):
            if _STAND_IN in value:
                raise RenderError("the text holds U+FDD2")
            return self._markers.sub(lambda found: _STAND_IN * len(found[0]), value)
        if isinstance(value, Mapping):
            return {self._plain(key): self._plain(item) for key, item in value.items()}
        if isinstance(value, Sequence):
            return [self._plain(item) for item in value]
        return value


def _same_but_for_stand_ins(plain: str, text: str) -> bool:
    if len(plain) != len(text):
        return False
    position = 0
    for run in re.finditer(f"{_STAND_IN}+", plain):
        if plain[position : run.start()] != text[position : run.start()]:
            return False
        position = run.end()
    return plain[position:] == text[position:]


def family_of(source: str, variables: Mapping[str, Any], tokenizer: Any) -> FamilyTemplate | None:
    """A tokenizer's own template with the family whose special tokens tell its turns.

    Returns:
        None if there is no such family.

    Raises:
        TemplateError: the template's generation prompt cannot be found.
    """
    known = tokenizer.get_vocab()
    for family in FAMILIES.values():
        if all(token in known for token in family.needs):
            template = FamilyTemplate("of the tokenizer", source, variables, family)
            if misfit(template) is None:
                return template
    return None


_PROBE = ({"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}, {"role": "user", "content": "?"})


def misfit(template: FamilyTemplate) -> str | None:
    """Why the family's markers do not tell the turns of a template, tried on one answer; None = they do."""
    family, prompt = template.family, template.generation_prompt
    if not re.search(family.opens, prompt):
        return f"it begins a turn with {prompt!r}"
    try:
        rendered = template.render(_PROBE)
    except RenderError as error:
        return f"it refuses one answer between two questions: {error}"
    spans = [rendered.text[start:end] for start, end in rendered.spans]
    if len(spans) != 1 or "!" not in spans[0]:
        return f"of {rendered.text!r} it would be {spans!r} that the model wrote"
    if not family.stop and not spans[0].endswith(family.ends):
        return f"it ends a turn with {spans[0][-20:]!r}, the family with {' or '.join(family.ends)}"
    return None
