"""The probe passes a healthy target and names what is wrong with every broken one."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from target_bridge.hf import load_hf_target
from target_bridge.probe import ProbeReport, probe, probe_documents
from target_bridge.probe_reference import load_reference, transformers_states
from target_bridge.sglang_hooks import table_serving
from target_bridge.target import Capture, TargetError

TAPS = (0, 2, 3)


@pytest.fixture(scope="module")
def folder(make_model):
    return str(make_model("qwen3", tie_word_embeddings=False, num_hidden_layers=6))


@pytest.fixture(scope="module")
def healthy(folder):
    return load_hf_target(folder, TAPS)


class Broken:
    """A target with one thing changed on its way out; everything else is the healthy one's.

    `source` captures in its place.
    """

    def __init__(self, target, *, capture=lambda taken: taken, head=lambda matrix: matrix, source=None) -> None:
        self._target, self._capture, self._head, self._source = target, capture, head, source or target

    def __getattr__(self, name):
        return getattr(self._target, name)

    def capture(self, documents):
        return self._capture(self._source.capture(documents))

    def frozen_head(self):
        embedding, head = self._target.frozen_head()
        return embedding, self._head(head)


def run(target, **kwargs) -> ProbeReport:
    documents = probe_documents(target)
    return probe(target, documents, [target.layer_states(documents)], **kwargs)


def failed(report: ProbeReport) -> dict[str, str]:
    return {check.name: check.detail for check in report.failures}


def change_context(function):
    def changed(capture: Capture) -> Capture:
        return dataclasses.replace(
            capture, context_hidden=[function(states.clone()) for states in capture.context_hidden]
        )

    return changed


def test_healthy_target_passes_with_numbers(healthy):
    report = run(healthy, serving=table_serving("Qwen3ForCausalLM"))
    assert report.ok
    assert not report.failures
    assert [stream.name for stream in report.streams] == ["layer 0", "layer 2", "layer 3", "final"]
    for stream in report.streams:
        found = stream.references["Transformers"]
        assert found.difference <= found.worst < 1e-5
        assert found.best == stream.layer
        assert stream.finite == 1.0
    named = {check.name: str(check) for check in report.checks}
    assert "same best token in 4 of 4" in named["LM head on the final state gives the logits"]
    assert named["SGLang serves DSpark"].startswith("PASS")


def test_taps_shifted_by_one_layer(folder, healthy):
    shifted = load_hf_target(folder, [1, 3, 4])
    report = run(Broken(healthy, source=shifted))
    message = failed(report)["equal to Transformers"]
    assert "it fits layer 1, shifted by +1" in message
    assert "it fits layer 4, shifted by +1" in message
    assert set(failed(report)) == {"equal to Transformers"}


def test_taps_in_another_order(healthy):
    width = healthy.info.hidden_size
    report = run(Broken(healthy, capture=change_context(lambda s: torch.cat([s[:, width:], s[:, :width]], -1))))
    message = failed(report)["equal to Transformers"]
    assert "it fits layer 2, shifted by +2" in message
    assert "it fits layer 0, shifted by -3" in message


def test_final_state_before_the_norm(healthy):
    """What a wrong place in the model would give: the norm's input instead of its output."""

    def unnormed(capture):
        weight = healthy.model.model.norm.weight
        return dataclasses.replace(capture, last_hidden=[3 * states / weight for states in capture.last_hidden])

    report = run(Broken(healthy, capture=unnormed))
    assert "final is off by" in failed(report)["equal to Transformers"]
    assert "LM head on the final state gives the logits" in failed(report)


def test_permuted_head(healthy):
    order = torch.randperm(healthy.info.vocab_size, generator=torch.Generator().manual_seed(0))
    report = run(Broken(healthy, head=lambda matrix: matrix[order]))
    assert set(failed(report)) == {"LM head on the final state gives the logits"}
    # Two rows exchanged are enough, though most logits stay what they were.
    head = healthy.frozen_head()[1].clone()
    head[[3, 7]] = head[[7, 3]]
    assert set(failed(run(Broken(healthy, head=lambda _: head)))) == {"LM head on the final state gives the logits"}


@pytest.mark.parametrize("where", ["tap", "final"])
def test_states_that_are_not_finite(healthy, where):
    def poison(capture):
        context, last = [s.clone() for s in capture.context_hidden], [s.clone() for s in capture.last_hidden]
        (context if where == "tap" else last)[0][-1, 5] = float("nan")
        return Capture(context, last)

    report = run(Broken(healthy, capture=poison))
    message = failed(report)["finite"]
    assert ("layer 0" if where == "tap" else "final") in message
    assert "99." in message
    assert not report.ok


def test_everything_nan_does_not_pass(healthy):
    def poison(capture):
        return Capture(
            *([s * float("nan") for s in states] for states in (capture.context_hidden, capture.last_hidden))
        )

    report = run(Broken(healthy, capture=poison))
    assert [check.status for check in report.checks] == ["FAIL"] * len(report.checks)


def test_two_identical_streams(healthy):
    width = healthy.info.hidden_size

    def twice(states):
        states[:, width : 2 * width] = states[:, :width]
        return states

    report = run(Broken(healthy, capture=change_context(twice)))
    assert (
        "nearest are layer 0 and layer 2, 0 apart: that is the same stream twice"
        in (failed(report)["streams differ from one another"])
    )


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda s: s * 0, "root mean square of 0, outside"),
        (lambda s: s * 1e7, "outside 0.0001..100000"),
        (lambda s: s.mean(0).expand_as(s), "hardly depends on the token"),
    ],
    ids=["zeros", "huge", "the same for every token"],
)
def test_implausible_scale(healthy, change, said):
    report = run(Broken(healthy, capture=change_context(change)))
    assert said in failed(report)["scale"]


def test_rows_of_another_document(healthy):
    """Two short documents of one length exchanged beside a long one, which hides them in a mean over all tokens."""
    long, other = probe_documents(healthy)[1:3]
    documents = [long, other[:1], long[:1]]

    def exchange(capture):
        streams = capture.context_hidden, capture.last_hidden
        if len(capture) == 1:
            return capture
        return Capture(*([states[0], states[2], states[1]] for states in streams))

    report = probe(Broken(healthy, capture=exchange), documents, [healthy.layer_states(documents)])
    assert set(failed(report)) == {"equal to Transformers", "the same alone and beside others"}
    half = dataclasses.replace(healthy.info, dtype="bfloat16")  # whose tolerance the mean alone would meet
    exchanged = Broken(healthy, capture=exchange)
    exchanged.info = half
    message = failed(probe(exchanged, documents, [healthy.layer_states(documents)]))["equal to Transformers"]
    assert "in one document" in message


def test_states_that_depend_on_their_neighbours(healthy):
    """A leak between documents is seen without any reference; rounding that a batch changes is not taken for one."""

    def leak(share):
        def change(capture):
            if len(capture) == 1:
                return capture
            first = capture.last_hidden[0].mean(0)
            return Capture(capture.context_hidden, [s + share * first for s in capture.last_hidden])

        return change

    documents = probe_documents(healthy)
    report = probe(Broken(healthy, capture=leak(0.1)), documents, not_compared="nothing")
    assert set(failed(report)) == {"the same alone and beside others"}
    half = Broken(healthy, capture=leak(0.03))  # more than the head may differ, less than bfloat16 does in a deep model
    half.info = dataclasses.replace(healthy.info, dtype="bfloat16")
    assert probe(half, documents, not_compared="nothing").ok


def test_half_precision_passes_and_its_shift_does_not(folder):
    documents = None
    for taps, ok in ((TAPS, True), ((1, 3, 4), False)):
        target = load_hf_target(folder, TAPS, dtype="bfloat16")
        documents = documents or probe_documents(target)
        other = load_hf_target(folder, taps, dtype="bfloat16")
        reference = load_reference(folder, documents, target.info, budget=2**30)
        assert reference.source == "Transformers in float32"
        report = probe(Broken(target, source=other), documents, [reference])
        assert report.ok == ok, report.checks


def test_reference_as_far_as_it_fits(folder, healthy):
    documents = probe_documents(healthy)
    whole = load_reference(folder, documents, healthy.info, budget=2**30)
    assert whole.source == "Transformers in float32"
    assert whole.last is not None
    per_layer = sum(p.numel() for p in healthy.model.model.layers[0].parameters()) * 4
    base = 4 * sum(p.numel() for n, p in healthy.model.named_parameters() if ".layers." not in n)
    part = load_reference(folder, documents, healthy.info, budget=base + 4 * per_layer)
    assert part.source == "Transformers in float32, first 4 of 6 layers"
    assert set(part.layers) == {0, 1, 2}
    assert part.last is None
    for layer in part.layers:
        for a, b in zip(part.layers[layer], whole.layers[layer]):
            torch.testing.assert_close(a, b)
    report = probe(healthy, documents, [part])
    check = next(c for c in report.checks if c.name == f"equal to {part.source}")
    assert check.status == "PASS"
    assert check.detail.startswith("2 of 4 streams")
    # A shift is seen in what fits.
    shifted = load_hf_target(folder, [1, 3, 4])
    report = probe(Broken(healthy, source=shifted), documents, [part])
    assert "it fits layer 1, shifted by +1" in failed(report)[f"equal to {part.source}"]
    with pytest.raises(TargetError, match=r"embedding and two layers .* more than the"):
        load_reference(folder, documents, healthy.info, budget=base)


def test_reference_equals_transformers_run_by_hand(healthy):
    documents = probe_documents(healthy)
    states = transformers_states(healthy.model, documents, num_layers=6)
    with torch.inference_mode():
        out = healthy.model(input_ids=torch.as_tensor(documents[1])[None], output_hidden_states=True)
    for layer in range(5):
        torch.testing.assert_close(states.layers[layer][1], out.hidden_states[layer + 1][0])
    assert 5 not in states.layers  # Transformers gives the last layer's output normalised


def test_nothing_to_compare_with_is_no_pass(healthy):
    report = probe(healthy, probe_documents(healthy), [], not_compared="does not fit")
    check = next(c for c in report.checks if c.name == "not compared")
    assert (check.status, check.detail) == ("NOTE", "does not fit")
    assert not any(c.name.startswith("equal to") for c in report.checks)


def test_target_without_hook_fails(healthy):
    report = run(healthy, serving=table_serving("Qwen2ForCausalLM"))
    assert (
        "no: Qwen2ForCausalLM has no set_dspark_layers_to_capture or set_dflash_layers_to_capture"
        in (failed(report)["SGLang serves DSpark"])
    )
    assert "yes" in next(c.detail for c in report.checks if c.name == "SGLang serves EAGLE-3")
