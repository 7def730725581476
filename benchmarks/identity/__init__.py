"""Requests that mix every parameter, and what they are answered. The command: ../same_answers.py.

mixed.py      request I of seed S
serving.py    all requests through one engine: arrivals, pauses, cancellations
difference.py what two answers differ in, for people
"""
