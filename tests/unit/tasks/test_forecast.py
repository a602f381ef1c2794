"""When a job gets a slot, played through."""

from __future__ import annotations

from cellama.tasks.estimates.forecast import HANDLING_S, Ahead, Running, Server, forecast

TWO_SLOTS = Server(2, [10.0])


def test_free_slot_is_had_at_once() -> None:
    found = forecast([TWO_SLOTS], [Running(0, 0.0, [])], [])
    assert found is not None
    assert (found.eta_s, found.least_s, found.most_s) == (0.0, 0.0, HANDLING_S)


def test_slots_take_those_ahead_in_turn() -> None:
    running = [Running(0, 2.0, [100.0]), Running(0, 2.0, [40.0])]  # 8 s and 2 s are left
    found = forecast([TWO_SLOTS], running, [Ahead([30.0])])  # in the second slot until 5 s
    assert found is not None
    assert 4.0 < found.eta_s < 6.0
    assert found.least_s < 5.0 < found.most_s


def test_pieces_of_one_job_take_several_slots_and_the_rest_goes_over_all() -> None:
    alone = forecast([TWO_SLOTS], [], [Ahead([200.0], pieces=2)])
    more = forecast([TWO_SLOTS], [], [Ahead([200.0], pieces=2)], rest=200.0)
    assert alone is not None
    assert more is not None
    assert 8.0 < alone.eta_s < 12.0
    assert 1.9 < more.eta_s / alone.eta_s < 2.1


def test_what_has_taken_longer_than_any_before_is_about_to_end() -> None:
    found = forecast([Server(1, [10.0])], [Running(0, 100.0, [10.0])], [])
    assert found is not None
    assert 0.0 <= found.eta_s <= 25.0


def test_nothing_is_told_where_nothing_is_known() -> None:
    busy = [Running(0, 1.0, [100.0])] * 2
    assert forecast([Server(2, [])], busy, []) is None
    assert forecast([TWO_SLOTS], busy, [Ahead([])]) is None


def test_guess_has_a_wider_range_and_the_same_state_tells_the_same() -> None:
    running = [Running(0, 0.0, [50.0, 100.0, 200.0])] * 2
    known, again = (forecast([TWO_SLOTS], running, [], seed=3) for _ in range(2))
    guess = forecast([TWO_SLOTS], running, [], is_learnt=False, seed=3)
    assert known is not None
    assert guess is not None
    assert known == again
    assert guess.least_s <= known.least_s <= known.most_s < guess.most_s
