"""The families of which a tiny checkpoint can be made."""

from __future__ import annotations

from tools.tiny_checkpoint.deepseek_v3 import DEEPSEEK_V3
from tools.tiny_checkpoint.family import TinyFamily
from tools.tiny_checkpoint.mimo import MIMO
from tools.tiny_checkpoint.qwen3_5 import QWEN3_5, QWEN3_5_MOE

FAMILIES: dict[str, TinyFamily] = {
    "qwen3_5_moe": QWEN3_5_MOE,
    "qwen3_5": QWEN3_5,
    "deepseek_v3": DEEPSEEK_V3,
    "mimo": MIMO,
}
