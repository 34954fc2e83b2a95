"""The CPU's micro-kernel: C[rows, columns] = A[rows, K] @ B[K, columns] or +=, held in vector registers.

Linear layers, attention scores and attention outputs are all loops around this tile. It is written as LLVM vector code
through Numba, so the same source compiles to NEON, AVX2 or AVX512. Each element of C is one chain of fused
multiply-adds in the order of K, whatever the number of rows: a token's result does not depend on the rest of the batch.
"""

from __future__ import annotations

import platform
from collections.abc import Callable
from typing import Any

import llvmlite.binding as llvm
import numba
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

# torch's linear algebra and our kernels must share one thread pool, or they compete for the cores: Numba's OpenMP layer
# uses the OpenMP runtime that torch has already loaded.
numba.config.THREADING_LAYER_PRIORITY = ["omp", "workqueue", "tbb"]


def _vector_width() -> int:
    """Return the floats in the widest vector register of this machine."""
    features = llvm.get_host_cpu_features()
    if features.get("avx512f"):
        return 16
    return 8 if features.get("avx2") else 4


WIDTH = _vector_width()
# Rows and vectors of the largest tile: as many accumulators as fit the registers beside the operands, measured
# (docs/performance.md). NEON has 32 registers but loads its factors four steps at a time, AVX2 has 16, AVX512 32.
ROWS, _VECTORS = {4: (6, 3), 8: (6, 2), 16: (6, 4)}[WIDTH]
PANEL = _VECTORS * WIDTH  # adjacent columns of a packed weight
# With few rows the weight is read from memory as it is used, and the hardware prefetches too little of it: tiles of up
# to _FETCH_ROWS rows prefetch _FETCH_STEPS steps of K ahead. Larger tiles hide the latency, or read from the cache.
_FETCH_ROWS, _FETCH_STEPS = {4: (4, 8), 8: (6, 32), 16: (6, 32)}[WIDTH]
_LINE = 16  # floats in a cache line
BLOCK_COLUMNS = 16  # the attention tile is as wide as a KV block
_HAS_LANE_FMA = platform.machine().lower() in ("aarch64", "arm64")

_f32, _i32, _i64 = ir.FloatType(), ir.IntType(32), ir.IntType(64)


def emit_fetch(builder: Any, address: Any) -> None:
    """Emit a prefetch of a cache line."""
    pointer = ir.IntType(8).as_pointer()
    kind = ir.FunctionType(ir.VoidType(), [pointer, _i32, _i32, _i32])
    function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
    builder.call(function, [builder.bitcast(address, pointer), _i32(0), _i32(3), _i32(1)])


class _Emitter:
    """Writes the LLVM code of one tile shape."""

    def __init__(self, builder: Any, rows: int, vectors: int, width: int) -> None:
        self.builder, self.rows, self.vectors, self.width = builder, rows, vectors, width
        self.vector = ir.VectorType(_f32, width)
        kind = ir.FunctionType(self.vector, [self.vector] * 3)
        self.fma = cgutils.get_or_insert_function(builder.module, kind, f"llvm.fma.v{width}f32")

    def load(self, base: Any, offset: Any, kind: Any) -> Any:
        at = self.builder.bitcast(self.builder.gep(base, [offset]), kind.as_pointer())
        value = self.builder.load(at)
        value.align = 4
        return value

    def start(self, c: Any, places: list[Any], adds: Any) -> list[Any]:
        """Return the initial sums: C if `adds`, else zero."""
        builder, before = self.builder, self.builder.block
        zero = ir.Constant(self.vector, None)
        sums = []
        with builder.if_then(builder.icmp_signed("!=", adds, _i64(0))):
            found = [self.load(c, place, self.vector) for place in places]
            inside = builder.block
        for value in found:
            phi = builder.phi(self.vector)
            phi.add_incoming(zero, before)
            phi.add_incoming(value, inside)
            sums.append(phi)
        return sums

    def splat(self, value: Any, lane: int) -> Any:
        mask = ir.Constant(ir.VectorType(_i32, self.width), [lane] * self.width)
        return self.builder.shuffle_vector(value, ir.Constant(value.type, ir.Undefined), mask)

    def fused(self, a: Any, lda: Any, b: Any, ldb: Any, ahead: Any, k: Any, sums: list[Any], count: int) -> list[Any]:
        """Emit `count` steps along K from `k`; each also prefetches `ahead` floats after its row of B, unless None."""
        builder, sums = self.builder, list(sums)
        starts = [builder.add(builder.mul(lda, _i64(row)), k) for row in range(self.rows)]
        if count > 1:  # one load has the factors of four steps; the multiply-add selects a lane
            factors = [self.load(a, start, ir.VectorType(_f32, count)) for start in starts]
        for step in range(count):
            at = builder.mul(builder.add(k, _i64(step)), ldb)
            if ahead is not None:
                for line in range(0, self.vectors * self.width, _LINE):
                    emit_fetch(builder, builder.gep(b, [builder.add(at, builder.add(ahead, _i64(line)))]))
            columns = [self.load(b, builder.add(at, _i64(v * self.width)), self.vector) for v in range(self.vectors)]
            for row in range(self.rows):
                if count > 1:
                    factor = self.splat(factors[row], step)
                else:
                    scalar = self.load(a, builder.add(starts[row], _i64(step)), _f32)
                    one = builder.insert_element(ir.Constant(self.vector, ir.Undefined), scalar, _i32(0))
                    factor = self.splat(one, 0)
                for v in range(self.vectors):
                    i = row * self.vectors + v
                    sums[i] = builder.call(self.fma, [factor, columns[v], sums[i]])
        return sums

    def loop(
        self, k: Any, end: Any, count: int, sums: list[Any], body: Callable[..., list[Any]]
    ) -> tuple[Any, list[Any]]:
        """Emit a loop of `body` while `count` more steps fit before `end`."""
        builder = self.builder
        before = builder.block
        head, inside, after = (builder.append_basic_block(name) for name in ("head", "inside", "after"))
        builder.branch(head)
        builder.position_at_end(head)
        position = builder.phi(_i64)
        position.add_incoming(k, before)
        held = [builder.phi(self.vector) for _ in sums]
        for phi, value in zip(held, sums, strict=True):
            phi.add_incoming(value, before)
        builder.cbranch(builder.icmp_signed("<=", builder.add(position, _i64(count)), end), inside, after)
        builder.position_at_end(inside)
        new = body(position, held, count)
        position.add_incoming(builder.add(position, _i64(count)), builder.block)
        for phi, value in zip(held, new, strict=True):
            phi.add_incoming(value, builder.block)
        builder.branch(head)
        builder.position_at_end(after)
        return position, held


def _tile(rows: int, vectors: int, width: int, *, ldb_fixed: int | None = None, fetches: bool = False) -> Any:
    """Return the tile of `rows` x `vectors * width` as a function of addresses and leading dimensions, for Numba."""

    @intrinsic
    def tile(_context: Any, a: Any, lda: Any, b: Any, ldb: Any, c: Any, ldc: Any, k: Any, adds: Any, ahead: Any) -> Any:
        def emit(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
            a, lda, b, ldb, c, ldc, end, adds, ahead = args
            if ldb_fixed is not None:
                ldb = _i64(ldb_fixed)
            if not fetches:
                ahead = None
            emitter = _Emitter(builder, rows, vectors, width)
            a, b, c = (builder.inttoptr(address, _f32.as_pointer()) for address in (a, b, c))
            places = [
                builder.add(builder.mul(ldc, _i64(row)), _i64(v * width)) for row in range(rows) for v in range(vectors)
            ]
            sums = emitter.start(c, places, adds)

            def body(k: Any, sums: list[Any], count: int) -> list[Any]:
                return emitter.fused(a, lda, b, ldb, ahead, k, sums, count)

            k = _i64(0)
            if _HAS_LANE_FMA:
                k, sums = emitter.loop(k, end, 4, sums, body)
            _, sums = emitter.loop(k, end, 1, sums, body)
            for place, value in zip(places, sums, strict=True):
                at = builder.bitcast(builder.gep(c, [place]), emitter.vector.as_pointer())
                builder.store(value, at).align = 4
            return context.get_dummy_value()

        return types.void(*[types.int64] * 9), emit

    return tile


_p1, _p2, _p3, _p4, _p5, _p6 = (
    _tile(rows, _VECTORS, WIDTH, ldb_fixed=PANEL, fetches=rows <= _FETCH_ROWS) for rows in range(1, ROWS + 1)
)
AHEAD = _FETCH_STEPS * PANEL  # how far a tile of few rows prefetches a weight, in floats
_ATTENTION_WIDTH = min(WIDTH, BLOCK_COLUMNS)
_b1, _b2, _b3, _b4 = (
    _tile(rows, BLOCK_COLUMNS // _ATTENTION_WIDTH, _ATTENTION_WIDTH, fetches=True) for rows in range(1, 5)
)


@njit(nogil=True)
def panel_tile(rows: int, a: int, lda: int, b: int, c: int, ldc: int, k: int, adds: int, ahead: int) -> None:
    """Compute C = A @ B, or += if `adds`, for up to ROWS rows and one panel; addresses in bytes, sizes in floats.

    Of few rows, it prefetches `ahead` floats further while it reads B.
    """
    if rows == 6:
        _p6(a, lda, b, PANEL, c, ldc, k, adds, ahead)
    elif rows == 5:
        _p5(a, lda, b, PANEL, c, ldc, k, adds, ahead)
    elif rows == 4:
        _p4(a, lda, b, PANEL, c, ldc, k, adds, ahead)
    elif rows == 3:
        _p3(a, lda, b, PANEL, c, ldc, k, adds, ahead)
    elif rows == 2:
        _p2(a, lda, b, PANEL, c, ldc, k, adds, ahead)
    else:
        _p1(a, lda, b, PANEL, c, ldc, k, adds, ahead)


@njit(nogil=True)
def block_tile(rows: int, a: int, lda: int, b: int, ldb: int, c: int, ldc: int, k: int, adds: int, ahead: int) -> None:
    """Compute C = A @ B, or += if `adds`, for any number of rows and 16 columns; addresses in bytes, sizes in floats.

    While it reads B, it prefetches `ahead` floats further: the next block.
    """
    row = 0
    while row + 4 <= rows:
        _b4(a + row * lda * 4, lda, b, ldb, c + row * ldc * 4, ldc, k, adds, ahead)
        row += 4
    a += row * lda * 4
    c += row * ldc * 4
    if rows - row == 3:
        _b3(a, lda, b, ldb, c, ldc, k, adds, ahead)
    elif rows - row == 2:
        _b2(a, lda, b, ldb, c, ldc, k, adds, ahead)
    elif rows - row == 1:
        _b1(a, lda, b, ldb, c, ldc, k, adds, ahead)


@intrinsic
def prefetch(_context: Any, address: Any) -> Any:
    """Prefetch the cache line at an address."""

    def emit(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        emit_fetch(builder, builder.inttoptr(args[0], _f32.as_pointer()))
        return context.get_dummy_value()

    return types.void(types.int64), emit


@intrinsic
def _rint(_context: Any, x: Any) -> Any:
    def emit(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        function = cgutils.get_or_insert_function(builder.module, ir.FunctionType(_f32, [_f32]), "llvm.rint.f32")
        return builder.call(function, args)

    return types.float32(types.float32), emit


@intrinsic
def _power_of_two(_context: Any, whole: Any) -> Any:
    """Return 2**whole by setting the exponent bits; 0 for -127. In LLVM, since Numba would widen the integers."""

    def emit(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        exponent = builder.add(builder.fptosi(args[0], _i32), _i32(127))
        return builder.bitcast(builder.shl(exponent, _i32(23)), _f32)

    return types.float32(types.float32), emit


_LOG2E = numba.float32(1.4426950408889634)
_C = tuple(numba.float32(c) for c in (1.0, 0.6931471805599453, 0.24022650695910072, 0.05550410866482158,
                                      0.009618129107628477, 0.0013333558146428443, 0.00015403530393381608))  # fmt: skip


@njit(nogil=True, fastmath=True, inline="always")
def exp(x: float) -> Any:
    """Return e**x in float32 to about 1e-7, in a form that LLVM vectorizes; exactly 0 below -88."""
    y = min(max(numba.float32(x) * _LOG2E, numba.float32(-127.0)), numba.float32(127.0))
    whole = _rint(y)
    f = y - whole
    p = _C[6]
    p = p * f + _C[5]
    p = p * f + _C[4]
    p = p * f + _C[3]
    p = p * f + _C[2]
    p = p * f + _C[1]
    p = p * f + _C[0]
    return p * _power_of_two(whole)
