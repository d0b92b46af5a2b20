"""Every shipped configuration loads, builds its policy, is short, and survives writing."""

from pathlib import Path

import pytest

from robotattn.config import dumps, load, loads
from robotattn.policies import build
from robotattn.tokens.text import default_tokenizer
from robotattn.train import TrainConfig

FOLDER = Path(__file__).resolve().parents[1] / "configs"
FILES = sorted(FOLDER.glob("*.yaml"))


def test_there_are_configurations():
    assert {"act_pixels", "act_pixels_quick", "act_plain", "act_state"} <= {path.stem for path in FILES}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_configuration_loads_and_builds(path):
    config = load(path, TrainConfig)
    assert loads(dumps(config), TrainConfig) == config
    assert sum(parameter.numel() for parameter in build(config.policy).parameters()) > 10_000
    assert config.policy.vocabulary >= default_tokenizer().size
    assert config.out == Path("runs") / path.stem


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_configuration_is_short_and_starts_with_what_it_is(path):
    lines = path.read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 25
    assert lines[0].startswith("# ")
