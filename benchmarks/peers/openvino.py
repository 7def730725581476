"""Worker: OpenVINO on the CPU, one stateful model and one infer request, greedy; token ids in, logits out.

``python -m peers.openvino export CHECKPOINT TARGET bfloat16|int8|int4`` writes what the worker loads, by the export of
optimum-intel: int8 weights as NNCF rounds them by default (a scale and a zero point for each row), int4 symmetric in
groups of 32 as the other peers' (NNCF keeps the embedding and the head in int8), bfloat16 as in the checkpoint.

Its defaults for the rest: latency as the performance hint, the precision of activations that it prefers on this CPU,
its dynamic quantization of activations, its precision of the KV cache. As OpenVINO GenAI does, the head computes only
the last position's logits. A cache that grew is not cut: every run computes its prompt anew, which is not timed. Of a
prompt of more than LONG_PROMPT tokens the states are kept, and a run puts them back.
"""

from __future__ import annotations

import importlib
import platform
import shutil
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Any

from peers.measures import LONG_PROMPT, Measure, prompt_ids
from peers.worker import serve

_MODEL = "openvino_model.xml"
_LAYOUT_OPS = ("Convert", "Multiply", "Reshape", "Subtract", "Transpose")  # between a stored weight and its MatMul
_SCALE_BYTES = 8  # of each head's cached vector in uint8: a scale and a zero point in float32


def check() -> dict[str, Any]:
    """Versions, without the time that importing takes."""
    names = ("openvino", "optimum-intel", "nncf", "transformers", "torch")
    return {name: metadata.version(name) for name in names} | {"python": platform.python_version()}


class OpenVino:
    """``options``: openvino (the exported folder), threads."""

    def __init__(self, options: dict[str, Any]) -> None:
        openvino: Any = importlib.import_module("openvino")
        self.tensor: Any = openvino.Tensor
        self.np: Any = importlib.import_module("numpy")
        core = openvino.Core()
        self.model = core.read_model(str(Path(options["openvino"]) / _MODEL))
        keep_last_logits(self.model, importlib.import_module("openvino.opset13"))
        properties = {"PERFORMANCE_HINT": "LATENCY", "INFERENCE_NUM_THREADS": options["threads"]}
        self.compiled = core.compile_model(self.model, "CPU", properties)
        self.request = self.compiled.create_infer_request()
        self.kept: dict[Measure, list[Any]] = {}  # states behind long prompts without their last tokens
        self.vocab_size = self.model.output("logits").get_partial_shape()[2].get_length()

    def facts(self) -> dict[str, Any]:
        """A step reads the weights of all products, so not the embedding unless it is the head as well."""
        # A state is a layer's keys or values: [sequences, heads, positions, head_dim].
        shapes = [state.state.shape for state in self.request.query_state()]
        size = self.compiled.get_property("KV_CACHE_PRECISION").size
        vector_bytes = [shape[3] * size + (_SCALE_BYTES if size == 1 else 0) for shape in shapes]
        return {
            "weight_bytes": weight_bytes(self.model),
            "kv_bytes_per_token": sum(shape[1] * b for shape, b in zip(shapes, vector_bytes, strict=True)),
        }

    def measure(self, measure: Measure) -> float:
        """Seconds."""
        ids = self.np.array([prompt_ids(measure.prompt_tokens, self.vocab_size, i) for i in range(measure.batch)])
        if measure.kind == "prefill":
            self.request.reset_state()
            begin = time.perf_counter()
            self._step(ids, 0)
            return time.perf_counter() - begin
        tokens = self._prompt(ids, measure)
        begin = time.perf_counter()
        for position in range(measure.prompt_tokens, measure.prompt_tokens + measure.new_tokens):
            tokens = self._step(tokens, position)
        return time.perf_counter() - begin

    def _prompt(self, ids: Any, measure: Measure) -> Any:
        """Cache ids int64 [B, T] -> the likeliest next token [B, 1]."""
        if measure.prompt_tokens <= LONG_PROMPT:
            self.request.reset_state()
            return self._step(ids, 0)
        if measure not in self.kept:
            self.request.reset_state()
            self._step(ids[:, :-1], 0)
            self.kept[measure] = [self._copy(state.state) for state in self.request.query_state()]
        for state, kept in zip(self.request.query_state(), self.kept[measure], strict=True):
            state.state = kept
        # The step behind states that were set finds a cache without room for it and copies it: that is not timed.
        return self._step(ids[:, -1:], measure.prompt_tokens - 1)

    def _copy(self, tensor: Any) -> Any:
        copied = self.tensor(tensor.get_element_type(), tensor.get_shape())
        tensor.copy_to(copied)
        return copied

    def _step(self, ids: Any, past: int) -> Any:
        """ids int64 [B, T] after ``past`` cached tokens -> the likeliest next token [B, 1]."""
        batch, length = ids.shape
        inputs = {
            "input_ids": ids,
            "attention_mask": self.np.ones((batch, past + length), self.np.int64),
            "position_ids": self.np.tile(self.np.arange(past, past + length), (batch, 1)),
            "beam_idx": self.np.arange(batch, dtype=self.np.int32),
        }
        self.request.infer(inputs, share_inputs=True)
        return self.request.get_tensor("logits").data[:, -1].argmax(-1).reshape(batch, 1)

    def notes(self) -> dict[str, Any]:
        """What OpenVINO chose by itself."""
        names = ("INFERENCE_PRECISION_HINT", "KV_CACHE_PRECISION", "DYNAMIC_QUANTIZATION_GROUP_SIZE")
        return {name.lower(): str(self.compiled.get_property(name)) for name in names}


def keep_last_logits(model: Any, ops: Any) -> None:
    """Let the head's product see the last position only: [B, T, dim] -> [B, 1, dim]."""
    head = model.output("logits").node.input_value(0).get_node()
    while head.get_type_name() != "MatMul":
        head = head.input_value(0).get_node()
    last = ops.slice(head.input_value(0), [-1], [2**31 - 1], [1], [1])  # start, stop, step, axis
    head.input(0).replace_source_output(last.output(0))
    model.validate_nodes_and_infer_types()


def weight_bytes(model: Any) -> int:
    """Bytes of the constants that are a product's second operand, with their scales and zero points; each once."""
    waiting = [op.input_value(1).get_node() for op in model.get_ops() if op.get_type_name() == "MatMul"]
    sizes = {}
    while waiting:
        node = waiting.pop()
        if node.get_type_name() == "Constant":
            sizes[node.get_friendly_name()] = node.get_byte_size()
        elif node.get_type_name() in _LAYOUT_OPS:
            waiting += [value.get_node() for value in node.input_values()]
    return sum(sizes.values())


def export(checkpoint: str, target: str, kind: str) -> None:
    """Write the folder ``target``, whole or not at all. Raises RuntimeError where equal matrices were stored once."""
    intel: Any = importlib.import_module("optimum.intel")
    options = {
        "bfloat16": None,
        "int8": {"bits": 8},
        "int4": {"bits": 4, "sym": True, "group_size": 32, "ratio": 1.0},
    }[kind]
    rounding = {"load_in_8bit": False} if options is None else {"quantization_config": options}
    model = intel.OVModelForCausalLM.from_pretrained(checkpoint, export=True, compile=False, **rounding)
    part = Path(f"{target}.part")
    shutil.rmtree(part, ignore_errors=True)
    model.save_pretrained(part)
    stored, needed = part.joinpath(_MODEL).with_suffix(".bin").stat().st_size, weight_bytes(model.model)
    if stored < needed:
        raise RuntimeError(
            f"{checkpoint} has equal matrices: OpenVINO stored {stored} of {needed} bytes and would read the rest from "
            "the CPU's cache; delete the folder, and newer weights are made"
        )
    part.rename(target)


if __name__ == "__main__":
    if sys.argv[1:2] == ["export"]:
        export(sys.argv[2], sys.argv[3], sys.argv[4])
    else:
        serve(check, OpenVino)
