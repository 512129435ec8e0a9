"""Configuration: YAML, overrides, and refusals that name the dotted key."""

import dataclasses

import pytest

from train.config import ConfigError, RunConfig, TrainConfig
from train.config_file import apply_override, build, dump, load_config, read_yaml


def test_yaml_and_overrides(plain_tree, write_config):
    path = write_config(plain_tree)
    config = load_config(path, [("optimizer.lr", "3e-4"), ("objective.gamma", "null"), ("logging.trackers", "[wandb]")])
    assert config.optimizer.lr == 3e-4
    assert config.objective.gamma is None
    assert config.logging.trackers == ("wandb",)
    assert config.draft.target_layer_ids == (0, 2)
    assert config.train == TrainConfig(steps=6, batch_rows=2, accumulation=2, seed=7)
    assert config.best_metric == "tau_probabilistic"


def test_dump_reads_back(plain_tree, tmp_path):
    config = build(plain_tree)
    file = tmp_path / "resolved.yaml"
    file.write_text(dump(config))
    assert load_config(file) == config


def test_engine_options_need_their_bridge(plain_tree):
    plain_tree["target"]["sglang"] = {"page_size": 16}
    with pytest.raises(ConfigError, match=r"target\.sglang.*target\.bridge is 'hf', so it would have no effect"):
        build(plain_tree)
    plain_tree["target"]["bridge"] = "sglang"
    assert build(plain_tree).target.sglang.page_size == 16
    plain_tree["target"] |= {"sglang": {"tp_size": 2}, "capture_cache_gib": 1.0}
    with pytest.raises(ConfigError, match=r"target\.capture_cache_gib is 1\.0; give 0 with target\.sglang\.tp_size"):
        build(plain_tree)
    plain_tree["target"]["capture_cache_gib"] = 0.0
    plain_tree["target"]["sglang"] = {"page_size": 0}
    with pytest.raises(ConfigError, match=r"target\.sglang\.page_size is 0; give a positive integer"):
        build(plain_tree)


def test_override_makes_missing_sections(plain_tree):
    del plain_tree["optimizer"]
    apply_override(plain_tree, "optimizer.betas", "[0.8, 0.9]")
    assert build(plain_tree).optimizer.betas == (0.8, 0.9)
    with pytest.raises(ConfigError, match=r"run_dir already has the value"):
        apply_override(plain_tree, "run_dir.x", "1")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"optimizer__learning_rate": 1.0}, r"unknown key optimizer\.learning_rate; .*optimizer\.lr|known keys"),
        ({"objective__num_anchor": 3}, r"unknown key objective\.num_anchor; did you mean objective\.num_anchors\?"),
        ({"zzz": 3}, r"unknown key zzz; known keys: target"),
        ({"data__template_": "x"}, r"unknown key data\.template_; did you mean data\.template\?"),
        ({"train__steps": "many"}, r"train\.steps.*many"),
        ({"train__steps": 2.5}, r"train\.steps.*2\.5"),
        ({"train__steps": True}, r"train\.steps is True; expected int"),
        ({"train__epochs": 2}, r"train\.steps / train\.epochs is \(6, 2\.0\); give exactly one"),
        ({"train__batch_rows": 0}, r"train\.batch_rows is 0"),
        ({"train__devices": 3}, r"train\.batch_rows is 2; make it a multiple of train\.devices \(3\)"),
        ({"optimizer__lr": -1.0}, r"optimizer\.lr is -1\.0"),
        ({"optimizer__betas": [0.9]}, r"optimizer\.betas"),
        ({"optimizer__lr": None}, r"optimizer\.lr is null"),
        ({"resume": "yes please"}, r"resume"),
        ({"objective__normalization": "rows"}, r"objective\.normalization"),
        ({"draft__num_taps": 3}, r"draft\.num_taps is 3; leave it out when draft\.target_layer_ids"),
        ({"logging__trackers": ["mlflow"]}, r"logging\.trackers"),
        ({"data__row_length": 48}, r"data\.row_length is 48; it has no effect without data\.packing: first_fit"),
        ({"data__packing": "first_fit", "data__row_length": 23}, r"data\.row_length is 23; .*data\.max_length \(24\)"),
        ({"data__packing": "best_fit"}, r"data\.packing"),
        ({"objective__anchors_per_document": 0}, r"objective\.anchors_per_document is 0"),
        ({"target": "folder"}, r"target is 'folder'; it holds the keys path"),
        ({"target": None}, r"target is None; it holds the keys path"),
    ],
)
def test_refused_by_path(plain_tree, change, changes, message):
    with pytest.raises(ConfigError, match=message):
        build(change(plain_tree, **changes))


def test_missing_keys_are_named(plain_tree):
    del plain_tree["target"]["path"]
    with pytest.raises(ConfigError, match=r"missing key target\.path"):
        build(plain_tree)
    del plain_tree["target"]
    with pytest.raises(ConfigError, match=r"missing key target\.path"):
        build(plain_tree)
    with pytest.raises(ConfigError, match=r"missing key run_dir"):
        build({"target": {"path": "x"}, "data": {"path": "y"}})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\na: 2\n", "line 2: key 'a' is given twice"),
        ("optimizer:\n  lr: 1\n  lr: 2\n", "line 3: key 'lr' is given twice"),
        ("a: {b\n", "is not YAML"),
        ("- 1\n", "holds a list"),
    ],
)
def test_bad_files(tmp_path, text, message):
    file = tmp_path / "c.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_yaml(file)


def test_missing_and_empty_file(tmp_path):
    with pytest.raises(ConfigError, match=r"nope\.yaml: cannot be read"):
        read_yaml(tmp_path / "nope.yaml")
    (tmp_path / "empty.yaml").write_text("")
    assert read_yaml(tmp_path / "empty.yaml") == {}


def test_every_key_has_a_documented_meaning():
    """--help is made from the docstrings, so a field without one would be a blank line there."""
    import typing

    from train.config_file import dataclass_of
    from train.config_help import attribute_docs, key_table

    def walk(config_class):
        docs = attribute_docs(config_class)
        hints = typing.get_type_hints(config_class)
        for field in dataclasses.fields(config_class):
            inner = dataclass_of(hints[field.name])
            if inner:
                walk(inner)
            else:
                assert docs.get(field.name), f"{config_class.__name__}.{field.name}"

    walk(RunConfig)
    assert "--optimizer.lr_scale  float, default 1.0" in key_table()
