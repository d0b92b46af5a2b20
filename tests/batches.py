"""Batches made up in a moment, in the form that training windows have: for tests of policies without a data set."""

import torch

from robotattn.tokens.normaliser import Moments, Statistics
from robotattn.types import ACTION_SIZE

RGB = torch.tensor([[220, 20, 20], [20, 200, 20], [20, 20, 220], [220, 220, 0], [150, 0, 150], [255, 140, 0]]).byte()


def batch(config, size=3, seed=0):
    """Make a batch for a policy's config: 2 to 4 cubes, seen from above by every camera, the end of row 0 padded.

    With frames, the cubes slide, one tick of about 0.1 s after the other; row 0 is at the start of its episode.
    """
    now = _now(config, size, seed)
    return now if config.frames == 1 else _with_past(now, config, seed)


def _with_past(now, config, seed):
    g = torch.Generator().manual_seed(seed + 1)
    size, frames = len(now["state"]), config.frames
    ages = torch.arange(frames - 1, -1, -1) * (0.09 + 0.02 * torch.rand(size, 1, generator=g))
    ages[0] = 0.0
    velocity = torch.randn(size, 1, 6, 4, generator=g) * torch.tensor([0.1, 0.1, 0.0, 0.0])  # (m/s)
    position = now["labels"]["position"][:, None] - velocity * ages[..., None, None]
    position = position * now["labels"]["present"][:, None, :, None]
    colour = now["objects"][..., 4:].argmax(dim=-1)
    present = now["labels"]["present"]
    pixel = (position[..., [1, 0]] - torch.tensor([-0.2, 0.4])) / torch.tensor([0.4, 0.2])
    pictures = {
        name: [
            _picture(pixel[:, f], colour, present, *shape, torch.Generator().manual_seed(seed)) for f in range(frames)
        ]
        for name, shape in config.cameras.items()
    }
    every = now["objects"][:, None, :, 4:].expand(-1, frames, -1, -1)
    rate = torch.randn(size, 1, 13, generator=g) * 0.3
    labels = now["labels"] | {
        "position": position,
        "pixel": {name: pixel.clone() for name in config.cameras},
        "visible": {name: seen[:, None].repeat(1, frames, 1) for name, seen in now["labels"]["visible"].items()},
    }
    return now | {
        "images": {name: torch.stack(images, dim=1) for name, images in pictures.items()},
        "objects": torch.cat([position, every], dim=-1),
        "objects_mask": present[:, None].repeat(1, frames, 1),
        "history": now["state"][:, None] - rate * ages[:, :-1, None],
        "ages": ages,
        "labels": labels,
    }


def _now(config, size, seed):
    g = torch.Generator().manual_seed(seed)
    slots = torch.arange(6).expand(size, 6)
    present = slots < torch.randint(2, 5, (size, 1), generator=g)
    position = torch.rand(size, 6, 4, generator=g) * torch.tensor([0.2, 0.4, 0.01, 1.0]) + torch.tensor(
        [0.4, -0.2, 0.02, -0.5]
    )
    colour = torch.rand(size, 6, generator=g).argsort(dim=1)
    sentences = torch.stack([torch.full((6,), 9), torch.arange(6), torch.full((6,), 8), torch.zeros(6)], dim=1).long()
    lengths = torch.tensor([3, 2, 3, 2, 3, 2])
    names = torch.where(present, colour, 0)
    target = torch.randint(0, 2, (size,), generator=g)
    text = names[torch.arange(size), target]
    masks = torch.arange(4) < lengths[:, None]
    pixel = (position[..., [1, 0]] - torch.tensor([-0.2, 0.4])) / torch.tensor([0.4, 0.2])  # right = y, down = x
    actions = torch.randn(size, config.chunk, ACTION_SIZE[config.action_mode], generator=g) * 0.05
    actions[..., -1] = (actions[..., -1] > 0).float()
    actions_mask = torch.ones(size, config.chunk, dtype=torch.bool)
    actions_mask[0, -1:] = False
    visible = {name: present & (torch.rand(size, 6, generator=g) < 0.8) for name in config.cameras}
    for seen in visible.values():
        seen[torch.arange(size), target] = True
    return {
        "state": torch.randn(size, 13, generator=g) * 0.3,
        "text": sentences[text],
        "text_mask": masks[text],
        "images": {
            name: _picture(pixel, colour, present, *shape, generator=g) for name, shape in config.cameras.items()
        },
        "objects": torch.cat([position, torch.eye(6)[colour]], dim=-1) * present[..., None],
        "objects_mask": present,
        "actions": actions,
        "actions_mask": actions_mask,
        "labels": {
            "target": target,
            "position": position * present[..., None],
            "present": present,
            "pixel": {name: pixel.clone() for name in config.cameras},
            "visible": visible,
            "names": names,
            "sentences": sentences,
            "sentences_mask": masks,
        },
    }


def _picture(pixel, colour, present, height, width, generator):
    image = torch.randint(90, 110, (len(pixel), height, width, 3), generator=generator, dtype=torch.uint8)
    rows, columns = torch.arange(height)[:, None] + 0.5, torch.arange(width) + 0.5
    for slot in range(6):
        u, v = (pixel[:, slot, i, None, None] * size for i, size in enumerate((width, height)))
        inside = ((rows - v).abs() < 2.5) & ((columns - u).abs() < 2.5) & present[:, slot, None, None]
        image = torch.where(inside[..., None], RGB[colour[:, slot]][:, None, None], image)
    return image


def statistics(action_mode="tool"):
    """Return statistics of about the right size for `batch`."""
    actions = ACTION_SIZE[action_mode]
    return Statistics(
        {
            "state": _moments([0.0] * 13, [0.3] * 13),
            "action": _moments([0.01] * actions, [0.05 if action_mode == "tool" else 0.3] * actions),
            "position": _moments([0.5, 0.0, 0.02, 0.0], [0.06, 0.12, 0.01, 0.3]),
        }
    )


def rows(batch, chosen):
    """Choose rows of a batch; the sentences of its labels are shared by all rows."""
    return {key: _rows(key, value, chosen) for key, value in batch.items()}


def _rows(key, value, chosen):
    if isinstance(value, dict):
        return rows(value, chosen)
    return value if key.startswith("sentences") else value[chosen]


def _moments(mean, scale):
    return Moments(tuple(f"d{i}" for i in range(len(mean))), tuple(mean), tuple(scale), 0.01)
