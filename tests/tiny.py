"""Tiny models with random weights, written as the Hugging Face hub has them: real runs that take milliseconds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

BEGIN, END = "<|begin|>", "<|end|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}<|begin|>{{ message.role }}\n{{ message.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|begin|>assistant\n{% endif %}"
)
CORPUS = [
    "A chairlift never stops for one skier: each chair that comes by empty takes the next in the queue.",
    "user assistant system: the answer to the question is 42, and the question is what the answer was.",
    "Everyone gets off where they want. That is continuous batching, said the assistant to the user.",
]
ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")


def make_tiny_model(
    folder: Path,
    architecture: str = "LlamaForCausalLM",
    *,
    seed: int = 0,
    tokenizer: bool = True,
    chat_template: str | None = CHAT_TEMPLATE,
    spread_norms: bool = False,
    **config: Any,
) -> Path:
    """Write a model folder: config, safetensors and, if wanted, a byte-level BPE tokenizer with a chat template.

    Further keywords override the config (`head_dim=32`, `num_hidden_layers=4`, `sliding_window=32`, ...). The weights
    depend on `seed` alone and are wide enough that answers wander instead of repeating one token. A fresh model's norms
    are all alike; `spread_norms` makes their weights differ.
    """
    import torch
    import transformers

    folder.mkdir(parents=True, exist_ok=True)
    values: dict[str, Any] = {
        "vocab_size": 384,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 512,
        "initializer_range": 0.3,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": None,
        **config,
    }
    kind: type[Any] = getattr(transformers, architecture)
    torch.manual_seed(seed)
    model = kind(kind.config_class(**values))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if spread_norms and "norm" in name:
                weight.add_(torch.randn_like(weight) / 4)
    model.save_pretrained(folder)
    if tokenizer:
        write_tokenizer(folder, min(320, values["vocab_size"]), chat_template)
    return folder


def write_tokenizer(folder: Path, size: int = 320, chat_template: str | None = CHAT_TEMPLATE) -> None:
    """Train a byte-level BPE on a few sentences and write its files; ids 0 and 1 begin and end a message."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[BEGIN, END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    backend.save(str(folder / "tokenizer.json"))
    described = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": BEGIN, "eos_token": END}
    if chat_template is not None:
        described["chat_template"] = chat_template
    (folder / "tokenizer_config.json").write_text(json.dumps(described))
