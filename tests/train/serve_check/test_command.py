"""`draft-jax serve-check` from its arguments to its files and exit code.

The evaluations are real, and so is everything around the server; the server replays rounds built from the very
evaluation, so the right answer is known exactly. tests/sglang holds the stand-in against SGLang's own code.
"""

import json
from dataclasses import replace

import pytest

from draft_jax.config import DraftConfig
from tests.fake_sglang import FOLDER
from train.evaluate.command import main as evaluate
from train.evaluate.draft import load_draft
from train.export import export
from train.serve_check import command
from train.serve_check.command import main, parser, serve_config
from train.serve_check.offline import OfflineMismatch, read_evaluation, run_evaluation

K, NEW, FILLER = 3, 12, 6


@pytest.fixture(scope="module")
def draft(target_folder, tmp_path_factory):
    import jax

    from draft_jax.models.dspark import init_params

    raw = json.loads((target_folder / "config.json").read_text())
    config = DraftConfig.from_target(
        raw, num_hidden_layers=1, target_layer_ids=(0, 2), block_size=K, mask_token_id=5, markov_rank=4,
        initializer_range=0.3, target_name=str(target_folder),
    )  # fmt: skip
    params = init_params(config, jax.random.key(0))
    return export(params, config, tmp_path_factory.mktemp("draft") / "export").path


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    rows = [{"id": f"q{i}", "turns": [f"w{i + 6} w{i + 9} w{i + 20}"]} for i in range(6)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def offline(draft, prompts, tmp_path_factory):
    """The evaluations at temperature 0 and 1."""
    folder = tmp_path_factory.mktemp("offline")
    paths = []
    for temperature in ("0", "1"):
        paths.append(folder / f"t{temperature}.json")
        common = ["--draft", str(draft), "--prompts", str(prompts), "--max-new-tokens", str(NEW), "--no-plain"]
        given = ["--device", "cpu", "--dtype", "bfloat16", "--temperature", temperature, "--output", str(paths[-1])]
        assert evaluate([*common, *given]) == 0
    return paths


def raw_rounds(sample):
    """An evaluation's rounds as a server runs them: whole blocks, the last one past its end."""
    tokens, place, rounds = sample["output_tokens"], 1, []
    for item in sample["rounds"]:
        kept = tokens[place : place + item["committed"]]
        place += item["committed"]
        if item["committed"] > item["accepted"]:
            *drafts, bonus = kept
            rounds.append([drafts + [FILLER] * (K - len(drafts)), item["accepted"], bonus])
        else:  # cut: everything after it was accepted, and is not kept
            rounds.append([kept + [FILLER] * (K - len(kept)), K, FILLER])
    return rounds


@pytest.fixture
def check(draft, prompts, offline, target_folder, tmp_path, monkeypatch):
    """Runs the command against a server that replays the evaluations, `change`d first; returns (code, result)."""
    from target_bridge.hf_source import load_tokenizer
    from train.evaluate.tasks import load_prompts

    ids = {p.id: p.input_ids.tolist() for p in load_prompts(prompts, load_tokenizer(str(target_folder))).prompts}
    script = {"prompts": {}}
    for path in offline:
        record = json.loads(path.read_text())
        for sample in record["samples"]:
            key = f"{record['settings']['temperature']:g}|{','.join(map(str, ids[sample['prompt']]))}"
            output = sample["output_tokens"]
            script["prompts"][key] = {"first": output[0], "rounds": raw_rounds(sample), "plain": output}

    def run(*arguments, change=None, files=offline, fail=None):
        if change:
            change(script["prompts"])
        if fail:
            script.update(fail=fail, message="out of luck")
        (tmp_path / "script.json").write_text(json.dumps(script))
        monkeypatch.setenv("FAKE_SGLANG", str(tmp_path / "script.json"))
        common = ["--draft", str(draft), "--prompts", str(prompts), "--max-new-tokens", str(NEW)]
        server = ["--server-pythonpath", str(FOLDER), "--start-timeout", "30", "--output", str(tmp_path / "out")]
        given = ["--offline", *map(str, files)] if files else []
        code = main([*common, *server, *given, *arguments])
        return code, json.loads((tmp_path / "out" / "result.json").read_text())

    return run


def test_the_same_rounds_agree_exactly(check, offline, capsys, tmp_path):
    code, result = check()
    assert code == 0
    assert result["agrees"]
    assert result["server"]["version"] == "0.5.16+fake"
    for path, comparison in zip(offline, result["comparisons"]):
        record = json.loads(path.read_text())
        assert comparison["served"]["accept_length"] == pytest.approx(record["accept_length"], abs=1e-12)
        assert comparison["served"]["rounds"] == record["rounds"]
        assert comparison["served"]["tokens"] == record["tokens"]
        assert comparison["relative_difference"] == pytest.approx(0, abs=1e-12)
        assert comparison["offline"]["standard_error"] == pytest.approx(comparison["served"]["standard_error"])
    greedy, sampled = result["comparisons"]
    assert greedy["identical_to_plain"]["share"] == greedy["identical_to_offline"]["share"] == 1.0
    assert sampled["identical_to_plain"] is None
    assert greedy["same_text_accept_length"][0] == pytest.approx(greedy["same_text_accept_length"][1])
    printed = capsys.readouterr().out
    assert printed.count("agrees within 3 %") == 2
    assert "served/offline" in printed
    assert "6 of 6 outputs (100.0%) equal the server's own plain decoding, token by token" in printed
    logs = {item.name: item.read_text() for item in (tmp_path / "out").glob("server_*.log")}
    assert set(logs) == {"server_with_the_draft.log", "server_without_it.log"}
    assert "'speculative_algorithm': 'DSPARK'" in logs["server_with_the_draft.log"]
    assert f"'speculative_num_draft_tokens': {K + 1}" in logs["server_with_the_draft.log"]
    assert "speculative" not in logs["server_without_it.log"].splitlines()[0]


def test_a_known_fault_of_the_server_is_told(check, capsys):
    code, result = check("--no-plain", "--temperature", "0", "--draft-attention-backend", "triton")
    assert code == 0, "it is told, the numbers decide"
    assert "0.5.16+fake with the Triton backend" in result["server"]["known_fault"]
    assert "KNOWN FAULT: SGLang 0.5.16" in capsys.readouterr().out


def test_a_server_that_accepts_less_fails(check, capsys):
    def refuse_everything(prompts):
        for script in prompts.values():
            output = script["plain"]
            script["rounds"] = [[[FILLER] * K, 0, token] for token in output[1:]]

    code, result = check(change=refuse_everything)
    assert code == 1
    assert not result["agrees"]
    assert {c["served"]["accept_length"] for c in result["comparisons"]} == {1.0}
    printed = capsys.readouterr().out
    assert "DIFFERS" in printed
    assert all("accepted no draft token" in c["problem"] for c in result["comparisons"] if not c["agrees"])


def test_tolerance_decides(check):
    """Splitting one round of several tokens in two moves the accept length by a known amount."""

    def split(prompts):
        for script in prompts.values():
            for index, (drafts, accepted, bonus) in enumerate(script["rounds"][:-1]):
                if accepted:
                    rest = [*drafts[1:accepted], bonus]
                    one, two = (
                        [[FILLER] * K, 0, drafts[0]],
                        [rest[:-1] + [FILLER] * (K - accepted + 1), accepted - 1, bonus],
                    )
                    script["rounds"][index : index + 1] = [one, two]
                    break

    code, result = check("--tolerance", "0.001", change=split)
    assert code == 1
    differing = [c for c in result["comparisons"] if c["relative_difference"]]
    assert differing
    for comparison in differing:
        served, ours = comparison["served"], comparison["offline"]
        extra = served["rounds"] - ours["rounds"]
        assert extra > 0
        expected = ours["accept_length"] * ours["rounds"] / (ours["rounds"] + extra)
        assert served["accept_length"] == pytest.approx(expected)
        assert f"{comparison['relative_difference']:+.1%} off the offline" in comparison["problem"]
        noise = 2 * comparison["relative_standard_error"]
        assert ("two standard errors" in comparison["problem"]) == (abs(comparison["relative_difference"]) <= noise)
    code, result = check("--tolerance", "0.5")
    assert code == 0


def test_outputs_that_part_are_shown_with_their_margin(check, capsys):
    changed = []

    def alter(prompts):
        for key, script in prompts.items():
            if key.startswith("0|") and len(script["plain"]) > 5 and len(changed) < 2:
                script["plain"] = [*script["plain"][:4], FILLER + 1, *script["plain"][5:]]
                changed.append(key)

    code, result = check(change=alter)
    assert code == 0, "bfloat16 outputs part now and then: reported, no failure"
    identity = result["comparisons"][0]["identical_to_plain"]
    assert (identity["identical"], identity["compared"]) == (4, 6)
    assert {item["position"] for item in identity["differences"]} == {4}
    assert {item["margin"] for item in identity["differences"]} == {1.25}
    printed = capsys.readouterr().out
    assert "token 4 is" in printed
    assert "plain logits 1.25 apart" in printed
    assert "0 of these 2 places are near ties" in printed


def test_without_offline_files_the_evaluator_runs(check, offline, tmp_path, capsys):
    code, result = check("--temperature", "0", "--device", "cpu", files=())
    assert code == 0
    again = json.loads((tmp_path / "out" / "offline_t0.json").read_text())
    before = json.loads(offline[0].read_text())
    assert again["settings"]["prompts_digest"] == before["settings"]["prompts_digest"]
    assert again["accept_length"] == before["accept_length"]
    assert [c["temperature"] for c in result["comparisons"]] == [0.0]


def test_no_plain_serves_once(check, tmp_path):
    code, result = check("--no-plain", "--temperature", "0")
    assert code == 0
    assert result["comparisons"][0]["plain"] is None
    assert result["comparisons"][0]["identical_to_plain"] is None
    assert not (tmp_path / "out" / "server_without_it.log").exists()


def test_what_was_measured_survives_the_second_server(check, capsys):
    code, result = check("--temperature", "0", fail="plain")
    assert code == 1, "not all that was asked for was measured"
    comparison = result["comparisons"][0]
    assert comparison["relative_difference"] == pytest.approx(0.0)
    assert comparison["plain"] is None
    assert comparison["identical_to_offline"]["share"] == 1.0
    assert "out of luck" in result["server"]["without it"]["failure"]
    assert "serving without the draft failed, its numbers are missing" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--max-new-tokens", "11"], r"max_new_tokens 12, here 11(.|\n)*other prompts"),
        (["--limit", "5"], r"other prompts: 6 of them with digest \w{12}, here 5"),
        (["--target", "{other}"], "target .*llama, here .*other"),
    ],
)
def test_offline_results_of_something_else_are_refused(check, arguments, message, target_folder, tmp_path):
    import shutil

    other = tmp_path / "other"
    shutil.copytree(target_folder, other)
    with pytest.raises(OfflineMismatch, match=message):
        check(*[item.format(other=other) for item in arguments])


def test_an_offline_result_of_another_draft_is_refused(check, draft, tmp_path, monkeypatch):
    loaded = load_draft(draft)
    fc = loaded.params["fc"]["kernel"]
    changed = {**loaded.params, "fc": {"kernel": fc.at[0, 0].add(1.0)}}
    folder = export(changed, loaded.config, tmp_path / "changed").path
    with pytest.raises(OfflineMismatch, match=r"another draft: its content is \w{12}, here it is \w{12}"):
        check("--draft", str(folder))


def edited(path, tmp_path, **settings):
    record = json.loads(path.read_text())
    record["settings"] |= settings
    for key in [key for key, value in settings.items() if value == "gone"]:
        del record["settings"][key]
    (tmp_path / "edited.json").write_text(json.dumps(record))
    return tmp_path / "edited.json"


def test_offline_files_that_do_not_fit(check, offline, tmp_path):
    with pytest.raises(ValueError, match=r"no --offline file is of temperature 0\.5, they have 0, 1"):
        check("--temperature", "0.5")
    with pytest.raises(ValueError, match="are both of temperature 0; give one"):
        check(files=[offline[0], offline[0]])
    with pytest.raises(OfflineMismatch, match=r"confidence_threshold 0\.3"):
        check("--temperature", "0", files=[edited(offline[0], tmp_path, confidence_threshold=0.3)])
    for change in ({"count_overshoot": True}, {"draft_sampling": "bfloat16"}):
        with pytest.raises(OfflineMismatch, match=f"{next(iter(change))} .*: another project's protocol"):
            check("--temperature", "0", files=[edited(offline[0], tmp_path, **change)])
    with pytest.raises(OfflineMismatch, match=r"target in float32, draft in bfloat16.*evaluate with --dtype bfloat16"):
        check("--temperature", "0", files=[edited(offline[0], tmp_path, target_dtype="float32")])
    with pytest.raises(ValueError, match=r"older draft-jax \(no draft_digest\)"):
        check(files=[edited(offline[0], tmp_path, draft_digest="gone")])
    with pytest.raises(ValueError, match="not the JSON of a `draft-jax eval`"):
        check(files=[tmp_path / "script.json"])
    with pytest.raises(ValueError, match="cannot be read as JSON"):
        check(files=[tmp_path / "none.json"])


def test_an_evaluation_without_a_measurement_is_refused(offline, tmp_path):
    record = json.loads(offline[0].read_text()) | {"error": "the draft proposed nothing"}
    (tmp_path / "bad.json").write_text(json.dumps(record))
    with pytest.raises(ValueError, match="is no measurement: the draft proposed nothing"):
        read_evaluation(tmp_path / "bad.json")


def test_a_failing_evaluation_tells_its_last_words(draft, tmp_path):
    with pytest.raises(RuntimeError, match=r"failed \(exit code 1\)(.|\n)*no such folder"):
        run_evaluation(["--draft", str(tmp_path / "none")], 0.0, tmp_path / "x.json", 60)
    with pytest.raises(RuntimeError, match=r"took longer than 0.1 s \(--eval-timeout\)"):
        run_evaluation(["--draft", str(draft)], 0.0, tmp_path / "x.json", 0.1)


def test_a_context_without_room_for_the_window_is_refused(draft, prompts, tmp_path, check):
    tight = tmp_path / "tight.json"
    limit = 30
    common = ["--draft", str(draft), "--prompts", str(prompts), "--device", "cpu", "--dtype", "bfloat16", "--no-plain"]
    evaluate([*common, "--max-new-tokens", "100", "--max-context", str(limit), "--output", str(tight)])
    with pytest.raises(ValueError, match=r"have 30 tokens of a context of 30.*Give --max-context 24"):
        check("--max-new-tokens", "100", "--temperature", "0", files=[tight])


def test_a_folder_that_sglang_would_serve_wrong_is_refused(check, draft, tmp_path):
    import shutil

    folder = tmp_path / "flat"
    shutil.copytree(draft, folder)
    config = json.loads((folder / "config.json").read_text())
    del config["dflash_config"]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"no draft that stock SGLang serves right(.|\n)*draft-jax export --draft"):
        check("--draft", str(folder))


def test_a_run_is_exported_first(check, draft, tmp_path, monkeypatch):
    import train.evaluate.draft as source

    loaded = replace(load_draft(draft), step=7, origin="run R at step 7")
    monkeypatch.setattr(source, "load_draft", lambda *_: loaded)
    code, result = check("--no-plain")
    assert code == 0, "a run's evaluation and its export are the same draft"
    assert result["draft"] == "run R at step 7"
    assert (tmp_path / "out" / "export" / "model.safetensors").is_file()


def options(*arguments):
    return serve_config(parser().parse_args(["--draft", "d", *arguments]))


def test_options_reach_the_engine():
    config = options(
        "--attention-backend", "triton", "--draft-attention-backend", "flashinfer",
        "--server-memory", "0.3", "--concurrency", "8", "--server-arg",
        "disable_cuda_graph=true", "--server-arg", "kv_cache_dtype=auto",
        "--server-arg", "speculative_draft_window_size=9",
    )  # fmt: skip
    with_draft = config.engine("T", "bfloat16", 300, draft="D", block_size=7, trust=False)
    assert with_draft["attention_backend"] == "triton"
    assert with_draft["speculative_draft_attention_backend"] == "flashinfer"
    alone = options("--attention-backend", "triton").engine("T", "bfloat16", 9, draft="D", block_size=7, trust=False)
    assert alone["speculative_draft_attention_backend"] == "triton"
    assert with_draft["disable_cuda_graph"] is True
    assert with_draft["kv_cache_dtype"] == "auto"
    assert with_draft["speculative_num_draft_tokens"] == 8
    assert with_draft["speculative_draft_window_size"] == 9
    assert (with_draft["context_length"], with_draft["max_running_requests"]) == (300, 8)
    plain = config.engine("T", "bfloat16", 300, draft=None, block_size=7, trust=False)
    assert set(with_draft) - set(plain) == {name for name in with_draft if name.startswith("speculative_")}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--server-arg", "dtype=float16"], "--server-arg dtype: serve-check decides that itself"),
        (["--server-arg", "oops"], "write NAME=VALUE"),
        (["--temperature", "0", "0"], "comes twice"),
        (["--temperature", "-1"], "give 0"),
        (["--tolerance", "3"], "give 0.03 for 3 %"),
        (["--concurrency", "0"], "at least one request"),
        (["--server-memory", "1.5"], "a share of the GPU"),
        (["--start-timeout", "0"], "deadline start is 0"),
        (["--eval-timeout", "0"], "--eval-timeout 0"),
    ],
)
def test_wrong_options_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        options(*arguments)


def test_evaluation_options_are_handed_on(tmp_path):
    args = parser().parse_args([
        "--draft", "d", "--prompts", "p.jsonl", "--limit", "3", "--bridge", "sglang", "--max-context", "99",
        "--eval-arg=--batch", "--eval-arg=8",
    ])  # fmt: skip
    from train.serve_check.check import Check

    handed = command._eval_arguments(args, Check("n", None, "x", tmp_path / "export", "T", tmp_path))
    line = " ".join(handed)
    for expected in ("--prompts p.jsonl", "--limit 3", "--bridge sglang", "--max-context 99", "--target T"):
        assert expected in line
    assert line.endswith("--batch 8")
