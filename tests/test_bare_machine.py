"""A machine with torch, numpy and PyYAML alone: words are read strictly, and a profile runs to its end."""

import json
import subprocess
import sys

import pytest

from robotattn.config import UsageError
from robotattn.latency import __main__ as bare
from robotattn.latency import trace
from robotattn.latency.profile import ProfileConfig

CONFIG = """
policy:
  act:
    cameras: {front: [32, 48], wrist: [32, 32]}
    width: 32
    feedforward: 32
    text_width: 16
    stem_channels: 8
    chunk: 5
"""


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "small.yaml"
    path.write_text(CONFIG)
    return path


def test_words_of_a_bare_machine_are_read_as_strictly_as_a_file():
    read = bare.read(ProfileConfig, ["config=a.yaml", "hz=50", "mode=eager,bf16", "--instruction-tokens=7"])
    assert (read.hz, read.mode, read.instruction_tokens) == (50.0, ("eager", "bf16"), 7)
    assert bare.read(ProfileConfig, ["config=a.yaml", "mode=[graph]"]).mode == ("graph",)
    for words, why in (
        (["hz"], "hz: expected KEY=VALUE"),
        (["config=a", "herz=5"], "herz"),
        (["config=a", "hz=x"], "hz"),
    ):
        with pytest.raises(UsageError, match=why):
            bare.read(ProfileConfig, words)


BLOCKED = (
    "tyro", "rich", "scipy", "tokenizers", "safetensors", "matplotlib", "mujoco", "gymnasium", "cv2", "h5py", "OpenGL",
    "accelerate", "jinja2", "jaxtyping",
)  # fmt: skip


def test_a_machine_with_torch_numpy_and_yaml_alone_can_profile(config, tmp_path):
    """Everything else cannot be imported in that interpreter: importing it raises."""
    program = f"""
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {BLOCKED!r}:
            raise ImportError(f"{{name}} is not on a bare machine")
sys.meta_path.insert(0, Block())
from robotattn.latency.__main__ import main
sys.exit(main(["profile", {str(config)!r}, "samples=8", "hz=10", "threads=1", "out={tmp_path}"]))
"""
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=600)
    assert ran.returncode == 0, ran.stderr
    said = json.loads(ran.stdout.splitlines()[-1])
    assert said["command"] == "profile" and said["verdict"]["hz"] == 10
    result = json.loads((tmp_path / "profile.json").read_text())
    assert result["picture"] is None and trace.read(tmp_path / "profile_trace.json").hz is None
    for title in ("cost card [closed form]", "a control step [measured here]", "which attention ran [measured here]"):
        assert title in ran.stdout
    assert ran.stdout.index("cost card") < ran.stdout.index("a control step")


def test_a_bare_machine_answers_mistakes_in_one_line(capsys):
    assert bare.main(["profile", "nowhere.yaml"]) == 2 and "nowhere.yaml: no such file" in capsys.readouterr().err
    assert bare.main([]) == 2 and "usage:" in capsys.readouterr().err
