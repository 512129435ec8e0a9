"""`--plan`: counts are exact, estimates add up, and no weights are needed."""

import json

import jax
import numpy as np
import pytest

from train.config import ConfigError
from train.config_file import build
from train.plan import format_plan, make_plan, parameter_groups
from train.resolve import resolve_draft, resolve_dtype, resolve_steps

QWEN3_8B = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": False,
}


@pytest.fixture
def qwen(tmp_path, plain_tree):
    """The Qwen3-8B recipe of dspark_spec 1.8 over a folder that holds nothing but config.json."""
    folder = tmp_path / "qwen"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(QWEN3_8B))
    plain_tree["target"] = {"path": str(folder)}
    plain_tree["data"]["max_length"] = 4096
    plain_tree["draft"] = {"mask_token_id": 151669}
    plain_tree["objective"] = {"num_anchors": 512}
    plain_tree["train"] = {"steps": 100, "batch_rows": 1, "accumulation": 512}
    return plain_tree


def test_counts_of_the_published_recipe(qwen):
    """dspark_spec 1.7: fc 83.9M, five layers 964.7M, Markov 77.8M, trainable 1126.4M; taps of 1.8."""
    plan = make_plan(build(qwen), "gpu")
    assert plan.draft.target_layer_ids == (1, 9, 17, 25, 33)
    counts = plan.parameters
    assert counts["fc"] == pytest.approx(83.9e6, rel=1e-3)
    assert counts["layers"] == pytest.approx(964.7e6, rel=1e-3)
    assert counts["markov"] == pytest.approx(77.8e6, rel=1e-3)
    assert sum(counts.values()) == pytest.approx(1126.4e6, rel=1e-4)
    assert plan.dtype == "bfloat16"


def test_operations_of_the_published_recipe(qwen):
    """dspark_spec 8.1, 8B at 4096 tokens: block layers 20.75, vocabulary of the draft 8.92, total 39.5 TF a row."""
    flops = {name: value / 512 / 1e12 for name, value in make_plan(build(qwen), "gpu").flops.items()}
    assert flops["fc"] == pytest.approx(1.37, rel=0.01)
    assert flops["context keys and values"] == pytest.approx(1.03, rel=0.01)
    assert flops["block layers"] == pytest.approx(20.75, rel=0.01)
    assert flops["attention"] == pytest.approx(2.11, rel=0.01)
    assert flops["vocabulary, draft"] == pytest.approx(8.92, rel=0.01)
    assert flops["vocabulary, target"] == pytest.approx(4.46, rel=0.01)
    assert flops["Markov head"] == pytest.approx(0.84, rel=0.01)
    assert sum(flops.values()) == pytest.approx(39.5, rel=0.01)


def test_memory_of_the_published_recipe(qwen):
    memory = make_plan(build(qwen), "gpu").memory
    assert memory["parameters (fp32)"] == pytest.approx(4 * 1126.4e6, rel=1e-4)
    assert memory["Adam moments (fp32)"] == 2 * memory["parameters (fp32)"]
    assert memory["frozen embedding and head"] == pytest.approx(2 * 1244.7e6, rel=1e-4)
    assert memory["staging of captured states"] == 4096 * 6 * 4096 * 2
    rows_by_vocabulary = 3584 * 151936 * 4
    assert memory["temporary: objective's chunk"] < rows_by_vocabulary
    assert "temporary: attention scores" not in memory


#: GiB of temporaries the compiler reserved on one H200 (jax 0.11.2, benchmarks/RESULTS.md): attention -> size.
RESERVED = {"triton": 4.807, "xla": 19.6}


@pytest.mark.parametrize("attention", RESERVED)
def test_temporaries_are_those_of_the_compiler(qwen, change, attention):
    memory = make_plan(build(change(qwen, train__attention=attention)), "gpu").memory
    temporary = sum(size for name, size in memory.items() if name.startswith("temporary"))
    assert temporary / 2**30 == pytest.approx(RESERVED[attention], rel=0.2)


def test_attention_by_name(qwen, change):
    """Only the XLA form keeps scores, of 3584 x 32 rows by 4096 + 7 keys; a kernel keeps one number a row."""

    def temporaries(**train):
        changed = build(change(qwen, **{f"train__{name}": value for name, value in train.items()}))
        memory = make_plan(changed, "gpu").memory
        return {name: size for name, size in memory.items() if "attention" in name}

    sums = {"temporary: attention's log-sum-exps": 5 * 3584 * 32 * 4}
    assert temporaries() == temporaries(attention="triton") == sums
    (scores,) = temporaries(attention="xla").values()
    assert scores > 5 * 3584 * 32 * (4096 + 7) * 4
    with pytest.raises(ConfigError, match=r"train\.attention is 'triton'; .*bfloat16 or float16, not float32"):
        temporaries(attention="triton", dtype="float32")


def test_counts_equal_the_real_parameters(tiny_draft):
    from draft_jax.models.dspark import abstract_params

    real = sum(int(np.prod(x.shape)) for x in jax.tree.leaves(abstract_params(tiny_draft)))
    assert sum(parameter_groups(tiny_draft).values()) == real


def test_text(qwen):
    config = build(qwen)
    text = format_plan(config, make_plan(config, "gpu"))
    for part in ("accumulation: 512", "trainable parameters", "Adam moments", "TFLOP", "100 optimizer steps"):
        assert part in text
    assert f"max_length: {config.data.max_length}" in text


def test_packing_is_told_and_counted(qwen, change):
    """A packed row of four times the length has four times the captured states; the draft's weights are the same."""
    plain = build(change(qwen, data__max_length=1024))
    packing = {"data__packing": "first_fit", "data__row_length": 4096, "objective__anchors_per_document": 64}
    packed = build(change(qwen, data__max_length=1024, **packing))
    plans = [make_plan(config, "gpu") for config in (plain, packed)]
    assert plans[0].parameters == plans[1].parameters
    staging = [plan.memory["staging of captured states"] for plan in plans]
    assert staging[1] == 4 * staging[0]
    assert "rows of 1024 tokens each" in format_plan(plain, plans[0])
    assert ", one conversation each" in format_plan(plain, plans[0])
    text = format_plan(packed, plans[1])
    assert "rows of 4096 tokens each" in text
    assert "packed: as many conversations of at most 1024 tokens as fit and their anchors, at most 64 each" in text


def test_tap_count_and_heads(qwen, change):
    draft = resolve_draft(build(change(qwen, draft__num_taps=3, draft__markov_rank=0)), QWEN3_8B)
    assert draft.target_layer_ids == (1, 17, 33)
    assert draft.markov_rank == 0
    assert not draft.confidence_head_with_markov
    assert draft.num_anchors == 512


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"draft__target_layer_ids": [1, 35]}, r"draft: target_layer_ids contains 35"),
        ({"draft__target_layer_ids": [3, 1]}, r"draft: target_layer_ids must ascend"),
        ({"draft__mask_token_id": 151936}, r"draft: mask_token_id 151936"),
        ({"target__path": "/no/such/folder"}, r"target\.path is '/no/such/folder'; there is no such folder"),
    ],
)
def test_refused(qwen, change, changes, message):
    with pytest.raises(ConfigError, match=message):
        make_plan(build(change(qwen, **changes)), "cpu")


def test_a_folder_that_is_no_model(tmp_path, plain_tree, change):
    config = build(change(plain_tree, target__path=str(tmp_path)))
    with pytest.raises(ConfigError, match=r"that folder is not a model, it has no config\.json"):
        make_plan(config, "cpu")
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="is not JSON"):
        make_plan(config, "cpu")


def test_mask_token_is_the_first_free_row_or_must_be_given(tmp_path, qwen, change):
    del qwen["draft"]["mask_token_id"]
    tokenizer = {
        "model": {"vocab": {f"t{i}": i for i in range(151643)}},
        "added_tokens": [{"id": 151643 + i, "content": f"<s{i}>"} for i in range(26)],
    }
    file = tmp_path / "qwen" / "tokenizer.json"
    file.write_text(json.dumps(tokenizer))
    assert resolve_draft(build(qwen), QWEN3_8B).mask_token_id == 151669
    with pytest.raises(ConfigError, match=r"no free embedding row .* one of: 151643 '<s0>'"):
        resolve_draft(build(qwen), {**QWEN3_8B, "vocab_size": 151669})


def init_folder(tmp_path, draft):
    folder = tmp_path / "draft"
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(draft.to_hf()))
    return folder


def test_init_draft_decides_and_contradictions_are_named(tmp_path, qwen, change):
    source = resolve_draft(build(change(qwen, draft__layers=2, draft__block_size=5)), QWEN3_8B)
    folder = str(init_folder(tmp_path, source))
    qwen["draft"] = {"init_draft": folder}
    assert resolve_draft(build(qwen), QWEN3_8B).num_hidden_layers == 2
    with pytest.raises(ConfigError, match=r"draft\.layers is 3, but .* has 2; leave it out"):
        resolve_draft(build(change(qwen, draft__layers=3)), QWEN3_8B)
    with pytest.raises(ConfigError, match=r"made for another target: its hidden_size is 4096, this target has 2560"):
        resolve_draft(build(qwen), {**QWEN3_8B, "hidden_size": 2560})
    with pytest.raises(ConfigError, match=r"that folder is not a draft, it has no config\.json"):
        resolve_draft(build(change(qwen, draft__init_draft=str(tmp_path))), QWEN3_8B)


def test_steps(plain_tree, change):
    train = build(change(plain_tree, train={"epochs": 2.5, "batch_rows": 2, "accumulation": 3})).train
    assert resolve_steps(train, 25) == 10
    with pytest.raises(ConfigError, match=r"2 rows of data do not fill one optimizer step of 6 "):
        resolve_steps(train, 2)
    assert resolve_steps(build(plain_tree).train, 1) == 6


def test_dtype():
    assert resolve_dtype("auto", "cpu") == "float32"
    assert resolve_dtype("auto", "gpu") == "bfloat16"
    assert resolve_dtype("float32", "gpu") == "float32"
