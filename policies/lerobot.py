"""Weights of LeRobot's ACT policy (0.4) → `ACTResNet`: the same function of the same normalised inputs.

Its names, after ``model.``: ``backbone`` (ResNet-18 with frozen norms), ``encoder_img_feat_input_proj`` (a 1 x 1
convolution), ``encoder_latent_input_proj``, ``encoder_robot_state_input_proj``, ``encoder_1d_feature_pos_embed`` (rows:
latent, state), ``encoder``, ``decoder``, ``decoder_pos_embed`` (the queries), ``action_head``, and ``vae_encoder…``.
Query, key and value are one matrix there. Its key biases are dropped: a softmax does not see them.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from robotattn.policies.act_resnet import ACTResNet

PLAIN = {  # ours: theirs
    "images.project.weight": "encoder_img_feat_input_proj.weight",
    "images.project.bias": "encoder_img_feat_input_proj.bias",
    "state.weight": "encoder_robot_state_input_proj.weight",
    "state.bias": "encoder_robot_state_input_proj.bias",
    "style_token.weight": "encoder_latent_input_proj.weight",
    "style_token.bias": "encoder_latent_input_proj.bias",
    "places": "encoder_1d_feature_pos_embed.weight",
    "norm.weight": "decoder.norm.weight",
    "norm.bias": "decoder.norm.bias",
    "queries": "decoder_pos_embed.weight",
    "head.weight": "action_head.weight",
    "head.bias": "action_head.bias",
    "style.summary": "vae_encoder_cls_embed.weight",
    "style.state.weight": "vae_encoder_robot_state_input_proj.weight",
    "style.state.bias": "vae_encoder_robot_state_input_proj.bias",
    "style.action.weight": "vae_encoder_action_input_proj.weight",
    "style.action.bias": "vae_encoder_action_input_proj.bias",
    "style.head.weight": "vae_encoder_latent_output_proj.weight",
    "style.head.bias": "vae_encoder_latent_output_proj.bias",
}
STACKS = {"encoder": "encoder", "decoder": "decoder", "style.encoder": "vae_encoder"}
ATTENTIONS = {"attention": "self_attn", "cross": "multihead_attn"}
IGNORED = ("normalize_", "unnormalize_", "vae_encoder_pos_enc")  # statistics of older releases, and a constant table


def load_lerobot(policy: ACTResNet, weights: Mapping[str, Tensor]) -> None:
    """Copy the weights of a LeRobot ACT policy, made for the same sizes, into `policy`.

    Statistics are not among them: normalise the inputs as they were for that policy. Raises ValueError naming the
    weights that are missing, left over, or of another shape.
    """
    theirs = {name.removeprefix("model."): value for name, value in weights.items()}
    theirs = {name: value for name, value in theirs.items() if not name.startswith(IGNORED)}
    state = policy.state_dict()
    sources = {name: _source(name) for name in state}
    found: dict[str, Tensor] = {}
    for name, current in state.items():
        source, part = sources[name]
        if source not in theirs:
            raise ValueError(f"lerobot weights: {source} is missing (for {name}); there are {len(theirs)} others")
        value = theirs[source] if part is None else theirs[source].chunk(3)[part]
        if value.numel() != current.numel() or (value.shape[:1] != current.shape[:1] and name != "style.summary"):
            raise ValueError(f"lerobot weights: {source} has shape {list(value.shape)}, needed {list(current.shape)}")
        found[name] = value.reshape(current.shape)
    if left := set(theirs) - {source for source, _ in sources.values()}:
        raise ValueError(f"lerobot weights: nothing here takes {sorted(left)[:5]} ({len(left)} in all)")
    with torch.no_grad():
        policy.load_state_dict(found)


def _source(name: str) -> tuple[str, int | None]:
    """Return LeRobot's name of a weight, and which third of it is meant (None: all of it)."""
    if name in PLAIN:
        return PLAIN[name], None
    if name.startswith("images.trunk."):
        return name.replace("images.trunk", "backbone", 1), None
    for ours, theirs in STACKS.items():
        if name.startswith(f"{ours}."):
            index, rest = name.removeprefix(f"{ours}.").split(".", 1)
            inner, part = _inside_layer(rest, cross=ours == "decoder")
            return f"{theirs}.layers.{index}.{inner}", part
    raise ValueError(f"lerobot weights: a policy with {name} has no counterpart there; see ACTResNetConfig.instruction")


def _inside_layer(name: str, cross: bool) -> tuple[str, int | None]:
    module, _, rest = name.partition(".")
    if module in ATTENTIONS:
        projection, kind = rest.split(".")
        if projection == "out":
            return f"{ATTENTIONS[module]}.out_proj.{kind}", None
        return f"{ATTENTIONS[module]}.in_proj_{kind}", ("query", "key", "value").index(projection)
    if module == "feedforward":
        return f"linear{1 if rest.startswith('0.') else 2}.{rest.partition('.')[2]}", None
    norms = ["attention_norm", "cross_norm", "feedforward_norm"] if cross else ["attention_norm", "feedforward_norm"]
    return f"norm{norms.index(module) + 1}.{rest}", None
