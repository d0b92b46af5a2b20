"""The tokenizer: colours that stay one token, unicode forms (case O31), no instruction (case O30)."""

import random
import unicodedata
import warnings

import numpy as np
import pytest
import tokenizers

from robotattn.instructions import COLOUR_WORDS, sentences
from robotattn.tokens.text import NO_INSTRUCTION, PADDING, Tokenizer, default_tokenizer
from robotattn.types import COLOURS


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return default_tokenizer()


def ids(tokenizer: Tokenizer, text: str) -> list[int]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        row, mask = tokenizer.encode([text])
    assert mask.all()
    return row[0].tolist()


def test_the_vocabulary_is_small_and_training_sentences_are_whole_words(tokenizer):
    assert 350 <= tokenizer.size <= 450
    for colour in COLOURS:
        for text in sentences(colour):
            assert tokenizer.unfamiliar(text) == 0
            assert len(ids(tokenizer, text)) <= 16


@pytest.mark.parametrize("colour", COLOURS)
def test_an_english_colour_is_one_token_wherever_it_stands(tokenizer, colour):
    (token,) = ids(tokenizer, colour)
    for text in (
        f" {colour}",
        f"把{colour}方块拿起来",
        f"the {colour} cube",
        f"({colour})",
        f"{colour},",
        f"the-{colour}",
    ):
        assert ids(tokenizer, text).count(token) == 1, text


@pytest.mark.parametrize("word", COLOUR_WORDS["zh"])
def test_a_chinese_colour_is_one_token_wherever_it_stands(tokenizer, word):
    (token,) = ids(tokenizer, word)
    for text in (f"拿起{word}色方块", f"pick up the {word} cube", f"pick{word}up", f"{word}", f" {word} "):
        assert ids(tokenizer, text).count(token) == 1, text


def test_a_mixed_sentence_is_the_sum_of_its_parts(tokenizer):
    parts = ["把", "red", "方", "块", "拿", "起", "来"]
    assert ids(tokenizer, "把red方块拿起来") == [token for part in parts for token in ids(tokenizer, part)]
    assert ids(tokenizer, "把 red 方块 拿起来") == ids(tokenizer, "把red方块拿起来")


@pytest.mark.parametrize("text", ["colored", "tired", "infrared", "evergreen"])
def test_a_colour_inside_a_word_is_not_the_colour_token(tokenizer, text):
    assert not {token for colour in COLOURS for token in ids(tokenizer, colour)} & set(ids(tokenizer, text))
    assert tokenizer.unfamiliar(text) == 1


@pytest.mark.parametrize("text", ["PICK  up the réd cube", "naïve Ångström", "が ぎ", "한국어"])
def test_composed_and_decomposed_forms_have_the_same_ids(tokenizer, text):
    forms = {tuple(ids(tokenizer, unicodedata.normalize(form, text))) for form in ("NFC", "NFD", "NFKC", "NFKD")}
    assert len(forms) == 1


@pytest.mark.parametrize(
    ("text", "plain"),
    [
        ("PICK UP THE RED CUBE", "pick up the red cube"),
        ("  pick\tup\n\nthe\u3000red\u00a0cube\r\n", "pick up the red cube"),
        ("ｐｉｃｋ ｕｐ ｔｈｅ ＲＥＤ ｃｕｂｅ", "pick up the red cube"),
        ("pick\u200b up the re\u00add cube\ufeff", "pick up the red cube"),
        ("请，拿起红色方块", "请,拿起红色方块"),
        ("拿起 红色\n方块", "拿起红色方块"),
        ("STRASSE", "straße"),
        ("ΟΔΟΣ", "οδος"),
    ],
)
def test_text_that_reads_the_same_has_the_same_ids(tokenizer, text, plain):
    assert ids(tokenizer, text) == ids(tokenizer, plain)


def test_case_folding_agrees_with_python(tokenizer):
    letters = [chr(code) for code in [*range(0x41, 0x180), *range(0x391, 0x3CA), *range(0x410, 0x450)]]
    exceptions = {"ŉ", "İ"}  # NFKC and lower case split or accent these in their own way
    for letter in letters:
        if letter.isalpha() and letter not in exceptions:
            folded = unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", letter).casefold())
            assert ids(tokenizer, letter) == ids(tokenizer, folded), letter


def test_case_folding_of_whole_sentences_leaves_no_upper_case(tokenizer):
    for text in sentences("yellow"):
        assert ids(tokenizer, text.upper()) == ids(tokenizer, text.title()) == ids(tokenizer, text)


def test_no_text_is_unknown_and_different_texts_differ(tokenizer):
    texts = ["🙂", "🙃", "zxqj", "zxqk", "紅色", "крас", "красн", "\x01a", "<padding>", "<no instruction>", "1", "2"]
    rows = [tuple(ids(tokenizer, text)) for text in texts]
    assert len(set(rows)) == len(texts)
    assert not {PADDING, NO_INSTRUCTION} & {token for row in rows for token in row}
    assert max(token for row in rows for token in row) < tokenizer.size


def test_unfamiliar_is_the_share_of_new_words(tokenizer):
    assert tokenizer.unfamiliar("pick up the red cube") == 0
    assert tokenizer.unfamiliar("zap the red cube") == 0.25
    assert tokenizer.unfamiliar("拿起紅色方块") == pytest.approx(1 / 6)
    assert tokenizer.unfamiliar("zap 🙂") == 1
    assert tokenizer.unfamiliar("") == 0


def test_an_instruction_of_new_words_only_warns(tokenizer):
    with pytest.warns(UserWarning, match="every word of the instruction 'zap 🙂' is new"):
        tokenizer.encode(["zap 🙂", "pick up the red cube"])


def test_missing_empty_and_blank_instructions_are_one_token_next_to_text(tokenizer):
    texts = [None, "", "   ", "\t\n\u3000\u200b", "pick up the red cube"]
    rows, mask = tokenizer.encode(texts)
    assert rows.shape == mask.shape == (5, 5)
    assert rows.dtype == np.int64 and mask.dtype == np.bool_
    assert mask.sum(1).tolist() == [1, 1, 1, 1, 5]
    assert (rows[:4, 0] == NO_INSTRUCTION).all() and (rows[:4, 1:] == PADDING).all()
    assert rows[4].tolist() == ids(tokenizer, texts[4])


def test_an_empty_batch_and_a_batch_of_nothing_have_a_shape(tokenizer):
    assert tokenizer.encode([])[0].shape == (0, 1)
    assert tokenizer.encode([None, None])[0].tolist() == [[NO_INSTRUCTION]] * 2


def test_rows_do_not_depend_on_their_neighbours(tokenizer):
    texts = sentences("blue") + sentences("red", phrases="heldout")
    rows, mask = tokenizer.encode(texts)
    for row, real, text in zip(rows, mask, texts, strict=True):
        assert row[real].tolist() == ids(tokenizer, text)
        assert real.tolist() == sorted(real.tolist(), reverse=True)  # padding on the right


def test_the_longest_allowed_text_passes_and_one_token_more_is_refused(tokenizer):
    assert tokenizer.encode(["red " * 96])[0].shape == (1, 96)
    with pytest.raises(ValueError, match=r"texts\[1\] has 97 tokens, allowed 96: 'red red"):
        tokenizer.encode(["red", "red " * 97])


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        ("red", "takes a list of texts"),
        ([b"red"], r"texts\[0\]=b'red': an instruction is text or None"),
        (["red", 3], r"texts\[1\]=3"),
        (["red\ud800"], r"texts\[0\]=.*not valid Unicode"),
    ],
)
def test_what_is_not_text_is_refused_by_name(tokenizer, texts, message):
    with pytest.raises(ValueError, match=message):
        tokenizer.encode(texts)


def test_training_is_deterministic_whatever_the_order():
    texts = [text for colour in COLOURS for text in sentences(colour)]
    reference = Tokenizer.train(texts).to_json()
    for seed in range(5):
        random.Random(seed).shuffle(texts)
        assert Tokenizer.train(iter(texts)).to_json() == reference
    assert default_tokenizer().to_json() == reference


def test_a_smaller_vocabulary_is_kept_to_and_one_below_the_bytes_is_refused():
    assert Tokenizer.train(sentences("red"), vocab_size=300).size == 300
    assert Tokenizer.train([], vocab_size=258).size == 258
    with pytest.raises(ValueError, match="vocab_size=257: the special tokens and the bytes alone are 258"):
        Tokenizer.train(sentences("red"), vocab_size=257)


def test_a_saved_tokenizer_loads_identically(tokenizer, tmp_path):
    path = tmp_path / "tokenizer.json"
    tokenizer.save(path)
    loaded = Tokenizer.load(path)
    assert loaded.to_json() == tokenizer.to_json() and loaded.size == tokenizer.size
    for text in [*sentences("orange"), "把red方块拿起来", "<padding> réd 🙂"]:
        assert ids(loaded, text) == ids(tokenizer, text)
    again = tmp_path / "again.json"
    loaded.save(again)
    assert again.read_bytes() == path.read_bytes()


def test_the_file_alone_reproduces_the_ids_in_the_library_itself(tokenizer, tmp_path):
    tokenizer.save(tmp_path / "tokenizer.json")
    library = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    for text in [*sentences("green"), "ＰＩＣＫ up the réd cube"]:
        assert library.encode(text).ids == ids(tokenizer, text)


def test_a_file_that_is_no_tokenizer_is_refused_by_path(tokenizer, tmp_path):
    foreign = tokenizers.Tokenizer(tokenizers.models.BPE())
    for name, text in [
        ("half.json", tokenizer.to_json()[:500]),
        ("empty.json", ""),
        ("foreign.json", foreign.to_str()),
    ]:
        (tmp_path / name).write_text(text)
        with pytest.raises(ValueError, match=f"{name} is not a robotattn tokenizer file"):
            Tokenizer.load(tmp_path / name)
    with pytest.raises(FileNotFoundError, match="missing"):
        Tokenizer.load(tmp_path / "missing.json")
