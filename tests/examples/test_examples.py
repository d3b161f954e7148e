"""The example is a sound experiment: data apart, loss right, the demo's judgement able to fail."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
sys.path.insert(0, str(EXAMPLES))

import corpus  # noqa: E402
import decoder  # noqa: E402
import demo  # noqa: E402

TINY = ("--layers", "2", "--width", "64", "--heads", "4", "--batch", "2", "--seq", "16")


def tiny(**sizes: object) -> decoder.Decoder:
    torch.manual_seed(0)
    return decoder.Decoder(decoder.Shape(layers=2, width=64, heads=4, **sizes))  # type: ignore[arg-type]


def test_training_and_validation_hold_different_documents() -> None:
    documents = list(corpus.documents("docs"))
    text = corpus.load("docs", "bytes")
    train, validation = (bytes(part.tolist()) for part in (text.train, text.validation))
    assert documents[0] in validation
    assert documents[0] not in train
    assert documents[1] in train
    assert documents[1] not in validation
    assert len(train) > 5 * len(validation) > 10_000


def test_unigram_entropy_is_the_loss_of_the_best_guess_without_context() -> None:
    text = corpus.Corpus(4, torch.tensor([0]), torch.tensor([0, 0, 1, 2]))
    assert text.unigram_entropy() == pytest.approx(0.5 * math.log(2) + 0.5 * math.log(4))


def test_merging_gives_frequent_pairs_an_id_and_loses_nothing() -> None:
    ids = corpus.to_bytes(b"aaaaa bab aaa banana" * 3)
    merges = corpus.learn_merges(ids, 12)
    merged = corpus.merge_all(ids, merges)
    assert len(merged) < len(ids) / 2
    for new, pair in reversed(list(enumerate(merges, start=256))):
        merged = np.concatenate([pair if item == new else [item] for item in merged])
    assert merged.tolist() == ids.tolist()


@pytest.mark.parametrize("length", range(2, 9))
def test_overlapping_pairs_are_merged_from_the_left(length: int) -> None:
    merged = corpus.merge(corpus.to_bytes(b"b" + b"a" * length + b"b"), (97, 97), 256)
    assert merged.tolist() == [98] + [256] * (length // 2) + [97] * (length % 2) + [98]


def test_batches_go_on_where_their_state_was_taken() -> None:
    def batches(seed: int) -> corpus.Batches:
        return corpus.Batches(torch.arange(1000), batch=3, seq=5, seed=seed)

    first = batches(seed=1)
    inputs, targets = first.next()
    assert torch.equal(inputs + 1, targets)
    state = first.state_dict()
    second = batches(seed=2)
    second.load_state_dict(state)
    expected = first.next()[0]
    assert torch.equal(second.next()[0], expected)
    assert not torch.equal(batches(seed=2).next()[0], expected)


def test_the_decoder_sees_no_later_token() -> None:
    model = tiny()
    tokens = torch.randint(0, 256, (1, 16))
    targets = torch.full((1, 16), -100)
    targets[0, 7] = 3  # only position 7 counts
    loss = model(tokens, targets)
    later, earlier = tokens.clone(), tokens.clone()
    later[0, 8:] += 1
    earlier[0, 0] = (earlier[0, 0] + 1) % 256
    assert torch.equal(model(later % 256, targets), loss)
    assert not torch.equal(model(earlier, targets), loss)


def test_checkpointing_and_tying_change_what_they_should_only() -> None:
    tokens = torch.randint(0, 256, (2, 16))
    plain, recomputing = tiny(), tiny(checkpointing=True)
    for model in (plain, recomputing):
        model(tokens, tokens).backward()
    pairs = zip(plain.parameters(), recomputing.parameters(), strict=True)
    assert all(torch.equal(a.grad, b.grad) for a, b in pairs)  # type: ignore[arg-type]
    tied = tiny(tied=True)
    assert tied.head.weight is tied.embedding.weight


def test_the_decoder_computes_in_the_type_of_its_weights() -> None:
    tokens = torch.randint(0, 256, (2, 16))
    with torch.no_grad():
        loss = tiny()(tokens, tokens)
        narrow = tiny().to(torch.bfloat16)(tokens, tokens)
    assert narrow.dtype is torch.float32
    assert float(narrow) == pytest.approx(float(loss), rel=0.01)
    assert float(loss) == pytest.approx(math.log(256), rel=0.05)


def run_example(*arguments: object) -> list[dict[str, float]]:
    out = Path(str(arguments[-1]))
    command = [sys.executable, str(EXAMPLES / "train_lm.py"), *TINY, *map(str, arguments)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}  # threads only wait for one another here
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=250, check=False, env=environment
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def test_training_in_memory_learns_and_leaves_numbers_and_a_curve(tmp_path: Path) -> None:
    rows = run_example("--no-offload", "--steps", "60", "--lr", "3e-3", "--out", tmp_path)
    losses = [row["loss"] for row in rows if "loss" in row]
    assert len(losses) == 60
    assert losses[0] == pytest.approx(math.log(256), rel=0.05)
    final = rows[-1]
    assert final["validation_loss"] < losses[0] - 1
    assert final["parameters"] == sum(p.numel() for p in tiny().parameters())
    assert (tmp_path / "loss.png").stat().st_size > 1000


def outcome(**changes: float) -> demo.Outcome:
    final = {"parameters": 99e6, "validation_loss": 2.5, "unigram_entropy": 3.2} | changes
    step = {"read_bytes": 1e9, "write_bytes": 1e9, "seconds": 2.0}
    peak = int(changes.get("peak", 800e6))
    return demo.Outcome(demo.Demo(), final, [step], peak, 300_000_000)


def test_the_demo_says_which_promise_was_not_kept() -> None:
    assert not list(outcome().broken_promises())
    assert "at least 3" in next(outcome(parameters=90e6).broken_promises())
    assert "peak memory" in next(outcome(peak=900e6).broken_promises())
    assert "validation loss" in next(outcome(validation_loss=3.3).broken_promises())
    assert dict(outcome().lines())["model state"].startswith("1188 MB")


def test_the_peak_is_measured_from_outside() -> None:
    code = "block = bytearray(200 << 20); print('held', flush=True); input(); del block"
    code += "; print('freed', flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        memory, later = demo.PeakMemory(child.pid), demo.PeakMemory(child.pid)
        child.stdout.readline()
        memory.sample()
        child.stdin.write("\n")
        child.stdin.flush()
        child.stdout.readline()
        for each in (memory, later):
            each.start()
            each.stop()
        child.communicate("\n")
    memory.sample()  # the process has ended: the peak stands
    assert 200 << 20 < memory.peak_bytes < 260 << 20
    assert 0 < later.peak_bytes < 60 << 20


def test_the_demo_hands_on_the_status_of_its_child() -> None:
    assert demo.peak_of([sys.executable, "-c", "raise SystemExit(7)"])[0] == 7
