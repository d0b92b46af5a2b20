"""The ResNet-18 trunk: the published sizes and names, frozen norms inside convolutions, cameras in one call."""

import pytest
import torch
import torch.nn.functional as F

from robotattn.tokens.resnet import MEAN, SCALE, ResNet18, TrunkTokens, grid


def lively(trunk, seed=0):
    """Give every frozen norm statistics and a map of its own."""
    g = torch.Generator().manual_seed(seed)
    for name, buffer in trunk.named_buffers():
        spread = torch.rand(buffer.shape, generator=g, dtype=buffer.dtype)
        buffer.copy_(0.5 + spread if name.endswith(("weight", "var")) else 0.4 * (spread - 0.5))
    return trunk


def reference(weights, x, head=""):
    """ResNet-18 written out from a public state dict: convolution, batch norm, ReLU, each on its own."""

    def block(name, x, stride):
        y = conv(f"{name}.conv1", f"{name}.bn1", x, stride, 1).relu()
        y = conv(f"{name}.conv2", f"{name}.bn2", y, 1, 1)
        down = f"{name}.downsample"
        return (y + (conv(f"{down}.0", f"{down}.1", x, stride, 0) if f"{head}{down}.0.weight" in weights else x)).relu()

    def conv(name, norm, x, stride, padding):
        y = F.conv2d(x, weights[f"{head}{name}.weight"], None, stride, padding)
        names = ("running_mean", "running_var", "weight", "bias")
        return F.batch_norm(y, *(weights[f"{head}{norm}.{part}"] for part in names), eps=1e-5)

    x = F.max_pool2d(conv("conv1", "bn1", x, 2, 3).relu(), 3, 2, 1)
    for stage in range(1, 5):
        for index in range(2):
            x = block(f"layer{stage}.{index}", x, 2 if stage > 1 and index == 0 else 1)
    return x


def test_it_has_the_published_number_of_parameters():
    trunk = ResNet18()
    affine = sum(b.numel() for name, b in trunk.named_buffers() if name.endswith(("weight", "bias")))
    assert sum(p.numel() for p in trunk.parameters()) + affine == 11_176_512  # 11 689 512 with a head for 1000 classes


@pytest.mark.parametrize("size", [(64, 64), (96, 32), (50, 70)])
def test_convolutions_with_norms_inside_equal_convolutions_and_norms(size):
    trunk = lively(ResNet18(8).double())
    x = torch.randn(2, 3, *size, dtype=torch.float64)
    expected = reference(trunk.state_dict(), x)
    torch.testing.assert_close(trunk(x), expected, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(trunk.folded(torch.float64)(x), expected, rtol=1e-10, atol=1e-10)
    assert expected.shape[2:] == grid(size)


def test_the_folded_trunk_in_float32_is_the_same_to_five_digits():
    trunk = lively(ResNet18())
    x = torch.randn(2, 3, 64, 96)
    with torch.no_grad():
        expected, folded = trunk(x), trunk.folded()
        torch.testing.assert_close(folded(x), expected, rtol=1e-5, atol=1e-5 * float(expected.std()))
    assert folded.conv1.weight.is_contiguous(memory_format=torch.channels_last)
    assert not list(folded.buffers()) and not any(p.requires_grad for p in folded.parameters())
    assert all(p.requires_grad for p in trunk.parameters())  # the original is left alone


def test_gradients_pass_through_the_frozen_norms():
    trunk = lively(ResNet18(4).double())
    x = torch.randn(1, 3, 32, 32, dtype=torch.float64)
    learned = dict(trunk.named_parameters())
    weights = {name: value.clone().requires_grad_(name in learned) for name, value in trunk.state_dict().items()}
    reference(weights, x).square().sum().backward()
    trunk(x).square().sum().backward()
    for name, parameter in trunk.named_parameters():
        torch.testing.assert_close(parameter.grad, weights[name].grad, rtol=1e-8, atol=1e-8)


def test_public_weights_load_without_their_head():
    trunk, other = lively(ResNet18()), ResNet18()
    public = {**trunk.state_dict(), "fc.weight": torch.zeros(1000, 512), "fc.bias": torch.zeros(1000)}
    public |= {f"{name}.num_batches_tracked": torch.tensor(0) for name in ("bn1", "layer4.1.bn2")}
    assert {"layer1.0.conv2.weight", "layer2.0.downsample.0.weight", "layer4.1.bn2.running_var"} <= set(public)
    other.load_public(public)
    assert all(torch.equal(value, trunk.state_dict()[name]) for name, value in other.state_dict().items())
    del public["layer3.1.conv1.weight"]
    with pytest.raises(RuntimeError, match=r"layer3\.1\.conv1\.weight"):
        other.load_public(public)


def test_cameras_of_one_size_share_a_call_and_get_what_they_would_get_alone():
    tokens = TrunkTokens({"a": (64, 96), "b": (32, 32), "c": (64, 96)}, 16, 4).eval()
    images = {name: torch.randint(0, 256, (2, *size, 3), dtype=torch.uint8) for name, size in tokens.cameras.items()}
    calls = []
    tokens.trunk.register_forward_hook(lambda module, args, out: calls.append(len(args[0])))
    together = tokens(images)
    assert calls == [4, 2] and list(together) == ["a", "b", "c"]
    assert {name: tuple(x.shape) for name, x in together.items()} == {"a": (2, 6, 16), "b": (2, 1, 16), "c": (2, 6, 16)}
    for name, size in tokens.cameras.items():
        alone = TrunkTokens({name: size}, 16, 4).eval()
        alone.load_state_dict(tokens.state_dict())
        torch.testing.assert_close(alone(images)[name], together[name], rtol=1e-5, atol=1e-5)


def test_pixels_have_the_mean_and_scale_that_public_weights_expect_and_jitter_only_in_training():
    tokens = TrunkTokens({"a": (32, 32)}, 8, 4, jitter=0.5)
    seen = []
    tokens.trunk.register_forward_hook(lambda module, args, out: seen.append(args[0]))
    images = {"a": torch.tensor([0, 255], dtype=torch.uint8)[:, None, None, None].expand(2, 32, 32, 3)}
    tokens.eval()(images)
    mean, scale = torch.tensor(MEAN), torch.tensor(SCALE)
    torch.testing.assert_close(seen[0][:, :, 0, 0], torch.stack([-mean / scale, (1.0 - mean) / scale]))
    tokens.train()(images)
    assert (seen[1] - seen[0]).abs().amax(dim=(1, 2, 3)).min() > 1e-3


def test_a_missing_or_foreign_image_is_refused_by_name():
    tokens = TrunkTokens({"front": (64, 64)}, 8, 4)
    with pytest.raises(ValueError, match="camera 'front' is missing"):
        tokens({})
    with pytest.raises(ValueError, match=r"expected uint8 \[B, 64, 64, 3\]"):
        tokens({"front": torch.zeros(1, 64, 64, 3)})
