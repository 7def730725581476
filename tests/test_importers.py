"""Foreign formats: the published goldens through each of them, and what is refused."""

from __future__ import annotations

import dataclasses
import json
import logging
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gpt_fast_files import meta_state

from gpt_fast.checkpoint.checkpoint import Checkpoint
from gpt_fast.checkpoint.convert import convert
from gpt_fast.checkpoint.families import to_hf_config
from gpt_fast.checkpoint.saving import save_checkpoint
from gpt_fast.config import ModelConfig
from gpt_fast.errors import CheckpointError
from gpt_fast.model.building import random_model
from gpt_fast.model.transformer import Transformer
from gpt_fast.quantize.scheme import quant_config
from gpt_fast.quantize.writer import quantize_checkpoint

pytestmark = pytest.mark.usefixtures("one_thread")

TINY = ModelConfig("llama", 64, 32, 2, 4, 2, 8, 48, 128)

SOURCES = {
    "HF directory": ("stories260K", "models/stories260K_hf"),
    "version 0": ("stories260K", "models/stories260K/stories260K.bin"),
    "version 1": ("stories260K", "models/stories260K/stories260K_v1.bin"),
    "second HF directory": ("llama2xs_280K", "models/llama2xs_280K_hf"),
    "ckpt.pt": ("llama2xs_280K", "models/llama2xs_280K/ckpt.pt"),
}


def logits(model: Transformer, tokens: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.tensor([tokens]))[0]


def greedy_from(model: Transformer, tokens: list[int], num_prompt: int) -> list[int]:
    """``tokens`` with those after the prompt replaced by the likeliest after each prefix, in one pass.

    The result is ``tokens`` itself exactly where generating one token at a time would have given ``tokens``.
    """
    return tokens[:num_prompt] + logits(model, tokens)[num_prompt - 1 : -1].argmax(-1).tolist()


@pytest.fixture(scope="module")
def goldens(data_dir: Path) -> dict[str, Any]:
    """Computed in float32 by a numpy transcription of llama2.c, from the ``.bin`` files."""
    found: dict[str, Any] = json.loads((data_dir / "golden" / "llama2c_numpy_reference.json").read_text())
    return found


@pytest.mark.parametrize("source", SOURCES)
def test_goldens(source: str, data_dir: Path, goldens: dict[str, Any], tmp_path: Path) -> None:
    """Greedy tokens, logits and mean negative log-likelihood of two published models, in every format they come in."""
    name, path = SOURCES[source]
    golden = goldens[name]
    convert(data_dir / path, tmp_path / "out")
    model = Checkpoint.open(tmp_path / "out").build(torch.float32)

    assert model.config == Checkpoint.open(data_dir / "models" / f"{name}_hf").config
    expected = golden["greedy_from_bos"]["tokens"]
    assert len(expected) == 201
    assert greedy_from(model, expected, 1) == expected
    prompt = golden["greedy_prompt"]
    assert greedy_from(model, prompt["tokens"], len(prompt["prompt_tokens"])) == prompt["tokens"]

    top = logits(model, [1])[-1].topk(10)
    assert top.indices.tolist() == [token for token, _ in golden["logits_after_bos_top10"]]
    torch.testing.assert_close(
        top.values, torch.tensor([value for _, value in golden["logits_after_bos_top10"]]), atol=2e-4, rtol=0
    )
    tokens = golden["nll"]["tokens"]
    nll = torch.nn.functional.cross_entropy(logits(model, tokens)[:-1], torch.tensor(tokens[1:]))
    assert float(nll) == pytest.approx(golden["nll"]["mean_nll_nats"], abs=2e-5)
    if path.endswith("_hf"):
        assert torch.equal(
            logits(Checkpoint.open(data_dir / path).build(torch.float32), [1])[-1].topk(10).values, top.values
        )


# Files written here, as their programs write them


@pytest.fixture
def model() -> Transformer:
    found = random_model(TINY, torch.float32)
    with torch.no_grad():
        for parameter in found.parameters():
            parameter.normal_(0, 0.5)
    return found


def assert_same(directory: Path, model: Transformer) -> None:
    again = Checkpoint.open(directory).build(torch.float32)
    assert again.config == model.config
    for (name, ours), theirs in zip(again.named_parameters(), model.parameters(), strict=True):
        assert torch.equal(ours, theirs), name


PARAMS = {"dim": 32, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "norm_eps": 1e-5, "max_seq_len": 128}


@pytest.mark.parametrize("fused", [True, False], ids=["gpt-fast", "Meta"])
@pytest.mark.parametrize("given", ["config.json", "params.json", "path", "object"])
def test_pth(given: str, fused: bool, model: Transformer, tmp_path: Path) -> None:
    source, out = tmp_path / "in" / "a.file", tmp_path / "out"
    source.parent.mkdir()
    state = meta_state(model, fused)
    state["freqs_cis"] = torch.zeros(4)
    state["layers.0.attention.kv_cache.k_cache"] = torch.zeros(4)
    torch.save(state, source)
    with pytest.raises(CheckpointError, match=r"how many heads.*params.json.*llama-2-7b"):
        convert(source, out)
    config: Any = None
    if given == "config.json":
        raw = to_hf_config(TINY, "float32") | {"eos_token_id": [7, 8], "bos_token_id": 6}
        (source.parent / given).write_text(json.dumps(raw))
    elif given == "params.json":
        (source.parent / given).write_text(json.dumps(PARAMS))
    elif given == "path":
        config = tmp_path / "somewhere.json"
        config.write_text(json.dumps(PARAMS))
    else:
        config = TINY
    convert(source, out, config=config)
    assert_same(out, model)
    defaults = Checkpoint.open(out).defaults
    expected = ((7, 8), 6) if given == "config.json" else ((), None)  # what nobody said is left to the tokenizer
    assert (defaults.eos_token_ids, defaults.bos_token_id) == expected


def test_pth_with_a_tied_head(tmp_path: Path) -> None:
    tied = random_model(dataclasses.replace(TINY, tie_embeddings=True), torch.bfloat16)
    torch.save(meta_state(tied), tmp_path / "model.pth")
    convert(tmp_path / "model.pth", tmp_path / "out", config=TINY)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["tie_word_embeddings"]
    assert Checkpoint.open(tmp_path / "out").stored_dtype == torch.bfloat16


def test_llama3_params(model: Transformer, tmp_path: Path) -> None:
    torch.save(meta_state(model, fused=False), tmp_path / "consolidated.00.pth")
    path = tmp_path / "params.json"
    raw = PARAMS | {"rope_theta": 500000.0, "use_scaled_rope": True}
    path.write_text(json.dumps(raw))
    with pytest.raises(CheckpointError, match=r"rope_scaling_factor.*3.1 means 8"):
        convert(tmp_path / "consolidated.00.pth", tmp_path / "out")
    path.write_text(json.dumps(raw | {"rope_scaling_factor": 32}))
    convert(tmp_path / "consolidated.00.pth", tmp_path / "out")
    scaling = Checkpoint.open(tmp_path / "out").config.rope_scaling
    assert scaling is not None
    assert (scaling.type, scaling.factor, scaling.original_max_seq_len) == ("llama3", 32.0, 8192)


def q80(values: np.ndarray, group_size: int) -> tuple[bytes, np.ndarray]:
    """llama2.c's symmetric int8 groups: the bytes as written, and the values that they stand for."""
    groups = values.reshape(-1, group_size)
    scales = (np.abs(groups).max(1, keepdims=True) / 127).astype(np.float32)
    quants = np.round(groups / scales).astype(np.int8)
    return quants.tobytes() + scales.tobytes(), (quants.astype(np.float32) * scales).reshape(values.shape)


@pytest.mark.parametrize("group_size", [16, 64])  # 64 makes a group span rows of 32
@pytest.mark.parametrize("tied", [True, False])
def test_version_2(tied: bool, group_size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpt_fast.checkpoint.stored._CHUNK", 1000)  # several pieces a tensor
    model = random_model(dataclasses.replace(TINY, tie_embeddings=tied), torch.float32)
    state = meta_state(model, fused=False)
    body = b""
    for name in ("layers.{}.attention_norm", "layers.{}.ffn_norm"):
        body += b"".join(state[name.format(i) + ".weight"].numpy().tobytes() for i in range(2))
    body += state["norm.weight"].numpy().tobytes()
    order = ["tok_embeddings.weight"]
    for name in ("attention.wq", "attention.wk", "attention.wv", "attention.wo"):
        order += [f"layers.{i}.{name}.weight" for i in range(2)]
    for name in ("feed_forward.w1", "feed_forward.w2", "feed_forward.w3"):
        order += [f"layers.{i}.{name}.weight" for i in range(2)]
    order += [] if tied else ["output.weight"]
    for name in order:
        written, values = q80(state[name].numpy(), group_size)
        body += written
        state[name] = torch.from_numpy(values)
    header = struct.pack("<Ii7iBi", 0x616B3432, 2, 32, 48, 2, 4, 2, 64, 128, tied, group_size)
    path = tmp_path / "model.bin"
    path.write_bytes(header.ljust(256, b"\0") + body)
    convert(path, tmp_path / "out")
    again = Checkpoint.open(tmp_path / "out").build(torch.float32)
    for name, expected in meta_state(again, fused=False).items():
        assert torch.equal(expected, state["tok_embeddings.weight" if tied and name == "output.weight" else name]), name


def test_changing_dtype_keeps_the_rest(data_dir: Path, tmp_path: Path) -> None:
    source = data_dir / "models" / "stories260K_hf"
    convert(source, tmp_path / "out", dtype=torch.bfloat16)
    assert Checkpoint.open(tmp_path / "out").stored_dtype == torch.bfloat16
    before, after = (json.loads((d / "config.json").read_text()) for d in (source, tmp_path / "out"))
    assert after == before | {"torch_dtype": "bfloat16"}
    assert (tmp_path / "out" / "tokenizer.model").read_bytes() == (source / "tokenizer.model").read_bytes()
    (tmp_path / "out" / "config.json").write_text(json.dumps(after | {"dtype": "bfloat16"}))  # transformers 5's name
    convert(tmp_path / "out", tmp_path / "wide", dtype=torch.float32)
    assert json.loads((tmp_path / "wide" / "config.json").read_text()) == before | {"torch_dtype": "float32"}
    convert(tmp_path / "out", tmp_path / "again")
    for one, two in zip(
        Checkpoint.open(tmp_path / "again").build(torch.float32).parameters(),
        Checkpoint.open(source).build(torch.float32).parameters(),
        strict=True,
    ):
        assert torch.equal(one, two.bfloat16().float())


def test_quantized_weights_are_not_converted(data_dir: Path, tmp_path: Path) -> None:
    quantize_checkpoint(Checkpoint.open(data_dir / "models" / "stories260K_hf"), tmp_path / "q", quant_config("int8"))
    with pytest.raises(CheckpointError, match=r"q is quantized \(gpt_fast\); convert the unquantized checkpoint"):
        convert(tmp_path / "q", tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["q"]


def test_what_goes_along(model: Transformer, tmp_path: Path) -> None:
    """Tokenizer, generation and licence by pattern; notes, code and foreign configuration stay behind."""
    folder = tmp_path / "in"
    folder.mkdir()
    torch.save(meta_state(model), folder / "model.pth")
    along = ["qwen.tiktoken", "LICENSE.md", "NOTICE", "generation_config.json", "tokenizer_config.json"]
    for name in [*along, "notes.txt", "modeling.py", "README.md", "adapter_config.json"]:
        (folder / name).write_text("{}")
    convert(folder / "model.pth", tmp_path / "out", config=TINY)
    made = {"config.json", "model.safetensors"}
    assert {p.name for p in (tmp_path / "out").iterdir()} == {*along, *made}
    (tmp_path / "other").write_text("{}")
    convert(folder / "model.pth", tmp_path / "again", tokenizer=tmp_path / "other", config=TINY)
    kept = {"LICENSE.md", "NOTICE", "generation_config.json", "tokenizer.json"}  # the others belong to the old one
    assert {p.name for p in (tmp_path / "again").iterdir()} == kept | made


def test_tokenizers_are_told_by_content(
    data_dir: Path, model: Transformer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = tmp_path / "model.pth"
    torch.save(meta_state(model), source)
    with caplog.at_level(logging.WARNING):
        convert(source, tmp_path / "none", config=TINY)
    assert "no tokenizer" in caplog.text
    ranks, converted, of_llama2c = tmp_path / "ranks", tmp_path / "converted", tmp_path / "tok512.bin"
    ranks.write_bytes(b"IQ== 0\nIg== 1\n")
    converted.write_text('{"version": "1.0", "model": {"type": "BPE"}}')
    of_llama2c.write_bytes(struct.pack("<ifi", 7, 0.0, 5) + b"<unk>")  # longest token; then score, length, bytes
    for i, (path, name) in enumerate(
        {
            data_dir / "models/stories260K_hf/tokenizer.model": "tokenizer.model",
            ranks: "tokenizer.model",
            converted: "tokenizer.json",
        }.items()
    ):
        convert(source, tmp_path / str(i), tokenizer=path, config=TINY)
        assert sorted(p.name for p in (tmp_path / str(i)).iterdir()) == sorted(
            ["config.json", "model.safetensors", name]
        )
    with pytest.raises(CheckpointError, match=r"tok512.bin is neither"):
        convert(source, tmp_path / "x", tokenizer=of_llama2c, config=TINY)


def test_a_tokenizer_in_two_files_is_not_missed(
    model: Transformer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    torch.save(meta_state(model), tmp_path / "model.pth")
    with caplog.at_level(logging.WARNING):
        for name, warnings in (("vocab.json", 1), ("merges.txt", 1)):  # GPT-2's; one of them alone is none
            (tmp_path / name).touch()
            convert(tmp_path / "model.pth", tmp_path / f"with {name}", config=TINY)
            assert caplog.text.count("no tokenizer") == warnings
    assert {"vocab.json", "merges.txt"} < {path.name for path in (tmp_path / "with merges.txt").iterdir()}


# What is refused


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        (["layers.0.attention.wqkv.weight", "layers.0.attention.wqkv.qweight"], "is quantized by others"),
        (["model.embed_tokens.weight"], "Hugging Face's tensor names"),
        (["encoder.weight"], "holds no checkpoint of gpt-fast, Meta or llama2.c; it begins with encoder.weight"),
    ],
)
def test_other_torch_files_are_named(keys: list[str], words: str, tmp_path: Path) -> None:
    torch.save(dict.fromkeys(keys, torch.zeros(1)), tmp_path / "model.pth")
    with pytest.raises(CheckpointError, match=words):
        convert(tmp_path / "model.pth", tmp_path / "out")


def test_wrong_heads_and_shapes(model: Transformer, tmp_path: Path) -> None:
    source, out = tmp_path / "model.pth", tmp_path / "out"
    state = meta_state(model)
    torch.save(state, source)
    with pytest.raises(CheckpointError, match="rows, not"):
        convert(source, out, config=dataclasses.replace(TINY, num_kv_heads=4))
    with pytest.raises(CheckpointError, match="is not a file; shape 'llama-9t' is not known"):
        convert(source, out, config="llama-9t")
    with pytest.raises(CheckpointError, match="does not fit its configuration"):
        convert(source, out, config=dataclasses.replace(TINY, ffn_dim=50))
    (tmp_path / "params.json").write_text(json.dumps({"dim": 32}))
    with pytest.raises(CheckpointError, match=r"params.json must give n_heads"):
        convert(source, out)
    (tmp_path / "params.json").write_text(json.dumps(PARAMS | {"dim": 64}))
    with pytest.raises(CheckpointError, match=r"params.json: dim 64"):
        convert(source, out)
    (tmp_path / "params.json").write_text(json.dumps({"n_heads": 4}))
    torch.save({name: t for name, t in state.items() if "wqkv" not in name}, source)
    with pytest.raises(CheckpointError, match=r"6 tensors missing: model.layers.0.self_attn.q_proj.weight"):
        convert(source, out)
    torch.save(state | {"layers.0.attention.lora.weight": torch.zeros(3)}, source)
    with pytest.raises(CheckpointError, match=r"unexpected: layers.0.attention.lora.weight"):
        convert(source, out, config=TINY)
    assert not out.exists()


def test_cut_and_unknown_files(data_dir: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    for name, cut in (("stories260K_v1.bin", "it is cut short"), ("stories260K.bin", "no checkpoint known here")):
        path = tmp_path / name
        path.write_bytes((data_dir / "models" / "stories260K" / name).read_bytes()[:-4])
        with pytest.raises(CheckpointError, match=cut):
            convert(path, out)
    path = tmp_path / "new.bin"
    path.write_bytes(struct.pack("<Ii", 0x616B3432, 3).ljust(300, b"\0"))
    with pytest.raises(CheckpointError, match="version 3 is not supported"):
        convert(path, out)
    for content in (b"", b"hello", b"\0" * 4096, b"PK\x03\x04rest"):
        path.write_bytes(content)
        with pytest.raises(CheckpointError, match=r"new.bin"):
            convert(path, out)
    with pytest.raises(CheckpointError, match="does not exist"):
        convert(tmp_path / "nowhere", out)
    with pytest.raises(CheckpointError, match=r"^config: .*stories260K.bin says by itself what its model is"):
        convert(data_dir / "models" / "stories260K" / "stories260K.bin", out, config=TINY)
    assert not out.exists()


def test_nothing_half_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk leaves no directory, and an existing one is not written into."""
    source, out = tmp_path / "in", tmp_path / "out"
    save_checkpoint(random_model(TINY, torch.float32), source)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("gpt_fast.checkpoint.saving.write_safetensors", full)
        with pytest.raises(CheckpointError, match=r"out cannot be written: No space left.*GB"):
            convert(source, out)
    assert [p.name for p in tmp_path.iterdir()] == ["in"]
    convert(source, out)
    before = (out / "config.json").stat()
    with pytest.raises(CheckpointError, match="exists and is not empty"):
        convert(source, out)
    assert (out / "config.json").stat() == before


def test_a_link_to_an_empty_folder_leads_there(tmp_path: Path) -> None:
    save_checkpoint(random_model(TINY, torch.float32), tmp_path / "in")
    (tmp_path / "empty").mkdir()
    for name, leads_to in (("link", "empty"), ("dangling", "new")):
        (tmp_path / name).symlink_to(leads_to)
        convert(tmp_path / "in", tmp_path / name)
        assert (tmp_path / leads_to / "config.json").is_file()
        assert (tmp_path / name).is_symlink()
