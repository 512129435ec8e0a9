"""Prompts files: every form asks the same thing, rendered as a server renders it; what is left out is
counted.
"""

import gzip
import json

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from train.data import QUICKSTART_PROMPTS
from train.evaluate.tasks import load_prompts

TEMPLATE = (
    "{% for m in messages %}<|im_start|> {{ m['role'] }} {{ m['content'] }} <|im_end|> {% endfor %}"
    "{% if add_generation_prompt %}<|im_start|> assistant {% endif %}"
)
THINKING = TEMPLATE + "{% if enable_thinking is defined and enable_thinking is false %}<think> </think>{% endif %}"
WORDS = [
    "<unk>",
    "<|im_start|>",
    "<|im_end|>",
    "system",
    "user",
    "assistant",
    "<think>",
    "</think>",
    *"abcdefgh",
]


def make_tokenizer(template=TEMPLATE):
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")
    fast.chat_template = template
    return fast


@pytest.fixture
def write(tmp_path):
    def to_file(*rows, name="prompts.jsonl"):
        path = tmp_path / name
        text = "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows)
        path.write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())
        return path

    return to_file


def words(prompt):
    return " ".join(WORDS[i] for i in prompt.input_ids)


def user(text):
    return {"role": "user", "content": text}


def assistant(text):
    return {"role": "assistant", "content": text}


def test_every_form_asks_the_same(write):
    path = write(
        {"turns": ["a b"]},
        {"messages": [user("a b")]},
        {"messages": [user("a b"), assistant("c")]},
        {"conversations": [{"from": "human", "value": "a b"}, {"from": "gpt", "value": "c"}]},
        {"conversations": [{"from": "human", "value": "a b"}]},
    )
    found = load_prompts(path, make_tokenizer())
    assert {words(p) for p in found.prompts} == {"<|im_start|> user a b <|im_end|> <|im_start|> assistant"}
    assert [p.text for p in found.prompts] == ["a b"] * 5
    assert found.summary() == ""


def test_history_up_to_the_last_answer(write):
    path = write(
        {
            "messages": [
                {"role": "system", "content": "h"},
                user("a"),
                assistant("b"),
                user("c"),
                assistant("d"),
            ]
        }
    )
    (prompt,) = load_prompts(path, make_tokenizer()).prompts
    assert words(prompt) == (
        "<|im_start|> system h <|im_end|> <|im_start|> user a <|im_end|> <|im_start|> assistant b <|im_end|> "
        "<|im_start|> user c <|im_end|> <|im_start|> assistant"
    )


def test_an_open_question_after_an_answer_is_what_is_asked(write):
    path = write({"messages": [user("a"), assistant("b"), user("c")]})
    (prompt,) = load_prompts(path, make_tokenizer()).prompts
    assert words(prompt).endswith("<|im_start|> user c <|im_end|> <|im_start|> assistant")


def test_first_turn_only_and_that_is_said(write):
    found = load_prompts(write({"turns": ["a", "b", "c"]}), make_tokenizer())
    assert words(found.prompts[0]).startswith("<|im_start|> user a <|im_end|>")
    assert "b" not in words(found.prompts[0]).split()
    assert found.summary() == "2 later user turn(s) not asked: a row of turns asks its first"


def test_thinking_is_off_where_the_template_knows_it(write):
    path = write({"turns": ["a"]})
    (prompt,) = load_prompts(path, make_tokenizer(THINKING)).prompts
    assert words(prompt).endswith("assistant <think> </think>")
    (prompt,) = load_prompts(path, make_tokenizer(THINKING), enable_thinking=True).prompts
    assert words(prompt).endswith("assistant")


def test_a_named_template_replaces_the_tokenizers(write):
    class Spy:
        """Keeps the text it is asked to tokenise."""

        chat_template, special_tokens_map = None, {}

        def __call__(self, text, *, add_special_tokens):
            assert not add_special_tokens, "the template writes them: never a second BOS"
            self.text = text
            return {"input_ids": [1]}

    spy = Spy()
    load_prompts(write({"turns": ["a"]}), spy, template="chatml")
    assert spy.text == "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n"
    with pytest.raises(ValueError, match="no chat template"):
        load_prompts(write({"turns": ["a"]}), make_tokenizer(None))
    with pytest.raises(ValueError, match="nonsense"):
        load_prompts(write({"turns": ["a"]}), make_tokenizer(), template="nonsense")


def test_ids_name_prompts_and_stay_unique(write):
    path = write({"id": "x", "turns": ["a"]}, {"turns": ["b"]}, {"id": "x", "turns": ["c"]}, {"id": 7, "turns": ["d"]})
    names = [p.id for p in load_prompts(path, make_tokenizer()).prompts]
    assert names == ["x", "prompts.jsonl:2", "x#3", "7"]


def test_limit_and_gzip(write):
    path = write(*({"turns": [c]} for c in "abc"), name="prompts.jsonl.gz")
    assert [p.text for p in load_prompts(path, make_tokenizer(), limit=2).prompts] == ["a", "b"]


def test_bad_rows_are_counted_by_reason_with_their_line(write):
    path = write(
        {"turns": ["a"]}, "{not json", {"turns": []}, {"turns": ["  "]}, {"messages": []},
        {"messages": [assistant("b")]}, {"messages": [{"role": "robot", "content": "a"}]},
        {"messages": [{"role": "user", "content": None}]}, {"other": 1}, "[1]", {"turns": [""]},
        {"input_ids": [1, 2], "loss_mask": [0, 1]},
    )  # fmt: skip
    found = load_prompts(path, make_tokenizer())
    assert len(found.prompts) == 1
    assert [line for line, _ in found.refused] == list(range(2, 13))
    assert "2 row(s) refused: empty prompt (first: line 4)" in found.summary()
    reasons = [reason for _, reason in found.refused]
    assert reasons[0] == "not JSON"
    assert "unknown role" in reasons
    assert "content is null without tool calls" in reasons


def test_no_prompt_at_all_is_an_error(write, tmp_path):
    with pytest.raises(ValueError, match=r"holds no prompt: 1 row\(s\) refused: not JSON"):
        load_prompts(write("{"), make_tokenizer())
    with pytest.raises(ValueError, match="it has no rows"):
        load_prompts(write(), make_tokenizer())
    with pytest.raises(ValueError, match=r"absent\.jsonl does not exist"):
        load_prompts(tmp_path / "absent.jsonl", make_tokenizer())


def test_a_template_that_refuses_is_counted(write):
    strict = make_tokenizer("{{ raise_exception('no system turns') }}")
    with pytest.raises(ValueError, match="refused by the chat template"):
        load_prompts(write({"turns": ["a"]}), strict)


def test_shipped_prompts_are_the_default():
    found = load_prompts(None, make_tokenizer())
    assert QUICKSTART_PROMPTS.is_file()
    assert len(found.prompts) >= 14
    assert found.refused == []


def test_later_turns_are_asked_after_the_answers(write):
    path = write({"id": "x", "turns": ["a", "b", "c"]}, {"id": "y", "turns": ["d"]}, {"id": "z", "turns": ["a", "e"]})
    first = load_prompts(path, make_tokenizer())
    second = first.next_turn({"x": "f g", "y": "h"})  # z was refused by the evaluation
    (prompt,) = second.prompts
    assert prompt.id == "x#turn2"
    assert prompt.text == "b"
    assert words(prompt) == (
        "<|im_start|> user a <|im_end|> <|im_start|> assistant f g <|im_end|> <|im_start|> user b <|im_end|> "
        "<|im_start|> assistant"
    )
    (last,) = second.next_turn({"x#turn2": "h"}).prompts
    assert last.id == "x#turn3"
    assert words(last).endswith("assistant h <|im_end|> <|im_start|> user c <|im_end|> <|im_start|> assistant")
    assert last.follow_ups == ()


def test_rows_say_their_task(write):
    path = write({"task": "maths", "turns": ["a"]}, {"turns": ["b"]}, {"task": 3, "turns": ["c"]}, name="mix.jsonl.gz")
    found = load_prompts(path, make_tokenizer())
    assert [p.task for p in found.prompts] == ["maths", "mix"]
    assert found.refused == [(3, "task is not a string")]
