"""The wire: bytes of a request to what the engine understands, and the engine's answers back to bytes. No torch.

body.py                what TorchServe delivers, to one JSON object
request.py             what the protocols share: a request that is understood, and the reading of its fields
native.py              this project's own JSON
openai_fields.py       every field of OpenAI's requests: used, without effect, or refused by name
openai_common.py       what OpenAI's two ways to generate share: the server's facts, ids, usage, events, models
openai_chat.py, openai_completions.py    POST v1/chat/completions and POST v1/completions
"""
