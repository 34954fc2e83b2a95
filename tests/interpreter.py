"""Triton's interpreter without what it does again and again, which was most of the time of the tests of kernels."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache
from typing import Any

from triton import language
from triton.language import core
from triton.runtime import interpreter


def make_faster() -> None:
    """Let the interpreter compute the same in less time, as long as Triton has the names that this replaces."""
    for replace_some in (
        _patch_once_per_launch,
        _remember_types,
        _skip_broadcasts_of_equal_shapes,
        _check_no_overflows,
    ):
        with suppress(AttributeError):
            replace_some()


def _patch_once_per_launch() -> None:
    """Each call of a device function looked through the whole language for what it had patched before."""
    patch = interpreter._patch_lang

    @cache
    def languages(fn: Callable) -> list[Any]:
        found = (each for each in fn.__globals__.values() if inspect.ismodule(each))
        return [each for each in found if each in (language, core)]

    def patch_once(fn: Callable) -> Any:
        is_patched = not core.is_builtin(core.tensor.__add__)
        if is_patched and all(each.static_print is print for each in languages(fn)):
            return interpreter._LangPatchScope()
        return patch(fn)

    interpreter._patch_lang = patch_once


def _remember_types() -> None:
    find_dtype, make_block = interpreter._get_np_dtype, core.block_type.__init__
    dtypes: dict[str, Any] = {}
    blocks: dict[Any, dict[str, Any]] = {}
    scalar = core.constexpr(1), core.tuple([])

    def np_dtype(dtype: Any) -> Any:
        found = dtypes.get(dtype.name)
        if found is None:
            found = dtypes[dtype.name] = find_dtype(dtype)
        return found

    def make_block_type(self: Any, element_ty: Any, shape: Sequence[Any]) -> None:
        key = (id(element_ty), *(each.value if type(each) is core.constexpr else each for each in shape))
        found = blocks.get(key)
        if found is None:
            make_block(self, element_ty, shape)
            self.of_tensor = core.constexpr(self.numel), core.tuple([core.constexpr(each) for each in self.shape])
            blocks[key] = dict(vars(self))  # it holds the element's type, whose id stays its own
        else:
            vars(self).update(found)

    def make_tensor(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.numel, self.shape = type.of_tensor if type.is_block() else scalar

    interpreter._get_np_dtype = np_dtype
    core.block_type.__init__ = make_block_type
    core.tensor.__init__ = make_tensor


def _skip_broadcasts_of_equal_shapes() -> None:
    broadcast = interpreter.interpreter_semantic.broadcast_impl_value

    def broadcast_others(lhs: Any, rhs: Any) -> tuple[Any, Any]:
        ours, theirs = lhs.type, rhs.type
        if ours.is_block() and theirs.is_block() and ours.shape.values == theirs.shape.values:
            return lhs, rhs
        return broadcast(lhs, rhs)

    interpreter.interpreter_semantic.broadcast_impl_value = broadcast_others


def _check_no_overflows() -> None:
    """Without its option `debug` the interpreter computes whether an operation overflowed, but asserts nothing."""
    builder = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=builder.options.debug)
