"""How near our answers in 16 bits are to transformers' own, on the same weights: tokens, and errors against float32.

In 16 bits no two engines round alike, so greedy answers part somewhere, and from there on they are different texts. So
each is also led along the same tokens and asked at every place what comes next. What transformers itself loses to
float32, with the very same weights, says how much of a difference is rounding.
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
SHORT = 64  # the shortest context: an engine tries a step of some tokens when it is made
Advance = Callable[[int], None]  # told how much of `work` is done
TOPICS = ("gravity", "prime numbers", "the city of Paris", "bread", "the speed of light", "trains", "bees", "skiing")
ASKS = ("What is known about {}?", "Explain {} to a child.", "Tell me a joke about {}.", "Who first wrote about {}?")


@dataclass(slots=True)
class Scored:
    """What one model says at every place of all answers, one after the other."""

    logprobs: list[float] = field(default_factory=list)  # of the tokens that stand there
    likeliest: Ids = field(default_factory=list)
    agrees: list[bool] = field(default_factory=list)  # nothing is likelier than what stands there


@dataclass(frozen=True, slots=True)
class Side:
    """One engine in 16 bits."""

    answers: list[Ids]  # its own, greedy
    decoded: list[float]  # the log-probabilities of their tokens, as it decoded them
    forced: Scored  # along transformers' answers


@dataclass(frozen=True, slots=True)
class Truth:
    """Transformers in float32, with the weights that both sides have."""

    along_ours: Scored
    along_theirs: Scored


def measure(
    model: str,
    settings: dict[str, Any],
    prompts: int = 32,
    prompt_tokens: int = 64,
    tokens: int = 64,
    notice: Callable[[str], None] = lambda _text: None,
    advance: Advance = lambda _count: None,
) -> Summary:
    """Both engines and the float32 truth, one after the other, so that only one is in memory."""
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
    asked = make_prompts(subject, prompts, prompt_tokens)
    with tempfile.TemporaryDirectory(prefix="chairlift-bench-") as scratch:
        notice("the weights, for both engines to read")
        folder = subject.folder(Path(scratch))
        notice(f"transformers in {dtype}")
        theirs = run_theirs(folder, subject, asked, tokens, advance)
        tidy()
        notice(f"chairlift in {dtype}")
        chosen = {**settings, "load_format": "auto", "max_length": min(room, max(needed, SHORT))}
        ours = run_ours(folder, chosen, asked, theirs.answers, advance)
        tidy()
        notice("transformers in float32")
        truth = run_truth(folder, subject, asked, ours.answers, theirs.answers, advance)
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
    """How far a bar has to go: their decode steps, and each prompt in the five passes over all."""
    return tokens + 5 * prompts


def make_prompts(subject: Subject, count: int, length: int) -> list[Ids]:
    """Pieces of a text, or of random tokens where there is no tokenizer to read it with.

    All have the same length, so that transformers takes them as one batch without padding.
    """
    draw = Random(0)
    questions = [ask.format(topic) for ask in ASKS for topic in TOPICS]
    rounds = count * length // len(questions) + 1  # each question has a token at least
    text = " ".join(question for _ in range(rounds) for question in draw.sample(questions, len(questions)))
    try:
        ids = subject.encode(text)
    except ChairliftError:
        ids = [draw.randrange(subject.config.vocab_size) for _ in range(count * length)]
    return [ids[start : start + length] for start in range(0, count * length, length)]


# ---- transformers


def load(folder: Path, subject: Subject) -> Any:
    """The model in transformers, in 16 bits."""
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=subject.config.dtype, attn_implementation="sdpa", local_files_only=True
    )
    return model.to(subject.device).eval()


@torch.inference_mode()
def run_theirs(folder: Path, subject: Subject, prompts: list[Ids], count: int, advance: Advance) -> Side:
    """Their own answers, and what they say along these when they read them as a prompt."""
    model = load(folder, subject)
    answers, decoded = decode(model, prompts, count, advance)
    return Side(answers, decoded, force(model, prompts, answers, advance))


@torch.inference_mode()
def run_truth(
    folder: Path, subject: Subject, prompts: list[Ids], ours: list[Ids], theirs: list[Ids], advance: Advance
) -> Truth:
    """The weights are those of 16 bits, made wider: only the arithmetic differs."""
    model = load(folder, subject).float()
    return Truth(force(model, prompts, ours, advance), force(model, prompts, theirs, advance))


def decode(model: Any, prompts: list[Ids], count: int, advance: Advance) -> tuple[list[Ids], list[float]]:
    """Greedy answers, token by token with its KV cache, and the log-probabilities of what was taken."""
    ids, cache = torch.tensor(prompts, device=model.device), None
    taken, scores = [], []
    for _ in range(count):
        out = model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        cache = out.past_key_values
        best, ids = out.logits[:, -1].float().log_softmax(-1).max(-1, keepdim=True)
        taken.append(ids)
        scores.append(best)
        advance(1)
    return torch.cat(taken, 1).tolist(), torch.cat(scores, 1).flatten().tolist()


def force(model: Any, prompts: list[Ids], answers: list[Ids], advance: Advance) -> Scored:
    """What it says at each place of the answers, in one pass over each."""
    found = Scored()
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


def run_ours(folder: Path, settings: dict[str, Any], prompts: list[Ids], others: list[Ids], advance: Advance) -> Side:
    """Our own answers, and what we say along the others'."""
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
    forced = Scored()
    led = [prompt + answer for prompt, answer in zip(prompts, others, strict=True)]
    for result in llm.generate(led, SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1)):
        entries = (result.prompt_logprobs or [])[-count:]
        for token, entry in zip(result.prompt_token_ids[-count:], entries, strict=True):
            assert entry is not None
            forced.logprobs.append(entry[token].logprob)
            forced.likeliest.append(next(iter(entry)))  # the likeliest comes first
            forced.agrees.append(entry[token].rank == 1)
    advance(len(prompts))
    return Side([answer.token_ids for answer in answers], decoded, forced)


def tidy() -> None:
    """Give back the memory of the model that is gone."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


# ---- what was found


def summarize(ours: Side, theirs: Side, truth: Truth) -> Summary:
    """All numbers; an error is the distance of a token's log-probability from float32's."""
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


def _numbers(side: Side, along_own: Scored, along_theirs: Scored) -> Summary:
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
    """Ours beside theirs; for errors, the ratio too."""
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
            (Text("each answers by itself", "bold"),),
            ("  the same answer to the end", f"{summary['same_answers']} of {summary['prompts']}"),
            ("  tokens before answers part", f"{summary['same_tokens']:.2%}"),
            error("  error as decoded, mean", "decoded_error_mean"),
            error("  error as decoded, largest", "decoded_error_max"),
            None,
            (Text("led along transformers' answers", "bold"),),
            share("  nothing likelier than its token", "agrees"),
            share("  likeliest token as in float32", "as_float32"),
            error("  error, mean", "forced_error_mean"),
            error("  error, largest", "forced_error_max"),
        ],
        f"transformers {summary['transformers']}; errors are distances of log-probabilities\n"
        "from its own in float32 with the same weights; a ratio is\n"
        "ours / theirs: about 1 when we lose what 16 bits lose",
    )
