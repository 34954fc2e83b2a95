"""The CPU's micro-kernel of quantized weights: 8-bit inputs times codes of 4 to 8 bits, summed in int32 per group.

It is LLVM vector code as in tile.py. Four products of a lane are one instruction where the machine has one: vpdpbusd
(AVX512-VNNI, AVX-VNNI) or sdot (ARM dotprod). Other x86 machines with AVX2 add pairs of products in 16 bits with one
instruction (vpmaddubsw), and as many pairs as cannot overflow before they widen the sum; the rest multiply in 16 bits.
Integer sums are exact, and the float sums over groups are one chain of fused multiply-adds in the order of K: every
machine computes the same bits, and a token's result does not depend on the rest of the batch.
"""

from __future__ import annotations

import platform
from functools import cache
from typing import Any

import llvmlite.binding as llvm
from llvmlite import ir
from numba import cfunc, types
from numba.core import cgutils
from numba.extending import intrinsic

from chairlift.ops.panels import DOT, DOTS, ROWS, SIGNED, VECTORS, Panels
from chairlift.ops.tile import WIDTH, emit_fetch
from chairlift.ops.widen import emit_widen

_f32 = ir.FloatType()
_i8, _i16, _i32, _i64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
_IS_X86 = platform.machine().lower() in ("x86_64", "amd64")
_LINE = 64  # bytes in a cache line
_FETCH_BYTES = 4096  # how far ahead a tile prefetches the weight: measured (docs/performance.md)


class Dot:
    """Emits sums of four byte products per lane, for one way of multiplying; `signed` is of the codes."""

    def __init__(self, builder: Any, kind: str, width: int, signed: bool) -> None:
        self.builder, self.kind, self.width, self.signed = builder, kind, width, signed
        self.lanes, self.bytes = ir.VectorType(_i32, width), ir.VectorType(_i8, 4 * width)

    def __call__(self, sums: Any, codes: Any, inputs: Any) -> Any:
        """Return sums plus codes times inputs, all vectors of int32 lanes; a lane of the operands is four bytes."""
        if self.kind == "plain":
            return self._plain(sums, codes, inputs)
        builder, operand = self.builder, self.lanes
        if self.kind == "sdot" or llvm.llvm_version_info[0] >= 22:  # before, vpdpbusd took lanes
            operand = self.bytes
            codes, inputs = builder.bitcast(codes, operand), builder.bitcast(inputs, operand)
        name = {
            "vnni": f"llvm.x86.avx512.vpdpbusd.{32 * self.width}",
            "sdot": f"llvm.aarch64.neon.sdot.v{self.width}i32.v{4 * self.width}i8",
        }[self.kind]
        return self._call(name, self.lanes, sums, codes, inputs)

    def depth(self, most: int) -> int:
        """Return how many products of four bytes with codes of at most `most` fit in 16 bits; 0: they are not added."""
        assert self.kind != "pairs" or most < 128 or self.signed, "unsigned codes of 8 bits overflow"
        return (1 << 15) // (2 * 127 * most) if self.kind == "pairs" else 0

    def look_up(self, table: tuple[int, ...], codes: Any) -> Any:
        """Return the bytes that codes of 4 bits stand for."""
        numbers, builder = ir.Constant(self.bytes, table * (self.width // 4)), self.builder
        name = "llvm.aarch64.neon.tbl1.v16i8"
        if _IS_X86:
            name = {4: "llvm.x86.ssse3.pshuf.b.128", 8: "llvm.x86.avx2.pshuf.b", 16: "llvm.x86.avx512.pshuf.b.512"}[
                self.width
            ]
        return builder.bitcast(self._call(name, self.bytes, numbers, builder.bitcast(codes, self.bytes)), self.lanes)

    def pairs(self, sums: Any, codes: Any, inputs: Any) -> Any:
        """Return sums plus codes times inputs, where sums are two of 16 bits in each lane, or None for zeros."""
        builder, flat = self.builder, self.bytes
        codes, inputs = builder.bitcast(codes, flat), builder.bitcast(inputs, flat)
        if self.signed:  # the instruction takes one unsigned operand: move the codes' signs to the inputs
            none = ir.Constant(flat, None)
            is_negative = builder.icmp_signed("<", codes, none)
            codes = builder.select(is_negative, builder.sub(none, codes), codes)
            inputs = builder.select(is_negative, builder.sub(none, inputs), inputs)
        name = {8: "llvm.x86.avx2.pmadd.ub.sw", 16: "llvm.x86.avx512.pmaddubs.w.512"}[self.width]
        found = self._call(name, ir.VectorType(_i16, 2 * self.width), codes, inputs)
        return found if sums is None else builder.add(sums, found)

    def widen(self, sums: Any, pairs: Any) -> Any:
        """Return the sums of 32 bits plus those of 16 bits."""
        name = {8: "llvm.x86.avx2.pmadd.wd", 16: "llvm.x86.avx512.pmaddw.d.512"}[self.width]
        ones = ir.Constant(pairs.type, [1] * (2 * self.width))
        return self.builder.add(sums, self._call(name, self.lanes, pairs, ones))

    def _call(self, name: str, result: Any, *arguments: Any) -> Any:
        kind = ir.FunctionType(result, [each.type for each in arguments])
        return self.builder.call(cgutils.get_or_insert_function(self.builder.module, kind, name), arguments)

    def _plain(self, sums: Any, codes: Any, inputs: Any) -> Any:
        """Multiply the even bytes and the odd bytes as 16-bit numbers, and add neighbours."""
        for half in (0, 1):
            left = self._half(codes, half, self.signed)
            sums = self.builder.add(sums, self._products(left, self._half(inputs, half, True)))
        return sums

    def _half(self, lanes: Any, half: int, signed: bool) -> Any:
        builder, pairs = self.builder, ir.VectorType(_i16, 2 * self.width)
        eight = ir.Constant(pairs, [8] * (2 * self.width))
        found = builder.bitcast(lanes, pairs)
        found = found if half else builder.shl(found, eight)
        return builder.ashr(found, eight) if signed else builder.lshr(found, eight)

    def _products(self, left: Any, right: Any) -> Any:
        builder, wide = self.builder, ir.VectorType(_i32, 2 * self.width)
        products = builder.mul(builder.sext(left, wide), builder.sext(right, wide))
        none = ir.Constant(wide, ir.Undefined)
        even, odd = (
            builder.shuffle_vector(
                products, none, ir.Constant(self.lanes, [2 * lane + first for lane in range(self.width)])
            )
            for first in (0, 1)
        )
        return builder.add(even, odd)


class _Tile:
    """Emits the tile of some rows and one panel."""

    def __init__(self, builder: Any, panels: Panels, rows: int, dot: Dot, vectors: int) -> None:
        self.builder, self.panels, self.rows, self.dot, self.vectors = builder, panels, rows, dot, vectors
        self.width = dot.width
        self.lanes, self.floats = dot.lanes, ir.VectorType(_f32, self.width)
        kind = ir.FunctionType(self.floats, [self.floats] * 3)
        self.fma = cgutils.get_or_insert_function(builder.module, kind, f"llvm.fma.v{self.width}f32")

    def load(self, base: Any, offset: Any, kind: Any) -> Any:
        """Load from `offset` bytes after a byte pointer."""
        offset = offset if isinstance(offset, ir.Value) else _i64(offset)
        value = self.builder.load(self.builder.bitcast(self.builder.gep(base, [offset]), kind.as_pointer()))
        value.align = 1
        return value

    def spread(self, value: Any, kind: Any) -> Any:
        """Return a vector with the same value in each lane."""
        none = ir.Constant(kind, ir.Undefined)
        one = self.builder.insert_element(none, value, _i32(0))
        return self.builder.shuffle_vector(one, none, ir.Constant(self.lanes, [0] * self.width))

    def constant(self, byte: int) -> Any:
        """Return a vector with the same byte everywhere."""
        return ir.Constant(self.lanes, [byte * 0x01010101] * self.width)

    def shifted(self, value: Any, places: int) -> Any:
        """Shift the lanes right, or left if `places` is negative."""
        by = ir.Constant(self.lanes, [abs(places)] * self.width)
        if not places:
            return value
        return self.builder.lshr(value, by) if places > 0 else self.builder.shl(value, by)

    def scales(self, block: Any, group: Any, number: int) -> list[Any]:
        """Return the scales, or the minimums if `number` is 1, of a group's outputs."""
        builder, panels, size = self.builder, self.panels, self.vectors * self.width
        found = []
        for v in range(self.vectors):
            at = number * size + v * self.width
            value = self.scale(block, at)
            if panels.has_factors:
                whole = builder.sext(self.load(group, at, ir.VectorType(_i8, self.width)), self.lanes)
                value = builder.fmul(value, builder.sitofp(whole, self.floats))
            found.append(value)
        return found

    def scale(self, block: Any, at: int) -> Any:
        """Return a vector of a block's numbers, from number `at` on."""
        kind = self.panels.scale
        if kind == "float32":
            return self.load(block, 4 * at, self.floats)
        return emit_widen(self.builder, self.load(block, 2 * at, ir.VectorType(_i16, self.width)), kind)

    def zeros(self, block: Any) -> list[Any]:
        """Return the zeros of a block's outputs, as floats."""
        builder, size, found = self.builder, self.vectors * self.width, []
        is_signed = self.panels.bits == 8 and self.dot.signed
        for v in range(self.vectors):
            at = self.panels.scale_bytes * size + v * self.width
            narrow = self.load(block, at, ir.VectorType(_i8, self.width))
            wide = (builder.sext if is_signed else builder.zext)(narrow, self.lanes)
            found.append(builder.sitofp(wide, self.floats))
        return found

    def codes(self, group: Any, quad: int, v: int, upper: list[Any]) -> Any:
        """Return four inputs' codes of a vector of outputs."""
        builder, panels = self.builder, self.panels
        step, size = 4 * self.width, self.vectors * self.width
        start = panels.factor_bytes * size
        if panels.bits == 8:
            return self.load(group, start + (quad * self.vectors + v) * step, self.lanes)
        start += len(upper) * step
        low = self.load(group, start + (quad // 2 * self.vectors + v) * step, self.lanes)
        low = builder.and_(self.shifted(low, 4 * (quad % 2)), self.constant(15))
        if panels.table:
            return self.dot.look_up(panels.table, low)
        more = panels.bits - 4
        if not more:
            return low
        high = builder.and_(self.shifted(upper[v], more * quad - 4), self.constant(((1 << more) - 1) << 4))
        return builder.or_(low, high)

    def group(self, inputs: Any, block: Any, group: Any, before: list[Any]) -> list[Any]:
        """Emit one group: its integer products, then their share of the float sums."""
        builder, panels, step = self.builder, self.panels, 4 * self.width
        start = panels.factor_bytes * self.vectors * self.width
        upper = []
        if panels.bits in (5, 6):
            upper = [self.load(group, start + v * step, self.lanes) for v in range(self.vectors)]
        record, scale_at, sum_at = panels.record_bytes, panels.group, panels.group + 4
        totals: list[Any] = [ir.Constant(self.lanes, None)] * (self.rows * self.vectors)
        if panels.centre:
            for i in range(len(totals)):
                at = i // self.vectors * record + sum_at
                totals[i] = self.spread(self.load(inputs, at, _i32), self.lanes)
        depth, quads = self.dot.depth(panels.most), panels.group // 4
        pairs: list[Any] = [None] * len(totals)
        for quad in range(quads):
            codes = [self.codes(group, quad, v, upper) for v in range(self.vectors)]
            for row in range(self.rows):
                factor = self.spread(self.load(inputs, row * record + 4 * quad, _i32), self.lanes)
                for v in range(self.vectors):
                    i = row * self.vectors + v
                    if depth:
                        pairs[i] = self.dot.pairs(pairs[i], codes[v], factor)
                    else:
                        totals[i] = self.dot(totals[i], codes[v], factor)
            if depth and ((quad + 1) % depth == 0 or quad + 1 == quads):
                totals = [self.dot.widen(*both) for both in zip(totals, pairs, strict=True)]
                pairs = [None] * len(totals)
        weights, minimums = self.scales(block, group, 0), self.scales(block, group, 1) if panels.has_minimum else []
        zeros = self.zeros(block) if panels.has_zero else []
        after = []
        for row in range(self.rows):
            scale = self.spread(self.load(inputs, row * record + scale_at, _f32), self.floats)
            total: Any = None
            if minimums:
                total = self.spread(self.load(inputs, row * record + sum_at, _f32), self.floats)
            elif zeros:
                negated = self.spread(self.load(inputs, row * record + sum_at, _i32), self.lanes)
                total = builder.sitofp(negated, self.floats)
            for v in range(self.vectors):
                i = row * self.vectors + v
                whole = builder.sitofp(totals[i], self.floats)
                if zeros:  # integers below 2**24, so this is exact
                    whole = builder.call(self.fma, [zeros[v], total, whole])
                value = builder.call(self.fma, [builder.fmul(whole, scale), weights[v], before[i]])
                after.append(builder.call(self.fma, [total, minimums[v], value]) if minimums else value)
        return after

    def emit(self, inputs: Any, count: Any, panel: Any, out: Any, width: Any) -> None:
        """Emit the loop over `count` groups of K; rows of `out` are `width` floats apart."""
        builder, panels, size = self.builder, self.panels, self.vectors * self.width
        before = builder.block
        head, inside, after = (builder.append_basic_block(name) for name in ("head", "inside", "after"))
        builder.branch(head)
        builder.position_at_end(head)
        position = builder.phi(_i64)
        position.add_incoming(_i64(0), before)
        held = [builder.phi(self.floats) for _ in range(self.rows * self.vectors)]
        for phi in held:
            phi.add_incoming(ir.Constant(self.floats, None), before)
        builder.cbranch(builder.icmp_signed("<", position, count), inside, after)
        builder.position_at_end(inside)
        shift = panels.groups.bit_length() - 1
        block = builder.gep(panel, [builder.mul(builder.lshr(position, _i64(shift)), _i64(panels.block_bytes * size))])
        within = builder.mul(builder.and_(position, _i64(panels.groups - 1)), _i64(panels.group_bytes * size))
        group = builder.gep(block, [builder.add(within, _i64(panels.head_bytes * size))])
        # Each group prefetches an equal share of its block, head included.
        here = builder.lshr(builder.mul(position, _i64(panels.block_bytes * size)), _i64(shift))
        for line in range(0, panels.block_bytes * size // panels.groups, _LINE):
            emit_fetch(builder, builder.gep(panel, [builder.add(here, _i64(_FETCH_BYTES + line))]))
        records = builder.gep(inputs, [builder.mul(position, _i64(self.rows * panels.record_bytes))])
        new = self.group(records, block, group, held)
        position.add_incoming(builder.add(position, _i64(1)), builder.block)
        for phi, value in zip(held, new, strict=True):
            phi.add_incoming(value, builder.block)
        builder.branch(head)
        builder.position_at_end(after)
        for i, value in enumerate(held):
            row, v = divmod(i, self.vectors)
            at = builder.mul(builder.add(builder.mul(width, _i64(row)), _i64(v * self.width)), _i64(4))
            place = builder.bitcast(builder.gep(out, [at]), self.floats.as_pointer())
            builder.store(value, place).align = 4


@intrinsic(prefer_literal=True)
def _tile(
    _context: Any, layout: Any, dot: Any, rows: Any, inputs: Any, count: Any, panel: Any, out: Any, width: Any
) -> Any:
    """Compute `rows` rows and one panel."""
    panels, kind, number = _LAYOUTS[layout.literal_value], DOTS[dot.literal_value], rows.literal_value

    def emit(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        if number <= ROWS:
            emit_tile(
                builder, panels, number, Dot(builder, kind, WIDTH, SIGNED and panels.bits == 8), VECTORS, args[3:]
            )
        return context.get_dummy_value()

    return types.void(layout, dot, rows, *[types.int64] * 5), emit


def emit_tile(builder: Any, panels: Panels, rows: int, dot: Dot, vectors: int, args: Any) -> None:
    """Emit a tile as a function of addresses, in bytes, and of the number of groups and the width of the output."""
    inputs, count, panel, out, width = args
    inputs, panel, out = (builder.inttoptr(each, _i8.as_pointer()) for each in (inputs, panel, out))
    _Tile(builder, panels, rows, dot, vectors).emit(inputs, count, panel, out, width)


@cache
def compile_tile(panels: Panels, kind: str = DOT) -> int:
    """Return the address of a compiled function: up to ROWS rows times one panel of a layout."""
    layout, dot = panels.key, DOTS.index(kind)
    assert _LAYOUTS.setdefault(layout, panels) == panels

    # A C function with its own cache entry, called by address: each layout is compiled when it is first used, and the
    # loops around it once for all of them.
    @cfunc(types.void(*[types.int64] * 6), cache=True)
    def tile(rows: int, inputs: int, count: int, panel: int, out: int, width: int) -> None:
        if rows == 1:
            _tile(layout, dot, 1, inputs, count, panel, out, width)
        elif rows == 2:
            _tile(layout, dot, 2, inputs, count, panel, out, width)
        elif rows == 3:
            _tile(layout, dot, 3, inputs, count, panel, out, width)
        elif rows == 4:
            _tile(layout, dot, 4, inputs, count, panel, out, width)
        elif rows == 5:
            _tile(layout, dot, 5, inputs, count, panel, out, width)
        else:
            _tile(layout, dot, 6, inputs, count, panel, out, width)

    _COMPILED.append(tile)
    return int(tile.address)


_LAYOUTS: dict[int, Panels] = {}  # by their keys
_COMPILED: list[Any] = []  # keeps the code behind the addresses alive
