"""Measure what a process group costs one rank, which needs none: the same workload without and with it.

    python benchmarks/one_rank.py qwen3-0.6b uniform256

Each is in its own process, in turn, three times; the last line is the ratio of the medians.
"""

from __future__ import annotations

import subprocess
import sys
import time
from dataclasses import replace
from statistics import median

TIMES = 3


def measure(shape: str, workload: str, *, has_group: bool) -> float:
    """Return the output tokens per second of a workload on random weights."""
    import torch

    from chairlift import LLM, SamplingParams
    from chairlift.cluster.tensor_parallel import build as ranked
    from chairlift.cluster.tensor_parallel.ranks import Ranks
    from chairlift.core.settings import Settings
    from chairlift.execution.build import Built
    from chairlift.offline import llm as offline
    from chairlift.traffic.workloads import NAMED

    def build(model: str, settings: Settings, *, progress: bool = True) -> Built:
        ranks = Ranks(1, torch.device("cuda" if torch.cuda.is_available() else "cpu"))
        loaded = ranked.load_model(model, settings, progress=progress, ranks=ranks)
        return ranked.assemble(loaded, settings, progress=progress)

    if has_group:
        offline.build = build
    queries = NAMED[workload]().queries
    with LLM(shape, progress=False, load_format="dummy") as llm:
        prompts = [[token % llm.config.vocab_size for token in query.prompt] for query in queries]
        base = SamplingParams(temperature=0, ignore_eos=True)
        params = [replace(base, max_tokens=query.output_tokens) for query in queries]
        llm.generate(prompts[:4], replace(base, max_tokens=8), progress=False)
        llm.reset_prefix_cache()
        start = time.monotonic()
        outputs = llm.generate(prompts, params, progress=False)
        return sum(len(each.outputs[0].token_ids) for each in outputs) / (time.monotonic() - start)


def main() -> None:
    """Run both in turn and print their speeds."""
    if sys.argv[3:]:
        print(measure(sys.argv[1], sys.argv[2], has_group=sys.argv[3] == "group"))
        return
    speeds: dict[str, list[float]] = {"none": [], "group": []}
    for _ in range(TIMES):
        for kind, found in speeds.items():
            command = [sys.executable, __file__, *sys.argv[1:3], kind]
            found.append(float(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout))
            print(f"{kind}: {found[-1]:,.0f} output tok/s", flush=True)
    print(f"with a group / without: {median(speeds['group']) / median(speeds['none']):.3f}")


if __name__ == "__main__":
    main()
