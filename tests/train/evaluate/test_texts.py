"""Texts of tokens: leading spaces stay, every id of outputs and proposals has one."""

from tests.train.evaluate.test_tasks import make_tokenizer
from train.evaluate.accounting import Round, accept_statistics
from train.evaluate.result import EvalResult
from train.evaluate.sample_result import SampleResult, Seconds
from train.evaluate.texts import token_texts


class Stripping:
    """Decodes as SentencePiece tokenizers do: words begin with a space, but not at the start of a text."""

    words = ("a", " cat", "s", "<end>")

    def __call__(self, text, *, add_special_tokens):
        assert not add_special_tokens
        return {"input_ids": [9, 0]}

    def decode(self, ids):
        return "".join(self.words[i] for i in ids).lstrip(" ")


def result_of(*rounds):
    sample = SampleResult("p", 1, 1, list(rounds), "eos", Seconds())
    return EvalResult(accept_statistics(rounds, 2), [sample], [], [], {})


def test_ids_of_outputs_and_proposals_with_their_spaces():
    texts = token_texts(Stripping(), result_of(Round((1, 3), 2, 1, "eos", drafts=(1, 2))))
    assert texts == {"1": " cat", "2": "s", "3": "<end>"}


def test_with_a_real_tokenizer():
    tokenizer = make_tokenizer()
    texts = token_texts(tokenizer, result_of(Round((2, 3), 2, 1, drafts=(2, 9))))
    assert {key: text.strip() for key, text in texts.items()} == {
        str(i): tokenizer.convert_ids_to_tokens(i) for i in (1, 2, 3, 9)
    }
