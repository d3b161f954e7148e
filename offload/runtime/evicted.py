"""What a parameter is while its data is not on the device, and while nothing runs.

    present: nn.Parameter  <--- class swapped in place --->  evicted: EvictedParameter
                           <--- between backward and step --->  IdleParameter, on the device

An evicted parameter answers questions about itself (shape, dtype, requires_grad ...), is fetched
when a model uses it during forward or backward, and otherwise refuses with a clear error.  Both
classes answer for the gradient that the engine keeps.

torch's functions ask it by `__torch_function__`.  vmap and torch.func do not: they wrap the tensors
that they find in the tree of their arguments, so it is a branch of such trees, not a leaf.  What
asks neither way (torch.tensor(p), Tensor.set_) finds NaN.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, NoReturn, Protocol

import torch
from torch import nn
from torch.utils import _pytree

from offload.errors import StateError

_Tensor = torch.Tensor


class Guard(Protocol):
    """Who serves evicted parameters."""

    def name_of(self, parameter: nn.Parameter) -> str: ...
    def serve(self, parameter: nn.Parameter) -> bool:
        """Bring the parameter to the device if the model is running; False: it is not."""
        ...

    def gradient(self, parameter: nn.Parameter) -> torch.Tensor | None:
        """The gradient of this step, in HOST memory; edits of it are honoured."""
        ...

    def assign_gradient(self, parameter: nn.Parameter, value: torch.Tensor | None) -> None:
        """Replace it, or forget it."""
        ...

    @property
    def making_state_dict(self) -> bool: ...

    @property
    def loading(self) -> dict[str, torch.Tensor] | None:
        """What `load_state_dict` copies, by name, while it runs."""
        ...


def _properties(*names: str) -> set[Any]:
    found: set[Any] = set()
    for name in names:
        attribute = getattr(_Tensor, name, None)  # some exist only in some versions of torch
        if attribute is not None:
            found.update((attribute.__get__, attribute.__set__))
    return found


_METADATA = _properties(
    "shape", "dtype", "device", "requires_grad", "grad", "ndim", "is_leaf", "layout", "grad_fn",
    "names", "is_cuda", "is_cpu", "is_sparse", "is_meta", "is_quantized", "is_mkldnn", "itemsize",
    "nbytes", "output_nr", "_version", "_backward_hooks", "_post_accumulate_grad_hooks",
    "is_nested",
    "is_mps", "is_xpu", "_base", "retains_grad",
) | {
    _Tensor.size, _Tensor.numel, _Tensor.nelement, _Tensor.dim, _Tensor.ndimension,
    _Tensor.storage_offset, _Tensor.is_floating_point, _Tensor.is_complex,
    _Tensor.element_size, _Tensor.requires_grad_, _Tensor.register_hook, _Tensor.__hash__,
    _Tensor.register_post_accumulate_grad_hook, _Tensor.get_device, _Tensor.__len__, _Tensor.type,
    _Tensor.is_signed, _Tensor.is_shared, _Tensor.is_inference,
    torch.is_floating_point, torch.is_complex, torch.numel,
}  # fmt: skip

_LAYOUT = {_Tensor.stride, _Tensor.is_contiguous}

_GRAD: Any = _Tensor.grad  # torch's own attribute


def gradient_of(parameter: nn.Parameter) -> torch.Tensor | None:
    """The gradient that autograd has left on a parameter, evicted or not."""
    with torch._C.DisableTorchFunctionSubclass():
        found: torch.Tensor | None = _GRAD.__get__(parameter)
    return found


def set_gradient(parameter: nn.Parameter, grad: torch.Tensor | None) -> None:
    """Give a parameter, evicted or not, the gradient that autograd sees."""
    with torch._C.DisableTorchFunctionSubclass():
        _GRAD.__set__(parameter, grad)


class _Kept(nn.Parameter):
    """A parameter whose gradient the engine keeps, so that it is not torch's attribute."""

    _guard: Guard

    @property
    def grad(self) -> torch.Tensor | None:
        """The gradient of this step, in HOST memory and in the form in which it is kept."""
        found = gradient_of(self)
        return self._guard.gradient(self) if found is None else found

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        set_gradient(self, None)
        self._guard.assign_gradient(self, value)

    @grad.deleter
    def grad(self) -> None:
        self.grad = None


class IdleParameter(_Kept):
    """A parameter on the device while neither forward nor backward runs."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def __deepcopy__(self, memo: Any) -> nn.Parameter:
        """A copy belongs to no engine."""
        if id(self) not in memo:
            memo[id(self)] = nn.Parameter(self.data.clone(), self.requires_grad)
        found: nn.Parameter = memo[id(self)]
        return found


class EvictedParameter(_Kept):
    """A parameter whose data is in the store.  Each engine has a subclass with its guard."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:  # fmt: skip
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            if func in _METADATA:
                return func(*args, **kwargs)
            if func in _LAYOUT:  # of the weights, not of the NaN that stands for them
                return func(torch.empty_like(args[0], device="meta"), *args[1:], **kwargs)
            leaves = _pytree.tree_iter((args, kwargs), is_leaf=_is_evicted)
            evicted = [item for item in leaves if isinstance(item, EvictedParameter)]
            if func is _Tensor.__repr__:
                return repr(evicted[0])
            if func is _Tensor.detach and evicted[0]._guard.making_state_dict:
                return torch.empty_like(evicted[0], device="meta")  # replaced by the dict's hook
            if func is _Tensor.copy_ and isinstance(args[0], EvictedParameter):
                guard = args[0]._guard
                if guard.loading is not None:
                    guard.loading[guard.name_of(args[0])] = args[1]
                    return args[0]
            for parameter in evicted:
                if _is_evicted(parameter):  # still: they may share a unit
                    _serve(parameter, getattr(func, "__name__", str(func)))
            return func(*args, **kwargs)

    def as_subclass(self, cls: Any) -> Any:
        """torch's own asks nobody."""
        _serve(self, "as_subclass")
        return self.as_subclass(cls)

    def _use_count(self) -> NoReturn:
        """torch.utils.swap_tensors asks for it, before it takes the parameter's place."""
        raise StateError(
            f"torch.utils.swap_tensors of parameter {self._guard.name_of(self)!r}: expected one"
            " that no engine holds, got one that the engine trains. Copy the values inside"
            " `with engine.gathered(parameter):` instead."
        )

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        name = self._guard.name_of(self)
        return f"EvictedParameter({name!r}, shape={tuple(self.shape)}, dtype={self.dtype})"

    def __deepcopy__(self, memo: Any) -> NoReturn:
        raise StateError(
            f"copy.deepcopy of {self._guard.name_of(self)!r}: its data lives in the store."
            " Use engine.export(...) or engine.module.state_dict() for a copy of the weights."
        )

    def __reduce_ex__(self, proto: Any) -> NoReturn:
        raise StateError(
            f"pickling of parameter {self._guard.name_of(self)!r}: its data lives in the store."
            " Save engine.module.state_dict() instead of the model or its parameters."
        )


def _is_evicted(item: Any) -> bool:
    return isinstance(item, EvictedParameter)


def _serve(parameter: EvictedParameter, operation: str) -> None:
    """Fetch it while the model runs, refuse otherwise."""
    if parameter._guard.serve(parameter):
        return
    name = parameter._guard.name_of(parameter)
    raise StateError(
        f"{operation} on parameter {name!r}: its data lives in the store, outside of forward and"
        " backward it is not in memory. Read or edit it inside `with engine.gathered(parameter):`."
    )


def guard_class(guard: Guard) -> type[EvictedParameter]:
    """The class that an engine swaps its parameters to."""
    return type("EvictedParameter", (EvictedParameter,), {"_guard": guard})


@contextlib.contextmanager
def branch_of_trees(kind: type[EvictedParameter]) -> Iterator[None]:
    """Ask parameters of this class too where a function walks through its arguments."""

    def flatten(parameter: EvictedParameter) -> tuple[list[Any], None]:
        _serve(parameter, "vmap, torch.func or the like")
        return [parameter], None  # plain now

    def unflatten(children: Any, context: None) -> Any:
        return next(iter(children))

    _pytree.SUPPORTED_NODES[kind] = _pytree.NodeDef(kind, flatten, unflatten, None)
    try:
        yield
    finally:
        del _pytree.SUPPORTED_NODES[kind]


def idle_class(guard: Guard) -> type[IdleParameter]:
    """The class of parameters that are present while nothing runs."""
    return type("IdleParameter", (IdleParameter,), {"_guard": guard})
