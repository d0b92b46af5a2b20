"""What people say to the robot: instruction sentences in English and Chinese, as templates over a colour.

In go a colour name of `robotattn.types.COLOURS` and a choice of template; out comes a sentence. The held-out phrases
keep (mostly) the words of the training phrases but not their order, so they ask whether a policy read the sentence
or remembered it. In every sentence the colour word occurs exactly once.
"""

from collections.abc import Mapping
from types import MappingProxyType

import numpy as np

from robotattn.types import COLOURS

LANGUAGES = ("en", "zh")
PHRASES = ("train", "heldout")

COLOUR_WORDS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "en": ("red", "green", "blue", "yellow", "purple", "orange"),
        "zh": ("红", "绿", "蓝", "黄", "紫", "橙"),
    }
)
"""Language → the words for `COLOURS`, in the same order."""

TEMPLATES: Mapping[str, Mapping[tuple[str, str], tuple[str, ...]]] = MappingProxyType(
    {
        "pick_up": MappingProxyType(
            {
                ("train", "en"): (
                    "pick up the {} cube",
                    "lift the {} block off the table",
                    "grasp the {} cube and raise it",
                    "please take the {} block from the table",
                    "find the cube that is {} and lift it up",
                    "grab the {} one and hold it up",
                ),
                ("train", "zh"): (
                    "拿起{}色方块",
                    "把{}色的方块拿起来",
                    "请抓住{}方块，然后提起来",
                    "将桌上的{}色积木举起来",
                    "请从桌上抓起那个{}色的积木",
                    "找到{}色方块并把它举高",
                ),
                ("heldout", "en"): (
                    "raise the {} cube off the table",
                    "please grab the {} block and lift it",
                    "the {} cube is the one to pick up",
                    "find the {} block, take it and hold it up",
                ),
                ("heldout", "zh"): (
                    "{}色的方块，请把它拿起来",
                    "请举起那个{}方块",
                    "从桌上提起{}色积木",
                    "抓住桌上那个{}色的方块并举高",
                ),
            }
        )
    }
)
"""Task → (phrases, language) → templates; ``{}`` takes the colour word."""


def templates(language: str = "both", phrases: str = "train", task: str = "pick_up") -> list[tuple[str, str]]:
    """List ``(language, template)`` in the order that template numbers count; "both" is English, then Chinese.

    Raises ValueError naming what is allowed for an unknown language, phrase set or task.
    """
    _check("language", language, (*LANGUAGES, "both"))
    _check("phrases", phrases, PHRASES)
    _check("task", task, tuple(TEMPLATES))
    chosen = LANGUAGES if language == "both" else (language,)
    return [(name, template) for name in chosen for template in TEMPLATES[task][phrases, name]]


def sentence(colour: str, template: int, language: str = "both", phrases: str = "train", task: str = "pick_up") -> str:
    """Render template number `template` (from 0) for a colour name; raise ValueError naming what is allowed."""
    choices = templates(language, phrases, task)
    if not 0 <= template < len(choices):
        raise ValueError(f"template={template}: {phrases} {language} templates of {task} are 0 to {len(choices) - 1}")
    return _render(colour, *choices[template])


def sentences(colour: str, language: str = "both", phrases: str = "train", task: str = "pick_up") -> list[str]:
    """Render every template for a colour; position i is the same template for every colour."""
    return [_render(colour, *choice) for choice in templates(language, phrases, task)]


def draw(
    colour: str, rng: np.random.Generator, language: str = "both", phrases: str = "train", task: str = "pick_up"
) -> tuple[str, str]:
    """Draw one of `sentences` uniformly; return it and the language it is in ("en" or "zh")."""
    choices = templates(language, phrases, task)
    spoken, template = choices[int(rng.integers(len(choices)))]
    return _render(colour, spoken, template), spoken


def _render(colour: str, language: str, template: str) -> str:
    _check("colour", colour, COLOURS)
    return template.format(COLOUR_WORDS[language][COLOURS.index(colour)])


def _check(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{name}={value!r} is not one of {', '.join(allowed)}")
