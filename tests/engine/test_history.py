"""Whether updates run ahead of step(): by the rate of redone steps and what each way has cost."""

from offload.engine.history import MOST_REDONE, RECENT_STEPS, RETRY_STEPS, History

ELEMS = 100


def after(history: History, kind: str, *, seconds: float, times: int = 1) -> None:
    for _ in range(times):
        history.took(0.0)
        staked = 0 if kind.startswith("held") else ELEMS
        history.add(staked, ELEMS if kind == "redone" else 0, clipped=kind == "held and clipped")
        history.took(seconds)


def test_a_rate_decides_until_the_costs_are_known() -> None:
    history = History()
    assert history.pays()
    few = int(MOST_REDONE * RECENT_STEPS)
    after(history, "redone", seconds=1.0, times=few)
    assert history.pays()
    after(history, "redone", seconds=1.0)
    assert not history.pays()
    after(history, "held", seconds=1.0, times=RECENT_STEPS)
    assert history.pays()


def test_the_cheaper_way_is_taken_once_all_are_timed() -> None:
    """Half of the steps are redone: it pays where redoing costs little, and not where it does."""
    for redone_s, pays in ((1.1, True), (2.0, False)):
        history = History()
        after(history, "held and clipped", seconds=1.2, times=3)
        for _ in range(RECENT_STEPS // 2):
            after(history, "kept", seconds=1.0)
            after(history, "redone", seconds=redone_s)
        assert history.pays() is pays


def test_a_rate_that_falls_while_holding_brings_updates_ahead_back() -> None:
    history = History()
    after(history, "kept", seconds=1.0, times=3)
    after(history, "redone", seconds=3.0, times=RECENT_STEPS)
    after(history, "held and clipped", seconds=1.5, times=3)
    assert not history.pays()
    after(history, "held", seconds=1.5, times=RECENT_STEPS)
    assert history.pays()


def test_the_other_way_is_tried_now_and_then() -> None:
    history = History()
    answers = []
    for step in range(3 * RETRY_STEPS):
        answers.append(history.pays())
        after(history, "redone" if step % 8 == 0 else "kept", seconds=1.0)
    assert 0 < answers.count(False) <= 3


def test_with_nothing_clipped_nothing_is_tried() -> None:
    history = History()
    for _ in range(3 * RETRY_STEPS):
        assert history.pays()
        after(history, "kept", seconds=1.0)
