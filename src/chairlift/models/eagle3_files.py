"""Reads EAGLE-3 heads in the layout in which they are published: a folder with config.json and safetensors.

The layer is called `midlayer.` or `layers.0.`, with or without `model.` before it; `d2t` has the distance from each of
the head's tokens to the model's, and `t2d`, which is not needed, the tokens of the model that the head has.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from chairlift.core.errors import ModelError
from chairlift.core.values import Values
from chairlift.models.building import RecordingTake
from chairlift.models.checkpoint import SafetensorsCheckpoint, open_checkpoint
from chairlift.models.config import read_common
from chairlift.models.cut import Cut
from chairlift.models.decoder import Decoder
from chairlift.models.eagle3 import STATES, Eagle3Head, HeadConfig
from chairlift.models.loader import LoadingTake
from chairlift.ops.weight import Weight

_EMBEDDING = "embed_tokens.weight"
_TO_MODEL, _TO_HEAD = "d2t", "t2d"


def load_head(folder: Path, decoder: Decoder, max_length: int) -> Eagle3Head:
    """Read a head for a loaded model, and let the model keep a layer of KV for it."""
    checkpoint = open_checkpoint(folder)
    if not isinstance(checkpoint, SafetensorsCheckpoint):
        raise ModelError(
            f"{folder} is a GGUF file: an EAGLE-3 head is read from a folder of config.json and safetensors"
        )
    names = {_plain(name): name for name in checkpoint.names()}
    config = read_head_config(checkpoint, decoder, has_embedding=_EMBEDDING in names, has_bias="fc.bias" in names)
    _check_tensors(checkpoint, names, config, decoder)
    take = LoadingTake(_Renamed(checkpoint, names), config.layer.dtype, decoder.device, lambda _bytes: None)
    head = Eagle3Head(config, take, decoder.embedding, decoder.layout.width)
    if config.vocab_size < config.layer.vocab_size:
        head.ids = _read_ids(checkpoint, names, config).to(decoder.device)
    head.prepare(max_length, decoder.device, is_compiled=decoder.is_compiled)
    decoder.serve_head(config.layers)
    return head


def read_head_config(
    checkpoint: SafetensorsCheckpoint, decoder: Decoder, *, has_embedding: bool, has_bias: bool
) -> HeadConfig:
    """Read the config of a head, and check that it is one for this model."""
    outer, model = Values(checkpoint.config_file, checkpoint.config), decoder.config
    values = outer.part("transformer_layer_config") if outer.has("transformer_layer_config") else outer
    layer = replace(read_common("LlamaForCausalLM", values, "auto", "cpu", ties=False), dtype=model.dtype)
    if layer.vocab_size != model.vocab_size:
        raise values.wrong("vocab_size", f"the model has {model.vocab_size:,} tokens; use a head that was made for it")
    if layer.layers != 1:
        raise values.wrong("num_hidden_layers", "heads of one layer are supported")
    if values.text("hidden_act", "silu") != "silu":
        raise values.wrong("hidden_act", "only silu is supported")
    spec = decoder.specs[0]
    if decoder.layout.windows != (0,):
        raise ModelError(
            f"{checkpoint.path}: the model has layers with a sliding window, and a head's KV blocks must stay "
            "allocated: use speculation ngram"
        )
    if (layer.kv_heads, layer.head_dim) != (spec.kv_heads, spec.head_dim):
        raise ModelError(
            f"{checkpoint.config_file}: {layer.kv_heads} KV heads of {layer.head_dim} elements, where the model has "
            f"{spec.kv_heads} of {spec.head_dim}: a head's KV is kept in the blocks of the model, so they must be equal"
        )
    state_size = outer.count("target_hidden_size", layer.hidden_size)
    if state_size != model.hidden_size:
        key = "target_hidden_size" if outer.has("target_hidden_size") else "hidden_size"
        source = outer if outer.has("target_hidden_size") else values
        raise source.wrong(key, f"the model's states have {model.hidden_size:,} elements; use a head made for it")
    if not has_embedding and layer.hidden_size != model.hidden_size:
        raise values.wrong(
            "hidden_size", f"without {_EMBEDDING} it must be the model's, which is {model.hidden_size:,}"
        )
    vocab_size = outer.count("draft_vocab_size", layer.vocab_size, most=layer.vocab_size)
    layers = _layers(outer, model.layers)
    keeps_norm = outer.flag("norm_before_residual")
    return HeadConfig(layer, layers, state_size, vocab_size, keeps_norm, has_bias, has_embedding)


def _layers(values: Values, count: int) -> tuple[int, ...]:
    """Return the layers of the model that the head reads the inputs of: a low, a middle and a high one.

    Nested in eagle_config the numbers are those of the layers before: their outputs are meant.
    """
    key, nested = "eagle_aux_hidden_state_layer_ids", values.part("eagle_config")
    if not nested.flag("use_aux_hidden_state", True):
        raise nested.wrong("use_aux_hidden_state", f"only heads that read {STATES} layers are supported")
    source, shift = (nested, 1) if nested.has(key) else (values, 0)
    given = source.numbers(key) if source.has(key) else [2, count // 2, count - 3]
    found = tuple(int(each) + shift for each in given)
    if len(found) != STATES or not all(0 <= each < count for each in found) or any(each % 1 for each in given):
        usual = "without it they are 2, the middle one and the third last"
        raise source.wrong(key, f"name {STATES} layers of the model, which has {count}; {usual}")
    return found


def _plain(name: str) -> str:
    plain = name.removeprefix("model.")
    return f"midlayer.{plain.removeprefix('layers.0.')}" if plain.startswith("layers.0.") else plain


def _check_tensors(
    checkpoint: SafetensorsCheckpoint, names: dict[str, str], config: HeadConfig, decoder: Decoder
) -> None:
    """Raise a ModelError for tensors that are missing, unknown or of another size, before memory is allocated."""
    take = RecordingTake(config.layer)
    Eagle3Head(config, take, decoder.embedding, 0)
    wanted = dict(take.shapes)
    if config.vocab_size < config.layer.vocab_size:
        wanted[_TO_MODEL] = (config.vocab_size,)
    missing = sorted(wanted.keys() - names.keys())
    if missing:
        raise ModelError(
            f"{checkpoint.path} lacks {', '.join(missing[:3])} ({len(missing)} of the {len(wanted)} tensors of an "
            "EAGLE-3 head): the download is incomplete, or it is not such a head"
        )
    unknown = sorted(
        name for name in names.keys() - wanted.keys() - {_TO_MODEL, _TO_HEAD} if not name.endswith("inv_freq")
    )
    if unknown:
        raise ModelError(
            f"{checkpoint.path} has {', '.join(unknown[:3])}, which an EAGLE-3 head of one layer does not have: heads "
            "of another architecture are not supported"
        )
    for name, shape in wanted.items():
        if (found := checkpoint.shape(names[name])) != shape:
            raise ModelError(
                f"{checkpoint.path}: tensor {names[name]} has shape {found}, but the config implies {shape}: "
                "config and weights belong to different heads"
            )


def _read_ids(checkpoint: SafetensorsCheckpoint, names: dict[str, str], config: HeadConfig) -> torch.Tensor:
    """Return the model's token for each of the head's."""
    distances = checkpoint.stored(names[_TO_MODEL]).long()
    ids = torch.arange(config.vocab_size) + distances
    if int(ids.min()) < 0 or int(ids.max()) >= config.layer.vocab_size:
        raise ModelError(
            f"{checkpoint.path}: {_TO_MODEL} leads to tokens {int(ids.min())} to {int(ids.max())}, but the model has "
            f"{config.layer.vocab_size:,}: the head was made for another model"
        )
    return ids


class _Renamed:
    """A head's tensors under one set of names."""

    def __init__(self, checkpoint: SafetensorsCheckpoint, names: dict[str, str]) -> None:
        self._checkpoint, self._names = checkpoint, names

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor."""
        return self._checkpoint.shape(self._names[name])

    def tensor(self, name: str, dtype: torch.dtype | None = None, *, cut: Cut | None = None) -> torch.Tensor:
        """Read a tensor."""
        return self._checkpoint.tensor(self._names[name], dtype, cut=cut)

    def weight(self, name: str, dtype: torch.dtype, device: torch.device, *, cut: Cut | None = None) -> Weight:
        """Read a matrix."""
        return self._checkpoint.weight(self._names[name], dtype, device, cut=cut)
