"""Fine-tune a model's own Multi-Token-Prediction head on conversations, the model frozen.

See README.md in this folder; `python -m examples.finetune_mtp_head --help` lists the options.
"""
