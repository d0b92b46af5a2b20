"""The strict YAML reader: what is read as what, what is refused with which words, and that writing loses nothing."""

import dataclasses
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import pytest
import tyro

from robotattn.config import ONE_OF, UsageError, dump, dumps, from_dict, load, loads, to_dict


@dataclass(frozen=True)
class ACTConfig:
    chunk: int = 8
    cameras: tuple[str, ...] = ("front",)
    num_layers: int = 4

    def __post_init__(self):
        if self.chunk < 1:
            raise ValueError(f"chunk must be at least 1, got {self.chunk}")


@dataclass(frozen=True)
class DiffusionConfig:
    denoise: int = 10


@dataclass(frozen=True)
class Camera:
    name: str
    size: tuple[int, int] = (96, 96)


@dataclass(frozen=True)
class Run:
    data: Path
    policy: ACTConfig | DiffusionConfig = ACTConfig()
    single: Annotated[ACTConfig, ONE_OF] = ACTConfig()
    cameras: tuple[Camera, ...] = ()
    sizes: dict[str, tuple[int, int]] = field(default_factory=dict)
    lr: float = 3e-4
    steps: int = 100
    amp: bool = False
    betas: tuple[float, float] = (0.9, 0.98)
    limit: float | None = None
    wrist: Camera | None = None
    mode: Literal["fast", "slow"] = "fast"
    threads: int | Literal["auto"] = "auto"
    note: str = ""


def read(text, source="run.yaml"):
    return loads("data: demos\n" + text, Run, source)


def refusal(text):
    with pytest.raises(UsageError) as caught:
        read(text)
    message = str(caught.value)
    assert "\n" not in message
    assert caught.value.exit_code == 2
    return message


# --- numbers and words (O35)


@pytest.mark.parametrize(
    ("text", "value"),
    [("1e-4", 1e-4), ("3e-4", 3e-4), ("1E5", 1e5), (".5", 0.5), ("-2.", -2.0), ("7", 7.0), ("+1.5e+3", 1500.0)],
)
def test_floats_are_read_as_people_write_them(text, value):
    assert read(f"lr: {text}").lr == value
    assert type(read(f"lr: {text}").lr) is float


@pytest.mark.parametrize(("text", "value"), [("1e5", 100_000), ("-1", -1), ("0", 0), ("12", 12), ("8.0", 8)])
def test_whole_numbers_are_integers_however_written(text, value):
    assert read(f"steps: {text}").steps == value
    assert type(read(f"steps: {text}").steps) is int


@pytest.mark.parametrize(
    "text", ["8.5", "010", "0777", "0x10", "1_000", "12:30:45", '"8"', "true", "on", "1e-3", ".inf", "[1]", ""]
)
def test_what_is_not_a_whole_number_is_refused_for_an_integer(text):
    assert refusal(f"steps: {text}").startswith("run.yaml:2: steps: expected a whole number")


@pytest.mark.parametrize("text", ['"1e-4"', "010.5", "12:30:45", "true", ".nan", "1e", "fast", "null"])
def test_what_is_not_a_number_is_refused_for_a_float(text):
    assert refusal(f"lr: {text}").startswith("run.yaml:2: lr: expected a number")


@pytest.mark.parametrize("text", ['"false"', "'true'", "off", "on", "no", "yes", "0", "1", "null"])
def test_only_true_and_false_are_truth_values(text):
    assert refusal(f"amp: {text}").startswith("run.yaml:2: amp: expected true or false")
    assert read("amp: true").amp is True
    assert read("amp: False").amp is False


@pytest.mark.parametrize(
    "text", ["on", "off", "yes", "no", "y", "0777", "010", "12:30:45", "1_000", "2001-01-01", "=", "0x1F"]
)
def test_words_that_older_yaml_converts_stay_text(text):
    assert read(f"note: {text}").note == text


@pytest.mark.parametrize("text", ["1", "1e5", "true", "null", "1.5"])
def test_text_that_looks_like_something_else_needs_quotes(text):
    assert "put quotes around" in refusal(f"note: {text}")
    assert read(f"note: '{text}'").note == text


def test_a_text_for_a_list_is_refused_with_what_to_write():
    assert refusal("policy: {act: {cameras: front}}") == (
        "run.yaml:2: policy.act.cameras: expected a list, got 'front' (text); write [front]"
    )


def test_ranges_are_reported_with_path_and_line():
    assert refusal("policy:\n  act:\n    chunk: 0") == "run.yaml:4: policy.act.chunk: must be at least 1, got 0"
    assert refusal("policy:\n  act:\n    chunk: -1").startswith("run.yaml:4: policy.act.chunk: ")


# --- keys (O34)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("lerning_rate: 1e-3", "run.yaml:2: lerning_rate: unknown key; nearest: lr; allowed: data, policy, "),
        ("stpes: 3", "run.yaml:2: stpes: unknown key; nearest: steps; "),
        ("policy:\n  act:\n    num-layers: 6", "run.yaml:4: policy.act.num-layers: unknown key; nearest: num_layers; "),
        (
            "wrist:\n  name: w\n  sise: [1, 2]",
            "run.yaml:4: wrist.sise: unknown key; nearest: size; allowed: name, size",
        ),
        ("policy: {atc: {}}", "run.yaml:2: policy.atc: unknown; nearest: act; "),
        ("cameras: [{name: a}, {nam: b}]", "run.yaml:2: cameras.1.nam: unknown key; nearest: name; "),
    ],
)
def test_an_unknown_key_is_named_with_path_line_and_nearest_name(text, expected):
    assert refusal(text).startswith(expected)


def test_a_right_key_in_the_wrong_section_is_told_where_it_belongs():
    assert refusal("denoise: 5") == "run.yaml:2: denoise: unknown key; it belongs at policy.diffusion.denoise"
    assert refusal("policy: {act: {lr: 1}}") == "run.yaml:2: policy.act.lr: unknown key; it belongs at lr"


def test_a_key_given_twice_is_refused_with_both_lines():
    assert refusal("lr: 1\nsteps: 2\nlr: 3") == "run.yaml:4: lr: given twice (first in line 2)"
    assert "given twice" in refusal("policy: {act: {chunk: 1, chunk: 2}}")


def test_missing_fields_are_named_with_their_path():
    with pytest.raises(UsageError, match=r"^run\.yaml:1: missing data$"):
        loads("lr: 1", Run, "run.yaml")
    assert refusal("wrist: {size: [1, 2]}") == "run.yaml:2: wrist: missing wrist.name"


@pytest.mark.parametrize(
    "text", ["policy: act", "policy: {}", "policy: [act]", "policy: {act: {}, diffusion: {}}", "policy: null"]
)
def test_a_union_is_a_mapping_with_exactly_one_known_name(text):
    assert "expected a mapping with one key, one of: act, diffusion" in refusal(text)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("betas: [1, 2, 3]", "betas: expected a list of 2, got 3"),
        ("sizes: [1]", "sizes: expected a mapping, got [1] (a list)"),
        ("sizes: {front: [96, 9.5]}", "sizes.front.1: expected a whole number"),
        ("mode: quick", "mode: got 'quick', allowed: fast, slow"),
        ("threads: many", "threads: got 'many' (text), allowed: "),
        ("cameras: {name: front}", "cameras: expected a list, got {'name': 'front'} (a mapping)"),
        ("note: [a]", "note: expected text"),
        ("wrist: front", "wrist: expected a mapping with name, size; got 'front' (text)"),
    ],
)
def test_a_value_of_the_wrong_shape_is_refused_with_what_was_allowed(text, expected):
    assert refusal(text).startswith(f"run.yaml:2: {expected}")


# --- files


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", ": is empty; required: data"),
        (b"# only a comment\n", ": is empty; required: data"),
        (b"- data\n- lr\n", ":1: expected a mapping with data, "),
        (b"data: demos\npolicy:\n\tact: {}\n", ":3: not valid YAML: a tab; YAML is indented with spaces"),
        (b"data: [demos\n", "not valid YAML: "),
        (b"just words\n", ":1: expected a mapping with data, "),
        (b"data: demos\n---\ndata: more\n", "not valid YAML: "),
        (b"data: &here demos\nnote: *here\n", ":1: not valid YAML: anchors and aliases are not supported"),
        (b"data: !!python/name:os.system x\n", ":1: not valid YAML: tag "),
        (b"data: !!int '010'\n", ":1: not valid YAML: tag "),
        (b"data: \xff\xfe\n", ": not UTF-8 text"),
        (b"data: \x00\n", "not valid YAML: "),
        (b"[" * 20_000, "not valid YAML: nested too deeply"),
        (b"? [a, b]\n: 1\n", ":1: a key must be a word"),
        (b"<<: {data: demos}\n", ":1: <<: unknown key; "),
    ],
)
def test_a_file_that_is_not_a_configuration_gets_one_clear_line(tmp_path, content, expected):
    path = tmp_path / "broken.yaml"
    path.write_bytes(content)
    with pytest.raises(UsageError) as caught:
        load(path, Run)
    message = str(caught.value)
    assert message.startswith(str(path))
    assert expected in message
    assert "\n" not in message


def test_a_missing_file_is_named_with_the_files_beside_it(tmp_path):
    (tmp_path / "act_pixels.yaml").touch()
    with pytest.raises(UsageError, match=r"act_pixel\.yaml: No such file or directory; in .*: act_pixels\.yaml"):
        load(tmp_path / "act_pixel.yaml", Run)
    with pytest.raises(UsageError, match="Is a directory"):
        load(tmp_path, Run)


def test_a_byte_order_mark_and_windows_line_ends_are_read(tmp_path):
    (tmp_path / "run.yaml").write_bytes(b"\xef\xbb\xbfdata: demos\r\nlr: 1e-3\r\n")
    assert load(tmp_path / "run.yaml", Run) == Run(Path("demos"), lr=1e-3)


# --- round trips

FULL = Run(
    data=Path("a/b c"),
    policy=DiffusionConfig(denoise=3),
    single=ACTConfig(chunk=2, cameras=("top", "010")),
    cameras=(Camera("true"), Camera("x", (1, 2))),
    sizes={"top": (1, 2), "front": (3, 4)},
    lr=1e-20,
    steps=10**12,
    betas=(0.1 + 0.2, 1.0),
    limit=float("inf"),
    wrist=Camera("1e5"),
    threads=3,
    note="# not a comment: 拿起",
)


def test_a_written_configuration_is_read_back_equal(tmp_path):
    dump(FULL, tmp_path / "run.yaml")
    again = load(tmp_path / "run.yaml", Run)
    assert again == FULL
    assert list(again.sizes) == ["top", "front"]
    assert from_dict(Run, to_dict(FULL)) == FULL
    assert dumps(again) == dumps(FULL)


def test_every_field_is_written_also_defaults():
    assert list(to_dict(Run(Path("d")))) == [f.name for f in dataclasses.fields(Run)]
    assert to_dict(Run(Path("d")))["policy"] == {"act": {"chunk": 8, "cameras": ["front"], "num_layers": 4}}
    assert to_dict(Run(Path("d")))["single"] == {"act": {"chunk": 8, "cameras": ["front"], "num_layers": 4}}


STRANGE = [
    "1e5",
    "010",
    "on",
    "null",
    "",
    "~",
    "true",
    "12:30",
    ": x",
    "- a",
    "日本",
    "a\nb",
    "1.",
    "+.inf",
    "0x1",
    "#x",
]
STRANGE += [
    " a ",
    "\t",
    "=",
    "<<",
    "!x",
    "&a",
    "*a",
    "'",
    '"',
    "\u2028",
    "%x",
    "@x",
    "`",
    "{",
    "[",
    "a: b",
    "a #b",
    "\x7f",
    "😀",
]


@pytest.mark.parametrize("text", STRANGE)
def test_any_text_survives_writing_and_reading(text):
    run = dataclasses.replace(FULL, note=text)
    assert loads(dumps(run), Run) == run


def test_wrong_plain_values_are_refused_as_strictly_as_a_file():
    with pytest.raises(UsageError, match=r"^evaluation\.json: steps: expected a whole number"):
        from_dict(Run, {"data": "d", "steps": True}, "evaluation.json")
    with pytest.raises(UsageError, match=r"^evaluation\.json: stpes: unknown key; nearest: steps"):
        from_dict(Run, {"data": "d", "stpes": 1}, "evaluation.json")


def test_an_unsupported_field_type_is_a_mistake_of_the_programmer():
    @dataclass(frozen=True)
    class Odd:
        value: complex = 0j

    with pytest.raises(TypeError, match="value"):
        from_dict(Odd, {"value": 1})


def test_flags_override_a_file_and_the_rest_stays():
    run = tyro.cli(Run, default=FULL, args=["--lr", "0.5"], config=(tyro.conf.AvoidSubcommands,))
    assert run == dataclasses.replace(FULL, lr=0.5)


def test_the_reader_needs_neither_torch_nor_mujoco():
    code = "import sys, robotattn.config; print(*sorted({'torch', 'mujoco', 'gymnasium'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []
