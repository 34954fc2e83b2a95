"""Agreement of our 16-bit answers with transformers', on the same weights: tokens, and errors against float32.

In 16 bits two engines round differently, so greedy answers differ at some token, and from there on they are different
texts. So each engine is also run along the same tokens (teacher forcing), and its next-token log-probabilities are
compared. The error of transformers itself against float32, with the same weights, shows how much is rounding.
"""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from random import Random
from statistics import fmean
from typing import Any

import torch
from rich.table import Table
from rich.text import Text

from chairlift import __version__
from chairlift.core.errors import ChairliftError
from chairlift.core.params import SamplingParams
from chairlift.core.settings import Settings
from chairlift.core.words import counted
from chairlift.evaluation.twin import Subject
from chairlift.offline.llm import LLM
from chairlift.report.numbers import common_length
from chairlift.report.tables import table

Ids = list[int]
Summary = dict[str, Any]
SHORT = 64  # least context: an engine runs a step of some tokens at start-up
Advance = Callable[[int], None]  # called with the amount of `work` done
TOPICS = ("gravity", "prime numbers", "the city of Paris", "bread", "the speed of light", "trains", "bees", "skiing")
ASKS = ("What is known about {}?", "Explain {} to a child.", "Tell me a joke about {}.", "Who first wrote about {}?")


@dataclass(slots=True)
class TokenScores:
    """One model's predictions at every position of all answers, concatenated."""

    logprobs: list[float] = field(default_factory=list)  # of the answers' tokens
    likeliest: Ids = field(default_factory=list)
    agrees: list[bool] = field(default_factory=list)  # whether the answer's token is the likeliest


@dataclass(frozen=True, slots=True)
class EngineResult:
    """The results of one engine in 16 bits."""

    answers: list[Ids]  # its own greedy answers
    decoded: list[float]  # log-probabilities of their tokens during decoding
    forced: TokenScores  # along transformers' answers


@dataclass(frozen=True, slots=True)
class Float32Scores:
    """The predictions of transformers in float32, with the 16-bit weights of both engines."""

    along_ours: TokenScores
    along_theirs: TokenScores


def measure(
    model: str,
    settings: dict[str, Any],
    prompts: int = 32,
    prompt_tokens: int = 64,
    tokens: int = 64,
    notice: Callable[[str], None] = lambda _text: None,
    advance: Advance = lambda _count: None,
) -> Summary:
    """Run both engines and the float32 reference in sequence, so that only one is in memory."""
    if find_spec("transformers") is None:
        raise ChairliftError("transformers, to compare with, is not installed: pip install 'chairlift[compare]'")
    subject = Subject(model, Settings.of(**settings))
    room, needed = settings.get("max_length") or subject.config.max_length, prompt_tokens + tokens + 1
    if needed > room:
        raise ChairliftError(
            f"prompts of {prompt_tokens:,} and answers of {counted(tokens, 'token')} need a context of {needed:,}, and "
            f"this one holds {room:,}: lower --prompt-tokens or --tokens"
        )
    dtype = str(subject.config.dtype).removeprefix("torch.")
    inputs = make_prompts(subject, prompts, prompt_tokens)
    with tempfile.TemporaryDirectory(prefix="chairlift-bench-") as scratch:
        notice("writing the weights for both engines")
        folder = subject.folder(Path(scratch))
        notice(f"transformers in {dtype}")
        theirs = run_theirs(folder, subject, inputs, tokens, advance)
        tidy()
        notice(f"chairlift in {dtype}")
        chosen = {**settings, "load_format": "auto", "max_length": min(room, max(needed, SHORT))}
        ours = run_ours(folder, chosen, inputs, theirs.answers, advance)
        tidy()
        notice("transformers in float32")
        truth = run_truth(folder, subject, inputs, ours.answers, theirs.answers, advance)
        tidy()
    return summarize(ours, theirs, truth) | {
        "chairlift": __version__,
        "transformers": version("transformers"),
        "model": model,
        "has_random_weights": subject.is_random,
        "device": torch.cuda.get_device_name(subject.device) if subject.device.type == "cuda" else "cpu",
        "dtype": dtype,
        "prompts": prompts,
        "prompt_tokens": prompt_tokens,
        "tokens": tokens,
    }


def work(prompts: int, tokens: int) -> int:
    """Return the total of `advance`: transformers' decode steps, and each prompt in five passes."""
    return tokens + 5 * prompts


def make_prompts(subject: Subject, count: int, length: int) -> list[Ids]:
    """Cut prompts from a text, or from random tokens if there is no tokenizer.

    All prompts have the same length, so that transformers runs them as one batch without padding.
    """
    draw = Random(0)
    questions = [ask.format(topic) for ask in ASKS for topic in TOPICS]
    rounds = count * length // len(questions) + 1  # each question has at least one token
    text = " ".join(question for _ in range(rounds) for question in draw.sample(questions, len(questions)))
    try:
        ids = subject.encode(text)
    except ChairliftError:
        ids = [draw.randrange(subject.config.vocab_size) for _ in range(count * length)]
    return [ids[start : start + length] for start in range(0, count * length, length)]


# ---- transformers


def load(folder: Path, subject: Subject) -> Any:
    """Load the model in transformers, in 16 bits."""
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=subject.config.dtype, attn_implementation="sdpa", local_files_only=True
    )
    return model.to(subject.device).eval()


@torch.inference_mode()
def run_theirs(folder: Path, subject: Subject, prompts: list[Ids], count: int, advance: Advance) -> EngineResult:
    """Run transformers: its greedy answers, and its predictions along them."""
    model = load(folder, subject)
    answers, decoded = decode(model, prompts, count, advance)
    return EngineResult(answers, decoded, force(model, prompts, answers, advance))


@torch.inference_mode()
def run_truth(
    folder: Path, subject: Subject, prompts: list[Ids], ours: list[Ids], theirs: list[Ids], advance: Advance
) -> Float32Scores:
    """Run the float32 reference: the 16-bit weights converted to float32, so that only the arithmetic differs."""
    model = load(folder, subject).float()
    return Float32Scores(force(model, prompts, ours, advance), force(model, prompts, theirs, advance))


def decode(model: Any, prompts: list[Ids], count: int, advance: Advance) -> tuple[list[Ids], list[float]]:
    """Decode greedy answers with the KV cache; return them and their tokens' log-probabilities."""
    ids, cache = torch.tensor(prompts, device=model.device), None
    sampled, scores = [], []
    for _ in range(count):
        out = model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        cache = out.past_key_values
        best, ids = out.logits[:, -1].float().log_softmax(-1).max(-1, keepdim=True)
        sampled.append(ids)
        scores.append(best)
        advance(1)
    return torch.cat(sampled, 1).tolist(), torch.cat(scores, 1).flatten().tolist()


def force(model: Any, prompts: list[Ids], answers: list[Ids], advance: Advance) -> TokenScores:
    """Return the model's predictions at each position of the answers, in one pass per answer."""
    found = TokenScores()
    for prompt, answer in zip(prompts, answers, strict=True):
        ids = torch.tensor([prompt + answer], device=model.device)
        logits = model(ids, logits_to_keep=len(answer) + 1).logits[0, :-1]
        logprobs = logits.float().log_softmax(-1)
        best, likeliest = logprobs.max(-1)
        chosen = logprobs.gather(1, ids[0, len(prompt) :, None])[:, 0]
        found.logprobs += chosen.tolist()
        found.likeliest += likeliest.tolist()
        found.agrees += (chosen >= best).tolist()
        advance(1)
    return found


# ---- ours


def run_ours(
    folder: Path, settings: dict[str, Any], prompts: list[Ids], others: list[Ids], advance: Advance
) -> EngineResult:
    """Run our engine: its greedy answers, and its predictions along the others' answers."""
    llm = LLM(str(folder), progress=False, **settings)
    count = len(others[0])
    greedy = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, logprobs=0)
    answers = [result.outputs[0] for result in llm.generate(prompts, greedy)]
    decoded = [
        entry[token].logprob
        for answer in answers
        for token, entry in zip(answer.token_ids, answer.logprobs or [], strict=True)
    ]
    advance(len(prompts))
    forced = TokenScores()
    forced_prompts = [prompt + answer for prompt, answer in zip(prompts, others, strict=True)]
    for result in llm.generate(forced_prompts, SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1)):
        entries = (result.prompt_logprobs or [])[-count:]
        for token, entry in zip(result.prompt_token_ids[-count:], entries, strict=True):
            assert entry is not None
            forced.logprobs.append(entry[token].logprob)
            forced.likeliest.append(next(iter(entry)))  # entries are ordered, likeliest first
            forced.agrees.append(entry[token].rank == 1)
    advance(len(prompts))
    return EngineResult([answer.token_ids for answer in answers], decoded, forced)


def tidy() -> None:
    """Free the memory of the deleted model."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


# ---- results


def summarize(ours: EngineResult, theirs: EngineResult, truth: Float32Scores) -> Summary:
    """Return all numbers; an error is the distance of a token's log-probability from float32's."""
    found = {
        "ours": _numbers(ours, truth.along_ours, truth.along_theirs),
        "theirs": _numbers(theirs, truth.along_theirs, truth.along_theirs),
    }
    pairs = list(zip(ours.answers, theirs.answers, strict=True))
    common = [common_length(one, other) for one, other in pairs]
    return {
        **found,
        "same_answers": sum(one == other for one, other in pairs),
        "same_tokens": sum(common) / sum(len(other) for _, other in pairs),
        "ratio": {
            name: found["ours"][name] / found["theirs"][name]
            for name in ("forced_error_mean", "forced_error_max", "decoded_error_mean", "decoded_error_max")
            if found["theirs"][name]
        },
    }


def _numbers(side: EngineResult, along_own: TokenScores, along_theirs: TokenScores) -> Summary:
    forced = _distances(side.forced.logprobs, along_theirs.logprobs)
    decoded = _distances(side.decoded, along_own.logprobs)
    pairs = zip(side.forced.likeliest, along_theirs.likeliest, strict=True)
    return {
        "agrees": fmean(side.forced.agrees),
        "as_float32": fmean(one == other for one, other in pairs),
        "forced_error_mean": fmean(forced),
        "forced_error_max": max(forced),
        "decoded_error_mean": fmean(decoded),
        "decoded_error_max": max(decoded),
    }


def _distances(some: Sequence[float], others: Sequence[float]) -> list[float]:
    return [abs(one - other) for one, other in zip(some, others, strict=True)]


def agreement_table(summary: Summary) -> Table:
    """Return the table of both engines, with ratios of errors."""
    ours, theirs, ratio = summary["ours"], summary["theirs"], summary["ratio"]

    def share(label: str, name: str) -> tuple[str, ...]:
        return label, f"{ours[name]:.2%}", f"{theirs[name]:.2%}"

    def error(label: str, name: str) -> tuple[str, ...]:
        return label, f"{ours[name]:.5f}", f"{theirs[name]:.5f}", f"{ratio[name]:.2f}x" if name in ratio else ""

    weights = ", random weights" if summary["has_random_weights"] else ""
    return table(
        f"{summary['model']}{weights}, {summary['dtype']} on {summary['device']}:\n"
        f"{counted(summary['prompts'], 'prompt')} of {counted(summary['prompt_tokens'], 'token')}, "
        f"greedy answers of {summary['tokens']:,}",
        ("", "chairlift", "transformers", "ratio"),
        [
            (Text("own greedy answers", "bold"),),
            ("  identical answers", f"{summary['same_answers']} of {summary['prompts']}"),
            ("  tokens before the first difference", f"{summary['same_tokens']:.2%}"),
            error("  error as decoded, mean", "decoded_error_mean"),
            error("  error as decoded, largest", "decoded_error_max"),
            None,
            (Text("along transformers' answers", "bold"),),
            share("  likeliest token is the answer's", "agrees"),
            share("  likeliest token as in float32", "as_float32"),
            error("  error, mean", "forced_error_mean"),
            error("  error, largest", "forced_error_max"),
        ],
        f"transformers {summary['transformers']}; errors are distances of log-probabilities\n"
        "from transformers in float32 with the same weights; a ratio is\n"
        "ours / theirs: about 1 if our errors are those of 16 bits",
    )
