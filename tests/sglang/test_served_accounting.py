"""SGLang's own bookkeeping against what we say it is: its requests, its settling of rounds, its meta_info.

DSPARK itself needs a GPU. What decides how its rounds are counted and cut does not: the scheduler's settling of a
verified batch, the request's stop rules and the tokenizer manager's report run here on enumerated rounds.
"""

import itertools
import random
from array import array
from types import SimpleNamespace

import pytest
import sglang

from target_bridge.serving.server import ServedOutput
from tests import fake_sglang
from tests.train.serve_check.test_accounting import EOS, K, every_decoding, ours
from train.serve_check.accounting import read_served

STOP_FIRST = tuple(int(part) for part in sglang.__version__.split(".")[:3]) >= (0, 5, 23)
FAKE = fake_sglang.load()


@pytest.fixture(scope="module")
def settle():
    """The scheduler's code that turns a verified batch into the tokens of its one request, and counts them."""
    processor = pytest.importorskip("sglang.srt.managers.scheduler_components.batch_result_processor")
    owner = next(
        item for item in vars(processor).values() if isinstance(item, type) and hasattr(item, "_resolve_spec_v2_tokens")
    )
    import torch

    ignore = lambda *args, **kwargs: None  # noqa: E731
    scheduler = SimpleNamespace(
        metrics_reporter=SimpleNamespace(snapshot_spec_decode_metrics=ignore),
        model_worker=SimpleNamespace(on_verify_complete_cpu=ignore),
        advance_grammar_fsm=ignore,
    )

    def run(request, drafts, accepted, bonus):
        row = [*drafts[:accepted], bonus]
        padded = row + [0] * (K + 1 - len(row))
        result = SimpleNamespace(
            next_token_ids=torch.tensor(padded), accept_lens=torch.tensor([len(row)]), block_accept_lens=None,
            cap_lens=None, speculative_num_draft_tokens=K + 1, speculative_output_stride=None,
            num_non_draft_tokens_per_req=1,
        )  # fmt: skip
        return owner._resolve_spec_v2_tokens(scheduler, result, SimpleNamespace(reqs=[request]))[0]

    return run


@pytest.fixture(scope="module")
def report():
    """The tokenizer manager's spec_* entries of meta_info for a finished request."""
    from sglang.srt.managers import tokenizer_manager

    patch = pytest.MonkeyPatch()
    arguments = SimpleNamespace(speculative_num_draft_tokens=K + 1)
    if hasattr(tokenizer_manager, "get_spec"):
        patch.setattr(tokenizer_manager, "get_spec", lambda: arguments)
    manager = SimpleNamespace(server_args=arguments)

    def run(req):
        tokens = list(req.output_ids_through_stop)
        streamed = SimpleNamespace(
            spec_verify_ct=[req.spec_verify_ct], spec_num_correct_drafts=[req.spec_num_correct_drafts],
            completion_tokens=[len(tokens)], spec_correct_drafts_histogram=[req.spec_correct_drafts_histogram],
        )  # fmt: skip
        meta = {
            "finish_reason": req.finished_reason.to_json(),
            "completion_tokens": len(tokens),
            "num_retractions": req.retraction_count,
        }
        tokenizer_manager.TokenizerManager._calculate_spec_decoding_metrics(manager, meta, streamed, 0)
        return tokens, meta

    yield run
    patch.undo()


@pytest.fixture(scope="module")
def serve(settle, report):
    """A decoding by SGLang's code: (tokens, meta_info)."""
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.sampling.sampling_params import SamplingParams

    def run(first, rounds, budget):
        parameters = SamplingParams(temperature=0.0, max_new_tokens=budget, stop_token_ids=[EOS])
        parameters.normalize(None)
        req = Req("r", "", array("q", [1, 2]), parameters, eos_token_ids={EOS}, vocab_size=100)
        if getattr(req, "kv", None) is None:
            req.kv = SimpleNamespace(kv_committed_len=0)
        req.output_ids.append(first)
        req.update_finish_state()
        for drafts, accepted, bonus in rounds:
            if req.finished():
                break
            tokens = settle(req, drafts, accepted, bonus)
            req.output_ids.extend(tokens)
            req.update_finish_state(len(tokens))
        assert req.finished()
        return report(req)

    return run


def cases(count):
    return random.Random(5).sample(list(every_decoding()), count)


def test_our_reading_of_real_counts_equals_our_own_accounting(serve):
    for first, rounds, budget in cases(1500):
        tokens, settled, finish = ours(first, rounds, budget)
        output = ServedOutput(*serve(first, rounds, budget))
        sample = read_served("p", output, [EOS], budget, K)
        assert list(sample.tokens) == tokens
        assert sample.rounds == len(settled)
        assert sample.committed == sum(item.length for item in settled)
        assert sample.finish == finish


def test_the_stand_in_counts_as_the_real_one(serve):
    """What the other tests of serve-check replay is what SGLang reports."""
    keys = ("finish_reason", "completion_tokens", "num_retractions", "spec_verify_ct", "spec_accept_length",
            "spec_num_correct_drafts", "spec_correct_drafts_histogram")  # fmt: skip
    for first, rounds, budget in cases(1500):
        tokens, meta = serve(first, rounds, budget)
        fake_tokens, fake_meta = FAKE.replay(first, rounds, budget, {EOS}, K, STOP_FIRST)
        assert tokens == fake_tokens
        assert {key: meta.get(key) for key in keys} == {key: fake_meta.get(key) for key in keys}


def test_the_cases_hold_every_kind_of_end():
    kinds = {(ours(*case)[2], bool(ours(*case)[1])) for case in cases(1500)}
    assert kinds == set(itertools.product(("eos", "length"), (True, False)))
