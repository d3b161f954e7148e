"""OffloadTrainer is Trainer: the same losses, norms, schedules, checkpoints and answers."""

from __future__ import annotations

import copy
import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_lm import OFFLOAD, VOCAB, arguments, logged, make_data, make_model, transformers

pytest.importorskip("accelerate", reason="the hf extra is not installed")
from memory_trainer import MemoryTrainer

from offload import ConfigError, StateError, StoreError
from offload.integrations.transformers import OffloadTrainer

PROMPT = torch.tensor([[1, 2, 3, 4]])


@pytest.fixture
def make(tmp_path: Path):
    """Makes trainers of the tiny model with a store each; closes them."""
    made: list[OffloadTrainer] = []

    def trainer(model: Any = None, offload: Any = (), **changes: Any) -> OffloadTrainer:
        settings = {
            name: changes.pop(name)
            for name in ("optimizers", "optimizer_cls_and_kwargs", "callbacks", "model_init")
            if name in changes
        }
        store = tmp_path / f"nvme-{len(made)}"
        store.mkdir()
        args = arguments(changes.pop("folder", tmp_path / f"out-{len(made)}"), **changes)
        if model is None and "model_init" not in settings:
            model = make_model()
        made.append(
            OffloadTrainer(
                model,
                args,
                train_dataset=make_data(),
                eval_dataset=make_data(6),
                offload={"nvme_path": store, **OFFLOAD, **dict(offload)},
                **settings,
            )
        )
        return made[-1]

    yield trainer
    for each in made:
        each.close()


def plain(folder: Path, model: Any = None, **changes: Any) -> Any:
    settings = {
        name: changes.pop(name)
        for name in ("optimizers", "optimizer_cls_and_kwargs", "callbacks", "model_init")
        if name in changes
    }
    return transformers.Trainer(
        model or make_model(), arguments(folder, **changes),
        train_dataset=make_data(), eval_dataset=make_data(6), **settings,
    )  # fmt: skip


def masters(trainer: OffloadTrainer) -> dict[str, torch.Tensor]:
    names = dict(trainer.model.named_parameters())
    return {name: trainer.engine.full_fp32_param(name) for name in names}


def assert_same_masters(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    assert [name for name in one if not torch.equal(one[name], other[name])] == []


@pytest.mark.parametrize("flags", [{}, {"bf16": True}], ids=["fp32", "bf16"])
def test_losses_norms_and_masters_have_the_bits_of_training_in_memory(
    make: Any, tmp_path: Path, flags: dict[str, bool]
) -> None:
    """Twelve steps: two epochs of eleven batches, so each ends with a shorter window."""
    dtype = torch.bfloat16 if flags else torch.float32
    memory = MemoryTrainer(
        make_model(), arguments(tmp_path / "memory", **flags), dtype=dtype,
        train_dataset=make_data(), eval_dataset=make_data(6),
    )  # fmt: skip
    memory.train()
    trainer = make(**flags)
    trainer.train()
    assert trainer.state.global_step == trainer.engine.global_step == 12
    for key in ("loss", "grad_norm", "learning_rate"):
        assert logged(trainer, key) == logged(memory, key)
    assert max(logged(trainer, "grad_norm")) > 1.0  # clipped
    theirs = {
        name: memory.oracle.states[name].master.view(parameter.shape)
        for name, parameter in memory.model.named_parameters()
    }
    assert_same_masters(masters(trainer), theirs)
    assert trainer.evaluate()["eval_loss"] == memory.evaluate()["eval_loss"]


@pytest.mark.parametrize("clip", [1.0, 0.0])
def test_it_logs_what_trainer_logs(make: Any, tmp_path: Path, clip: float) -> None:
    """Against torch's AdamW and clip_grad_norm_; fp32 both, so only roundings differ."""
    changes = {"max_grad_norm": clip, "eval_strategy": "epoch"}
    memory = plain(tmp_path / "memory", **changes)
    memory.train()
    trainer = make(**changes)
    trainer.train()
    assert logged(trainer, "learning_rate") == logged(memory, "learning_rate")
    for key, least in (("loss", 12), ("grad_norm", 12), ("eval_loss", 2)):
        assert len(logged(trainer, key)) == least
        assert logged(trainer, key) == pytest.approx(logged(memory, key), rel=2e-5)
    assert logged(trainer, "loss")[-1] < logged(trainer, "loss")[0]


@pytest.mark.parametrize(
    ("optim", "optim_args"),
    [
        ("adamw_torch_fused", None), ("sgd", "momentum=0.9"), ("adagrad", None), ("rmsprop", None),
        ("adafactor", None),
    ],
)  # fmt: skip
def test_every_optimizer_of_torch_is_the_one_asked_for(
    make: Any, tmp_path: Path, optim: str, optim_args: str | None
) -> None:
    changes = {"optim": optim, "optim_args": optim_args, "num_train_epochs": 1}
    memory = plain(tmp_path / "memory", **changes)
    memory.train()
    trainer = make(**changes)
    trainer.train()
    assert logged(trainer, "loss") == pytest.approx(logged(memory, "loss"), rel=2e-5)
    assert logged(trainer, "grad_norm") == pytest.approx(logged(memory, "grad_norm"), rel=2e-4)
    weights = dict(memory.model.named_parameters())
    for name, master in masters(trainer).items():
        torch.testing.assert_close(master, weights[name].detach(), rtol=1e-4, atol=2e-6)


def test_biases_and_norms_do_not_decay(make: Any) -> None:
    trainer = make(make_model(attention_bias=True))
    trainer.create_optimizer()
    names = {id(p): name for name, p in trainer.model.named_parameters()}
    decaying, others = trainer.optimizer.param_groups
    assert (decaying["weight_decay"], others["weight_decay"]) == (0.1, 0.0)
    flat = {names[id(p)] for p in others["params"]}
    assert flat == {name for name in names.values() if "norm" in name or "bias" in name}
    assert len(flat) + len(decaying["params"]) == len(names)


def test_a_run_that_resumes_is_one_that_was_never_interrupted(make: Any, tmp_path: Path) -> None:
    """At other budgets and chunks, in the middle of an epoch and at its end."""
    saving = {"save_strategy": "steps", "save_steps": 2, "folder": tmp_path / "out"}
    whole = make(**saving)
    whole.train()
    for step in (4, 6):
        again = make(
            make_model(seed=9), offload={"chunk_elems": 2048, "placement": "host"}, **saving
        )
        again.train(resume_from_checkpoint=str(tmp_path / "out" / f"checkpoint-{step}"))
        for key in ("loss", "grad_norm", "learning_rate"):
            assert logged(again, key) == logged(whole, key)
        assert_same_masters(masters(again), masters(whole))
    last = make(make_model(seed=9), num_train_epochs=3, **saving)
    last.train(resume_from_checkpoint=True)
    assert last.state.global_step == 18


def test_a_stopped_training_goes_on_in_the_same_trainer(make: Any, tmp_path: Path) -> None:
    trainer = make(folder=tmp_path / "out", save_strategy="steps", save_steps=3)
    trainer.train()
    first = masters(trainer)
    trainer.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-3"))
    assert_same_masters(masters(trainer), first)


def test_a_saved_model_is_loaded_by_transformers(make: Any, tmp_path: Path) -> None:
    trainer = make()
    trainer.train()
    trainer.save_model(str(tmp_path / "saved"))
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "saved").eval()
    weights = trainer.model.state_dict()
    found = loaded.state_dict()
    assert found.keys() == weights.keys()
    assert all(torch.equal(found[name], weights[name]) for name in weights)
    trainer.model.eval()
    with torch.no_grad():
        assert torch.equal(loaded(PROMPT).logits, trainer.model(PROMPT).logits)
    answers = [
        m.generate(PROMPT, max_new_tokens=6, do_sample=False) for m in (loaded, trainer.model)
    ]
    assert torch.equal(*answers)


def test_evaluation_and_prediction_come_before_training_too(make: Any, tmp_path: Path) -> None:
    trainer, memory = make(), plain(tmp_path / "memory")
    assert trainer.evaluate()["eval_loss"] == memory.evaluate()["eval_loss"]
    ours, theirs = (each.predict(make_data(3)).predictions for each in (trainer, memory))
    assert ours.shape == (3, 12, VOCAB)
    assert (ours == theirs).all()
    trainer.train()
    assert trainer.state.global_step == 12


def test_the_best_model_comes_back_at_the_end(make: Any) -> None:
    trainer = make(
        learning_rate=0.3, lr_scheduler_type="constant", warmup_steps=0,  # soon worse
        eval_strategy="steps", eval_steps=2, save_strategy="steps", save_steps=2,
        load_best_model_at_end=True, metric_for_best_model="eval_loss",
    )  # fmt: skip
    trainer.train()
    losses = logged(trainer, "eval_loss")
    assert losses[-1] > min(losses) == trainer.state.best_metric
    assert trainer.evaluate()["eval_loss"] == min(losses)


class Generate(transformers.TrainerCallback):
    """Asks the model to continue a prompt after every step."""

    def __init__(self) -> None:
        self.found: list[list[int]] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        model = kwargs["model"]
        model.eval()
        answer = model.generate(PROMPT, max_new_tokens=5, do_sample=False)
        self.found.append(answer[0].tolist())
        model.train()


def test_the_model_generates_between_steps(make: Any, tmp_path: Path) -> None:
    changes = {"num_train_epochs": 1}
    ours, theirs = Generate(), Generate()
    trainer = make(callbacks=[ours], **changes)
    trainer.train()
    plain(tmp_path / "memory", callbacks=[theirs], **changes).train()
    silent = make(**changes)
    silent.train()
    assert len(ours.found) == 6
    assert ours.found == theirs.found
    assert logged(trainer, "loss") == logged(silent, "loss")


def test_an_optimizer_and_a_scheduler_of_the_user_are_honoured(make: Any, tmp_path: Path) -> None:
    def both(model: Any) -> Any:
        optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.3)
        return optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)

    model = make_model()
    trainer = make(model, optimizers=both(model))
    trainer.train()
    model = make_model()
    memory = plain(tmp_path / "memory", model, optimizers=both(model))
    memory.train()
    assert logged(trainer, "learning_rate") == logged(memory, "learning_rate")
    assert logged(trainer, "loss") == pytest.approx(logged(memory, "loss"), rel=2e-5)


def test_a_class_of_the_user_and_one_of_the_engine_are_honoured(make: Any) -> None:
    trainer = make(optimizer_cls_and_kwargs=(torch.optim.Adam, {"lr": 1e-3, "amsgrad": False}))
    trainer.train()
    assert trainer.engine.optimizer._rule.name == "adam"
    lion = make(offload={"optimizer": "lion"})
    lion.train()
    assert lion.engine.optimizer._rule.name == "lion"
    assert lion.optimizer.param_groups[0]["initial_lr"] == lion.args.learning_rate


def test_a_model_from_a_function_is_made_anew_by_every_training(make: Any) -> None:
    trainer = make(model_init=lambda: make_model(), num_train_epochs=1)
    trainer.train()
    losses, first = logged(trainer, "loss"), trainer.engine
    trainer.train()
    assert logged(trainer, "loss") == losses
    assert trainer.engine is not first
    assert len(list(trainer.engine.config.nvme_path[0].glob("offload-*"))) == 1


def test_fp16_skips_what_overflows_and_the_schedule_waits(make: Any) -> None:
    trainer = make(fp16=True, offload={"initial_scale_power": 21, "hysteresis": 1})
    assert trainer.accelerator.scaler is None
    trainer.train()
    skipped = trainer.engine.skipped_steps
    assert 2 <= skipped <= 8
    assert trainer.engine.global_step == 12 - skipped
    rates, norms = logged(trainer, "learning_rate"), logged(trainer, "grad_norm")
    waits = [one == other for one, other in pairwise(rates)]
    assert waits == [not math.isfinite(norm) for norm in norms[:-1]]


def test_the_callbacks_see_a_model_whose_weights_are_elsewhere(make: Any) -> None:
    trainer = make()
    trainer.train()
    weight = trainer.model.model.layers[0].mlp.up_proj.weight
    with pytest.raises(StateError, match="gathered"):
        weight.sum()
    assert trainer.engine.metrics.total_write_bytes > 0


def test_a_folder_is_a_model_whose_weights_are_never_all_in_memory(
    make: Any, tmp_path: Path
) -> None:
    make_model().save_pretrained(tmp_path / "folder")
    trainer, plain_one = make(str(tmp_path / "folder")), make()
    assert trainer.loaded.as_it_is().places  # files that the engine reads directly
    trainer.train()
    plain_one.train()
    assert logged(trainer, "loss") == logged(plain_one, "loss")
    assert_same_masters(masters(trainer), masters(plain_one))


def test_weights_that_are_edited_before_training_are_the_edited_ones(
    make: Any, tmp_path: Path
) -> None:
    make_model().save_pretrained(tmp_path / "folder")
    trainer = make(str(tmp_path / "folder"))
    weights = dict(trainer.model.named_parameters())
    edited, replaced, moved = (f"model.layers.{i}.mlp.up_proj.weight" for i in range(3))
    with torch.no_grad():
        weights[edited].mul_(2)
        weights[moved].data = weights[moved] * 3
    trainer.model.get_submodule(replaced.removesuffix(".weight")).weight = torch.nn.Parameter(
        weights[replaced] * 4
    )
    expected = {n: p.detach().clone() for n, p in trainer.model.named_parameters()}
    trainer.create_optimizer()
    assert_same_masters(masters(trainer), expected)


def test_a_store_to_resume_is_refused(
    make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = make(num_train_epochs=1)
    first.train()
    first.close()
    monkeypatch.setenv("OFFLOAD_RESUME", "resume")
    with pytest.raises(ConfigError, match="resume_from_checkpoint"):
        make(offload={"nvme_path": tmp_path / "nvme-0"}).train()


def test_a_store_that_exists_is_not_overwritten_unasked(make: Any, tmp_path: Path) -> None:
    first = make()
    first.train()
    first.close()
    with pytest.raises(StoreError, match=r"expected no store.*resume_from_checkpoint") as error:
        make(offload={"nvme_path": tmp_path / "nvme-0"}).train()
    assert "resume=True" not in str(error.value)  # which a Trainer refuses
    for settings in ({"resume": False}, {"name": "other"}):
        again = make(offload={"nvme_path": tmp_path / "nvme-0", **settings})
        again.train()
        again.close()


def test_a_checkpoint_replaces_the_store_of_the_run_before(make: Any, tmp_path: Path) -> None:
    """The documented command, twice: the run that was interrupted has left its store."""
    saving = {"save_strategy": "steps", "save_steps": 3, "folder": tmp_path / "out"}
    whole = make(**saving)
    whole.train()
    expected = masters(whole)
    whole.close()
    checkpoint = tmp_path / "out" / "checkpoint-3"
    for _ in range(2):
        again = make(make_model(seed=9), offload={"nvme_path": tmp_path / "nvme-0"}, **saving)
        again.train(resume_from_checkpoint=str(checkpoint))
        assert_same_masters(masters(again), expected)
        again.close()
    before = {file: file.stat().st_mtime_ns for file in (tmp_path / "nvme-0").rglob("*")}
    for file in (checkpoint / "offload").glob("MANIFEST*"):
        file.write_bytes(b"damaged")
    with pytest.raises(StoreError):  # and the store stays
        make(offload={"nvme_path": tmp_path / "nvme-0"}, **saving).train(
            resume_from_checkpoint=str(checkpoint)
        )
    assert before == {file: file.stat().st_mtime_ns for file in (tmp_path / "nvme-0").rglob("*")}


def test_the_engines_adam_has_the_arguments_of_adam(make: Any) -> None:
    for optimizer in ("adamw", "Adam", torch.optim.AdamW):
        trainer = make(
            offload={"optimizer": optimizer}, adam_beta1=0.8, adam_beta2=0.95, adam_epsilon=1e-6
        )
        trainer.create_optimizer()
        for group in trainer.engine.optimizer.param_groups:
            assert (tuple(group["betas"]), group["eps"]) == ((0.8, 0.95), 1e-6)


def test_labels_keep_their_type_and_the_flags_meaning_is_told(
    make: Any, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = make(bf16=True, offload={"compute_dtype": "bf16"})
    trainer.create_optimizer()
    assert caplog.text.count("bf16=True: weights move in 16 bits") == 1
    batch = {"pixels": torch.ones(2, 3), "nested": [torch.ones(1)], "ids": torch.ones(1).long(),
             "labels": torch.tensor([1.001, 2.003])}  # fmt: skip
    found = trainer._prepare_inputs(batch)
    types = [found["pixels"].dtype, found["nested"][0].dtype, found["ids"].dtype]
    assert types == [torch.bfloat16, torch.bfloat16, torch.int64]
    assert found["labels"].dtype is torch.float32
    assert torch.equal(found["labels"], batch["labels"])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"optim": "adamw_bnb_8bit"}, "state_dtype"),
        ({"optim": "galore_adamw"}, "optim: expected one of adamw_torch"),
        ({"fp16_full_eval": True}, "fp16_full_eval"),
        ({"torch_compile": True}, "torch_compile"),
        ({"auto_find_batch_size": True}, "auto_find_batch_size"),
        ({"offload": {"gradient_clipping": 1.0}}, "max_grad_norm"),
        ({"offload": {"lr": 1.0}}, "learning_rate"),
        ({"offload": {"resume": "auto"}}, "resume_from_checkpoint"),
        ({"offload": {"host_memry": 1}}, "host_memory"),
        (
            {"save_only_model": True, "load_best_model_at_end": True, "eval_strategy": "epoch",
             "save_strategy": "epoch"},
            "save_only_model",
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_honoured_is_an_error_that_says_so(
    make: Any, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        make(**copy.deepcopy(changes)).train()


def test_a_checkpoint_of_another_trainer_is_refused_and_its_weights_are_taken(
    make: Any, tmp_path: Path
) -> None:
    memory = plain(tmp_path / "memory", save_strategy="epoch", save_total_limit=1)
    memory.train()
    (folder,) = (tmp_path / "memory").glob("checkpoint-*")
    with pytest.raises(StateError, match="without the engine"):
        make().train(resume_from_checkpoint=str(folder))
    (folder / "optimizer.pt").unlink()
    trainer = make(num_train_epochs=2)
    trainer.train(resume_from_checkpoint=str(folder))  # all steps are done: nothing but the weights
    weights = dict(memory.model.named_parameters())
    assert_same_masters(masters(trainer), {n: weights[n].detach() for n in weights})
