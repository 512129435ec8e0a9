"""The decoding loop: lossless, well accounted, independent of order, loud when the draft does nothing."""

import dataclasses
import json

import numpy as np
import pytest

from target_bridge import handoff
from train.evaluate.config import EvalConfig
from train.evaluate.decoding import DraftDecoding
from train.evaluate.draft_runner import DraftRunner
from train.evaluate.plain import decode_plain
from train.evaluate.protocol import MismatchError, evaluate
from train.evaluate.roster import Job, sample_generator
from train.evaluate.tasks import Prompt
from train.evaluate.terminal import format_result

pytestmark = pytest.mark.usefixtures("quick_compilation")


def settings(**fields) -> EvalConfig:
    """Four slots: one set of compiled programs for most tests."""
    return EvalConfig(**{"batch_size": 4, **fields})


@pytest.fixture(scope="module")
def target(make_target):
    return make_target()


@pytest.fixture(scope="module")
def config(make_config, target):
    return make_config(target)


@pytest.fixture(scope="module")
def params(make_params, config):
    return make_params(config)


@pytest.fixture(scope="module")
def greedy(target, config, params, make_prompts):
    return evaluate(target, config, params, None, make_prompts(24), settings(max_new_tokens=24))


def outputs(result):
    return {sample.prompt: sample.output_tokens for sample in result.samples}


def test_greedy_output_equals_plain_decoding(greedy):
    assert greedy.identical_to_plain == 24
    assert greedy.differences == []
    assert greedy.error is None


def test_plain_decoding_equals_transformers_generate(target, greedy, make_prompts):
    """The reference that both are compared with is not ours."""
    import torch

    for prompt in make_prompts(24)[:6]:
        expected = target._model.generate(
            torch.tensor(prompt.input_ids[None].astype(np.int64)), max_new_tokens=24, do_sample=False,
            attention_mask=torch.ones(1, len(prompt.input_ids), dtype=torch.long), pad_token_id=0,
        )[0, len(prompt.input_ids) :].tolist()  # fmt: skip
        assert outputs(greedy)[prompt.id] == expected


def test_the_rounds_account_for_every_token(greedy):
    assert greedy.tokens == 24 * 24
    for sample in greedy.samples:
        assert len(sample.output_tokens) == 24
        assert sum(item.length for item in sample.rounds) == 23
        assert all(item.finish is None for item in sample.rounds[:-1])
        assert sample.finish == sample.rounds[-1].finish == "length"
        assert len(sample.token_kinds) == 24
        assert sample.token_kinds.count("draft") == sum(item.accepted for item in sample.rounds)
    assert greedy.accept_length == greedy.statistics.committed / greedy.rounds
    assert greedy.statistics.committed == 24 * 23


def test_some_drafts_are_accepted_and_some_refused(greedy):
    """Otherwise the tests above would not have seen both branches."""
    assert 0 < greedy.statistics.accepted < greedy.statistics.proposed
    assert greedy.survival[0] is not None
    assert 0 < greedy.survival[0] < 1


def test_compiled_once(greedy):
    assert greedy.compiled["before"] == greedy.compiled["after"] == 4


def test_time_is_accounted(greedy):
    """Shares of prompts decoded side by side add up to the whole, which no prompt had for itself."""
    seconds = greedy.seconds
    assert seconds.total >= seconds.prefill + seconds.draft + seconds.target > 0
    assert all(0 < sample.seconds.total < seconds.total for sample in greedy.samples)
    assert greedy.tokens_per_second_draft == greedy.tokens / seconds.total
    assert greedy.rounds_per_second == greedy.rounds / seconds.total
    assert greedy.speedup == greedy.tokens_per_second_draft / greedy.tokens_per_second_plain
    assert 0 < greedy.draft_share < 1


def test_rounds_keep_what_was_drafted_and_how_sure_the_draft_was(greedy, config):
    """What calibration and reports read: the proposals that count, accepted or not, each with its confidence."""
    for sample in greedy.samples:
        for item in sample.rounds:
            assert len(item.drafts) == len(item.confidence_logits) == item.proposed
            assert item.tokens[: item.accepted] == item.drafts[: item.accepted]
            if item.accepted < item.proposed and item.length > item.accepted:
                assert item.tokens[item.accepted] != item.drafts[item.accepted], "greedy: a refused draft is wrong"


def test_json_and_table(greedy):
    record = json.loads(json.dumps(greedy.to_json()))
    assert record["accept_length"] == greedy.accept_length
    assert record["survival"] == list(greedy.survival)
    assert record["samples"][0]["output_tokens"] == greedy.samples[0].output_tokens
    assert "samples" not in greedy.to_json(samples=False)
    assert ("equal to plain greedy decoding", "24 of 24") in greedy.table()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_order_and_company_change_nothing(target, config, params, make_prompts, temperature):
    """Batches of 1, 4 and 9, backwards, alone: the same tokens, and the same rounds."""
    prompts = make_prompts(9)
    eval_config = settings(max_new_tokens=12, temperature=temperature, plain=False)
    forward = evaluate(target, config, params, None, prompts, eval_config)
    for others in (prompts[::-1], prompts[2:3]):
        again = evaluate(target, config, params, None, others, eval_config)
        assert outputs(again) == {prompt.id: outputs(forward)[prompt.id] for prompt in others}
    for batch in (1, 9):
        again = evaluate(target, config, params, None, prompts, dataclasses.replace(eval_config, batch_size=batch))
        assert again.settings["batch_size"] == batch
        assert outputs(again) == outputs(forward)
        assert again.statistics == forward.statistics
        assert [sample.prompt for sample in again.samples] == [prompt.id for prompt in prompts]
    other_seed = evaluate(target, config, params, None, prompts, dataclasses.replace(eval_config, seed=1))
    assert (outputs(other_seed) == outputs(forward)) == (temperature == 0.0)


def test_plain_sampling_does_not_depend_on_the_batch_either(target, make_prompts):
    jobs = [Job(prompt, 10) for prompt in make_prompts(7)]
    one, many = ({o.prompt: o.tokens for o in decode_plain(target, jobs, 0.8, 5, batch)} for batch in (1, 4))
    assert one == many
    assert len({tuple(tokens) for tokens in one.values()}) == 7


def test_a_slot_takes_the_next_prompt_while_the_others_go_on(target, config, params, make_prompts):
    """Budgets so different that the short ones end in the company of long ones: more prompts than slots, and fewer
    rounds of all than one after the other would need."""
    prompts = make_prompts(10)
    limits = {prompt.id: (3 if i % 2 else 30) for i, prompt in enumerate(prompts)}
    jobs = [Job(prompt, limits[prompt.id]) for prompt in prompts]
    frozen = handoff.frozen_to_jax(*target.frozen_head())
    runner = DraftRunner(
        config, params, frozen, max_context=128, batch=4, dtype="float32", device=target.device,
    )  # fmt: skip
    decoding = DraftDecoding(target, runner, jobs, settings())
    rounds = []
    one_round = decoding._round
    decoding._round = lambda session: rounds.append(len(decoding._roster.live)) or one_round(session)
    samples = {sample.prompt: sample for sample in decoding.run()}
    for job in jobs:
        expected = next(decode_plain(target, [job], 0.0, 0, 1)).tokens
        assert samples[job.prompt.id].output_tokens == expected
    assert sum(rounds) == sum(len(sample.rounds) for sample in samples.values())
    assert rounds[0] == 4
    assert len(rounds) < sum(rounds) / 2
    assert list(samples) != [prompt.id for prompt in prompts], "they end in another order than they begin"


@pytest.mark.parametrize("head", [{"markov_rank": 0, "confidence_head_with_markov": False},
                                  {"markov_head_type": "gated", "enable_confidence_head": False},
                                  {"markov_head_type": "rnn", "block_size": 1}])  # fmt: skip
def test_every_kind_of_draft_is_lossless(target, make_config, make_params, make_prompts, head):
    config = make_config(target, **head)
    result = evaluate(target, config, make_params(config), None, make_prompts(4), settings(max_new_tokens=12))
    assert result.identical_to_plain == 4
    assert len(result.survival) == config.block_size


def test_untrained_draft_is_made_here(target, config, make_prompts):
    eval_config = settings(max_new_tokens=8)
    first = evaluate(target, config, None, None, make_prompts(3), eval_config)
    again = evaluate(target, config, None, None, make_prompts(3), eval_config)
    assert first.identical_to_plain == 3
    assert first.statistics == again.statistics


def test_stop_token_ends_the_output(make_target, make_config, make_params, make_prompts, greedy):
    """The same weights with a frequent token made the stop token: outputs are cut right after its first
    place.
    """
    tokens = [token for sample in greedy.samples for token in sample.output_tokens]
    eos = max(set(tokens), key=tokens.count)
    target = make_target(eos=eos)
    config = make_config(target, eos_token_id=None)
    result = evaluate(target, config, make_params(config), None, make_prompts(24), settings(max_new_tokens=24))
    for sample in result.samples:
        whole = outputs(greedy)[sample.prompt]
        cut = whole[: whole.index(eos) + 1] if eos in whole else whole
        assert sample.output_tokens == cut
        assert sample.finish == ("eos" if eos in whole else "length")
    assert result.identical_to_plain == 24
    assert result.to_json()["finish"]["eos"] > 0


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_deepspec_counts_past_the_budget_on_request(target, config, params, make_prompts, temperature):
    """dspark_spec 5.1 step 9: rounds go on while the last token's index is below prompt + budget, each whole; the
    output is trimmed. So they are the first rounds of a decoding with a large budget."""
    prompts = make_prompts(4)
    long = evaluate(
        target, config, params, None, prompts, settings(max_new_tokens=48, temperature=temperature, plain=False)
    )
    ours = evaluate(
        target,
        config,
        params,
        None,
        prompts,
        settings(max_new_tokens=12, temperature=temperature, count_overshoot=True),
    )
    longer = 0
    for sample, whole in zip(ours.samples, long.samples, strict=True):
        rounds, after_first = [], 0
        while after_first < 12:
            rounds.append(dataclasses.replace(whole.rounds[len(rounds)], finish=None))
            after_first += rounds[-1].length
        assert [dataclasses.replace(item, finish=None) for item in sample.rounds] == rounds
        assert sample.output_tokens == whole.output_tokens[:12]
        assert len(sample.token_kinds) == 12
        longer += after_first > 11
    assert longer == 4
    assert ours.statistics.committed > sum(len(sample.output_tokens) - 1 for sample in ours.samples)
    if temperature == 0:
        assert ours.identical_to_plain == 4
    assert ours.settings["count_overshoot"] is True


def test_deepspec_seeds_by_place(target, config, params, make_prompts):
    """Sample i of a task has seed + i, whatever its id; a task's prefix is unchanged when the task is longer."""
    eval_config = settings(max_new_tokens=10, temperature=1.0, plain=False, seed_by="index", seed=7)
    prompts = [dataclasses.replace(prompt, index=i) for i, prompt in enumerate(make_prompts(4))]
    first = evaluate(target, config, params, None, prompts, eval_config)
    renamed = [dataclasses.replace(prompt, id=f"other{prompt.index}") for prompt in prompts[:2]]
    again = evaluate(target, config, params, None, renamed, eval_config)
    assert list(outputs(again).values()) == list(outputs(first).values())[:2]
    shifted = [dataclasses.replace(prompt, index=prompt.index + 1) for prompt in prompts]
    by_seed = evaluate(target, config, params, None, shifted, dataclasses.replace(eval_config, seed=6))
    assert outputs(by_seed) == outputs(first), "seed + place is what counts"


def test_bf16_draft_sampling_says_that_it_is_not_lossless(target, config, params, make_prompts):
    eval_config = settings(max_new_tokens=10, temperature=1.0, plain=False, draft_sampling="bfloat16")
    result = evaluate(target, config, params, None, make_prompts(4), eval_config)
    assert result.settings["draft_sampling"] == "bfloat16"
    assert "NOT LOSSLESS" in format_result(result, "d")
    exact = evaluate(
        target, config, params, None, make_prompts(4), dataclasses.replace(eval_config, draft_sampling="float32")
    )
    assert "NOT LOSSLESS" not in format_result(exact, "d")


def test_budget_of_one_token_runs_no_round_and_says_so(target, config, params, make_prompts):
    result = evaluate(target, config, params, None, make_prompts(2), settings(max_new_tokens=1))
    assert result.rounds == 0
    assert result.accept_length is None
    assert "no round was run" in result.error
    assert result.identical_to_plain == 2


def test_a_draft_that_proposes_nothing_is_an_error_not_1_00(target, config, params, make_prompts):
    """Threshold 1 is above every sigmoid: each round is a plain target step."""
    eval_config = settings(max_new_tokens=6, confidence_threshold=1.0)
    result = evaluate(target, config, params, None, make_prompts(2), eval_config)
    assert result.statistics.accept_length == 1.0
    assert result.accept_length is None
    assert result.to_json()["accept_length"] is None
    assert "proposed nothing" in result.error
    assert result.identical_to_plain == 2


def test_confidence_threshold_shortens_proposals_and_stays_lossless(target, config, params, make_prompts):
    eval_config = settings(max_new_tokens=16, confidence_threshold=0.5)
    result = evaluate(target, config, params, None, make_prompts(8), eval_config)
    assert result.identical_to_plain == 8
    assert 0 < result.statistics.proposal_length < config.block_size


def test_threshold_without_a_confidence_head_is_refused(target, make_config, make_params, make_prompts):
    config = make_config(target, enable_confidence_head=False)
    with pytest.raises(ValueError, match="no confidence head"):
        evaluate(target, config, make_params(config), None, make_prompts(1), settings(confidence_threshold=0.5))


def test_refused_prompts_are_counted_with_their_reason(target, config, params):
    prompts = [
        Prompt("good", np.array([1, 2, 3], np.int32)),
        Prompt("empty", np.array([], np.int32)),
        Prompt("long", np.ones(256, np.int32)),
        Prompt("nearly", np.ones(250, np.int32)),
        Prompt("alien", np.array([1, 64], np.int32)),
    ]
    result = evaluate(target, config, params, None, prompts, settings(max_new_tokens=16))
    assert [sample.prompt for sample in result.samples] == ["good", "nearly"]
    assert {refusal.prompt: refusal.reason for refusal in result.refusals} == {
        "empty": "empty prompt",
        "long": "prompt longer than the context: 256 of 256 tokens",
        "alien": "id beyond the vocabulary: 64 of 64",
    }
    record = result.to_json()
    assert record["refused"] == {
        "empty prompt": 1, "prompt longer than the context": 1, "id beyond the vocabulary": 1,
    }  # fmt: skip
    assert record["settings"]["shortened_to_context"] == 1
    assert len(result.samples[1].output_tokens) == 6
    assert result.identical_to_plain == 2
    small = settings(max_new_tokens=16, max_context=8)
    assert len(evaluate(target, config, params, None, prompts[:1], small).samples[0].output_tokens) == 5


def test_nothing_left_to_evaluate_is_an_error(target, config, params):
    result = evaluate(target, config, params, None, [Prompt("empty", np.array([], np.int32))], settings())
    assert result.accept_length is None
    assert result.error == "no prompt was evaluated (1 refused)"
    json.dumps(result.to_json())
    assert result.table()


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"hidden_size": 40}, r"hidden_size: the draft was made for 40, target tiny-llama has 32"),
        ({"vocab_size": 80}, r"vocab_size: the draft was made for 80, target tiny-llama has 64"),
        (
            {"num_target_layers": 9},
            r"layers of the target: the draft was made for 9, target tiny-llama has 4",
        ),
        ({"target_layer_ids": (0, 1)}, r"tapped layers: the draft was made for \(0, 1\), .* has \(0, 2\)"),
    ],
)
def test_a_draft_of_another_target_is_refused_naming_both(target, make_config, make_prompts, overrides, message):
    with pytest.raises(MismatchError, match=message):
        evaluate(target, make_config(target, **overrides), None, None, make_prompts(1), settings())


def test_equal_ids_are_refused(target, config, params, make_prompts):
    prompt = make_prompts(1)[0]
    with pytest.raises(ValueError, match="two prompts have the id 'p0'"):
        evaluate(target, config, params, None, [prompt, prompt], settings())


def test_a_broken_draft_is_an_error_not_a_low_score(target, config, params, make_prompts):
    import jax

    from train.evaluate.draft_runner import ProposalError

    broken = jax.tree.map(lambda leaf: leaf * np.nan, params)
    with pytest.raises(ProposalError, match="slot 0 are not finite"):
        evaluate(target, config, broken, None, make_prompts(1), settings(max_new_tokens=8, temperature=1.0))


def test_progress_is_told_after_every_prompt(target, config, params, make_prompts):
    seen = []
    eval_config = settings(max_new_tokens=4, plain=False)
    result = evaluate(target, config, params, None, make_prompts(3), eval_config, lambda *call: seen.append(call))
    assert [call[:2] for call in seen] == [(1, 3), (2, 3), (3, 3)]
    assert seen[-1][2] == result.accept_length
    with_plain = []
    evaluate(target, config, params, None, make_prompts(3), settings(max_new_tokens=4), lambda *c: with_plain.append(c))
    assert [call[:2] for call in with_plain] == [(n, 6) for n in range(1, 7)], "plain decodings count too"
    assert result.tokens_per_second_plain is None
    assert result.identical_to_plain is None


def test_random_streams_are_their_own():
    draw = lambda *key: sample_generator(*key).random(4).tolist()  # noqa: E731
    assert draw(1, "a") == draw(1, "a")
    assert len({tuple(draw(*key)) for key in [(1, "a"), (2, "a"), (1, "b"), (1, "a", "plain")]}) == 4
