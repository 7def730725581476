"""Text to token ids and back: one protocol over SentencePiece, tiktoken and Hugging Face tokenizers.

    tokenizer = load_tokenizer(checkpoint_directory)
    ids = tokenizer.encode("The capital of France")
    stream = IncrementalDetokenizer(tokenizer, ids)
    for token in generated: print(stream.push(token), end="")
    print(stream.flush())

protocol.py          the protocol, and what the back-ends share: a table of bytes per token id
settings.py          what the JSON files beside a vocabulary say: special tokens, BOS, flags
sentencepiece_model.py, tiktoken_ranks.py, hf_json.py    the back-ends; each imports its library when it is used
loading.py           which files make a tokenizer, told apart by their content
detokenizer.py       token by token to text, never half a character
chat.py              a checkpoint's chat template: messages to text
chat_prompt.py       messages to token ids through that template, safe against forged turns

It needs no torch.
"""

from gpt_fast.errors import TokenizerError, TokenizerMissing
from gpt_fast.tokenizer.detokenizer import IncrementalDetokenizer
from gpt_fast.tokenizer.loading import load_tokenizer
from gpt_fast.tokenizer.protocol import BaseTokenizer, Tokenizer

__all__ = [
    "BaseTokenizer",
    "IncrementalDetokenizer",
    "Tokenizer",
    "TokenizerError",
    "TokenizerMissing",
    "load_tokenizer",
]
