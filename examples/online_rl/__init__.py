"""Online RL of a small GPT with MTP heads that are trained with the policy. See README.md."""
