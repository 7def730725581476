"""Models of families that have no description here, run by transformers behind the engine.

In batches and in pieces they have the tokens of transformers alone, each by the best way that its code allows."""

from __future__ import annotations

import dataclasses
import json
import logging
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from gpt_fast import LLM, SamplingParams, cli
from gpt_fast.batch.setup import set_up
from gpt_fast.checkpoint.fingerprint import fingerprint
from gpt_fast.errors import CheckpointError, ConfigError, UnsupportedError
from gpt_fast.foreign.checkpoint import ForeignCheckpoint, open_checkpoint
from gpt_fast.foreign.linear import KernelLinear, round_linears, use_kernels
from gpt_fast.foreign.model import ForeignModel, Loaded
from gpt_fast.foreign.ways import Cached, Paged, Recomputed, _check_windows
from gpt_fast.kernels.cpu.library import runs
from gpt_fast.kernels.reference import rounded_product
from gpt_fast.quantize.linear import QuantizedLinear

DEMO = Path(__file__).resolve().parent.parent / "model_store" / "demo" / "target"
SIZES: dict[str, Any] = {
    "vocab_size": 200, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 256, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
_GPT = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 256}
_DEEPSEEK = {
    "num_key_value_heads": 4, "q_lora_rank": 32, "kv_lora_rank": 32, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16,
    "v_head_dim": 16, "n_routed_experts": 4, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2,
    "moe_intermediate_size": 32, "first_k_dense_replace": 1, "head_dim": 8,
}  # fmt: skip
PAGED: dict[str, dict[str, Any]] = {
    "helium": {}, "apertus": {}, "arcee": {}, "seed_oss": {}, "ernie4_5": {}, "nemotron": {}, "persimmon": {},
    "exaone4": {}, "hunyuan_v1_dense": {}, "olmoe": {"num_experts": 4, "num_experts_per_tok": 2}, "granitemoe": {},
    "cohere2": {"sliding_window": 8, "num_hidden_layers": 4}, "deepseek_v3": _DEEPSEEK,
    "ctrl": {**_GPT, "dff": 96},
}  # fmt: skip
CACHED: dict[str, dict[str, Any]] = {
    "gptj": {**_GPT, "rotary_dim": 8},
    "gpt_neo": {"num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]], "window_size": 8},
    "xglm": {"d_model": 64, "ffn_dim": 96, "num_layers": 2, "attention_heads": 4},
    "mpt": {"d_model": 64, "n_layers": 2, "n_heads": 4, "max_seq_len": 256},
    "diffllama": {},  # calls attention twice for each layer
    "mamba": {"state_size": 8},
}
RECOMPUTED = {"openai-gpt": _GPT}
FAMILIES = PAGED | CACHED | RECOMPUTED
PROMPTS = [torch.randint(3, 200, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in (5, 21, 9, 40)]
OPTIONS: dict[str, Any] = {
    "dtype": "float32", "max_batch": 4, "prefill_chunk": 16, "page_size": 4, "threads": 1, "max_seq_len": 128,
}  # fmt: skip
GREEDY = SamplingParams(max_tokens=16, temperature=0.0, ignore_eos=True)

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Any]]:
    """The folder of a family's tiny checkpoint, and the model that it was made of."""
    made: dict[str, tuple[Path, Any]] = {}

    def of(name: str) -> tuple[Path, Any]:
        if name not in made:
            torch.manual_seed(0)
            model = AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **SIZES | FAMILIES[name])).eval()
            with torch.no_grad():
                for parameter in model.parameters():
                    if parameter.dim() == 2:
                        parameter.mul_(4.0)  # so that tokens differ, and depend on what is before them
            folder = tmp_path_factory.mktemp(name)
            model.save_pretrained(folder)
            made[name] = folder, model
        return made[name]

    return of


def by_transformers(model: Any, prompt: list[int], count: int = 16) -> list[int]:
    ids = torch.tensor([prompt])
    for _ in range(count):
        with torch.inference_mode():
            last = model(input_ids=ids, use_cache=False).logits[:, -1:]
        ids = torch.cat((ids, last.argmax(-1)), dim=1)
    return ids[0, len(prompt) :].tolist()


@pytest.mark.parametrize("name", FAMILIES)
def test_a_batch_has_the_tokens_of_transformers(name: str, saved: Any, caplog: pytest.LogCaptureFixture) -> None:
    folder, model = saved(name)
    wanted = [by_transformers(model, prompt) for prompt in PROMPTS]
    assert len({tuple(tokens) for tokens in wanted}) > 2
    with LLM(folder, **OPTIONS) as llm:
        found = [list(each.token_ids) for each in llm.generate(PROMPTS, GREEDY)]
        again = llm.generate(PROMPTS[3], GREEDY)
        assert isinstance(llm.model, ForeignModel)
        way = llm.model._way
        assert llm.status()["parameters"] == sum(p.numel() for p in model.parameters())
    assert found == wanted
    assert list(again.token_ids) == wanted[3]
    assert isinstance(way, Paged if name in PAGED else Cached if name in CACHED else Recomputed)
    assert bool(again.num_cached_tokens) == (name in PAGED)
    said = [r.message for r in caplog.records if r.levelno == logging.WARNING and "no own path" in r.message]
    assert len(said) == 1
    assert type(model).__name__ in said[0]


def test_a_model_that_also_reads_images_writes_on_from_text(tmp_path: Path) -> None:
    """Its text model is of a family without a row; those of a known one are in test_text_part.py."""
    images = {"model_type": "siglip_vision_model", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    images |= {"num_attention_heads": 2, "image_size": 28, "patch_size": 14}
    text = SIZES | {"model_type": "cohere2", "sliding_window": 8, "num_hidden_layers": 4}
    config = AutoConfig.for_model("aya_vision", text_config=text, vision_config=images)
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.mul_(4.0)
    model.save_pretrained(tmp_path)
    with LLM(tmp_path, **OPTIONS) as llm:
        found = [list(each.token_ids) for each in llm.generate(PROMPTS, GREEDY)]
    assert found == [by_transformers(model, prompt) for prompt in PROMPTS]


@pytest.mark.parametrize("name", ["helium", "gptj"])
@pytest.mark.parametrize("options", [{"draft": "lookup", "speculate": "always"}, {"kernels": False}], ids=str)
def test_drafts_and_plain_torch_change_no_token(name: str, options: dict[str, Any], saved: Any) -> None:
    folder, model = saved(name)
    prompts = [prompt * 2 for prompt in PROMPTS[:2]]
    with LLM(folder, **OPTIONS | options) as llm:
        found = llm.generate(prompts, GREEDY)
        swapped = any(isinstance(module, KernelLinear) for module in llm.model.module.modules())
    assert [list(each.token_ids) for each in found] == [by_transformers(model, prompt) for prompt in prompts]
    assert swapped == (runs(torch.float32, torch.device("cpu")) and options.get("kernels", True))


@pytest.mark.parametrize(
    ("kinds", "windows", "words"),
    [
        (["sliding_attention", "full_attention"], [0, 0], "layer 0 is sliding_attention, and asks for a window of 0"),
        (["sliding_attention", "full_attention"], [8, 8], "layer 1 is full_attention, and asks for a window of 8"),
        (["chunked_attention"], [0], "layer 0 is chunked_attention"),
        (None, [0], "layer 0 is sliding_attention"),
    ],
)
def test_windows_that_only_a_mask_would_have_are_seen(kinds: list[str] | None, windows: list[int], words: str) -> None:
    with pytest.raises(UnsupportedError, match=words):
        _check_windows(SimpleNamespace(layer_types=kinds, sliding_window=8), windows)
    _check_windows(SimpleNamespace(layer_types=["sliding_attention", "full_attention"], sliding_window=8), [8, 0])
    _check_windows(SimpleNamespace(sliding_window=8, use_sliding_window=False), [0])


def test_int8_is_near_and_a_quarter_as_large(saved: Any) -> None:
    folder, model = saved("helium")
    with LLM(folder, **OPTIONS, quantize="int8") as llm:
        found = llm.model.forward(torch.tensor([PROMPTS[1]]))
        with pytest.raises(ConfigError, match="int8"):
            ForeignCheckpoint(folder).format_for("int4")
    with torch.inference_mode():
        wanted = model(torch.tensor([PROMPTS[1]])).logits
    assert (found - wanted).abs().mean() < 0.1 * wanted.std()
    opened = ForeignCheckpoint(folder)
    linear = sum(m.weight.numel() for m in model.modules() if isinstance(m, nn.Linear))
    assert opened.num_bytes(torch.float32) - opened.num_bytes(torch.float32, "int8") == 3 * linear


@pytest.mark.skipif(not runs(torch.float32, torch.device("cpu")), reason="there are no C++ kernels here")
def test_a_linear_layer_by_the_kernels_is_that_layer() -> None:
    x, plain = torch.randn(2, 5, 64), nn.Linear(64, 48)
    own = KernelLinear(plain, torch.float32)
    assert torch.allclose(own(x), plain(x), atol=1e-5)
    assert own(x[:0]).shape == (0, 5, 48)
    assert (own.weight.shape, own.weight.dtype) == (plain.weight.shape, torch.float32)
    narrow, narrow_x = nn.Linear(64, 48, dtype=torch.bfloat16), x.bfloat16()
    found, wanted = KernelLinear(narrow, torch.bfloat16)(narrow_x), narrow(narrow_x)
    assert found.dtype == torch.bfloat16
    assert torch.allclose(found.float(), wanted.float(), atol=0.02)
    around = nn.ModuleDict({"a": plain})
    around.forward = lambda input_ids, use_cache: _Out(around["a"](torch.eye(64)[input_ids]))  # type: ignore[method-assign]
    round_linears(around)
    rounded = around["a"]
    assert isinstance(rounded, QuantizedLinear)
    wanted = rounded_product(x, rounded.weight.float() * rounded.scale[:, None], "int8") + rounded.bias
    assert torch.allclose(KernelLinear(rounded, torch.float32)(x), wanted, atol=1e-4)


@dataclasses.dataclass
class _Out:
    logits: torch.Tensor


def test_layers_whose_weights_the_model_reads_stay(saved: Any) -> None:
    folder, _ = saved("mamba")
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    use_kernels(model)
    kinds = {type(model.get_submodule(f"backbone.layers.1.mixer.{name}")) for name in ("dt_proj", "in_proj")}
    assert kinds == ({nn.Linear, KernelLinear} if runs(torch.float32, torch.device("cpu")) else {nn.Linear})


def test_a_state_takes_no_drafts_and_whole_prompts(saved: Any) -> None:
    folder, _ = saved("mamba")
    with pytest.raises(ConfigError, match="draft: MambaForCausalLM keeps a state"):
        LLM(folder, **OPTIONS, draft="lookup")
    with LLM(folder, **OPTIONS) as llm:
        assert llm.engine_config.prefill_chunk == 128
        assert not llm.engine_config.prefix_cache
    with LLM(folder, dtype="float32", threads=1, page_size=4, num_pages=9) as llm:
        assert llm.max_seq_len == 36, "what the pages hold, as for other models"
        assert len(llm.generate(PROMPTS[1], GREEDY).token_ids) == 36 - len(PROMPTS[1])


def test_prompts_of_a_state_are_whole_in_any_company(saved: Any) -> None:
    """Eight long prompts at once are more than one step computes; the later ones come beside tokens of the first."""
    folder, model = saved("mamba")
    prompts = [[3 + (7 * i + j * j) % 190 for j in range(60 + 3 * i)] for i in range(8)]
    with LLM(folder, **OPTIONS) as llm:
        found = [list(each.token_ids) for each in llm.generate(prompts, GREEDY)]
    assert found == [by_transformers(model, prompt) for prompt in prompts]


class Odd(nn.Module):
    """A stand-in for a causal model of transformers that breaks a rule."""

    def __init__(self, rule: str) -> None:
        super().__init__()
        self.rule, self.table = rule, nn.Embedding(200, 32)
        self.config = AutoConfig.for_model("llama", **SIZES)

    def forward(self, input_ids: torch.Tensor, use_cache: bool = False) -> _Out:
        x = self.table(input_ids)
        x = x + (x.mean(1, keepdim=True) if self.rule == "looks ahead" else x.cumsum(1))
        return _Out((x + (torch.randn_like(x) if self.rule == "random" else 0)) @ self.table.weight.T)


def test_models_that_no_way_computes_are_refused() -> None:
    config = dataclasses.replace(LLM_SHAPE, vocab_size=200)
    with pytest.raises(ConfigError, match="does not compute the same from the same tokens twice"):
        ForeignModel(Loaded(Odd("random"), config))
    with pytest.raises(ConfigError, match=r"Odd cannot be served: .*logits differ from the model's"):
        ForeignModel(Loaded(Odd("looks ahead"), config))
    assert isinstance(ForeignModel(Loaded(Odd("none"), config))._way, Recomputed)


LLM_SHAPE = open_checkpoint(DEMO).config


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"device_map": ["cpu"]}, "device_map: a model that transformers runs is on one device"),
        ({"draft": "int4"}, "draft: int4 is not there for models that transformers runs"),
        ({"quantize": "int4"}, "quantize: int4 is not there for models that transformers runs, only int8"),
    ],
)
def test_options_that_need_a_description_are_refused(options: dict[str, Any], words: str, saved: Any) -> None:
    with pytest.raises(ConfigError, match=words):
        LLM(saved("helium")[0], **OPTIONS | options)


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("llama4_text", {"attention_chunk_size": 16, "num_local_experts": 2, "intermediate_size_mlp": 96}),
        ("phimoe", {"sliding_window": 16, "num_local_experts": 2}),
    ],
)
def test_caches_that_lose_tokens_take_no_drafts(name: str, sizes: dict[str, Any], tmp_path: Path) -> None:
    AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **SIZES | sizes)).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"draft: .* keeps a state that wrong guesses cannot be taken out of"):
        LLM(tmp_path, **OPTIONS, draft="lookup")


def test_ranks_are_refused(saved: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="torchrun: a model that transformers runs is not divided"):
        LLM(saved("helium")[0], **OPTIONS)


def test_what_transformers_does_not_know_either(tmp_path: Path, saved: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, _ = saved("helium")
    (tmp_path / "model.safetensors").symlink_to(folder / "model.safetensors")
    for raw, words in (
        ({"model_type": "unheard-of", "architectures": ["UnheardForCausalLM"]}, "nor does transformers run it"),
        ({"model_type": "t5", "architectures": ["T5Model"]}, "it has no causal model of the type t5"),
    ):
        (tmp_path / "config.json").write_text(json.dumps(raw))
        with pytest.raises(CheckpointError, match=words):
            LLM(tmp_path)
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(CheckpointError, match=r"HeliumForCausalLM.*pip install 'gpt-fast-serve\[hf\]'"):
        open_checkpoint(folder)


def test_weights_that_are_missing_are_named_and_not_random(tmp_path: Path, saved: Any) -> None:
    folder, _ = saved("helium")
    shutil.copy(folder / "config.json", tmp_path)
    tensors = load_file(folder / "model.safetensors")
    for name in ("lm_head.weight", "model.layers.1.mlp.down_proj.weight"):
        del tensors[name]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"lack lm_head\.weight, model\.layers\.1\.mlp\.down_proj\.weight"):
        ForeignCheckpoint(tmp_path).build(torch.float32)
    raw = json.loads((folder / "config.json").read_text()) | {"vocab_size": 100}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    shutil.copy(folder / "model.safetensors", tmp_path)
    with pytest.raises(CheckpointError, match=r"gives lm_head\.weight, model\.embed_tokens\.weight another shape"):
        ForeignCheckpoint(tmp_path).build(torch.float32)
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "pytorch_model.bin").write_bytes(b"PK\x03\x04 and nothing behind it")
    with pytest.raises(CheckpointError, match="transformers cannot load it"):
        ForeignCheckpoint(tmp_path).build(torch.float32)


def test_a_tied_head_is_not_missing(tmp_path: Path) -> None:
    config = AutoConfig.for_model("helium", **SIZES, tie_word_embeddings=True)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    model = ForeignCheckpoint(tmp_path).build(torch.float32).module
    assert model.lm_head.weight is model.model.embed_tokens.weight


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("HeliumForSequenceClassification", False),
        ("LlamaForTokenClassification", False),
        ("HeliumModel", False),
        ("HeliumForCausalLM", True),
        ("OpenAIGPTLMHeadModel", True),
    ],
)
def test_architectures_without_a_head_for_text_are_refused(name: str, text: bool, tmp_path: Path, saved: Any) -> None:
    folder, _ = saved("helium")
    (tmp_path / "model.safetensors").symlink_to(folder / "model.safetensors")
    raw = json.loads((folder / "config.json").read_text()) | {"architectures": [name], "tie_word_embeddings": True}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    if text:
        assert open_checkpoint(tmp_path).config.family == "helium"
    else:
        with pytest.raises(CheckpointError, match=f"a {name} generates no text"):
            open_checkpoint(tmp_path)


@pytest.mark.parametrize("family", ["own", "helium"])
def test_code_in_a_checkpoint_never_runs(family: str, tmp_path: Path, saved: Any) -> None:
    folder, _ = saved("helium")
    raw = json.loads((folder / "config.json").read_text())
    raw |= {"model_type": family, "auto_map": dict.fromkeys(("AutoConfig", "AutoModelForCausalLM"), "own.Own")}
    (tmp_path / "config.json").write_text(json.dumps(raw | ({"architectures": ["Own"]} if family == "own" else {})))
    (tmp_path / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Own: pass\n")
    (tmp_path / "model.safetensors").symlink_to(folder / "model.safetensors")
    if family == "own":
        with pytest.raises(CheckpointError, match="nor does transformers run it"):
            LLM(tmp_path)
    else:
        opened = open_checkpoint(tmp_path)
        assert opened.num_parameters == sum(p.numel() for p in opened.build(torch.float32).module.parameters())
    assert not (tmp_path / "ran").exists()


def test_files_of_requests_know_it_by_its_digest(saved: Any) -> None:
    folder, _ = saved("helium")
    setup = set_up(folder, {"dtype": "float32"}, ())
    assert setup.weights == fingerprint(ForeignCheckpoint(folder))


@pytest.mark.parametrize("name", ["helium", "gptj"])
def test_every_command_takes_it(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(0)
    config = AutoConfig.for_model(name, **SIZES | FAMILIES[name] | {"vocab_size": 2048})
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    for file in ("tokenizer.model", "tokenizer_config.json"):
        shutil.copy(DEMO / file, tmp_path)
    (tmp_path / "text").write_text("Once upon a time there was a dog. " * 20)
    where = ["--checkpoint", str(tmp_path)]
    for command, wanted in (
        (["info", *where], f"{name}, run by transformers"),
        (["generate", *where, "--prompt", "The dog", "--max-new-tokens", "5", "--json"], '"dtype": "float32"'),
        (["eval", *where, "--perplexity", str(tmp_path / "text"), "--context", "64"], "perplexity"),
        (["bench", *where, "--new-tokens", "4", "--repeats", "1", "--prompt-tokens", "8"], "tokens/s"),
    ):
        device = [] if command[0] == "info" else ["--threads", "1"]
        assert cli.main([*command, *device, "--dtype", "float32"]) == 0
        assert wanted in capsys.readouterr().out
