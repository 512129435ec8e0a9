"""Digests follow content: what is computed, never where it lies or in which order it came."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from draft_jax.config import DraftConfig
from train.evaluate.draft import load_draft
from train.evaluate.identity import draft_digest, prompts_digest
from train.export import export

PROMPTS = [("a", np.array([1, 2, 3], np.int32), 10), ("b", np.array([4], np.int32), 10)]


def test_prompts_in_any_order_and_type_are_the_same():
    again = [("b", [4], np.int64(10)), ("a", np.array([1, 2, 3], np.int64), 10)]
    assert prompts_digest(PROMPTS) == prompts_digest(again)


@pytest.mark.parametrize(
    "changed",
    [
        [("a", [1, 2, 3], 10)],
        [("a", [1, 2, 3], 10), ("c", [4], 10)],
        [("a", [1, 2, 3], 10), ("b", [5], 10)],
        [("a", [1, 2, 3], 9), ("b", [4], 10)],
        [("a", [1, 2], 10), ("b", [3, 4], 10)],
    ],
    ids=["fewer", "id", "token", "budget", "border"],
)
def test_every_change_of_prompts_shows(changed):
    assert prompts_digest(PROMPTS) != prompts_digest(changed)


@pytest.fixture(scope="module")
def draft(make_params):
    config = DraftConfig(
        hidden_size=8, intermediate_size=12, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
        head_dim=4, vocab_size=20, num_target_layers=6, target_layer_ids=(0, 2), block_size=3, mask_token_id=5,
        markov_rank=4, initializer_range=0.3,
    )  # fmt: skip
    return config, make_params(config)


def test_a_draft_and_its_export_are_the_same_draft(draft, tmp_path):
    config, params = draft
    folder = export(params, config, tmp_path / "export").path
    read = load_draft(folder)
    assert not all(np.array_equal(a, b) for a, b in zip(jax.tree.leaves(params), jax.tree.leaves(read.params))), (
        "the export is rounded, so equal digests are no accident of equal bits"
    )
    assert draft_digest(read.config, read.params) == draft_digest(config, params)


def test_what_is_only_recorded_does_not_count(draft):
    config, params = draft
    renamed = dataclasses.replace(config, target_name="elsewhere", eos_token_id=3)
    assert draft_digest(renamed, params) == draft_digest(config, params)


@pytest.mark.parametrize("change", [{"rope_theta": 1e4}, {"mask_token_id": 6}, {"target_layer_ids": (0, 3)}])
def test_configuration_counts(draft, change):
    config, params = draft
    assert draft_digest(dataclasses.replace(config, **change), params) != draft_digest(config, params)


def test_every_tensor_counts(draft):
    config, params = draft
    leaves, structure = jax.tree.flatten(params)
    seen = {draft_digest(config, params)}
    for index, leaf in enumerate(leaves):
        changed = [*leaves[:index], leaf.at[(0,) * jnp.ndim(leaf)].add(1.0), *leaves[index + 1 :]]
        seen.add(draft_digest(config, jax.tree.unflatten(structure, changed)))
    assert len(seen) == len(leaves) + 1
