"""Times of the linear layers of a model in each weight format: on a GPU in a captured graph, or on a CPU.

    python benchmarks/quantized_products.py --rows 1,4,16,64,256,2048
    python benchmarks/quantized_products.py --rows 1 --formats int4 --sweep     # tries other tiles
    python benchmarks/quantized_products.py --device cpu --rows 1,16,64 --threads 2

Each layer has several copies of its weight, more than the caches hold, as the layers of a model are. On a CPU the
formats are float32, bfloat16, float16, int8, int4, mxfp4 and GGUF's; each round times all, so that other load affects
them alike.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from chairlift.models.formats.on_load import KINDS, quantize
from chairlift.ops.block_formats import FORMATS
from chairlift.ops.blocks import Blocks
from chairlift.ops.codes import Code, pack
from chairlift.ops.dense import Dense
from chairlift.ops.grouped import Grouped
from chairlift.ops.norm import Norm
from chairlift.ops.triton_found import HAS_TRITON
from chairlift.ops.weight import SILU, Fused, Product, Weight

if HAS_TRITON:
    from chairlift.ops import grouped_cuda as kernels

HIDDEN, INNER, QKV = 4096, 14336, 6144  # Llama-3.1-8B
LAYERS = {  # outputs, inputs, has a norm, has a gate
    "qkv": (QKV, HIDDEN, True, False),
    "output": (HIDDEN, HIDDEN, False, False),
    "gate and up": (2 * INNER, HIDDEN, True, True),
    "down": (HIDDEN, INNER, False, False),
}
SMALL = {  # Qwen2.5-1.5B, for a CPU
    "qkv": (2048, 1536, True, False),
    "output": (1536, 1536, False, False),
    "gate and up": (2 * 8960, 1536, True, True),
    "down": (1536, 8960, False, False),
}
BLOCKS = {form.name: form for form in FORMATS.values() if form.plain is None}
CACHE = 160 << 20  # bytes of weights that a graph reads: several times the L2 cache


def milliseconds(calls: list[Callable[[], Any]], repeat: int = 5) -> float:
    """Return the time of one call, from the best replay of a graph of all of them."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for call in calls:
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    best = float("inf")
    for _ in range(repeat):
        first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        first.record()
        graph.replay()
        last.record()
        torch.cuda.synchronize()
        best = min(best, first.elapsed_time(last))
    return best / len(calls)


def products(layer: str, form: str) -> tuple[list[Product], torch.Tensor | None]:
    """Return copies of a layer, and its residual."""
    outputs, inputs, normed, gated = LAYERS[layer]
    norm = Norm(torch.ones(inputs, dtype=torch.bfloat16, device="cuda"), 1e-5) if normed else None
    fused = Fused(norm, None, SILU if gated else None)
    made: list[Product] = []
    while not made or (sum(each.nbytes for each in made) < CACHE or len(made) < 8):
        matrix = torch.randn(outputs, inputs, dtype=torch.bfloat16, device="cuda") / 64
        made.append((Dense(matrix) if form == "bfloat16" else quantize(matrix, KINDS[form])).prepare(fused))
    return made, None


def cpu_weight(form: str, outputs: int, inputs: int) -> Weight:
    """Return a random matrix in a format."""
    if form in BLOCKS:
        block = BLOCKS[form]
        raw = torch.randint(0, 128, (outputs, inputs // block.values, block.nbytes), dtype=torch.uint8)
        return Blocks(raw & 0x3F, block)  # scales that are finite
    if form == "mxfp4":
        scales = torch.full((outputs, inputs // 32), 2.0**-8, dtype=torch.bfloat16)
        return Grouped(Code.FP4, pack(torch.randint(0, 16, (outputs, inputs))), scales, None, torch.float32)
    matrix = torch.randn(outputs, inputs) / 64
    if form in ("float32", "bfloat16", "float16"):
        return Dense(matrix.to(getattr(torch, form)), torch.float32)
    return quantize(matrix, KINDS[form])


def on_cpu(layers: list[str], forms: list[str], sizes: list[int], rounds: int) -> None:
    """Print a table of all layers, formats and rows: the best of some interleaved rounds."""
    for layer in layers:
        outputs, inputs, normed, gated = SMALL[layer]
        fused = Fused(Norm(torch.ones(inputs), 1e-5) if normed else None, None, SILU if gated else None)
        made: dict[str, list[Product]] = {}
        for form in forms:
            one = cpu_weight(form, outputs, inputs).prepare(fused)
            count = max(2, -(-CACHE // one.nbytes))
            made[form] = [one, *(cpu_weight(form, outputs, inputs).prepare(fused) for _ in range(count - 1))]
        best: dict[tuple[str, int], float] = {}
        for rows in sizes:
            x = torch.randn(rows, inputs).numpy()
            for number, form in itertools.product(range(rounds + 1), forms):
                begin = time.perf_counter()
                for each in made[form]:
                    each(x)
                took = (time.perf_counter() - begin) / len(made[form])
                if number:  # the first compiles
                    best[form, rows] = min(took, best.get((form, rows), took))
        for form in forms:
            size = made[form][0].nbytes
            line = f"{layer:12} {form:8} {size / 2**20:6.1f} MiB |"
            for rows in sizes:
                took = best[form, rows]
                line += f" {rows}: {1e3 * took:.2f} ms, {size / took / 1e9:.1f} GB/s, "
                line += f"{2 * rows * outputs * inputs / took / 1e9:.0f} GOP/s |"
            print(line, flush=True)


def one_tiles(code: Code) -> Iterator[dict[str, Any]]:
    """Yield tiles of the kernel for one row."""
    for columns, (depth, warps) in itertools.product(
        (4, 8, 16), ((1024, 1), (1024, 2), (2048, 1), (2048, 2), (4096, 2), (4096, 4), (2048, 4), (4096, 8))
    ):
        each = columns * depth // (warps * 32) // (2 if code is Code.INT4 else 1)  # bytes of a thread
        if 16 <= each <= 256:
            yield {"COLUMNS": columns, "DEPTH": depth, "num_warps": warps}


def few_tiles(code: Code, group: int, rows: int) -> Iterator[dict[str, Any]]:
    """Yield tiles of the kernel for few rows."""
    depths = (group,) if group in (64, 128) else (64, 128)
    for columns, depth, split, stages in itertools.product((16, 32, 64), depths, (2, 4, 8), (3, 4, 6)):
        if columns * depth * split * code.bits // 8 * stages <= 160 << 10:
            yield {
                "COLUMNS": columns, "DEPTH": depth, "SPLIT": split, "num_warps": split, "num_stages": stages,
                "ROWS": 8 if rows <= 8 else 16,
            }  # fmt: skip


def some_tiles(code: Code, group: int, rows: int) -> Iterator[dict[str, Any]]:
    """Yield tiles of the kernel for more rows."""
    depths = (group,) if group in (64, 128) else (64, 128)
    for columns, wide, depth, (warps, stages) in itertools.product(
        (64, 128), (16, 32, 64, 128, 256), depths, ((4, 3), (4, 4), (8, 3))
    ):
        if wide <= max(16, rows) and columns * wide <= 128 * 256 and columns // warps >= 8:
            yield {"COLUMNS": columns, "ROWS": wide, "DEPTH": depth, "num_warps": warps, "num_stages": stages}


def sweep(layer: str, form: str, rows: int, seconds: float) -> None:
    """Time all tiles of a layer's kernels and print the best."""
    made, _ = products(layer, form)
    weights = [each.weight for each in made]
    first = weights[0]
    assert isinstance(first, Grouped)
    outputs, inputs, _, gated = LAYERS[layer]
    fused = made[0].fused
    width = outputs // 2 if gated else outputs
    x = torch.randn(rows, inputs, dtype=torch.bfloat16, device="cuda")
    expected = Product(first, fused if rows <= kernels.FEW else Fused())(x.float()).float()
    out = torch.empty(rows, width if rows <= kernels.FEW else outputs, dtype=torch.bfloat16, device="cuda")
    gate = (1.0, 0.0) if gated else None
    norm = fused.norm

    def call(weight: Grouped, tile: dict[str, Any]) -> None:
        if rows > kernels.FEW:
            kernels.run_some(x, weight, None, out, tile)
        else:
            kernels.run(x, weight, out, None, norm and norm.weight, 1e-5, gate, False, tile)

    if rows > kernels.FEW:
        tiles = list(some_tiles(first.code, first.group, rows))
    else:
        tiles = list(few_tiles(first.code, first.group, rows)) + (list(one_tiles(first.code)) if rows == 1 else [])

    def compiled(tile: dict[str, Any]) -> bool:
        try:
            call(first, tile)
        except Exception as problem:
            print(f"    {tile}: {type(problem).__name__} {str(problem)[:80]}", flush=True)
            return False
        return True

    with ThreadPoolExecutor(12) as pool:
        fits = list(pool.map(compiled, tiles))
    torch.cuda.synchronize()
    found, begin = [], time.monotonic()
    for tile, is_fit in zip(tiles, fits, strict=True):
        if not is_fit or time.monotonic() - begin > seconds:
            continue
        call(first, tile)
        away = float((out.float() - expected).abs().max() / expected.abs().max())
        took = milliseconds([lambda weight=weight, tile=tile: call(weight, tile) for weight in weights], 3)
        found.append((took, away, tile))
    found.sort(key=lambda each: each[0])
    ideal = made[0].nbytes / 4.2e9
    print(f"sweep {form} {layer} rows {rows}: bytes at 4.2 TB/s take {1000 * ideal:.1f} us, {len(found)} tiles")
    for took, away, tile in found[:6]:
        print(f"  {1000 * took:7.1f} us  error {away:.4f}  {tile}", flush=True)
    if "COLUMNS" in str(found) and rows == 1:
        best = next((each for each in found if "ROWS" not in each[2]), None)
        other = next((each for each in found if "ROWS" in each[2]), None)
        for each in (best, other):
            if each is not None:
                print(f"  {1000 * each[0]:7.1f} us  error {each[1]:.4f}  {each[2]}", flush=True)


def main() -> None:
    """Print a table of all layers, formats and rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", default="1,4,16,64,256,2048")
    parser.add_argument(
        "--formats", help="default: bfloat16,fp8,int8,int4, on a CPU float32,bfloat16,int8,int4,mxfp4,Q8_0,Q4_K"
    )
    parser.add_argument("--layers", default=",".join(LAYERS))
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--threads", type=int, help="on a CPU")
    parser.add_argument("--rounds", type=int, default=5, help="on a CPU")
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--seconds", type=float, default=20.0, help="of timing per sweep")
    given = parser.parse_args()
    torch.manual_seed(0)
    usual = "bfloat16,fp8,int8,int4" if given.device == "cuda" else "float32,bfloat16,int8,int4,mxfp4,Q8_0,Q4_K"
    forms, sizes = (given.formats or usual).split(","), [int(each) for each in given.rows.split(",")]
    if given.device == "cpu":
        torch.set_num_threads(given.threads or torch.get_num_threads())
        on_cpu(given.layers.split(","), forms, sizes, given.rounds)
        return
    with torch.inference_mode():
        if given.sweep:
            for form, layer, rows in itertools.product(forms, given.layers.split(","), sizes):
                if form != "bfloat16":
                    sweep(layer, form, rows, given.seconds)
            return
        for layer in given.layers.split(","):
            outputs, inputs, *_ = LAYERS[layer]
            for form in forms:
                made, _ = products(layer, form)
                ideal = made[0].nbytes / 4.2e9
                line = f"{layer:12} {form:9} bytes at 4.2 TB/s {1000 * ideal:6.1f} us |"
                for rows in sizes:
                    x = torch.randn(rows, inputs, dtype=torch.bfloat16, device="cuda")
                    took = milliseconds([lambda each=each, x=x: each(x) for each in made])
                    rate = 2 * rows * outputs * inputs / took / 1e9
                    line += f" {rows}: {1000 * took:.1f} us" + (f" ({rate:.0f} TFLOP/s)" if rows >= 256 else "")
                print(line, flush=True)
                del made


if __name__ == "__main__":
    main()
