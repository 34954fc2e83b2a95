"""The block formats of GGUF weights: their sizes. block_codes.py unpacks them.

A server's HTTP processes read models' files for the tokenizer and the config: no file here may import torch.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BlockFormat:
    """The byte layout of one GGUF tensor type."""

    name: str
    values: int
    nbytes: int
    plain: str | None = None
    """The name of the torch dtype of the bytes, for formats that are not quantized."""


FORMATS: dict[int, BlockFormat] = {
    0: BlockFormat("F32", 1, 4, "float32"),
    1: BlockFormat("F16", 1, 2, "float16"),
    2: BlockFormat("Q4_0", 32, 18),
    3: BlockFormat("Q4_1", 32, 20),
    6: BlockFormat("Q5_0", 32, 22),
    7: BlockFormat("Q5_1", 32, 24),
    8: BlockFormat("Q8_0", 32, 34),
    12: BlockFormat("Q4_K", 256, 144),
    13: BlockFormat("Q5_K", 256, 176),
    14: BlockFormat("Q6_K", 256, 210),
    30: BlockFormat("BF16", 1, 2, "bfloat16"),
}
"""Supported formats by their GGUF type number."""

UNSUPPORTED: dict[int, str] = {
    9: "Q8_1",
    10: "Q2_K",
    11: "Q3_K",
    15: "Q8_K",
    16: "IQ2_XXS",
    17: "IQ2_XS",
    18: "IQ3_XXS",
    19: "IQ1_S",
    20: "IQ4_NL",
    21: "IQ3_S",
    22: "IQ2_S",
    23: "IQ4_XS",
    29: "IQ1_M",
    34: "TQ1_0",
    35: "TQ2_0",
    39: "MXFP4",
}
"""Names of unsupported types, for errors."""
