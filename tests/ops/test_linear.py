"""A packed linear layer gives what torch gives, and the same bits whatever the batch."""

import pytest
import torch

from chairlift.ops.linear import Linear, Norm, linear_reference

SHAPES = [(576, 960), (1536, 576), (100, 37), (7, 3), (513, 16)]
ROWS = [1, 2, 3, 4, 5, 6, 7, 8, 9, 16, 65]


@pytest.mark.parametrize(("depth", "width"), SHAPES)
@pytest.mark.parametrize("rows", ROWS)
def test_it_matches_the_reference(depth: int, width: int, rows: int) -> None:
    generator = torch.Generator().manual_seed(depth * rows)
    weight, bias = torch.randn(width, depth, generator=generator), torch.randn(width, generator=generator)
    x, residual = torch.randn(rows, depth, generator=generator), torch.randn(rows, width, generator=generator)
    bound = 1e-6 + 4e-7 * depth  # one chain of multiply-adds: the rounding of partial sums grows with its length
    for b in (None, bias):
        exact = linear_reference(x.double(), weight.double(), None if b is None else b.double())
        assert (Linear(weight, b)(x).double() - exact).abs().max() < bound
        added = Linear(weight, b)(x, add_to=residual.clone())
        assert (added.double() - residual.double() - exact).abs().max() < bound


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("inner", [16, 40, 1536])
def test_a_gated_layer_matches_the_reference(rows: int, inner: int) -> None:
    generator = torch.Generator().manual_seed(rows)
    weight, x = torch.randn(2 * inner, 96, generator=generator), torch.randn(rows, 96, generator=generator)
    exact = linear_reference(x.double(), weight.double(), gated=True)
    got = Linear(weight, gated=True)(x)
    assert got.shape == (rows, inner)
    assert (got.double() - exact).abs().max() < 2e-5 * exact.abs().max()


@pytest.mark.parametrize("rows", ROWS)
def test_a_norm_before_it_matches_the_reference(rows: int) -> None:
    generator = torch.Generator().manual_seed(rows)
    weight, scale = torch.randn(40, 96, generator=generator), torch.randn(96, generator=generator)
    x = torch.randn(rows, 96, generator=generator)
    exact = linear_reference(x.double(), weight.double(), norm=Norm(scale.double(), 1e-5))
    assert (Linear(weight, norm=Norm(scale, 1e-5))(x).double() - exact).abs().max() < 4e-5


def test_a_row_has_the_same_bits_alone_and_in_any_batch() -> None:
    weight = Linear(torch.randn(96, 1000))
    x = torch.randn(67, 1000)
    whole = weight(x)
    for rows in (1, 2, 3, 5, 8, 13):
        assert torch.equal(weight(x[:rows]), whole[:rows])
        assert torch.equal(weight(x[-rows:]), whole[-rows:])


def test_threads_do_not_change_a_bit() -> None:
    weight, x = Linear(torch.randn(200, 300)), torch.randn(9, 300)
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.append(weight(x))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


def test_other_types_take_the_plain_path() -> None:
    weight, x = torch.randn(48, 32).bfloat16(), torch.randn(5, 32).bfloat16()
    assert torch.equal(Linear(weight)(x), linear_reference(x, weight))
