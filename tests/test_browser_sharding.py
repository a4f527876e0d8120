"""The live strategy of lesson 07 in a real browser: pictures and bytes follow the sliders, and a button runs it."""

import re

import pytest

expect = pytest.importorskip("playwright.sync_api", reason="needs playwright: pip install 'dlab[test]'").expect

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]


def test_pictures_and_bytes_follow_the_sliders_and_a_button_runs_the_strategy(chromium):
    with chromium.notebook("07_operator_parallel.ipynb") as notebook:
        cell = notebook.run_until("matmul = explore(")
        assert notebook.failures() == []
        output = notebook.output(cell)
        expect(output).to_contain_text("ranks: 8, rows: 2, inner: 4, columns: 1")
        expect(output).to_contain_text("49,152 bytes per rank, among (0, 1, 2, 3)")
        blocks = "w[784, 512] is cut into 4 blocks of 196 × 512, each on 2 of 8 ranks."
        expect(output.locator(f"img[alt^='{blocks}']")).to_have_count(1)

        notebook.drag(output, "inner", 0.0)
        expect(output).to_contain_text("ranks: 8, rows: 2, inner: 1, columns: 1")
        expect(output.locator("img[alt^='w[784, 512] is not cut: it is on 8 of 8 ranks.']")).to_have_count(1)
        expect(output).to_contain_text("1,605,632 bytes per rank")
        expect(output).not_to_contain_text("49,152 bytes per rank")

        notebook.drag(output, "columns", 0.67)
        expect(output).to_contain_text("ranks: 8, rows: 2, inner: 1, columns: 4")
        expect(output).to_contain_text("w[0:784, 128:256]")  # in the slice table
        notebook.press(output, "run in processes")
        expect(output).to_contain_text(
            "8 processes: recorded 458,752 bytes per rank, predicted 458,752", timeout=60_000
        )

        notebook.drag(output, "columns", 1.0)
        expect(output).to_contain_text("makes 16 parts, which 8 ranks cannot share equally")
        expect(output).not_to_contain_text("recorded")
        notebook.press(output, "run in processes")  # refused before any process begins, and said once
        expect(output).not_to_contain_text("run in processes …")
        expect(output).not_to_contain_text("Traceback")

        notebook.drag(output, "ranks", 0.0)
        notebook.drag(output, "columns", 0.0)
        expect(output).to_contain_text("ranks: 4, rows: 2, inner: 1, columns: 1")
        expect(output).to_contain_text("(0,0,0,1)")  # two ranks hold copies
        notebook.press(output, "run in processes")
        expect(output).to_contain_text(re.compile("4 processes: recorded ([\\d,]+) bytes per rank, predicted \\1"))
