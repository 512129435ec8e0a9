"""The models' own chat templates instead of the ones written here, where they are at hand (`own_templates`)."""

import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.train.data.family_tokenizers import SPECIAL_TOKENS
from tests.train.data.test_families import (
    EXPECTED,
    TOOLS,
    TWO_CALLS,
    TWO_TURNS,
    answer,
    call,
    check_turns,
    conversation,
    conversations,
    encode,
    result,
    spans,
    tokenizer_of,
    user,
)
from train.data.agreement import choose_template, template_variables
from train.data.formats import RowRefused
from train.data.templates import ChatTemplate, RenderError

# What another version of a template writes in its own way: (name, conversation) -> the spans of its rows, or why none.
OTHERWISE = {
    # The template of GLM-5.3-Flash keeps earlier reasoning only if clear_thinking is false; SGLang's renderer always.
    ("glm-5.3", json.dumps(TWO_TURNS)): [["R1</think>A1<|user|>"], ["R2</think>A2<|user|>"]],
    # Of the distilled R1: arguments must be a string there, which no server gives it.
    ("deepseek-r1", json.dumps(TWO_CALLS)): "tool calls that the template leaves out",
}


@pytest.mark.parametrize(("name", "thinking", "row", "expected"), EXPECTED, ids=lambda value: str(value)[:24])
def test_supervised_spans(name, thinking, row, expected):
    own = f"{name}@own"
    expected = OTHERWISE.get((name, json.dumps(row)), expected)
    try:
        found = [spans(own, encoded) for encoded in encode(own, row, thinking)]
    except RowRefused as refused:
        found = refused.reason
    assert found == expected


# gpt-oss and the distilled R1 leave out calls of some forms; SmolLM2 and Gemma 3 have none.
WITHOUT_TOOLS = ("smollm2", "gemma3", "deepseek-r1")


@pytest.mark.parametrize("thinking", [None, True])
@pytest.mark.parametrize("name", SPECIAL_TOKENS)
@given(data=st.data())
@settings(max_examples=10, deadline=None, suppress_health_check=list(HealthCheck))
def test_every_turn_is_supervised_once_behind_the_prompt_of_its_server(name, thinking, data):
    tokenizer_of(f"{name}@own")
    check_turns(f"{name}@own", thinking, data.draw(conversations(tools=name not in WITHOUT_TOOLS)))


TEXTS = st.sampled_from(
    ["", "x", "\n\ny", " z ", "w\n", "<think>\nr\n</think>\n\nt", "a</think>b", "<tool_response>q</tool_response>",
     "é漢🎉", "{{ x }}", "<|im_end|>"]
)  # fmt: skip


@st.composite
def awkward(draw):
    """Any order of roles that a template may take, with texts that look like markup."""
    messages, calls = [], 0
    if draw(st.booleans()):
        messages.append({"role": "system", "content": draw(TEXTS)})
    for _ in range(draw(st.integers(1, 3))):
        messages.append(user(draw(TEXTS)))
        for _ in range(draw(st.integers(0, 2))):
            count = draw(st.integers(1, 2))
            step = answer(draw(TEXTS), tool_calls=[call(calls + i) for i in range(count)])
            messages.append(step | ({"reasoning_content": draw(TEXTS)} if draw(st.booleans()) else {}))
            messages += [result(calls + i, draw(TEXTS)) for i in range(count)]
            calls += count
        messages.append(answer(draw(TEXTS)) | ({"reasoning_content": draw(TEXTS)} if draw(st.booleans()) else {}))
        if draw(st.integers(0, 5)) == 0:
            messages.append({"role": "system", "content": draw(TEXTS)})
    return {"messages": messages, "tools": draw(st.sampled_from([None, TOOLS]))}


@pytest.mark.parametrize("thinking", [None, True, False])
@pytest.mark.parametrize("name", ["smollm2", "qwen2.5", "qwen3", "llama3", "gemma3"])
@given(row=awkward(), prompt=st.booleans())
@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
def test_shipped_templates_render_what_the_models_own_do(name, thinking, row, prompt):
    tokenizer = tokenizer_of(f"{name}@own")
    variables = template_variables(tokenizer, thinking)
    ours, own = (
        choose_template("auto", tokenizer, variables=variables),
        ChatTemplate("own", tokenizer.chat_template, variables),
    )
    assert ours.name == name
    parsed = conversation(row)

    def outcome(template):
        try:
            return template.render(parsed.messages, parsed.tools, prompt=prompt).text
        except RenderError:
            return None

    if name == "smollm2" and any("tool_calls" in message for message in parsed.messages):
        assert outcome(ours) is None  # its own template leaves the calls out without a word
    else:
        assert outcome(ours) == outcome(own)
