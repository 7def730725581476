"""Rows of dense families whose blocks are Llama's with other norms, scales, caps, windows or rotations."""

from __future__ import annotations

from gpt_fast.checkpoint.family import Family

ROWS: tuple[Family, ...] = ()
