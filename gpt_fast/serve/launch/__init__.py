"""One TorchServe of this machine, for ``gpt-fast serve``: started, watched, asked and stopped."""
