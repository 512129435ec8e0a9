"""`draft-jax report` from run folders and results."""

import json
import os

import pytest

from tests.train.evaluate.made_results import made_result, written
from train.evaluate.result_file import ResultError
from train.report.command import main


@pytest.fixture
def run(tmp_path):
    folder = tmp_path / "run-a"
    folder.mkdir()
    rows = [{"step": i, "loss": 2.0 - i / 50, "tau_probabilistic": 1 + i / 50} for i in range(1, 30)]
    rows.append({"step": 29, "eval_step": 28, "accept_length": 1.9})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"step": 30, "lo')
    (folder / "config.yaml").write_text("draft:\n  layers: 1\n")
    for number, name in enumerate(("step-9_t1", "step-29_t1")):
        path = written(folder / "eval" / f"{name}.json", made_result(seed=number))
        os.utime(path, (1000 + number, 1000 + number))
    written(folder / "eval" / "other.json", {"no": "result"})
    return folder


def test_a_run(run, capsys):
    assert main([str(run)]) == 0
    assert f"wrote {run / 'report.html'}" in capsys.readouterr().out
    page = (run / "report.html").read_text()
    assert "Draft report: run-a" in page
    assert "Accept length on held-out prompts, exact" in page
    assert "step-29_t1 and step-9_t1 differ by" in page, "the older evaluation is the baseline"
    assert "the best value, 1.900, at step 28" in page
    assert "layers: 1" in page


def test_runs_and_results_side_by_side(run, tmp_path):
    result = written(tmp_path / "public.json", made_result((0.9, 0.9, 0.9), seed=7))
    output = tmp_path / "out" / "r.html"
    assert main([str(run), f"public={result}", "--output", str(output), "--title", "Two drafts"]) == 0
    page = output.read_text()
    assert "<h1>Two drafts</h1>" in page
    assert "public accepts" in page


def test_only_results_are_written_here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    bare = made_result(prompts=4)
    bare.pop("samples")
    assert main([written(tmp_path / "r.json", bare)]) == 0
    assert (tmp_path / "report.html").is_file()


def test_what_is_not_there_is_said(run, tmp_path):
    with pytest.raises(ResultError, match="cannot be read as a result"):
        main([str(tmp_path / "absent.json")])
    with pytest.raises(ResultError, match="is a folder; name a result in it"):
        main([str(run / "eval")])
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "draft_config.json").write_text("{}")
    with pytest.raises(ResultError, match="neither training metrics nor evaluations"):
        main([str(tmp_path / "empty")])
    (run / "metrics.jsonl").write_text('{"step": 1}\n{"st\n{"step": 2}\n')
    with pytest.raises(ResultError, match=r"metrics\.jsonl:2 is not JSON"):
        main([str(run)])
