"""scripts/train_demo.py: a corpus to be trusted, and files that Hugging Face reads as the model that was trained."""

from __future__ import annotations

import importlib.util
import json
import random
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import sentencepiece
import torch

SCRIPT = Path(__file__).parent.parent / "scripts" / "train_demo.py"
NAMES = ("Lily", "Tom", "Ben", "Anna", "Max", "Sue")
THINGS = ("ball", "kite", "cat", "boat", "drum", "hat", "cake", "tree", "bug", "star")
DEEDS = ("found", "lost", "got", "saw", "hid", "made")


@pytest.fixture(scope="module")
def demo() -> ModuleType:
    spec = importlib.util.spec_from_file_location("train_demo", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["train_demo"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def make_story(rng: random.Random) -> str:
    """A story of made-up events whose 8-word runs hardly ever occur in another one."""
    name = rng.choice(NAMES)
    things, deeds = rng.choices(THINGS, k=12), rng.choices(DEEDS, k=12)
    events = [
        f"{rng.choice(NAMES)} {deeds[i]} a {things[i]} and {deeds[i + 1]} the {things[i + 1]}." for i in range(0, 12, 2)
    ]
    said = f'"Look at my {rng.choice(THINGS)}!" said {rng.choice(NAMES)}.'
    return "\n".join((f"Once upon a time, there was {name}. {events[0]}", " ".join(events[1:]), said))


@pytest.fixture
def stories() -> list[str]:
    rng = random.Random(0)
    return [make_story(rng) for _ in range(300)]


def write(path: Path, stories: list[str], glue: str = "\n<|endoftext|>\n") -> Path:
    path.write_text(glue.join(stories), encoding="utf-8")
    return path


def test_stories_are_split_at_separators_or_else_at_their_openings(demo: ModuleType, stories: list[str]) -> None:
    spaced = [story.replace("\n", "\n\n") for story in stories]  # paragraphs as TinyStories has them
    for text in ("<|endoftext|>".join(stories), "\n\n".join(spaced), "\n".join(spaced)):
        assert [demo.normalise(story) for story in demo.split_stories(text)] == stories


def test_normalise_straightens_quotes_also_broken_ones(demo: ModuleType) -> None:
    assert demo.normalise("“It’s…” â€œsheâ€™sâ€ \n\n\n a — b ") == '"It\'s..." "she\'s"\na - b'


def test_each_story_is_kept_once_and_the_cased_copy_wins(demo: ModuleType, stories: list[str], tmp_path: Path) -> None:
    lower = write(tmp_path / "a_lower.txt", [story.lower() for story in stories])
    cased = write(tmp_path / "b_cased.txt", [*stories, *stories[5:50]])
    corpus = demo.read_corpus([lower, cased])
    kept = corpus.train + corpus.heldout
    assert len(kept) == len(set(kept))
    assert set(stories[1:-1]) <= set(kept)  # the first and last of a file may be cut, so they are not used
    assert corpus.num_duplicates >= len(stories) - 2
    assert corpus.num_recased <= 2  # what only the lower-cased file had whole


def test_lower_cased_stories_get_their_capitals_back(demo: ModuleType, stories: list[str], tmp_path: Path) -> None:
    cased = write(tmp_path / "cased.txt", stories[:200])
    lower = write(tmp_path / "lower.txt", [story.lower() for story in stories[200:]])
    corpus = demo.read_corpus([cased, lower])
    assert corpus.num_recased == 98
    assert corpus.train[-98:] == stories[201:-1]


def test_held_out_stories_are_fixed_and_apart_from_training(
    demo: ModuleType, stories: list[str], tmp_path: Path
) -> None:
    corpus = demo.read_corpus([write(tmp_path / "all.txt", stories)])
    assert 0 < len(corpus.heldout) < 30  # 3 % of 298
    assert not set(corpus.train) & set(corpus.heldout)
    fewer = demo.read_corpus([write(tmp_path / "fewer.txt", [stories[0], *reversed(stories[100:])])])
    assert set(fewer.heldout) <= set(corpus.heldout)  # decided by the story, not by its neighbours

    out = tmp_path / "heldout.txt"
    demo.main(["--text", str(tmp_path / "all.txt"), "--write-heldout", str(out)])
    assert [s.strip() for s in out.read_text(encoding="utf-8").split("<|endoftext|>")[:-1]] == corpus.heldout


def cut_after_eos(row: list[int]) -> list[list[int]]:
    ends = [i + 1 for i, token in enumerate(row) if token == 2]
    return [row[begin:end] for begin, end in zip([0, *ends], [*ends, len(row)], strict=True) if begin < end]


def test_packing_keeps_every_story_whole_and_shuffles_by_seed(demo: ModuleType) -> None:
    rng = random.Random(0)
    tokens = [[1, *(rng.randrange(3, 100) for _ in range(rng.randrange(2, 20))), 2] for _ in range(100)]
    rows = list(demo.pack(tokens, 32))
    assert all(len(row) <= 32 and row[0] == 1 for row in rows)
    whole = [story for row in rows for story in cut_after_eos(row)]
    assert sorted(whole) == sorted(tokens)

    def first(seed: int) -> torch.Tensor:
        return next(demo.batches(tokens, 4, 33, seed))[0]

    assert torch.equal(first(1), first(1))
    assert not torch.equal(first(1), first(2))


def test_targets_are_the_next_tokens_and_padding_has_no_loss(demo: ModuleType) -> None:
    tokens, targets = demo.to_tensors([[1, 5, 6, 2], [1, 7]], 4)
    assert tokens.tolist() == [[1, 5, 6], [1, 7, 2]]
    assert targets.tolist() == [[5, 6, 2], [7, -100, -100]]


@pytest.fixture(scope="module")
def trained(demo: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A microscopic pair, trained for seconds by the script's own main."""
    folder = tmp_path_factory.mktemp("demo")
    rng = random.Random(1)
    text = write(folder / "text.txt", [make_story(rng) for _ in range(300)])
    folders = ["--out", str(folder / "out"), "--state-dir", str(folder / "state")]
    steps = ["--target-steps", "30", "--draft-steps", "12"]
    target, draft = microscopic(demo)
    demo.main(["--text", str(text), *folders, *steps, "--no-compile"], target, draft, vocab_size=420)
    return folder


def microscopic(demo: ModuleType) -> tuple[object, object]:
    config = replace(demo.shape(32, 2, 4, 2, 8, 64), vocab_size=420)
    target = replace(demo.TARGET, config=config, batch_rows=2, eval_every=10)
    return target, replace(demo.DRAFT, config=replace(config, num_layers=1, head_dim=16), batch_rows=2, eval_every=10)


@pytest.mark.parametrize("name", ["target", "draft"])
def test_transformers_computes_the_same_logits(demo: ModuleType, trained: Path, name: str) -> None:
    transformers = pytest.importorskip("transformers")
    folder = trained / "out" / name
    recipe = dict(zip(("target", "draft"), microscopic(demo), strict=True))[name]
    best = torch.load(trained / "state" / f"{name}.pt", weights_only=True)["best"]
    ours = demo.build(recipe.config, seed=9)
    ours.load_state_dict({key: weight.bfloat16().float() for key, weight in best.items()})
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokens = torch.randint(3, 420, (2, 40), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(ours(tokens), theirs(tokens).logits, rtol=1e-4, atol=1e-4)
    assert theirs.generation_config.eos_token_id == 2
    assert transformers.AutoConfig.from_pretrained(folder).dtype == torch.bfloat16


def test_transformers_tokenizes_as_sentencepiece_does(trained: Path) -> None:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("google.protobuf", reason="transformers reads tokenizer.model through protobuf")
    folder = trained / "out" / "target"
    own = sentencepiece.SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    for text in ("Once upon a time, there was Lily.\nTom saw 12 hats.", 'He said "Oh!"\n\nÉté 日本'):
        assert theirs(text).input_ids == [1, *own.encode(text)]


def test_the_tokenizer_is_shaped_as_llamas(trained: Path) -> None:
    files = [trained / "out" / name / "tokenizer.model" for name in ("target", "draft")]
    assert files[0].read_bytes() == files[1].read_bytes()
    own = sentencepiece.SentencePieceProcessor(model_file=str(files[0]))
    assert (own.vocab_size(), own.unk_id(), own.bos_id(), own.eos_id(), own.pad_id()) == (420, 0, 1, 2, -1)
    assert own.decode(own.encode("日本  7\n")) == "日本  7\n"  # by bytes, no normalisation
    assert own.encode_as_pieces("12")[-2:] == ["1", "2"]
    assert [own.id_to_piece(i) for i in (3, 258)] == ["<0x00>", "<0xFF>"]


def test_training_lowers_the_held_out_loss_and_the_card_tells(demo: ModuleType, trained: Path) -> None:
    state = torch.load(trained / "state" / "target.pt", weights_only=True)
    steps, losses = zip(*state["progress"]["history"], strict=True)
    assert steps == (10, 20, 30)
    assert losses[-1] < losses[0] < 6.5  # log(420) = 6.04 before training
    card = (trained / "out" / "README.md").read_text(encoding="utf-8")
    for part in ("CDLA-Sharing-1.0", "--target-steps 30", "| target |", "| draft |", "temperature 0.8, seed 0"):
        assert part in card
    config = json.loads((trained / "out" / "draft" / "config.json").read_text())
    assert config["head_dim"] == 16
    assert config["tie_word_embeddings"] is True


def test_muon_treats_fused_matrices_one_by_one(demo: ModuleType) -> None:
    torch.manual_seed(0)
    gradient = torch.randn(24, 8) @ torch.diag(torch.logspace(0, -1, 8))
    for part in (gradient, gradient.T):
        values = torch.linalg.svdvals(demo.orthogonal(part))
        scale = 3**0.5 if part.shape == (24, 8) else 1.0
        assert ((values / scale > 0.6) & (values / scale < 1.3)).all()  # "about 1", whatever they were

    def update(sections: list[int] | None, gradient: torch.Tensor) -> torch.Tensor:
        weight = torch.nn.Parameter(torch.zeros_like(gradient))
        weight.grad = gradient
        demo.Muon([{"params": [weight], "sections": sections}], lr=1.0, weight_decay=0.0).step()
        return weight.detach()

    apart = torch.cat([update(None, part) for part in gradient.split([16, 8])])
    torch.testing.assert_close(update([16, 8], gradient), apart)
    assert not torch.allclose(update(None, gradient), apart, atol=1e-2)


def test_a_run_may_be_shortened_until_its_decay_begins(demo: ModuleType, tmp_path: Path) -> None:
    long, short = (replace(demo.TARGET, num_steps=n, warmup=10, decay=0.5) for n in (200, 100))
    assert [demo.rate(long, step) for step in range(50)] == [demo.rate(short, step) for step in range(50)]
    assert demo.rate(short, 99) == pytest.approx(1 / 50)  # the last step's; zero after it
    state = {"recipe": repr(replace(long, num_steps=0)), "num_steps": 200, "progress": {"step": 50}}
    demo.check_same(short, state, tmp_path)
    demo.check_same(long, {**state, "progress": {"step": 150}}, tmp_path)
    with pytest.raises(SystemExit, match="another recipe"):
        demo.check_same(short, {**state, "progress": {"step": 51}}, tmp_path)
    with pytest.raises(SystemExit, match="another recipe"):
        demo.check_same(replace(short, muon_lr=1.0), state, tmp_path)


def test_a_resumed_run_ends_where_an_uninterrupted_one_does(
    demo: ModuleType, stories: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer_model = demo.train_tokenizer(stories, 420)
    tokenizer = sentencepiece.SentencePieceProcessor(model_proto=tokenizer_model)
    tokens = demo.encode(tokenizer, stories)
    recipe = replace(microscopic(demo)[0], num_steps=6, eval_every=3)

    def setting(folder: str, **changes: bool) -> object:
        return demo.Setting(tokenizer, tokens[20:], tokens[:20], tmp_path / folder, compile=False, **changes)

    whole, _ = demo.train(recipe, setting("whole"))

    real, calls = demo.evaluate, []

    def interrupt(*args: object) -> float:
        calls.append(args)
        if len(calls) == 2:  # the state of step 3 is saved, that of step 6 is not
            raise KeyboardInterrupt
        result: float = real(*args)
        return result

    monkeypatch.setattr(demo, "evaluate", interrupt)
    with pytest.raises(KeyboardInterrupt):
        demo.train(recipe, setting("cut"))
    monkeypatch.setattr(demo, "evaluate", real)
    resumed, progress = demo.train(recipe, setting("cut", resume=True))
    assert [step for step, _ in progress.history] == [3, 6]
    for a, b in zip(whole.parameters(), resumed.parameters(), strict=True):
        torch.testing.assert_close(a, b)
