"""How much of a cell's output leaves the rank."""

from __future__ import annotations

from ddip.rank.streams.limiter import TICK_CHARACTERS, Chunk, OutputLimiter


def test_output_below_the_limit_is_sent_at_once() -> None:
    budget = OutputLimiter(100)
    assert [budget.take(f"{number:09}\n") for number in range(10)] == [Chunk(f"{n:09}\n") for n in range(10)]
    assert budget.rest() is None


def test_a_flood_is_sampled_and_its_end_sent_last() -> None:
    budget = OutputLimiter(1000)
    lines = [f"{number:09}\n" for number in range(100_000)]
    texts = ["".join(lines[begin : begin + 10]) for begin in range(0, len(lines), 10)]
    budget._last_tick += 3600  # no piece of the end is due, even if this takes long
    pieces = [budget.take(text) for text in texts[:11]]
    budget._last_tick -= 3600
    pieces += [budget.take(text) for text in texts[11:]]
    assert pieces[9] == Chunk("".join(lines[90:100])) and pieces[10] is None
    sent = [piece for piece in pieces if piece is not None]
    assert sum(len(piece.text) for piece in sent) < 1000 + TICK_CHARACTERS * len(sent)
    assert len(sent) < len(pieces) / 2
    rest = budget.rest()
    assert rest is not None and rest.line is not None
    assert rest.text == "".join(lines[rest.line :])
    assert 400 < len(rest.text) <= 500


def test_slow_text_above_the_limit_is_not_cut() -> None:
    budget = OutputLimiter(100)
    budget.take("x" * 100)
    budget._last_tick -= 1
    assert budget.take("a line\n") == Chunk("a line\n")
    budget._last_tick -= 1
    assert budget.take("another\n") == Chunk("another\n")


def test_a_bar_above_the_limit_shows_its_last_state() -> None:
    budget = OutputLimiter(1000)
    for step in range(1000):
        budget.take(f"\r{step / 10:5.1f}%|{'#' * (step // 50):20}|")
    budget.take("\r100.0%\n")
    rest = budget.rest()
    assert rest is not None and rest.text.endswith("\r100.0%\n")
    assert (rest.line, rest.cut, rest.breaks) == (0, 0, False)


def test_slowly_shown_output_is_not_repeated_at_the_end() -> None:
    budget = OutputLimiter(100)
    budget.take("x" * 99 + "\n")
    budget._last_tick -= 1
    budget.take("a line\n")
    assert budget.rest() is None
    budget.take("another\n")
    assert budget.rest() == Chunk("another\n")
