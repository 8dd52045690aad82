"""Megatron-Bridge 0.6.2: a model whose heads train isolated, and their weights for the rollouts.

Copy this file. See docs/integrations.md.
"""


def isolate_heads(provider, loss_scaling_factor=0.1):
    """Set up a provider's heads before it builds the model; returns the provider.

    Raises ValueError for a model without heads.
    """
    if not provider.mtp_num_layers:
        raise ValueError(
            "expected a model with MTP heads, but mtp_num_layers is "
            f"{provider.mtp_num_layers}: take a checkpoint that has them."
        )
    provider.mtp_isolated_loss = True
    provider.mtp_loss_scaling_factor = loss_scaling_factor
    return provider


def head_weights(bridge, model):
    """Yield (Hugging Face name, tensor) of the heads alone, on every rank, for vLLM or SGLang.

    ``bridge`` is the AutoBridge that made ``model``, the list of this rank's pipeline chunks.
    """
    tasks = [task for task in bridge.get_conversion_tasks(model) if task is not None]
    heads = [task for task in tasks if "mtp" in task.global_param_name.split(".")]
    yield from bridge.export_hf_weights(model, show_progress=False, conversion_tasks=heads)
