"""Instruction text → token ids, with a byte-level BPE that trains in a moment and travels with a checkpoint.

Text is normalised first: NFKC (full-width letters, composed and decomposed accents), lower case (and ß → ss, ς → σ, as
case folding has it), no invisible format characters. Then it is cut into words at white space, at every Han character
and at every punctuation mark, and each word gets a leading space. So a colour is one token wherever it stands (at the
start, between Han characters, before a comma), "colored" does not contain "red", and a Chinese sentence cannot be
swallowed whole by one token. Every byte is a token, so no text is unknown.
"""

import warnings
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import tokenizers
from tokenizers import Regex, models, normalizers, pre_tokenizers, trainers

from robotattn.instructions import sentences
from robotattn.types import COLOURS

PADDING, NO_INSTRUCTION = 0, 1  # ids
SPECIAL = ("<padding>", "<no instruction>")
MAX_TOKENS = 96
VOCABULARY = 448  # tokens at most: 2 special, 256 bytes, the rest merges; the train sentences need fewer


class Tokenizer:
    """Instruction text → ids ``[B, L]`` and a mask, True where a token is real.

    `size` ids in all: 0 pads, 1 says "no instruction", the rest are bytes and pieces of words.
    """

    def __init__(self, backend: tokenizers.Tokenizer, max_tokens: int = MAX_TOKENS):
        found = tuple(backend.id_to_token(i) for i in range(len(SPECIAL)))
        if found != SPECIAL:
            raise ValueError(f"the first tokens are {found}; a robotattn tokenizer starts with {SPECIAL}")
        backend.encode_special_tokens = True  # "<padding>" typed by a person is text like any other
        self._backend = backend
        self.max_tokens = max_tokens

    @classmethod
    def train(cls, texts: Iterable[str], vocab_size: int = VOCABULARY, max_tokens: int = MAX_TOKENS) -> "Tokenizer":
        """Learn merges from `texts` (their order does not matter) until `vocab_size` ids are used or words run out."""
        smallest = len(SPECIAL) + 256
        if vocab_size < smallest:
            raise ValueError(f"vocab_size={vocab_size}: the special tokens and the bytes alone are {smallest}")
        backend = tokenizers.Tokenizer(models.BPE())
        backend.normalizer = _normalizer()
        backend.pre_tokenizer = _pre_tokenizer()
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=list(SPECIAL),
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,
        )
        backend.train_from_iterator(sorted(texts), trainer)
        return cls(backend, max_tokens)

    @property
    def size(self) -> int:
        """Number of ids: an embedding table has this many rows."""
        return self._backend.get_vocab_size()

    def encode(self, texts: Sequence[str | None]) -> tuple[np.ndarray, np.ndarray]:
        """Return ids int64 ``[B, L]`` and mask bool ``[B, L]``, padded on the right to the longest text.

        None, "" and blank text become the one token NO_INSTRUCTION. Raises ValueError for a text of more than
        `max_tokens` tokens (nothing is cut off) and warns about one in which every word is new to the tokenizer.
        """
        if isinstance(texts, str):
            raise ValueError(f"texts={texts!r}: encode takes a list of texts, one a row")
        rows = [self._ids(index, text) for index, text in enumerate(texts)]
        length = max(map(len, rows), default=1)
        ids = np.full((len(rows), length), PADDING, dtype=np.int64)
        mask = np.zeros((len(rows), length), dtype=bool)
        for index, row in enumerate(rows):
            ids[index, : len(row)] = row
            mask[index, : len(row)] = True
        return ids, mask

    def unfamiliar(self, text: str) -> float:
        """Return the share of words that the training texts did not teach as a whole, 0 (all known) to 1."""
        return _unfamiliar(self._backend.encode(text, add_special_tokens=False))

    def to_json(self) -> str:
        """Return the tokenizer as JSON text, in the format of the `tokenizers` library."""
        return self._backend.to_str(pretty=True)

    @classmethod
    def from_json(cls, text: str, source: str = "tokenizer", max_tokens: int = MAX_TOKENS) -> "Tokenizer":
        """Read what `to_json` wrote; raise ValueError naming `source` if it is anything else."""
        try:
            return cls(tokenizers.Tokenizer.from_str(text), max_tokens)
        except Exception as error:  # the library raises bare Exception for text that it cannot read
            raise ValueError(f"{source} is not a robotattn tokenizer file: {error}") from error

    def save(self, path: str | Path) -> None:
        """Write the tokenizer to a JSON file."""
        Path(path).write_text(self.to_json() + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> "Tokenizer":
        """Read a file that `save` wrote; raise FileNotFoundError or a ValueError that names the path."""
        return cls.from_json(Path(path).read_text(encoding="utf-8"), source=str(path))

    def _ids(self, index: int, text: str | None) -> list[int]:
        if text is not None and not isinstance(text, str):
            raise ValueError(f"texts[{index}]={text!r}: an instruction is text or None")
        try:
            (text or "").encode("utf-8")
        except UnicodeEncodeError as error:  # half a surrogate pair, as a terminal makes of a broken byte
            raise ValueError(f"texts[{index}]={text!r} is not valid Unicode text: {error}") from error
        encoding = self._backend.encode(text or "", add_special_tokens=False)
        if not encoding.ids:
            return [NO_INSTRUCTION]
        if len(encoding.ids) > self.max_tokens:
            raise ValueError(
                f"texts[{index}] has {len(encoding.ids)} tokens, allowed {self.max_tokens}: {(text or '')[:50]!r}..."
            )
        if _unfamiliar(encoding) == 1:
            warnings.warn(f"every word of the instruction {text!r} is new to the tokenizer", stacklevel=3)
        return encoding.ids


def default_tokenizer() -> Tokenizer:
    """Train the tokenizer on every training sentence of `robotattn.instructions`; the same ids each time."""
    return Tokenizer.train(text for colour in COLOURS for text in sentences(colour))


def _unfamiliar(encoding: tokenizers.Encoding) -> float:
    """Count the words in more than one piece: a leading space and a letter are already two unless they were merged."""
    pieces = Counter(encoding.word_ids)
    return sum(count > 1 for count in pieces.values()) / max(len(pieces), 1)


def _normalizer() -> normalizers.Normalizer:
    return normalizers.Sequence(
        [
            normalizers.NFKC(),
            normalizers.Lowercase(),
            normalizers.Replace("ß", "ss"),
            normalizers.Replace("ς", "σ"),
            normalizers.Replace(Regex(r"\p{Cf}"), ""),  # zero-width space, byte-order mark, soft hyphen
        ]
    )


def _pre_tokenizer() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"[\s\p{Cc}]+"), "removed"),
            pre_tokenizers.Split(Regex(r"\p{Han}|[\p{P}\p{S}]"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=True, use_regex=False),
        ]
    )
