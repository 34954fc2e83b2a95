"""CUDA graphs of steps with prompts and decodes, in any mix.

The number of decodes and the tiles of the prompts vary, but the launched kernels do not: attention's programs read
their work from the step's inputs, and programs without work end at once. So a captured step runs any mix of up to its
number of tokens, and the host's part of it is one transfer and one call.
"""

from __future__ import annotations

import numpy as np
import torch

from chairlift.execution.graphs import Captured, Capturer, Inputs, fits, host_of, shared_in, shared_shapes
from chairlift.execution.rows import Flat
from chairlift.execution.sharing import HostSharedPrefixes
from chairlift.ops.batch import Batch, SampledTokens, cut_prompts
from chairlift.ops.sampling import likeliest

SIZES = (32, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1280, 1536, 1792, *range(2048, 1 << 16, 512))
_SOON = 512  # tokens: steps up to this size, and the full size, are captured at the start; others when first needed


class MixedGraphs:
    """Captured steps of some sizes; a step is padded to the next larger one.

    All choose the likeliest tokens; the sampler overwrites them unless all rows are greedy.
    """

    def __init__(self, capturer: Capturer, step_tokens: int) -> None:
        from chairlift.ops.attention_cuda import LONG, tokens_of_tile

        config = capturer.decoder.config
        self._capturer = capturer
        self._sizes = list(dict.fromkeys(size for size in (*SIZES, step_tokens) if 4 <= size <= step_tokens))
        self._tile = tokens_of_tile(config.heads // config.kv_heads, config.dtype == torch.float32)
        self._long = LONG  # tokens: larger steps with longer contexts use kernels chosen by length, uncaptured
        self._inputs: dict[int, Inputs] = {}
        self._captured: dict[tuple[int, bool], Captured] = {}

    @torch.inference_mode()
    def capture(self) -> None:
        """Capture the full size first, so that all others fit in its memory, and the small sizes."""
        for size in reversed(self._sizes):
            if size <= _SOON or size == self._sizes[-1]:
                self._capture(size, False)

    def size_for(self, flat: Flat, samples: int) -> int | None:
        """Return the captured size that a step runs as; None if it is not captured."""
        tokens = max(flat.positions.size, samples)
        for size in self._sizes:
            if tokens <= size and flat.decodes <= self._decodes(size):
                longest = int(flat.contexts[flat.decodes :].max(initial=0))
                return size if min(size, longest) <= self._long else None
        return None

    def run(
        self,
        size: int,
        flat: Flat,
        shared: HostSharedPrefixes | None,
        wanted: np.ndarray,
        rows: np.ndarray,
        positions: np.ndarray,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Run a step; return the logits of the `wanted` tokens and the likeliest tokens, written to rows and positions.

        Both are overwritten by the next step. With several ranks there are no tokens.
        """
        shared = fits(shared)
        if (size, shared is not None) not in self._captured:
            self._capture(size, shared is not None)
        together = {} if shared is None else shared._asdict()
        self._inputs[size].send(
            rows=flat.rows[flat.owner],
            positions=flat.positions,
            slices=flat.rows,
            contexts=flat.contexts[: flat.decodes],
            wanted=wanted,
            wanted_contexts=flat.positions[wanted] + 1,
            sampled_rows=rows,
            sampled_positions=positions,
            tiles=cut_prompts(flat.starts, flat.contexts, self._tile)[0],
            **together,
        )
        graph, logits, tokens = self._captured[size, shared is not None]
        graph.replay()
        return logits[: wanted.size], None if tokens is None else tokens[: wanted.size]

    def _decodes(self, size: int) -> int:
        return min(self._capturer.max_samples, size - 2)  # the prompt has at least two tokens

    def _capture(self, size: int, shares: bool) -> None:
        if size not in self._inputs:
            capturer, slices = self._capturer, min(self._capturer.max_samples, size)
            shapes: dict[str, tuple[int, ...]] = {"rows": (size,), "positions": (size,)}
            shapes |= dict.fromkeys(("slices", "contexts", "wanted", "wanted_contexts"), (slices,))
            shapes |= dict.fromkeys(("sampled_rows", "sampled_positions"), (slices,))
            shapes |= {"tiles": (size // self._tile + slices, 4)} | shared_shapes(self._decodes(size))
            blank = dict.fromkeys(("rows", "slices", "sampled_rows"), capturer.scratch)
            blank["sampled_positions"] = 1  # padding reads position 0 of the scratch row
            self._inputs[size] = Inputs(capturer.decoder.device, shapes, blank)
        self._inputs[size].clear()
        self._captured[size, shares] = self._capturer.capture(lambda: self._step(size, shares))

    def _step(self, size: int, shares: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
        capturer, inputs, decodes = self._capturer, self._inputs[size], self._decodes(size)
        rows, tables, slices = inputs["rows"], capturer.rows.device_tables, inputs["slices"].long()
        last = capturer.decoder.layout.groups[-1]  # the sampled tokens alone go through the last layer
        tokens, slots = capturer.rows.tokens_and_slots(rows, inputs["positions"])
        batch = Batch(
            inputs["positions"],
            slots[0],
            inputs["contexts"][:decodes],
            tables[0, slices],
            host_of(decodes, size),
            shared_in(inputs, decodes) if shares else None,
            inputs["tiles"],
        )
        batch.others = [batch.beside(own, table[slices]) for own, table in zip(slots[1:], tables[1:], strict=True)]
        wanted, count = inputs["wanted"].long(), inputs["wanted"].numel()
        alone = Batch(
            inputs["positions"][wanted],
            slots[last, wanted],
            inputs["wanted_contexts"],
            tables[last, rows[wanted].long()],
            host_of(count, count),
        )
        asked = SampledTokens(np.zeros(count, np.int64), wanted, alone)
        logits = capturer.logits(capturer.decoder.forward(tokens, batch, capturer.cache, asked, capturer.states(size)))
        if not capturer.chooses:
            return logits, None
        chosen = likeliest(logits)
        capturer.rows.put_at(inputs["sampled_rows"], inputs["sampled_positions"], chosen)
        return logits, chosen
