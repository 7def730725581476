"""Makes tests/data/kserve/schemas.json of KServe's own CustomResourceDefinitions:

    python tests/kserve_schemas.py kserve/config/crd/full

Kept are the kinds that configs/kserve/ uses, whole but for descriptions and for DROPPED, parts that we have no use for.
What is dropped is refused like a misspelled field, so a manifest that comes to need it says so. NETWORK_POLICY is
Kubernetes' own, a page of its OpenAPI description.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import yaml

FILES = ("serving.kserve.io_clusterservingruntimes.yaml", "serving.kserve.io_inferenceservices.yaml")
TARGET = Path(__file__).resolve().parent / "data" / "kserve" / "schemas.json"
# Canaries, several nodes, other frameworks (each of them repeats a whole container), further containers.
DROPPED = {"status", "canary", "explainer", "transformer", "workerSpec", "affinity", "initContainers", "builtInAdapter"}
DROPPED |= {
    "huggingface",
    "lightgbm",
    "onnx",
    "paddle",
    "pmml",
    "pytorch",
    "sklearn",
    "tensorflow",
    "triton",
    "xgboost",
}
VOLUMES = {"name", "emptyDir", "configMap", "secret", "persistentVolumeClaim", "hostPath"}  # the kinds that are kept

_SELECTOR = {
    "type": "object",
    "properties": {"matchLabels": {"type": "object", "additionalProperties": {"type": "string"}}},
}
_PORT = {"protocol": {"type": "string"}, "port": {"type": ["integer", "string"]}, "endPort": {"type": "integer"}}
_PEER = {"podSelector": _SELECTOR, "namespaceSelector": _SELECTOR}
_RULE = {
    "ports": {"type": "array", "items": {"type": "object", "properties": _PORT}},
    "from": {"type": "array", "items": {"type": "object", "properties": _PEER}},
}
_POLICY = {
    "podSelector": _SELECTOR,
    "policyTypes": {"type": "array", "items": {"type": "string"}},
    "ingress": {"type": "array", "items": {"type": "object", "properties": _RULE}},
}
NETWORK_POLICY = {  # io.k8s.api.networking.v1.NetworkPolicy, without egress, blocks of addresses and matchExpressions
    "type": "object",
    "properties": {
        "apiVersion": {"type": "string"},
        "kind": {"type": "string"},
        "metadata": {"type": "object"},
        "spec": {"type": "object", "properties": _POLICY, "required": ["podSelector"]},
    },
}


def reduced(node: Any) -> Any:
    """A part of a schema without descriptions and without the properties DROPPED. Whole objects become closed."""
    if isinstance(node, list):
        return [reduced(part) for part in node]
    if not isinstance(node, dict):
        return node
    kept = {key: reduced(part) for key, part in node.items() if key not in ("description", "properties")}
    if "properties" in node:
        found = {name: part for name, part in node["properties"].items() if name not in DROPPED}
        if "emptyDir" in found:
            found = {name: part for name, part in found.items() if name in VOLUMES}
        kept["properties"] = {name: reduced(part) for name, part in found.items()}
        kept["additionalProperties"] = False
    return kept


def schema_of(path: Path) -> tuple[str, Any]:
    """``apiVersion/kind`` and the schema of the newest version in one CustomResourceDefinition."""
    definition = yaml.load(path.read_text(encoding="utf-8"), yaml.CSafeLoader)["spec"]
    version = definition["versions"][-1]
    schema = reduced(version["schema"]["openAPIV3Schema"])
    schema["properties"]["metadata"] = {"type": "object"}  # Kubernetes' own, the same for all kinds
    if "predictor" in schema["properties"]["spec"]["properties"]:
        del schema["properties"]["spec"]["properties"]["predictor"]["properties"]["containers"]
    return f"{definition['group']}/{version['name']}/{definition['names']['kind']}", schema


if __name__ == "__main__":
    schemas = dict(schema_of(Path(sys.argv[1]) / name) for name in FILES)
    schemas["networking.k8s.io/v1/NetworkPolicy"] = reduced(NETWORK_POLICY)
    parts = [f"{json.dumps(name)}: {json.dumps(schema, separators=(',', ':'))}" for name, schema in schemas.items()]
    TARGET.write_text("{\n" + ",\n".join(parts) + "\n}\n", encoding="utf-8")
