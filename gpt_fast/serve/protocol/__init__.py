"""The wire: bytes of a request to something the engine understands, and its answers back to bytes.

body.py knows how TorchServe delivers a request, native.py what this project's own JSON says. No torch here.
"""
