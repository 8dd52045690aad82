"""The Megatron side: upstream's own MTP layer, computing what a Hugging Face head computes."""
