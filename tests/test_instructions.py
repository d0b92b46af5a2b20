"""Instruction templates: enough of them, the colour in each, and held-out phrases that are other sentences."""

import re
from collections import Counter

import numpy as np
import pytest

from robotattn.instructions import COLOUR_WORDS, LANGUAGES, TEMPLATES, draw, sentence, sentences, templates
from robotattn.types import COLOURS


def words(text: str) -> list[str]:
    return re.findall(r"[a-z]+|[\u4e00-\u9fff]", text.lower())


@pytest.mark.parametrize("task", TEMPLATES)
def test_every_task_has_twelve_training_and_six_held_out_templates(task):
    assert len(templates("both", "train", task)) == 12
    assert len(templates("both", "heldout", task)) >= 6
    for language in LANGUAGES:
        assert len(templates(language, "train", task)) >= 5
        assert len(templates(language, "heldout", task)) >= 3


@pytest.mark.parametrize("task", TEMPLATES)
def test_no_template_is_listed_twice_or_in_both_phrase_sets(task):
    listed = templates("both", "train", task) + templates("both", "heldout", task)
    assert len(set(listed)) == len(listed)


@pytest.mark.parametrize("phrases", ["train", "heldout"])
@pytest.mark.parametrize("colour", COLOURS)
def test_each_sentence_has_its_own_colour_word_once_and_no_other(colour, phrases):
    for language in LANGUAGES:
        own = COLOUR_WORDS[language][COLOURS.index(colour)]
        for text in sentences(colour, language, phrases):
            found = Counter(words(text))
            assert {word: found[word] for word in COLOUR_WORDS[language] if found[word]} == {own: 1}


@pytest.mark.parametrize("language", LANGUAGES)
def test_held_out_sentences_use_mostly_known_words_in_an_order_not_trained(language):
    trained = [words(text) for text in sentences("red", language)]
    known = {word for text in trained for word in text}
    for text in sentences("red", language, "heldout"):
        found = words(text)
        assert sum(word in known for word in found) / len(found) >= 0.8
        assert found not in trained


def test_known_colours_render_to_known_sentences():
    assert sentence("red", 0, "en") == "pick up the red cube"
    assert sentence("purple", 0, "zh") == "拿起紫色方块"
    assert sentence("orange", 6) == "拿起橙色方块"


def test_a_template_number_means_the_same_template_for_every_colour():
    for number in range(12):
        per_colour = {
            sentence(colour, number).replace(COLOUR_WORDS["en" if number < 6 else "zh"][index], "*")
            for index, colour in enumerate(COLOURS)
        }
        assert len(per_colour) == 1
        assert sentences("blue")[number] == sentence("blue", number)


def test_draw_reaches_every_sentence_about_equally_often():
    rng = np.random.default_rng(3)
    drawn = Counter(draw("green", rng) for _ in range(2400))
    assert {text for text, _ in drawn} == set(sentences("green"))
    assert min(drawn.values()) > 140 and max(drawn.values()) < 260  # 200 expected, standard deviation 14


def test_draw_names_the_language_and_repeats_with_the_same_generator_seed():
    first = [draw("red", np.random.default_rng(9), "both", "heldout") for _ in range(2)]
    assert first[0] == first[1]
    assert draw("red", np.random.default_rng(0), "zh")[1] == "zh"
    text, language = first[0]
    assert (language == "en") == text.isascii()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: sentence("pink", 0, "en"), "colour='pink' is not one of red, green, blue, yellow, purple, orange"),
        (lambda: sentences("red", "fr"), "language='fr' is not one of en, zh, both"),
        (lambda: sentences("red", phrases="test"), "phrases='test' is not one of train, heldout"),
        (lambda: sentences("red", task="fly"), "task='fly' is not one of pick_up"),
        (lambda: sentence("red", 12), "template=12: train both templates of pick_up are 0 to 11"),
        (lambda: sentence("red", -1, "zh"), "template=-1: train zh templates of pick_up are 0 to 5"),
    ],
)
def test_errors_name_the_value_and_what_is_allowed(call, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        call()
