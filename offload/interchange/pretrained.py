"""Load a model from safetensors without holding its weights in memory.

    construct      parameters on the meta device, buffers real        nothing is drawn or allocated
    match          names in the files <-> parameters                  all found, or an error
    bind           each parameter becomes a mapped view of its file   bf16 and fp32, as they are
                   float16, float64 -> fp32, through a backing file

An engine made of such a model streams the files into its store.  A checkpoint whose names or
shapes transformers converts while loading (fused experts, old names) is loaded by transformers
itself, each tensor moving to a backing file when it is bound (`on_disk_init`).
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as registration
from torch.overrides import TorchFunctionMode

from offload.errors import ConfigError, StateError, StoreError
from offload.interchange.backing import BackingFile
from offload.interchange.notes import all_names
from offload.interchange.on_disk import on_disk_init
from offload.interchange.safetensors_file import SafetensorsFile
from offload.runtime.source import FilePlace, LoadedModel

_LOG = logging.getLogger(__name__)
_AS_THEY_ARE = (torch.float32, torch.bfloat16)
_TO_FLOAT32 = (torch.float16, torch.float64)
_PIECE_ELEMS = 1 << 20
_FILLS = {
    *("normal_", "uniform_", "zero_", "fill_", "copy_", "random_", "bernoulli_", "exponential_"),
    *("cauchy_", "log_normal_", "geometric_", "add_", "sub_", "mul_", "div_", "clamp_", "erfinv_"),
    *(name for name in dir(nn.init) if name.endswith("_") and not name.startswith("_")),
}
_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"


def load_pretrained(
    folder: Path, *, scratch: Path, make: Callable[[], nn.Module] | None = None
) -> nn.Module:
    """The model in `folder`, its weights views of files.  `scratch`: for what must be converted.

    `make` builds the module (None: the architecture that config.json names, with transformers).
    Raises ConfigError, StateError or StoreError that names what is missing.
    """
    return open_pretrained(folder, scratch=scratch, make=make).module


def open_pretrained(
    folder: Path, *, scratch: Path, make: Callable[[], nn.Module] | None = None
) -> LoadedModel:
    """`load_pretrained`, and where the files hold the weights: for an engine that is made next."""
    weights = WeightFiles.open(folder)
    model, kind = _construct(folder, make)
    places, problems = match(model, weights)
    if problems:
        if kind is None:
            raise StateError(f"{folder}: {problems[0]} ({len(problems)} in all).")
        _LOG.info("%s: %s; transformers converts it while loading.", folder, problems[0])
        half = any(weights.dtype(name) in _TO_FLOAT32 for name in weights.names)
        converted = _load_converted(folder, kind, scratch, torch.float32 if half else "auto")
        return LoadedModel(converted, {})
    bind(model, places, weights, scratch=scratch)
    if kind is not None:
        _finish_hugging_face(model, folder)
    return LoadedModel(model, weights.places(model))


def make_empty(
    folder: Path, *, scratch: Path, make: Callable[[], nn.Module] | None = None
) -> nn.Module:
    """The model that `folder`'s config.json, or `make`, tells, with zeros in a backing file."""
    model, kind = _construct(folder, make)
    with contextlib.closing(BackingFile(scratch)) as backing:
        _replace(
            model,
            lambda _, old: backing.empty(old.numel(), torch.float32).view(old.shape),
        )
    if kind is not None:
        _finish_hugging_face(model, folder)
    return model


def _construct(
    folder: Path, make: Callable[[], nn.Module] | None
) -> tuple[nn.Module, Any]:  # fmt: skip
    """The module without values, and its class where transformers has it."""
    if make is not None:
        with on_meta():
            return make(), None
    kind = architecture(folder)
    with on_meta():
        return kind(_config(folder)), kind


def construct(folder: Path, kind: Any) -> nn.Module:
    """The module of class `kind` that `folder`'s config.json tells, its weights tied and on the
    meta device; reads no weights.
    """
    config = _config(folder)
    with on_meta():
        model: Any = kind(config)
        model.tie_weights()
    made: nn.Module = model
    return made


class WeightFiles:
    """The safetensors files of one model, by tensor name."""

    def __init__(self, files: Mapping[str, SafetensorsFile]) -> None:
        self._files = dict(files)

    @classmethod
    def open(cls, folder: Path) -> WeightFiles:
        """Open what the index names, or the single file; raises StoreError where there is none."""
        if (folder / _INDEX).is_file():
            places = json.loads((folder / _INDEX).read_text())["weight_map"]
            opened = {name: _open(folder / name) for name in sorted(set(places.values()))}
            missing = [name for name, file in places.items() if name not in opened[file].entries]
            if missing:
                raise StoreError(
                    f"{folder / _INDEX}: expected tensor {missing[0]!r} in"
                    f" {places[missing[0]]}, got none."
                )
            return cls({name: opened[file] for name, file in places.items()})
        if not (folder / _SINGLE).is_file():
            raise StoreError(
                f"{folder}: expected {_SINGLE} or {_INDEX} there, got neither."
                " Save the model with save_pretrained, or name its folder."
            )
        file = _open(folder / _SINGLE)
        return cls(dict.fromkeys(file.entries, file))

    @property
    def names(self) -> list[str]:
        return list(self._files)

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def shape(self, name: str) -> tuple[int, ...]:
        return self._files[name].entries[name].shape

    def dtype(self, name: str) -> torch.dtype:
        return self._files[name].entries[name].dtype

    def tensor(self, name: str) -> torch.Tensor:
        """A view of the file; writing to it changes memory only."""
        return self._files[name].tensor(name)

    def places(self, model: nn.Module) -> dict[str, FilePlace]:
        """Where the files hold the parameters that are views of them."""
        files = set(self._files.values())
        return {
            name: place
            for name, parameter in model.named_parameters()
            for file in files
            if (place := file.place(parameter)) is not None
        }


def _open(path: Path) -> SafetensorsFile:
    try:
        return SafetensorsFile(path)
    except OSError as error:
        if isinstance(error, StoreError):
            raise
        raise StoreError(f"{path}: cannot be read: {error.strerror}.") from error


@contextlib.contextmanager
def on_meta() -> Iterator[None]:
    """Parameters of modules made in the block have a shape and a type, and no values."""

    def drop(module: nn.Module, name: str, parameter: nn.Parameter) -> nn.Parameter | None:
        if parameter.is_meta:
            return None
        empty = type(parameter)(parameter.detach().to("meta"), parameter.requires_grad)
        empty.__dict__.update(parameter.__dict__)
        return empty

    # The annotation of the hook says that it returns nothing; its documentation, a replacement.
    replace: Callable[..., Any] = drop
    handle = registration.register_module_parameter_registration_hook(replace)
    try:
        with _SkipInitialisation():
            yield
    finally:
        handle.remove()


class _SkipInitialisation(TorchFunctionMode):
    """Filling a tensor that has no values does nothing.

    torch would do nothing too, after importing its compiler: 4 s and 100 MB.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:  # fmt: skip
        kwargs = kwargs or {}
        if getattr(func, "__name__", "") in _FILLS:
            target = args[0] if args else kwargs.get("tensor")
            if isinstance(target, torch.Tensor) and target.is_meta:
                return target
        return func(*args, **kwargs)


def match(model: nn.Module, weights: WeightFiles) -> tuple[dict[str, str], list[str]]:
    """Name in the model -> name in the files, for parameters and buffers; and what is missing."""
    prefix = getattr(model, "base_model_prefix", "")
    found: dict[str, str] = {}
    problems: list[str] = []
    for name, names, tensor in _tensors(model):
        candidates = [other for own in names for other in _spellings(own, prefix)]
        key = next((other for other in candidates if other in weights), None)
        if key is not None and weights.shape(key) == tuple(tensor.shape):
            found[name] = key
        elif key is not None:
            problems.append(
                f"tensor {name!r}: expected shape {list(tensor.shape)}, got"
                f" {list(weights.shape(key))}"
            )
        elif isinstance(tensor, nn.Parameter):
            problems.append(f"parameter {name!r}: expected it in the files, got none")
    left = sorted(set(weights.names) - set(found.values()))
    if left and not problems:
        _LOG.warning("%d tensors have no place in the model and are left: %s", len(left), left[:4])
    return found, problems


def _tensors(model: nn.Module) -> Iterator[tuple[str, list[str], torch.Tensor]]:
    """Each parameter and persistent buffer once: its first name, all its names, itself."""
    names = all_names(model)
    for name, parameter in model.named_parameters():
        yield name, names[name], parameter
    transient = {
        f"{path}.{name}" if path else name
        for path, module in model.named_modules()
        for name in module._non_persistent_buffers_set
    }
    for name, buffer in model.named_buffers():
        if name not in transient:
            yield name, [name], buffer


def _spellings(name: str, prefix: str) -> list[str]:
    """As it is, and with the base model's prefix added or left out."""
    found = [name]
    if prefix:
        found.append(f"{prefix}.{name}")
        if name.startswith(f"{prefix}."):
            found.append(name.removeprefix(f"{prefix}."))
    return found


def bind(
    model: nn.Module, places: Mapping[str, str], weights: WeightFiles, *, scratch: Path
) -> None:
    """Give parameters and buffers their values; ties between parameters stay."""
    with contextlib.closing(BackingFile(scratch)) as backing:
        _replace(model, lambda name, _: _readable(weights, places[name], backing))
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            if name in places:
                buffer.copy_(weights.tensor(places[name]))


def _replace(
    model: nn.Module, values: Callable[[str, nn.Parameter], torch.Tensor]
) -> None:  # fmt: skip
    """Put a parameter with `values(name, old)` in the place of each; ties stay."""
    new: dict[int, nn.Parameter] = {}
    for name, parameter in model.named_parameters():
        bound = nn.Parameter(values(name, parameter), requires_grad=parameter.requires_grad)
        bound.__dict__.update(parameter.__dict__)
        new[id(parameter)] = bound
    for module in model.modules():
        for name, old in list(module._parameters.items()):
            if old is not None:
                setattr(module, name, new[id(old)])


def _readable(weights: WeightFiles, name: str, backing: BackingFile) -> torch.Tensor:
    tensor = weights.tensor(name)
    if tensor.dtype in _AS_THEY_ARE:
        return tensor
    if tensor.dtype not in _TO_FLOAT32:
        raise ConfigError(
            f"tensor {name!r}: expected float32, bfloat16, float16 or float64 weights, got"
            f" {tensor.dtype}. Quantized models cannot be trained: load the original."
        )
    flat, source = backing.empty(tensor.numel(), torch.float32), tensor.view(-1)
    for start in range(0, len(flat), _PIECE_ELEMS):
        flat[start : start + _PIECE_ELEMS] = source[start : start + _PIECE_ELEMS]
    return flat.view(tensor.shape)


# --- transformers, an extra


def architecture(folder: Path) -> Any:
    """The class that `folder`'s config.json names; raises ConfigError without transformers."""
    path = folder / "config.json"
    if not path.is_file():
        raise ConfigError(
            f"{folder}: expected a config.json that names the architecture, got none."
            " Pass make=, a function that builds the module."
        )
    names = json.loads(path.read_text()).get("architectures") or [None]
    found = getattr(_transformers(), names[0], None) if names[0] else None
    if found is None:
        raise ConfigError(
            f"{path}: expected an architecture that transformers has, got {names[0]}."
            " Pass make=, a function that builds the module."
        )
    return found


def _config(folder: Path) -> Any:
    return _transformers().AutoConfig.from_pretrained(folder, local_files_only=True)


def _transformers() -> Any:
    try:
        import transformers
    except ImportError as error:
        raise ConfigError(
            "loading by config.json needs transformers, which is not installed."
            " Install offload-engine[hf], or pass make=, a function that builds the module."
        ) from error
    return transformers


def _finish_hugging_face(model: Any, folder: Path) -> None:
    model.tie_weights()
    if (folder / "generation_config.json").is_file() and model.can_generate():
        kind = _transformers().GenerationConfig
        model.generation_config = kind.from_pretrained(folder, local_files_only=True)


def _load_converted(
    folder: Path, kind: Any, scratch: Path, dtype: torch.dtype | str
) -> nn.Module:  # fmt: skip
    """transformers' own loading, one tensor at a time."""
    before = os.environ.get("HF_DEACTIVATE_ASYNC_LOAD")
    os.environ["HF_DEACTIVATE_ASYNC_LOAD"] = "1"  # its threads would read far ahead, into memory
    try:
        with on_disk_init(scratch):
            model: nn.Module = kind.from_pretrained(folder, dtype=dtype, local_files_only=True)
    finally:
        if before is None:
            del os.environ["HF_DEACTIVATE_ASYNC_LOAD"]
        else:
            os.environ["HF_DEACTIVATE_ASYNC_LOAD"] = before
    return model.train()
