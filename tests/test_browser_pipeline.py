"""Lesson 08 in a real browser: the chart follows list and sliders, and the panel draws what a pipeline has done."""

import pytest

expect = pytest.importorskip("playwright.sync_api", reason="needs playwright: pip install 'dlab[test]'").expect

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]


def test_the_chart_follows_the_controls_and_the_panel_draws_the_measured_steps(chromium):
    with chromium.notebook("08_pipeline.ipynb") as notebook:
        cell = notebook.run_until("planner = explore(")
        assert notebook.failures() == []
        output = notebook.output(cell)

        def shows(what, time, bubble, peaks):
            size = f"makespan {time} (F=1, B=2), bubble {bubble}, peak activations {peaks}"
            expect(output.locator(f"img[alt^='Chart of the schedule {what}'][alt$='{size}']")).to_have_count(1)
            expect(output).to_contain_text(size)

        shows("1f1b: 4 ranks, 4 stages, 8 micro-batches", 33, 0.375, "4, 3, 2, 1")
        notebook.choose(output, "gpipe")
        shows("gpipe: 4 ranks", 33, 0.375, "8, 8, 8, 8")
        notebook.drag(output, "virtual", 0.5)
        expect(output).to_contain_text("virtual=2: gpipe has one stage per rank")
        expect(output.locator("img[alt^='Chart']")).to_have_count(0)
        notebook.choose(output, "interleaved")
        shows("interleaved: 4 ranks, 8 stages", 28.5, 0.1875, "11, 9, 7, 5")
        notebook.drag(output, "micro batches", 1.0)
        shows("interleaved: 4 ranks, 8 stages, 32 micro-batches", 100.5, 0.04688, "11, 9, 7, 5")

        while "run = dlab.train(deep" not in "".join(notebook.cells()[cell]["source"]):
            cell += 1
            if notebook.cells()[cell]["cell_type"] == "code":
                notebook.run_cell(cell)
        panel = notebook.output(cell)
        expect(panel).to_contain_text("Training: finished", timeout=120_000)
        chart = panel.frame_locator("iframe").locator("figure[data-view=pipeline][data-drawn]")
        expect(chart.locator("figcaption")).to_contain_text("1f1b on 2 ranks, 4 micro-batches, step 30:")
        expect(chart.locator("figcaption")).to_contain_text("measured, 0.25 by the formula (p-1)/m")
        assert notebook.failures() == []
