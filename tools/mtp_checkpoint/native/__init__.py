"""The Megatron side: upstream's own MTP layer, built to compute what a Hugging Face head computes."""
