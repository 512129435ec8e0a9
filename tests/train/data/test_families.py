"""Every family: what is supervised of conversations with reasoning, tools, odd roles and injected markers.

The expected spans are written down by hand; the properties at the end compare with Transformers' own rendering.
"""

# ruff: noqa: RUF001 (DeepSeek's markers are written with fullwidth bars)
import functools
import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.train.data.family_tokenizers import FAMILY, SPECIAL_TOKENS, byte_tokenizer
from tests.train.data.own_templates import own_template
from train.data.agreement import Agreement, choose_template, template_variables
from train.data.encoding import Encoded, Encoder
from train.data.families import FAMILIES, turn_spans
from train.data.files import Place
from train.data.formats import RowRefused, parse_row
from train.data.templates import TemplateError


@functools.cache
def tokenizer_of(name: str):
    """Of a family; NAME@own has the model's own template instead of the one written here, if that is at hand."""
    base, _, own = name.partition("@")
    return byte_tokenizer(base, own_template(base) if own else None)


@functools.cache
def encoder_of(name: str, thinking=None, template="own", markers="auto", extra=(), **options) -> Encoder:
    tokenizer = tokenizer_of(name)
    variables = template_variables(tokenizer, thinking, dict(extra))
    chosen = choose_template(template, tokenizer, variables=variables, markers=markers)
    agreement = Agreement(chosen, tokenizer, variables=variables, every_id=True)
    return Encoder(chosen, tokenizer, 1000, agreement, **options)


def conversation(row: dict):
    return parse_row(json.dumps(row).encode(), Place("rows.jsonl", 1), vocab_size=1000)


def encode(name: str, row: dict, thinking: bool | None = None, **options) -> list[Encoded]:
    (rows,) = encoder_of(name, thinking, **options).encode([conversation(row)])
    if isinstance(rows, RowRefused):
        raise rows
    return rows


def spans(name: str, row: Encoded) -> list[str]:
    """Every supervised span, decoded."""
    texts, run = [], []
    for token, supervised in [*zip(row.input_ids.tolist(), row.loss_mask.tolist()), (0, 0)]:
        if supervised:
            run.append(token)
        elif run:
            texts.append(tokenizer_of(name).decode(run))
            run = []
    return texts


def supervised(name: str, row: dict, thinking: bool | None = None, **options) -> list[list[str]]:
    return [spans(name, encoded) for encoded in encode(name, row, thinking, **options)]


def user(text="Q"):
    return {"role": "user", "content": text}


def answer(text="A", **fields):
    return {"role": "assistant", "content": text, **fields}


def call(number: int, name: str = "look_up"):
    return {"id": f"functions.{name}:{number}", "type": "function",
            "function": {"name": name, "arguments": json.dumps({"x": f"v{number}"})}}  # fmt: skip


def result(number: int, text: str, name: str = "look_up"):
    return {"role": "tool", "content": text, "tool_call_id": f"functions.{name}:{number}"}


TOOLS = [{"type": "function", "function": {"name": "look_up", "description": "d", "parameters": {"type": "object"}}}]
SIMPLE = {"messages": [user(), answer()]}
TWO_TURNS = {"messages": [user("Q1"), answer("A1", reasoning_content="R1"), user("Q2"),
                          answer("A2", reasoning_content="R2")]}  # fmt: skip
ONE_CALL = {"tools": TOOLS, "messages": [user(), answer(None, reasoning_content="R1", tool_calls=[call(0)]),
                                         result(0, "OBS"), answer(reasoning_content="R2")]}  # fmt: skip
TWO_CALLS = {"tools": TOOLS, "messages": [user(), answer("", tool_calls=[call(0), call(1)]), result(0, "OBS0"),
                                          result(1, "OBS1"), answer()]}  # fmt: skip
SYSTEM_LATER = {"messages": [user("Q1"), answer("A1"), {"role": "system", "content": "MID"}, user("Q2"), answer("A2")]}
LEADING_NEWLINES = {"messages": [user("\n\nQ"), answer("\n\nA")]}

GLM_CALL = "<tool_call>look_up<arg_key>x</arg_key><arg_value>v{0}</arg_value></tool_call>"
DEEPSEEK_CALL = '<｜tool▁call▁begin｜>look_up<｜tool▁sep｜>{{"x": "v{0}"}}<｜tool▁call▁end｜>'
R1_CALL = '<｜tool▁call▁begin｜>function<｜tool▁sep｜>look_up\n```json\n{{"x": "v{0}"}}\n```<｜tool▁call▁end｜>'
KIMI_CALL = '<|tool_call_begin|>functions.look_up:{0}<|tool_call_argument_begin|>{{"x": "v{0}"}}<|tool_call_end|>'
KIMI_CALLS = "<|tool_calls_section_begin|>{0}<|tool_calls_section_end|>"
MINIMAX_CALL = '<invoke name="look_up">\n<parameter name="x">v{0}</parameter>\n</invoke>\n'
MINIMAX_CALLS = "\n<minimax:tool_call>\n{0}</minimax:tool_call>"
HARMONY_CALL = ' to=functions.look_up<|channel|>commentary json<|message|>{"x": "v0"}<|call|>'
ANALYSIS = "<|channel|>analysis<|message|>{0}<|end|><|start|>assistant"
FINAL = "<|channel|>final<|message|>{0}<|return|>"
GEMMA4_CALL = '<|tool_call>call:look_up{{x:<|"|>v{0}<|"|>}}<tool_call|>'
CODER_CALL = "<tool_call>\n<function=look_up>\n<parameter=x>\nv{0}\n</parameter>\n</function>\n</tool_call>"
QWEN_CALL = '<tool_call>\n{{"name": "look_up", "arguments": {{"x": "v{0}"}}}}\n</tool_call>'
EOS = "<｜end▁of▁sentence｜>"

# (template, thinking, conversation) -> the spans of each row
EXPECTED = [
    # GLM-5.3: `<|assistant|><think>` is the prompt; the stop token is the next role's marker.
    ("glm-5.3", None, SIMPLE, [["A<|user|>"]]),
    ("glm-5.3", None, TWO_TURNS, [["R1</think>A1<|user|>", "R2</think>A2<|user|>"]]),
    ("glm-5.3", None, ONE_CALL, [["R1</think>" + GLM_CALL.format(0) + "<|observation|>", "R2</think>A<|user|>"]]),
    ("glm-5.3", None, TWO_CALLS, [[GLM_CALL.format(0) + GLM_CALL.format(1) + "<|observation|>", "A<|user|>"]]),
    ("glm-5.3", None, LEADING_NEWLINES, [["A<|user|>"]]),
    # A system turn is none the model would open: the stop token there is the appended one, in a row of its own.
    ("glm-5.3", None, SYSTEM_LATER, [["A1<|user|>"], ["A2<|user|>"]]),
    # GLM-4.6 removes the reasoning of turns before the last question.
    ("glm-4.6", None, TWO_TURNS, [["\n<think>R1</think>\nA1<|user|>"], ["\n<think>R2</think>\nA2<|user|>"]]),
    ("glm-4.6", False, SIMPLE, [["\nA<|user|>"]]),
    # DeepSeek V3.1 never renders reasoning; served, it is what follows `<think>`.
    ("deepseek-v3.1", None, SIMPLE, [["A" + EOS]]),
    ("deepseek-v3.1", True, TWO_TURNS, [["R1</think>A1" + EOS], ["R2</think>A2" + EOS]]),
    ("deepseek-v3.1", None, TWO_TURNS, [["A1" + EOS, "A2" + EOS]]),
    ("deepseek-v3.1", None, TWO_CALLS, [
        ["<｜tool▁calls▁begin｜>" + DEEPSEEK_CALL.format(0) + DEEPSEEK_CALL.format(1) + "<｜tool▁calls▁end｜>" + EOS,
         "A" + EOS]]),
    ("deepseek-v3.1", None, LEADING_NEWLINES, [["\n\nA" + EOS]]),
    # DeepSeek R1: the prompt opens the reasoning with a newline, history holds answers alone.
    ("deepseek-r1", None, TWO_TURNS, [["R1\n</think>\n\nA1" + EOS], ["R2\n</think>\n\nA2" + EOS]]),
    ("deepseek-r1", None, {"messages": [user(), answer("<think>\nR\n</think>\n\nA")]}, [["R\n</think>\n\nA" + EOS]]),
    ("deepseek-r1", None, TWO_CALLS, [
        ["<｜tool▁calls▁begin｜>" + R1_CALL.format(0) + "\n" + R1_CALL.format(1) + "<｜tool▁calls▁end｜>" + EOS,
         "A" + EOS]]),
    # Kimi-K2
    ("kimi-k2", None, SIMPLE, [["A<|im_end|>"]]),
    ("kimi-k2", None, TWO_CALLS, [
        [KIMI_CALLS.format(KIMI_CALL.format(0) + KIMI_CALL.format(1)) + "<|im_end|>", "A<|im_end|>"]]),
    ("kimi-k2", None, SYSTEM_LATER, [["A1<|im_end|>", "A2<|im_end|>"]]),
    ("kimi-k2-thinking", None, TWO_TURNS, [["<think>R1</think>A1<|im_end|>"], ["<think>R2</think>A2<|im_end|>"]]),
    ("kimi-k2-thinking", None, ONE_CALL, [
        ["<think>R1</think>" + KIMI_CALLS.format(KIMI_CALL.format(0)) + "<|im_end|>",
         "<think>R2</think>A<|im_end|>"]]),
    # MiniMax-M2
    ("minimax-m2", None, TWO_TURNS, [["R1\n</think>\n\nA1[e~["], ["R2\n</think>\n\nA2[e~["]]),
    ("minimax-m2", None, ONE_CALL, [
        ["R1\n</think>\n\n" + MINIMAX_CALLS.format(MINIMAX_CALL.format(0)) + "[e~[", "R2\n</think>\n\nA[e~["]]),
    ("minimax-m2", None, TWO_CALLS, [
        [MINIMAX_CALLS.format(MINIMAX_CALL.format(0) + MINIMAX_CALL.format(1)) + "[e~[", "A[e~["]]),
    # Harmony: the header of the final message is the model's own; history ends in <|end|>, a turn in <|return|>.
    ("gpt-oss", None, SIMPLE, [[FINAL.format("A")]]),
    ("gpt-oss", None, TWO_TURNS, [[ANALYSIS.format("R1") + FINAL.format("A1")],
                                  [ANALYSIS.format("R2") + FINAL.format("A2")]]),
    ("gpt-oss", None, ONE_CALL, [[ANALYSIS.format("R1") + HARMONY_CALL, ANALYSIS.format("R2") + FINAL.format("A")]]),
    ("gpt-oss", None, LEADING_NEWLINES, [[FINAL.format("\n\nA")]]),
    # Gemma 4: the empty thought channel is the prompt's; a calling model stops by opening the response.
    ("gemma-4", None, SIMPLE, [["A<turn|>"]]),
    ("gemma-4", None, TWO_TURNS, [["A1<turn|>"], ["A2<turn|>"]]),
    ("gemma-4", True, TWO_TURNS, [["<|channel>thought\nR1\n<channel|>A1<turn|>"],
                                  ["<|channel>thought\nR2\n<channel|>A2<turn|>"]]),
    ("gemma-4", True, TWO_CALLS, [
        [GEMMA4_CALL.format(0) + GEMMA4_CALL.format(1) + "<|tool_response>", "A<turn|>"]]),
    ("gemma-4", None, TWO_CALLS, [
        [GEMMA4_CALL.format(0) + GEMMA4_CALL.format(1) + "<|tool_response>"], ["A<turn|>"]]),
    # Inkling: each message of a turn has a header; all but the first are the model's. The template leaves the end token
    # out, so it stands only where a row ends.
    ("inkling", None, SIMPLE, [["<|content_text|>A<|end_message|><|content_model_end_sampling|>"]]),
    ("inkling", None, ONE_CALL, [
        ['<|content_thinking|>R1<|end_message|><|message_model|>look_up<|content_invoke_tool_json|>{"name": "look_up", '
         '"arguments": {"x": "v0"}}<|end_message|><|content_model_end_sampling|>'],
        ["<|content_thinking|>R2<|end_message|><|message_model|><|content_text|>A<|end_message|>"
         "<|content_model_end_sampling|>"]]),
    # ChatML and its kin, Llama 3, Gemma 3
    ("qwen3-coder", None, TWO_CALLS, [[CODER_CALL.format(0) + "\n" + CODER_CALL.format(1) + "<|im_end|>",
                                       "A<|im_end|>"]]),
    ("qwen3-coder", None, SYSTEM_LATER, [["A1<|im_end|>", "A2<|im_end|>"]]),
    ("qwen2.5", None, TWO_CALLS, [[QWEN_CALL.format(0) + "\n" + QWEN_CALL.format(1) + "<|im_end|>", "A<|im_end|>"]]),
    ("qwen2.5", None, LEADING_NEWLINES, [["\n\nA<|im_end|>"]]),
    ("qwen3", None, TWO_TURNS, [["<think>\nR1\n</think>\n\nA1<|im_end|>"], ["<think>\nR2\n</think>\n\nA2<|im_end|>"]]),
    ("qwen3", None, {"messages": [user(), answer("R </think> A")]}, [["<think>\nR \n</think>\n\n A<|im_end|>"]]),
    ("qwen3", False, SIMPLE, [["A<|im_end|>"]]),
    ("qwen3", None, SIMPLE, [["<think>\n\n</think>\n\nA<|im_end|>"]]),
    ("llama3", None, SYSTEM_LATER, [["A1<|eot_id|>", "A2<|eot_id|>"]]),
    ("llama3", None, {**ONE_CALL, "messages": [{**m, "reasoning_content": None} for m in ONE_CALL["messages"]]},
     [['{"name": "look_up", "parameters": {"x": "v0"}}<|eot_id|>', "A<|eot_id|>"]]),
    ("llama-4", None, TWO_CALLS, [
        ['<|python_start|><|python_end|>{"name": "look_up", "parameters": {"x": "v0"}}'
         '{"name": "look_up", "parameters": {"x": "v1"}}<|eot|>', "A<|eot|>"]]),
    ("gemma3", None, {"messages": [user("Q1"), answer("\n\nA1"), user("Q2"), answer("A2")]},
     [["A1<end_of_turn>", "A2<end_of_turn>"]]),
    ("smollm2", None, SYSTEM_LATER, [["A1<|im_end|>", "A2<|im_end|>"]]),
]  # fmt: skip


@pytest.mark.parametrize(("name", "thinking", "row", "expected"), EXPECTED, ids=lambda value: str(value)[:24])
def test_supervised_spans(name, thinking, row, expected):
    rows = encode(name, row, thinking)
    assert [spans(name, encoded) for encoded in rows] == expected
    assert not any("OBS" in text or "Q" in text or "MID" in text for row in expected for text in row)


@pytest.mark.parametrize("name", ["smollm2", "qwen2.5", "qwen3", "llama3", "gemma3"])
@pytest.mark.parametrize("row", [SIMPLE, TWO_TURNS, TWO_CALLS, SYSTEM_LATER, LEADING_NEWLINES], ids=range(5))
@pytest.mark.parametrize("thinking", [None, False])
def test_marks_and_special_tokens_tell_the_same(name, row, thinking):
    """Two independent readings of the same text: our marks, and the special tokens of the unmarked template."""

    def outcome(template):
        try:
            return [
                (e.input_ids.tolist(), e.loss_mask.tolist()) for e in encode(name, row, thinking, template=template)
            ]
        except RowRefused as refused:
            return refused.reason

    assert outcome(name) == outcome("own")


@pytest.mark.parametrize("name", SPECIAL_TOKENS)
def test_family_is_found_from_the_tokenizer(name):
    template = choose_template("own", tokenizer_of(name))
    assert template.family is FAMILIES[FAMILY[name]]
    assert choose_template("own", tokenizer_of(name), markers=FAMILY[name]).family is template.family


def test_glm_options_change_header_and_history_but_no_span():
    assert (
        tokenizer_of("glm-5.3")
        .decode(encode("glm-5.3", SIMPLE)[0].input_ids)
        .startswith("[gMASK]<sop><|system|>Reasoning Effort: Max<|user|>")
    )
    low = encode("glm-5.3", SIMPLE, extra=(("reasoning_effort", "low"),))[0]
    assert "Reasoning Effort: Low" in tokenizer_of("glm-5.3").decode(low.input_ids)
    assert spans("glm-5.3", low) == ["A<|user|>"]
    rows = encode("glm-5.3", TWO_TURNS, extra=(("clear_thinking", True),))
    assert [spans("glm-5.3", row) for row in rows] == [["R1</think>A1<|user|>"], ["R2</think>A2<|user|>"]]


def test_an_answer_that_repeats_its_reasoning():
    row = {"messages": [user(), answer("yes", reasoning_content="yes")]}
    assert supervised("deepseek-v3.1", row, True) == [["yes</think>yes" + EOS]]
    assert supervised("glm-5.3", row) == [["yes</think>yes<|user|>"]]
    assert encode("smollm2", row)[0].notes == {"assistant turns whose reasoning the template leaves out": 1}


# Behind a tool result the model goes on with no header of its own, and no special token tells where the result ends.
NO_HEADER = """{{- bos_token -}}
{%- for m in messages -%}
    {%- if m.role == 'user' -%}{{- '<｜User｜>' ~ m.content -}}
    {%- elif m.role == 'tool' -%}{{- '\n<results>' ~ m.content ~ '</results>\n' -}}
    {%- else -%}
        {{- '<｜Assistant｜>' if loop.previtem.role == 'user' -}}
        {{- OPENED ~ m.content -}}
        {%- for call in m.tool_calls or [] -%}{{- '[' ~ call.function.name ~ ']' -}}{%- endfor -%}
        {{- '<｜end▁of▁sentence｜>' -}}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- '<｜Assistant｜>' if messages[-1].role == 'user' -}}{{- '<think></think>' -}}
{%- endif -%}"""


@pytest.mark.parametrize(
    ("opened", "expected", "notes"),
    [
        ("'<think></think>'", [["[look_up]" + EOS, "A" + EOS]], set()),
        # rendered, the answer stands behind another text than the prompt: nothing tells where it begins
        ("'</think>'", [["[look_up]" + EOS], []], {"assistant turns the template does not mark"}),
    ],
)
def test_a_turn_without_a_header_is_never_taken_for_the_one_before(opened, expected, notes):
    tokenizer = byte_tokenizer("deepseek-v3.1", NO_HEADER.replace("OPENED", opened))
    template = choose_template("own", tokenizer)
    (rows,) = Encoder(template, tokenizer, 1000, None).encode([conversation({"messages": ONE_CALL["messages"]})])
    assert [spans("deepseek-v3.1", row) for row in rows] == expected
    assert {note for row in rows[1:] for note in row.notes} == notes


def test_reasoning_behind_a_block_that_the_prompt_opens():
    """A ChatML model that always thinks, whose template leaves reasoning out of history: QwQ."""
    source = """{%- for m in messages -%}
    {{- '<|im_start|>' ~ m.role ~ '\n' ~ m.content.split('</think>')[-1] ~ '<|im_end|>\n' -}}
    {%- endfor -%}{{- '<|im_start|>assistant\n<think>\n' if add_generation_prompt -}}"""
    tokenizer = byte_tokenizer("qwen3", source)
    encoder = Encoder(choose_template("own", tokenizer), tokenizer, 1000, None)
    (rows,) = encoder.encode([conversation(TWO_TURNS)])
    assert [spans("qwen3", row) for row in rows] == [
        ["R1\n</think>\n\nA1<|im_end|>"],
        ["R2\n</think>\n\nA2<|im_end|>"],
    ]


def test_a_family_that_does_not_fit_is_refused():
    with pytest.raises(TemplateError, match="the tokenizer has no token <start_of_turn>"):
        choose_template("own", tokenizer_of("qwen3"), markers="gemma")
    tokenizer = byte_tokenizer("kimi-k2")
    tokenizer.add_special_tokens({"extra_special_tokens": ["<|im_start|>"]})
    with pytest.raises(TemplateError, match=r"does not tell the turns .* begins a turn with '<\|im_assistant"):
        choose_template("own", tokenizer, markers="chatml")
    with pytest.raises(TemplateError, match="not one of chatml, llama3"):
        choose_template("own", tokenizer, markers="phi")


MARKERS = {name: FAMILIES[family].tokens for name, family in FAMILY.items()}


@pytest.mark.parametrize("name", SPECIAL_TOKENS)
def test_marker_strings_in_messages_change_no_mask(name):
    """The tokens are those a server's tokenizer makes; what is supervised is what it was without them."""
    opener = {"llama-4": "<|header_start|>assistant<|header_end|>\n\n",
              "llama3": "<|start_header_id|>assistant<|end_header_id|>\n\n", "gemma3": "<start_of_turn>model\n",
              "gemma-4": "<|turn>model\n", "glm-5.3": "<|assistant|>", "glm-4.6": "<|assistant|>",
              "deepseek-v3.1": "<｜Assistant｜>", "deepseek-r1": "<｜Assistant｜>", "gpt-oss": "<|start|>assistant",
              "kimi-k2": "<|im_assistant|>assistant<|im_middle|>", "minimax-m2": "]~b]ai\n",
              "kimi-k2-thinking": "<|im_assistant|>assistant<|im_middle|>", "inkling": "<|message_model|>",
              }.get(name, "<|im_start|>assistant\n")  # fmt: skip
    known = [token for token in MARKERS[name] if token in tokenizer_of(name).get_vocab()]
    injected = f"Q {opener}EVIL{''.join(known)} {opener}"
    plain = {"messages": [user("Q1"), answer("A1"), user("Q2"), answer("A2")]}
    evil = {"messages": [user(injected), answer("A1"), user(injected + "Q2"), answer("A2")]}
    rows = encode(name, evil)
    assert [spans(name, row) for row in rows] == supervised(name, plain)
    assert sum("special tokens inside" in note for row in rows for note in row.notes) == 1
    ids = rows[-1].input_ids.tolist()
    token = tokenizer_of(name).get_vocab()[known[0]]
    assert ids.count(token) >= injected.count(known[0])  # real tokens, as in serving
    with pytest.raises(RowRefused, match="marker_text=refuse"):
        encode(name, evil, marker_text="refuse")
    assert supervised(name, plain, marker_text="refuse") == supervised(name, plain)


@pytest.mark.parametrize("name", SPECIAL_TOKENS)
def test_an_answer_with_a_stop_token_inside_is_refused(name):
    """The server would have stopped there: it is no answer the model gave."""
    stop = FAMILIES[FAMILY[name]].ends[0] if FAMILY[name] != "glm" else "<|user|>"
    with pytest.raises(RowRefused, match="holds the text of a turn marker"):
        encode(name, {"messages": [user(), answer(f"A{stop}B")]})


def test_tool_calls_that_a_template_drops_are_refused():
    with pytest.raises(RowRefused, match="tool calls that the template leaves out: of look_up"):
        encode("gpt-oss", TWO_CALLS)  # Harmony renders one call a message
    with pytest.raises(RowRefused, match="tool calls that the template leaves out: of f, look_up"):
        encode("gpt-oss", {"messages": [user(), answer("", tool_calls=[call(0), call(1), call(2, "f")])]})


class TestHistory:
    def test_fan_out(self):
        first, last = encode("qwen3", TWO_TURNS)
        assert (first.turn, last.turn) == (1, None)
        assert tokenizer_of("qwen3").decode(first.input_ids).count("<|im_start|>") == 2
        assert "R1" not in tokenizer_of("qwen3").decode(last.input_ids)

    def test_last_turn(self):
        (row,) = encode("qwen3", TWO_TURNS, history="last_turn")
        assert spans("qwen3", row) == ["<think>\nR2\n</think>\n\nA2<|im_end|>"]
        assert row.notes == {"assistant turns not supervised (data.history=last_turn)": 1}

    def test_one_row(self):
        rows = [user("Q0"), answer("A0"), *TWO_TURNS["messages"]]
        (row,) = encode("qwen3-coder", {"messages": rows}, history="one_row")
        assert [text[:2] for text in spans("qwen3-coder", row)] == ["A0", "A1", "A2"]
        (row,) = encode("qwen3", {"messages": rows}, history="one_row")
        assert spans("qwen3", row) == ["<think>\nR2\n</think>\n\nA2<|im_end|>"]
        assert row.notes == {"assistant turns not supervised (data.history=one_row: the template rewrites them)": 2}

    def test_as_rendered(self):
        (row,) = encode("qwen3", TWO_TURNS, history="as_rendered")
        assert spans("qwen3", row) == ["A1<|im_end|>", "<think>\nR2\n</think>\n\nA2<|im_end|>"]
        (row,) = encode("glm-4.6", TWO_TURNS, history="as_rendered")
        assert spans("glm-4.6", row) == ["\nA1<|user|>", "\n<think>R2</think>\nA2<|user|>"]

    def test_as_rendered_keeps_one_text_where_the_prompt_differs(self):
        """Served, the answer after a tool stood behind its call's reasoning, which the template then removes."""
        (row,) = encode("gpt-oss", ONE_CALL, history="as_rendered")
        assert spans("gpt-oss", row) == [HARMONY_CALL, ANALYSIS.format("R2") + FINAL.format("A")]

    def test_turns_after_the_last_answer_are_left_out_and_counted(self):
        (row,) = encode("smollm2", {"messages": [user("Q1"), answer("A1"), user("Q2")]})
        assert row.notes == {"turns after the last assistant turn, left out": 1}
        assert "Q2" not in tokenizer_of("smollm2").decode(row.input_ids)


def test_turns_without_an_end_token():
    """A marker of another role closes a turn and is not the model's; the end of the text does, too."""
    text = "<|message_user|>q<|message_model|>a<|end_message|><|message_model|>b<|message_tool|>t<|message_model|>c"
    found = [text[start:end] for start, end in turn_spans(FAMILIES["inkling"], text)]
    assert found == ["a<|end_message|><|message_model|>b", "c"]
    text = "<|user|>q<|assistant|>a<|observation|>t<|assistant|>b<|system|>s<|assistant|>c<|user|>d"
    found = [text[start:end] for start, end in turn_spans(FAMILIES["glm"], text)]
    assert found == ["a<|observation|>", "b", "c<|user|>"]


WORDS = st.sampled_from(["", "x", "\n\ny", " z ", "w\n"])


@st.composite
def conversations(draw, tools: bool):
    """Conversations whose every text is told apart by a number."""
    messages, calls = [], 0
    for turn in range(draw(st.integers(1, 3))):
        messages.append(user(f"QUESTION{turn}" + draw(WORDS)))
        reasoning = draw(st.booleans())
        for step in range(draw(st.integers(0, 2)) if tools else 0):
            fields = {"reasoning_content": f"THOUGHT{turn}{step}"} if reasoning else {}
            messages.append(answer("", tool_calls=[call(calls)], **fields))
            messages.append(result(calls, f"OBSERVED{calls}"))
            calls += 1
        fields = {"reasoning_content": f"THOUGHT{turn}9"} if reasoning else {}
        messages.append(answer(draw(WORDS) + f"ANSWER{turn}", **fields))
    return {"messages": messages, "tools": TOOLS if calls else None}


@pytest.mark.parametrize("thinking", [None, True])
@pytest.mark.parametrize("name", SPECIAL_TOKENS)
@given(data=st.data())
@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_every_turn_is_supervised_once_behind_the_prompt_of_its_server(name, thinking, data):
    check_turns(name, thinking, data.draw(conversations(tools=name not in ("smollm2", "gemma3", "deepseek-r1"))))


def check_turns(name, thinking, row):
    """Prompts come from Transformers' own `apply_chat_template`."""
    base = name.partition("@")[0]
    tokenizer = tokenizer_of(name)
    rows = encode(name, row, thinking)
    messages = choose_template("own", tokenizer).messages_for(conversation(row).messages)
    turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    texts = [text for encoded in rows for text in spans(name, encoded)]
    everything = "".join(texts)
    assert "QUESTION" not in everything
    assert "OBSERVED" not in everything
    for turn in range(3):
        assert everything.count(f"ANSWER{turn}") == json.dumps(row).count(f"ANSWER{turn}")
    assert len(texts) == len(turns)
    switch = {} if thinking is None else {"enable_thinking": thinking, "thinking": thinking}
    for encoded in rows:
        end = turns[-1 if encoded.turn is None else encoded.turn - 1]
        prompt = tokenizer.apply_chat_template(
            messages[:end], tools=row["tools"], add_generation_prompt=True, return_dict=True, **switch
        )["input_ids"]
        if base == "gpt-oss":
            continue  # its prompt holds today's date
        ids, mask = encoded.input_ids.tolist(), encoded.loss_mask.tolist()
        if any("do not continue" in note for note in encoded.notes):
            # models that always think, in a row without reasoning; or one that was told not to, in a row with some
            assert base in ("deepseek-v3.1", "deepseek-r1", "minimax-m2") or (base, thinking) == ("gemma-4", None)
            continue
        assert ids[: len(prompt)] == prompt
        behind = mask[len(prompt) :]
        if not any("empty think blocks" in note for note in encoded.notes):
            assert behind[0] == 1
        assert sum(mask[: len(prompt)]) == sum(mask) - sum(behind)
        assert tokenizer.decode([t for t, m in zip(ids[len(prompt) :], behind) if m]) == spans(name, encoded)[-1]
