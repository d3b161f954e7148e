"""A DeepSpeed file under OffloadTrainer: filled, checked, honoured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_lm import OFFLOAD, arguments, logged, make_data, make_model

pytest.importorskip("accelerate", reason="the hf extra is not installed")
from offload import ConfigError
from offload.integrations.transformers import OffloadTrainer, OffloadTrainingArguments
from offload.optim.schedules import scheduler_class

AUTO: dict[str, Any] = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "bf16": {"enabled": "auto"},
    "fp16": {"enabled": "auto"},
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"},
    },
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {
            "warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto",
            "total_num_steps": "auto",
        },
    },
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "nvme", "nvme_path": "set by the test"},
        "offload_param": {"device": "nvme", "nvme_path": "set by the test"},
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
        "reduce_bucket_size": "auto",
    },
}  # fmt: skip


def file(folder: Path, **changes: Any) -> Path:
    content = json.loads(json.dumps(AUTO)) | changes
    for part in ("offload_optimizer", "offload_param"):
        content["zero_optimization"][part]["nvme_path"] = str(folder)
    path = folder / "ds_config.json"
    path.write_text(json.dumps(content))
    return path


def make(folder: Path, source: Any, *, offload: Any = (), **changes: Any) -> OffloadTrainer:
    args = arguments(folder / "out", kind=OffloadTrainingArguments, deepspeed=source, **changes)
    sizes = {key: OFFLOAD[key] for key in ("host_memory", "device_memory", "compute_dtype")}
    return OffloadTrainer(
        make_model(), args, train_dataset=make_data(), offload={**sizes, **dict(offload)}
    )


def test_auto_is_what_the_arguments_say(tmp_path: Path) -> None:
    trainer = make(tmp_path, str(file(tmp_path)), bf16=True)
    trainer.train()
    config, (group,) = trainer.engine.config, trainer.optimizer.param_groups
    assert trainer.args.deepspeed is None
    assert config.gradient_accumulation_steps == 2
    assert config.gradient_clipping == 1.0
    assert str(config.dtype) == "torch.bfloat16"
    assert config.nvme_path == (tmp_path,)
    assert config.param_persistence_threshold == 10 * 32
    assert (group["weight_decay"], list(group["betas"])) == (0.1, [0.9, 0.999])
    warm_up = {"warmup_max_lr": 3e-3, "warmup_num_steps": 2, "total_num_steps": 12}
    assert logged(trainer, "learning_rate") == rates(12, "WarmupDecayLR", warm_up)
    assert len(logged(trainer, "loss")) == 12
    trainer.close()


def rates(num: int, kind: str, params: dict[str, Any]) -> list[float]:
    """Of a schedule stepped once a step, from the first on."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=3e-3)
    schedule = scheduler_class(kind, params)(optimizer, **params)
    found = []
    for _ in range(num):
        found.append(schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()
    return found


def test_a_file_without_optimizer_and_schedule_leaves_them_to_the_arguments(
    tmp_path: Path,
) -> None:
    folder, plain = tmp_path / "nvme", tmp_path / "plain"
    folder.mkdir()
    plain.mkdir()
    given = json.loads(file(folder).read_text())
    del given["optimizer"], given["scheduler"]
    trainer = make(tmp_path, given)
    trainer.train()
    other = OffloadTrainer(
        make_model(), arguments(tmp_path / "out-2"), train_dataset=make_data(),
        offload={"nvme_path": plain, **OFFLOAD},
    )  # fmt: skip
    other.train()
    for key in ("loss", "grad_norm", "learning_rate"):
        assert logged(trainer, key) == logged(other, key)
    trainer.close()
    other.close()


@pytest.mark.parametrize("door", ["text", "offload", "command line"])
def test_other_doors_lead_to_the_same_file(
    tmp_path: Path, door: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = file(tmp_path)
    source = path.read_text() if door == "text" else None
    if door == "command line":
        monkeypatch.setenv("OFFLOAD_CONFIG", str(path))
    trainer = make(tmp_path, source, offload={"config": path} if door == "offload" else ())
    trainer.train()
    params = {"warmup_max_lr": 3e-3, "warmup_num_steps": 2, "total_num_steps": 12}
    assert logged(trainer, "learning_rate") == rates(12, "WarmupDecayLR", params)
    trainer.close()


@pytest.mark.parametrize("named", [True, False])
def test_a_folder_is_a_model_where_the_file_names_the_drive_or_needs_none(
    tmp_path: Path, named: bool
) -> None:
    make_model().save_pretrained(tmp_path / "folder")
    source = json.loads(file(tmp_path).read_text())
    if not named:
        for part in ("offload_optimizer", "offload_param"):
            source["zero_optimization"][part] = {"device": "cpu"}
    args = arguments(tmp_path / "out", kind=OffloadTrainingArguments, deepspeed=source)
    sizes = {key: OFFLOAD[key] for key in ("host_memory", "device_memory", "compute_dtype")}
    trainer = OffloadTrainer(
        str(tmp_path / "folder"), args, train_dataset=make_data(), offload=sizes
    )
    trainer.train()
    assert len(logged(trainer, "loss")) == 12
    assert (trainer.engine.config.nvme_path == (tmp_path,)) is named
    trainer.close()


def test_a_file_that_differs_from_the_arguments_is_an_error_that_shows_both(
    tmp_path: Path,
) -> None:
    source = file(tmp_path, gradient_clipping=0.3, train_batch_size=64)
    message = r"train_batch_size: 64, but .* says 4; gradient_clipping: 0.3, but max_grad_norm"
    with pytest.raises(ConfigError, match=message):
        make(tmp_path, source).train()


def test_a_run_with_a_file_resumes(tmp_path: Path) -> None:
    path = file(tmp_path)
    whole = make(tmp_path, path, save_strategy="steps", save_steps=5)
    whole.train()
    whole.close()
    again = make(tmp_path, path, save_strategy="steps", save_steps=5)
    again.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-5"))
    for key in ("loss", "grad_norm", "learning_rate"):
        assert logged(again, key) == logged(whole, key)
    again.close()


def test_arguments_for_deepspeed_itself_are_refused(tmp_path: Path) -> None:
    args = arguments(tmp_path)
    args.deepspeed = {"zero_optimization": {"stage": 3}}
    with pytest.raises(ConfigError, match="OffloadTrainingArguments"):
        OffloadTrainer(make_model(), args, train_dataset=make_data())
