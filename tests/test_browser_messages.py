"""In a real browser: pointing at a message on its way shows what it carries."""

import pytest
import torch

pytest.importorskip("playwright", reason="needs playwright: pip install 'dlab[test]'")

from browser import NoBrowser, open_browser

import dlab
from dlab.collectives import ring_allreduce


def notes_of(work, ranks, path):
    """What a rehearsal's page says, wherever one points; no message takes so long that its bar hides the others."""
    messages = dlab.rehearse(work, ranks).messages
    for number, event in enumerate(messages):
        event.data.update(start=float(number), end=number + 1.0)
    dlab.Messages(messages).save_html(path)
    try:
        with open_browser(None) as chromium, chromium.page(viewport={"width": 900, "height": 600}) as (page, _):
            page.goto(path.as_uri())
            page.locator("figure[data-view=messages][data-drawn]").wait_for()
            canvas, note = page.locator("canvas"), page.locator(".dlab-note")
            notes = canvas.evaluate(POINT)
            canvas.hover(position={"x": 2, "y": 2})
            assert not note.is_visible(), "there is no message in the corner"
    except NoBrowser as reason:
        pytest.skip(str(reason))
    assert all(len(each.splitlines()) == 3 for each in notes)
    return notes


@pytest.mark.timeout(120)
def test_pointing_at_a_message_shows_its_chunk_and_the_range_of_its_values(tmp_path):
    def work(transport):
        ring_allreduce(torch.arange(12.0).mul(10.0**transport.rank), transport)

    notes = notes_of(work, 3, tmp_path / "ring.html")
    # the last step of three ranks: all-gather 1, in which rank 0 passes on chunk 2
    assert (
        "rank 0 → rank 1, all-gather 1\nchunk 2 · 4 numbers, from 8 to 11 of 12 · 16 B\nvalues from 888 to 1.22K"
        in notes
    )
    assert any(note.startswith("rank 2 → rank 0, reduce-scatter 0\nchunk 1") for note in notes), "bars tell it too"


@pytest.mark.timeout(120)
def test_pointing_at_a_message_within_a_group_names_the_axis(tmp_path):
    def work(transport):
        ring_allreduce(torch.ones(4), dlab.Mesh((2, 2), ("dp", "tp"), transport)["dp"])

    notes = notes_of(work, 4, tmp_path / "mesh.html")
    assert any(note.startswith("rank 0 → rank 2, all-gather 0 within dp\n") for note in notes)
    assert any(note.startswith("rank 3 → rank 1, reduce-scatter 0 within dp\n") for note in notes), "bars tell it too"


@pytest.mark.timeout(120)
def test_a_run_of_collectives_alone_is_a_sentence_on_a_low_picture(tmp_path):
    told = {"name": "all-reduce", "algorithm": "shared memory", "count": 50, "bytes": 8 << 20, "seconds": 0.012}
    view = dlab.Messages([dlab.Event(2.0, 0, "collective", told | {"start": 1.0, "end": 2.0})])
    view.save_html(tmp_path / "none.html")
    try:
        with open_browser(None) as chromium, chromium.page(viewport={"width": 900, "height": 600}) as (page, _):
            page.goto((tmp_path / "none.html").as_uri())
            page.locator("figure[data-view=messages][data-drawn]").wait_for()
            caption = page.locator("figcaption").text_content()
            height = page.locator("canvas").bounding_box()["height"]
    except NoBrowser as reason:
        pytest.skip(str(reason))
    assert "all-reduce (shared memory): 50 times, 8 MiB, 12 ms on each rank" in caption
    assert height < 100


# Moves a cursor over the whole picture, as the browser would tell it of a real one: what is shown at each place?
POINT = """(canvas) => {
  const note = canvas.parentElement.querySelector(".dlab-note");
  const { left, top, width, height } = canvas.getBoundingClientRect();
  const shown = new Set();
  for (let y = 0; y < height; y += 4)
    for (let x = 0; x < width; x += 4) {
      canvas.dispatchEvent(new MouseEvent("mousemove", { clientX: left + x, clientY: top + y }));
      if (!note.hidden) shown.add(note.textContent);
    }
  return [...shown];
}"""
