"""The peers by name: which formats stand beside which of ours, where the worker is, what installs it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

OURS = "ours"
LLAMA_CPP = "llama.cpp"  # whose interpreter also quantizes GGUF files
PRECISIONS = ("bf16", "int8", "int4")


@dataclass(frozen=True)
class Peer:
    """``formats``: by precision, each measured on its own. ``module``: run as ``python -m``; see worker.py.

    ``checkout``: a file that shows that the folder of --checkout is what this peer needs; "" where it needs none.
    """

    name: str
    module: str
    formats: Mapping[str, tuple[str, ...]]
    install: str  # what to do when it cannot be imported
    batches: bool = True  # several sequences together
    prefill: bool = True
    contexts: bool = True  # decoding after long prompts
    wants: str = "checkpoint"  # checkpoint | gguf | openvino
    checkout: str = ""
    copies: int = 1  # of the weights that a worker may hold

    def num_bytes(self, format: str, checkpoint_bytes: int) -> int:
        """About what the weights take in memory, to see beforehand whether they fit."""
        share = {"float32": 2.0, "int8": 0.55, "Q8_0": 0.55, "int4": 0.35, "Q4_0": 0.35}.get(format, 1.0)
        return int(self.copies * share * checkpoint_bytes)


REGISTRY: dict[str, Peer] = {
    peer.name: peer
    for peer in (
        Peer(
            OURS,
            "peers.ours",
            {"bf16": ("bfloat16",), "int8": ("int8",), "int4": ("int4",)},
            "pip install -e . in the repository",
        ),
        Peer(
            LLAMA_CPP,
            "peers.llamacpp",
            {"bf16": ("BF16",), "int8": ("Q8_0",), "int4": ("Q4_0",)},
            "CMAKE_ARGS=-DGGML_NATIVE=ON pip install --no-binary llama-cpp-python llama-cpp-python",
            wants="gguf",
        ),
        Peer(
            "ik_llama.cpp",
            "peers.ikllama",
            {"bf16": ("BF16",), "int8": ("Q8_0",), "int4": ("Q4_0",)},
            "git clone https://github.com/ikawrakow/ik_llama.cpp, then in it: cmake -B build -DGGML_NATIVE=ON "
            "-DBUILD_SHARED_LIBS=ON && cmake --build build --target llama",
            wants="gguf",
            checkout="build/src/libllama.so",
            copies=2,  # as in the file and repacked
        ),
        Peer(
            "openvino",
            "peers.openvino",
            {"bf16": ("bfloat16",), "int8": ("int8",), "int4": ("int4",)},
            "pip install openvino optimum-intel nncf, in a separate environment (--python openvino=FILE)",
            wants="openvino",
        ),
        Peer(
            "transformers",
            "peers.eager",
            {"bf16": ("bfloat16", "float32")},
            "pip install transformers torch",
            contexts=False,  # a long prompt takes it minutes
        ),
        Peer(
            "gpt-fast",
            "peers.gptfast",
            {"bf16": ("bfloat16",), "int8": ("int8",)},
            "git clone https://github.com/meta-pytorch/gpt-fast, pip install torch sentencepiece tiktoken",
            batches=False,  # another batch size or cache length is another compilation
            prefill=False,
            contexts=False,
            checkout="generate.py",
        ),
    )
}


def choose(names: Sequence[str]) -> list[Peer]:
    """Ours first, then the peers of these names. Raises ValueError naming one that is not known."""
    for name in names:
        if name not in REGISTRY:
            raise ValueError(f"peer {name!r} is not known; known: {', '.join(n for n in REGISTRY if n != OURS)}")
    return [REGISTRY[name] for name in dict.fromkeys((OURS, *names))]
