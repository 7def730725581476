"""Worker: a checkout of gpt-fast, as its ``generate.py --compile --device cpu`` runs it, decoding one sequence.

Its functions are called in this process, so that it compiles once and not in every round. The weights have the
checkpoint's shape and are random: its own converter knows a model by its folder's name only. Decoding is timed from
its first decoded token to its last; its own number would count the prompt's time as well.
"""

from __future__ import annotations

import importlib
import json
import platform
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Any

from peers.measures import Measure, prompt_ids
from peers.worker import serve

_KEYS = {
    "vocab_size": "vocab_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_local_heads": "num_key_value_heads",
    "dim": "hidden_size",
    "intermediate_size": "intermediate_size",
    "block_size": "max_position_embeddings",
    "norm_eps": "rms_norm_eps",
}


def check() -> dict[str, Any]:
    """Versions; what its tokenizer.py imports counts as well."""
    names = ("torch", "sentencepiece", "tiktoken")
    return {name: metadata.version(name) for name in names} | {"python": platform.python_version()}


class GptFast:
    """``options``: checkpoint, checkout, format, threads."""

    def __init__(self, options: dict[str, Any]) -> None:
        raw = json.loads((Path(options["checkpoint"]) / "config.json").read_text(encoding="utf-8"))
        if raw.get("model_type") != "llama":
            raise RuntimeError(f"gpt-fast knows Llama's architecture only, not {raw.get('model_type')}")
        sys.path.insert(0, str(Path(options["checkout"]).resolve()))
        torch: Any = importlib.import_module("torch")
        torch.set_num_threads(options["threads"])
        self.torch = torch
        self.generate: Any = importlib.import_module("generate")
        module = importlib.import_module("model")
        arguments = module.ModelArgs(**{ours: raw[theirs] for ours, theirs in _KEYS.items()})
        with torch.device("meta"):
            model = module.Transformer(arguments)
        model = model.to_empty(device="cpu").to(torch.bfloat16)
        for parameter in model.parameters():
            parameter.data.normal_(0, 0.02)
        if options["format"] == "int8":
            handler = importlib.import_module("quantize").WeightOnlyInt8QuantHandler(model)
            state = handler.create_quantized_state_dict()
            handler.convert_for_runtime().load_state_dict(state, assign=True)
        self.model = model.eval()
        self.weight_bytes = self.generate._get_model_size(model)[0]
        compiled = torch.compile(self.generate.decode_one_token, mode="reduce-overhead", fullgraph=True)
        vars(self.generate)["decode_one_token"] = compiled  # as its main() rebinds it

    def facts(self) -> dict[str, Any]:
        """Bytes as it counts them itself."""
        c = self.model.config
        return {
            "weight_bytes": self.weight_bytes,
            "kv_bytes_per_token": 2 * c.n_layer * c.n_local_heads * c.head_dim * 2,
        }

    def measure(self, measure: Measure) -> float:
        """Seconds."""
        if measure.kind != "decode" or measure.batch != 1:
            raise RuntimeError(f"gpt-fast is not measured in {measure.name}")
        prompt = self.torch.tensor(
            prompt_ids(measure.prompt_tokens, self.model.config.vocab_size), dtype=self.torch.int
        )
        stamps: list[float] = []
        self.generate.generate(
            self.model,
            prompt,
            measure.new_tokens + 2,  # one from prefill, one whose stamp is the beginning
            1,
            interactive=False,
            draft_model=None,
            callback=lambda _: stamps.append(time.perf_counter()),
            temperature=0.8,
            top_k=200,
        )
        if len(stamps) != measure.new_tokens + 1:
            raise RuntimeError(f"gpt-fast made {len(stamps)} tokens, not {measure.new_tokens + 1}")
        return stamps[-1] - stamps[0]

    def notes(self) -> dict[str, Any]:
        """Nothing is chosen here."""
        return {"weights": "random, of the same shape"}


if __name__ == "__main__":
    serve(check, GptFast)
