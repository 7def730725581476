"""Text to token ids and back, over SentencePiece, tiktoken and Hugging Face tokenizers. It needs no torch.

tokenizer = load_tokenizer(checkpoint_directory)
ids = tokenizer.encode("The capital of France")
stream = IncrementalDetokenizer(tokenizer, ids)
for token in generated: print(stream.push(token), end="")
print(stream.flush())
"""

from gpt_fast.errors import TokenizerError, TokenizerMissing
from gpt_fast.tokenizer.base import Tokenizer
from gpt_fast.tokenizer.detokenizer import IncrementalDetokenizer
from gpt_fast.tokenizer.loading import load_tokenizer

__all__ = ["IncrementalDetokenizer", "Tokenizer", "TokenizerError", "TokenizerMissing", "load_tokenizer"]
