"""The wire: bytes of a request to what the engine understands, and the engine's answers back to bytes. No torch."""
