"""OpenAI's API as pure translation: JSON in, jobs for the engine out, and their answers in OpenAI's words.

    context = OpenAIContext(models=("my-model",), max_model_len=llm.max_seq_len, tokenizer=llm.tokenizer, ...)
    job = parse_chat(body, context)          # POST v1/chat/completions
    job = parse_completion(body, context)    # POST v1/completions
    models_body(context)                     # GET v1/models
    model_body(name, context)                # GET v1/models/<name>

openai_fields.py        every field of a request: used, without effect, or refused by name
openai_chat.py, openai_completions.py    the two kinds of jobs
openai_common.py        what they share, and the context
chat_prompt.py          messages to token ids, safe against forged turns
"""

from gpt_fast.serve.protocol.openai_chat import ChatJob, parse_chat
from gpt_fast.serve.protocol.openai_common import OpenAIContext, OpenAIJob, model_body, models_body
from gpt_fast.serve.protocol.openai_completions import CompletionJob, parse_completion

__all__ = [
    "ChatJob",
    "CompletionJob",
    "OpenAIContext",
    "OpenAIJob",
    "model_body",
    "models_body",
    "parse_chat",
    "parse_completion",
]
