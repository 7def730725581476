"""Speculation: guesses of the next tokens, which the model verifies several at a time.

No rule accepts or resamples drafts. A token is a function of the model's distribution and of noise
keyed by seed and position (sampling.py), so the step samples behind each draft as it would have sampled without drafts,
and keeps what agrees (compute.py). The answer is the plain one, token for token, whatever a drafter guesses.
The rules of acceptance that were published are in published.py, to compare; the engine does not use them.
"""
