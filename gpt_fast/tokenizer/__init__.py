"""Text to token ids and back, over SentencePiece, tiktoken and Hugging Face tokenizers. It needs no torch."""

from gpt_fast.tokenizer.base import Tokenizer
from gpt_fast.tokenizer.detokenizer import IncrementalDetokenizer
from gpt_fast.tokenizer.loading import load_tokenizer

__all__ = ["IncrementalDetokenizer", "Tokenizer", "load_tokenizer"]
