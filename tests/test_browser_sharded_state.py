"""The explorer of lesson 09 in a real browser: bars and bytes follow the sliders."""

import pytest

expect = pytest.importorskip("playwright.sync_api", reason="needs playwright: pip install 'dlab[test]'").expect

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]


def test_bars_and_bytes_follow_the_sliders(chromium):
    with chromium.notebook("09_sharded_optimizers.ipynb") as notebook:
        cell = notebook.run_until("memory = explore(")
        assert notebook.failures() == []
        output = notebook.output(cell)
        bars = output.get_by_role("img")
        expect(output).to_contain_text("stage 1: 31.4 GB per rank: parameters 15, gradients 15, optimizer 1.41")
        expect(output).to_contain_text("fits into 80 GB, and sends 29.5 GB per rank and step")
        widths = bars.locator("span span").evaluate_all("all => all.map((each) => each.getBoundingClientRect().width)")
        assert len(widths) == 12
        whole = sum(widths[:3])
        assert [sum(widths[3 * n : 3 * n + 3]) / whole for n in range(4)] == pytest.approx(
            [1, 31.40625 / 120, 16.640625 / 120, 1.875 / 120], abs=0.01
        )

        notebook.drag(output, "stage", 1.0)
        expect(output).to_contain_text("stage 3: 1.88 GB per rank")
        expect(output).to_contain_text("sends 44.3 GB per rank and step")
        notebook.drag(output, "ranks", 0.0)
        expect(output).to_contain_text("billions: 7.5, ranks: 1, stage: 3, optimizer bytes: 12")
        expect(output).to_contain_text("does not fit into 80 GB, and sends 0 GB per rank and step")
        notebook.drag(output, "optimizer bytes", 1.0)
        expect(output).to_contain_text("stage 3: 30 GB per rank: parameters 15, gradients 15, optimizer 0")
