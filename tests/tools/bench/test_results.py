"""Rows, goals and the files they end in.

Run: pytest tests/tools/bench/test_results.py
"""

import json
import math

import pytest
from tools.bench import docs, results
from tools.bench.results import Goal, Row

MACHINE = dict(device="a machine", torch="2", dtype="float32", hidden=8, chunk=4)
MACHINE |= dict(threads=2, repeats=5, clock="wall")


def row(upstream, ours, goal=None, **fields):
    return Row("objective time", "s=4", "ms", upstream, ours, goal, **fields)


class TestGoals:
    """When a goal counts as met."""

    @pytest.mark.parametrize("ours, met", [(1.9, True), (2.0, True), (2.1, False)])
    def test_a_ratio_meets_its_limit_up_to_equality(self, ours, met):
        assert row(4.0, ours, Goal(0.5)).met is met

    @pytest.mark.parametrize("ours, met", [(0, True), (1, False)])
    def test_a_count_is_judged_by_itself_even_where_upstream_has_none(self, ours, met):
        assert row(None, ours, Goal(0, "ours")).met is met

    def test_nothing_is_judged_without_a_goal_or_without_the_figure(self):
        assert row(4.0, 9.0).met is None
        assert row(None, 9.0, Goal(0.5)).met is None  # upstream ran out of memory

    def test_ratios_exist_only_where_they_say_something(self):
        assert row(4.0, 1.0).ratio == 0.25
        assert row(0, 1.0).ratio is None
        assert row(4.0, 1.0, comparable=False).ratio is None

    def test_the_verdict_names_every_missed_goal(self):
        text = results.verdict([row(4.0, 1.0, Goal(0.5)), row(4.0, 3.0, Goal(0.5)), row(4.0, 3.0)])
        assert text.splitlines() == ["goals met: 1 of 2", "  not met: objective time: s=4"]


class TestSummary:
    """summary.json."""

    def test_rows_carry_what_was_promised(self, tmp_path):
        path = results.save(tmp_path / "new", [row(4.0, 1.0, Goal(0.5), key={"s": 4})], MACHINE)
        saved = json.loads(path.read_text())
        assert saved["machine"] == MACHINE
        (found,) = saved["rows"]
        want = dict(name="s=4", upstream=4.0, ours=1.0, ratio=0.25, goal="ratio ≤ 0.5", met=True)
        assert {name: found[name] for name in want} == want
        assert [file.name for file in path.parent.iterdir()] == ["summary.json"]

    @pytest.mark.parametrize("value", [math.nan, math.inf])
    def test_figures_that_are_no_numbers_are_refused(self, tmp_path, value):
        with pytest.raises(ValueError, match="s=4"):
            results.save(tmp_path, [row(1.0, value)], MACHINE)


@pytest.mark.parametrize(
    "value, text",
    [(None, "–"), (2060, "2060"), (0, "0"), (0.3333, "0.333"), (1e-16, "1.00e-16")]
    + [(3490.5, "3490"), (1e9, "1.00e+09")],
)
def test_numbers_are_written_with_three_digits_and_counts_in_full(value, text):
    assert results.number(value) == text


class TestDocs:
    """The figures inside docs/performance.md."""

    PAGE = "before\n<!-- figures cpu: begin -->\nold\n<!-- figures cpu: end -->\nafter\n"

    def write(self, folder, quick=False):
        page = folder / "page.md"
        page.write_text(self.PAGE)
        summary = results.save(folder, [row(4.0, 1.0, Goal(0.5))], MACHINE | dict(quick=quick))
        return page, summary

    def test_figures_replace_the_old_ones_and_nothing_else(self, tmp_path):
        page, summary = self.write(tmp_path)
        docs.update(summary, "cpu", page)
        once = page.read_text()
        docs.update(summary, "cpu", page)
        assert page.read_text() == once
        assert once.startswith("before\n<!-- figures cpu: begin -->\n") and "old" not in once
        assert once.endswith("<!-- figures cpu: end -->\nafter\n")
        assert "| s=4 [ms] | 4 | 1 | 0.25 | ratio ≤ 0.5 | yes |" in once
        assert "Goals met: 1 of 1" in once

    def test_figures_of_quick_sizes_stay_out(self, tmp_path):
        page, summary = self.write(tmp_path, quick=True)
        with pytest.raises(ValueError, match="measure in full first"):
            docs.update(summary, "cpu", page)
        assert page.read_text() == self.PAGE

    def test_figures_of_some_sections_stay_out(self, tmp_path):
        page, _ = self.write(tmp_path)
        machine = MACHINE | dict(quick=False, sections=["width"])
        summary = results.save(tmp_path, [row(4.0, 1.0)], machine)
        with pytest.raises(ValueError, match=r"lacks figures \(step\); measure without --only"):
            docs.update(summary, "cpu", page, sections=("width", "step"))
        assert page.read_text() == self.PAGE

    def test_a_page_without_the_markers_is_refused(self, tmp_path):
        page, summary = self.write(tmp_path)
        with pytest.raises(ValueError, match="figures cuda: begin"):
            docs.update(summary, "cuda", page)

    def test_the_page_has_the_markers_of_both_devices(self):
        text = docs.TARGET.read_text()
        for device in ("cpu", "cuda"):
            for word in ("begin", "end"):
                assert text.count(f"<!-- figures {device}: {word} -->\n") == 1
