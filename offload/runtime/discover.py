"""Find the units of any `nn.Module`.

    repeated blocks (children of a ModuleList or
    Sequential that share a class)                      -> a unit each
    large parameters outside of them                    -> a unit per owning module
    tensors below the persistence threshold             -> `persistent`, on the device
    fp32 tensors of a model whose weights are mostly
    of 16 bits                                          -> stay fp32, in units of their own

A tied parameter belongs to its first owner; every other module that holds it fetches the owner's
unit.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from offload.partition.states import FP32_MOMENTS, StateTable
from offload.partition.unit import TensorSpec, Unit, lay_out
from offload.runtime.eligible import divide

PERSISTENT = "persistent"
_CONTAINERS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)


@dataclass(frozen=True)
class Discovery:
    """The units of a model and the modules whose forward needs them."""

    units: tuple[Unit, ...]  # in named_parameters() order; index = position
    persistent: Unit | None  # index = len(units)
    parameters: dict[str, nn.Parameter]
    hooks: tuple[tuple[nn.Module, tuple[int, ...]], ...]  # module -> units present while it runs
    left_alone: tuple[str, ...]  # parameters that are not offloaded, with the reason


def discover(
    model: nn.Module, *, persistence_threshold: int, states: StateTable = FP32_MOMENTS,
    state_elems: Callable[[str, tuple[int, ...]], int] | None = None,
    most_persistent: int | None = None, trained: Collection[str] | None = None,
) -> Discovery:  # fmt: skip
    """Partition the parameters of `model`.

    Where `states` packs, vectors (norms, biases) and embeddings are plain.  `state_elems(name,
    shape)`: fp32 values of a trainable tensor's states, where `states` are of whole tensors.
    `most_persistent`: elements that small tensors may have together; the first ones count.
    `trained`: names of the parameters that have state; None: those with requires_grad.
    """
    parameters, left_alone = divide(model)
    roots = _block_names(model, persistence_threshold)
    fp32 = set() if states.weights.exact else _that_stay_fp32(parameters)
    owner: dict[int, str] = {}  # id(parameter) -> unit name
    groups: dict[str, list[TensorSpec]] = {}
    embeddings, holders = _embeddings(model), _holders(model)
    # Where some small tensors stay fp32, those that do not travel with their blocks.
    small_are_fp32 = any(parameters[name].numel() < persistence_threshold for name in fp32)
    for name, parameter in parameters.items():
        plain = states.packs and (parameter.dim() < 2 or id(parameter) in embeddings)
        shape = tuple(parameter.shape)
        trainable = parameter.requires_grad if trained is None else name in trained
        elems = state_elems(name, shape) if state_elems and trainable else 0
        spec = TensorSpec(
            name, shape, trainable, plain, elems, fp32=name in fp32, tied=holders[id(parameter)] > 1
        )
        key = _unit_name(name, roots)
        small = parameter.numel() < persistence_threshold and spec.fp32 is small_are_fp32
        if small and (most_persistent is None or parameter.numel() <= most_persistent):
            key = PERSISTENT
            most_persistent = most_persistent and most_persistent - parameter.numel()
        elif spec.fp32:
            key = f"{name.rpartition('.')[0]} (fp32)"
        owner[id(parameter)] = key
        groups.setdefault(key, []).append(spec)
    small_tensors = groups.pop(PERSISTENT, None)
    units = tuple(
        lay_out(name, index, tensors, states=states)
        for index, (name, tensors) in enumerate(groups.items())
    )
    persistent = None
    if small_tensors:
        persistent = lay_out(PERSISTENT, len(units), small_tensors, states=states)
    hooks = _hooks(model, owner, {unit.name: unit.index for unit in units})
    return Discovery(units, persistent, parameters, hooks, left_alone)


def _that_stay_fp32(parameters: Mapping[str, nn.Parameter]) -> set[str]:
    """Parameters kept in fp32 on purpose: the others, most of all elements, are of 16 bits."""
    fp32 = {name for name, p in parameters.items() if p.dtype is torch.float32}
    num_elems = sum(parameter.numel() for parameter in parameters.values())
    return fp32 if 2 * sum(parameters[name].numel() for name in fp32) < num_elems else set()


def _holders(model: nn.Module) -> Counter[int]:
    """How many modules have each parameter, by its identity."""
    return Counter(id(p) for module in model.modules() for p in module.parameters(recurse=False))


def _embeddings(model: nn.Module) -> set[int]:
    """Identities of the weights of embeddings: rows that few steps touch need a state of range."""
    kinds = (nn.Embedding, nn.EmbeddingBag)
    return {id(module.weight) for module in model.modules() if isinstance(module, kinds)}


def _block_names(model: nn.Module, least_elems: int) -> set[str]:
    """Paths of the repeated blocks: non-leaf children that share their class with a sibling."""
    found: set[str] = set()
    for path, module in model.named_modules():
        if not isinstance(module, _CONTAINERS):
            continue
        inner = {
            name: child
            for name, child in module.named_children()
            if any(True for _ in child.children())
            and sum(parameter.numel() for parameter in child.parameters()) >= max(1, least_elems)
        }
        classes = Counter(type(child) for child in inner.values())
        for name, child in inner.items():
            if classes[type(child)] > 1:
                found.add(f"{path}.{name}" if path else name)
    return found


def _unit_name(parameter: str, blocks: set[str]) -> str:
    """The nearest repeated block around a parameter, else its owner ("" is the root)."""
    path = owner = parameter.rpartition(".")[0]
    while path:
        if path in blocks:
            return path
        path = path.rpartition(".")[0]
    return owner


def _hooks(
    model: nn.Module, owner: dict[int, str], index: dict[str, int]
) -> tuple[tuple[nn.Module, tuple[int, ...]], ...]:
    needs: dict[str, set[int]] = {}
    for path, module in model.named_modules():
        if path in index:
            needs.setdefault(path, set()).add(index[path])
        for parameter in module._parameters.values():
            name = owner.get(id(parameter)) if parameter is not None else None
            if name is None or name not in index:
                continue
            inside = path == name or not name or path.startswith(name + ".")
            if not inside:
                needs.setdefault(path, set()).add(index[name])
    modules = dict(model.named_modules())
    return tuple((modules[path], tuple(sorted(found))) for path, found in needs.items())
