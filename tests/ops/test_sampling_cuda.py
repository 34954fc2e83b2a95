"""Sampling in Triton against plain torch: on the GPU, or in Triton's interpreter without one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from chairlift import LLM, SamplingParams
from chairlift.ops import sampling, sampling_cuda
from chairlift.ops.filters import Filters
from chairlift.ops.masks import forbid_reference_, pack_masks

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPES = pytest.mark.parametrize(
    "dtype",
    [
        pytest.param(torch.float32, id="f32"),
        pytest.param(torch.bfloat16, id="bf16", marks=pytest.mark.long),
        pytest.param(torch.float16, id="f16", marks=pytest.mark.long),
    ],
)
VOCABULARY = 5000  # several parts, the last of which is not full


def make_logits(rows: int, dtype: torch.dtype, vocabulary: int = VOCABULARY) -> torch.Tensor:
    """Draw logits; in half precision many of them are equal."""
    return (3 * torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(1))).to(DEVICE, dtype)


def make_keys(rows: int) -> torch.Tensor:
    return torch.randint(0, 2**32, (rows, 2), generator=torch.Generator().manual_seed(2)).to(DEVICE)


def column(*values: float) -> torch.Tensor:
    return torch.tensor(values, device=DEVICE)


def kept(logits: torch.Tensor, temperature: torch.Tensor, filters: Filters) -> torch.Tensor:
    """Return the tokens that the kernel keeps."""
    lowest, last = sampling_cuda.cutoffs(logits, temperature, *filters)
    bits = logits.float().view(torch.int32)
    order = (torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)) >> sampling_cuda._SHIFTS[logits.dtype]
    place = torch.arange(logits.shape[1], device=DEVICE)
    return (order > lowest[:, None]) | ((order == lowest[:, None]) & (place <= last[:, None]))


def kept_reference(logits: torch.Tensor, temperature: torch.Tensor, filters: Filters) -> torch.Tensor:
    """Return the kept tokens by sorting, with sums in double precision."""
    scaled = logits.float() / temperature[:, None]
    floor = scaled.amax(-1, keepdim=True) + filters.min_p[:, None].log()
    left = scaled.masked_fill(scaled < floor, -torch.inf).double()
    nothing = torch.zeros_like(filters.min_p)
    return sampling.keep_likeliest_reference(left, filters.top_k, filters.top_p.double(), nothing) > -torch.inf


@DTYPES
def test_the_likeliest_is_the_first_of_the_highest(dtype: torch.dtype) -> None:
    for vocabulary in (3, 100, VOCABULARY):
        logits = make_logits(4, dtype, vocabulary)
        assert torch.equal(sampling_cuda.likeliest(logits), logits.argmax(-1))
    logits[0, 4000], logits[0, 77] = 50.0, 50.0
    logits[1] = -torch.inf
    logits[2, :] = 1.0
    assert sampling_cuda.likeliest(logits)[:3].tolist() == [77, sampling.NO_TOKEN, 0]


@pytest.mark.parametrize("vocabulary", [100, VOCABULARY], ids=["one part", "several parts"])
@pytest.mark.parametrize("value", [torch.nan, -torch.inf], ids=["not numbers", "all banned"])
def test_a_row_without_an_allowed_token_samples_none_and_does_not_change_others(value: float, vocabulary: int) -> None:
    logits = make_logits(4, torch.float32, vocabulary)
    logits[1:3] = value
    filters = Filters(column(5, 5, 0, 5).long(), column(0.5, 0.5, 0.5, 0.5), column(0.1, 0.1, 0.0, 0.1))
    temperature = column(1.0, 1.0, 1.0, 0.0)
    for tokens in (
        sampling_cuda.likeliest(logits),
        sampling_cuda.draw(logits, temperature, make_keys(4), filters),
        sampling_cuda.draw(logits, temperature, make_keys(4), None),
    ):
        assert tokens[1:3].tolist() == [sampling.NO_TOKEN] * 2
        assert (tokens[[0, 3]] < vocabulary).all()
        assert tokens.to(torch.int32)[1:3].tolist() == [0, 0], "the next step reads a token of the vocabulary"


@DTYPES
def test_sampled_rows_use_the_reference_noise_and_greedy_rows_none(dtype: torch.dtype) -> None:
    logits, keys = make_logits(6, dtype), make_keys(6)
    temperature = column(0.6, 1.0, 0.0, 2.5, 0.05, 30.0)
    is_drawn = temperature > 0
    expected = logits.argmax(-1)
    scaled = logits.float()[is_drawn] / temperature[is_drawn, None]
    expected[is_drawn] = (scaled + sampling.gumbel(keys[is_drawn], VOCABULARY)).argmax(-1)
    assert torch.equal(sampling_cuda.draw(logits, temperature, keys, None), expected)


@DTYPES
def test_top_k_and_min_p_keep_the_same_tokens_as_a_sort_also_among_equal_logits(dtype: torch.dtype) -> None:
    logits = make_logits(6, dtype)
    logits[3] = 0.25  # all equal: the first ids are kept
    logits[4, 10:] = -torch.inf  # fewer tokens than top_k
    logits[5, ::2] = -0.0
    logits[5, 1::2] = 0.0
    temperature = column(0.6, 1.0, 2.0, 1.0, 0.7, 1.0)
    filters = Filters(column(20, 0, 900, 7, 40, 5).long(), torch.ones(6, device=DEVICE), column(0, 0.2, 0.05, 0, 0, 0))
    both = kept(logits, temperature, filters), kept_reference(logits, temperature, filters)
    assert torch.equal(both[0][:5] & (logits[:5] > -torch.inf), both[1][:5])
    assert both[0].sum(-1).tolist()[3:5] == [7, 10]
    zeros = Filters(*(values[5:].repeat(3) for values in filters))
    drawn = set(sampling_cuda.draw(logits[5:].repeat(3, 1), column(1.0, 1.0, 1.0), make_keys(3), zeros).tolist())
    assert drawn <= {0, 1, 2, 3, 4}, "-0.0 equals 0.0"


@DTYPES
def test_top_p_keeps_the_fewest_that_reach_p(dtype: torch.dtype) -> None:
    logits = make_logits(7, dtype)
    logits[5] = 1.0  # all equal: the first ids are kept
    temperature = column(0.6, 1.0, 3.0, 1.0, 1.0, 1.0, 0.02)
    filters = Filters(
        column(0, 0, 0, 50, 1, 0, 0).long(),
        column(0.9, 0.5, 0.999, 0.7, 0.5, 0.25, 1e-9),
        column(0, 0.01, 0, 0, 0, 0, 0),
    )
    got, expected = kept(logits, temperature, filters), kept_reference(logits, temperature, filters)
    assert ((got != expected).sum(-1) <= 1).all(), "sums differ in the last bits, so the last token may differ"
    assert got.sum(-1).tolist()[4:] == [1, VOCABULARY // 4, 1]


def test_filtered_sampling_matches_the_reference() -> None:
    logits, keys = make_logits(5, torch.float32), make_keys(5)
    temperature = column(0.6, 1.3, 0.0, 2.0, 1.0)
    filters = Filters(column(0, 40, 0, 100, 0).long(), column(0.9, 1, 0.3, 0.8, 1), column(0, 0, 0, 0, 0.1))
    is_drawn = temperature > 0
    expected = logits.argmax(-1)
    left = kept_reference(logits[is_drawn], temperature[is_drawn], Filters(*(values[is_drawn] for values in filters)))
    scaled = (logits[is_drawn] / temperature[is_drawn, None]).masked_fill(~left, -torch.inf)
    expected[is_drawn] = (scaled + sampling.gumbel(keys[is_drawn], VOCABULARY)).argmax(-1)
    assert torch.equal(sampling_cuda.draw(logits, temperature, keys, filters), expected)


def test_a_model_generates_the_same_tokens_with_these_kernels(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Greedy, drawn, filtered and penalized requests in one batch, through the sampler."""
    params = [
        SamplingParams(temperature=0, max_tokens=3, ignore_eos=True),
        SamplingParams(temperature=0.8, seed=3, max_tokens=3, ignore_eos=True, logprobs=2),
        SamplingParams(temperature=0.9, top_p=0.8, top_k=50, min_p=0.01, seed=4, max_tokens=3, ignore_eos=True),
        SamplingParams(
            temperature=1.0, repetition_penalty=1.2, logit_bias={7: 2.0}, bad_words=["the"], seed=5, max_tokens=3
        ),
    ]
    llm = LLM(str(tiny_model), progress=False, device=str(DEVICE), dtype="float32", max_length=128)
    answers = []
    for fused in (True, False):
        monkeypatch.setattr(sampling, "is_fused", lambda _logits, fused=fused: fused)
        outputs = llm.generate(["one", "two", "three", "the four of them"], params)
        answers.append([output.outputs[0].token_ids for output in outputs])
    assert answers[0] == answers[1]


@DTYPES
def test_masks_forbid_as_in_the_reference(dtype: torch.dtype) -> None:
    logits = make_logits(5, dtype)
    generator = torch.Generator().manual_seed(3)
    masks: list[bytes | None] = [
        bytes(torch.randint(0, 256, (VOCABULARY // 8,), generator=generator).tolist()) for _ in range(3)
    ]
    packed = pack_masks([*masks, None, b"\x02"], VOCABULARY).to(DEVICE)
    expected = logits.clone()
    forbid_reference_(expected, packed)
    sampling_cuda.forbid_(logits, packed)
    assert torch.equal(logits, expected)


@DTYPES
@pytest.mark.parametrize("vocabulary", [100, VOCABULARY], ids=["one part", "several parts"])
def test_masked_rows_are_drawn_as_from_forbidden_logits_and_written_to_their_rows(
    dtype: torch.dtype, vocabulary: int
) -> None:
    logits, keys, temperature = make_logits(4, dtype, vocabulary), make_keys(4), column(0.7, 0.0, 1.0, 1.3)
    generator = torch.Generator().manual_seed(3)
    some = bytes(torch.randint(0, 256, (-(-vocabulary // 8),), generator=generator).tolist())
    packed = pack_masks([some, some, None, b"\x00"], vocabulary).to(DEVICE)
    forbidden = logits.clone()
    forbid_reference_(forbidden, packed)
    expected = sampling_cuda.draw(forbidden, temperature, keys, None)
    table = torch.full((9, 50), 7, dtype=torch.int32, device=DEVICE)
    rows, positions = (torch.tensor(each, device=DEVICE) for each in ([3, 0, 8, 5], [1, 49, 0, 20]))
    narrow = keys.to(torch.uint32).view(torch.int32)  # as they are sent to a GPU
    got = sampling_cuda.draw(logits, temperature, narrow, None, packed, (table, rows.int(), positions.int()))
    assert torch.equal(got, expected)
    assert got[3] == sampling.NO_TOKEN
    assert torch.equal(table[rows, positions], expected.to(torch.int32))
    assert (table == 7).sum() >= table.numel() - 4
