"""Which device is meant, and what is decided for a GPU; nothing here touches one."""

import models
import pytest
import torch

from offload import OffloadEngine
from offload.engine import blueprint as decisions
from offload.engine.planning import PlanOnly


@pytest.fixture
def gpu(monkeypatch):
    """Torch says that there are four, the last of them the current one."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (10**9, 2 * 10**9))


def decided(tmp_path, monkeypatch, **settings):
    """The blueprint, and the plan made of it."""
    found = []
    monkeypatch.setattr(
        "offload.engine.facade.plan", lambda *args: found.append(decisions.plan(*args)) or found[0]
    )
    with pytest.raises(PlanOnly) as told:
        OffloadEngine(
            models.build(models.Decoder), nvme_path=tmp_path, plan_only=True,
            host_memory="16MiB", param_persistence_threshold=0, **settings,
        )  # fmt: skip
    return found[0], told.value.plan


def test_a_gpu_without_a_number_is_the_current_one_on_every_thread(gpu):
    assert decisions._indexed(torch.device("cuda")) == torch.device("cuda", 3)
    assert decisions._indexed(torch.device("cuda", 1)) == torch.device("cuda", 1)
    assert decisions._indexed(torch.device("cpu")) == torch.device("cpu")


def test_a_gpu_gets_landing_slots_and_most_of_its_memory(gpu, tmp_path, monkeypatch):
    blueprint, plan = decided(tmp_path, monkeypatch)
    assert blueprint.device == torch.device("cuda", 3)
    assert blueprint.compute_dtype is torch.bfloat16
    assert blueprint.device_memory == 8 * 10**8
    assert plan.placement.landing_slots > 2
    assert plan.placement.total_bytes <= 16 << 20
    assert plan.device_peak <= 8 * 10**8
    assert len(plan.placement.kept) == len(plan.units)


@pytest.mark.parametrize(("overlap", "beside"), [("hold", False), ("auto", True)])
def test_updates_leave_a_processor_to_whoever_feeds_the_gpu(
    overlap, beside, gpu, tmp_path, monkeypatch
):
    monkeypatch.setattr(decisions.Processors, "usable", 4)
    blueprint, _ = decided(tmp_path, monkeypatch, overlap=overlap)
    assert blueprint.threads.update == (3 if beside else 4)
    assert (blueprint.threads.update_nice > 0) is beside
