"""Tiny but complete Hugging Face checkpoints with an MTP head, for tests and examples.

Everything is made on the spot: configuration, random weights, a tokenizer trained on the manual
that ships with Python, and the head's ``mtp.*`` tensors spread over two shards. See `make`.
"""

from tools.tiny_checkpoint.making import make

__all__ = ["make"]
