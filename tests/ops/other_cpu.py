"""Products as a CPU with fewer instructions computes them: run by test_other_cpus.py in a process of its own.

    python other_cpu.py CPU FEATURES FILE

FEATURES are those that this machine's CPU is said to have; CPU is the one that code is compiled for. The products'
bits are written to FILE.
"""

import os
import sys

import llvmlite.binding as llvm
import numpy as np


def pretend(cpu: str, features: list[str]) -> None:
    """Let Numba and Chairlift find another CPU; before either is imported."""
    os.environ["NUMBA_CPU_NAME"], os.environ["NUMBA_CPU_FEATURES"] = cpu, ""
    llvm.get_host_cpu_features = lambda: dict.fromkeys(features, True)


def main() -> None:
    """Multiply weights of each kind and write the results."""
    cpu, features, file = sys.argv[1:]
    if cpu != "host":
        pretend(cpu, features.split(","))
    import torch
    from test_grouped_cpu import make
    from test_quantized_blocks import blocks

    from chairlift.ops.dense import Dense
    from chairlift.ops.linear import Linear
    from chairlift.ops.panels import DOT
    from chairlift.ops.tile import WIDTH

    weights = {name: blocks(name, 75, 512) for name in ("Q8_0", "Q4_K", "Q6_K", "Q5_0")}
    weights |= {name: make(name, 75) for name in ("awq", "w8a16", "w8a8", "mxfp4")}
    weights["w8a8"].codes[:40] = -128
    numbers = torch.randn(75, 512, generator=torch.Generator().manual_seed(2))
    numbers[0, :3] = torch.tensor([6e-8, -3e-5, 6.5e4])
    halves = {"float16": torch.float16, "bfloat16": torch.bfloat16}
    weights |= {name: Dense(numbers.to(dtype), torch.float32) for name, dtype in halves.items()}
    found = {"dot": np.array([DOT, str(WIDTH)])}
    for name, weight in weights.items():
        x = 10 * torch.randn(11, weight.shape[1], generator=torch.Generator().manual_seed(1))
        x[0] = 127  # with the codes below, the largest sums that there can be
        found[name] = Linear(weight)(x).numpy()
    np.savez(file, **found)


if __name__ == "__main__":
    main()
