"""The command: what it says, where it sends arguments, and how it fails."""

import json
import shutil
import subprocess
import sys
import types
from pathlib import Path

import pytest

from train.cli import UsageError, main, parse_train


@pytest.fixture
def said(capsys):
    def read() -> str:
        captured = capsys.readouterr()
        return captured.out + captured.err

    return read


def test_help_and_version(said):
    assert main(["--help"]) == 0
    text = said()
    for command in ("train", "eval", "export", "probe", "quickstart"):
        assert f"\n  {command} " in text
    assert main([]) == 2
    assert "usage: draft-jax" in said()
    assert main(["--version"]) == 0
    assert said().startswith("draft-jax ")
    assert main(["train", "--help"]) == 0
    text = said()
    assert "--resume MODE" in text
    assert "--target.path  str, required" in text
    assert "--optimizer.lr_scale  float, default 1.0" in text


def test_help_and_version_load_nothing_heavy(cli):
    done = cli("--version")
    assert done.code == 0
    code = "import sys, train.cli; train.cli.main(['--help']); print([m for m in ('jax', 'torch') if m in sys.modules])"
    root = Path(__file__).resolve().parents[2]
    out = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True).stdout
    assert out.endswith("[]\n")


def test_unknown_command(said):
    assert main(["trian"]) == 2
    text = said()
    assert "unknown command 'trian'; known: train, eval, " in text
    assert "probe" in text


def test_arguments():
    path, overrides, plan = parse_train(
        ["--config", "a.yaml", "--optimizer.lr=3e-4", "--train.steps", "5", "--resume", "auto", "--plan",
         "--init-draft=d", "--objective.gamma=-1"]
    )  # fmt: skip
    assert path == "a.yaml"
    assert plan
    assert overrides == [
        ("optimizer.lr", "3e-4"),
        ("train.steps", "5"),
        ("resume", "auto"),
        ("draft.init_draft", "d"),
        ("objective.gamma", "-1"),
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["config.yaml"], r"unexpected argument 'config\.yaml'"),
        (["--train.steps"], r"--train\.steps needs a value"),
        (["--train.steps", "--plan"], r"--train\.steps needs a value"),
    ],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(UsageError, match=message):
        parse_train(arguments)


def test_commands_are_dispatched(monkeypatch):
    seen = []
    for module, name in (
        ("train.evaluate.command", "eval"),
        ("train.export", "export"),
        ("train.quickstart", "quickstart"),
    ):
        fake = types.ModuleType(module)
        fake.main = lambda argv, name=name: seen.append((name, argv)) or 3
        monkeypatch.setitem(sys.modules, module, fake)
        assert main([name, "--a", "b"]) == 3
    assert seen == [("eval", ["--a", "b"]), ("export", ["--a", "b"]), ("quickstart", ["--a", "b"])]


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--optimizer.lrr=1", "unknown key optimizer.lrr; did you mean optimizer.lr?"),
        ("--objective.ce.alpha=1", "unknown key objective.ce"),
        ("--train.steps=many", "train.steps"),
        ("--config=nope.yaml", "nope.yaml: cannot be read"),
        ("nonsense", "unexpected argument 'nonsense'"),
    ],
)
def test_wrong_configuration_is_one_line_and_code_2(plain_tree, write_config, said, option, message):
    assert main(["train", "--config", write_config(plain_tree), option]) == 2
    text = said()
    assert message in text
    assert "Traceback" not in text


def test_debug_shows_the_traceback(plain_tree, write_config, said):
    assert main(["train", "--config", write_config(plain_tree), "--optimizer.lrr=1", "--debug"]) == 1
    text = said()
    assert "Traceback" in text
    assert "unknown key optimizer.lrr" in text


def test_failures_are_code_1_and_defects_keep_their_traceback(monkeypatch, said):
    def failing(error):
        fake = types.ModuleType("train.export")

        def fail(argv):
            raise error

        fake.main = fail
        monkeypatch.setitem(sys.modules, "train.export", fake)
        return main(["export"])

    assert failing(ValueError("tensor fc.weight is missing")) == 1
    text = said()
    assert "ValueError: tensor fc.weight is missing" in text
    assert "Traceback" not in text
    assert failing(OSError(28, "No space left on device", "out.bin")) == 1
    assert "No space left on device" in said()
    assert failing(TypeError("a defect")) == 1
    assert "Traceback" in said()
    assert failing(KeyboardInterrupt()) == 130


def test_a_missing_package_is_named_with_the_remedy(monkeypatch, said):
    """Of ours it would be a defect; of others it is an incomplete installation."""

    def start(name):
        fake = types.ModuleType("train.export")
        fake.main = lambda argv: __import__(name)
        monkeypatch.setitem(sys.modules, "train.export", fake)
        return main(["export"])

    assert start("no_such_package.part") == 1
    text = said()
    assert f"the package no_such_package is not installed in {sys.prefix}: pip install draft-jax" in text
    assert "Traceback" not in text
    assert start("train.no_such_module") == 1
    assert "Traceback" in said()


def test_plan_needs_no_weights_and_starts_nothing(tree, write_config, tmp_path, said):
    bare = tmp_path / "bare"
    shutil.copytree(tree["target"]["path"], bare)
    for file in bare.glob("*.safetensors"):
        file.unlink()
    tree["target"]["path"] = str(bare)
    assert main(["train", "--config", write_config(tree), "--plan", "--train.accumulation=3"]) == 0
    text = said()
    for part in ("accumulation: 3", "trainable parameters", "Adam moments (fp32)", "TFLOP", "taps [0, 2] of 4"):
        assert part in text
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "holds no rows"),
        ([{"id": "a", "input_ids": [6, 7, 8, 9], "loss_mask": [0, 0, 0, 0]}], "nothing to train on"),
        ([{"id": "a", "input_ids": [6, 7, 999, 9], "loss_mask": [1, 1, 1, 1]}], "nothing to train on"),
    ],
)
def test_bad_data_is_code_1_and_named(tree, write_config, tmp_path, said, rows, message):
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    tree["data"]["path"] = str(data)
    assert main(["train", "--config", write_config(tree)]) == 1
    text = said()
    assert message in text
    assert "Traceback" not in text


def test_a_folder_that_is_no_model(tree, write_config, tmp_path, said):
    tree["target"]["path"] = str(tmp_path)
    assert main(["train", "--config", write_config(tree)]) == 2
    assert "that folder is not a model, it has no config.json" in said()


def test_taps_out_of_range(tree, write_config, said):
    assert main(["train", "--config", write_config(tree), "--draft.target_layer_ids=[0, 3]"]) == 2
    assert "target_layer_ids contains 3" in said()
