"""Rollout engines whose draft steps are known; apart from the rest: imports nothing."""

ENGINES = ("vllm", "sglang")
