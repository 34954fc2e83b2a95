"""EAGLE-3 heads with random or trained weights, as they are published, and the same head in plain torch."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import load_file, save_file

Tensors = dict[str, torch.Tensor]


def make_head(
    folder: Path, model: Path, *, seed: int = 0, draft_vocab: int = 384, prefix: str = "midlayer.", **config: Any
) -> Path:
    """Write a head for a model folder, with random weights; further keywords override its config."""
    of_model = json.loads((model / "config.json").read_text())
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    values: dict[str, Any] = {name: of_model[name] for name in names}
    values |= {
        "architectures": ["LlamaForCausalLMEagle3"],
        "num_hidden_layers": 1,
        "max_position_embeddings": 64,  # published heads have less than the model's too
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "draft_vocab_size": draft_vocab,
        **config,
    }
    states, hidden, inner = of_model["hidden_size"], values["hidden_size"], values["intermediate_size"]
    q, kv = (values[f"num_{kind}_heads"] * values["head_dim"] for kind in ("attention", "key_value"))
    attention, mlp = f"{prefix}self_attn.", f"{prefix}mlp."
    shapes = {
        "fc.weight": (hidden, 3 * states),
        f"{attention}q_proj.weight": (q, 2 * hidden),
        f"{attention}k_proj.weight": (kv, 2 * hidden),
        f"{attention}v_proj.weight": (kv, 2 * hidden),
        f"{attention}o_proj.weight": (hidden, q),
        f"{mlp}gate_proj.weight": (inner, hidden),
        f"{mlp}up_proj.weight": (inner, hidden),
        f"{mlp}down_proj.weight": (hidden, inner),
        "lm_head.weight": (draft_vocab, hidden),
    }
    if hidden != states:
        shapes["embed_tokens.weight"] = (values["vocab_size"], hidden)
    draw = torch.Generator().manual_seed(seed)
    tensors = {name: torch.randn(shape, generator=draw) * 0.2 for name, shape in shapes.items()}
    for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm"):
        tensors[f"{prefix}{name}.weight"] = 1 + torch.randn(hidden, generator=draw) / 4
    tensors["norm.weight"] = 1 + torch.randn(hidden, generator=draw) / 4
    vocabulary = values["vocab_size"]
    if draft_vocab < vocabulary:
        ids = torch.randperm(vocabulary, generator=draw)[:draft_vocab].sort().values
        tensors["d2t"] = ids - torch.arange(draft_vocab)
        tensors["t2d"] = torch.zeros(vocabulary, dtype=torch.bool).index_fill(0, ids, True)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(values))
    save_file(tensors, folder / "model.safetensors")
    return folder


@dataclass
class Reference:
    """A head and its model in plain torch: all is computed again for each draft, with no cache."""

    config: dict[str, Any]
    tensors: Tensors
    model: Any
    layers: tuple[int, ...]

    @staticmethod
    def of(folder: Path, model: Path, layers: tuple[int, ...]) -> Reference:
        found = {
            name.replace("layers.0.", "midlayer."): tensor
            for name, tensor in load_file(folder / "model.safetensors").items()
        }
        reference = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        return Reference(json.loads((folder / "config.json").read_text()), found, reference, layers)

    @torch.no_grad()
    def states(self, tokens: list[int]) -> torch.Tensor:
        """Return the model's states at every position: the inputs of the three layers, side by side."""
        hidden = self.model(torch.tensor([tokens]), output_hidden_states=True).hidden_states
        return torch.cat([hidden[layer][0] for layer in self.layers], dim=-1)

    @torch.no_grad()
    def drafts(self, tokens: list[int], count: int) -> list[int]:
        """Return the chain of drafts behind tokens."""
        states = F.linear(self.states(tokens)[:-1], self.tensors["fc.weight"])
        following, found = list(tokens[1:]), []
        for _ in range(count):
            output = self.outputs(states, torch.tensor(following))[-1:]
            token = int(self.logits(output)[0].argmax())
            if "d2t" in self.tensors:
                token += int(self.tensors["d2t"][token])
            found.append(token)
            states, following = torch.cat((states, output)), [*following, token]
        return found

    def outputs(self, states: torch.Tensor, following: torch.Tensor) -> torch.Tensor:
        """Return the layer's outputs for fused states and the tokens behind them."""
        own, config = self.tensors, self.config
        table = own.get("embed_tokens.weight", self.model.get_input_embeddings().weight)
        normed = self._norm(states, "midlayer.hidden_norm")
        x = torch.cat((self._norm(table[following], "midlayer.input_layernorm"), normed), dim=-1)
        residual = normed if config.get("norm_before_residual") else states
        heads, kv_heads, dim = (config[name] for name in ("num_attention_heads", "num_key_value_heads", "head_dim"))
        q, k, v = (
            F.linear(x, own[f"midlayer.self_attn.{name}_proj.weight"]).view(-1, count, dim).transpose(0, 1)
            for name, count in (("q", heads), ("k", kv_heads), ("v", kv_heads))
        )
        seen = F.scaled_dot_product_attention(
            self._rotate(q)[None], self._rotate(k)[None], v[None], is_causal=True, enable_gqa=True
        )[0]
        residual = residual + F.linear(seen.transpose(0, 1).flatten(1), own["midlayer.self_attn.o_proj.weight"])
        x = self._norm(residual, "midlayer.post_attention_layernorm")
        gate, up = (F.linear(x, own[f"midlayer.mlp.{name}_proj.weight"]) for name in ("gate", "up"))
        return residual + F.linear(F.silu(gate) * up, own["midlayer.mlp.down_proj.weight"])

    def logits(self, output: torch.Tensor) -> torch.Tensor:
        return F.linear(self._norm(output, "norm"), self.tensors["lm_head.weight"])

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        scaled = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.config["rms_norm_eps"])
        return scaled * self.tensors[f"{name}.weight"]

    def _rotate(self, x: torch.Tensor) -> torch.Tensor:
        dim = x.shape[-1]
        inverse = self.config["rope_theta"] ** (-torch.arange(0, dim, 2) / dim)
        angles = torch.outer(torch.arange(x.shape[1]), inverse)
        cos, sin = angles.cos(), angles.sin()
        first, second = x.chunk(2, dim=-1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def train_head(
    folder: Path,
    model: Path,
    prompts: list[list[int]],
    answers: list[list[int]],
    layers: tuple[int, ...],
    steps: int = 80,
) -> None:
    """Train the weights of a head, with the whole vocabulary, to draft answers behind their prompts."""
    reference = Reference.of(folder, model, layers)
    weights = [tensor.requires_grad_() for tensor in reference.tensors.values()]
    texts = [prompt + answer for prompt, answer in zip(prompts, answers, strict=True)]
    states = [reference.states(text)[:-2] for text in texts]
    optimizer = torch.optim.Adam(weights, lr=4e-3)
    for _ in range(steps):
        optimizer.zero_grad()
        for text, prompt, of_model in zip(texts, prompts, states, strict=True):
            tokens, begin = torch.tensor(text), max(0, len(prompt) - 2)
            fused = F.linear(of_model, reference.tensors["fc.weight"])
            output = reference.outputs(fused, tokens[1:-1])
            loss = F.cross_entropy(reference.logits(output[begin:]), tokens[begin + 2 :])
            # An output that is near the next state stands for it in a chain.
            (loss + F.mse_loss(output[begin:-1], fused[begin + 1 :])).backward()
        optimizer.step()
    save_file({name: tensor.detach() for name, tensor in reference.tensors.items()}, folder / "model.safetensors")
