"""Traces: what is expected next, after repeats and after what was not expected."""

from __future__ import annotations

from offload.schedule.trace import Trace


def trace_of(*units: int) -> Trace:
    """A trace whose last whole pass used `units`; a pass has begun."""
    trace = Trace([0])
    for unit in units:
        trace.use(unit, again=True)
    trace.begin()
    return trace


def use_all(trace: Trace, *units: int) -> None:
    for unit in units:
        trace.use(unit, again=True)


def test_the_next_uses_are_those_of_the_last_pass():
    trace = trace_of(3, 1, 2, 1, 0)
    assert trace.upcoming(3) == [3, 1, 2]
    use_all(trace, 3, 1)
    assert trace.upcoming(9) == [2, 1, 0]


def test_one_use_may_be_seen_several_times():
    trace = trace_of(3, 1)
    assert trace.use(3)
    assert not trace.use(3)
    assert trace.upcoming(9) == [1]


def test_a_unit_that_is_next_again_does_not_leave():
    trace = trace_of(3, 3, 1)
    trace.use(3, again=True)
    assert not trace.leave(3)
    trace.use(3, again=True)
    assert trace.leave(3)
    assert trace.order == [3]


def test_a_use_that_nobody_sees_stays_known():
    """A unit that stayed is present, so that reading its weights is not seen."""
    for _ in range(3):
        trace = trace_of(3, 3, 1)
        trace.use(3, again=True)
        assert not trace.leave(3)
        assert trace.passed(1) == 3
        trace.use(1, again=True)
        trace.begin()
        assert trace.upcoming(9) == [3, 1]
        trace.use(3, again=True)
        assert not trace.leave(3)


def test_an_unexpected_use_goes_on_where_that_unit_comes_next():
    trace = trace_of(0, 1, 2, 3, 1, 4)
    use_all(trace, 0, 3)
    assert trace.upcoming(9) == [1, 4]


def test_one_repeat_more_than_known_changes_nothing_that_comes():
    trace = trace_of(0, 4, 1, 2, 4, 3)
    use_all(trace, 0, 4, 4, 4)
    assert trace.upcoming(9) == [1, 2, 4, 3]
