"""Policies. `PolicyConfig` is the list of them: a new policy is one file, and one name in this union."""

from robotattn.policies.act import ACT, ACTConfig
from robotattn.policies.act_resnet import ACTResNet, ACTResNetConfig
from robotattn.policies.autoregressive import Autoregressive, AutoregressiveConfig
from robotattn.policies.base import Batch, Memory, Policy
from robotattn.policies.blockwise import Blockwise, BlockwiseConfig

PolicyConfig = ACTConfig | ACTResNetConfig | AutoregressiveConfig | BlockwiseConfig


def build(config: PolicyConfig) -> Policy:
    """Return the freshly initialised policy that a config describes."""
    return config.build()


__all__ = [
    "ACT",
    "ACTConfig",
    "ACTResNet",
    "ACTResNetConfig",
    "Autoregressive",
    "AutoregressiveConfig",
    "Batch",
    "Blockwise",
    "BlockwiseConfig",
    "Memory",
    "Policy",
    "PolicyConfig",
    "build",
]
