"""A model's own MTP head between Hugging Face checkpoints and Megatron."""
