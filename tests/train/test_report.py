"""The report: complete, self-contained, escaped; the terminal table lines up."""

import re

import pytest

from train.report import render_report, terminal_table, write_report

RESULT = {
    "accept_length": 1.5, "accept_length_sample_mean": 1.4, "rounds": 10, "proposal_length": 7.0,
    "tokens": 15, "prompts": 2, "tokens_per_second_draft": 3.0, "tokens_per_second_plain": 2.0,
    "speedup": 1.5, "draft_share": 0.25, "identical_to_plain": 2, "survival": [0.4, 0.1, None],
    "conditional": [0.4, 0.25, None], "error": None,
}  # fmt: skip


@pytest.fixture(scope="module")
def page():
    return render_report({
        "title": "Trained <against> untrained",
        "notes": ["Prompts were not trained on."],
        "headline": [("seconds", 12.5)],
        "training": [
            {"step": 1, "loss": 2.0, "tau_probabilistic": 1.0},
            {"step": 2, "loss": 1.0, "tau_probabilistic": 1.2},
            {"step": 3, "loss": float("nan"), "tau_probabilistic": 1.3},
            {"event": "saved"},
        ],
        "evaluations": [
            {"name": "untrained", "result": RESULT | {"accept_length": None, "error": "no draft proposed"}},
            {"name": "trained", "result": RESULT},
        ],
        "samples": [{"prompt": "1 < 2 & 3?", "pieces": [
            {"text": "<b>", "kind": "first"}, {"text": "yes", "kind": "draft"},
            {"text": ".", "kind": "target"},
        ]}],
        "config": {"draft": {"layers": 3}},
    })  # fmt: skip


def test_report_needs_nothing_from_outside(page):
    references = re.findall(r"""(?:src|href)\s*=\s*["']([^"']+)["']|url\(([^)]+)\)|@import""", page)
    assert all((a or b).lstrip("\"'").startswith("#") for a, b in references), references
    assert not re.search(r"<(script|img|link|iframe)", page)


def test_report_shows_every_section(page):
    for text in ("Loss", "tau", "Survival", "Conditional", "Sample outputs", "Configuration", "12.500"):
        assert text in page
    assert page.count("<svg") == 4  # loss, tau, survival, conditional


def test_report_escapes_what_others_wrote(page):
    assert "Trained &lt;against&gt; untrained" in page
    assert "1 &lt; 2 &amp; 3?" in page
    assert "&lt;b&gt;" in page


def test_an_evaluation_in_error_is_loud_and_has_no_number(page):
    assert 'class="error"' in page
    assert "untrained: no draft proposed" in page
    accept_row = re.search(r"accept length \(bonus included, per round\)</td>(.*?)</tr>", page).group(1)
    assert re.findall(r">([^<>]+)</td>", accept_row) == ["-", "1.500"]


def test_equal_data_gives_equal_bytes(page, tmp_path):
    data = {"title": "t", "training": [{"step": 1, "loss": 2.0}, {"step": 2, "loss": 1.5}]}
    first = write_report(tmp_path / "deep" / "a.html", data).read_bytes()
    assert first == write_report(tmp_path / "b.html", data).read_bytes()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["b.html", "deep"]


def test_empty_report_and_unknown_section():
    assert "<h1>only a title</h1>" in render_report({"title": "only a title"})
    with pytest.raises(ValueError, match=r"unknown report section.*trainig"):
        render_report({"trainig": []})


def test_terminal_table_aligns():
    text = terminal_table([("", "untrained", "trained"), ("accept length", 1.0, 1.53), ("equal", None, 12)])
    assert text.splitlines() == [
        "               untrained  trained",
        "-------------  ---------  -------",
        "accept length      1.000    1.530",
        "equal                  -       12",
    ]
    with pytest.raises(ValueError, match="row 1 of the table has 1 cells"):
        terminal_table([("a", "b"), ("c",)])
    assert terminal_table([]) == ""
