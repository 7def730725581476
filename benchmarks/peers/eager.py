"""Worker: transformers without compilation, as ``AutoModelForCausalLM.from_pretrained`` gives it.

Its forward pass is called directly, greedy, with its own cache: ``generate()`` would only add to the time.
"""

from __future__ import annotations

import importlib
import platform
import time
from importlib import metadata
from typing import Any

from peers.measures import Measure, prompt_ids
from peers.worker import serve


def check() -> dict[str, Any]:
    """Versions, without the time that importing takes."""
    return {name: metadata.version(name) for name in ("torch", "transformers")} | {"python": platform.python_version()}


class Eager:
    """``options``: checkpoint, format, threads."""

    def __init__(self, options: dict[str, Any]) -> None:
        torch: Any = importlib.import_module("torch")
        transformers: Any = importlib.import_module("transformers")
        torch.set_num_threads(options["threads"])
        self.torch, self.transformers = torch, transformers
        dtype = getattr(torch, options["format"])
        self.model: Any = transformers.AutoModelForCausalLM.from_pretrained(options["checkpoint"], dtype=dtype).eval()

    def facts(self) -> dict[str, Any]:
        """A step reads all weights but the embedding's other rows; the head may be the embedding."""
        config = self.model.config
        table, head = self.model.get_input_embeddings().weight, self.model.get_output_embeddings().weight
        num_bytes = sum(p.numel() * p.element_size() for p in self.model.parameters())
        unused = 0 if table is head else (table.numel() - table.shape[1]) * table.element_size()
        width = config.num_key_value_heads * (getattr(config, "head_dim", None) or table.shape[1])
        return {
            "weight_bytes": num_bytes - unused,
            "kv_bytes_per_token": 2 * config.num_hidden_layers * width * table.element_size(),
        }

    def measure(self, measure: Measure) -> float:
        """Seconds."""
        with self.torch.inference_mode():
            vocab_size = self.model.config.vocab_size
            ids = self.torch.tensor([prompt_ids(measure.prompt_tokens, vocab_size, i) for i in range(measure.batch)])
            cache = self.transformers.DynamicCache(config=self.model.config)
            begin = time.perf_counter()
            tokens = self._step(ids, cache)
            if measure.kind == "prefill":
                return time.perf_counter() - begin
            begin = time.perf_counter()
            for _ in range(measure.new_tokens):
                tokens = self._step(tokens, cache)
            return time.perf_counter() - begin

    def _step(self, ids: Any, cache: Any) -> Any:
        """ids [B, T] -> the likeliest next token [B, 1]."""
        out = self.model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        return out.logits[:, -1].argmax(-1, keepdim=True)

    def notes(self) -> dict[str, Any]:
        """Nothing is chosen here."""
        return {"attention": self.model.config._attn_implementation}


if __name__ == "__main__":
    serve(check, Eager)
