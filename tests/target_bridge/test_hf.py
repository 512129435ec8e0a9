"""The Transformers target: what is captured, how documents are batched, and what is refused."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from target_bridge.batching import overhead_tokens, plan_groups
from target_bridge.hf import HFTarget, load_hf_target
from target_bridge.hf_source import target_config
from target_bridge.hf_taps import LayerTaps
from target_bridge.target import TargetError, validate_layer_ids

# --- taps


@pytest.mark.parametrize(
    ("ids", "value"),
    [
        ([0, 4], "4"),
        ([-1, 2], "-1"),
        ([0, 3], "3 is out of range"),  # the last of 4 layers
        ([1, 1], "1 appears twice"),
        ([2, 1], "1 comes after 2"),
        ([2, 0, 2], "layer_ids[1] = 0"),
        ([True, 2], "True"),
        ([0.0, 2], "0.0"),
        (["1"], "'1'"),
        ([], "empty"),
        ("12", "'12'"),
        (3, "3"),
    ],
)
def test_wrong_layer_ids_are_named(ids, value):
    with pytest.raises(TargetError) as error:
        validate_layer_ids(ids, 4)
    assert value in str(error.value)


def test_right_layer_ids_come_back_as_ints():
    assert validate_layer_ids(np.array([0, 1, 2]), 4) == (0, 1, 2)


@pytest.mark.parametrize("in_place", [False, True])
def test_t13_marker_model(make_marker, in_place):
    """Tap i is the output of block i before the final norm; the last state is normed exactly once."""
    model = make_marker(4, in_place)
    ids = torch.tensor([[1, 2, 3]])
    with torch.inference_mode(), LayerTaps(model.model.layers, [0, 2, 3]) as taps:
        last = model.model(ids).last_hidden_state
        captured = taps.take()
    assert captured[0, 0].tolist() == [1, 1, 111, 111, 1111, 1111]
    assert last[0, 0].tolist() == [2222, 2222]
    with torch.inference_mode(), LayerTaps(model.model.layers, [3, 0]) as taps:
        model.model(ids)
        assert taps.take()[0, 2].tolist() == [1111, 1111, 1, 1]  # order kept


def test_t13_through_the_target(make_marker):
    target = HFTarget(make_marker(4), [0, 2], name="marker")
    capture = target.capture([np.array([1, 2, 3]), np.array([4])])
    assert capture.context_hidden[0].tolist() == [[1, 1, 111, 111]] * 3
    assert capture.last_hidden[1].tolist() == [[2222, 2222]]
    head = target.frozen_head()[1]
    logits = target._model(torch.tensor([[1, 2, 3]])).logits[0]
    assert torch.allclose(capture.last_hidden[0] @ head.T, logits)
    longer = HFTarget(make_marker(5), [0, 2, 3], name="marker").capture([np.array([1])])
    assert longer.context_hidden[0].tolist() == [[1, 1, 111, 111, 1111, 1111]]
    assert longer.last_hidden[0].tolist() == [[22222, 22222]]


def test_hooks_are_gone_after_a_forward_even_a_failed_one(make_marker):
    model = make_marker(4)
    target = HFTarget(model, [0, 2], name="marker")
    target.capture([np.array([1])])
    model.model.norm = lambda hidden: 1 / 0
    with pytest.raises(ZeroDivisionError):
        target.capture([np.array([1])])
    assert all(not layer._forward_hooks for layer in model.model.layers)


def test_a_layer_that_runs_twice_is_refused(make_marker):
    model = make_marker(4)
    model.model.layers[2] = model.model.layers[1]
    with pytest.raises(TargetError, match=r"layer 1 .* ran twice"):
        HFTarget(model, [0, 1], name="marker")


# --- captured states against transformers' own


@pytest.mark.parametrize("folder", ["llama_folder", "qwen3_folder"])
def test_states_equal_transformers_own(folder, request, documents):
    path = request.getfixturevalue(folder)
    target = load_hf_target(str(path), [0, 2, 3])
    reference = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    capture = target.capture(documents)
    assert len(capture) == len(documents)
    head = target.frozen_head()[1]
    for ids, context, last in zip(documents, capture.context_hidden, capture.last_hidden):
        with torch.no_grad():
            out = reference(torch.as_tensor(ids[None].astype(np.int64)), output_hidden_states=True)
        # hidden_states[0] is the embedding, so the output of layer i is hidden_states[i + 1].
        expected = torch.cat([out.hidden_states[i + 1][0] for i in (0, 2, 3)], dim=-1)
        torch.testing.assert_close(context, expected, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(last, out.hidden_states[-1][0], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(last @ head.T, out.logits[0], atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("budget", [1, 64, 100, 10_000])
def test_a_ragged_batch_equals_each_document_alone(llama_folder, documents, budget):
    target = load_hf_target(str(llama_folder), [1, 3], max_tokens_per_forward=budget)
    together = target.capture(documents)
    for index, ids in enumerate(documents):
        alone = target.capture([ids])
        assert together.context_hidden[index].shape == (len(ids), 2 * 32)
        assert together.last_hidden[index].shape == (len(ids), 32)
        torch.testing.assert_close(together.context_hidden[index], alone.context_hidden[0], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(together.last_hidden[index], alone.last_hidden[0], atol=1e-5, rtol=1e-5)


def test_the_lm_head_does_not_run_during_capture(llama_folder, documents):
    target = load_hf_target(str(llama_folder), [1, 3])
    target._model.lm_head.register_forward_hook(lambda *_: pytest.fail("the LM head ran"))
    target.capture(documents)


def test_bfloat16_on_request(llama_folder, documents):
    target = load_hf_target(str(llama_folder), [1, 3], dtype="bfloat16")
    capture = target.capture(documents)
    assert target.info.dtype == "bfloat16"
    assert capture.context_hidden[0].dtype == capture.last_hidden[0].dtype == torch.bfloat16


def test_info_and_head(llama_folder, qwen3_folder):
    target = load_hf_target(str(llama_folder), [1, 3], device="cpu")
    info = target.info
    assert (info.hidden_size, info.num_layers, info.vocab_size, info.max_length) == (32, 5, 64, 96)
    assert info.layer_ids == (1, 3)
    assert info.dtype == "float32"  # "auto" on a CPU
    assert info.config["model_type"] == "llama"
    assert json.loads(json.dumps(info.config)) == info.config
    assert target_config(str(llama_folder)) == {
        **info.config,
        "dtype": target_config(str(llama_folder))["dtype"],
    }
    embedding, head = target.frozen_head()
    assert head is embedding
    assert not head.requires_grad
    embedding, head = load_hf_target(str(qwen3_folder), [1]).frozen_head()
    assert head is not embedding
    assert not torch.equal(head, embedding)


@pytest.mark.parametrize(
    ("generation", "model", "expected"),
    [(5, 2, (5,)), ([5, 6, 5], 2, (5, 6)), (None, 2, (2,)), (None, [3, 4], (3, 4)), (None, None, ())],
)
def test_eos_ids(llama_folder, tmp_path, generation, model, expected):
    folder = shutil.copytree(llama_folder, tmp_path / "target")
    _edit(folder / "config.json", eos_token_id=model)
    (folder / "generation_config.json").unlink()
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": generation}))
    assert load_hf_target(str(folder), [1]).info.eos_token_ids == expected


def test_the_tokenizers_eos_counts_where_no_generation_config_names_one(llama_folder, tmp_path):
    folder = shutil.copytree(llama_folder, tmp_path / "target")
    _edit(folder / "config.json", eos_token_id=None)
    (folder / "generation_config.json").unlink()
    _save_tokenizer(folder)
    target = load_hf_target(str(folder), [1])
    assert target.tokenizer.convert_tokens_to_ids("b") == 2
    assert target.info.eos_token_ids == (0,)


# --- batching


def test_groups_hold_every_document_once_within_the_budget():
    rng = np.random.default_rng(0)
    lengths = [*rng.integers(1, 500, size=200).tolist(), 5000]
    groups = plan_groups(lengths, 2048, 64)
    assert sorted(index for group in groups for index in group) == list(range(201))
    for group in groups:
        cells = len(group) * max(lengths[index] for index in group)
        assert len(group) == 1 or cells <= 2048
        assert cells - sum(lengths[index] for index in group) <= 64
    assert len(groups) < 100
    assert groups == plan_groups(lengths, 2048, 64)
    assert plan_groups([10] * 9, 40, 0) == [[0, 1, 2, 3], [4, 5, 6, 7], [8]]


def test_padding_is_spent_where_a_forward_costs_more():
    lengths = [400, 300, 200, 100]
    assert plan_groups(lengths, 16384, 600) == [[0, 1, 2, 3]]
    assert plan_groups(lengths, 16384, 599) == [[0, 1, 2], [3]]
    assert plan_groups(lengths, 16384, 0) == [[0], [1], [2], [3]]
    small, large = 135_000_000, 8_000_000_000
    assert overhead_tokens("cuda", small) > 10 * overhead_tokens("cuda", large) > 10 * overhead_tokens("cpu", large)


# --- requests that are refused


@pytest.mark.parametrize(
    ("documents", "parts"),
    [
        ([], ["no documents"]),
        ([[1, 2], []], ["document 1", "empty"]),
        ([[1, 2], [3, 8]], ["document 1", "id 8", "position 1", "0..7"]),
        ([[-5]], ["document 0", "id -5"]),
        ([[2**40 + 5]], ["document 0", str(2**40 + 5)]),
        ([[1] * 17], ["document 0", "17 tokens", "at most 16"]),
        ([[1.0, 2.0]], ["document 0", "float64"]),
        ([[[1, 2]]], ["document 0", "(1, 2)"]),
        ([[True]], ["document 0", "bool"]),
    ],
)
def test_bad_documents_are_named_before_the_model_runs(make_marker, documents, parts):
    model = make_marker(4)
    target = HFTarget(model, [0, 2], name="marker")
    before = model.model.calls
    with pytest.raises(TargetError) as error:
        target.capture([np.array(ids) for ids in documents])
    assert all(part in str(error.value) for part in parts), str(error.value)
    assert model.model.calls == before


def test_a_model_that_returns_another_length_is_refused(make_marker):
    model = make_marker(4)
    target = HFTarget(model, [0, 2], name="marker")
    model.model.norm = lambda hidden: hidden[:, :-1] * 2
    with pytest.raises(TargetError, match="returned states"):
        target.capture([np.array([1, 2])])


# --- folders and names


def _edit(file, **changes):
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def _save_tokenizer(folder):
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    inner = Tokenizer(models.WordLevel({"<eos>": 0, "a": 1, "b": 2}, unk_token="<eos>"))
    PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<eos>").save_pretrained(folder)


def _break(folder, fault):
    if fault == "no config":
        (folder / "config.json").unlink()
    elif fault == "adapter":
        (folder / "config.json").rename(folder / "adapter_config.json")
    elif fault == "not json":
        (folder / "config.json").write_text("{")
    elif fault == "no model type":
        (folder / "config.json").write_text("{}")
    elif fault == "unknown model type":
        _edit(folder / "config.json", model_type="nonesuch")
    elif fault == "pickle":
        (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    elif fault == "no weights":
        (folder / "model.safetensors").unlink()
    elif fault == "shard missing":
        (folder / "model.safetensors").unlink()
        (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": "model-1.safetensors"}}')
    elif fault == "cut off":
        (folder / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:2000])
    elif fault == "draft":
        _edit(folder / "config.json", target_layer_ids=[1, 2])
    elif fault == "encoder decoder":
        (folder / "config.json").write_text('{"model_type": "t5", "is_encoder_decoder": true}')
    elif fault == "tensors missing":
        _edit(folder / "config.json", num_hidden_layers=6)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (
            "no config",
            "not a model: it has no config.json .it holds generation_config.json, model.safetensors",
        ),
        ("adapter", "PEFT adapter; merge"),
        ("not json", "not valid JSON"),
        ("no model type", "no model_type"),
        ("unknown model type", "nonesuch.*newer transformers"),
        ("pickle", "no model.safetensors.*pytorch_model.bin is a pickle.*convert"),
        ("no weights", "no model.safetensors.*target folder holds"),
        ("shard missing", "1 of 1 weight files are missing, e.g. model-1.safetensors"),
        ("cut off", "its weights could not be read"),
        ("encoder decoder", "encoder-decoder"),
        ("draft", "is a draft, not a target: its config.json has target_layer_ids"),
        ("tensors missing", "tensors of LlamaForCausalLM are not in its files, e.g. model.layers.5"),
    ],
)
def test_folders_that_are_no_target(llama_folder, tmp_path, fault, message):
    folder = shutil.copytree(llama_folder, tmp_path / "target")
    _break(folder, fault)
    with pytest.raises(TargetError, match=f"(?s){message}") as error:
        load_hf_target(str(folder), [1])
    assert str(folder) in str(error.value)


@pytest.mark.parametrize("name", ["/no/such/folder", "./nowhere", "~/nowhere-at-all", "a/b/c"])
def test_missing_folders(name):
    with pytest.raises(TargetError, match=f"{name} does not exist. A target folder holds"):
        load_hf_target(name, [1])


def test_a_file_is_not_a_target(llama_folder):
    with pytest.raises(TargetError, match="is a file"):
        load_hf_target(str(llama_folder / "config.json"), [1])


def test_an_unreachable_hub_is_said(monkeypatch):
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(TargetError, match=r"nobody/no-such-model.*no such folder here, and the model hub cannot be"):
        load_hf_target("nobody/no-such-model", [1])


def test_a_wrong_tap_is_refused_before_the_weights_are_read(llama_folder, tmp_path):
    folder = shutil.copytree(llama_folder, tmp_path / "target")
    (folder / "model.safetensors").unlink()
    with pytest.raises(TargetError, match="4 is out of range: the target has 5 layers"):
        load_hf_target(str(folder), [1, 4])


def test_the_tokenizer_is_read_late_and_its_absence_named(llama_folder, tmp_path):
    target = load_hf_target(str(llama_folder), [1])
    with pytest.raises(TargetError, match=rf"{llama_folder} has no tokenizer.*Copy tokenizer\.json"):
        _ = target.tokenizer
    folder = shutil.copytree(llama_folder, tmp_path / "target")
    _save_tokenizer(folder)
    target = load_hf_target(str(folder), [1])
    assert target.tokenizer is target.tokenizer


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"dtype": "float16"}, "'float16' is not one of auto, float32, bfloat16"),
        ({"device": "toaster"}, "'toaster' is not known"),
        ({"device": "meta"}, "'meta' is not supported"),
        ({"max_length": 97}, "max_length 97 must be 1..96"),
        ({"max_tokens_per_forward": 0}, "max_tokens_per_forward must be at least 1, got 0"),
    ],
)
def test_wrong_settings(llama_folder, arguments, message):
    with pytest.raises(TargetError, match=message):
        load_hf_target(str(llama_folder), [1], **arguments)


def test_a_gpu_that_is_not_there(llama_folder):
    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    with pytest.raises(TargetError, match="sees no GPU here"):
        load_hf_target(str(llama_folder), [1], device="cuda")


def test_unused_tensors_are_counted_and_printed(llama_folder, tmp_path, capsys):
    folder = shutil.copytree(llama_folder, tmp_path / "target")
    _edit(folder / "config.json", num_hidden_layers=4)
    load_hf_target(str(folder), [1])
    assert "tensors in its files are not used by LlamaForCausalLM, e.g. model.layers.4" in capsys.readouterr().out


# --- models whose numbers would mislead a draft


@pytest.mark.parametrize(
    ("kind", "changes", "words"),
    [
        ("gemma2", {}, ["multiplies its embeddings by 5.6", "final_logit_softcapping=30.0"]),
        ("gemma", {}, ["multiplies its embeddings by 5.6"]),
        ("granite", {"logits_scaling": 4.0}, ["logits are 0.25 times", "logits_scaling=4.0"]),
        ("granite", {"embedding_multiplier": 12.0}, ["embeddings by 12", "embedding_multiplier=12.0"]),
        ("cohere", {}, ["logits are 0.0625 times", "logit_scale=0.0625"]),
        ("phi", {"num_key_value_heads": 4}, ["LM head adds a bias"]),
    ],
)
def test_transformed_logits_and_embeddings_are_refused(make_model, kind, changes, words):
    folder = make_model(kind, **changes)
    if kind == "phi":  # a new model's bias is zero
        _add_bias(folder)
    with pytest.raises(TargetError) as error:
        load_hf_target(str(folder), [1])
    assert all(word in str(error.value) for word in words), str(error.value)
    assert "softmax(head @ last_hidden)" in str(error.value)


def _add_bias(folder):
    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        model.lm_head.bias += 1.0
    model.save_pretrained(folder)


def test_a_soft_cap_too_gentle_to_measure_is_refused_by_its_key(make_model):
    folder = make_model("gemma2", final_logit_softcapping=1e6)
    with pytest.raises(TargetError, match=r"final_logit_softcapping=1000000\.0"):
        load_hf_target(str(folder), [1])


def test_a_neutral_granite_is_accepted(make_model):
    load_hf_target(str(make_model("granite")), [1])


class _Marked:
    """Faults put into the marker model."""

    @staticmethod
    def capped(model):
        class Capped(nn.Linear):
            def forward(self, hidden):
                return 3 * torch.tanh(super().forward(hidden) / 3)

        model.lm_head.__class__ = Capped

    @staticmethod
    def bidirectional(model):
        model.model.layers[1].forward = lambda hidden: hidden + 10 + hidden.mean(1, keepdim=True)
        nn.init.normal_(model.model.embed_tokens.weight)

    @staticmethod
    def damaged(model):
        model.model.embed_tokens.weight.data[5] = float("nan")

    @staticmethod
    def narrow(model):
        model.lm_head = nn.Linear(2, 7, bias=False)

    @staticmethod
    def headless(model):
        model.get_output_embeddings = lambda: None

    @staticmethod
    def deeper(model):
        model.config.num_hidden_layers = 6

    @staticmethod
    def ambiguous(model):
        model.model.others = nn.ModuleList([nn.Identity() for _ in range(4)])

    @staticmethod
    def endless(model):
        model.config.max_position_embeddings = None

    @staticmethod
    def half(model):
        model.half()


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("capped", "not head @ last_hidden .*soft-caps"),
        ("bidirectional", "not a causal decoder"),
        ("damaged", "row 5 of its input embedding is not finite"),
        ("narrow", r"LM head is \(7, 2\), expected at least 8 rows"),
        ("headless", "no plain .* matrix as its LM head"),
        ("deeper", "6 layers, and no list of modules is that long"),
        ("ambiguous", "2 lists have that length: .'layers', 'others'"),
        ("endless", "no max_position_embeddings; give max_length"),
        ("half", "float16; only float32 and bfloat16"),
    ],
)
def test_faults_of_structure_are_named(make_marker, fault, message):
    model = make_marker(4)
    getattr(_Marked, fault)(model)
    with pytest.raises(TargetError, match=message):
        HFTarget(model, [0, 2], name="marker")


@pytest.mark.parametrize("kind", ["gpt2", "gpt_neox", "mistral", "olmo2", "qwen2_moe", "opt"])
def test_other_families_load_and_agree_with_transformers(make_model, kind, documents):
    changes = {
        "gpt2": {"n_positions": 96, "n_embd": 32, "n_layer": 5, "n_head": 4},
        "qwen2_moe": {"num_experts": 4, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16},
        "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32},
    }.get(kind, {})
    folder = make_model(kind, **changes)
    target = load_hf_target(str(folder), [0, 3])
    capture = target.capture(documents)
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    for ids, context in zip(documents, capture.context_hidden):
        with torch.no_grad():
            states = reference(torch.as_tensor(ids[None].astype(np.int64)), output_hidden_states=True).hidden_states
        torch.testing.assert_close(context, torch.cat([states[1][0], states[4][0]], -1), atol=1e-4, rtol=1e-4)
