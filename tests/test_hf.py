"""GPTFast's functions: its README's program on a tiny GPT-2, sample functions, drafts, any model of transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from current_device import watch_current
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GPTJConfig,
    GPTJForCausalLM,
    MambaConfig,
    MambaForCausalLM,
)

from gpt_fast import hf
from gpt_fast.errors import ConfigError
from gpt_fast.model.cpu_model import CpuModel

PROMPT = torch.tensor([[7, 3, 99, 4, 21, 60, 5]])

pytestmark = pytest.mark.usefixtures("one_thread")


def argmax(self: Any, probabilities: Tensor) -> Tensor:
    """As in GPTFast's README."""
    max_prob_index = torch.argmax(probabilities, dim=-1)
    return max_prob_index.view(1, 1)


def by_chance(probabilities: Tensor, temperature: float, generator: torch.Generator) -> Tensor:
    return torch.multinomial((probabilities.log() / temperature).softmax(-1), 1, generator=generator)


def tiny(kind: Any, config: Any, seed: int) -> Any:
    torch.manual_seed(seed)
    model = kind(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 2 and "wpe" not in name:
                parameter.mul_(6.0)
    return model


def gpt2(seed: int, layers: int = 2, positions: int = 128) -> Any:
    sizes: dict[str, Any] = {"vocab_size": 120, "n_embd": 32, "n_head": 4, "n_positions": positions}
    return tiny(GPT2LMHeadModel, GPT2Config(n_layer=layers, bos_token_id=0, eos_token_id=0, **sizes), seed)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A tiny GPT-2, and one that begins like it and guesses some of its tokens."""
    target = gpt2(0)
    draft = gpt2(1)
    with torch.no_grad():
        for ours, theirs in zip(draft.parameters(), target.parameters(), strict=True):
            ours.copy_(theirs + 0.3 * torch.randn_like(theirs) * theirs.std())
    paths = tuple(tmp_path_factory.mktemp(name) for name in ("target", "draft"))
    target.save_pretrained(paths[0])
    draft.save_pretrained(paths[1])
    return paths[0], paths[1]


def by_transformers(model: Any, length: int, prompt: Tensor = PROMPT) -> Tensor:
    ids = prompt
    while ids.shape[1] < length:
        with torch.inference_mode():
            ids = torch.cat((ids, model(ids, use_cache=False).logits[:, -1:].argmax(-1)), dim=1)
    return ids


def test_the_program_of_its_readme(folders: tuple[Path, Path]) -> None:
    target, draft = map(str, folders)
    model = hf.gpt_fast(
        target, sample_function=argmax, max_length=60, cache_config={"imports": []}, draft_model_name=draft
    )
    model.to("cpu")
    wanted = by_transformers(AutoModelForCausalLM.from_pretrained(target), 50)
    for _ in range(2):
        with torch.no_grad():
            found = model.generate(cur_tokens=PROMPT, max_tokens=50, speculate_k=6)
        assert torch.equal(found, wanted)
        assert 0 < model.num_right < model.num_guesses
    assert isinstance(model._model, CpuModel)
    assert torch.equal(model.generate(PROMPT, 50, speculate_k=0), wanted)
    assert model.num_guesses == 0


def test_a_sample_function_may_be_built_in(folders: tuple[Path, Path]) -> None:
    model = hf.gpt_fast(str(folders[0]), sample_function=torch.argmax)
    wanted = by_transformers(AutoModelForCausalLM.from_pretrained(folders[0]), 20)
    assert torch.equal(model.generate(PROMPT, 20), wanted)


def test_all_is_computed_on_the_device_of_the_model(
    folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Triton launches on the thread's current device, which may be another one than the model's."""
    inside = watch_current(hf, monkeypatch)

    def watch(owner: Any, name: str) -> None:
        run = getattr(owner, name)

        def watched(*args: Any) -> Any:
            assert inside == [torch.device("cpu")]
            return run(*args)

        monkeypatch.setattr(owner, name, watched)

    model = hf.gpt_fast(str(folders[0]))
    for owner, name in ((hf.Runner, "warm_up"), (hf.Runner, "execute"), (model._model, "forward")):
        watch(owner, name)
    assert model.generate(PROMPT, 12).shape == (1, 12)
    assert model(PROMPT).shape == (*PROMPT.shape, 120)
    assert not inside


def test_a_draft_that_is_the_model_is_always_right(folders: tuple[Path, Path]) -> None:
    model = hf.gpt_fast(str(folders[0]), draft_model_name=str(folders[0]))
    found = model.generate(PROMPT, 47, speculate_k=4)
    assert torch.equal(found, by_transformers(AutoModelForCausalLM.from_pretrained(folders[0]), 47))
    assert (model.num_guesses, model.num_right) == (32, 32)  # 40 tokens: eight steps of 4 guesses and one more token


def test_a_sample_function_with_chance_and_arguments(folders: tuple[Path, Path]) -> None:
    """Guesses change no distribution: first tokens behind one prompt, with and without a draft model."""
    plain = hf.gpt_fast(str(folders[0]), sample_function=by_chance)
    drafted = hf.gpt_fast(str(folders[0]), sample_function=by_chance, draft_model_name=str(folders[1]))
    counts = []
    for model in (plain, drafted):
        generator = torch.Generator().manual_seed(5)
        drawn = [model.generate(PROMPT, 10, temperature=1.5, generator=generator)[0, 8:] for _ in range(600)]
        counts.append(torch.stack(drawn)[:, 0].bincount(minlength=120).float())
    common = (counts[0] + counts[1]) >= 16
    a, b = (torch.cat((each[common], each[~common].sum()[None])) for each in counts)
    chi = ((a - b) ** 2 / (a + b).clamp(min=1)).sum()
    assert chi < len(a) + 4 * (2 * len(a)) ** 0.5  # four standard deviations


def test_models_of_transformers_that_have_no_description() -> None:
    config = GPTJConfig(vocab_size=120, n_embd=32, n_layer=2, n_head=4, rotary_dim=4, n_positions=128)
    model = tiny(GPTJForCausalLM, config, 3)
    wanted = by_transformers(model, 40)
    fast = hf.add_speculative_decode_kv_cache(hf.add_kv_cache(model, argmax), gpt2(4), argmax)
    assert torch.equal(fast.generate(PROMPT, 40, speculate_k=3), wanted)
    assert torch.equal(fast(PROMPT).argmax(-1)[:, -1], wanted[:, 7])


def test_int8(folders: tuple[Path, Path]) -> None:
    model = hf.add_kv_cache(hf.load_int8(str(folders[0])), argmax, max_length=64)
    plain = AutoModelForCausalLM.from_pretrained(folders[0])
    with torch.inference_mode():
        wanted = plain(PROMPT).logits
    assert (model(PROMPT) - wanted).abs().mean() < 0.1 * wanted.std()
    assert model.generate(PROMPT, 30).shape == (1, 30)


def test_a_prompt_in_pieces_and_a_longer_one_later(folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hf, "_CHUNK", 8)
    model = hf.gpt_fast(str(folders[0]), draft_model_name=str(folders[1]))
    plain = AutoModelForCausalLM.from_pretrained(folders[0])
    for length in (20, 90):
        prompt = torch.arange(length)[None] % 120
        assert torch.equal(model.generate(prompt, length + 20), by_transformers(plain, length + 20, prompt))


def test_no_position_is_read_that_the_model_does_not_have(folders: tuple[Path, Path]) -> None:
    model = hf.gpt_fast(str(folders[0]), max_length=1000)
    assert model.generate(PROMPT, 128).shape == (1, 128)
    with pytest.raises(ConfigError, match="at most 128, not 129"):
        model.generate(PROMPT, 129)


@pytest.mark.parametrize("draft", ["fewer positions", "max_length", "of transformers"])
def test_a_draft_model_of_a_shorter_context_guesses_up_to_its_end(
    draft: str, folders: tuple[Path, Path], tmp_path: Path
) -> None:
    short = gpt2(0, positions=32)
    short.save_pretrained(tmp_path)
    drafts = {
        "fewer positions": lambda: hf.gpt_fast(str(tmp_path)),
        "max_length": lambda: hf.gpt_fast(str(folders[0]), max_length=32),
        "of transformers": lambda: short,
    }
    model = hf.add_speculative_decode_kv_cache(hf.gpt_fast(str(folders[0])), drafts[draft]())
    found = model.generate(PROMPT, 90)
    assert torch.equal(found, by_transformers(AutoModelForCausalLM.from_pretrained(folders[0]), 90))
    assert 0 < model.num_guesses <= 4 * 25


@pytest.mark.parametrize(
    ("tokens", "arguments", "words"),
    [
        (torch.tensor([1, 2]), {"max_tokens": 9}, r"cur_tokens must have the shape \(1, seq_len\)"),
        (PROMPT.repeat(2, 1), {"max_tokens": 9}, "cur_tokens must have the shape"),
        (PROMPT + 100, {"max_tokens": 9}, "not between 0 and 119"),
        (PROMPT, {"max_tokens": 7}, "max_tokens must be more than the 7 tokens"),
        (PROMPT, {"max_tokens": 61}, "at most 60, not 61"),
        (PROMPT, {"max_tokens": 9, "speculate_k": -1}, "speculate_k must not be negative"),
    ],
)
def test_what_cannot_be_is_refused(
    tokens: Tensor, arguments: dict[str, Any], words: str, folders: tuple[Path, Path]
) -> None:
    model = hf.gpt_fast(str(folders[0]), max_length=60)
    with pytest.raises(ConfigError, match=words):
        model.generate(tokens, **arguments)


def test_models_and_functions_that_do_not_fit(folders: tuple[Path, Path]) -> None:
    model = hf.gpt_fast(str(folders[0]))
    for drawn in (None, torch.zeros(2), 5, torch.tensor(-1), torch.tensor(120)):
        model.sample_function = lambda probabilities, drawn=drawn: drawn
        with pytest.raises(ConfigError, match="sample_function must return one token id"):
            model.generate(PROMPT, 9)
    with pytest.raises(ConfigError, match="no causal model of transformers"):
        hf.add_kv_cache(nn.Linear(2, 2))
    with pytest.raises(ConfigError, match="stays as it was loaded"):
        model.to(torch.float16)
    mamba = MambaForCausalLM(MambaConfig(vocab_size=120, hidden_size=32, state_size=8, num_hidden_layers=2))
    with pytest.raises(ConfigError, match="keeps a state"):
        hf.add_speculative_decode_kv_cache(model, mamba)
    other = GPT2LMHeadModel(GPT2Config(vocab_size=60, n_embd=32, n_layer=1, n_head=4))
    with pytest.raises(ConfigError, match="the draft model has 60 tokens, and the model 120"):
        hf.add_speculative_decode_kv_cache(model, other)
