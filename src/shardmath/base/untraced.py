"""Functions that `torch.compile` must not trace, and operators that it traces in their place.

Functions that share memory with other processes are not traced. Compiled code breaks its graph at
such a call, which then runs as it is. Traced, parts of it would run on tensors without memory
after the ranks have agreed. torch is not imported for this: nothing is compiled before the program
imports it, and the compiler watches a call only where code that it has compiled makes it. The
functions that find out whether it does are marked, too; the first call that finds the compiler
loaded tells it so.

Where torch has an operator for a function, the compiler traces a call of the operator instead: see
`shardmath.autograd`.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable
from types import CodeType, FunctionType
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")
Call = TypeVar("Call", bound=Callable[..., Any])
Class = TypeVar("Class", bound=type)

COMPILER = "torch._dynamo"  # until it is in sys.modules, nothing is compiled
# Whether a module is in sys.modules. Written as a bound method since the compiler models every key
# of a `dict` that it sees being read, and there are thousands.
is_loaded = sys.modules.keys().__contains__
_MARK = "_torchdynamo_disable"  # the attribute of functions that the compiler does not enter
_SPECIAL = ("__init__", "__enter__", "__exit__", "__call__")
_marked: set[CodeType] = set()  # the code of all marked functions


def untraced(call: Callable[P, R]) -> Callable[P, R]:
    """`call`, which `torch.compile` does not trace, nor what it calls."""

    @functools.wraps(call)
    def called(*args: P.args, **kwargs: P.kwargs) -> R:
        if is_loaded(COMPILER) and is_watched():
            return unwatched(call)(*args, **kwargs)
        return call(*args, **kwargs)

    return marked(called)


def marked(call: Call) -> Call:
    """`call`, marked so that the compiler does not trace it."""
    vars(call)[_MARK] = True
    _marked.add(call.__code__)
    return call


@marked
def is_watched() -> bool:
    """Whether torch's compiler, which is loaded, would trace the next call of this thread."""
    callback = sys.modules["torch"]._C._dynamo.eval_frame.get_eval_frame_callback()
    watched = callback is not None and callback is not False
    if watched:
        skip_marked()  # again, since `torch.compiler.reset` forgets it
    else:
        _skip_marked_once()
    return watched


@marked
def skip_marked() -> None:
    """Have torch's compiler run marked functions as they are."""
    from torch._dynamo.decorators import skip_code

    for code in _marked:
        skip_code(code)


_skip_marked_once = functools.cache(skip_marked)


@marked
def unwatched(call: Callable[P, R]) -> Callable[P, R]:
    """`call` with the compiler disabled, for what it calls, too."""
    alone: Callable[P, R] = sys.modules["torch"].compiler.disable(call)
    return alone


def constant(call: Call) -> Call:
    """`call`, which torch's compiler evaluates while it traces: its arguments are constants."""
    vars(call)["_dynamo_marked_constant"] = True
    return call


def is_compiling() -> bool:
    """Whether torch's compiler traces the caller. The compiler itself calls the lambda below."""
    return False


vars(is_compiling)["_torchdynamo_inline"] = lambda: True


operators: dict[str, Callable[..., Any]] = {}
"""By name, the functions of `shardmath.autograd` that call torch's operators."""


@constant
def load_operators() -> None:
    """Register torch's operators, which lie in a higher layer: they call the public functions."""
    importlib.import_module("shardmath.autograd")


def operator_of(name: str) -> Callable[..., Any]:
    """The function that calls torch's operator of that name."""
    if name not in operators:
        load_operators()
    return operators[name]


def function_of_dtensors(function: Callable[..., Any]) -> Callable[..., Any] | None:
    """The function to call in place of `function` with DTensors of torch's; None for none."""
    above: Any = importlib.import_module("shardmath.distributed.conversions")
    found: Callable[..., Any] | None = above.of_dtensors(function)
    return found


def function_of_foreign(call: Callable[..., Any], kind: type) -> Callable[..., Any] | None:
    """A wrapper of the public function `call` for arrays of class `kind`, which the package does
    not know and takes by DLPack; None where the package knows the class.
    """
    above: Any = importlib.import_module("shardmath.interchange.calls")
    found: Callable[..., Any] | None = above.with_arrays_of(call, kind)
    return found


def traced_as(name: str, call: Call) -> Call:
    """`call`, for which torch's compiler traces the operator `name` instead."""

    def traced(*args: Any, **kwargs: Any) -> Any:
        load_operators()
        operators["between_graphs"](name, *args, *kwargs.values())
        return operators[name](*args, **kwargs)

    vars(call)["_torchdynamo_inline"] = traced
    _marked.add(call.__code__)
    return call


def wants_operator(tensor: Any, name: str) -> bool:
    """Whether a call with this tensor needs torch's operator: for a gradient or a tangent, or since
    torch transforms or records operations, or chooses the data type of products.
    """
    if tensor.requires_grad and sys.modules["torch"].is_grad_enabled():
        return True
    transforms, _, modes, narrows = watches_of_torch()
    if has_tangent(tensor) or transforms() or modes():
        return True
    return name == "matmul" and bool(narrows())


Watch = Callable[[], Any]


def watches_of_torch() -> tuple[Watch, Watch, Watch, Watch]:
    """Functions that say whether a transform is active, whether tensors may have tangents or a
    profiler is on, whether a dispatch mode is active, and whether autocast is on.
    """
    core = sys.modules["torch"]._C
    return (
        core._functorch.peek_interpreter_stack,
        _asks_for_level_and_profiler(),
        core._len_torch_dispatch_stack,
        core._is_any_autocast_enabled,
    )


def may_have_tangents() -> bool:
    """Whether torch differentiates in forward mode, within `torch.autograd.forward_ad.dual_level`.

    Call it where torch is loaded. Tensors with a tangent look like plain ones.
    """
    return _asks_for_level()()


@functools.cache
def _asks_for_level() -> Callable[[], bool]:
    """See `may_have_tangents`. The module is looked up once, since each call with a tensor asks.

    Below torch's dispatch modes, which `torch.func.linearize` uses, no tangent is within reach.
    """
    forward: Any = sys.modules["torch.autograd.forward_ad"]
    core = sys.modules["torch"]._C
    below, key = core._dispatch_tls_is_dispatch_key_excluded, core.DispatchKey.ADInplaceOrView
    return lambda: forward._current_level >= 0 and not below(key)


@functools.cache
def _asks_for_level_and_profiler() -> Callable[[], bool]:
    """See `watches_of_torch`. One function asks for both: each call of one takes time."""
    forward: Any = sys.modules["torch.autograd.forward_ad"]
    profiler: Any = sys.modules["torch.autograd.profiler"]
    return lambda: forward._current_level >= 0 or profiler._is_profiler_enabled


def range_of_profiler(name: str) -> Any:
    """A range of that name for torch's profiler, to be entered; None where none is on."""
    profiler: Any = sys.modules["torch.autograd.profiler"]
    return profiler.record_function(name) if profiler._is_profiler_enabled else None


def has_tangent(tensor: Any) -> bool:
    """Whether this tensor has a tangent in the current level of forward mode."""
    if not may_have_tangents():
        return False
    return sys.modules["torch.autograd.forward_ad"].unpack_dual(tensor).tangent is not None


def without_tangent(tensor: Any) -> Any:
    """The tensor without its tangent, or itself where it has none."""
    if not may_have_tangents():
        return tensor
    return sys.modules["torch.autograd.forward_ad"].unpack_dual(tensor).primal


def unrecorded(call: Callable[[], R]) -> R:
    """What `call` returns, which torch does not differentiate, whatever the thread's grad mode."""
    if not is_loaded("torch"):
        return call()
    with sys.modules["torch"].no_grad():
        return call()


_constants: list[type] = []


def constant_to_compiler(kind: Class) -> Class:
    """`kind`, whose objects are constants to torch's compiler, even if made in compiled code."""
    _constants.append(kind)
    tell_compiler()
    return kind


def tell_compiler() -> None:
    """Tell torch's compiler which objects are constants, if torch is loaded."""
    if not is_loaded("torch"):
        return
    from torch._library import opaque_object as known

    metaclass: Any = known.OpaqueBaseMeta  # torch 2.11 requires it of values, without using it
    known.OpaqueBaseMeta = type
    try:
        while _constants:
            kind = _constants.pop()
            setattr(kind, "__fx_repr__", lambda x: (repr(x), {}))  # noqa: B010
            public = [name for name in dir(kind) if not name.startswith("_")]
            members = dict.fromkeys(public, known.MemberType.USE_REAL)
            known.register_opaque_type(kind, typ="value", members=members)
    finally:
        known.OpaqueBaseMeta = metaclass


def untraced_methods(kind: Class) -> Class:
    """`kind` with its public methods, and those that make, enter and call it, `untraced`."""
    for name, member in list(vars(kind).items()):
        public = isinstance(member, FunctionType) and (not name.startswith("_") or name in _SPECIAL)
        if public and _MARK not in vars(member):
            setattr(kind, name, untraced(member))
    return kind
