"""Models that break systems which free weights: each equals its run in memory, bit for bit."""

import re
from pathlib import Path

import models
import pytest
import torch
from case import (
    BF16,
    FP32,
    Case,
    assert_learned,
    assert_offloaded,
    assert_same,
    train_in_memory,
    train_offloaded,
)

from offload.errors import BudgetError

CORNERS = {
    "tied-head": {"options": (("tied", True),)},
    "weight-outside-its-module": {"kind": models.OutsideWeight},
    "frozen-block": {"frozen": ("blocks.1.",)},
    "frozen-embedding": {"frozen": ("embed", "norm")},
    "reentrant-checkpointing": {"options": (("checkpointing", "reentrant"),)},
    "nonreentrant-checkpointing": {"options": (("checkpointing", "nonreentrant"),)},
    "frozen-and-reentrant": {
        "options": (("checkpointing", "reentrant"),),
        "frozen": ("blocks.0.", "blocks.2."),
    },
    "frozen-and-nonreentrant": {
        "options": (("checkpointing", "nonreentrant"),),
        "frozen": ("blocks.0.", "blocks.2.", "embed"),
    },
    "outside-and-nonreentrant": {
        "kind": models.OutsideWeight,
        "options": (("checkpointing", "nonreentrant"),),
    },
    "outside-and-reentrant": {
        "kind": models.OutsideWeight,
        "options": (("checkpointing", "reentrant"),),
    },
    "blocks-called-twice": {"kind": models.RepeatedBlock},
    "twice-and-nonreentrant": {
        "kind": models.RepeatedBlock,
        "options": (("checkpointing", "nonreentrant"),),
    },
    "twice-and-reentrant": {
        "kind": models.RepeatedBlock,
        "options": (("checkpointing", "reentrant"),),
    },
    "once-or-three-times": {"kind": models.VaryingUses, "num_steps": 6},
    "once-or-three-times-reentrant": {
        "kind": models.VaryingUses,
        "options": (("checkpointing", "reentrant"),),
        "num_steps": 6,
    },
    "another-branch-each-step": {"kind": models.Branching, "num_steps": 6},
    "multihead-attention": {"kind": models.TorchAttention},
}


@pytest.mark.parametrize(
    "types",
    [(FP32, FP32), (BF16, FP32), pytest.param((BF16, BF16), marks=pytest.mark.slow)],
    ids=["fp32", "bf16-moves", "bf16"],
)
@pytest.mark.parametrize("corner", CORNERS)
def test_an_awkward_model_equals_its_run_in_memory(corner, types, tmp_path):
    dtype, compute_dtype = types
    case = Case(
        dtype=dtype, compute_dtype=compute_dtype, accumulation=2, clipping=0.5, **CORNERS[corner]
    )
    least = smallest("device_memory", case, tmp_path)
    with case.engine(tmp_path, device_memory=least) as engine:
        trained = train_offloaded(engine, case)
        assert_offloaded(engine)
    assert_learned(case, trained)
    assert_same(trained, train_in_memory(case))


@pytest.mark.parametrize("overlap", ["hold", "speculate"])
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
def test_an_embedding_ten_times_the_rest_passes_through_the_smallest_pool(dtype, overlap, tmp_path):
    case = Case(
        dtype=dtype,
        options=(("vocab", 1500), ("tied", True)),
        batch_options=(("vocab", 1500),),
    )
    sizes = sorted(param.numel() for param in case.model().parameters())
    assert sizes[-1] >= 10 * sizes[-2]
    pool_bytes = smallest("host_memory", case, tmp_path)
    with case.engine(tmp_path, host_memory=pool_bytes, overlap=overlap) as engine:
        trained = train_offloaded(engine, case)
        assert_offloaded(engine)
    assert sizes[-1] > 10 * 4096, "the embedding must be cut in many chunks"
    assert_learned(case, trained)
    assert_same(trained, train_in_memory(case))


@pytest.mark.parametrize("overlap", ["hold", "speculate"])
@pytest.mark.parametrize("more_bytes", [0, 300_000, 16 << 20], ids=["least", "few", "all"])
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
def test_a_unit_waits_for_slots_and_never_computes_with_half_of_it(
    dtype, more_bytes, overlap, tmp_path
):
    """Slots that prefetches and updates hold are missing where backward fetches the next unit."""
    case = Case(dtype=dtype, options=(("tied", True),))
    least = smallest("host_memory", case, tmp_path)
    with case.engine(tmp_path, overlap=overlap, host_memory=least + more_bytes) as engine:
        trained = train_offloaded(engine, case)
    assert_same(trained, train_in_memory(case))


def smallest(budget: str, case: Case, nvme_path: Path) -> int:
    """What BudgetError tells."""
    with pytest.raises(BudgetError) as raised, case.engine(nvme_path, **{budget: 1}):
        pass
    return int(re.findall(rf"{budget}=(\d+)", str(raised.value))[-1])


def test_a_submodule_called_directly_trains_as_in_memory(tmp_path):
    case = Case()
    oracle = case.oracle()
    with case.engine(tmp_path) as engine:
        for step in range(case.num_steps):
            ((tokens, labels),) = case.batches(step)
            losses = []
            for model in (oracle.model, engine.module):
                hidden = model.blocks[1](model.blocks[0](model.embed(tokens)))
                losses.append(models.token_loss(model.head(hidden), labels))
            losses[0].backward()
            oracle.keep_gradients()
            engine.backward(losses[1])
            assert losses[0].item() == losses[1].item()
            oracle.step()
            engine.step()
            assert oracle.grad_norm == engine.grad_norm
        for name, param in engine.module.named_parameters():
            if name in oracle.states:
                master = oracle.states[name].master.view(param.shape)
                assert torch.equal(engine.full_fp32_param(param), master), name


def test_parameters_without_gradient_are_not_updated(tmp_path):
    case = Case(kind=models.UnusedParts, num_steps=6, clipping=0.5)
    parities = {int(tokens[0, 0]) % 2 for s in range(6) for tokens, _ in case.batches(s)}
    assert parities == {0, 1}, "the batches must take both ways"
    with case.engine(tmp_path) as engine:
        trained = train_offloaded(engine, case)
    in_memory = train_in_memory(case)
    assert_same(trained, in_memory)
    initial = case.model().never.weight.detach().flatten()
    assert torch.equal(trained.masters["never.weight"], initial)
    assert not trained.exp_avgs["never.weight"].any()
    assert trained.exp_avgs["sometimes.weight"].any()
