"""What a result says of its samples."""

import pytest

from train.evaluate.accounting import Round, accept_statistics
from train.evaluate.result import EvalResult
from train.evaluate.sample_result import SampleResult, Seconds

ROUNDS = [Round((11, 12, 50), proposed=3, accepted=2), Round((13, 9), proposed=2, accepted=2, finish="eos")]


@pytest.fixture
def sample():
    return SampleResult("p", 4, 10, ROUNDS, "eos", Seconds(0.5, 0.25, 1.0, 2.0), [10, 11], Seconds(total=1.0))


@pytest.fixture
def result(sample):
    return EvalResult(accept_statistics(ROUNDS, 3), [sample], [], [], {"greedy": True})


class Letters:
    """A tokenizer of one letter per id; id 50 needs 13 to become a whole character."""

    def decode(self, ids):
        text = ""
        for i, token in enumerate(ids):
            if token == 50:
                text += "é" if i + 1 < len(ids) else "�"
            elif not (token == 13 and i and ids[i - 1] == 50):
                text += chr(ord("a") + token - 9)
        return text


def test_tokens_and_their_origin(sample):
    assert sample.output_tokens == [10, 11, 12, 50, 13, 9]
    assert sample.token_kinds == ["first", "draft", "draft", "target", "draft", "draft"]


def test_pieces_join_to_the_text_and_never_show_half_a_character(sample):
    pieces = sample.pieces(Letters())
    assert "".join(piece["text"] for piece in pieces) == Letters().decode(sample.output_tokens) == "bcdéa"
    assert [piece["kind"] for piece in pieces] == ["first", "draft", "draft", "draft", "draft"]


def test_speed_and_shares(result):
    assert result.tokens == 6
    assert result.tokens_per_second_draft == 6 / 2.0
    assert result.tokens_per_second_plain == 2 / 1.0
    assert result.speedup == 1.5
    assert result.draft_share == 0.125
    assert result.seconds.other == 0.25
    assert result.identical_to_plain == 0


def test_means_are_told_apart(sample):
    short = SampleResult("q", 1, 5, [Round((7,), 3, 0)], "length", Seconds(), task="other")
    result = EvalResult(accept_statistics([*ROUNDS, *short.rounds], 3), [sample, short], [], [], {"greedy": True})
    assert result.accept_length == 6 / 3
    assert result.accept_length_sample_mean == (5 / 2 + 1) / 2
    assert result.accept_length_task_mean == (5 / 2 + 1) / 2
    third = SampleResult("r", 1, 5, [Round((7, 8), 3, 1)], "length", Seconds(), task="other")
    result.samples.append(third)
    assert result.accept_length_task_mean == (5 / 2 + 3 / 2) / 2
    result.samples[0].rounds = []
    assert result.accept_length_task_mean is None, "a task without rounds has no accept length to average"
    assert result.identical_to_plain is None, "one sample has no plain output to compare with"


def test_an_error_withholds_the_number(result):
    result.error = "nothing proposed"
    assert result.accept_length is None
    assert result.accept_length_sample_mean is None
    assert result.accept_length_task_mean is None
    assert result.to_json()["accept_length"] is None
    assert result.to_json()["error"] == "nothing proposed"
