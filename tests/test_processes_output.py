"""What workers print appears where they were called from, line by line, with the rank in front."""

import os
import re
import sys
import time

import pytest
import tqdm
from kernels import eventually

import dlab
from dlab.processes.parent.output import LineReader

WORKERS = 4  # of the cluster
LINE = re.compile(r"\[rank \d\] [^\r\n]*")


def channels_of(text: str) -> list[str]:
    """The lines, each of which must be whole: a rank, then its text."""
    lines = text.splitlines()
    assert all(LINE.fullmatch(line) for line in lines), [line for line in lines if not LINE.fullmatch(line)][:5]
    return lines


def test_prints_appear_with_the_rank_in_front(cluster, capsys):
    cluster.run(lambda: print("hello from", dlab.rank()))
    assert sorted(channels_of(capsys.readouterr().out)) == [f"[rank {rank}] hello from {rank}" for rank in range(4)]


def test_standard_error_stays_standard_error(cluster, capsys):
    cluster.run(lambda: print("careful", file=sys.stderr))
    out, err = capsys.readouterr()
    assert out == ""
    assert sorted(channels_of(err)) == [f"[rank {rank}] careful" for rank in range(4)]


def test_lines_appear_while_the_function_still_runs(cluster, capsys):
    def speak():
        print("first")
        while not dlab.knob("go"):
            time.sleep(0.01)
        print("second")

    run = cluster.start(speak)
    seen = ""

    def all_have_spoken():
        nonlocal seen
        seen += capsys.readouterr().out
        return seen.count("first") == 4

    eventually(all_have_spoken)
    assert not run.done
    assert "second" not in seen
    run.set("go", True)
    run.wait(30)
    assert channels_of(capsys.readouterr().out).count("[rank 2] second") == 1


def test_everything_printed_is_shown_before_the_run_has_ended(cluster, capsys):
    for _ in range(20):
        cluster.run(lambda: print("last words"))
        assert len(channels_of(capsys.readouterr().out)) == 4


def test_lines_of_many_ranks_are_never_mixed_and_keep_their_order(cluster, capsys):
    def chatter():
        for number in range(500):
            print(number, "x" * 300)

    cluster.run(chatter)
    lines = channels_of(capsys.readouterr().out)
    for rank in range(4):
        own = [line for line in lines if line.startswith(f"[rank {rank}] ")]
        assert own == [f"[rank {rank}] {number} {'x' * 300}" for number in range(500)]


def test_pieces_of_a_line_become_one_line_and_an_unfinished_line_is_shown_at_the_end(cluster, capsys):
    def pieces():
        for word in ("one ", "two ", "three"):
            print(word, end="", flush=True)
            time.sleep(0.05)
        print("\nunfinished", end="")

    cluster.run(pieces)
    lines = channels_of(capsys.readouterr().out)
    assert sorted(lines) == sorted(
        f"[rank {rank}] {text}" for rank in range(4) for text in ("one two three", "unfinished")
    )


def test_writes_below_python_are_shown_too(cluster, capsys):
    def shout():
        import subprocess

        os.write(1, b"from the file handle\n")
        subprocess.run(["echo", "from a child"], check=True)

    cluster.run(shout)
    lines = channels_of(capsys.readouterr().out)
    assert lines.count("[rank 3] from the file handle") == 1
    assert lines.count("[rank 3] from a child") == 1


def test_any_text_and_broken_bytes_come_through(cluster, capsys):
    def babel():
        print("größer 你好 🙂")
        os.write(1, b"\xff\xfe broken\n")

    cluster.run(babel)
    lines = channels_of(capsys.readouterr().out)
    assert lines.count("[rank 1] größer 你好 🙂") == 1
    assert lines.count("[rank 1] \ufffd\ufffd broken") == 1


def test_a_line_of_megabytes_arrives_whole(cluster, capsys):
    cluster.run(lambda: print("x" * 3_000_000) if dlab.rank() == 1 else None)
    assert channels_of(capsys.readouterr().out) == ["[rank 1] " + "x" * 3_000_000]


def test_progress_bars_do_not_garble_other_lines(cluster, capsys):
    def train():
        for step in tqdm.tqdm(range(300), desc=f"rank {dlab.rank()}", mininterval=0):
            if step % 100 == 0:
                print("step", step)
        for _ in tqdm.tqdm(range(3), desc="outer", position=0):
            for _ in tqdm.tqdm(range(30), desc="inner", position=1, leave=False, mininterval=0):
                pass

    cluster.run(train)
    out, err = capsys.readouterr()
    assert len(channels_of(out)) == 12
    bars = channels_of(err)
    for rank in range(4):
        finished = [bar for bar in bars if f"[rank {rank}] rank {rank}: 100%" in bar]
        assert len(finished) == 1, "a bar comes out as its last state"
    assert len(bars) < 40
    assert "\x1b[A" not in err


def test_a_long_progress_bar_is_shown_now_and_then(cluster, capsys, monkeypatch):
    monkeypatch.setattr("dlab.processes.parent.output.BAR_SECONDS", 0.2)

    def train():
        bar = tqdm.tqdm(desc="long", mininterval=0)
        while not dlab.knob("enough"):
            bar.update()
            time.sleep(0.01)

    run = cluster.start(train)
    seen = ""

    def a_bar():
        nonlocal seen
        seen += capsys.readouterr().err
        return "[rank 0] long: " in seen

    eventually(a_bar)
    assert not run.done
    run.set("enough", True)
    run.wait(30)
    channels_of(seen + capsys.readouterr().err)


def test_a_bar_is_not_shown_just_because_it_is_the_first_after_a_while(monkeypatch):
    monkeypatch.setattr("dlab.processes.parent.output.BAR_SECONDS", 0.1)
    out, end = os.pipe()
    reader = LineReader(0, out)
    time.sleep(0.2)
    os.write(end, b"\r  0%|")
    assert reader.read() == ([], True)
    time.sleep(0.2)
    os.write(end, b"\r 50%|")
    assert reader.read() == ([" 50%|"], True)
    os.write(end, b"\r100%|\n")
    os.close(end)
    assert reader.read() == (["100%|"], False)
    os.close(out)


def test_a_function_may_replace_or_close_its_streams_and_the_next_run_prints(cluster, capsys):
    def vandal():
        sys.stdout.close() if dlab.rank() == 0 else None
        sys.stdout = sys.stderr = None

    cluster.run(vandal)
    cluster.run(lambda: print("still here"))
    assert len(channels_of(capsys.readouterr().out)) == 4


def test_input_inside_a_worker_fails_instead_of_waiting(cluster):
    with pytest.raises(dlab.WorkerError, match="EOF"):
        cluster.run(input, timeout=30)
