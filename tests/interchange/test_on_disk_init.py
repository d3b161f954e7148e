"""Models made on disk: values, random numbers and ties as in memory, and none of the memory."""

import contextlib

import models
import pytest
import torch
from torch import nn

import offload
from offload.errors import StoreError
from offload.interchange import on_disk


@pytest.fixture(autouse=True)
def move_everything(monkeypatch):
    """The models here are small."""
    monkeypatch.setattr(on_disk, "LEAST_BYTES", 1)


def in_file(parameter: nn.Parameter) -> bool:
    """Whether the parameter's memory is a mapping of an unlinked file."""
    address = parameter.data_ptr()
    with open("/proc/self/maps") as lines:
        for line in lines:
            start, _, stop = line.split()[0].partition("-")
            if int(start, 16) <= address < int(stop, 16):
                return "offload-backing-" in line
    return False


def equal(one: nn.Module, other: nn.Module) -> bool:
    left, right = one.state_dict(), other.state_dict()
    return left.keys() == right.keys() and all(torch.equal(left[k], right[k]) for k in left)


@pytest.mark.parametrize(
    "kind", [models.Decoder, models.TorchAttention, models.UnusedParts, models.OutsideWeight]
)
def test_values_and_random_numbers_are_those_of_plain_construction(kind, tmp_path):
    plain = models.build(kind)
    after_plain = torch.rand(3)
    with offload.on_disk_init(tmp_path):
        model = models.build(kind)
        after = torch.rand(3)
    assert equal(model, plain)
    assert torch.equal(after, after_plain)
    assert all(in_file(parameter) for parameter in model.parameters())


def test_tied_weights_stay_tied(tmp_path):
    with offload.on_disk_init(tmp_path):
        model = models.build(models.Decoder, tied=True)
    assert model.head.weight is model.embed.weight
    assert in_file(model.embed.weight)


def test_later_initialisation_passes_work_inside_the_block_and_after_it(tmp_path):
    def initialise(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.02)
            module.weight.data.mul_(2.0)

    plain = models.build(models.Decoder).apply(initialise).apply(initialise)
    with offload.on_disk_init(tmp_path):
        model = models.build(models.Decoder).apply(initialise)
    model.apply(initialise)
    assert equal(model, plain)
    assert all(in_file(parameter) for parameter in model.parameters())


class Viewed(nn.Module):
    """Initialises a tensor that its parameter views, after it was registered."""

    def __init__(self) -> None:
        super().__init__()
        data = torch.empty(40, 30)
        self.weight = nn.Parameter(data)
        nn.init.normal_(data)
        self.turned = nn.Parameter(torch.randn(30, 40).t())


def test_a_parameter_that_is_a_view_of_a_live_tensor_moves_when_the_tensor_is_gone(tmp_path):
    torch.manual_seed(0)
    plain = nn.Sequential(Viewed(), Viewed())
    torch.manual_seed(0)
    with offload.on_disk_init(tmp_path):
        model = nn.Sequential(Viewed(), Viewed())
    assert equal(model, plain)
    assert all(in_file(parameter) for parameter in model.parameters())
    assert model[0].turned.stride() == plain[0].turned.stride()


class SharedBuffer(nn.Module):
    """Keeps a view of its own weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(30, 40))
        self.first = self.weight.data[0]


def test_a_parameter_that_something_goes_on_viewing_stays_where_it_is(tmp_path):
    with offload.on_disk_init(tmp_path):
        model = SharedBuffer()
    with torch.no_grad():
        model.weight.zero_()
    assert not model.first.any()


def test_deep_copies_of_a_module_go_to_the_file_one_by_one(tmp_path):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(48, 2, 96)
    plain = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
    torch.manual_seed(0)
    with offload.on_disk_init(tmp_path):
        layer = nn.TransformerEncoderLayer(48, 2, 96)
        model = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
    assert equal(model, plain)
    assert all(in_file(parameter) for parameter in model.parameters())


def test_parameters_given_new_data_are_in_the_file_at_the_end(tmp_path):
    with offload.on_disk_init(tmp_path):
        model = models.build(models.Decoder)
        for parameter in model.parameters():
            parameter.data = torch.ones(parameter.shape)
    assert all(
        in_file(parameter) and bool((parameter == 1).all()) for parameter in model.parameters()
    )


def test_nothing_stays_patched_and_no_file_is_left(tmp_path):
    before = nn.Parameter.__deepcopy__
    with contextlib.suppress(InterruptedError), offload.on_disk_init(tmp_path):
        models.build(models.Decoder)
        assert list(tmp_path.iterdir()) == []
        raise InterruptedError
    assert nn.Parameter.__deepcopy__ is before
    assert not in_file(models.build(models.Decoder).embed.weight)


def test_a_missing_folder_is_named(tmp_path):
    with (
        pytest.raises(StoreError, match="nowhere"),
        offload.on_disk_init(tmp_path / "nowhere"),
    ):
        pass


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_an_engine_takes_the_model_over_with_every_bit(dtype, tmp_path):
    plain = models.build(models.Decoder, tied=True)
    with offload.on_disk_init(tmp_path):
        model = models.build(models.Decoder, tied=True)
    settings = {"dtype": dtype, "compute_dtype": "float32", "param_persistence_threshold": 100}
    with offload.OffloadEngine(model, nvme_path=tmp_path, **settings) as engine:
        for name, parameter in plain.named_parameters():
            assert torch.equal(engine.full_fp32_param(name), parameter)
    with open("/proc/self/maps") as lines:
        assert not any("offload-backing-" in line for line in lines), "the file's space is free"
