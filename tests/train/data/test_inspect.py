"""`draft-jax inspect`: what is shown is what is trained on, and a mismatch with serving does not stay hidden."""

import dataclasses
import html
import json
import re

import numpy as np
import pytest

from train.data.config import DataConfig
from train.data.files import Place
from train.data.inspect_page import page
from train.data.inspect_text import record_text
from train.data.inspection import Inspector, TokenView, choose, token_views
from train.data.pipeline import load_dataset

CHAT = {
    "messages": [
        {"role": "user", "content": "a b"},
        {"role": "assistant", "content": "c d"},
        {"role": "user", "content": "e"},
        {"role": "assistant", "content": "f g h"},
    ]
}


@pytest.fixture
def look(make_toy_tokenizer, toy_template, toy_template_file):
    """Record -> its view; `own` is the tokenizer's own template."""

    def run(row, own: str = toy_template, **options):
        tokenizer = make_toy_tokenizer(chat_template=own)
        given = {"template": toy_template_file, "min_loss_tokens": 1, **options}
        inspector = Inspector(DataConfig("rows.jsonl", **given), tokenizer, 31)
        data = row if isinstance(row, bytes) else json.dumps(row).encode()
        return inspector.look(Place("rows.jsonl", 1), data)

    return run


def test_turns_as_served(look):
    record = look(CHAT)
    assert [turn.row for turn in record.served] == [0, 0]
    assert [turn.prompt_tokens for turn in record.served] == [10, 23]
    assert record.served[0].prompt.endswith("<|im_start|>assistant\n")
    assert "the model's first token is supervised" in record.served[1].verdict


def test_another_system_prompt_in_serving_is_seen(look, toy_template):
    """The tokenizer's own template says something the training template does not, and nobody compares them."""
    record = look(CHAT, own="{{- '<|im_start|>system\n' -}}" + toy_template, verify_template=False)
    assert [turn.row for turn in record.served] == [None, None]
    assert "differs at token 1: training has 'user" in record.served[0].verdict
    assert "a server sends 'system" in record.served[0].verdict


def test_a_prompt_that_opens_a_think_block_is_seen(look, toy_template, tmp_path):
    """Training without the block that serving opens: the prompt goes on where the model was taught to begin."""
    header = "'<|im_start|>assistant\\n' -}}\n{%- endif"
    thinking = toy_template.replace(header, header.replace("n' ", "n<think>' "))
    assert thinking != toy_template
    record = look(CHAT, own=thinking, verify_template=False)
    assert [turn.row for turn in record.served] == [None, None]
    assert "training has 'c" in record.served[0].verdict
    assert "a server sends '<think>'" in record.served[0].verdict


def test_supervision_that_starts_behind_a_scaffold_is_seen(look, toy_template, tmp_path):
    """The prompt opens a think block and the row has no reasoning: what closes it is not the model's to learn, and the
    page says that a server's model would write there."""
    scaffold = toy_template.replace("<|im_start|>assistant\\n'", "<|im_start|>assistant\\n<think>'")
    scaffold = scaffold.replace(
        "{{- '<|im_start|>' ~ message.role ~ '\\n' -}}",
        "{{- '<|im_start|>' ~ message.role ~ '\\n' -}}{%- if message.role == 'assistant' -%}<think>{%- endif -%}",
    ).replace("{{- message.content -}}", "{{- '</think>' ~ message.content -}}")
    file = tmp_path / "scaffold.jinja"
    file.write_text(scaffold)
    record = look({"messages": CHAT["messages"][:2]}, own=scaffold, template=str(file))
    assert record.served[0].row is None
    assert "same prompt; supervised only behind '</think>'" in record.served[0].verdict


def test_what_is_not_trained_is_said(look):
    assert "zeroed" in look(CHAT, min_loss_tokens=20).served[0].verdict
    cut = look(CHAT, max_length=20)
    assert "first token is supervised" in cut.served[0].verdict
    assert "cut off by data.max_length" in cut.served[1].verdict
    assert look(b"{no").refused.startswith("not JSON")
    assert look({"messages": CHAT["messages"][:1]}).refused.startswith("no assistant turn")
    assert look({"input_ids": [1, 2], "loss_mask": [1, 1]}).served == []


def test_the_tokens_are_those_of_training(look, write_rows, toy_tokenizer, toy_template_file):
    record = look(CHAT)
    config = DataConfig(write_rows([CHAT]), template=toy_template_file, min_loss_tokens=1, prepared="nowhere")
    (sample,) = load_dataset(config, toy_tokenizer, 31).samples
    tokens = record.samples[0].tokens
    assert [i for token in tokens for i in token.ids] == sample.input_ids.tolist()
    assert [int(token.supervised) for token in tokens for _ in token.ids] == sample.loss_mask.tolist()
    text = record_text(record, colour=False)
    inside = re.findall(r"⟦(.*?)⟧", text)
    assert [part.split() for part in inside] == [["c", "d", "<|im_end|>"], ["f", "g", "h", "<|im_end|>"]]
    coloured = record_text(record, colour=True)
    assert coloured.count("\x1b[42;30m") == int(sample.loss_mask.sum())
    shown = page([record], ["a fact"])
    assert len(re.findall(r'<b title="', shown)) == int(sample.loss_mask.sum())


def test_pieces_of_a_character_are_shown_together():
    """Byte-level tokens: the text comes back whole, whatever the borders; a group with a part unsupervised is not
    shown as supervised."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    text = "aé 你🦙 b\n"
    ids = np.array(tokenizer(text)["input_ids"])
    mask = np.ones(len(ids), np.int8)
    mask[-3] = 0
    views = token_views(tokenizer, ids, mask, set())
    assert "".join(view.text for view in views) == text
    assert [view.text for view in views] == list(text)
    assert [i for view in views for i in view.ids] == ids.tolist()
    mask[:] = 1
    mask[2] = 0  # the second byte of é
    assert [view.supervised for view in token_views(tokenizer, ids, mask, set())][:3] == [True, False, True]


def test_text_of_the_data_cannot_become_markup(look):
    record = look({"messages": [{"role": "user", "content": "<script>alert(1)</script>"}, CHAT["messages"][1]]})
    shown = page([record], ["<img src=x>"])
    assert "<script" not in shown
    assert "<img" not in shown
    assert html.escape("<img src=x>") in shown
    assert "http" not in shown  # self-contained: nothing is fetched


def test_control_characters_are_shown_not_obeyed(look):
    """A carriage return or an escape sequence in the data moves no cursor and colours no terminal."""
    record = look(CHAT)
    token = TokenView("a\r\x1b[31m\x00\tb\n\x7f", (3,), True, False)
    turn = dataclasses.replace(record.served[0], prompt="c\x1bd")
    sample = dataclasses.replace(record.samples[0], id="e\x1bf", tokens=[token])
    record = dataclasses.replace(record, samples=[sample], served=[turn])
    for shown in (page([record], []), record_text(record, colour=False)):
        assert not set(shown) & {"\r", "\x00", "\x1b", "\x7f"}
        assert "a␍␛[31m␀\tb" in shown
        assert "e␛f" in shown
    assert "c␛d" in page([record], [])
    refused = dataclasses.replace(record, samples=[], refused="no \x1b")
    assert "no ␛" in page([refused], [])
    assert "no ␛" in record_text(refused, colour=True)


def test_the_choice_is_even_and_in_order():
    records = [(Place("f", i), b"") for i in range(1, 41)]
    counts = dict.fromkeys(range(1, 41), 0)
    for seed in range(400):
        lines = [place.line for place, _ in choose(records, 10, seed, 40)]
        assert lines == sorted(lines)
        assert len(set(lines)) == 10
        for line in lines:
            counts[line] += 1
    assert all(60 <= count <= 140 for count in counts.values()), counts  # 100 expected, 8.7 its deviation
    assert {place.line for place, _ in choose(records, 50, 0, 15)} == set(range(1, 16))
    assert choose(records, 5, 1, 40) == choose(records, 5, 1, 40)
