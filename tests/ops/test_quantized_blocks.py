"""GGUF blocks multiplied as they are: near the dequantized product, equal to an integer one, whatever the batch."""

from collections.abc import Callable

import llvmlite.binding as llvm
import numpy as np
import pytest
import torch
from llvmlite import ir

from chairlift.ops import dot
from chairlift.ops.block_codes import UNPACK
from chairlift.ops.block_formats import FORMATS
from chairlift.ops.blocks import Blocks
from chairlift.ops.dense import Dense, linear_reference
from chairlift.ops.linear import Linear
from chairlift.ops.norm import Norm
from chairlift.ops.panels import FORMATS as LAYOUTS
from chairlift.ops.panels import PANEL, Panels
from chairlift.ops.quantized import quantize_reference
from chairlift.ops.weight import SILU, Fused, Mixed, join_weights

FORMS = {form.name: form for form in FORMATS.values() if form.plain is None}
SCALES = {"Q6_K": (208,), "Q8_0": (0,), "Q4_0": (0,), "Q5_0": (0,)}  # bytes of float16 in a block; others: 0 and 2


def blocks(name: str, outputs: int, inputs: int, seed: int = 0) -> Blocks:
    """Return random blocks with scales of a usual size."""
    form, generator = FORMS[name], torch.Generator().manual_seed(seed)
    count = inputs // form.values
    raw = torch.randint(0, 256, (outputs, count, form.nbytes), dtype=torch.uint8, generator=generator)
    for at in SCALES.get(name, (0, 2)):
        scales = 0.01 + 0.02 * torch.rand(outputs, count, 1, generator=generator)
        raw[:, :, at : at + 2] = (scales * (-1 if at == 2 and form.values == 32 else 1)).half().view(torch.uint8)
    return Blocks(raw, form)


def integer_product(weight: Blocks, x: torch.Tensor) -> torch.Tensor:
    """Quantize the inputs as the kernel does, sum integers by group, and add the groups in order, in plain torch."""
    layout, codes = LAYOUTS[weight.form.name], UNPACK[weight.form.name](weight.raw.view(-1, weight.form.nbytes))
    group, (outputs, inputs) = layout.group, weight.shape
    quantized, scales = (torch.from_numpy(each) for each in quantize_reference(x.numpy(), group))
    one = torch.ones(1, dtype=torch.float16)
    units = codes.units if codes.units is not None else one.expand(len(codes.scales), 2)
    weights = (codes.scales.float() * units[:, :1].float()).view(outputs, -1)
    numbers = codes.codes.view(outputs, -1, group).long() - codes.centre
    total = torch.zeros(len(x), outputs, dtype=torch.float64)
    for i in range(inputs // group):
        own = quantized[:, i * group : (i + 1) * group].long()
        scale = scales[:, i : i + 1]
        part = (own @ numbers[:, i].T).float() * scale
        total = (total + part.double() * weights[:, i].double()).float().double()
        if codes.minimums is not None:
            minimum = (codes.minimums.float() * units[:, 1:].float()).view(outputs, -1)[:, i]
            total = (total + (own.sum(1, keepdim=True).float() * scale).double() * minimum.double()).float().double()
    return total.float()


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 6, 7, 13, 40])
def test_a_product_equals_the_integer_reference(name: str, rows: int) -> None:
    weight, x = blocks(name, 75, 512), torch.randn(rows, 512, generator=torch.Generator().manual_seed(rows))
    got, expected = Linear(weight)(x), integer_product(weight, x)
    assert (got - expected).abs().max() <= 1e-6 * expected.abs().max()
    assert (got == expected).float().mean() > 0.99  # a float64 sum rounds like a fused multiply-add, almost always


@pytest.mark.parametrize("name", FORMS)
def test_a_product_is_near_that_of_the_dequantized_weight(name: str) -> None:
    """Rounding an input to 8 bits errs by at most 1/254 of its group's largest one, and errors average out."""
    weight, x = blocks(name, 64, 1024), torch.randn(9, 1024)
    exact = weight.multiply(x.double())
    assert (Linear(weight)(x) - exact).norm() < 0.01 * exact.norm()


@pytest.mark.parametrize("name", ["Q4_1", "Q6_K"])
def test_norm_bias_gate_and_residual_match_the_reference(name: str) -> None:
    generator = torch.Generator().manual_seed(1)
    weight = blocks(name, 90, 256)
    x, bias, scale = (torch.randn(size, generator=generator) for size in ((7, 256), (90,), (256,)))
    dense, norm = weight.multiply(torch.eye(256)).T.contiguous(), Norm(scale, 1e-5)
    residual = torch.randn(7, 90, generator=generator)
    for fused in ({"bias": bias}, {"norm": norm}, {"norm": norm, "gate": SILU}, {"bias": bias, "add_to": residual}):
        exact = linear_reference(x, dense, **{k: v.clone() if k == "add_to" else v for k, v in fused.items()})
        add_to = fused.pop("add_to", None)
        got = Linear(weight, **fused)(x, None if add_to is None else add_to.clone())
        assert got.shape == exact.shape
        assert (got - exact).norm() < 0.02 * exact.norm()


@pytest.mark.parametrize("name", FORMS)
def test_a_row_has_the_same_bits_alone_and_in_any_batch(name: str) -> None:
    layer, x = Linear(blocks(name, 100, 512), norm=Norm(torch.randn(512), 1e-5)), torch.randn(230, 512)
    whole = layer(x)
    for rows in (1, 2, 3, 5, 8, 13, 64):
        assert torch.equal(layer(x[:rows]), whole[:rows])
        assert torch.equal(layer(x[-rows:]), whole[-rows:])


def test_threads_do_not_change_a_bit() -> None:
    layer, x = Linear(blocks("Q4_K", 200, 256)), torch.randn(9, 256)
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.append(layer(x))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


@pytest.mark.parametrize("name", ["Q4_1", *(pytest.param(each, marks=pytest.mark.long) for each in ("Q8_0", "Q6_K"))])
def test_machines_without_byte_products_compute_the_same_bits(name: str) -> None:
    layer, x = blocks(name, 64, 256).prepare(Fused()), torch.randn(11, 256).numpy()
    fast = layer(x)
    layer._tile = dot.compile_tile(LAYOUTS[name], "plain")
    assert np.array_equal(layer(x), fast)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_an_input_that_is_no_number_stays_visible(bad: float) -> None:
    x = torch.randn(3, 256)
    x[1, 200] = bad
    found = Linear(blocks("Q4_1", 40, 256))(x)
    assert not found[1].isfinite().any()
    assert found[0].isfinite().all() and found[2].isfinite().all()


def test_zeros_and_tiny_inputs_give_zeros() -> None:
    layer = Linear(blocks("Q4_1", 40, 256))
    for value in (0.0, 1e-38, 1e-45):
        assert layer(torch.full((2, 256), value)).abs().max() < 1e-30


@pytest.mark.parametrize("name", FORMS)
def test_an_embedding_dequantizes_the_rows_it_needs(name: str) -> None:
    weight, ids = blocks(name, 50, 256), torch.tensor([3, 3, 49, 0])
    assert torch.equal(weight.lookup(ids), weight.multiply(torch.eye(256)).T[ids])


def test_parts_of_a_weight_are_those_of_its_matrix() -> None:
    weight, x = blocks("Q4_1", 50, 256), torch.randn(3, 256)
    whole = weight.multiply(x)
    assert torch.equal(weight.rows(10, 30).multiply(x), whole[:, 10:30])
    assert torch.equal(weight.pad(64).multiply(x)[:, :50], whole) and not weight.pad(64).multiply(x)[:, 50:].any()
    left, right = weight.columns(0, 96).multiply(x[:, :96]), weight.columns(96, 256).multiply(x[:, 96:])
    assert torch.allclose(left + right, whole, atol=1e-4)
    assert weight.nbytes == 50 * 256 // 32 * 20


def test_projections_of_several_formats_are_one_compiled_layer() -> None:
    weights = [blocks("Q4_K", 48, 256, 1), blocks("Q4_K", 16, 256, 2), blocks("Q6_K", 16, 256, 3)]
    joined = join_weights(weights)
    assert isinstance(joined, Mixed) and [part.shape[0] for part in joined.parts] == [64, 16]
    x, bias, norm = torch.randn(5, 256), torch.randn(80), Norm(torch.randn(256), 1e-5)
    layer = Linear(joined, bias, norm=norm)
    assert layer.is_compiled
    apart = [Linear(weight, part, norm=norm)(x) for weight, part in zip(weights, bias.split([48, 16, 16]), strict=True)]
    assert torch.equal(layer(x), torch.cat(apart, 1))
    assert torch.equal(layer(x, add_to=torch.ones(5, 80)), 1 + torch.cat(apart, 1))
    gated = Linear(join_weights([weights[1], weights[2]]), norm=norm, gate=SILU)
    assert gated.is_compiled
    expected = SILU(Linear(weights[1], norm=norm)(x)) * Linear(weights[2], norm=norm)(x)
    assert torch.allclose(gated(x), expected, rtol=1e-5)
    beside = Linear(join_weights([weights[0], Dense(torch.randn(8, 256))]))
    assert beside.is_compiled and beside(x).shape == (5, 56)


@pytest.mark.parametrize("name", FORMS)
def test_packed_weights_take_the_bytes_of_the_file(name: str) -> None:
    weight = blocks(name, 4 * PANEL, 512)
    assert weight.nbytes <= Linear(weight).nbytes <= 1.03 * weight.nbytes


def assembly(triple: str, cpu: str, features: str, emit: Callable[[ir.IRBuilder, list[ir.Value]], None]) -> str:
    """Compile a function of five addresses for another machine."""
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    word, module = ir.IntType(64), ir.Module()
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), [word] * 5), "tile")
    builder = ir.IRBuilder(function.append_basic_block())
    emit(builder, list(function.args))
    builder.ret_void()
    machine = llvm.Target.from_triple(triple).create_target_machine(cpu=cpu, features=features, opt=3)
    parsed = llvm.parse_assembly(
        f'target triple = "{triple}"\n' + str(module).replace('target triple = "unknown-unknown-unknown"', "")
    )
    parsed.verify()
    return machine.emit_assembly(parsed)


@pytest.mark.parametrize(
    ("triple", "cpu", "features", "kind", "shape", "instruction"),
    [
        ("aarch64-unknown-linux-gnu", "neoverse-n1", "", "sdot", (4, 4, 3), "sdot"),
        ("aarch64-unknown-linux-gnu", "cortex-a72", "", "plain", (4, 4, 3), "smull"),
        ("x86_64-unknown-linux-gnu", "alderlake", "", "vnni", (8, 3, 2), "vpdpbusd"),
        ("x86_64-unknown-linux-gnu", "cascadelake", "", "vnni", (16, 6, 2), "vpdpbusd"),
        ("x86_64-unknown-linux-gnu", "haswell", "", "pairs", (8, 3, 2), "vpmaddubsw"),
        ("x86_64-unknown-linux-gnu", "skylake-avx512", "", "pairs", (16, 6, 2), "vpmaddubsw"),
        ("x86_64-unknown-linux-gnu", "haswell", "", "plain", (8, 3, 2), "vpmaddwd"),
    ],
)
@pytest.mark.parametrize("name", ["Q4_1", "Q6_K"])
def test_each_machine_gets_its_instruction(
    triple: str, cpu: str, features: str, kind: str, shape: tuple[int, int, int], instruction: str, name: str
) -> None:
    width, rows, vectors = shape
    layout: Panels = LAYOUTS[name]

    def emit(builder: ir.IRBuilder, args: list[ir.Value]) -> None:
        dot.emit_tile(builder, layout, rows, dot.Dot(builder, kind, width, kind == "sdot"), vectors, args)

    text = assembly(triple, cpu, features, emit)
    products = rows * vectors * layout.group // 4 * (2 if kind == "plain" else 1)
    assert text.count(f"\t{instruction}") >= products


def test_packing_gives_back_the_pages_of_a_mapped_matrix_as_it_reads_them() -> None:
    """The pages of a whole embedding would be as large as the rest of a small model."""
    made, released = blocks("Q4_K", 3072, 1024), []
    Linear(Blocks(made.raw, made.form, lambda: released.append(True)))
    assert len(released) >= 3
