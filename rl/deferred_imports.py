"""Puts off what PyTorch 2.13 imports for its compiler alone until something needs it.

DTensor, torchtitan and vLLM import helpers of the compiler, and with them sympy, networkx and the compiler itself: one
to three seconds of a processor in each process of a run, few of which ever compile. `defer_compiler` takes effect if it
comes before the first import of these modules. From their first real use on, everything is as PyTorch made it.

Remove when importing `torch.distributed.tensor`, `torch.distributed.pipelining`, `torch._inductor.custom_graph_pass`
and `torchtitan.distributed.activation_checkpoint` imports neither sympy nor `torch._dynamo`.
"""

import functools
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

_SHAPES, _PARTITIONERS = "torch.fx.experimental.symbolic_shapes", "torch._functorch.partitioners"
_DYNAMO, _INDUCTOR = "torch._dynamo", "torch._inductor"


def defer_compiler() -> None:
    """Puts off the imports from now on. Calling it again does nothing; neither does it once they have been made."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


class _Function:
    """Stands for a function, and loads it when it is called."""

    def __init__(self, module: str, name: str, *, keeps_bool: bool = False) -> None:
        """With `keeps_bool` the function returns a bool as it is; only code that is compiled has anything else."""
        self._module, self._name, self._keeps_bool = module, name, keeps_bool

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._keeps_bool and args and isinstance(args[0], bool):
            return args[0]
        module = sys.modules[self._module]
        if isinstance(module, _Deferred):
            module.ownloop_load()
        return getattr(module, self._name)(*args, **kwargs)


class _Mark:
    """Stands for a function that tells the compiler something of another function. Tells it when the compiler comes."""

    def __init__(self) -> None:
        self.marked: list[Any] = []

    def __call__(self, function: Any) -> Any:
        self.marked.append(function)
        return function


def _disable(function: Any = None, recursive: bool = True, **options: Any) -> Any:
    """Stands for `torch._dynamo.disable`: the compiler, once it is there, leaves `function` alone."""
    if function is None:
        return functools.partial(_disable, recursive=recursive, **options)
    if not inspect.isfunction(function):
        return _Function(_DYNAMO, "disable")(function, recursive, **options)

    @functools.cache
    def disabled() -> Callable[..., Any]:
        return sys.modules[_DYNAMO].disable(function, recursive, **options)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return (function if isinstance(sys.modules[_DYNAMO], _Deferred) else disabled())(*args, **kwargs)

    return call


class _NeverRaisedError(RuntimeError):
    """Stands for the error of a branch that depends on data, which only code that is compiled raises."""


class _NeverMade:
    """Stands for the class of a compiled module, of which there is none yet."""


class _Module:
    """Stands for a module of the compiler. It has functions that do nothing where nothing is compiled."""

    def __init__(self, name: str, idle: Sequence[str]) -> None:
        """`idle` names these functions."""
        self._name, self._idle = name, idle

    def __getattr__(self, name: str) -> Any:
        return _do_nothing if name in self._idle else getattr(import_module(self._name), name)


def _do_nothing(*args: Any, **kwargs: Any) -> None:
    del args, kwargs


_STAND_INS: Mapping[str, Mapping[str, Any]] = {
    _SHAPES: {
        "GuardOnDataDependentSymNode": _NeverRaisedError,
        **{
            name: _Function(_SHAPES, name, keeps_bool=True)
            for name in ("expect_true", "guard_or_false", "guard_or_true", "statically_known_true")
        },
    },
    _PARTITIONERS: {"get_default_op_list": _Function(_PARTITIONERS, "get_default_op_list")},
    _DYNAMO: {
        "trace_rules": _Module(f"{_DYNAMO}.trace_rules", ["clear_lru_cache"]),  # by each new process group
        "decorators": _Module(f"{_DYNAMO}.decorators", ["mark_unbacked"]),  # by vLLM's sampler in each step
        "OptimizedModule": _NeverMade,
        "disable": _disable,
        "graph_break": _do_nothing,  # by each optimizer step
        **{name: _Mark() for name in ("allow_in_graph", "disallow_in_graph", "assume_constant_result")},
    },
    _INDUCTOR: {},
}
"""The modules that are put off, and what other modules get of them meanwhile, by name."""
_INDEPENDENT = {
    f"{_INDUCTOR}.config",
    f"{_INDUCTOR}.custom_graph_pass",
    f"{_DYNAMO}.config",
    f"{_DYNAMO}._trace_wrapped_higher_order_op",
}
"""Modules of packages that are put off, which need nothing else of them."""


class _Finder(MetaPathFinder, Loader):
    """Finds the modules that are put off, until they are needed."""

    def __init__(self) -> None:
        self._put_off = set(_STAND_INS)

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> Any:
        del target
        package = sys.modules.get(fullname.rpartition(".")[0])
        if isinstance(package, _Deferred) and fullname not in _INDEPENDENT:
            package.ownloop_load()  # its modules expect that it has been imported before them
        found = PathFinder.find_spec(fullname, path) if fullname in self._put_off else None
        if found is None:
            return None
        spec = ModuleSpec(fullname, self, origin=found.origin, loader_state=found)
        spec.submodule_search_locations = found.submodule_search_locations
        return spec

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Deferred(spec.name, lambda: self._put_off.discard(spec.name))

    def exec_module(self, module: ModuleType) -> None:
        """Executes nothing yet."""


class _Deferred(ModuleType):
    """A module whose code is executed when something is used of it that has no stand-in."""

    def __init__(self, name: str, loading: Callable[[], None]) -> None:
        super().__init__(name)
        self.__dict__["ownloop_loading"] = loading

    def ownloop_load(self) -> None:
        """Executes the module's code, in this same object, which is an ordinary module from now on."""
        loading = self.__dict__.pop("ownloop_loading", None)
        if loading is None:  # another thread has begun
            return
        loading()
        object.__setattr__(self, "__class__", ModuleType)  # what the code imports may import this module
        assert self.__spec__ is not None
        found = self.__spec__.loader_state
        self.__spec__, self.__loader__, self.__file__ = found, found.loader, found.origin
        found.loader.exec_module(self)
        _replace_stand_ins(self)

    def __getattr__(self, name: str) -> Any:
        stand_ins = _STAND_INS[self.__name__]
        if name in stand_ins:
            return stand_ins[name]
        if name.startswith("__"):
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        if f"{self.__name__}.{name}" in _INDEPENDENT:
            return import_module(f"{self.__name__}.{name}")
        self.ownloop_load()
        return getattr(self, name)


def _replace_stand_ins(loaded: ModuleType) -> None:
    """Puts what a module has really made where other modules have stand-ins for it."""
    names = {id(stand_in): name for name, stand_in in _STAND_INS[loaded.__name__].items()}
    for module_name, module in list(sys.modules.items()):
        if module_name.partition(".")[0] in ("torch", "torchtitan", "vllm") and module is not loaded:
            for name, value in list(vars(module).items()):
                if id(value) in names:
                    setattr(module, name, getattr(loaded, names[id(value)]))
    for name, stand_in in _STAND_INS[loaded.__name__].items():
        if isinstance(stand_in, _Mark):
            for function in stand_in.marked:
                getattr(loaded, name)(function)
