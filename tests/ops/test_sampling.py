"""Sampling: filters keep exactly the defined tokens; noise has its distribution and depends on its key alone."""

import numpy as np
import pytest
import torch

from chairlift.ops import sampling, sampling_cpu


def keys(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 2**32, (count, 2), generator=torch.Generator().manual_seed(seed))


def kept(logits: torch.Tensor, k: int = 0, p: float = 1.0, min_p: float = 0.0) -> list[list[int]]:
    rows = logits.shape[0]
    out = sampling.keep_likeliest(
        logits.clone(), torch.tensor([k] * rows), torch.tensor([p] * rows), torch.tensor([min_p] * rows)
    )
    for before, after in zip(logits, out, strict=True):  # kept logits are unchanged
        assert torch.equal(after[after > -torch.inf], before[after > -torch.inf])
    return [torch.nonzero(row > -torch.inf).flatten().tolist() for row in out]


PROBS = torch.tensor([[0.1, 0.4, 0.05, 0.3, 0.15]])


def test_the_likeliest_is_the_first_of_the_highest() -> None:
    logits = torch.randn(7, 5001, generator=torch.Generator().manual_seed(2))
    assert torch.equal(sampling.likeliest(logits), logits.argmax(-1))
    equal = torch.tensor([[1.0, 3.0, 3.0], [-torch.inf, -torch.inf, 0.0], [2.0, 2.0, 2.0]])
    assert sampling.likeliest(equal).tolist() == [1, 2, 0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("value", [torch.nan, -torch.inf], ids=["not numbers", "all banned"])
def test_a_row_without_an_allowed_token_samples_none_and_does_not_change_others(
    value: float, dtype: torch.dtype
) -> None:
    logits = torch.randn(3, 5001, generator=torch.Generator().manual_seed(2)).to(dtype)
    logits[1] = value
    ones = torch.ones(3)
    for filters in (
        None,
        sampling.Filters(3 * ones.long(), ones / 2, ones / 10),
        sampling.Filters(ones.long(), ones, ones),
    ):
        for tokens in (sampling.likeliest(logits), sampling.draw(logits.float(), ones, keys(3), filters)):
            assert tokens[1] == sampling.NO_TOKEN
            assert (tokens[[0, 2]] < 5001).all()
            assert tokens.to(torch.int32)[1] == 0, "the next step reads a token of the vocabulary"


def test_top_k_keeps_the_k_likeliest() -> None:
    assert kept(PROBS.log(), k=2) == [[1, 3]]
    assert kept(PROBS.log(), k=50) == [[0, 1, 2, 3, 4]]


def test_of_equal_logits_the_first_ids_are_kept() -> None:
    assert kept(torch.zeros(1, 6), k=2) == [[0, 1]]
    assert kept(torch.zeros(1, 6), p=0.4) == [[0, 1, 2]]
    assert kept(torch.tensor([[0.0, 1.0, 0.0, 1.0, 0.0]]), k=3) == [[0, 1, 3]]
    banned = torch.full((1, 5000), -torch.inf)
    banned[0, 4000:4003] = 1.0
    assert kept(banned, k=2) == [[4000, 4001]]
    assert kept(banned, k=4, p=0.5) == [[4000, 4001]]


def test_top_p_keeps_the_fewest_that_reach_p() -> None:
    assert kept(PROBS.log(), p=0.39) == [[1]]
    assert kept(PROBS.log(), p=0.41) == [[1, 3]]
    assert kept(PROBS.log(), p=0.84) == [[1, 3, 4]]
    assert kept(PROBS.log(), p=1e-9) == [[1]]


def test_top_p_applies_to_the_probabilities_after_top_k() -> None:
    assert kept(PROBS.log(), k=2, p=0.5) == [[1]]  # 0.4 / 0.7 is above 0.5


def test_min_p_keeps_tokens_above_a_share_of_the_likeliest() -> None:
    assert kept(PROBS.log(), min_p=0.3) == [[1, 3, 4]]


@pytest.mark.parametrize("scale", [0.01, 1.0, 8.0])
def test_the_fast_filters_match_a_sort_of_the_whole_vocabulary(scale: float) -> None:
    logits = torch.randn(6, 5000, generator=torch.Generator().manual_seed(1)) * scale
    k = torch.tensor([0, 0, 40, 2000, 0, 1])
    p = torch.tensor([0.9, 0.5, 1.0, 0.7, 0.999, 1.0])
    min_p = torch.tensor([0.0, 0.0, 0.0, 0.0, 0.1, 0.0])
    fast = sampling.keep_likeliest(logits.clone(), k, p, min_p)
    slow = sampling.keep_likeliest_reference(logits, k, p, min_p)
    for quick, sure in zip(fast, slow, strict=True):
        # Cumulative sums differ in the last bit, so the last kept token may differ.
        assert ((quick > -torch.inf) != (sure > -torch.inf)).sum() <= 1


def test_uniform_numbers_equal_the_reference_bit_for_bit() -> None:
    uniform = torch.empty(3, 1001)
    sampling_cpu.uniform(2, keys(3).numpy(), uniform.numpy())
    assert torch.equal(uniform, sampling.uniform_reference(keys(3), 1001))
    assert uniform.min() > 0
    assert uniform.max() < 1


def test_noise_depends_on_the_row_s_key_alone() -> None:
    many = keys(50)
    noise = sampling.gumbel(many, 700)
    assert torch.equal(sampling.gumbel(many[7:8], 700)[0], noise[7])
    assert len(torch.unique(noise[:, 0])) == 50


def test_draws_follow_the_distribution() -> None:
    """Pearson's chi-squared over 40,000 draws: 5 degrees of freedom, far below the 1-in-a-million quantile of 37."""
    probs = torch.tensor([0.4, 0.25, 0.2, 0.1, 0.04, 0.01])
    draws = 40_000
    tokens = (probs.log() + sampling.gumbel(keys(draws), 6)).argmax(-1)
    counts = np.bincount(tokens.numpy(), minlength=6)
    expected = probs.numpy() * draws
    assert ((counts - expected) ** 2 / expected).sum() < 37


def test_neighbouring_tokens_and_keys_are_uncorrelated() -> None:
    noise = sampling.uniform_reference(torch.stack([torch.arange(400), torch.zeros(400).long()], 1), 400)
    for a, b in ((noise[:, :-1], noise[:, 1:]), (noise[:-1], noise[1:])):
        correlation = torch.corrcoef(torch.stack([a.flatten(), b.flatten()]))[0, 1]
        assert correlation.abs() < 0.015  # 160,000 pairs: six standard deviations


def test_penalties_follow_their_definitions() -> None:
    logits = torch.tensor([[2.0, -1.0, 3.0, 0.5, 1.0]])
    history = torch.tensor([[0, 1, 2, 2, 4]], dtype=torch.int32)  # the prompt is 0 1; the 4 is padding
    sampling.penalize_(
        logits,
        torch.tensor([0]),
        history,
        torch.tensor([2]),
        torch.tensor([4]),
        torch.tensor([2.0]),
        torch.tensor([0.5]),
        torch.tensor([0.1]),
    )
    assert torch.allclose(logits, torch.tensor([[1.0, -2.0, 1.5 - 0.2 - 0.5, 0.5, 1.0]]))


def test_compiled_penalties_equal_the_reference() -> None:
    generator = torch.Generator().manual_seed(3)
    rows, vocabulary, longest = 5, 300, 80
    logits = torch.randn(7, vocabulary, generator=generator)
    which = torch.tensor([6, 0, 3, 2, 5])
    history = torch.randint(0, 40, (rows, longest), generator=generator).int()
    prompts, lengths = torch.tensor([1, 10, 50, 80, 0]), torch.tensor([70, 10, 80, 80, 5])
    penalties = torch.rand(3, rows, generator=generator) + 0.5
    expected = logits.clone()
    part = expected[which]
    sampling.penalize_reference_(part, history, prompts, lengths, *penalties)
    expected[which] = part
    sampling.penalize_(logits, which, history, prompts, lengths, *penalties)
    assert torch.equal(logits, expected)


def test_candidates_are_stop_tokens_and_the_likeliest_others_in_order() -> None:
    generator = torch.Generator().manual_seed(4)
    logits = torch.randn(3, 200, generator=generator)
    own = [[5, 7, 9, 11], [100], []]
    stops, is_stop = torch.zeros(3, 4, dtype=torch.int64), torch.zeros(3, 4, dtype=torch.bool)
    for row, ids in enumerate(own):
        stops[row, : len(ids)] = torch.tensor(ids, dtype=torch.int64)
        is_stop[row, : len(ids)] = True
    logprobs = logits.log_softmax(-1)
    for count in (3, 200):
        values, ids = sampling.candidates(logits, stops, is_stop, count)
        for row, ends in enumerate(own):
            order = logprobs[row].argsort(descending=True).tolist()
            others = [token for token in order if token not in ends][:count]
            expected = [token for token in order if token in ends or token in others]
            assert ids[row].tolist()[: len(expected)] == expected
            assert torch.equal(values[row, : len(expected)], logprobs[row, expected])


def test_scores_are_log_probabilities_with_ranks() -> None:
    chosen, rank, values, ids = sampling.score(PROBS.log(), torch.tensor([4]), 2)
    assert chosen.exp().tolist() == pytest.approx([0.15])
    assert rank.tolist() == [3]
    assert ids.tolist() == [[1, 3]]
    assert values.exp().tolist() == [pytest.approx([0.4, 0.3])]
