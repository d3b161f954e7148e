"""Loading from safetensors: every architecture, every type, exact values, ties and buffers."""

import json
import os
import struct

import models
import pytest
import torch
from safetensors.torch import save_file, save_model
from torch import nn

from offload import OffloadEngine
from offload.errors import ConfigError, OffloadError, StateError, StoreCorrupt, StoreError
from offload.interchange import on_disk
from offload.interchange.pretrained import load_pretrained, open_pretrained
from offload.interchange.safetensors_file import SafetensorsFile
from offload.runtime.source import LEAST_DIRECT_ELEMS

SMALL = {"vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
         "num_attention_heads": 4}  # fmt: skip
GROUPED = SMALL | {"num_key_value_heads": 2, "head_dim": 16}
HUGGING_FACE = {
    "Llama": SMALL | {"tie_word_embeddings": True},
    "GPT2": {"vocab_size": 97, "n_embd": 64, "n_layer": 2, "n_head": 4},
    "T5": {
        "vocab_size": 97,
        "d_model": 64,
        "d_kv": 16,
        "d_ff": 96,
        "num_layers": 2,
        "num_heads": 4,
    },
    "Bert": SMALL,
    "Gemma2": GROUPED,
    "Mixtral": SMALL | {"num_key_value_heads": 4, "num_local_experts": 4},
    "Qwen3Moe": GROUPED | {"moe_intermediate_size": 32, "num_experts": 4},
}
CLASSES = {"GPT2": "GPT2LMHeadModel", "T5": "T5ForConditionalGeneration", "Bert": "BertForMaskedLM"}


@pytest.fixture
def transformers(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    found = pytest.importorskip("transformers")
    found.logging.set_verbosity_error()
    found.logging.disable_progress_bar()
    return found


def make_hugging_face(transformers, family: str) -> nn.Module:
    kind = getattr(transformers, CLASSES.get(family, f"{family}ForCausalLM"))
    config = getattr(transformers, f"{family}Config")(**HUGGING_FACE[family])
    torch.manual_seed(0)
    return kind(config)


def values(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def open_engine(model, folder, **settings) -> OffloadEngine:
    settings = {"param_persistence_threshold": 0, "compute_dtype": "float32"} | settings
    return OffloadEngine(model, nvme_path=folder, **settings)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", HUGGING_FACE)
def test_a_saved_model_is_loaded_with_every_bit(family, dtype, transformers, tmp_path):
    saved = make_hugging_face(transformers, family)
    buffers = {name: value.clone() for name, value in saved.named_buffers()}
    saved.to(dtype).save_pretrained(tmp_path / "saved")
    model = load_pretrained(tmp_path / "saved", scratch=tmp_path)
    loaded, expected = model.state_dict(), values(saved)
    assert loaded.keys() == expected.keys()
    # Parameters are of a type that an engine manages; float16 is contained in float32.
    wanted = torch.float32 if dtype is torch.float16 else dtype
    assert {parameter.dtype for parameter in model.parameters()} == {wanted}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        assert torch.equal(parameter, expected[name].to(wanted)), name
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, buffers[name]), name
    assert len(list(model.parameters())) == len(list(saved.parameters())), "ties"
    assert model.training


@pytest.mark.parametrize("family", ["Llama", "T5", "Mixtral"])
def test_what_an_engine_exports_is_what_from_pretrained_loads(family, transformers, tmp_path):
    saved = make_hugging_face(transformers, family)
    saved.save_pretrained(tmp_path / "saved", max_shard_size="100KB")
    settings = {"param_persistence_threshold": 0, "dtype": "float32", "nvme_path": tmp_path}
    with OffloadEngine.from_pretrained(tmp_path / "saved", **settings) as engine:
        engine.export(tmp_path / "out", max_shard_size="100KB")
    kind = type(saved)
    loaded, report = kind.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(report.values())
    expected = saved.state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in loaded.state_dict().items())
    assert loaded.dtype is torch.float32


def test_a_bf16_export_is_loaded_as_bf16(transformers, tmp_path):
    saved = make_hugging_face(transformers, "Llama")
    with open_engine(saved, tmp_path) as engine:
        engine.export(tmp_path / "out", dtype="bf16")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert loaded.dtype is torch.bfloat16
    assert type(loaded).__name__ == "LlamaForCausalLM"


def test_weights_of_the_base_model_alone_are_found_under_their_prefix(transformers, tmp_path):
    saved = make_hugging_face(transformers, "Llama")
    saved.save_pretrained(tmp_path)
    bare = {name.removeprefix("model."): value for name, value in values(saved).items()}
    del bare["lm_head.weight"]
    save_file(bare, tmp_path / "model.safetensors")
    model = load_pretrained(tmp_path, scratch=tmp_path)
    expected = values(saved)
    assert all(torch.equal(value, expected[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("family", HUGGING_FACE)
def test_a_model_made_on_disk_has_the_values_of_plain_construction(
    family, transformers, tmp_path, monkeypatch
):
    monkeypatch.setattr(on_disk, "LEAST_BYTES", 1)
    plain = make_hugging_face(transformers, family)
    with on_disk.on_disk_init(tmp_path):
        model = make_hugging_face(transformers, family)
    expected = values(plain)
    assert all(torch.equal(value, expected[name]) for name, value in model.state_dict().items())
    assert len(list(model.parameters())) == len(list(plain.parameters())), "ties"


# --- models of one's own


def save(model: nn.Module, folder) -> None:
    folder.mkdir(exist_ok=True)
    save_model(model, str(folder / "model.safetensors"))


def make() -> nn.Module:
    return models.Decoder(tied=True)


def test_training_from_a_loaded_model_equals_training_from_the_model_itself(tmp_path):
    saved = models.build(models.Decoder)
    save(saved, tmp_path / "saved")
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    loaded = load_pretrained(tmp_path / "saved", scratch=tmp_path, make=models.Decoder)
    with open_engine(loaded, tmp_path / "a") as one, open_engine(saved, tmp_path / "b") as other:
        for index in range(2):
            for engine in (one, other):
                engine.backward(engine(*models.batch(index)))
                engine.step()
        for name, _ in saved.named_parameters():
            assert torch.equal(one.full_fp32_param(name), other.full_fp32_param(name))


def test_constructing_to_load_draws_no_random_numbers_and_leaves_no_hook(tmp_path):
    save(models.build(models.Decoder, tied=True), tmp_path)
    load_pretrained(tmp_path, scratch=tmp_path, make=make)
    assert not make().embed.weight.is_meta


def test_writing_to_a_loaded_model_does_not_change_the_file(tmp_path):
    save(models.build(models.Decoder, tied=True), tmp_path)
    before = (tmp_path / "model.safetensors").read_bytes()
    model = load_pretrained(tmp_path, scratch=tmp_path, make=make)
    with torch.no_grad():
        model.embed.weight.zero_()
    assert not model.head.weight.any()
    assert (tmp_path / "model.safetensors").read_bytes() == before


def test_recurrent_modules_see_their_loaded_weights(tmp_path):
    torch.manual_seed(0)
    saved = nn.LSTM(8, 8)
    save(saved, tmp_path)
    model = load_pretrained(tmp_path, scratch=tmp_path, make=lambda: nn.LSTM(8, 8))
    x = torch.randn(3, 1, 8)
    assert torch.equal(model(x)[0], saved(x)[0])


def test_buffers_are_loaded(tmp_path):
    saved = nn.BatchNorm1d(5)
    saved.running_mean += 3
    save(saved, tmp_path)
    model = load_pretrained(tmp_path, scratch=tmp_path, make=lambda: nn.BatchNorm1d(5))
    assert torch.equal(model.running_mean, saved.running_mean)


def test_a_missing_tensor_and_a_wrong_shape_are_named(tmp_path):
    save(models.build(models.Decoder, num_blocks=2), tmp_path)
    with pytest.raises(StateError, match=r"'blocks\.2\.norm_1\.weight'.*in all"):
        load_pretrained(tmp_path, scratch=tmp_path, make=models.Decoder)
    save(models.build(models.Decoder, vocab=50), tmp_path)
    with pytest.raises(StateError, match=r"'embed\.weight': expected shape \[61, 48\]"):
        load_pretrained(tmp_path, scratch=tmp_path, make=models.Decoder)


def test_tensors_without_a_place_are_told_and_left(tmp_path, caplog):
    save(models.build(models.Decoder, num_blocks=4), tmp_path)
    load_pretrained(tmp_path, scratch=tmp_path, make=models.Decoder)
    assert "blocks.3" in caplog.text


def test_quantized_weights_are_refused(tmp_path):
    save_file({"weight": torch.zeros(4, 4, dtype=torch.int8)}, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match="int8"):
        load_pretrained(tmp_path, scratch=tmp_path, make=lambda: nn.Linear(4, 4, bias=False))


def test_a_folder_without_a_model_is_named(tmp_path):
    with pytest.raises(StoreError, match="safetensors"):
        load_pretrained(tmp_path, scratch=tmp_path, make=make)
    save(models.build(models.Decoder), tmp_path)
    with pytest.raises(ConfigError, match=r"config\.json"):
        load_pretrained(tmp_path, scratch=tmp_path)


# --- files


def write(path, header: object, data: bytes = b"") -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def entry(start: int, stop: int, shape=(2,), dtype="F32") -> dict[str, object]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [start, stop]}


@pytest.mark.parametrize(
    ("header", "data", "message"),
    [
        (b"not json", b"", "JSON"),
        ([1, 2], b"", "JSON object"),
        ({"a": {"dtype": "F32"}}, b"", "'a'.*malformed"),
        ({"a": entry(0, 8)}, b"\0" * 7, "cut"),
        ({"a": entry(0, 12)}, b"\0" * 12, "expected 8 bytes"),
        ({"a": entry(-8, 0)}, b"\0" * 8, "offsets"),
        ({"a": entry(0, 8, (-2, -1))}, b"\0" * 8, "'a'"),
        ({"a": entry(0, 8, dtype="F7")}, b"\0" * 8, "F7"),
    ],
)
def test_a_malformed_file_is_refused(header, data, message, tmp_path):
    path = tmp_path / "model.safetensors"
    write(path, header, data)
    with pytest.raises(OffloadError, match=message):
        SafetensorsFile(path)


@pytest.mark.parametrize("content", [b"", b"abc", struct.pack("<Q", 1 << 40)])
def test_a_file_of_another_format_is_refused(content, tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(StoreCorrupt, match="safetensors"):
        SafetensorsFile(path)


def test_tensors_that_are_not_aligned_in_the_file_are_read(tmp_path):
    path = tmp_path / "model.safetensors"
    value = torch.tensor([1.5, -2.0])
    write(path, {"b": entry(0, 1, (1,), "U8"), "a": entry(1, 9)}, b"\7" + value.numpy().tobytes())
    file = SafetensorsFile(path)
    assert torch.equal(file.tensor("a"), value)
    assert file.tensor("b").item() == 7


def test_an_index_that_names_a_tensor_its_file_has_not_is_refused(tmp_path):
    save(models.build(models.Decoder), tmp_path)
    os.rename(tmp_path / "model.safetensors", tmp_path / "part.safetensors")
    index = {"weight_map": {"embed.weight": "part.safetensors", "gone": "part.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(StoreError, match="'gone'"):
        load_pretrained(tmp_path, scratch=tmp_path, make=models.Decoder)


class Stack(nn.Module):
    """Tensors of odd sizes, some of which are long enough to be read directly."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList([nn.Linear(n, 257) for n in (301, 33, 129, 8, 511)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("chunk_elems", [16384, 40960])
def test_weights_are_read_from_the_files_and_not_through_their_mappings(
    dtype, chunk_elems, tmp_path
):
    torch.manual_seed(0)
    saved = Stack().to(dtype)
    save_file(saved.state_dict(), tmp_path / "model.safetensors")
    loaded = open_pretrained(tmp_path, scratch=tmp_path, make=Stack)
    assert set(loaded.places) == set(dict(saved.named_parameters()))
    changed = [n for n, p in saved.named_parameters() if p.numel() >= LEAST_DIRECT_ELEMS]
    assert 0 < len(changed) < len(loaded.places)
    with torch.no_grad():
        for name in changed:  # in memory, in pages of its own: nothing below may see it
            loaded.module.get_parameter(name).fill_(7.0)
    with open_engine(loaded, tmp_path, chunk_elems=chunk_elems, host_memory="8MiB") as engine:
        for name, parameter in saved.named_parameters():
            assert torch.equal(engine.full_fp32_param(name), parameter.float()), name


def test_a_file_that_is_cut_after_it_was_opened_is_named(tmp_path):
    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(512, 512, bias=False))

    save_file(make().state_dict(), tmp_path / "model.safetensors")
    loaded = open_pretrained(tmp_path, scratch=tmp_path, make=make)
    os.truncate(tmp_path / "model.safetensors", 1 << 19)
    drive = tmp_path / "drive"
    drive.mkdir()
    with pytest.raises(StoreError, match=r"(?s)model.safetensors.*expected.*load again"):
        open_engine(loaded, drive)
    assert not list(drive.iterdir())
