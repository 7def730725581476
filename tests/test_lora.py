"""LoRA adapters: a model with them is the model whose weights were changed by hand, to the last bit.

Factors and scales are small fractions with few bits, so that ``W + scale * B @ A`` is one exact product and one sum.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import families_table
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from gpt_fast import LLM, SamplingParams
from gpt_fast.batch.setup import set_up
from gpt_fast.checkpoint.checkpoint import Checkpoint
from gpt_fast.checkpoint.convert import convert
from gpt_fast.checkpoint.files import ADAPTER_CONFIG
from gpt_fast.checkpoint.fingerprint import fingerprint
from gpt_fast.checkpoint.lora import open_adapters
from gpt_fast.checkpoint.shard import Shard
from gpt_fast.cli import main
from gpt_fast.commands import options
from gpt_fast.config import EngineConfig
from gpt_fast.errors import CheckpointError, ConfigError
from gpt_fast.foreign.checkpoint import open_checkpoint
from gpt_fast.quantize.scheme import quant_config
from gpt_fast.quantize.writer import CheckpointWriter, quantize_checkpoint
from gpt_fast.serve.launch.choice import choose
from gpt_fast.serve.settings import read_settings

pytestmark = pytest.mark.usefixtures("one_thread")

RANK, ALPHA = 4, 2  # a scale of 1/2
WORDS = torch.arange(3, 40)[None]


def factor(*size: int, seed: int) -> Tensor:
    """Multiples of 1/8 from -2/8 to 2/8."""
    return torch.randint(-2, 3, size, generator=torch.Generator().manual_seed(seed)) / 8


def write(folder: Path, tensors: dict[str, Tensor], **config: Any) -> Path:
    """An adapter as PEFT saves it; ``tensors`` by their names behind base_model.model."""
    folder.mkdir()
    save_file(
        {f"base_model.model.{name}": t.contiguous() for name, t in tensors.items()},
        folder / "adapter_model.safetensors",
    )
    given = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "bias": "none", "target_modules": "all-linear"}
    (folder / ADAPTER_CONFIG).write_text(json.dumps(given | config))
    return folder


def modules_of(folder: Path) -> dict[str, tuple[int, ...]]:
    """The linear layers of the layers of a saved model, and the shapes of their weights."""
    weights = load_file(folder / "model.safetensors").items()
    return {
        n.removesuffix(".weight"): tuple(t.shape) for n, t in weights if t.dim() == 2 and (".0." in n or ".2." in n)
    }


def pair(module: str, n: int, k: int, seed: int, rank: int = RANK) -> dict[str, Tensor]:
    return {
        f"{module}.lora_A.weight": factor(rank, k, seed=seed), f"{module}.lora_B.weight": factor(n, rank, seed=seed + 1)
    }  # fmt: skip


def changed(source: Path, out: Path, deltas: dict[str, Tensor]) -> Path:
    """A copy of the checkpoint ``source`` with ``deltas`` added to its weights, by the names of the modules."""
    shutil.copytree(source, out)
    tensors = load_file(source / "model.safetensors")
    for module, delta in deltas.items():
        tensors[f"{module}.weight"] += delta
    save_file(tensors, out / "model.safetensors", {"format": "pt"})
    return out


def with_adapter(source: Path, folder: Path, seed: int = 1) -> tuple[Path, dict[str, Tensor]]:
    """An adapter of all linear layers of two layers, and what it adds to the tensors as they are stored."""
    tensors, deltas = {}, {}
    transposed = json.loads((source / "config.json").read_text())["model_type"] == "gpt2"
    for i, (module, shape) in enumerate(modules_of(source).items()):
        n, k = reversed(shape) if transposed else shape
        own = pair(module, n, k, seed + 2 * i)
        delta = ALPHA / RANK * own[f"{module}.lora_B.weight"] @ own[f"{module}.lora_A.weight"]
        tensors |= own
        deltas[module] = delta.t() if transposed else delta
    return write(folder, tensors, fan_in_fan_out=transposed), deltas


def assert_same(ours: torch.nn.Module, theirs: torch.nn.Module) -> None:
    found, wanted = ours.state_dict(), theirs.state_dict()
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert torch.equal(found[name], tensor), name


@pytest.fixture
def saved(tmp_path: Path) -> Callable[..., Path]:
    def save(name: str, **more: Any) -> Path:
        model = families_table.make(name, **more) if more else families_table.FAMILIES[name]()
        model.save_pretrained(tmp_path / "base")
        return tmp_path / "base"

    return save


@pytest.mark.parametrize(
    "family",
    [
        "llama",
        "gpt2",
        "gpt-neox",
        "falcon",
        "falcon-11b",
        "bloom",
        "glm",
        "phi3",
        "mixtral",
        "qwen2-moe",
        "gpt-bigcode",
    ],
)
@pytest.mark.parametrize("quantize", [None, "int8"])
def test_weights_are_those_changed_by_hand(family: str, quantize: str | None, saved: Any, tmp_path: Path) -> None:
    base = saved(family)
    adapter, deltas = with_adapter(base, tmp_path / "adapter")
    assert len(deltas) >= 8
    by_hand = Checkpoint.open(changed(base, tmp_path / "changed", deltas)).build(torch.float32, quantize=quantize)
    opened = Checkpoint.open(base).with_adapters({str(adapter): 1.0})
    ours = opened.build(torch.float32, quantize=quantize)
    assert_same(ours, by_hand)
    plain = Checkpoint.open(base).build(torch.float32, quantize=quantize)
    with torch.no_grad():
        assert torch.equal(ours(WORDS), by_hand(WORDS))
        assert (ours(WORDS) - plain(WORDS)).abs().mean() > 0.1


def test_an_adapter_of_peft_itself(data_dir: Path) -> None:
    """Patterns, rsLoRA and some layers only; ``data/adapters/SOURCE.md`` has the script."""
    adapter = data_dir / "adapters" / "stories260K_peft"
    golden = load_file(adapter / "logits.safetensors")
    opened = Checkpoint.open(data_dir / "models" / "stories260K_hf")
    with torch.no_grad():
        plain = opened.build(torch.float32)(golden["tokens"])[0, :, :64]
        found = opened.with_adapters({str(adapter): 1}).build(torch.float32)(golden["tokens"])[0, :, :64]
    torch.testing.assert_close(found, golden["logits"], atol=1e-3, rtol=1e-4)
    assert (plain - golden["logits"]).abs().mean() > 0.3


@pytest.mark.parametrize(
    ("family", "quantize"),
    [("llama", None), ("llama", "int8"), ("llama", "int4"), ("gpt-neox", None), ("gpt2", None), ("gpt2", "int8")],
)
def test_ranks_hold_their_shares(family: str, quantize: str | None, saved: Any, tmp_path: Path) -> None:
    base = saved(family)
    adapter, deltas = with_adapter(base, tmp_path / "adapter")
    by_hand = Checkpoint.open(changed(base, tmp_path / "changed", deltas))
    ours = Checkpoint.open(base).with_adapters({str(adapter): 1.0})
    for rank in range(2):
        how: dict[str, Any] = {"shard": Shard(rank, 2), "quantize": quantize}
        assert_same(ours.build(torch.bfloat16, **how), by_hand.build(torch.bfloat16, **how))


def test_two_adapters_with_weights(saved: Any, tmp_path: Path) -> None:
    base = saved("llama")
    (first, one), (second, two) = (with_adapter(base, tmp_path / f"a{i}", seed=100 * i) for i in range(2))
    deltas = {module: 2 * one[module] - 0.5 * two[module] for module in one}
    by_hand = Checkpoint.open(changed(base, tmp_path / "changed", deltas)).build(torch.float32)
    lora = {str(first): 2.0, str(second): -0.5}
    opened = Checkpoint.open(base).with_adapters(lora)
    assert opened.with_adapters(dict(lora)) is opened
    with pytest.raises(ConfigError, match="was opened with other adapters"):
        opened.with_adapters({str(first): 1})
    ours = opened.build(torch.float32)
    for name, tensor in by_hand.state_dict().items():
        torch.testing.assert_close(ours.state_dict()[name], tensor)


def test_scales_and_ranks_of_single_modules(saved: Any, tmp_path: Path) -> None:
    """The first pattern that is the end of a name, or the name itself, as in PEFT."""
    base = saved("llama")
    q, k, up = "model.layers.0.self_attn.q_proj", "model.layers.1.self_attn.k_proj", "model.layers.1.mlp.up_proj"
    tensors = {**pair(q, 64, 64, 1), **pair(k, 32, 64, 3, rank=16), **pair(up, 144, 64, 5)}
    patterns = {
        "rank_pattern": {"self_attn.q": 99, "k_proj": 16},
        "alpha_pattern": {r"layers\.1\..*_proj": 8, "up_proj": 1000},
    }
    adapter = write(tmp_path / "adapter", tensors, use_rslora=True, **patterns)
    scales = {q: 2 / 4**0.5, k: 8 / 16**0.5, up: 8 / 4**0.5}
    deltas = {m: s * tensors[f"{m}.lora_B.weight"] @ tensors[f"{m}.lora_A.weight"] for m, s in scales.items()}
    by_hand = Checkpoint.open(changed(base, tmp_path / "changed", deltas)).build(torch.float32)
    assert_same(Checkpoint.open(base).with_adapters({str(adapter): 1}).build(torch.float32), by_hand)


def test_torch_files_and_bfloat16_factors(saved: Any, tmp_path: Path) -> None:
    base = saved("llama")
    adapter, deltas = with_adapter(base, tmp_path / "adapter")
    file = adapter / "adapter_model.safetensors"
    torch.save({name: t.bfloat16() for name, t in load_file(file).items()}, adapter / "adapter_model.bin")
    file.unlink()
    by_hand = Checkpoint.open(changed(base, tmp_path / "changed", deltas)).build(torch.bfloat16)
    assert_same(Checkpoint.open(base).with_adapters({str(adapter): 1}).build(torch.bfloat16), by_hand)


def test_embeddings_and_saved_modules(saved: Any, tmp_path: Path) -> None:
    base = saved("llama")
    table, norm = "model.embed_tokens", torch.full((64,), 1.5)
    tensors = {
        f"{table}.lora_embedding_A": factor(RANK, 261, seed=1), f"{table}.lora_embedding_B": factor(64, RANK, seed=2),
        f"{table}.base_layer.weight": load_file(base / "model.safetensors")[f"{table}.weight"],
        "lm_head.weight": factor(261, 64, seed=3), "model.norm.weight": norm,
    }  # fmt: skip
    adapter = write(tmp_path / "adapter", tensors, modules_to_save=["lm_head", "norm"])
    delta = 0.5 * (tensors[f"{table}.lora_embedding_B"] @ tensors[f"{table}.lora_embedding_A"]).t()
    by_hand = Checkpoint.open(changed(base, tmp_path / "changed", {table: delta})).build(torch.float32)
    with torch.no_grad():
        by_hand.head.output.weight.copy_(tensors["lm_head.weight"])
        by_hand.head.norm.weight.copy_(norm)
    assert_same(Checkpoint.open(base).with_adapters({str(adapter): 1}).build(torch.float32), by_hand)
    with pytest.raises(
        CheckpointError, match=r"lm_head\.weight, .*, model\.norm\.weight take the place of the model's own"
    ):
        Checkpoint.open(base).with_adapters({str(adapter): 0.5})
    other = tmp_path / "other"
    shutil.copytree(adapter, other)
    with pytest.raises(CheckpointError, match=r"lm_head\.weight.* were replaced by another adapter"):
        Checkpoint.open(base).with_adapters({str(adapter): 1, str(other): 1})


def test_a_tied_head_becomes_a_matrix_of_its_own(saved: Any, tmp_path: Path) -> None:
    base = saved("llama-tied")
    tensors = pair("lm_head", 261, 64, 1)
    adapter = write(tmp_path / "adapter", tensors)
    opened = Checkpoint.open(base)
    ours, plain = opened.with_adapters({str(adapter): 1}), opened.build(torch.float32)
    assert not ours.config.tie_embeddings
    assert ours.num_parameters == opened.num_parameters + 261 * 64
    model, table = ours.build(torch.float32), plain.embed.tokens.weight
    assert torch.equal(model.embed.tokens.weight, table)
    delta = tensors["lm_head.lora_B.weight"] @ tensors["lm_head.lora_A.weight"] / 2
    assert torch.equal(model.head.output.weight, table + delta)
    table_too = write(tmp_path / "table", {"model.embed_tokens.weight": table.detach().clone(), **tensors})
    with pytest.raises(CheckpointError, match=r"model\.embed_tokens\.weight has an adapter, and it is the head"):
        opened.with_adapters({str(table_too): 1})


@pytest.mark.parametrize("whole", [False, True])
def test_a_head_that_files_call_otherwise(whole: bool, saved: Any, tmp_path: Path) -> None:
    """Files of GPT-NeoX have embed_out, which transformers 5 calls lm_head, and so does PEFT then."""
    opened, models = Checkpoint.open(saved("gpt-neox")), []
    for name in ("embed_out", "lm_head"):
        layer = pair("gpt_neox.layers.0.attention.dense", 64, 64, 1)
        head = {f"{name}.weight": factor(261, 64, seed=6)} if whole else pair(name, 261, 64, 3)
        adapter = write(tmp_path / name, layer | head, alpha_pattern={name: 7})
        models.append(opened.with_adapters({str(adapter): 1}).build(torch.float32))
    assert not torch.equal(models[0].head.output.weight, opened.build(torch.float32).head.output.weight)
    assert_same(*models)


def test_a_table_and_its_head_are_saved_apart(saved: Any, tmp_path: Path) -> None:
    """As PEFT does with ``modules_to_save`` of both, which trains new words of a chat."""
    base, table = saved("llama-tied"), factor(261, 64, seed=5)
    tensors = {"model.embed_tokens.weight": table, "lm_head.weight": factor(261, 64, seed=6), **pair(Q, 64, 64, 1)}
    model = Checkpoint.open(base).with_adapters({str(write(tmp_path / "adapter", tensors)): 1}).build(torch.float32)
    assert torch.equal(model.embed.tokens.weight, table)
    assert torch.equal(model.head.output.weight, tensors["lm_head.weight"])


Q, V = "model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.v_proj"
GOOD = pair(Q, 64, 64, 1)


@pytest.mark.parametrize(
    ("tensors", "config", "message"),
    [
        (GOOD, {"peft_type": "LOHA"}, "peft_type 'LOHA' is not supported, only LORA"),
        (GOOD, {"use_dora": True}, "use_dora True is not supported"),
        (GOOD, {"bias": "lora_only"}, "bias 'lora_only' is not supported"),
        (GOOD, {"init_lora_weights": "pissa_niter_4"}, "init_lora_weights 'pissa_niter_4' is not supported"),
        (GOOD, {"target_parameters": ["mlp.experts.gate_up_proj"]}, "target_parameters .* is not supported"),
        (GOOD, {"something_new": 3}, "something_new 3 is not supported"),
        (GOOD, {"r": 0}, "r must be a number, not 0"),
        (GOOD, {"lora_alpha": "16"}, "lora_alpha must be a number, not '16'"),
        (GOOD, {"lora_alpha": 10**400}, "lora_alpha must be a number, not 1000"),
        (GOOD, {"rank_pattern": {"q_proj": 2.5}}, "rank_pattern of 'q_proj' must be a number, not 2.5"),
        (GOOD, {"alpha_pattern": [3]}, "alpha_pattern must give a number for each pattern"),
        (GOOD, {"alpha_pattern": {"(": 1}}, r"alpha_pattern '\(' is no regular expression"),
        (GOOD, {"r": 8}, rf"{Q} are \[4, 64\] and \[64, 4\], not \[8, K\] and \[N, 8\]"),
        (GOOD | {f"{Q}.lora_A.weight": torch.ones(4)}, {}, rf"{Q} are \[4\] and \[64, 4\], not \[4, K\]"),
        ({f"{Q}.lora_A.weight": GOOD[f"{Q}.lora_A.weight"]}, {}, f"{Q} has lora_A alone"),
        (GOOD | {f"{Q}.lora_A.weight": torch.ones(4, 64, dtype=torch.int64)}, {}, "is no tensor of an adapter"),
        (pair(Q, 60, 64, 1), {}, rf"B @ A of {Q} is \[60, 64\], not \[64, 64\]"),
        (pair("model.layers.9.mlp.up_proj", 144, 64, 1), {}, r"has no model.layers.9.mlp.up_proj.weight"),
        (GOOD | {f"{Q}.lora_magnitude_vector": torch.ones(64)}, {}, f"has no {Q}.lora_magnitude_vector"),
        (GOOD | {"lm_head.weight": torch.ones(270, 64)}, {}, r"lm_head.weight is \[270, 64\], not \[261, 64\]"),
        ({"lm_head.weight": torch.ones(261, 64)}, {}, "holds no lora_A and lora_B"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(
    tensors: dict[str, Tensor], config: dict[str, Any], message: str, saved: Any, tmp_path: Path
) -> None:
    adapter = write(tmp_path / "adapter", tensors, **config)
    with pytest.raises(CheckpointError, match=f"^lora: .*{message}"):
        Checkpoint.open(saved("llama")).with_adapters({str(adapter): 1})


def test_folders_without_an_adapter(saved: Any, tmp_path: Path) -> None:
    base = saved("llama")
    with pytest.raises(CheckpointError, match=r"nowhere has no adapter_config\.json"):
        open_adapters({str(tmp_path / "nowhere"): 1})
    adapter, _ = with_adapter(base, tmp_path / "adapter")
    (adapter / "adapter_model.safetensors").write_bytes(b"x" * 40)
    with pytest.raises(CheckpointError, match=r"adapter_model\.safetensors: not a safetensors file"):
        open_adapters({str(adapter): 1})
    (adapter / "adapter_model.safetensors").unlink()
    with pytest.raises(
        CheckpointError, match=r"adapter has no weights: none of adapter_model\.safetensors, adapter_model\.bin"
    ):
        open_adapters({str(adapter): 1})


def test_quantized_checkpoints_are_refused(data_dir: Path, tmp_path: Path) -> None:
    quantize_checkpoint(
        Checkpoint.open(data_dir / "models" / "stories260K_hf"), tmp_path / "int8", quant_config("int8")
    )
    adapter = write(tmp_path / "adapter", GOOD)
    with pytest.raises(ConfigError, match=r"lora: .*int8 is quantized already \(gpt_fast\).*Name the unquantized"):
        LLM(tmp_path / "int8", lora=str(adapter))


def test_a_run_is_not_gone_on_with_under_another_adapter(data_dir: Path, tmp_path: Path) -> None:
    source, quant = Checkpoint.open(data_dir / "models" / "stories260K_hf"), quant_config("int8")
    first, second = (with_adapter(source.path, tmp_path / f"a{i}", seed=100 * i)[0] for i in range(2))
    with (
        pytest.raises(KeyboardInterrupt),
        CheckpointWriter(source.with_adapters({str(first): 1.0}), quant, tmp_path / "out", {"method": "rtn"}, False),
    ):
        raise KeyboardInterrupt
    shutil.copytree(first, tmp_path / "same")
    shutil.copyfile(second / "adapter_model.safetensors", first / "adapter_model.safetensors")
    for lora in (None, {str(first): 0.5}, {str(tmp_path / "same"): 1.0}, {str(first): 1.0}):
        with pytest.raises(CheckpointError, match="was begun with other settings or another checkpoint"):
            quantize_checkpoint(source.with_adapters(lora), tmp_path / "out", quant, resume=True)


def test_a_converted_checkpoint_has_the_adapter_in_its_own_dtype(data_dir: Path, tmp_path: Path) -> None:
    base = tmp_path / "base"
    convert(data_dir / "models" / "stories260K_hf", base, dtype=torch.bfloat16)
    lora = {str(with_adapter(base, tmp_path / "adapter")[0]): 1.0}
    convert(base, tmp_path / "out", lora=lora)
    merged = Checkpoint.open(tmp_path / "out")
    assert merged.stored_dtype == torch.bfloat16
    assert_same(merged.build(torch.bfloat16), Checkpoint.open(base).with_adapters(lora).build(torch.bfloat16))


def test_another_adapter_has_another_digest(saved: Any, tmp_path: Path) -> None:
    base = saved("llama")
    first, second = (with_adapter(base, tmp_path / f"a{i}", seed=100 * i)[0] for i in range(2))
    shutil.copytree(first, tmp_path / "same")
    opened = Checkpoint.open(base)
    several: Iterable[dict[str, float] | None] = (
        None, {str(first): 1}, {str(first): 0.5}, {str(second): 1}, {str(first): 1, str(second): 1}
    )  # fmt: skip
    digests = [fingerprint(opened.with_adapters(lora)) for lora in several]
    assert len(set(digests)) == len(digests)
    assert fingerprint(opened.with_adapters({str(tmp_path / "same"): 1})) == digests[1]
    by_path = [set_up(base, {"lora": str(tmp_path / name)}, ()).digest for name in ("a0", "same", "a1")]
    assert by_path[0] == by_path[1] != by_path[2]


def test_the_engine_generates_as_the_changed_model(saved: Any, tmp_path: Path) -> None:
    base = saved("llama")
    adapter, deltas = with_adapter(base, tmp_path / "adapter")
    asked: dict[str, Any] = {"max_batch": 2, "max_seq_len": 64, "threads": 1}

    def tokens(checkpoint: Path, **more: Any) -> list[int]:
        with LLM(checkpoint, **asked, **more) as llm:
            return llm.generate([5, 6, 7], SamplingParams(max_tokens=20, ignore_eos=True)).token_ids

    wanted = tokens(changed(base, tmp_path / "changed", deltas))
    assert tokens(base, lora=adapter.as_posix()) == wanted != tokens(base)
    assert tokens(base, lora=[str(adapter)], draft="int8", speculate="always") == wanted
    assert tokens(base, lora={str(adapter): 1}, device_map={"cpu": 3}) == wanted
    with LLM(base, **asked) as llm, pytest.raises(ConfigError, match="lora is the model's own"):
        LLM.from_model(llm.model, lora=str(adapter))


def test_the_sum_is_written_as_a_checkpoint(saved: Any, tmp_path: Path) -> None:
    """By ``convert``, or rounded by ``quantize``."""
    base = saved("llama")
    adapter, deltas = with_adapter(base, tmp_path / "adapter")
    by_hand, lora = changed(base, tmp_path / "changed", deltas), ["--lora", str(adapter)]
    assert main(["convert", str(base), "--out", str(tmp_path / "sum"), *lora]) == 0
    assert_same(Checkpoint.open(tmp_path / "sum").build(torch.float32), Checkpoint.open(by_hand).build(torch.float32))
    for name, source, more in (("ours", base, lora), ("theirs", by_hand, [])):
        out = str(tmp_path / name)
        assert main(["quantize", "--checkpoint", str(source), "--mode", "int8", "--out", out, *more]) == 0
    ours, theirs = (Checkpoint.open(tmp_path / name).build(torch.float32) for name in ("ours", "theirs"))
    assert_same(ours, theirs)


@pytest.mark.parametrize("quantize", [None, "int8"])
@pytest.mark.parametrize("kind", ["cohere2", "openai-gpt"])
def test_models_that_transformers_runs(kind: str, quantize: str | None, tmp_path: Path) -> None:
    sizes = families_table.SHAPE | {"num_hidden_layers": 2, "n_embd": 64, "n_layer": 2, "n_head": 4, "head_dim": 16}
    config = transformers.AutoConfig.for_model(kind, **sizes | {"pad_token_id": 0, "tie_word_embeddings": True})
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.save_pretrained(tmp_path / "base")
    name = "model.layers.1.mlp.up_proj" if kind == "cohere2" else "transformer.h.1.mlp.c_fc"
    linear = model.get_submodule(name)
    n, k = linear.weight.shape if kind == "cohere2" else linear.weight.shape[::-1]
    tensors = pair(name, n, k, 1)
    adapter = write(tmp_path / "adapter", tensors)
    delta = ALPHA / RANK * tensors[f"{name}.lora_B.weight"] @ tensors[f"{name}.lora_A.weight"]
    with torch.no_grad():
        linear.weight += delta if kind == "cohere2" else delta.t()
    model.save_pretrained(tmp_path / "changed")
    ours = open_checkpoint(tmp_path / "base").with_adapters({str(adapter): 1})
    by_hand = open_checkpoint(tmp_path / "changed")
    built, wanted = (c.build(torch.float32, quantize=quantize) for c in (ours, by_hand))
    assert_same(built.module, wanted.module)  # type: ignore[union-attr]
    assert fingerprint(ours) != fingerprint(open_checkpoint(tmp_path / "base"))
    for wrong, message in (
        (pair(name + "x", n, k, 1), f"has no {name}x.weight"),
        (pair(name, n + 1, k, 1), rf"B @ A of {name} is"),
        (pair("lm_head", 261, 64, 1), "lm_head.weight has an adapter, and it is"),
    ):
        shutil.rmtree(adapter)
        write(adapter, wrong)
        with pytest.raises(CheckpointError, match=message):
            open_checkpoint(tmp_path / "base").with_adapters({str(adapter): 1})


@pytest.mark.parametrize(
    ("value", "read"),
    [("a", {"a": 1.0}), (["a", "b"], {"a": 1.0, "b": 1.0}), ({"a": 0.5, "b": -1}, {"a": 0.5, "b": -1.0}), (None, None)],
)
def test_how_adapters_are_named(value: Any, read: Any) -> None:
    assert EngineConfig(lora=value).lora == read


@pytest.mark.parametrize("value", ["", [], {}, [3], {"a": "1"}, {"a": True}, {"a": float("nan")}, {"a": 101}, 3])
def test_wrong_names(value: Any) -> None:
    with pytest.raises(ConfigError, match="lora must be a"):
        EngineConfig(lora=value)


def test_the_command_line_and_the_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parser = argparse.ArgumentParser()
    options.add_options(parser, options.ENGINE)
    given = parser.parse_args(["--lora", "a/b", "--lora", "x=0.5", "--lora", "k=v/c"])
    assert options.engine_options(given) == {"lora": {"a/b": 1.0, "x": 0.5, "k=v/c": 1.0}}
    assert options.engine_options(parser.parse_args([])) == {}
    (tmp_path / "checkpoint").mkdir()
    (tmp_path / "checkpoint" / "model.safetensors").touch()
    (tmp_path / "style").mkdir()
    config = {"handler": {"lora": {"style": 0.5}}}
    assert read_settings(config, tmp_path).engine["lora"] == {str(tmp_path / "style"): 0.5}
    with pytest.raises(ConfigError, match=r"lora 'other' .* does not exist"):
        read_settings({"handler": {"lora": "other"}}, tmp_path)
    monkeypatch.chdir(tmp_path)
    assert choose("checkpoint", False, None, {"lora": {"style": 0.5}}).keys["lora"] == {str(tmp_path / "style"): 0.5}
    with pytest.raises(ConfigError, match=r"lora: .*other is not a folder"):
        choose("checkpoint", False, None, {"lora": {"other": 1}})
