"""Classes that modules become while this library computes for them: made of one of the library's and of their own."""

from __future__ import annotations

import functools
import inspect
from types import MethodType
from typing import Any


class Joined:
    """What the classes have in common that modules become while they are accelerated, one made for each own class.

    Such a class inherits from one of this library and from the module's own. It keeps the name of that, which
    transformers writes into configs.

    Attributes:
        alibi_class: The module's own class, whose code computes what the library does not.
        alibi_names: Names of that code's positional arguments.
    """

    alibi_class: Any
    alibi_names: tuple[str, ...]

    def given(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments of a call, by name."""
        return dict(zip(self.alibi_names, args, strict=False)) | kwargs

    def __reduce_ex__(self, protocol: Any) -> Any:
        # The class was made while the program ran, so nobody can look it up by its name.
        return _remade, (self.alibi_class, type(self).__mro__[1]), vars(self).copy()


class Prepared(Joined):
    """A model that changes the arguments of its calls. Its ``forward`` does so, for some libraries call that.

    Attributes:
        alibi_hook: Does so where the model has a ``forward`` of its own in place of its class's; else None.
    """

    alibi_hook: Any = None

    def prepared(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Return the arguments of a call, as the model is to see them."""
        raise NotImplementedError

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the model's own code does."""
        args, kwargs = self.prepared(args, kwargs)
        return self.alibi_class.forward(self, *args, **kwargs)


def join(module: Any, kind: type[Joined]) -> None:
    """Make a module one of its class and of the library's, its state kept."""
    has_forward = "forward" in vars(module) and "_old_forward" not in vars(module)
    become(module, joined(type(module), kind))
    if has_forward and issubclass(kind, Prepared):
        module.alibi_hook = module.register_forward_pre_hook(kind.prepared, with_kwargs=True)


def part(module: Any) -> None:
    """Undo :func:`join`."""
    become(module, module.alibi_class)
    hook = vars(module).pop("alibi_hook", None)
    if hook is not None:
        hook.remove()


def become(module: Any, kind: type) -> None:
    """Make a module one of another class, its state kept."""
    module.__class__ = kind
    # Hooks for several devices replace `forward` and keep the one before.
    if isinstance(vars(module).get("_old_forward"), MethodType):
        module._old_forward = MethodType(kind.forward, module)  # type: ignore[attr-defined]


@functools.cache
def joined(own: type, kind: type[Joined]) -> type:
    """Return the class of a module of class ``own`` while it is accelerated."""

    @functools.wraps(own.forward)  # type: ignore[attr-defined]
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(self, kind):  # kept by a wrapper from before it was restored
            return own.forward(self, *args, **kwargs)  # type: ignore[attr-defined]
        return kind.forward(self, *args, **kwargs)  # type: ignore[attr-defined]

    names = {x: getattr(own, x) for x in ("__module__", "__qualname__", "__doc__")}
    names |= {"alibi_class": own, "alibi_names": positional_names(own), "forward": forward}
    return type(own.__name__, (kind, own), names)


def _remade(own: type, kind: type[Joined]) -> Any:
    made = joined(own, kind)
    return made.__new__(made)


def positional_names(kind: type) -> tuple[str, ...]:
    """Return the names of a model's positional arguments; of its parent's, where it hands on whatever it gets."""
    names: tuple[str, ...] = ()
    for parent in (x for x in kind.__mro__ if "forward" in vars(x)):
        parameters = list(inspect.signature(vars(parent)["forward"]).parameters.values())[1:]
        names = tuple(x.name for x in parameters if x.kind is x.POSITIONAL_OR_KEYWORD)
        if all(x.kind is not x.VAR_POSITIONAL for x in parameters):
            break
    return names
