"""Our template against the tokenizer's own: which one to use, and proof that the ids are those of serving."""

from collections.abc import Mapping, Sequence
from typing import Any

from .formats import Conversation
from .templates import SHIPPED, ChatTemplate, RenderError, TemplateError, read_template

_PROBES: tuple[list[dict], ...] = (
    [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}],
    [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
    ],
    [
        {"role": "user", "content": " a\n"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
        {"role": "assistant", "content": "\nd "},
        {"role": "user", "content": "e"},
    ],
)


def template_variables(tokenizer: Any, enable_thinking: bool | None) -> dict[str, Any]:
    """What a template is given beside the messages: special tokens by name, the thinking switch if set."""
    variables: dict[str, Any] = {
        name: str(token) for name, token in tokenizer.special_tokens_map.items() if isinstance(token, str)
    }
    if enable_thinking is not None:
        variables["enable_thinking"] = enable_thinking
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


def choose_template(name: str, tokenizer: Any, enable_thinking: bool | None = None) -> ChatTemplate:
    """Finds the template to render with.

    Args:
        name: see DataConfig.template.
        tokenizer: of the target.
        enable_thinking: see DataConfig.

    Raises:
        TemplateError: there is none that marks anything, or `auto` finds none that renders what the
            tokenizer's own template renders; it then shows the first difference of each.
    """
    variables = template_variables(tokenizer, enable_thinking)
    if name != "auto":
        return read_template(name, variables)
    own = OwnTemplate(tokenizer, variables)
    remedy = f"set data.template to one of {', '.join(SHIPPED)} or to a jinja file with generation marks"
    if not own.exists():
        raise TemplateError(f"the tokenizer has no chat template, so auto has nothing to go by; {remedy}")
    if own.of(None).marked:
        return own.of(None)
    differences = []
    for candidate in (read_template(shipped, variables) for shipped in SHIPPED):
        difference = _first_probe_difference(candidate, own.of(None))
        if difference is None:
            return candidate
        differences.append(f"{candidate.name}: {difference}")
    raise TemplateError(
        "no shipped template renders what the tokenizer's own does; " + remedy + "\n  " + "\n  ".join(differences)
    )


def _first_probe_difference(candidate: ChatTemplate, own: ChatTemplate) -> str | None:
    for messages in _PROBES:
        for prompt in (False, True):
            try:
                expected = own.render(messages, prompt=prompt).text
            except RenderError:
                continue  # a strict template may refuse a probe; the rows themselves decide then
            try:
                text = candidate.render(messages, prompt=prompt).text
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
    """Checks rendered rows against the tokenizer's own template.

    The text of every row is compared; the ids of the first row of every kind (its roles, tools, reasoning)
    are compared too, with what `apply_chat_template` of the tokenizer returns.

    Attributes:
        texts, ids: how many rows were compared by text, and by ids.
    """

    MAX_ID_CHECKS = 64

    def __init__(self, template: ChatTemplate, tokenizer: Any, enable_thinking: bool | None = None):
        self.template = template
        self.texts = 0
        self.ids = 0
        self._tokenizer = tokenizer
        self._thinking = {} if enable_thinking is None else {"enable_thinking": enable_thinking}
        self._own = OwnTemplate(tokenizer, template_variables(tokenizer, enable_thinking))
        self._kinds: set[tuple] = set()

    def check_text(self, conversation: Conversation, text: str) -> None:
        """Compares the text of a row.

        Raises:
            RenderError: the tokenizer's own template refuses the row, so it could not be served either.
            TemplateError: it renders another text.
        """
        if not self._own.exists():
            return
        try:
            own = self._own.of(conversation.tools).render(conversation.messages, conversation.tools).text
        except RenderError as error:
            raise RenderError(f"the tokenizer's own template refuses it: {error}") from error
        self.texts += 1
        if own != text:
            raise TemplateError(
                f"{conversation.place}: chat template {self.template.name} does not render what the "
                f"tokenizer's own does: {first_difference(text, own)}. Drafts trained so would meet other "
                "text in serving. Choose another data.template, or set data.verify_template=false if the "
                "draft will be served with this one"
            )

    def check_ids(self, conversation: Conversation, input_ids: Sequence[int]) -> None:
        """Compares the ids of a row, if it is the first of its kind.

        Raises:
            TemplateError: `apply_chat_template` gives other ids.
        """
        kind = (
            tuple(m["role"] for m in conversation.messages[:8]),
            bool(conversation.tools),
            any("tool_calls" in m for m in conversation.messages),
            any("reasoning_content" in m for m in conversation.messages),
        )
        if not self._own.exists() or kind in self._kinds or len(self._kinds) >= self.MAX_ID_CHECKS:
            return
        self._kinds.add(kind)
        expected = self._tokenizer.apply_chat_template(
            conversation.messages, tools=conversation.tools, tokenize=True, return_dict=True, **self._thinking
        )["input_ids"]
        self.ids += 1
        if list(expected) != list(input_ids):
            pairs = enumerate(zip(input_ids, expected))
            i = next((i for i, (a, b) in pairs if a != b), min(len(input_ids), len(expected)))
            raise TemplateError(
                f"{conversation.place}: ids differ from the tokenizer's apply_chat_template at token {i}: "
                f"{list(input_ids[i : i + 8])} against {list(expected[i : i + 8])}"
            )

    def describe(self) -> str:
        """One line for the summary."""
        if not self._own.exists():
            return f"{self.template.name} (the tokenizer has none of its own to compare with)"
        return (
            f"{self.template.name} (text equal to the tokenizer's own on {self.texts:,} rows, "
            f"ids on one row of each kind, {self.ids})"
        )
