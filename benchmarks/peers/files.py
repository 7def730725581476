"""What the peers load: a checkpoint of random weights of a shape, GGUF files and OpenVINO's models. Made once."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import struct
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from peers.process import BENCHMARKS

if TYPE_CHECKING:
    from gpt_fast.checkpoint.stored import StoredTensor
    from gpt_fast.config import ModelConfig

CONVERTER = "convert_hf_to_gguf.py"
HOW_TO_CONVERT = (
    f"give --convert FILE, llama.cpp's {CONVERTER}; it is in the source package: pip download --no-deps "
    "--no-binary llama-cpp-python llama-cpp-python, unpack, vendor/llama.cpp"
)
_TAIL_LINES = 8
_SHARD_BYTES = 5 * 10**9  # as Hugging Face writes them
_ROW_STEP, _MATRIX_STEP = 37, 1009  # random numbers between the beginnings of two rows, and of two matrices


class FilesError(RuntimeError):
    """A file that a peer needs cannot be made; the message says what to do."""


def ensure_checkpoint(
    shape_name: str, work: Path, tokenizer: Path | None, say: Callable[[str], object], num_layers: int | None = None
) -> Path:
    """The folder of random bfloat16 weights of a shape, with ``tokenizer`` or a made-up ``tokenizer.model``.

    ``num_layers``: only the first of the shape's layers, this many; None: all. Raises ConfigError for an unknown shape.
    """
    from gpt_fast.model.shapes import shape

    config, name = shape(shape_name), shape_name
    if num_layers is not None:
        config, name = replace(config, num_layers=num_layers), f"{shape_name}-{num_layers}-layers"
    directory = work / name / "checkpoint"
    if directory.is_dir():
        return directory
    say(f"writing random weights of {name} to {directory}")
    part = directory.with_suffix(".part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    if tokenizer is not None:
        shutil.copyfile(tokenizer, part / "tokenizer.model")
    else:
        (part / "tokenizer.model").write_bytes(made_up_tokenizer(config.vocab_size))
    write_random(config, part)
    part.rename(directory)
    return directory


def write_random(config: ModelConfig, directory: Path, shard_bytes: int = _SHARD_BYTES) -> None:
    """Write a checkpoint of ``config``, without a tokenizer: random bfloat16 weights (normal, standard deviation 0.02),
    in files of about ``shard_bytes`` or one tensor. Takes some megabytes of memory for a model of any size.

    A matrix is a view of one block of random numbers, in which each row begins a little behind the row before it. No
    two matrices are equal: a peer that keeps equal ones once would read a layer's weights from the CPU's cache.
    """
    import torch

    from gpt_fast.checkpoint.families import to_hf_config
    from gpt_fast.checkpoint.stored import StoredTensor, progress_bar
    from gpt_fast.checkpoint.weight_files import write_safetensors
    from gpt_fast.model.describing import parts

    shapes = {part.source: part.stored_shape for part in parts(config)}
    reach = max(_ROW_STEP * shape[0] + shape[-1] for shape in shapes.values()) + _MATRIX_STEP * len(shapes)
    block = (torch.randn(reach, generator=torch.Generator().manual_seed(0)) * 0.02).bfloat16()
    tensors: dict[str, StoredTensor] = {}
    for number, (name, shape) in enumerate(shapes.items()):
        if len(shape) == 2:
            values = block[_MATRIX_STEP * number :].as_strided(shape, (_ROW_STEP, 1))
        else:  # a bias or a norm
            values = torch.full(shape, 0.0 if name.endswith(".bias") else 1.0, dtype=block.dtype)
        tensors[name] = StoredTensor(values)
    shards = _shards(tensors, shard_bytes)
    with progress_bar(sum(t.num_bytes for t in tensors.values()), True, "writing weights") as report:
        for file, names in shards.items():
            write_safetensors(directory / file, {name: tensors[name] for name in names}, None, report)
    if len(shards) > 1:
        index = {"weight_map": {name: file for file, names in shards.items() for name in names}}
        (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=1), encoding="utf-8")
    raw = to_hf_config(config, "bfloat16") | {"bos_token_id": 1, "eos_token_id": 2}
    (directory / "config.json").write_text(json.dumps(raw, indent=2), encoding="utf-8")


def _shards(tensors: Mapping[str, StoredTensor], shard_bytes: int) -> dict[str, list[str]]:
    """The tensors of each file, in their order; one file has the name that a whole checkpoint has."""
    found: list[list[str]] = [[]]
    size = 0
    for name, tensor in tensors.items():
        if found[-1] and size + tensor.num_bytes > shard_bytes:
            found.append([])
            size = 0
        found[-1].append(name)
        size += tensor.num_bytes
    if len(found) == 1:
        return {"model.safetensors": found[0]}
    return {f"model-{i:05}-of-{len(found):05}.safetensors": names for i, names in enumerate(found, 1)}


def made_up_tokenizer(vocab_size: int) -> bytes:
    """A SentencePiece model of ``vocab_size`` pieces: specials, bytes, and words nobody uses. Prompts here are ids.

    Written as sentencepiece_model.proto says, so that nothing needs protobuf.
    """
    unknown, control, byte, normal, bpe = 2, 3, 6, 1, 2
    pieces = [("<unk>", unknown), ("<s>", control), ("</s>", control)]
    pieces += [*((f"<0x{i:02X}>", byte) for i in range(256)), ("\u2581", normal)]
    pieces += [(f"\u2581word{i}", normal) for i in range(max(0, vocab_size - len(pieces)))]
    made = b""
    for number, (piece, kind) in enumerate(pieces[:vocab_size]):
        score = b"\x15" + struct.pack("<f", -number if kind == normal else 0)
        made += _message(1, _message(1, piece.encode()) + score + _integer(3, kind))
    trainer = _integer(3, bpe) + _integer(4, vocab_size) + _integer(35, 1)  # model_type, vocab_size, byte_fallback
    return made + _message(2, trainer) + _message(3, _message(1, b"identity"))


def _message(field: int, body: bytes) -> bytes:
    return _varint(8 * field + 2) + _varint(len(body)) + body


def _integer(field: int, value: int) -> bytes:
    return _varint(8 * field) + _varint(value)


def _varint(value: int) -> bytes:
    out = b""
    while value > 127:
        out += bytes([value % 128 + 128])
        value //= 128
    return out + bytes([value])


def folder_of(checkpoint: Path, work: Path) -> Path:
    """Where the GGUF files of a checkpoint that was not made here are kept; another one after its weights changed."""
    files = sorted(path for path in checkpoint.iterdir() if path.suffix in (".safetensors", ".bin", ".json"))
    state = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    digest = hashlib.sha256(repr((str(checkpoint.resolve()), state)).encode()).hexdigest()[:12]
    return work / f"{checkpoint.resolve().name}-{digest}"


def ensure_gguf(
    checkpoint: Path,
    directory: Path,
    formats: Sequence[str],
    *,
    convert: Path | None,
    convert_python: str,
    quantize_python: str,
    threads: int,
    say: Callable[[str], object],
) -> dict[str, Path]:
    """GGUF files of ``formats`` (BF16, Q8_0, Q4_0): converted to BF16, then quantized from it. Raises FilesError."""
    directory.mkdir(parents=True, exist_ok=True)
    paths = {name: directory / f"{name.lower()}.gguf" for name in formats}
    base = directory / "bf16.gguf"
    if all(path.is_file() for path in paths.values()):
        return paths
    if not base.is_file():
        if convert is None:
            raise FilesError(f"there are no GGUF files in {directory} yet: {HOW_TO_CONVERT}")
        if not convert.is_file():
            raise FilesError(f"--convert: there is no file {convert}; {HOW_TO_CONVERT}")
        say(f"converting {checkpoint} to {base}")
        part = directory / "part.gguf"
        command = [convert_python, str(convert), str(checkpoint), "--outtype", "bf16", "--outfile", str(part)]
        _run(command, f"{convert.name} (its Python needs torch, transformers, sentencepiece: --convert-python)")
        part.rename(base)
    for name, path in paths.items():
        if not path.is_file():
            say(f"quantizing {base} to {name}")
            command = [quantize_python, "-m", "peers.llamacpp", "quantize", str(base), str(path), name, str(threads)]
            _run(command, f"quantizing to {name} (its Python needs llama-cpp-python: --python llama.cpp=FILE)")
    return paths


def ensure_openvino(
    checkpoint: Path, directory: Path, formats: Sequence[str], python: str, say: Callable[[str], object]
) -> dict[str, Path]:
    """Folders of OpenVINO's models in ``formats``, exported by ``python``. Raises FilesError."""
    paths = {name: directory / f"openvino-{name}" for name in formats}
    for name, path in paths.items():
        if not path.is_dir():
            path.parent.mkdir(parents=True, exist_ok=True)
            say(f"exporting {checkpoint} to {path}")
            command = [python, "-m", "peers.openvino", "export", str(checkpoint), str(path), name]
            _run(command, f"exporting to OpenVINO's {name}")
    return paths


def _run(command: list[str], what: str) -> None:
    environment = os.environ | {"PYTHONPATH": str(BENCHMARKS), "PYTHONDONTWRITEBYTECODE": "1", "HF_HUB_OFFLINE": "1"}
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", env=environment, check=False)
    except OSError as error:
        raise FilesError(f"{what}: {command[0]} does not start: {error.strerror}") from None
    if done.returncode:
        tail = "\n  ".join((done.stdout + done.stderr).splitlines()[-_TAIL_LINES:])
        raise FilesError(f"{what} ended with status {done.returncode}:\n  {tail}")
