"""What bounds a step, with made-up numbers."""

import pytest

from offload.metrics.bound import WORDS, Flow, Machine, Rates, Spent, bound_of

CPU = Machine(processors=2, shared=True)
CUDA = Machine(processors=16, shared=False)
GB = 10**9


def spent(**parts) -> Spent:
    return Spent(**{"total_s": 10.0, **parts})


def test_every_resource_can_bind():
    rates = Rates(read=GB, write=GB, mixed=1.5 * GB)
    cases = {
        "disk_read": (spent(stall_s=9, read=Flow(8 * GB, 9.0), write=Flow(1 * GB, 2.0)), CPU),
        "disk_write": (spent(stall_s=9, read=Flow(1 * GB, 2.0), write=Flow(8 * GB, 9.0)), CPU),
        "disk_mixed": (spent(stall_s=9, read=Flow(6 * GB, 9.0), write=Flow(6 * GB, 9.0)), CPU),
        "compute": (spent(stall_s=1, read=Flow(1 * GB, 1.0)), CPU),
        "update": (spent(stall_s=7, update_s=6.0), CPU),
        "processors": (spent(stall_s=8, cpu_s=19.0), CPU),
        "copies": (spent(stall_s=2, fill_s=7.0, cpu_s=100.0), CUDA),
    }
    assert cases.keys() == WORDS.keys()
    for name, (given, machine) in cases.items():
        bound = bound_of(given, machine, rates)
        assert bound.by == name
        assert bound.seconds == max(bound.terms.values())
        assert WORDS[name] in bound.sentence()


def test_the_ratio_is_the_step_over_the_bound():
    bound = bound_of(
        spent(total_s=11.0, stall_s=6, write=Flow(5 * GB, 9.0)), CPU, Rates(write=GB / 2)
    )
    assert bound.seconds == 10.0
    assert bound.ratio == pytest.approx(1.1)
    assert bound.sentence() == "bound by disk writes: the step took 1.10x the bound"


def test_compute_is_the_whole_step_less_stalls_and_beside_a_gpu_less_copies():
    given = spent(stall_s=3.0, fill_s=2.0)
    assert bound_of(given, CPU, Rates()).terms["compute"] == 7.0
    assert bound_of(given, CUDA, Rates()).terms["compute"] == 5.0
    assert "copies" not in bound_of(given, CPU, Rates()).terms
    assert "processors" not in bound_of(given, CUDA, Rates()).terms


def test_time_in_the_script_is_told_where_it_matters():
    assert "in the script" not in bound_of(spent(script_s=0.5), CPU, Rates()).sentence()
    told = bound_of(spent(script_s=4.0), CPU, Rates()).sentence()
    assert "compute (40% of it in the script, outside the engine)" in told


def test_without_a_rate_the_busy_time_of_the_drives_stands_for_it():
    given = spent(stall_s=9, read=Flow(GB, 4.0), write=Flow(GB, 3.0))
    terms = bound_of(given, CPU, Rates()).terms
    assert (terms["disk_read"], terms["disk_write"], terms["disk_mixed"]) == (4.0, 3.0, 4.0)


def test_rates_that_were_seen_are_the_best_and_need_enough_bytes():
    slow, fast = Rates.seen(Flow(GB, 2.0), Flow()), Rates.seen(Flow(GB, 1.0), Flow(2 * GB, 2.0))
    assert slow == Rates(read=GB / 2, write=0.0, mixed=GB / 2)
    assert slow.best(fast) == fast == Rates(read=GB, write=GB, mixed=1.5 * GB)
    assert Rates.seen(Flow(4096, 1e-9), Flow(4096, 1e-9)) == Rates()


def test_a_step_in_which_nothing_took_time_has_a_ratio():
    assert bound_of(Spent(0.0), CPU, Rates()).ratio == 1.0
