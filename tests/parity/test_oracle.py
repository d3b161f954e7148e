"""The oracle itself: it is ordinary training, and the comparison with it can fail."""

import pytest
import torch
from case import (
    BF16,
    FP32,
    Case,
    Trained,
    assert_same,
    collect_oracle,
    oracle_step,
    train_in_memory,
)


def torch_losses(case: Case) -> list[float]:
    """The case in plain torch: `AdamW`, `clip_grad_norm_`, everything in fp32."""
    model = case.model()
    optimizer = torch.optim.AdamW(model.parameters(), **case.groups[0].settings())
    losses = []
    for step in range(case.num_steps):
        for batch in case.batches(step):
            loss = model(*batch)
            (loss / case.accumulation).backward()
            losses.append(loss.item())
        torch.nn.utils.clip_grad_norm_(model.parameters(), case.clipping)
        optimizer.step()
        optimizer.zero_grad()
    return losses


@pytest.mark.parametrize(("dtype", "tolerance"), [(FP32, 1e-4), (BF16, 2e-2)], ids=str)
def test_the_oracle_trains_as_torch_does(dtype, tolerance):
    case = Case(dtype=dtype, accumulation=2, clipping=0.5, num_steps=10)
    ours, theirs = train_in_memory(case).losses, torch_losses(case)
    assert ours == pytest.approx(theirs, rel=tolerance)


def test_the_comparison_sees_one_bit():
    case = Case(num_steps=1)
    for role in ("masters", "exp_avgs", "exp_avg_sqs"):
        oracle, trained = case.oracle(), Trained()
        oracle_step(oracle, case, 0, trained)
        trained = collect_oracle(oracle, trained)
        assert_same(trained, train_in_memory(case))
        tensor = getattr(trained, role)["blocks.1.norm_2.bias"]
        tensor.view(torch.int32)[3] ^= 1
        with pytest.raises(AssertionError, match=r"blocks.1.norm_2.bias"):
            assert_same(trained, train_in_memory(case))
