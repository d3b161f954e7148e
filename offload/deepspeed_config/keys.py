"""Every key of a DeepSpeed file, one row each: its kind of value, and what it does here.

    USED      translated (recipe.py, hints.py, optimizers.py); a test shows what it changes
    a reason  accepted, told once: the key has no effect here, and why

Keys are dotted paths.  For any of them null and "auto" count as absent.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

USED = ""
ALONE = "one process exchanges nothing"
PLANNED = "the plan decides it from the budgets"
ALWAYS = "it is always so here"
GPU_ONLY = "it tunes what DeepSpeed does on a GPU"
ELSEWHERE = "engine.metrics and metrics_path= tell it"
MISSING = "it is not available here"


@dataclass(frozen=True)
class Key:
    """`kind`: int, float, bool, text, any (contents unchecked), or words joined by "|"."""

    kind: str
    effect: str = USED

    @property
    def used(self) -> bool:
        return self.effect == USED


def _section(path: str, **keys: str | tuple[str, str]) -> dict[str, Key]:
    prefix = f"{path}." if path else ""
    return {
        prefix + name: Key(row) if isinstance(row, str) else Key(*row) for name, row in keys.items()
    }


_OFFLOAD_DEVICES = "none|cpu|nvme"
_TYPES = "fp32|fp16|bf16|float32|float16|bfloat16|torch.float32|torch.float16|torch.bfloat16"

KEYS: Mapping[str, Key] = {
    **_section(
        "",
        train_batch_size="int",
        train_micro_batch_size_per_gpu="int",
        gradient_accumulation_steps="int",
        managed_gradient_accumulation="bool",
        steps_per_print="int",
        dump_state="bool",
        gradient_clipping="float",
        prescale_gradients=("bool", ALONE),
        gradient_predivide_factor=("float", ALONE),
        gradient_allreduce_op=("mean|sum", ALONE),
        communication_data_type=("text", ALONE),
        seq_parallel_communication_data_type=("text", ALONE),
        sparse_gradients=("bool", ALONE),
        disable_allgather=("bool", ALONE),
        zero_allow_untested_optimizer=("bool", "any torch optimizer works"),
        zero_force_ds_cpu_optimizer=("bool", "any torch optimizer works"),
        amp=("any", "NVIDIA apex is not used; take fp16, bf16 or torch_autocast"),
        activation_checkpointing=("any", "torch.utils.checkpoint works as it is"),
        wall_clock_breakdown="bool",
        memory_breakdown=("bool", ELSEWHERE),
        timers=("any", ELSEWHERE),
        flops_profiler=("any", MISSING),
        tensorboard=("any", ELSEWHERE + "; csv_monitor works"),
        wandb=("any", ELSEWHERE + "; csv_monitor works"),
        comet=("any", ELSEWHERE + "; csv_monitor works"),
        comms_logger=("any", ALONE),
        autotuning=("any", PLANNED),
        dataloader_drop_last="bool",
        compile=("any", "compile the model's blocks before wrapping"),
        pipeline=("any", ALONE),
        elasticity=("any", ALONE),
        tensor_parallel=("any", ALONE),
        expert_parallel=("any", ALONE),
        sequence_parallel_size=("int", ALONE),
        hybrid_engine=("any", MISSING),
        sparse_attention=("any", MISSING),
        compression_training=("any", MISSING),
        weight_quantization=("any", MISSING),
        data_efficiency=("any", MISSING),
        curriculum_learning=("any", MISSING),
        progressive_layer_drop=("any", MISSING),
        eigenvalue=("any", MISSING),
        quantize_training=("any", MISSING),
        nebula=("any", MISSING),
        datastates=("any", MISSING),
        graph_harvesting=("bool", GPU_ONLY),
        vocabulary_size=("int", MISSING),
        use_data_before_expert_parallelism=("bool", ALONE),
        log_level=("text", "use Python's logging"),
    ),
    **_section("optimizer", type="text", params="any", legacy_fusion=("bool", GPU_ONLY)),
    **_section("scheduler", type="text", params="any"),
    **_section(
        "fp16",
        enabled="bool",
        auto_cast="bool",
        loss_scale="float",
        initial_scale_power="int",
        loss_scale_window="int",
        hysteresis="int",
        consecutive_hysteresis="bool",
        min_loss_scale="float",
        fp16_master_weights_and_grads=("bool", "masters keep all 32 bits"),
    ),
    **_section(
        "bf16",
        enabled="bool",
        immediate_grad_update=("bool", PLANNED),
        check_grad_overflow=("bool", ALWAYS),
        bf16_master_weights_and_grads=("bool", "masters keep all 32 bits"),
        bf16_optimizer_states="bool",
    ),
    **_section(
        "torch_autocast",
        enabled="bool",
        dtype=_TYPES,
        lower_precision_safe_modules=("any", ALONE),
    ),
    **_section(
        "data_types",
        grad_accum_dtype=(_TYPES, "gradients of several micro-steps are summed in fp32"),
        param_dtype=_TYPES,
        buffer_dtype=("text", "buffers keep their type"),
    ),
    **_section(
        "aio",
        block_size="int",
        queue_depth="int",
        intra_op_parallelism=("int", "one thread of C keeps the queue full"),
        single_submit=("bool", "the queue decides it"),
        overlap_events=("bool", ALWAYS),
        use_gds=("bool", MISSING),
    ),
    **_section(
        "checkpoint",
        tag_validation=("ignore|warn|fail", ALONE),
        load_universal=("bool", "a checkpoint loads whatever the budgets and chunks"),
        use_node_local_storage=("bool", ALONE),
        parallel_write=("any", ALONE),
        checkpoint_serialization=("bool", "checkpoints are links and copies of the store"),
        writer=("any", "checkpoints are links and copies of the store"),
    ),
    **_section("csv_monitor", enabled="bool", output_path="text", job_name="text"),
    **_section(
        "zero_optimization",
        stage="int",
        contiguous_gradients=("bool", ALWAYS),
        reduce_scatter=("bool", ALONE),
        reduce_bucket_size=("int", ALONE),
        use_multi_rank_bucket_allreduce=("bool", ALONE),
        allgather_partitions=("bool", ALONE),
        allgather_bucket_size=("int", ALONE),
        overlap_comm=("bool", ALONE),
        load_from_fp32_weights=("bool", ALWAYS),
        elastic_checkpoint=("bool", ALONE),
        zenflow=("any", MISSING),
        sub_group_size="int",
        stage3_prefetch_bucket_size="int",
        stage3_param_persistence_threshold="int",
        stage3_model_persistence_threshold="int",
        stage3_max_live_parameters="int",
        stage3_max_reuse_distance="int",
        stage3_gather_16bit_weights_on_model_save=("bool", "saving streams, it never gathers"),
        stage3_module_granularity_threshold=("int", PLANNED),
        stage3_use_all_reduce_for_fetch_params=("bool", ALONE),
        stage3_allgather_sequential=("bool", ALONE),
        ignore_unused_parameters=("bool", ALWAYS),
        legacy_stage1=("bool", ALONE),
        round_robin_gradients=("bool", ALONE),
        zero_hpz_partition_size=("int", ALONE),
        zero_quantized_weights=("bool", ALONE),
        zero_quantized_nontrainable_weights=("bool", ALONE),
        zero_quantized_gradients=("bool", ALONE),
        zeropp_loco_param=("any", ALONE),
        mics_shard_size=("int", ALONE),
        mics_hierarchical_params_gather=("bool", ALONE),
        memory_efficient_linear=("bool", ALWAYS),
        pipeline_loading_checkpoint=("bool", PLANNED),
        override_module_apply=("bool", "parameters stay ordinary tensors"),
        log_trace_cache_warnings=("bool", ELSEWHERE),
        enable_sanity_checks=("bool", ALWAYS),
        save_muon_momentum_buffer_in_memory=("bool", PLANNED),
        leaf_module=("any", "every module may branch"),
        cpu_offload="bool",
        cpu_offload_param="bool",
        cpu_offload_use_pin_memory=("bool", ALWAYS),
    ),
    **_section(
        "zero_optimization.offload_param",
        device=_OFFLOAD_DEVICES,
        nvme_path="text",
        buffer_count=("int", PLANNED),
        buffer_size=("int", PLANNED),
        max_in_cpu=("int", "weights on nvme take no host memory but what is under way"),
        pin_memory=("bool", ALWAYS),
    ),
    **_section(
        "zero_optimization.offload_optimizer",
        device=_OFFLOAD_DEVICES,
        nvme_path="text",
        buffer_count=("int", PLANNED),
        buffer_size=("int", PLANNED),
        pin_memory=("bool", ALWAYS),
        pipeline_read=("bool", ALWAYS),
        pipeline_write=("bool", ALWAYS),
        fast_init=("bool", ALWAYS),
        ratio=("float", PLANNED),
        super_offload=("bool", MISSING),
        cpuadam_cores_perc=("float", "update_threads= sets it"),
    ),
}

# Older names, and those without "stage3_", which DeepSpeed accepts too.
OLD_NAMES: Mapping[str, str] = {
    "bfloat16": "bf16",
    "aio.thread_count": "aio.intra_op_parallelism",
    **dict.fromkeys(
        (
            "zero_optimization.stage3_gather_fp16_weights_on_model_save",
            "zero_optimization.gather_fp16_weights_on_model_save",
        ),
        "zero_optimization.stage3_gather_16bit_weights_on_model_save",
    ),
    **{
        f"zero_optimization.{name}": f"zero_optimization.stage3_{name}"
        for name in (
            "prefetch_bucket_size", "param_persistence_threshold", "model_persistence_threshold",
            "max_live_parameters", "max_reuse_distance", "gather_16bit_weights_on_model_save",
            "module_granularity_threshold",
        )
    },
}  # fmt: skip


def is_section(path: str) -> bool:
    """True where `path` has keys below it."""
    return any(key.startswith(path + ".") for key in KEYS)
