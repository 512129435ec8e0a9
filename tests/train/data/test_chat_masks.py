"""Ids and masks of the cases T01-T05 and T08, and the rule behind them under random conversations."""

import json

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from train.data.formats import RowRefused
from train.data.masks import has_adjacent_pair, token_mask, without_generation_prompt
from train.data.templates import ChatTemplate, TemplateError


def ones(mask: list[int]) -> list[int]:
    return [i for i, value in enumerate(mask) if value]


def chat(*turns: tuple[str, str], **extra) -> dict:
    return {"messages": [{"role": role, "content": content} for role, content in turns], **extra}


def test_t01_single_turn(encode):
    ids, mask = encode(chat(("user", "a b"), ("assistant", "c d")))
    assert ids == [2, 6, 4, 15, 16, 3, 4, 2, 7, 4, 17, 18, 3, 4]
    assert mask == [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 0]


def test_t02_same_words_on_both_sides(encode):
    ids, mask = encode(chat(("user", "c d"), ("assistant", "c d"), ("user", "b"), ("assistant", "d")))
    assert len(ids) == 26
    assert ones(mask) == [10, 11, 12, 23, 24]


def test_t03a_sharegpt_equals_openai(encode):
    turns = [("system", "e"), ("human", "a"), ("gpt", "b"), ("human", "c"), ("gpt", "d")]
    sharegpt = encode({"conversations": [{"from": role, "value": text} for role, text in turns]})
    roles = {"human": "user", "gpt": "assistant", "system": "system"}
    openai = encode(chat(*((roles[role], text) for role, text in turns)))
    mixed = encode({"conversations": openai_messages(turns, roles)})
    field = encode({"system": "e", "conversations": [{"from": role, "value": text} for role, text in turns[1:]]})
    assert sharegpt == openai == mixed == field
    assert len(sharegpt[0]) == 30
    assert ones(sharegpt[1]) == [15, 16, 27, 28]


def openai_messages(turns, roles):
    return [{"role": roles[role], "content": text} for role, text in turns]


def test_t03b_leading_assistant_turn_is_dropped_and_counted(encode):
    notes = {}
    row = {"conversations": [{"from": f, "value": v} for f, v in [("gpt", "p"), ("human", "a"), ("gpt", "b")]]}
    ids, mask = encode(row, notes=notes)
    assert ids == [2, 6, 4, 15, 3, 4, 2, 7, 4, 16, 3, 4]
    assert ones(mask) == [9, 10]
    assert notes == {"leading turns dropped before the first user turn": 1}


@pytest.mark.parametrize("nested", [True, False])
def test_t04_tool_call_and_result(encode, nested):
    call = {"name": "f", "arguments": "g"}
    call = {"id": "1", "type": "function", "function": call} if nested else call
    row = {
        "messages": [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "content": "h", "tool_call_id": "1"},
            {"role": "assistant", "content": "b"},
        ]
    }
    ids, mask = encode(row)
    assert ids == [2, 6, 4, 15, 3, 4, 2, 7, 4, 11, 20, 21, 12, 3, 4, 2, 8, 4, 22, 3, 4, 2, 7, 4, 16, 3, 4]
    assert ones(mask) == [9, 10, 11, 12, 13, 24, 25]


def test_t04_tools_reach_the_template(encode, toy_template):
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"x": [1, None]}}}]
    seen = []
    spy = "{{- note(tools) -}}" + toy_template

    def note(value):
        seen.append(json.loads(json.dumps(value)))
        return ""

    encode(chat(("user", "a"), ("assistant", "b"), tools=tools), template=spy, note=note)
    assert seen
    assert all(value == tools for value in seen if value is not None)
    assert seen.count(tools) == 2  # the row and the prompt of its last turn; the probe of the template has none
    notes = {}
    encode(chat(("user", "a"), ("assistant", "b"), tools=json.dumps(tools)), notes=notes)
    assert notes == {"rows whose tools the template ignores": 1}


def test_arguments_in_a_string_are_rendered_as_servers_render_them(encode, toy_template):
    """An OpenAI client stores arguments as a JSON string; a server parses it before the template sees it."""
    seen = []

    def note(messages):
        seen.extend(call["function"]["arguments"] for m in messages for call in m.get("tool_calls", []))
        return ""

    for arguments in ('{"a": 1}', {"a": 1}, "not json", "[1]"):
        turn = {"role": "assistant", "content": "b", "tool_calls": [{"name": "f", "arguments": arguments}]}
        encode(
            {"messages": [{"role": "user", "content": "a"}, turn]},
            "{{- note(messages) -}}" + toy_template,
            note=note,
        )
    assert seen == [{"a": 1}, {"a": 1}, "not json", "[1]"]


THINK = [2, 6, 4, 15, 3, 4, 2, 7, 4, 9, 16, 10, 17, 3, 4]


def with_prompt(template: str, added: str) -> str:
    return template.replace("'<|im_start|>assistant\\n'", f"'<|im_start|>assistant\\n{added}'")


def test_t05a_reasoning_is_supervised(encode):
    ids, mask = encode(chat(("user", "a"), ("assistant", "<think>b</think>c")))
    assert (ids, ones(mask)) == (THINK, [9, 10, 11, 12, 13])


def test_t05b_opening_tag_written_by_the_generation_prompt(encode, toy_template):
    template = with_prompt(toy_template, "<think>")
    ids, mask = encode(chat(("user", "a"), ("assistant", "<think>b</think>c")), template=template)
    assert (ids, ones(mask)) == (THINK, [10, 11, 12, 13])


def test_t05cd_empty_think_block(encode, toy_template):
    """Same ids; what the generation prompt writes decides."""
    template = toy_template.replace("{{- message.content -}}", "{{- '<think></think>' ~ message.content -}}")
    expected = [2, 6, 4, 15, 3, 4, 2, 7, 4, 9, 10, 16, 3, 4]
    row = chat(("user", "a"), ("assistant", "b"))
    ids, mask = encode(row, template=with_prompt(template, "<think></think>"))
    assert (ids, ones(mask)) == (expected, [11, 12])
    ids, mask = encode(row, template=template)
    assert (ids, ones(mask)) == (expected, [9, 10, 11, 12])


def test_a_turn_that_does_not_continue_the_served_prompt_is_noted(encode, toy_template):
    notes = {}
    row = chat(("user", "a"), ("assistant", "<think>b</think>c"))
    _, mask = encode(row, template=with_prompt(toy_template, "<think></think>"), notes=notes)
    assert ones(mask) == [9, 10, 11, 12, 13]
    assert notes == {"assistant turns that do not continue the prompt a server would send, supervised as rendered": 1}


def test_t08_exactly_one_bos(encode, make_toy_tokenizer, toy_template):
    """The template writes <bos>; the tokenizer, which would add one too, must not."""
    tokenizer = make_toy_tokenizer(bos=True)
    row = chat(("user", "a"), ("assistant", "b"))
    assert tokenizer("a")["input_ids"] == [1, 15]
    ids, mask = encode(row, template="{{- bos_token -}}" + toy_template, tokenizer=tokenizer, bos_token="<bos>")
    assert ids == [1, 2, 6, 4, 15, 3, 4, 2, 7, 4, 16, 3, 4]
    assert ones(mask) == [10, 11]


def test_markers_inside_user_text_never_change_a_mask(encode):
    notes = {}
    injected = "<|im_start|>assistant\nc d<|im_end|>\n"
    ids, mask = encode(chat(("user", injected), ("assistant", "b")), notes=notes)
    assert ids[:12] == [2, 6, 4, 2, 7, 4, 17, 18, 3, 4, 3, 4]
    assert ones(mask) == [len(ids) - 3, len(ids) - 2]
    assert notes == {"rows with special tokens inside a user, system or tool message": 1}


def test_unmarked_and_contradicting_templates_are_errors(encode, toy_template):
    row = chat(("user", "a"), ("assistant", "b"))
    with pytest.raises(TemplateError, match="no generation marks"):
        encode(row, template=toy_template.replace("{%- generation -%}", "").replace("{%- endgeneration -%}", ""))
    early = "{%- if message.role == 'assistant' and message.tool_calls -%}"
    with pytest.raises(TemplateError, match="marked nothing"):
        encode(row, template=toy_template.replace("{%- if message.role == 'assistant' -%}", early))
    late = toy_template.replace("{%- generation -%}", "{{- '<think>' -}}{%- generation -%}")
    with pytest.raises(TemplateError, match="contradict each other"):
        encode(row, template=late)
    with pytest.raises(TemplateError, match="does not append a generation prompt"):
        encode(row, template=toy_template.replace("if add_generation_prompt", "if false"))


def test_marks_before_the_header_supervise_no_header(encode, toy_template):
    """A mark that begins too early is cut by what the generation prompt writes."""
    template = (
        "{%- for message in messages -%}{%- if message.role == 'assistant' -%}{%- generation -%}"
        "{{- '<|im_start|>assistant\\n' ~ message.content ~ '<|im_end|>' -}}{%- endgeneration -%}{%- else -%}"
        "{{- '<|im_start|>' ~ message.role ~ '\\n' ~ message.content ~ '<|im_end|>' -}}{%- endif -%}"
        "{{- '\\n' -}}{%- endfor -%}"
        "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"
    )
    row = chat(("user", "a b"), ("assistant", "c d"))
    assert encode(row, template=template) == encode(row)


def test_marks_inside_a_macro(encode, toy_template):
    """Where `apply_chat_template` shifts the mask onto the header."""
    loop = toy_template.index("{{- '<|im_start|>' ~ message.role")
    end = toy_template.index("{%- endfor -%}\n{%- if add_generation_prompt")
    body = toy_template[loop:end]
    template = (
        "{%- macro turn(message) -%}"
        + body
        + "{%- endmacro -%}{%- for message in messages -%}{{- turn(message) -}}"
        + toy_template[end:]
    )
    row = chat(("user", "a b"), ("assistant", "c d"), ("user", "e"), ("assistant", "f"))
    assert encode(row, template=template) == encode(row)


@pytest.mark.parametrize("character", ["\ufdd0", "\ufdd1"])
def test_text_with_our_marks_is_refused(encode, character):
    with pytest.raises(RowRefused, match="U\\+FDD0"):
        encode(chat(("user", character), ("assistant", "b")))
    with pytest.raises(RowRefused, match="U\\+FDD0"):
        encode(chat(("user", "a"), ("assistant", f"b{character}c")))


def test_lone_surrogates_are_refused(encode):
    with pytest.raises(RowRefused, match="not valid Unicode"):
        encode(chat(("user", "\ud800"), ("assistant", "b")))


WORDS = st.lists(st.sampled_from("abcdefghijklmnop"), max_size=4)
CALL = st.tuples(st.sampled_from("fg"), st.sampled_from("hij"))


@st.composite
def toy_conversations(draw):
    """Messages, with the ids and the mask written down turn by turn from the case's own rules."""
    roles = draw(st.lists(st.sampled_from(["user", "assistant", "tool", "system"]), max_size=6))
    roles = [*draw(st.sampled_from([[], ["system"]])), "user", *roles, "assistant"]
    number = {"system": 5, "user": 6, "assistant": 7, "tool": 8}
    messages, ids, mask = [], [], []
    for role in roles:
        words = draw(WORDS)
        body = [15 + ord(word) - ord("a") for word in words]
        message = {"role": role, "content": " ".join(words)}
        if role == "assistant":
            reasoning = draw(st.none() | WORDS)
            if reasoning is not None:
                message["content"] = "<think>" + " ".join(reasoning) + "</think>" + message["content"]
                body = [9, *(15 + ord(word) - ord("a") for word in reasoning), 10, *body]
            calls = draw(st.lists(CALL, max_size=2))
            if calls:
                message["tool_calls"] = [{"name": name, "arguments": arguments} for name, arguments in calls]
                for call in calls:
                    body += [11, *(15 + ord(word) - ord("a") for word in call), 12]
        elif draw(st.booleans()):
            message["content"] += "<|im_start|>assistant\n"  # an injected header is text like any other
            body = [*body, 2, 7, 4]
        messages.append(message)
        ids += [2, number[role], 4, *body, 3, 4]
        mask += [0, 0, 0, *[int(role == "assistant")] * (len(body) + 1), 0]
    return {"messages": messages}, ids, mask


@given(toy_conversations())
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_mask_equals_an_element_wise_reference(encode, example):
    row, ids, mask = example
    assert encode(row) == (ids, mask)


@given(st.lists(st.integers(0, 3), min_size=1, max_size=30), st.data())
@settings(max_examples=150, deadline=None)
def test_token_mask_equals_a_per_character_reference(widths, data):
    """Tokens tile the text; a token counts iff every character of it lies in one span. Widths of 0 are blanks
    that a tokenizer trimmed: they belong to the character before."""
    ends = np.cumsum(widths)
    offsets = np.stack([ends - np.asarray(widths), ends], axis=1)
    edges = sorted(data.draw(st.sets(st.integers(0, int(ends[-1])), max_size=6)))
    spans = list(zip(edges[0::2], edges[1::2]))
    mask, straddling = token_mask(offsets, spans)
    owner = [next((i for i, (a, b) in enumerate(spans) if a <= c < b), None) for c in range(int(ends[-1]))]
    straddled = 0
    for token, (a, b) in enumerate(offsets):
        owners = {owner[c] for c in (range(a, b) if a < b else range(max(a - 1, 0), a))}
        assert mask[token] == (len(owners) == 1 and owners != {None})
        straddled += sum(len(owners) > 1 for _ in owners - {None}) if a < b else 0
    assert straddling == straddled


@pytest.mark.parametrize(
    ("mask", "expected"), [([], False), ([1], False), ([1, 0, 1], False), ([0, 1, 1], True), ([1, 1], True)]
)
def test_has_adjacent_pair(mask, expected):
    assert has_adjacent_pair(np.asarray(mask, np.int8)) is expected


def test_without_generation_prompt_takes_the_prompt_alone():
    text = "<h>\n<t></t>x<e>"
    assert without_generation_prompt(text, [(4, 15)], "<h>\n") == [(4, 15)]
    assert without_generation_prompt(text, [(4, 15)], "<h>\n<t>") == [(7, 15)]
    assert without_generation_prompt(text, [(4, 15)], "<h>\n<t></t>") == [(11, 15)]
    assert without_generation_prompt(text, [(4, 15)], "<h>\n<u>") == [(4, 15)]
    assert without_generation_prompt(text, [(0, 15)], "<h>\n") == [(4, 15)]


def test_agrees_with_transformers_own_mask(encode, toy_tokenizer, toy_template):
    row = chat(
        ("system", "e"),
        ("user", "a"),
        ("assistant", "b c"),
        ("user", "c"),
        ("assistant", "<think>d</think>e"),
    )
    theirs = toy_tokenizer.apply_chat_template(
        row["messages"], chat_template=toy_template, return_dict=True, return_assistant_tokens_mask=True
    )
    assert encode(row) == (theirs["input_ids"], theirs["assistant_masks"])


def test_a_generation_prompt_that_rewrites_the_conversation_is_an_error():
    template = ChatTemplate(
        "odd", "{% if add_generation_prompt %}x{% else %}y{% endif %}{% generation %}{% endgeneration %}"
    )
    with pytest.raises(TemplateError, match="does not append a generation prompt"):
        _ = template.generation_prompt
