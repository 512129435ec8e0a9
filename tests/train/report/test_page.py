"""The page: complete, self-contained, escaped, equal for equal data; the terminal table lines up."""

import re

import pytest

from tests.train.evaluate.made_results import made_result
from train.report import render_report, terminal_table, write_report


@pytest.fixture(scope="module")
def data():
    failed = {**made_result(prompts=4), "error": "no draft proposed", "accept_length": None}
    return {
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
            {"name": "broken", "result": failed},
            {"name": "first <draft>", "result": made_result(seed=1)},
            {"name": "second", "result": made_result((0.9, 0.9, 0.9), seed=2)},
        ],
        "config": {"draft": {"layers": 3}},
    }


@pytest.fixture(scope="module")
def page(data):
    return render_report(data)


def test_report_needs_nothing_from_outside(page):
    references = re.findall(r"""(?:src|href)\s*=\s*["']([^"']+)["']|url\(([^)]+)\)|@import""", page)
    assert references, "the drawings refer to their own parts"
    assert all((a or b).lstrip("\"'").startswith("#") for a, b in references), references
    assert not re.search(r"<(script|img|link|iframe)", page)


def test_report_shows_every_section(page):
    titles = re.findall(r"<h2>(.*?)</h2>", page)
    assert titles == [
        "Acceptance", "Training", "Confidence", "Where drafts fail", "Speed", "Sample outputs", "Configuration",
    ]  # fmt: skip


def test_every_chart_has_units_and_a_conclusion(page):
    charts = re.findall(r'<div class="chart">(.*?)</div>', page, flags=re.DOTALL)
    assert len(charts) == page.count("<svg") == 11
    for chart in charts:
        title = re.search(r"<figcaption>(.*?)</figcaption>", chart).group(1)
        sentence = re.search(r'<p class="conclusion">(.*?)</p>', chart).group(1)
        assert re.search(r"\d", sentence), f"{title}: a conclusion without a number: {sentence}"
        words = " ".join(re.findall(r"<text[^>]*>(.*?)</text>", chart))
        assert re.search(r"tokens per round|share|nats|chance|\[%\]", words), f"{title}: no unit in {words}"


def test_drawings_take_the_pages_colours(page):
    assert "prefers-color-scheme: dark" in page
    drawn = " ".join(re.findall(r"<svg.*?</svg>", page, flags=re.DOTALL))
    assert "var(--ink)" in drawn
    assert "var(--series-1)" in drawn
    assert not set(re.findall(r"(?:fill|stroke): (#\w+)", drawn)) & {"#000000", "#ffffff", "#010203", "#a0a0a0"}


def test_report_escapes_what_others_wrote(page):
    assert "Trained &lt;against&gt; untrained" in page
    assert "first &lt;draft&gt;" in page
    assert "<draft>" not in page
    assert "Question 0 &lt;why&gt;?" in page
    assert "<why>" not in page


def test_an_evaluation_in_error_is_loud_and_has_no_number(page):
    assert '<p class="error"><b>broken: no draft proposed</b></p>' in page
    assert page.count("broken") == 1, "no table, no chart and no comparison may hold it"


def test_an_evaluation_not_finished_says_so_before_any_figure():
    page = render_report({"evaluations": [{"name": "half", "result": made_result(prompts=12) | {"missing": 7}}]})
    assert page.index("half: 7 prompts are not decoded yet.") < page.index("<h2>Acceptance</h2>")
    assert "processes side by side" not in page


def test_speeds_of_several_processes_are_named_as_those_of_one():
    page = render_report({"evaluations": [{"name": "spread", "result": made_result(prompts=12, processes=4)}]})
    assert "spread: 4 processes side by side; times are summed over them, so that speeds are those of one." in page


def test_equal_data_gives_equal_bytes(data, tmp_path):
    some = {"title": "t", "training": data["training"]}
    first = write_report(tmp_path / "deep" / "a.html", some).read_bytes()
    assert first == render_report(some).encode()
    assert [p.name for p in (tmp_path / "deep").iterdir()] == ["a.html"]


def test_empty_report_and_unknown_section():
    assert "<h1>only a title</h1>" in render_report({"title": "only a title"})
    with pytest.raises(ValueError, match=r"unknown report section.*trainig"):
        render_report({"trainig": []})


def test_results_without_samples_come_without_intervals():
    whole = made_result()
    bare = {key: value for key, value in whole.items() if key != "samples"}
    page = render_report({"evaluations": [{"name": "bare", "result": bare}]})
    assert "No intervals where the result was written without its samples." in page
    assert f"{whole['accept_length']:.3f}" in page
    assert "95 % interval" not in page
    assert "Where drafts fail" not in page


def test_samples_with_pieces_of_a_tokenizer():
    pieces = [{"text": "<b>", "kind": "first"}, {"text": "yes", "kind": "draft"}, {"text": ".", "kind": "odd"}]
    page = render_report({"samples": [{"prompt": "1 < 2 & 3?", "pieces": pieces}]})
    assert "1 &lt; 2 &amp; 3?" in page
    assert '<span class="first">&lt;b&gt;</span><span class="draft">yes</span><span class="">.</span>' in page


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
