"""Quantized products compute the same bits with the instructions of other CPUs, compiled for them and run here."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import llvmlite.binding as llvm
import numpy as np
import pytest

CPUS = {  # the name for LLVM, its features, and how it multiplies
    "AVX2": ("haswell", "avx2,fma,f16c", "pairs 8"),
    "AVX2 and AVX-VNNI": ("cascadelake", "avx2,f16c,avxvnni", "vnni 8"),  # encoded as AVX512-VNNI's of 256 bits
    "AVX512 without VNNI": ("skylake-avx512", "avx2,f16c,avx512f,avx512bw", "pairs 16"),
    "neither": ("x86-64-v2", "sse4.2", "plain 4"),
}
NEEDS = {"haswell": "avx2", "cascadelake": "avx512vnni", "skylake-avx512": "avx512bw", "x86-64-v2": "sse4.2"}


def run(cpu: str, features: str, file: Path) -> dict[str, np.ndarray]:
    command = [sys.executable, Path(__file__).with_name("other_cpu.py"), cpu, features, file]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}  # the tests' own modules
    subprocess.run(command, check=True, timeout=600, env=environment)
    with np.load(file) as found:
        return dict(found)


@pytest.mark.long
@pytest.mark.skipif(platform.machine().lower() not in ("x86_64", "amd64"), reason="other CPUs of this machine's kind")
@pytest.mark.parametrize("name", CPUS)
def test_every_cpu_computes_the_same_bits(name: str, tmp_path: Path) -> None:
    cpu, features, expected = CPUS[name]
    if not llvm.get_host_cpu_features().get(NEEDS[cpu]):
        pytest.skip(f"this machine cannot run {name}")
    here, there = run("host", "", tmp_path / "here.npz"), run(cpu, features, tmp_path / "there.npz")
    assert " ".join(there.pop("dot")) == expected
    del here["dot"]
    for kind, product in here.items():
        assert np.isfinite(product).all() and np.array_equal(product, there[kind]), kind
