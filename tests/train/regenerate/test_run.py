"""The whole command against a real HTTP server."""

import json
import threading

import pytest

from tests.train.regenerate.conftest import conversation
from tests.train.regenerate.server import FakeServer
from train.data.files import Place
from train.data.formats import parse_row
from train.regenerate.client import ServerError
from train.regenerate.output import OutputError
from train.regenerate.run import TooManyErrors


def test_every_answer_is_history_of_the_next_question(call):
    with FakeServer() as server:
        done = call([conversation(0, turns=3)], [server])
    assert done.code == 0
    row = done.rows["row-0"]
    assert [m["role"] for m in row["messages"]] == ["user", "assistant"] * 3
    sent = [body["messages"] for body in server.asked]
    assert sent == [row["messages"][:1], row["messages"][:3], row["messages"][:5]]
    assert all("somebody else" not in json.dumps(messages) for messages in sent)
    assert row["source"] == "tests"
    read = parse_row(json.dumps(row).encode(), Place("answers.jsonl", 1), vocab_size=0)
    assert (read.id, read.messages) == ("row-0", row["messages"])


def test_what_was_asked_for_is_in_the_row_and_in_the_request(call):
    options = ["--top-p", "0.8", "--top-k", "20", "--repetition-penalty", "1.1", "--max-tokens", "64",
               "--template-options", '{"enable_thinking": false}', "--extra-body", '{"stop": ["#"]}',
               "--seed", "7"]  # fmt: skip
    with FakeServer() as server:
        done = call([conversation(0, turns=2)], [server], *options)
    made = done.rows["row-0"]["regenerated"]
    assert made["model"] == "toy"
    assert made["sampling"] == {
        "temperature": 0.7, "max_tokens": 64, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.1,
        "chat_template_kwargs": {"enable_thinking": False}, "stop": ["#"],
    }  # fmt: skip
    for turn, body in enumerate(server.asked):
        assert body == {"model": "toy", "messages": body["messages"], "seed": made["seeds"][turn], **made["sampling"]}
    assert made["seeds"][0] != made["seeds"][1]
    assert made["turns"][1] == {"finish": "stop", "prompt_tokens": 3, "completion_tokens": 2}
    assert (done.summary["turns"], done.summary["completion_tokens"]) == (2, 4)


def test_without_a_seed_none_is_sent(call):
    with FakeServer() as server:
        done = call([conversation(0)], [server], "--no-seed")
    assert "seed" not in server.asked[0]
    assert "seeds" not in done.rows["row-0"]["regenerated"]


def test_content_does_not_depend_on_order_or_server(call, tmp_path):
    rows = [conversation(n, turns=1 + n % 3) for n in range(30)]
    with FakeServer() as one:
        first = call(rows, [one], "--concurrency", "1")
    call.output.rename(tmp_path / "first.jsonl")
    for name in (".errors", ".run", ".summary"):
        call.output.with_name(call.output.name + name).unlink()
    with FakeServer(fault=lambda body, n: "500" if n % 4 == 1 else None) as one, FakeServer(delay=0.01) as two:
        second = call(rows[::-1], [one, two], "--concurrency", "5")
    assert first.rows == second.rows
    assert len(first.rows) == 30


def test_two_servers_share_the_load(call):
    with FakeServer(delay=0.02) as one, FakeServer(delay=0.02) as two:
        done = call([conversation(n, turns=2) for n in range(40)], [one, two], "--concurrency", "4")
    assert len(done.rows) == 40
    assert len(one.asked) + len(two.asked) == 80
    assert min(len(one.asked), len(two.asked)) >= 28
    assert max(one.most_in_flight, two.most_in_flight) <= 4
    assert min(one.most_in_flight, two.most_in_flight) >= 3
    firsts = {body["messages"][0]["content"] for body in one.asked}  # a conversation stays where its prefix is cached
    assert not firsts & {body["messages"][0]["content"] for body in two.asked}


def test_fewer_rows_than_room_are_shared_evenly(call):
    with FakeServer(delay=0.2) as one, FakeServer(delay=0.2) as two:
        call([conversation(n) for n in range(8)], [one, two], "--concurrency", "32")
    assert (len(one.asked), len(two.asked)) == (4, 4)


@pytest.mark.parametrize("fault", ["500", "503", "429", "cut", "drop", "text", "shape", "abort"])
def test_faults_that_pass_are_tried_again(call, fault):
    with FakeServer(fault=lambda body, n: fault if n % 3 == 0 else None) as server:
        done = call([conversation(n, turns=2) for n in range(6)], [server], "--concurrency", "2", "--retries", "8")
    assert (done.code, len(done.rows), done.left_out) == (0, 6, [])
    retried = sum(entry["count"] for entry in done.summary["this_run"]["retries"].values())
    assert retried == len(server.asked) - 12 > 0
    assert len(server.answered) == 12


def test_a_request_that_takes_too_long_is_tried_again(call):
    with FakeServer(fault=lambda body, n: "hang" if n == 0 else None) as server:
        done = call([conversation(n) for n in range(3)], [server], "--request-timeout", "0.4")
    assert len(done.rows) == 3
    assert done.summary["this_run"]["retries"]["no answer in time"]["count"] == 1


def test_retry_after_is_obeyed(call):
    with FakeServer(fault=lambda body, n: "429" if n == 0 else None, retry_after="0.7") as server:
        done = call([conversation(0)], [server])
    assert len(done.rows) == 1
    assert 0.7 <= server.times[1] - server.times[0] < 5  # the back-off alone would have been 10 ms


def test_a_row_that_never_gets_an_answer_goes_to_the_errors_file_and_can_be_asked_again(call):
    broken = lambda body, n: "500" if body["messages"][0]["content"] == "question 1.0" else None  # noqa: E731
    with FakeServer(fault=broken) as server:
        done = call([conversation(n) for n in range(12)], [server], "--retries", "2")
    assert done.code == 0
    assert sorted(done.rows) == sorted(f"row-{n}" for n in range(12) if n != 1)
    (entry,) = done.left_out
    assert (entry["id"], entry["kind"], entry["reason"]) == ("row-1", "error", "HTTP 500")
    assert "3 tries" in entry["detail"]
    assert "said the server" in entry["detail"]
    with FakeServer() as server:
        again = call(None, [server], "--resume")
        assert (len(server.asked), again.left_out) == (0, done.left_out)
        again = call(None, [server], "--resume", "--retry-errors")
    assert (len(server.asked), len(again.rows), again.left_out) == (1, 12, [])


def test_a_request_the_server_refuses_is_not_repeated(call):
    refuses = lambda body, n: "400" if body["messages"][0]["content"] == "question 1.0" else None  # noqa: E731
    with FakeServer(fault=refuses) as server:
        done = call([conversation(n) for n in range(12)], [server])
    assert len(server.asked) == 12
    assert [(e["id"], e["reason"]) for e in done.left_out] == [("row-1", "HTTP 400")]
    assert "said the server" in done.left_out[0]["detail"]


def test_a_run_in_which_everything_fails_stops(call):
    with FakeServer(fault=lambda body, n: "400") as server, pytest.raises(TooManyErrors, match=r"most often: HTTP 400"):
        call([conversation(n) for n in range(500)], [server], "--concurrency", "2")
    assert len(server.asked) < 60


def test_one_server_dies_and_comes_back(call):
    state = {}

    def kill(body, number):
        if number == 10:
            threading.Thread(target=two.close).start()
        return None

    def revive(body, number):
        if number == 60:
            state["two"] = FakeServer(delay=0.01, port=two.port)
        return None

    with FakeServer(delay=0.01, fault=revive) as one, FakeServer(delay=0.01, fault=kill) as two:
        done = call([conversation(n) for n in range(200)], [one, two], "--concurrency", "3")
    with state["two"] as back:
        assert len(back.asked) > 10
    assert (done.code, len(done.rows), done.left_out) == (0, 200, [])
    assert f"{two.url} is away" in done.err
    assert f"{two.url} answers again" in done.err


def test_a_server_that_comes_back_with_another_model_answers_no_row(call):
    state = {}
    other = {"role": "assistant", "content": "words of another model"}

    def replace(body, number):
        if number == 5:
            two.close()
            state["two"] = FakeServer(model="other", port=two.port, answer=lambda body: other)
        return None

    with FakeServer(delay=0.02) as one, FakeServer(delay=0.02, fault=replace) as two:
        done = call([conversation(n) for n in range(60)], [one, two], "--concurrency", "2")
    with state["two"] as back:
        assert len(back.asked) <= 2  # at most one request an old connection; the answer is thrown away
    assert len(done.rows) == 60
    assert "words of another model" not in call.output.read_text()
    assert f"{two.url} serves other and not toy" in done.err


def test_a_change_of_model_behind_idle_connections_is_seen(call):
    """Nothing fails here: the old connection is closed between two requests, the next one opens another."""
    other = {"role": "assistant", "content": "words of another model"}

    def replace(body, number):
        if number == 3:
            server.models, server.answer, server.close_next = ["other"], lambda body: other, False
        if number == 2:
            server.close_next = True
        return None

    with FakeServer(fault=replace) as server, pytest.raises(ServerError, match=r"no server has served toy for 0\.3 s"):
        call([conversation(n) for n in range(20)], [server], "--concurrency", "1", "--outage", "0.3")
    assert len(call.output.read_text().splitlines()) == 3
    assert "another model" not in call.output.read_text()
    assert len(server.asked) == 4


def test_without_any_server_the_run_stops_and_goes_on_later(call):
    def kill(body, number):
        if number == 7:
            threading.Thread(target=server.close).start()
        return None

    rows = [conversation(n) for n in range(40)]
    server = FakeServer(delay=0.01, fault=kill)
    with pytest.raises(ServerError, match=r"no server has served toy for 0.5 s"):
        call(rows, [server], "--outage", "0.5", "--concurrency", "2")
    written = len(call.output.read_text().splitlines())
    assert 3 <= written < 40
    with FakeServer() as other:
        done = call(None, [other], "--resume")
    assert (len(done.rows), len(other.asked), done.left_out) == (40, 40 - written, [])


def test_servers_of_different_models_are_refused_before_anything_is_asked(call):
    rows = [conversation(0)]
    with FakeServer() as one, FakeServer(model="other") as two, FakeServer(model=["a", "b"]) as many:
        with pytest.raises(ServerError, match="serves other and not toy"):
            call(rows, [one, two])
        with pytest.raises(ServerError, match=r"serves 2 models \(a, b\); name one with --model"):
            call(rows, [many])
        with pytest.raises(ServerError, match="does not serve 'c'; it serves a, b"):
            call(rows, [many], "--model", "c")
        assert call(rows, [many], "--model", "b").rows["row-0"]["regenerated"]["model"] == "b"
        with FakeServer(context=512) as short, pytest.raises(ServerError, match="context of 512 and not 2048"):
            call(rows, [one, short], "--resume")
        two.close()
        with pytest.raises(ServerError, match=r"does not say what it serves after 0.3 s"):
            call(rows, [one, two], "--start-timeout", "0.3")
        assert one.asked == two.asked == []


def test_other_options_or_another_model_are_refused_by_name(call):
    with FakeServer() as server, FakeServer(model="other") as other:
        call([conversation(0)], [server])
        with pytest.raises(OutputError, match="go on with --resume"):
            call(None, [server])
        with pytest.raises(OutputError, match=r"sampling.top_p was None, now 0.9"):
            call(None, [server], "--resume", "--top-p", "0.9")
        with pytest.raises(OutputError, match=r"model was 'toy', now 'other'"):
            call(None, [other], "--resume")
        with pytest.raises(OutputError, match=r"loops was 'drop', now 'mark'; seed was 0, now 1"):
            call(None, [server], "--resume", "--seed", "1", "--loops", "mark")
        assert call(None, [server], "--resume", "--concurrency", "3").code == 0
    assert len(server.asked) == 1


def test_an_input_that_changed_is_refused_and_one_that_grew_is_not(call):
    with FakeServer() as server:
        call([conversation(n) for n in range(3)], [server])
        grown = [conversation(n) for n in (3, 2, 1, 0)]
        assert len(call(grown, [server], "--resume").rows) == 4
        assert len(server.asked) == 4
        grown[1]["messages"][0]["content"] = "another question"
        with pytest.raises(OutputError, match="row 'row-2' of the input is not the one"):
            call(grown, [server], "--resume")


def test_rows_that_are_no_conversation_and_ids_that_repeat_are_counted(call):
    rows = [conversation(0), {"text": "plain"}, conversation(0), {"id": "bad", "messages": [{"role": "judge"}]}]
    with FakeServer() as server:
        done = call(rows, [server])
        again = call(None, [server], "--resume")
    assert [(e["id"], e["kind"], e["reason"]) for e in done.left_out] == [
        ("rows.jsonl:2", "refused", "row has no turns to answer"),
        ("rows.jsonl:4", "refused", "unknown role"),
    ]
    assert again.left_out == done.left_out
    assert (done.summary["this_run"]["ids_twice"], again.summary["this_run"]["ids_twice"]) == (1, 1)
    assert "row-0 at rows.jsonl:3" in done.out
    assert len(server.asked) == 1


def test_an_input_without_rows_or_without_answers_says_so(call):
    with FakeServer() as server, pytest.raises(ValueError, match=r"--input .*rows\.jsonl holds no rows"):
        call([], [server])
    with FakeServer() as server:
        done = call([{"text": "plain"}], [server], "--resume")
    assert (done.code, len(done.rows)) == (1, 0)
    assert "no row is answered" in done.err


def test_ids_by_place_keep_rows_whose_ids_repeat(call):
    with FakeServer() as server:
        done = call([conversation(0), conversation(0)], [server], "--ids", "place")
    assert sorted(done.rows) == ["rows.jsonl:1", "rows.jsonl:2"]


def test_prompts_without_answers_are_answered(call):
    with FakeServer() as server:
        done = call([{"id": "p", "messages": [{"role": "user", "content": "alone"}]}], [server])
    assert [m["role"] for m in done.rows["p"]["messages"]] == ["user", "assistant"]
    assert len(server.asked) == 1


def test_answers_cut_at_max_tokens_and_loops(call):
    def answer(body):
        turning = "and so it goes on and on, " * 60
        return {"role": "assistant", "content": turning if "0.0" in body["messages"][0]["content"] else "fine"}

    def finish(body, message):
        return "length" if body["messages"][0]["content"] == "question 1.0" else "stop"

    rows = [conversation(n) for n in range(3)]
    with FakeServer(answer=answer, finish=finish) as server:
        done = call(rows, [server])
    assert sorted(done.rows) == ["row-1", "row-2"]
    assert done.rows["row-1"]["regenerated"]["turns"][0]["flags"] == ["truncated"]
    assert "flags" not in done.rows["row-2"]["regenerated"]["turns"][0]
    assert [(e["id"], e["kind"], e["reason"]) for e in done.left_out] == [
        ("row-0", "dropped", "answers that repeat themselves (dropped)")
    ]
    assert done.summary["flags"] == {"truncated": 1}


def test_the_key_is_sent_and_written_nowhere(call, monkeypatch, tmp_path):
    monkeypatch.setenv("TOY_KEY", "sesame-4711")
    with FakeServer() as server:
        done = call([conversation(0)], [server], "--api-key-env", "TOY_KEY")
        assert server.headers[0]["Authorization"] == "Bearer sesame-4711"
        monkeypatch.delenv("TOY_KEY")
        with pytest.raises(ValueError, match="no such environment variable"):
            call(None, [server], "--api-key-env", "TOY_KEY", "--resume")
    assert "sesame" not in done.out + done.err
    assert not [p for p in tmp_path.rglob("*") if p.is_file() and "sesame" in p.read_text()]
    with FakeServer(fault=lambda body, n: "401") as server, pytest.raises(ServerError, match="--api-key-env"):
        call([conversation(9)], [server], "--resume")


def test_output_inside_the_input_is_refused(call, tmp_path):
    with FakeServer() as server:
        call([conversation(0)], [server])
        from train.regenerate.command import main

        with pytest.raises(OutputError, match="is part of --input"):
            main(["--input", str(tmp_path), "--output", str(call.output), "--endpoint", server.url,
                  "--temperature", "1", "--resume"])  # fmt: skip
