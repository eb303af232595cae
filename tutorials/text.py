"""Text for the language model: words, a vocabulary, sequences of ids.

By default the text is one that every machine with Python has: the source and
the documentation strings of its own standard library. Everything is
deterministic: the same Python gives the same words, the same ids and the same
held-out modules, in every process.
"""

import collections
import dataclasses
import hashlib
import pathlib
import re
import sysconfig

import numpy as np

# A word is a name or a word of prose, with its case: `self`, `read_bytes`,
# `Return`. Left out are punctuation, numbers and the n of a string's "\\n".
WORD = re.compile(r"(?<!\\)\b[^\W\d]\w*")

# Left out of the standard library: what not every machine has (tests,
# installed packages) and tables that a program wrote (encodings).
LEFT_OUT = {"test", "tests", "idle_test", "site-packages", "encodings"}

UNKNOWN = "<unk>"


@dataclasses.dataclass
class Corpus:
    """Text as sequences of word ids.

    Attributes:
        vocabulary: list of words, `<unk>` first and the others from the most
            to the least frequent, so that a word's id is its rank: sampled
            softmax draws small ids more often.
        train: int32 array `(sequences, 2, time)`: `[:, 0]` the words and
            `[:, 1]` the word that follows each.
        held_out: the same, of modules of which `train` has no word.
    """

    vocabulary: list
    train: np.ndarray
    held_out: np.ndarray

    def unigram_perplexity(self):
        """Perplexity of the held-out words under their training frequency.

        What a model reaches that knows how frequent each word is, and nothing
        of the words before it: `exp(-mean(log p(word)))`, where each count is
        raised by one for words that training never shows.
        """
        counts = np.bincount(
            self.train[:, 1].ravel(), minlength=len(self.vocabulary)
        )
        probabilities = (counts + 1) / (counts + 1).sum()
        return float(np.exp(-np.log(probabilities[self.held_out[:, 1]]).mean()))


def load_corpus(files=None, min_count=2, time=20):
    """Reads text files, or the standard library, as a `Corpus`.

    Args:
        files: paths of text files, or `None` for the standard library.
        min_count: words that training shows less often become `<unk>`.
        time: length of a sequence.
    """
    pieces = read_files(files) if files else read_standard_library()
    train = [piece.words for piece in pieces if not piece.held_out]
    held_out = [piece.words for piece in pieces if piece.held_out]

    counts = collections.Counter(word for words in train for word in words)
    vocabulary = [UNKNOWN]
    vocabulary += [w for w, n in counts.most_common() if n >= min_count]
    ids = {word: id for id, word in enumerate(vocabulary)}

    corpus = Corpus(
        vocabulary,
        make_sequences(train, ids, time),
        make_sequences(held_out, ids, time),
    )
    if not len(corpus.train) or not len(corpus.held_out):
        raise ValueError(
            "too little text to train on one part and hold out another: "
            f"{len(train)} and {len(held_out)} pieces of text gave "
            f"{len(corpus.train)} and {len(corpus.held_out)} sequences of "
            f"{time} words. Fix: --text with more or longer files."
        )
    return corpus


@dataclasses.dataclass
class Piece:
    """Text that is trained on, or held out, as a whole."""

    words: list
    held_out: bool


def read_standard_library():
    """One piece per module: one in 32 is held out, by a hash of its name."""
    root = pathlib.Path(sysconfig.get_path("stdlib"))
    pieces = []
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        if LEFT_OUT.isdisjoint(parts):
            name = ".".join(parts)  # asyncio.tasks
            first_byte = hashlib.sha256(name.encode()).digest()[0]
            pieces.append(Piece(read_words(path), first_byte % 32 == 0))
    return pieces


def read_files(paths, piece_words=1000):
    """One piece per thousand words: one in 32 is held out."""
    pieces = []
    for path in paths:
        words = read_words(pathlib.Path(path))
        for start in range(0, len(words), piece_words):
            held_out = len(pieces) % 32 == 16
            pieces.append(Piece(words[start : start + piece_words], held_out))
    return pieces


def read_words(path):
    return WORD.findall(path.read_text(encoding="utf-8", errors="replace"))


def make_sequences(pieces, ids, time):
    """Cuts each piece's words into sequences of ids with their targets.

    The rest of a piece that fills no sequence is dropped.

    Returns:
        int32 array `(sequences, 2, time)`.
    """
    sequences = [np.zeros((0, 2, time), "int32")]
    for words in pieces:
        text = np.array([ids.get(word, 0) for word in words], "int32")
        count = max(len(text) - 1, 0) // time
        inputs = text[: count * time].reshape(count, time)
        targets = text[1 : count * time + 1].reshape(count, time)
        sequences.append(np.stack([inputs, targets], axis=1))
    return np.concatenate(sequences)
