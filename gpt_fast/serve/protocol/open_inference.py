"""KServe's open inference protocol over gRPC, as far as it must be known to refuse a call.

With ``ts_open_inference_protocol=true`` TorchServe 0.12 makes JSON of a call of ``ModelInfer``, and its answer of JSON
that has these fields. Where one is missing it ends the worker, and with it the answers of all clients.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from gpt_fast.serve.protocol.request import JSON_TYPE, Piece

_CALL = {"id", "model_name", "inputs"}  # all that TorchServe writes
REFUSAL = "this model takes text over HTTP, and its JSON in the input data of Predictions; it knows no tensors"


def refuse_call(entry: Mapping[str, Any]) -> Piece | None:
    """The whole answer to a call of ``ModelInfer``, whose output says that it is refused; None for anything else.
    ``entry``: what came over gRPC, as TorchServe delivers it."""
    call = entry.get("body")
    try:
        found = json.loads(call) if isinstance(call, (bytes, bytearray, str)) else call
    except (ValueError, RecursionError):
        return None
    if not isinstance(found, dict) or set(found) != _CALL:
        return None
    output = {"name": "error", "datatype": "BYTES", "shape": [1], "data": [REFUSAL]}
    named = {"id": str(found["id"]), "model_name": str(found["model_name"]), "model_version": ""}
    return Piece(json.dumps({**named, "outputs": [output]}) + "\n", JSON_TYPE)
