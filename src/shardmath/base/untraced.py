"""What `torch.compile` leaves alone, and what it is given to trace in its place.

It leaves alone what shares memory with other processes.

Compiled code is cut at such a call, which then runs as it is, between the graphs of what is around
it. Were it traced, parts of it would run on tensors that have no memory, after the ranks have
agreed. torch is not imported for this: before it is, nothing is compiled, and the compiler watches
a call only where code that it has compiled makes it. What looks whether it does so is not compiled
either: the compiler is told as soon as a call finds it loaded.

In place of a function of which torch has an operator the compiler traces the call of that; see
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
# Whether a module is in sys.modules, asked so that the compiler does not look into it: of a `dict`
# that it sees read it models every key, and there are thousands.
is_loaded = sys.modules.keys().__contains__
_MARK = "_torchdynamo_disable"  # what the compiler looks for before it goes in
_SPECIAL = ("__init__", "__enter__", "__exit__", "__call__")
_marked: set[CodeType] = set()  # the code of all that is marked


def untraced(call: Callable[P, R]) -> Callable[P, R]:
    """`call`, which `torch.compile` leaves as it is, together with all that it calls."""

    @functools.wraps(call)
    def called(*args: P.args, **kwargs: P.kwargs) -> R:
        if is_loaded(COMPILER) and is_watched():
            return unwatched(call)(*args, **kwargs)
        return call(*args, **kwargs)

    return marked(called)


def marked(call: Call) -> Call:
    """`call`, marked as one that begins as `untraced` calls do."""
    vars(call)[_MARK] = True
    _marked.add(call.__code__)
    return call


@marked
def is_watched() -> bool:
    """Whether torch's compiler, which is loaded, would trace what this thread calls next."""
    callback = sys.modules["torch"]._C._dynamo.eval_frame.get_eval_frame_callback()
    watched = callback is not None and callback is not False
    if watched:
        skip_marked()  # `torch.compiler.reset` forgets what was skipped
    else:
        _skip_marked_once()
    return watched


@marked
def skip_marked() -> None:
    """Let torch's compiler run what is marked as it is, where it would compile it."""
    from torch._dynamo.decorators import skip_code

    for code in _marked:
        skip_code(code)


_skip_marked_once = functools.cache(skip_marked)


@marked
def unwatched(call: Callable[P, R]) -> Callable[P, R]:
    """`call` without the compiler, which does not watch what it calls either."""
    alone: Callable[P, R] = sys.modules["torch"].compiler.disable(call)
    return alone


def constant(call: Call) -> Call:
    """`call`, which torch's compiler makes while it traces: its arguments are constants."""
    vars(call)["_dynamo_marked_constant"] = True
    return call


def is_compiling() -> bool:
    """Whether torch's compiler traces the caller: it traces another function in place of this."""
    return False


vars(is_compiling)["_torchdynamo_inline"] = lambda: True


operators: dict[str, Callable[..., Any]] = {}
"""What calls torch's operators in place of public functions, by name; of `shardmath.autograd`."""


@constant
def load_operators() -> None:
    """Let torch know its operators, which stand above: they call the public functions."""
    importlib.import_module("shardmath.autograd")


def operator_of(name: str) -> Callable[..., Any]:
    """What calls the operator of that name."""
    if name not in operators:
        load_operators()
    return operators[name]


def function_of_dtensors(function: Callable[..., Any]) -> Callable[..., Any] | None:
    """What calls `function`, of this package, with DTensors of torch's, where there is one."""
    above: Any = importlib.import_module("shardmath.distributed.conversions")
    found: Callable[..., Any] | None = above.of_dtensors(function)
    return found


def function_of_foreign(call: Callable[..., Any], kind: type) -> Callable[..., Any] | None:
    """What calls the public function `call` with arrays of class `kind`, of a library of which the
    package knows only that it speaks DLPack; None where it knows the class.
    """
    above: Any = importlib.import_module("shardmath.interchange.calls")
    found: Callable[..., Any] | None = above.with_arrays_of(call, kind)
    return found


def traced_as(name: str, call: Call) -> Call:
    """`call`, in place of which torch's compiler traces the operator of that name."""

    def traced(*args: Any, **kwargs: Any) -> Any:
        load_operators()
        return operators[name](*args, **kwargs)

    vars(call)["_torchdynamo_inline"] = traced
    _marked.add(call.__code__)
    return call


def wants_operator(tensor: Any, name: str) -> bool:
    """Whether torch is to know of a call with this tensor: for its gradient, or because it
    transforms or records what is called, or chooses the type of products.
    """
    torch = sys.modules["torch"]
    transforms, _, narrows = watches_of_torch()
    if (tensor.requires_grad and torch.is_grad_enabled()) or has_tangent(tensor):
        return True
    if transforms() or torch._C._len_torch_dispatch_stack():
        return True
    return name == "matmul" and bool(narrows())


def watches_of_torch() -> tuple[Callable[[], Any], Callable[[], Any], Callable[[], Any]]:
    """What says whether torch transforms what is called now, whether tensors may have tangents, and
    whether autocast is on.
    """
    core = sys.modules["torch"]._C
    return core._functorch.peek_interpreter_stack, _asks_for_level(), core._is_any_autocast_enabled


def may_have_tangents() -> bool:
    """Whether torch differentiates in forward mode, within `torch.autograd.forward_ad.dual_level`.

    To be asked where torch is loaded: tensors with a tangent look as plain ones do.
    """
    return _asks_for_level()()


@functools.cache
def _asks_for_level() -> Callable[[], bool]:
    """See `may_have_tangents`. Each call of a plain tensor asks: the module is looked up once."""
    forward: Any = sys.modules["torch.autograd.forward_ad"]
    return lambda: forward._current_level >= 0


def has_tangent(tensor: Any) -> bool:
    """Whether torch would push a tangent of this tensor through what is called now."""
    if not may_have_tangents():
        return False
    return sys.modules["torch.autograd.forward_ad"].unpack_dual(tensor).tangent is not None


def without_tangent(tensor: Any) -> Any:
    """The tensor itself, or what it is without the tangent that it has."""
    if not may_have_tangents():
        return tensor
    return sys.modules["torch.autograd.forward_ad"].unpack_dual(tensor).primal


_constants: list[type] = []


def constant_to_compiler(kind: Class) -> Class:
    """`kind`, of which torch's compiler takes objects, which are immutable, for constants, also
    those that are made in code that it compiles.
    """
    _constants.append(kind)
    tell_compiler()
    return kind


def tell_compiler() -> None:
    """Let torch's compiler know which objects are constants, if torch is loaded."""
    if not is_loaded("torch"):
        return
    from torch._library import opaque_object as known

    metaclass: Any = known.OpaqueBaseMeta  # torch 2.11 asks for it of values, too, and needs it not
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
    """The class `kind`, whose public methods, and those that make and enter it, are `untraced`."""
    for name, member in list(vars(kind).items()):
        public = isinstance(member, FunctionType) and (not name.startswith("_") or name in _SPECIAL)
        if public and _MARK not in vars(member):
            setattr(kind, name, untraced(member))
    return kind
