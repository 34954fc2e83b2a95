"""Small tokenizers of the two kinds that models use, trained here so that the tests need nothing from outside."""

import json
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers

CORPUS = [
    "The chairlift never stops for one skier: each chair that comes by empty takes the next in the queue.",
    "def plan(self, now: float) -> StepPlan:\n    return StepPlan(budget=self.budget.tokens(self.running, now))",
    "Le café était déjà fermé; naïve façade, où sont les élèves? Übergrößenträger, señor, Łódź.",
    "東京は日本の首都です。日本語と中文和한국어。 Привет, мир! שלום გამარჯობა",
    "x = [i ** 2 for i in range(1024)]  # 1, 4, 9, 16, 25\n\n\tif x:\n\t\tprint('done')  \n",
    "I'll say it's 3.14159, they've 2,718 and we're at 100% 🙂🎿 don't you'd I'm",
]

TEXTS = [
    *CORPUS,
    *["", " ", "a", " a", "  a  ", "\n", "\n\n a\r\n", "\t\tx", "\u3000\u00a0wide", "0", "12345 67 8.9", "٣Ⅷ½²"],
    *[
        "I'LL We'VE it'S",
        "fooBar HTTPServer",
        "e\u0301 n\u0303 é ñ",
        "👩‍👩‍👧 🏳️‍🌈 zażółć ไทย हिन्दी",
        "</s> <s>x<pad>",
        "▁x",
    ],
    *["<|begin|>user\nhi<|end|>\n", "a<|end|> b", "<tool> call </tool>", "\x00\x7f\ufffd"],
]

CHAT_TEMPLATE = "{% for message in messages %}<|begin|>{{ message.role }}\n{{ message.content }}<|end|>\n{% endfor %}"
GPT2_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def byte_level(*cuts: pre_tokenizers.PreTokenizer, size: int = 600) -> tokenizers.Tokenizer:
    """Train a byte-level BPE with two control tokens and a plain added one."""
    backend = tokenizers.Tokenizer(models.BPE())
    letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*cuts, letters])
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=["<|begin|>", "<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    backend.add_tokens([AddedToken("<tool>", normalized=False)])
    return backend


def sentencepiece(size: int = 480) -> tokenizers.Tokenizer:
    """Train what Llama 2 has: BPE on characters, spaces as ▁, unknown characters as bytes."""
    special, letters = ["<unk>", "<s>", "</s>"], [f"<0x{byte:02X}>" for byte in range(256)]
    spaces = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    learner = tokenizers.Tokenizer(models.BPE())
    learner.normalizer = spaces
    learner.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
    common = [line for line in CORPUS if line.isascii()]  # so that the rest must fall back to bytes
    learner.train_from_iterator(
        common, trainers.BpeTrainer(vocab_size=size, special_tokens=special + letters, show_progress=False)
    )
    learned = json.loads(learner.to_str())["model"]
    merges = [tuple(merge) for merge in learned["merges"]]
    backend = tokenizers.Tokenizer(
        models.BPE(learned["vocab"], merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    backend.normalizer = spaces
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    backend.add_special_tokens(special)
    return backend


def save(folder: Path, backend: tokenizers.Tokenizer, **config: Any) -> Path:
    """Write a model folder as it comes from a hub."""
    folder.mkdir(parents=True, exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder
