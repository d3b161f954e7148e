"""Each key is honoured, mapped or reported; unknown and contradicting ones are errors."""

import pytest
from every_key import every_key, nested

from offload.deepspeed_config.auto import disagreements, fill_auto, sizes_for
from offload.deepspeed_config.check import flatten
from offload.deepspeed_config.keys import KEYS, OLD_NAMES
from offload.deepspeed_config.recipe import recipe_of
from offload.errors import ConfigError

EVERY_KEY = every_key()


def test_the_list_of_keys_and_the_table_are_the_same():
    assert set(EVERY_KEY) == set(KEYS)


@pytest.mark.parametrize("path", EVERY_KEY)
def test_a_key_without_effect_is_named_in_one_line(path):
    recipe = recipe_of(nested(path, EVERY_KEY[path]))
    lines = [line for line in recipe.notes.values() if path in line and "without effect" in line]
    assert len(lines) == (not KEYS[path].used)


@pytest.mark.parametrize(("old", "new"), OLD_NAMES.items())
def test_an_old_name_is_the_new_one(old, new):
    value = {"enabled": True} if old == "bfloat16" else EVERY_KEY[new]
    assert recipe_of(nested(old, value)).settings == recipe_of(nested(new, value)).settings
    assert flatten(nested(old, value))[0] == flatten(nested(new, value))[0]


def test_one_setting_under_two_names_is_refused():
    zero = {"stage3_prefetch_bucket_size": 1, "prefetch_bucket_size": 1}
    with pytest.raises(ConfigError, match=r"are one setting: expected it once"):
        recipe_of({"zero_optimization": zero})


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ({"zero_optimisation": {}}, "unknown key 'zero_optimisation'. Did you mean 'zero_opti"),
        ({"zero_optimization": {"offload_params": {}}}, "Did you mean 'zero_optimization.offl"),
        ({"zero_optimization": {"offload_param": {"path": "/a"}}}, "Did you mean '.*nvme_path'"),
        ({"stage": 3}, "Did you mean 'zero_optimization.stage'"),
        ({"fp16": {"loss_scale_windw": 1}}, "Did you mean 'fp16.loss_scale_window'"),
        ({"quux": 1}, "unknown key 'quux'. Known there: activation_checkpointing, aio,"),
        ({"optimizer": {"type": "Adam", "params": {"beta": 1}}}, "no setting 'beta'. Did you mean"),
        ({"train_batch_size": "8"}, "train_batch_size: expected an integer, got '8'"),
        ({"train_batch_size": 8.5}, "train_batch_size: expected an integer, got 8.5"),
        ({"train_batch_size": float("nan")}, "train_batch_size: expected an integer, got nan"),
        ({"gradient_clipping": float("nan")}, "gradient_clipping: expected a number, got nan"),
        ({"checkpoint": {"tag_validation": "No"}}, "expected one of ignore, warn, fail, got 'No'"),
        ({"train_batch_size": 0}, "train_batch_size: expected at least 1, got 0"),
        ({"fp16": {"enabled": "yes"}}, "fp16.enabled: expected true or false, got 'yes'"),
        ({"fp16": True}, "fp16: expected an object, got True"),
        ({"zero_optimization": {"offload_param": {"device": "disk"}}}, "one of none, cpu, nvme"),
        ({"zero_optimization": {"stage": 4}}, "expected 0, 1, 2 or 3, got 4"),
        ({"fp16": {"enabled": True}, "bf16": {"enabled": True}}, "got both"),
        (
            {"bf16": {"enabled": True}, "data_types": {"param_dtype": "fp16"}},
            "expected bfloat16 beside bf16.enabled, got float16",
        ),
        ({"optimizer": {"type": "Lamb"}}, "Lamb is not available here"),
        ({"optimizer": {"type": "AdamW", "params": {"lr": "1e-4"}}}, "Remove the quotes"),
        (
            {"optimizer": {"type": "Adam", "params": {"max_grad_norm": 1}}, "gradient_clipping": 2},
            "max_grad_norm: expected 2.0, the value of gradient_clipping, got 1",
        ),
        (
            {"zero_optimization": {"cpu_offload": True, "offload_optimizer": {"device": "nvme"}}},
            "cpu_offload: expected no such key beside .*offload_optimizer.device = 'nvme', got tr",
        ),
        ({"zero_optimization": {"sub_group_size": 0}}, "sub_group_size: expected at least 1"),
        ({"zero_optimization": {"max_live_parameters": -1}}, "expected at least 0, got -1"),
    ],
)
def test_a_mistake_names_key_and_way_out(config, told):
    with pytest.raises(ConfigError, match=told):
        recipe_of(config)


def test_auto_and_null_count_as_absent():
    config = {
        "train_batch_size": "auto", "gradient_clipping": "auto", "bf16": {"enabled": "auto"},
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto"}},
        "zero_optimization": {"offload_param": None, "reduce_bucket_size": "auto"},
    }  # fmt: skip
    recipe = recipe_of(config)
    bare = recipe_of({"optimizer": {"type": "AdamW"}})
    assert recipe.settings == bare.settings
    assert recipe.optimizer == bare.optimizer
    assert recipe.notes == bare.notes


def test_a_section_that_is_switched_off_asks_for_nothing():
    assert "flops" not in str(recipe_of({"flops_profiler": {"enabled": False}}).notes)
    assert "flops" in str(recipe_of({"flops_profiler": {"enabled": True}}).notes)


def test_params_without_a_type_are_told_of():
    notes = recipe_of({"optimizer": {"params": {"lr": 1}}, "scheduler": {"params": {}}}).notes
    assert "optimizer.params without optimizer.type says nothing" in notes.values()
    assert "scheduler.params without scheduler.type says nothing" in notes.values()


def test_floats_for_integers_and_a_bare_stage_are_read():
    zero = {
        "sub_group_size": 8192.0,
        "stage3_max_live_parameters": 1e9,
        "prefetch_bucket_size": 0.9,
    }
    recipe = recipe_of({"zero_optimization": zero, "steps_per_print": float("inf")})
    assert recipe.settings["chunk_elems"] == 8192
    assert recipe.settings["max_live_parameters"] == 10**9
    assert recipe.settings["prefetch_bucket_size"] == 0
    assert recipe.report_every is None
    assert "stage 1 becomes" in str(recipe_of({"zero_optimization": True}).notes)


class TestBatchNumbers:
    def test_what_is_missing_is_derived(self):
        def settled(**numbers):
            batch = recipe_of(numbers).batch()
            return batch.train, batch.micro, batch.steps

        train, micro = "train_batch_size", "train_micro_batch_size_per_gpu"
        steps = "gradient_accumulation_steps"
        assert settled(**{train: 24, micro: 4, steps: 6}) == (24, 4, 6)
        assert settled(**{train: 24, micro: 4}) == (24, 4, 6)
        assert settled(**{train: 24, steps: 6}) == (24, 4, 6)
        assert settled(**{micro: 4, steps: 6}) == (24, 4, 6)
        assert settled(**{train: 24}) == (24, 24, 1)
        assert settled(**{micro: 4}) == (4, 4, 1)
        assert settled(**{steps: 6}) == (None, None, 6)
        assert settled() == (None, None, 1)

    def test_numbers_that_disagree_are_told_with_their_arithmetic(self):
        numbers = {"train_batch_size": 32, "train_micro_batch_size_per_gpu": 4}
        told = (
            r"train_batch_size: expected 4 \(train_micro_batch_size_per_gpu\) x 2"
            r" \(gradient_accumulation_steps\) x 1 \(processes\) = 8, got 32\. Set"
            r" gradient_accumulation_steps to 8 or train_batch_size to 8, or leave one"
        )
        with pytest.raises(ConfigError, match=told):
            recipe_of({**numbers, "gradient_accumulation_steps": 2})
        with pytest.raises(ConfigError, match=told):
            recipe_of(numbers).batch(2)

    def test_a_quotient_that_is_not_whole_is_told(self):
        with pytest.raises(
            ConfigError, match=r"got 30 / 4 = 7.5. Set train_batch_size to 28 or 32"
        ):
            recipe_of({"train_batch_size": 30, "train_micro_batch_size_per_gpu": 4})


def test_values_fill_what_is_auto_and_nothing_else():
    config = {
        "train_micro_batch_size_per_gpu": "auto", "gradient_clipping": 0.5,
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto"}},
        "zero_optimization": {
            "stage3_prefetch_bucket_size": "auto", "reduce_bucket_size": "auto",
        },
    }  # fmt: skip
    values = {
        "train_micro_batch_size_per_gpu": 4, "gradient_clipping": 1.0, "bf16.enabled": True,
        "optimizer.params.lr": 2e-4, **sizes_for(100),
    }  # fmt: skip
    assert fill_auto(config, values) == {
        "train_micro_batch_size_per_gpu": 4, "gradient_clipping": 0.5,
        "optimizer": {"type": "AdamW", "params": {"lr": 2e-4, "weight_decay": "auto"}},
        "zero_optimization": {"stage3_prefetch_bucket_size": 9000, "reduce_bucket_size": 10000},
    }  # fmt: skip
    assert config["train_micro_batch_size_per_gpu"] == "auto"
    assert disagreements(config, values) == {"gradient_clipping": (0.5, 1.0)}
