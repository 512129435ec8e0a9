"""Our template against the tokenizer's own: which one to use, and proof that the ids are those of serving."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from .families import FAMILIES
from .family_template import FamilyTemplate, family_of, misfit
from .formats import Conversation
from .templates import PROBE_CALL, SHIPPED, ChatTemplate, RenderError, TemplateError, read_template, template_source

if TYPE_CHECKING:
    from .served import ServedText

_TOOLS = [{"type": "function", "function": {"name": "get_probe", "description": "d", "parameters": {"type": "object"}}}]
_PROBES: tuple[tuple[list[dict], list[dict] | None], ...] = (
    ([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}], None),
    (
        [
            {"role": "system", "content": "s"},
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": "b"},
        ],
        None,
    ),
    (
        [
            {"role": "user", "content": " a\n"},
            {"role": "assistant", "content": "b"},
            {"role": "user", "content": "c"},
            {"role": "assistant", "content": "\nd "},
            {"role": "user", "content": "e"},
        ],
        None,
    ),
    (
        [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": "", "tool_calls": [PROBE_CALL]},
            {"role": "tool", "content": "t", "tool_call_id": "c"},
            {"role": "assistant", "content": "b"},
        ],
        _TOOLS,
    ),
)


def template_variables(
    tokenizer: Any,
    enable_thinking: bool | None,
    options: Mapping[str, Any] | None = None,
    date: str | None = None,
) -> dict[str, Any]:
    """What a template is given beside the messages: special tokens by name, the switches and options set, the date.

    The thinking switch goes by two names; servers set both.
    """
    variables: dict[str, Any] = {
        name: str(token) for name, token in tokenizer.special_tokens_map.items() if isinstance(token, str)
    }
    if enable_thinking is not None:
        variables |= {"enable_thinking": enable_thinking, "thinking": enable_thinking}
    variables |= options or {}
    if date is not None:
        variables["date"] = date
    return variables


class OwnTemplate:
    """The tokenizer's own chat template; some tokenizers carry another one for rows with tools."""

    def __init__(self, tokenizer: Any, variables: Mapping[str, Any]):
        self._tokenizer = tokenizer
        self._variables = variables
        self._compiled: dict[str, ChatTemplate] = {}

    def exists(self) -> bool:
        return bool(self._tokenizer.chat_template)

    def of(self, tools: Sequence[Mapping] | None) -> ChatTemplate:
        source = self._tokenizer.get_chat_template(tools=tools)
        if source not in self._compiled:
            self._compiled[source] = ChatTemplate("of the tokenizer", source, self._variables)
        return self._compiled[source]


def choose_template(
    name: str,
    tokenizer: Any,
    enable_thinking: bool | None = None,
    *,
    variables: Mapping[str, Any] | None = None,
    markers: str = "auto",
) -> ChatTemplate:
    """Finds the template to render with.

    Args:
        name: see DataConfig.template.
        tokenizer: of the target.
        enable_thinking: see DataConfig; not looked at if `variables` are given.
        variables: see `template_variables`.
        markers: see DataConfig.markers.

    Raises:
        TemplateError: nothing says which part of the text the model writes, or `auto` finds no template that renders
            what the tokenizer's own does; it then shows the first difference of each.
    """
    if variables is None:
        variables = template_variables(tokenizer, enable_thinking)
    if name not in ("auto", "own"):
        if markers == "auto":
            return read_template(name, variables)
        return _by_markers(name, template_source(name), variables, tokenizer, markers)
    own = OwnTemplate(tokenizer, variables)
    remedy = f"set data.template to one of {', '.join(SHIPPED)} or to a jinja file with generation marks"
    if not own.exists():
        raise TemplateError(f"the tokenizer has no chat template, so {name} has nothing to go by; {remedy}")
    if markers != "auto":
        return _by_markers("of the tokenizer", own.of(None).source, variables, tokenizer, markers)
    if own.of(None).marked:
        return own.of(None)
    differences = []
    if name == "auto":
        for candidate in (read_template(shipped, variables) for shipped in SHIPPED):
            difference = _first_probe_difference(candidate, own.of(None))
            if difference is None:
                return candidate
            differences.append(f"{candidate.name}: {difference}")
    by_markers = family_of(own.of(None).source, variables, tokenizer)
    if by_markers is not None:
        return by_markers
    raise TemplateError(
        "no shipped template renders what the tokenizer's own does, and its special tokens are of no known family ("
        + ", ".join(FAMILIES)
        + "); "
        + remedy
        + "".join(f"\n  {difference}" for difference in differences)
    )


def _by_markers(name: str, source: str, variables: Mapping[str, Any], tokenizer: Any, markers: str) -> FamilyTemplate:
    """A template read by the special tokens of a named family."""
    if markers not in FAMILIES:
        raise TemplateError(f"data.markers {markers!r} is not one of {', '.join(FAMILIES)}")
    family = FAMILIES[markers]
    missing = [token for token in family.needs if token not in tokenizer.get_vocab()]
    if missing:
        raise TemplateError(f"data.markers {markers}: the tokenizer has no token {', '.join(missing)}")
    template = FamilyTemplate(name, source, variables, family)
    reason = misfit(template)
    if reason is not None:
        raise TemplateError(f"data.markers {markers} does not tell the turns of chat template {name}: {reason}")
    return template


def _first_probe_difference(candidate: ChatTemplate, own: ChatTemplate) -> str | None:
    for messages, tools in _PROBES:
        for prompt in (False, True):
            try:
                expected = own.render(messages, tools, prompt=prompt).text
            except RenderError:
                continue  # a strict template may refuse a probe; the rows themselves decide then
            if tools and PROBE_CALL["function"]["name"] not in expected:
                continue  # it takes tool calls and leaves them out: nothing to measure a candidate by
            try:
                text = candidate.render(messages, tools, prompt=prompt).text
            except RenderError as error:
                return f"it refuses {messages!r}: {error}"
            if text != expected:
                return first_difference(text, expected)
    return None


def first_difference(ours: str, own: str, around: int = 40) -> str:
    """Shows where two texts part."""
    i = next((i for i, (a, b) in enumerate(zip(ours, own)) if a != b), min(len(ours), len(own)))
    begin = max(0, i - around)
    return (
        f"after {ours[begin:i]!r} (character {i}) it writes {ours[i : i + around]!r}, "
        f"the tokenizer's own template {own[i : i + around]!r}"
    )


class Agreement:
    """Checks rows against the tokenizer's own template.

    The text of every row is compared; the ids of the first row of every kind (its roles, tools, reasoning) are
    compared too, with what `apply_chat_template` of the tokenizer returns.

    Attributes:
        texts, ids: how many rows were compared by text, and by ids.
    """

    MAX_ID_CHECKS = 64

    def __init__(
        self,
        template: ChatTemplate,
        tokenizer: Any,
        enable_thinking: bool | None = None,
        *,
        variables: Mapping[str, Any] | None = None,
        every_id: bool = False,
    ):
        """Args: variables: as in `choose_template`; every_id: compare the ids of every row, not one of each kind."""
        if variables is None:
            variables = template_variables(tokenizer, enable_thinking)
        self.template = template
        self.texts = 0
        self.ids = 0
        self._tokenizer = tokenizer
        own_names = {"date", *tokenizer.special_tokens_map}
        self._switches = {name: value for name, value in variables.items() if name not in own_names}
        self._own = OwnTemplate(tokenizer, variables)
        self._every_id = every_id
        self._kinds: set[tuple] = set()

    def check_text(self, conversation: Conversation, row: "ServedText") -> None:
        """Compares the text of a row as the template rendered it.

        Raises:
            RenderError: the tokenizer's own template refuses the row, so it could not be served either.
            TemplateError: it renders another text.
        """
        if not self._own.exists():
            return
        own_template = self._own.of(conversation.tools)
        if own_template.source == self.template.source:
            self.texts += 1
            return
        try:
            own = own_template.render(row.messages, conversation.tools).text
        except RenderError as error:
            raise RenderError(f"the tokenizer's own template refuses it: {error}") from error
        self.texts += 1
        if own != row.rendered:
            raise TemplateError(
                f"{conversation.place}: chat template {self.template.name} does not render what the "
                f"tokenizer's own does: {first_difference(row.rendered, own)}. Drafts trained so would meet other "
                "text in serving. Choose another data.template, or set data.verify_template=false if the "
                "draft will be served with this one"
            )

    def check_ids(self, conversation: Conversation, row: "ServedText", input_ids: Sequence[int]) -> None:
        """Compares the ids of a row, if it is the first of its kind.

        A row whose text does not begin with the template's own rendering (see ServedTurns) has none to be compared
        with, nor has one with the date of today in it, nor one with a content that must be null, which
        `apply_chat_template` takes away. A stop token that was appended is left out.

        Raises:
            TemplateError: `apply_chat_template` gives other ids.
        """
        kind = (
            tuple(m["role"] for m in row.messages[:8]),
            bool(conversation.tools),
            any("tool_calls" in m for m in row.messages),
            any("reasoning_content" in m for m in row.messages),
        )
        if not self._own.exists() or not row.text.startswith(row.rendered):
            return
        own = self._own.of(conversation.tools)
        messages = own.messages_for(row.messages)
        if own.reads_clock or any(message["content"] is None for message in messages):
            return
        if not self._every_id and (kind in self._kinds or len(self._kinds) >= self.MAX_ID_CHECKS):
            return
        self._kinds.add(kind)
        expected = self._tokenizer.apply_chat_template(
            messages,
            tools=conversation.tools,
            tokenize=True,
            return_dict=True,
            **self._switches,
        )["input_ids"]
        self.ids += 1
        if row.text != row.rendered:
            input_ids = input_ids[: len(expected)]
        if list(expected) != list(input_ids):
            pairs = enumerate(zip(input_ids, expected))
            i = next((i for i, (a, b) in pairs if a != b), min(len(input_ids), len(expected)))
            raise TemplateError(
                f"{conversation.place}: ids differ from the tokenizer's apply_chat_template at token {i}: "
                f"{list(input_ids[i : i + 8])} against {list(expected[i : i + 8])}"
            )

    def describe(self, texts: int | None = None, ids: int | None = None) -> str:
        """One line for the summary; the numbers are those of this object, or given: of several workers together."""
        texts, ids = self.texts if texts is None else texts, self.ids if ids is None else ids
        name = self.template.name
        if self.template.family:
            name += f" (turns by the special tokens of {self.template.family.name})"
        if not self._own.exists():
            return f"{name} (the tokenizer has none of its own to compare with)"
        which = "ids on every row" if self._every_id else "ids on one row of each kind"
        return f"{name} (text equal to the tokenizer's own on {texts:,} rows, {which}, {ids:,})"
