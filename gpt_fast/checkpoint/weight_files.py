"""The files of a Hugging Face directory that hold weights: ``model.safetensors`` or ``pytorch_model.bin``, whole or
sharded with an index."""

from __future__ import annotations

from pathlib import Path

from gpt_fast.checkpoint.families import read_json
from gpt_fast.checkpoint.safetensors_file import read_safetensors
from gpt_fast.checkpoint.stored import StoredTensor, read_torch_file, stored_tensors
from gpt_fast.errors import CheckpointError

_BUFFERS = ("rotary_emb.inv_freq", *(f".{n}.{kind}" for n in ("attn", "attention") for kind in ("bias", "masked_bias")))
_SINGLE = ("model.safetensors", "pytorch_model.bin")


def weight_files(directory: Path) -> list[Path]:
    """The files holding the weights of ``directory``; safetensors come before torch's format."""
    for single in _SINGLE:
        index = directory / f"{single}.index.json"
        if (directory / single).is_file():
            return [directory / single]
        if index.is_file():
            mapping = read_json(index).get("weight_map")
            if not isinstance(mapping, dict) or not all(isinstance(name, str) for name in mapping.values()):
                raise CheckpointError(f"{index} has no weight_map of tensor names to file names")
            files = [directory / name for name in sorted(set(mapping.values()))]
            for file in files:
                if file.parent != directory:
                    raise CheckpointError(f"{index} names {file.name!r} outside its own directory")
                if not file.is_file():
                    raise CheckpointError(f"{file} is missing; {index.name} needs it")
            return files
    if not directory.is_dir():
        raise CheckpointError(f"{directory} is not a directory")
    raise CheckpointError(f"{directory} has no weights: none of {', '.join(_SINGLE)}, whole or with an index")


def open_weights(files: list[Path]) -> dict[str, StoredTensor]:
    """Every tensor of ``files`` by name, mapped and not yet read.

    Buffers that old versions saved (rotary frequencies, causal masks) are left out. Raises CheckpointError.
    """
    tensors: dict[str, StoredTensor] = {}
    for path in files:
        if path.suffix == ".safetensors":
            found = read_safetensors(path)
        else:
            values, mapped = read_torch_file(path)
            found = stored_tensors(values, path, mapped)
        for name, tensor in found.items():
            if name in tensors:
                raise CheckpointError(f"{path}: tensor {name!r} is in another file of {path.parent} as well")
            tensors[name] = tensor
    return {name: t for name, t in tensors.items() if not name.endswith(_BUFFERS)}
