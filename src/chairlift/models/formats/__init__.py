"""Formats of quantized matrices, one file each: how they are stored, and the weights made of them.

A checkpoint names its format in quantization_config; which matrices have it is seen from their tensors.
"""

from __future__ import annotations

from chairlift.core.errors import ModelError
from chairlift.core.values import Values, show
from chairlift.models.formats import compressed
from chairlift.models.formats.awq import Awq
from chairlift.models.formats.format import Stored, StoredFormat
from chairlift.models.formats.fp8 import Fp8Format
from chairlift.models.formats.gptq import Gptq
from chairlift.models.formats.mxfp4 import Mxfp4

METHODS = {
    "awq": Awq.of,
    "compressed-tensors": compressed.of,
    "fbgemm_fp8": Fp8Format.of,
    "fp8": Fp8Format.of,
    "gptq": Gptq.of,
    "mxfp4": Mxfp4.of,
}


def find_format(values: Values, source: Stored) -> StoredFormat | None:
    """Return the format that a config names; None for a checkpoint that is not quantized."""
    if not values.has("quantization_config"):
        return None
    given = values.part("quantization_config")
    method = given.text("quant_method", "")
    if method not in METHODS:
        raise ModelError(
            f"{values.file}: weights quantized with {show(method)} are not read: supported are "
            f"{', '.join(METHODS)}, and GGUF files"
        )
    return METHODS[method](source, given)
