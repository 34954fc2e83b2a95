"""GGUF weights unpacked on a CUDA device are, bit for bit, those unpacked on the CPU; needs no other GGUF reader."""

import pytest
import torch

from chairlift.ops.block_codes import CHUNK, dequantize
from chairlift.ops.block_formats import FORMATS

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize("number", FORMATS, ids=lambda number: FORMATS[number].name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_device_unpacks_the_same_bits(number: int, dtype: torch.dtype) -> None:
    form = FORMATS[number]
    blocks = torch.randint(0, 256, (CHUNK // form.values + 3, form.nbytes), dtype=torch.uint8)
    on_cpu = dequantize(blocks.view(-1), form, dtype)
    on_gpu = dequantize(blocks.view(-1).cuda(), form, dtype).cpu()
    assert torch.equal(torch.nan_to_num(on_cpu), torch.nan_to_num(on_gpu))  # random bits make some scales NaN
