"""Quantized weights: int8, int4 (round to nearest, GPTQ) and fp8, applied from outside the model.

scheme.py says what is quantized and how it is stored, formats.py how checkpoints hold it, writer.py writes such ones.
"""
