"""Random numbers of a generation, where the machine that resumes it has other devices."""

import pytest
import torch

from offload.engine import generation


@pytest.fixture
def devices(monkeypatch):
    """Two devices whose generators are of the processor; the list may be cut."""
    found = [torch.Generator().manual_seed(index) for index in range(2)]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(found))
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(found))
    monkeypatch.setattr(
        torch.cuda, "get_rng_state_all", lambda: [each.get_state() for each in found]
    )
    monkeypatch.setattr(
        torch.cuda, "set_rng_state", lambda state, index: found[index].set_state(state)
    )
    return found


@pytest.mark.parametrize("left", [2, 1, 0])
def test_devices_that_are_left_go_on_where_they_were(left, devices):
    state = generation.capture_rng()
    drawn = [torch.rand(3, generator=each) for each in devices]
    del devices[left:]
    generation.restore_rng(state)
    again = [torch.rand(3, generator=each) for each in devices]
    assert len(again) == left
    assert all(map(torch.equal, drawn, again))


def test_a_device_that_nobody_has_used_is_left_alone(devices, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    assert "cuda" not in generation.capture_rng()
