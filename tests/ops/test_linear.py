"""A packed linear layer matches torch, and its bits do not depend on the batch."""

from collections.abc import Sequence

import pytest
import torch
import torch.nn.functional as F

from chairlift.ops.dense import Dense, linear_reference
from chairlift.ops.linear import Linear
from chairlift.ops.norm import Norm, rms_norm_reference
from chairlift.ops.tile import PANEL
from chairlift.ops.weight import GELU_TANH, SILU, Gate, Mixed, Weight, gate_mul_reference, join_weights

SHAPES = [(576, 960), (1536, 576), (100, 37), (7, 3), (513, 16)]
ROWS = [1, 2, 3, 4, 5, 6, 7, 8, 9, 16, 65]


@pytest.mark.parametrize(("depth", "width"), SHAPES)
@pytest.mark.parametrize("rows", ROWS)
def test_it_matches_the_reference(depth: int, width: int, rows: int) -> None:
    generator = torch.Generator().manual_seed(depth * rows)
    weight, bias = torch.randn(width, depth, generator=generator), torch.randn(width, generator=generator)
    x, residual = torch.randn(rows, depth, generator=generator), torch.randn(rows, width, generator=generator)
    bound = 1e-6 + 4e-7 * depth  # one chain of multiply-adds: rounding grows with its length
    for b in (None, bias):
        exact = linear_reference(x.double(), weight.double(), None if b is None else b.double())
        assert (Linear(Dense(weight), b)(x).double() - exact).abs().max() < bound
        added = Linear(Dense(weight), b)(x, add_to=residual.clone())
        assert (added.double() - residual.double() - exact).abs().max() < bound


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("inner", [16, 40, 1536])
@pytest.mark.parametrize("gate", [SILU, GELU_TANH], ids=["silu", "gelu"])
def test_a_gated_layer_matches_the_reference(rows: int, inner: int, gate: Gate) -> None:
    generator = torch.Generator().manual_seed(rows)
    weight, x = torch.randn(2 * inner, 96, generator=generator), torch.randn(rows, 96, generator=generator)
    exact = linear_reference(x.double(), weight.double(), gate=gate)
    got = Linear(Dense(weight), gate=gate)(x)
    assert got.shape == (rows, inner)
    assert (got.double() - exact).abs().max() < 2e-5 * exact.abs().max()


@pytest.mark.parametrize("rows", ROWS)
def test_a_norm_before_it_matches_the_reference(rows: int) -> None:
    generator = torch.Generator().manual_seed(rows)
    weight, scale = torch.randn(40, 96, generator=generator), torch.randn(96, generator=generator)
    x = torch.randn(rows, 96, generator=generator)
    exact = linear_reference(x.double(), weight.double(), norm=Norm(scale.double(), 1e-5))
    assert (Linear(Dense(weight), norm=Norm(scale, 1e-5))(x).double() - exact).abs().max() < 4e-5


def test_a_row_has_the_same_bits_alone_and_in_any_batch() -> None:
    weight = Linear(Dense(torch.randn(96, 1000)))
    x = torch.randn(67, 1000)
    whole = weight(x)
    for rows in (1, 2, 3, 5, 8, 13):
        assert torch.equal(weight(x[:rows]), whole[:rows])
        assert torch.equal(weight(x[-rows:]), whole[-rows:])


def test_threads_do_not_change_a_bit() -> None:
    weight, x = Linear(Dense(torch.randn(200, 300))), torch.randn(9, 300)
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.append(weight(x))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [1, 5, 6, 7, 65])
@pytest.mark.parametrize(("depth", "width"), [(576, 960), (100, 38), (7, 2)])
def test_weights_of_16_bits_give_the_bits_of_float32_weights(
    dtype: torch.dtype, rows: int, depth: int, width: int
) -> None:
    weight, x = torch.randn(width, depth).to(dtype), torch.randn(rows, depth)
    weight[0, :4] = torch.tensor([6e-8, -3e-5, 0.0, 5e4])  # in float16 two subnormals, and nearly the largest number
    bias, norm, residual = torch.randn(width), Norm(torch.randn(depth), 1e-5), torch.randn(rows, width)
    narrow, wide = Dense(weight, torch.float32), Dense(weight.float())
    layer = Linear(narrow, bias, norm=norm)
    assert torch.equal(layer(x, add_to=residual.clone()), Linear(wide, bias, norm=norm)(x, add_to=residual.clone()))
    assert torch.equal(Linear(narrow, gate=SILU)(x), Linear(wide, gate=SILU)(x))
    exact = linear_reference(x.double(), weight.double())
    assert (Linear(narrow)(x).double() - exact).abs().max() < 1e-6 * depth * exact.abs().max()
    assert layer.formats == {str(dtype).removeprefix("torch."): 2 * depth * PANEL * -(-width // PANEL)}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_matrix_of_16_bits_in_a_float32_model_is_joined_cut_and_looked_up(dtype: torch.dtype) -> None:
    tensor, x, ids = torch.randn(40, 24).to(dtype), torch.randn(3, 24), torch.tensor([3, 39, 0])
    weight = Dense(tensor, torch.float32)
    joined = weight.rows(0, 16).join([weight.rows(16, 40)])
    assert torch.equal(Linear(joined)(x), Linear(weight)(x))
    assert torch.equal(weight.lookup(ids), tensor[ids].float())
    part = Linear(weight.columns(4, 12).pad(48))(x[:, 4:12].contiguous())
    assert torch.allclose(part[:, :40], x[:, 4:12] @ tensor[:, 4:12].float().t(), atol=1e-5)
    mixed = join_weights([weight, Dense(tensor.float())])
    assert isinstance(mixed, Mixed)
    assert torch.equal(Linear(mixed)(x)[:, 40:], Linear(weight)(x))
    both = Linear(weight, torch.ones(40), gate=SILU)(x)  # a bias inside of a gate is left to torch
    assert torch.allclose(both, linear_reference(x, tensor.float(), torch.ones(40), gate=SILU), atol=1e-5)


@pytest.mark.parametrize("gate", [SILU, GELU_TANH], ids=["silu", "gelu"])
def test_a_gate_and_an_up_projection_of_two_formats_give_the_bits_of_one(gate: Gate) -> None:
    """So they depend on no batch and on no number of threads, which those of torch's activations do."""
    halves, x = [torch.randn(70, 32).bfloat16() for _ in range(2)], torch.randn(9, 32)
    mixed = join_weights([Dense(halves[0], torch.float32), Dense(halves[1].float())])
    assert isinstance(mixed, Mixed)
    assert torch.equal(Linear(mixed, gate=gate)(x), Linear(Dense(torch.cat(halves).float()), gate=gate)(x))
    assert Linear(mixed, gate=gate)(x[:0]).shape == (0, 70)


@pytest.mark.parametrize("gated", [False, True])
def test_packing_gives_back_the_pages_of_a_mapped_matrix_as_it_reads_them(gated: bool) -> None:
    """The pages of a whole embedding would be as large as the rest of a small model."""
    released = []
    weight = Dense(torch.randn(3 * 2048, 2048).bfloat16(), torch.float32, lambda: released.append(True))
    Linear(weight, gate=SILU if gated else None)
    assert len(released) >= 3


def test_other_dtypes_use_plain_torch() -> None:
    weight, x = torch.randn(48, 32).bfloat16(), torch.randn(5, 32).bfloat16()
    assert torch.equal(Linear(Dense(weight))(x), linear_reference(x, weight))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_output_norm_is_applied_before_the_residual(dtype: torch.dtype) -> None:
    weight, x, residual = torch.randn(48, 32).to(dtype), torch.randn(5, 32).to(dtype), torch.randn(5, 48).to(dtype)
    norm = Norm(torch.randn(48), 1e-6)
    normed = rms_norm_reference(linear_reference(x, weight), norm.weight, norm.eps)
    layer = Linear(Dense(weight), output_norm=norm)
    near = 1e-5 if dtype == torch.float32 else 0.05
    assert torch.allclose(layer(x), normed, atol=near)
    assert torch.allclose(layer(x, add_to=residual.clone()), residual + normed, atol=near)


def test_the_ranks_parts_add_up_to_the_whole_layer() -> None:
    """Column-parallel layers return parts of the output; row-parallel ones are summed before bias and residual."""
    weight, bias, x = Dense(torch.randn(40, 24)), torch.randn(40), torch.randn(3, 24)
    residual = torch.randn(3, 40)
    whole = Linear(weight, bias)(x, add_to=residual.clone())
    columns = [Linear(weight.rows(first, first + 20), bias[first : first + 20])(x) for first in (0, 20)]
    assert torch.allclose(residual + torch.cat(columns, 1), whole, atol=1e-5)
    other = Linear(weight.columns(12, 24))(x[:, 12:].contiguous())
    first = Linear(weight.columns(0, 12), bias, reduce=lambda part: part + other)
    assert torch.allclose(first(x[:, :12].contiguous(), add_to=residual.clone()), whole, atol=1e-5)


class HalfBytes(Weight):
    """A new format, as another file would add it: 8-bit codes with a scale per output."""

    def __init__(self, codes: torch.Tensor, scales: torch.Tensor) -> None:
        self.codes, self.scales = codes, scales

    @staticmethod
    def of(tensor: torch.Tensor) -> "HalfBytes":
        scales = tensor.abs().amax(1, keepdim=True) / 127
        return HalfBytes((tensor / scales).round().to(torch.int8), scales)

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes.shape[0], self.codes.shape[1]

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.scales.nbytes

    @property
    def device(self) -> torch.device:
        return self.codes.device

    def multiply(self, x: torch.Tensor) -> torch.Tensor:
        return x @ (self.codes * self.scales).t()

    def join(self, others: Sequence["HalfBytes"]) -> "HalfBytes":
        every = [self, *others]
        return HalfBytes(torch.cat([each.codes for each in every]), torch.cat([each.scales for each in every]))

    def rows(self, first: int, last: int) -> "HalfBytes":
        return HalfBytes(self.codes[first:last], self.scales[first:last])

    def columns(self, first: int, last: int) -> "HalfBytes":
        return HalfBytes(self.codes[:, first:last], self.scales)

    def pad(self, outputs: int) -> "HalfBytes":
        missing = (0, 0, 0, outputs - self.codes.shape[0])
        return HalfBytes(F.pad(self.codes, missing), F.pad(self.scales, missing))

    def lookup(self, ids: torch.Tensor) -> torch.Tensor:
        return self.codes[ids] * self.scales[ids]


def test_another_weight_format_needs_one_class() -> None:
    gate, up, x = torch.randn(40, 32), torch.randn(40, 32), torch.randn(5, 32)
    norm, residual = Norm(torch.rand(32) + 0.5, 1e-6), torch.randn(5, 40)
    layer = Linear(HalfBytes.of(gate).join([HalfBytes.of(up)]), norm=norm, gate=SILU)
    exact = linear_reference(x, torch.cat([gate, up]), norm=norm, gate=SILU)
    assert layer.nbytes < Linear(Dense(torch.cat([gate, up])), norm=norm, gate=SILU).nbytes / 3
    assert (layer(x) - exact).norm() < 0.03 * exact.norm()
    assert torch.allclose(
        torch.from_numpy(layer(x.numpy(), add_to=residual.clone().numpy())) - residual, layer(x), atol=1e-5
    )


def test_projections_of_several_formats_are_one_weight() -> None:
    dense, halved, x = Dense(torch.randn(40, 32)), HalfBytes.of(torch.randn(24, 32)), torch.randn(5, 32)
    both = join_weights([dense, halved])
    assert (both.shape, both.nbytes) == ((64, 32), dense.nbytes + halved.nbytes)
    whole = torch.cat([dense.multiply(x), halved.multiply(x)], 1)
    assert torch.equal(both.multiply(x), whole)
    assert torch.allclose(both.rows(30, 50).multiply(x), whole[:, 30:50], atol=1e-5)
    parts = both.columns(0, 16).multiply(x[:, :16]) + both.columns(16, 32).multiply(x[:, 16:])
    assert torch.allclose(parts, whole, atol=1e-5)
    assert torch.equal(both.pad(70).multiply(x)[:, 64:], torch.zeros(5, 6))
    assert torch.allclose(Linear(both, gate=SILU)(x), gate_mul_reference(whole, SILU), atol=1e-5)
    ids = torch.tensor([0, 39, 40, 63, 5])
    assert torch.equal(both.lookup(ids), torch.cat([dense.tensor, halved.codes * halved.scales])[ids])
    assert isinstance(join_weights([halved, halved]), HalfBytes)
