"""The torch reference itself, held against hand calculations, cases T15 and T16, Transformers' Qwen3 modules
and the minimal algorithm of dspark_spec 8.7. Nothing of ``draft_jax`` is imported here."""

import dataclasses
import math

import pytest
import torch

from .torch_dspark import ReferenceDSpark, inverse_frequencies, rotate, visibility
from .torch_objective import ReferenceObjective, candidates, label_block, loss_of_window, metrics, row_sums
from .torch_spec import ReferenceRow, ReferenceSpec
from .torch_trainer import ReferenceOptimizer, learning_rate, train

SPEC = ReferenceSpec(
    hidden_size=16,
    intermediate_size=24,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    vocab_size=19,
    num_taps=3,
    block_size=4,
    mask_token_id=18,
    rope_theta=100.0,
    markov_rank=5,
    markov_kind="vanilla",
    confidence_with_markov=True,
)


def random_row(length=12, seed=0, spec=SPEC, mask=None, starts=None) -> ReferenceRow:
    generator = torch.Generator().manual_seed(seed)
    starts = torch.zeros(length, dtype=torch.long) if starts is None else torch.tensor(starts)
    return ReferenceRow(
        input_ids=torch.randint(0, spec.vocab_size - 1, (length,), generator=generator),
        loss_mask=torch.ones(length) if mask is None else torch.tensor(mask),
        positions=torch.arange(length) - starts,
        document_start=starts,
        context_hidden=torch.randn(length, spec.num_taps * spec.hidden_size, generator=generator),
        last_hidden=torch.randn(length, spec.hidden_size, generator=generator),
    )


def frozen(spec=SPEC, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return (
        torch.randn(spec.vocab_size, spec.hidden_size, generator=generator),
        torch.randn(spec.vocab_size, spec.hidden_size, generator=generator) / 2,
    )


def model_of(kind="vanilla", **changes) -> ReferenceDSpark:
    return ReferenceDSpark(dataclasses.replace(SPEC, markov_kind=kind, **changes)).randomize(7)


def test_t16_labels_and_weights():
    row = random_row()
    row = dataclasses.replace(
        row,
        input_ids=torch.arange(100, 112),
        loss_mask=torch.tensor([1.0 if i in (5, 6, 7, 10, 11) else 0.0 for i in range(12)]),
    )
    block = label_block(row, 5, True, 4, gamma=7.0)
    assert block.labels == [106, 107, 108, 109]
    assert block.previous == [105, 106, 107, 108]
    assert block.valid == [True, True, False, False]
    assert block.target_rows == [5, 6, 7, 8]
    full = dataclasses.replace(row, loss_mask=torch.ones(12))
    assert label_block(full, 5, True, 4, gamma=7.0).weight == pytest.approx([1, 0.866878, 0.751477, 0.651439], abs=1e-6)
    # DeepSpec's rule (both ends supervised) refuses 4 and 9, which T16 makes eligible; both refuse 7.
    assert candidates(row, supervised_anchors_only=True) == [5, 6, 10]
    assert candidates(row, supervised_anchors_only=False) == [4, 5, 6, 9, 10]
    early = label_block(row, 4, True, 4, gamma=7.0)
    assert (early.labels, early.valid) == ([105, 106, 107, 108], [True, True, True, False])
    assert label_block(row, 7, True, 4, gamma=7.0).valid == [False] * 4
    # Past the end of the row labels are clamped and masked.
    assert label_block(full, 9, True, 4, gamma=None).valid == [True, True, False, False]
    assert label_block(full, 9, True, 4, gamma=None).labels == [110, 111, 111, 111]


def test_t16_confidence_target():
    """Draft [.2,.5,.3] against target [.5,.3,.2]: overlap 0.7."""
    distance = (torch.tensor([0.2, 0.5, 0.3]) - torch.tensor([0.5, 0.3, 0.2])).abs().sum()
    assert float(1 - distance / 2) == pytest.approx(0.7)


def test_t15_visibility():
    seen = visibility([3, 5], [True, True], [0, 0], range(12), 4)
    assert seen.shape == (8, 20)
    for query in range(4):
        assert seen[query].nonzero()[:, 0].tolist() == [0, 1, 2, 12, 13, 14, 15]
    for query in range(4, 8):
        assert seen[query].nonzero()[:, 0].tolist() == [0, 1, 2, 3, 4, 16, 17, 18, 19]
    packed = visibility([5, 5], [True, False], [4, 4], range(8), 2)
    assert packed[0].nonzero()[:, 0].tolist() == [4, 8, 9]
    assert not packed[2:].any()


@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn"])
def test_t15_no_leak(kind):
    model, row, (embedding, head) = model_of(kind), random_row(), frozen()

    def logits(states, ids):
        moved = dataclasses.replace(row, context_hidden=states, input_ids=ids)
        hidden = model.block_hidden(moved, [3, 5], [True, True], embedding)
        return [
            model.block_logits(hidden[b], torch.tensor(label_block(row, a, True, 4, 4.0).previous), head)
            for b, a in enumerate([3, 5])
        ]

    before = logits(row.context_hidden, row.input_ids)
    for first, untouched, touched in [(5, (0, 1), ()), (3, (0,), (1,)), (2, (), (0, 1))]:
        states = row.context_hidden.clone()
        states[first:] += 3.0
        ids = row.input_ids.clone()
        ids[6:] = 2
        after = logits(states, ids)
        for block in untouched:
            torch.testing.assert_close(after[block], before[block], rtol=0, atol=0)
        for block in touched:
            assert (after[block] - before[block]).abs().max() > 1e-3


def test_dummy_blocks_and_padding_change_nothing():
    model, row, (embedding, head) = model_of(), random_row(), frozen()
    objective = ReferenceObjective()
    alone = row_sums(model, row, [3, 6], [True, True], embedding, head, objective)
    more = row_sums(model, row, [3, 6, 0, 0], [True, True, False, False], embedding, head, objective)
    for name in ("ce", "l1", "confidence", "tau_num", "weight"):
        torch.testing.assert_close(getattr(more, name), getattr(alone, name))
    empty = row_sums(model, row, [0, 0], [False, False], embedding, head, objective)
    assert float(empty.numerator(objective)) == 0
    assert float(loss_of_window([empty], objective)) == 0


def test_packed_documents_equal_documents_alone():
    """Two documents in one row give the sum of the two alone, gradients too (T18's promise)."""
    first, second = random_row(9, seed=3), random_row(7, seed=4)
    joined = {
        name: torch.cat([getattr(first, name), getattr(second, name)])
        for name in ("input_ids", "loss_mask", "positions", "context_hidden", "last_hidden")
    }
    packed = ReferenceRow(**joined, document_start=torch.tensor([0] * 9 + [9] * 7))
    assert candidates(packed, supervised_anchors_only=True) == [*range(8), *range(9, 15)]
    model, (embedding, head), objective = model_of("rnn"), frozen(), ReferenceObjective()

    def gradients(calls):
        model.zero_grad()
        total = sum(row_sums(model, *call, embedding, head, objective).numerator(objective) for call in calls)
        total.backward()
        return float(total.detach()), {n: p.grad.clone() for n, p in model.named_parameters()}

    loss_a, grads_a = gradients([(first, [2, 6], [True] * 2), (second, [0, 3], [True] * 2)])
    loss_b, grads_b = gradients([(packed, [2, 6, 9, 12], [True] * 4)])
    assert loss_b == pytest.approx(loss_a, rel=1e-5)
    for name in grads_a:
        torch.testing.assert_close(grads_b[name], grads_a[name], rtol=1e-4, atol=1e-5)


def test_decode_equals_training():
    """The decode-time block of an anchor equals its training-time block (dspark_spec 8.7), each head kind."""
    for kind in ("vanilla", "gated", "rnn"):
        model, row, (embedding, head) = model_of(kind), random_row(), frozen()
        anchor = 6
        tokens, logits, confidence = model.propose(
            row.context_hidden[:anchor],
            int(row.input_ids[anchor]),
            embedding,
            head,
            row.input_ids[7:11].tolist(),
        )
        hidden = model.block_hidden(row, [anchor], [True], embedding)[0]
        previous = row.input_ids[6:10]
        torch.testing.assert_close(logits, model.block_logits(hidden, previous, head).detach())
        torch.testing.assert_close(confidence, model.block_confidence(hidden, previous).detach())
        assert tokens == row.input_ids[7:11].tolist()


def test_backbone_equals_transformers_qwen3():
    """Attention, norms and MLP are Transformers' Qwen3 modules, fed [context ; normed block] by hand."""
    qwen3 = pytest.importorskip("transformers.models.qwen3.modeling_qwen3")
    from transformers import Qwen3Config

    config = Qwen3Config(
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        rms_norm_eps=1e-6,
        vocab_size=19,
        rope_parameters={"rope_type": "default", "rope_theta": 100.0},
        attn_implementation="eager",
    )
    model, row, (embedding, _) = model_of(), random_row(), frozen()
    anchor, size = 6, 4

    def hf(cls, ours, *args):
        module = cls(*args)
        module.load_state_dict(ours.state_dict())
        return module

    rotary = qwen3.Qwen3RotaryEmbedding(config)
    with torch.no_grad():
        context = hf(qwen3.Qwen3RMSNorm, model.hidden_norm, 16)(model.fc(row.context_hidden[:anchor]))
        ids = torch.tensor([int(row.input_ids[anchor])] + [SPEC.mask_token_id] * 3)
        h = embedding[ids]
        angles = rotary(h[None], torch.arange(anchor + size)[None])
        for layer in model.layers:
            attention = hf(qwen3.Qwen3Attention, layer.self_attn, config, 0)
            normed = hf(qwen3.Qwen3RMSNorm, layer.input_layernorm, 16)(h)
            everything = torch.cat([context, normed])[None]
            # Queries of the context rows are computed too and thrown away; the block rows see all keys.
            out, _ = attention(everything, position_embeddings=angles, attention_mask=None)
            h = h + out[0, anchor:]
            h = h + hf(qwen3.Qwen3MLP, layer.mlp, config)(hf(qwen3.Qwen3RMSNorm, layer.post_attention_layernorm, 16)(h))
        expected = hf(qwen3.Qwen3RMSNorm, model.norm, 16)(h)
        ours = model.block_hidden(row, [anchor], [True], embedding)[0]
    torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_type": "linear", "factor": 4.0},
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 256,
        },
    ],
)
def test_rotary_scaling_equals_transformers(scaling):
    qwen3 = pytest.importorskip("transformers.models.qwen3.modeling_qwen3")
    from transformers import Qwen3Config

    spec = dataclasses.replace(SPEC, head_dim=32, rope_theta=1e4, rope_scaling=scaling)
    config = Qwen3Config(
        hidden_size=64, num_attention_heads=2, head_dim=32, rope_parameters={**scaling, "rope_theta": 1e4}
    )
    expected = qwen3.Qwen3RotaryEmbedding(config).inv_freq
    torch.testing.assert_close(inverse_frequencies(spec).float(), expected, rtol=1e-6, atol=1e-9)


def test_rotary_by_hand():
    """Head of 2: frequency 1, so position 1 turns (1, 0) by one radian."""
    spec = dataclasses.replace(SPEC, head_dim=2)
    turned = rotate(torch.tensor([[1.0, 0.0], [0.0, 1.0]]), torch.tensor([1, 2]), inverse_frequencies(spec))
    expected = [[math.cos(1), math.sin(1)], [-math.sin(2), math.cos(2)]]
    torch.testing.assert_close(turned, torch.tensor(expected))


def test_minimal_algorithm():
    """Objective and metrics against the vectorised few lines of dspark_spec 8.7 (vanilla head)."""
    model, (embedding, head) = model_of(), frozen()
    row = random_row(mask=[0.0, 0, 1, 1, 1, 1, 1, 0, 1, 1, 1, 1])
    x, mask, size = row.input_ids, row.loss_mask, SPEC.block_size
    anchors = ((mask[:-1] * mask[1:]) > 0.5).nonzero()[:, 0]
    assert anchors.tolist() == candidates(row, supervised_anchors_only=True)
    hidden = model.block_hidden(row, anchors.tolist(), [True] * len(anchors), embedding)
    index = anchors[:, None] + torch.arange(size)
    inside = index + 1 < 12
    clamped = (index + 1).clamp(max=11)
    labels = x[clamped]
    ok = (inside * mask[clamped]).cumprod(-1)
    previous = torch.cat([x[anchors][:, None], labels[:, :-1]], dim=-1)
    e = model.markov_head.markov_w1.weight[previous]
    z = hidden @ head.T + e @ model.markov_head.markov_w2.weight.T
    t = row.last_hidden[index.clamp(max=11)] @ head.T
    w = ok * torch.exp(-torch.arange(size) / 4.0)
    l1 = (z.softmax(-1) - t.softmax(-1)).abs().sum(-1)
    a = (1 - l1 / 2).detach()
    c = torch.cat([hidden, e], -1) @ model.confidence_head.proj.weight[0] + model.confidence_head.proj.bias
    ce = torch.nn.functional.cross_entropy(z.transpose(1, 2), labels, reduction="none")
    bce = torch.nn.functional.binary_cross_entropy_with_logits(c, a, reduction="none")
    loss = ((0.1 * ce + 0.9 * l1 + bce) * w).sum() / w.sum()

    objective = ReferenceObjective()
    sums = row_sums(model, row, anchors.tolist(), [True] * len(anchors), embedding, head, objective)
    found = metrics(sums, objective)
    assert found["loss"] == pytest.approx(loss.item(), rel=1e-5)
    for name, term in (("ce_loss", ce), ("l1_loss", l1), ("confidence_loss", bce)):
        assert found[name] == pytest.approx(((term * w).sum() / w.sum()).item(), rel=1e-5)
    assert sums.accept_num == pytest.approx((a * ok).sum(0).tolist(), rel=1e-5)
    assert sums.accept_den == ok.sum(0).tolist()
    tau = (1 + (a * ok).cumprod(-1).sum(-1)).mean()
    assert found["tau_probabilistic"] == pytest.approx(tau.item(), rel=1e-5)
    probability = torch.sigmoid(c)
    bias = ((probability.cumprod(-1) - a.cumprod(-1)) * w).sum() / w.sum()
    assert found["confidence_cumprod_bias"] == pytest.approx(bias.item(), rel=1e-4, abs=1e-6)
    assert found["confidence_bias"] == pytest.approx(
        (((probability - a) * w).sum() / w.sum()).item(), rel=1e-4, abs=1e-6
    )
    # The gradients of the two forms agree as well.
    model.zero_grad()
    loss.backward(retain_graph=True)
    expected = {n: p.grad.clone() for n, p in model.named_parameters()}
    model.zero_grad()
    loss_of_window([sums], objective).backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-4, atol=1e-6, msg=name)


def test_normalizations_differ_and_agree_where_they_must():
    model, (embedding, head) = model_of(), frozen()
    micro, window = ReferenceObjective(normalization="micro_step"), ReferenceObjective()

    def loss(micro_steps, objective):
        return loss_of_window(micro_steps, objective).item()

    short = row_sums(model, random_row(seed=5), [9], [True], embedding, head, window)
    long = row_sums(model, random_row(seed=6), [1, 4], [True] * 2, embedding, head, window)
    assert loss([short, short], micro) == pytest.approx(loss([short], window))
    assert loss([short, long], micro) != pytest.approx(loss([short, long], window))
    assert loss([short.add(long)], window) == pytest.approx(loss([short, long], window))


def test_schedule():
    options = ReferenceOptimizer(total_steps=100)
    rates = [learning_rate(step, options) / 6e-4 for step in range(100)]
    assert rates[:4] == pytest.approx([0.25, 0.5, 0.75, 1.0])
    assert rates[4] == pytest.approx(1.0)
    assert rates[52] == pytest.approx(0.5)
    assert 0 < rates[99] < 1e-3
    assert learning_rate(0, ReferenceOptimizer(total_steps=3)) == pytest.approx(6e-4)


def test_first_adam_step_by_hand():
    """From zero moments AdamW moves each parameter by lr * g / (|g| + eps) of the clipped gradient."""
    model, (embedding, head), row = model_of("gated"), frozen(), random_row()
    objective, options = ReferenceObjective(), ReferenceOptimizer(total_steps=3, max_grad_norm=0.5)

    def micro_step():
        return row_sums(model, row, [2, 5], [True, True], embedding, head, objective)

    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    loss_of_window([micro_step()], objective).backward()
    gradients = {n: p.grad.clone() for n, p in model.named_parameters()}
    norm = math.sqrt(sum(float((g.double() ** 2).sum()) for g in gradients.values()))
    (step,) = train(model, [[micro_step]], objective, options)
    assert step.grad_norm == pytest.approx(norm, rel=1e-5)
    assert norm > 0.5
    for name, parameter in model.named_parameters():
        clipped = gradients[name] * 0.5 / norm
        expected = before[name] - 6e-4 * clipped / (clipped.abs() + 1e-8)
        torch.testing.assert_close(parameter.detach(), expected, rtol=1e-5, atol=1e-6, msg=name)
