"""Vocabularies: ids as BERT's, special ids by name, training that repeats itself."""

import dataclasses
import random
import unicodedata

import pytest

from electra_jax.config import files
from electra_jax.data import chunks, examples, tokenizer, vocabulary
from electra_jax.data.tokenizer import VocabError
from electra_jax.finetune import tagging

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
PIECES = (
  ["the", "un", "##aff", "##able", "cafe", "na", "##ive", "run", "##ning", "a", "##a", "b", "##b"]
  + list("cdefghijklmnopqrstuvwxyz0123456789")
  + [f"##{c}" for c in "cdefghijklmnopqrstuvwxyz0123456789"]
  + list("!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~")
  + ["—", "’", "中", "国", "ß", "##ß", "é", "##é", "A", "C", "##F", "##É"]
)
TEXT = [
  "the unaffable cafe was running, naive and affable; the cafe ran.",
  "a cab ran by the cafe (the unaffable one) and a bee hummed",
  "running and humming, the bees came by cab: 3.5 of them at 07:45!",
] * 40
SIZES = {"wordpiece": 80, "unigram": 56, "bpe": 56}


@pytest.fixture
def vocab_file(tmp_path):
  path = tmp_path / "vocab.txt"
  path.write_text("\n".join(SPECIAL + PIECES) + "\n", encoding="utf-8")
  return path


def bert(text: str, vocab: dict[str, int], lowercase: bool) -> list[int]:
  """BERT's tokenizer written out plainly, from its description."""
  cleaned = []
  for char in text:
    if char in "\t\n\r" or unicodedata.category(char) == "Zs":
      cleaned.append(" ")
    elif char != "\ufffd" and not unicodedata.category(char).startswith("C"):
      is_cjk = 0x4E00 <= ord(char) <= 0x9FFF or 0x3400 <= ord(char) <= 0x4DBF
      cleaned.append(f" {char} " if is_cjk else char)
  text = "".join(cleaned)
  if lowercase:
    text = unicodedata.normalize("NFD", text)
    text = "".join(c for c in text if unicodedata.category(c) != "Mn").lower()
  words = []
  for chunk in text.split():
    word = ""
    for char in chunk:
      ascii_symbol = char.isascii() and not char.isalnum()
      if ascii_symbol or unicodedata.category(char).startswith("P"):
        words += [word, char]
        word = ""
      else:
        word += char
    words.append(word)
  ids = []
  for word in filter(None, words):
    pieces, start = [], 0
    while start < len(word) and len(word) <= 100:
      for end in range(len(word), start, -1):
        piece = ("##" if start else "") + word[start:end]
        if piece in vocab:
          pieces.append(vocab[piece])
          start = end
          break
      else:
        break
    ids += pieces if start == len(word) else [vocab["[UNK]"]]
  return ids


def ids_of(path) -> dict[str, int]:
  return {piece: i for i, piece in enumerate(path.read_text("utf-8").split("\n")[:-1])}


@pytest.mark.parametrize("lowercase", [True, False])
@pytest.mark.parametrize(
  "text",
  [
    "The UNAFFABLE café, naïve!",
    "cafe\u0301 and a lone \u0301 accent",
    "中国 is中国",
    "zero\u200bwidth, soft\u00adhyphen, nul\x00, bell\x07, tab\there, no\u00a0break",
    "line\nfeed\rand\u2028separator \ufeffmark \ufffd",
    "don’t—stop ... [MASK] [SEP] #hash_tag a+b=c",
    "straße STRASSE É é İ ﬁ Ω",
    "",
    "   ",
    "a" * 100 + " " + "a" * 101 + " b",
    "emoji 🙂 and math ∑x² ½",
  ],
)
def test_ids_are_berts(vocab_file, text, lowercase):
  own = tokenizer.load(vocab_file, lowercase)
  assert own.encode_batch([text]) == [bert(text, ids_of(vocab_file), lowercase)]


@pytest.mark.parametrize("lowercase", [True, False])
def test_remembering_words_changes_no_id(vocab_file, lowercase, monkeypatch):
  monkeypatch.setattr(tokenizer, "CACHE_ENTRIES", 50)
  own = tokenizer.load(vocab_file, lowercase)
  rng = random.Random(0)
  alphabet = "aabbcde  É é\u0301\u0300中.,'’-_\t\x00\u00a0\u200bß1\u2009"
  texts = ["".join(rng.choices(alphabet, k=rng.randrange(60))) for _ in range(400)]
  expected = [bert(text, ids_of(vocab_file), lowercase) for text in texts]
  found = [own.encode_batch(texts[i : i + 20]) for i in range(0, 400, 20)]
  assert [ids for batch in found for ids in batch] == expected


def test_a_byte_order_mark_is_no_part_of_the_first_piece(vocab_file):
  vocab = tokenizer.load(vocab_file).vocab
  vocab_file.write_text(vocab_file.read_text("utf-8"), "utf-8-sig")
  marked = tokenizer.load(vocab_file).vocab
  assert dataclasses.replace(marked, hash=vocab.hash) == vocab


def test_special_ids_come_from_names_not_places(tmp_path):
  path = tmp_path / "vocab.txt"
  path.write_text("the\n[MASK]\n[SEP]\n[UNK]\na\n[CLS]\n[PAD]\n", encoding="utf-8")
  vocab = tokenizer.load(path).vocab
  assert (vocab.pad, vocab.unk, vocab.cls, vocab.sep, vocab.mask) == (6, 3, 5, 2, 1)
  assert vocab.special_ids == (1, 2, 5, 6)
  assert vocab.size == 7


@pytest.mark.parametrize("name", SPECIAL)
def test_a_missing_special_token_is_refused_by_name(tmp_path, name):
  path = tmp_path / "vocab.txt"
  path.write_text("\n".join(s for s in [*SPECIAL, "the"] if s != name), encoding="utf-8")
  with pytest.raises(VocabError, match=name.strip("[]")):
    tokenizer.load(path)


@pytest.mark.parametrize(
  "name, content",
  [
    ("vocab.txt", b""),
    ("vocab.txt", b"[PAD]\n\xff\xfe\n"),
    ("tokenizer.json", b"{}"),
    ("spm.model", b"garbage"),
    ("vocab.bin", b"the\n"),
  ],
)
def test_a_file_that_is_no_vocabulary_is_refused_in_one_line(tmp_path, name, content):
  (tmp_path / name).write_bytes(content)
  with pytest.raises(VocabError) as error:
    tokenizer.load(tmp_path / name)
  assert str(tmp_path / name) in str(error.value) and "\n" not in str(error.value)


def trained(kind, folder, texts=TEXT, size=None):
  folder.mkdir(exist_ok=True)
  path = folder / ("v.txt" if kind == "wordpiece" else "v.model")
  return vocabulary.train(kind, iter(texts), size=size or SIZES[kind], path=path)


@pytest.mark.parametrize("kind", vocabulary.KINDS)
def test_training_twice_gives_the_same_file(tmp_path, kind):
  first, again = (trained(kind, tmp_path / name).path for name in ("first", "again"))
  assert first.read_bytes() == again.read_bytes()
  assert list(first.parent.iterdir()) == [first]


@pytest.mark.parametrize("kind", vocabulary.KINDS)
def test_text_never_becomes_a_special_id_and_comes_back(tmp_path, kind):
  own = trained(kind, tmp_path)
  ids = own.encode_batch(["the cafe [MASK] <mask> </s> [SEP]"])[0]
  assert not set(ids) & set(own.vocab.special_ids)
  ids = own.encode_batch(["The running bees"])[0]
  text = own.decode([own.vocab.cls, *ids, own.vocab.sep])
  assert text.split(" ", 1)[1].rsplit(" ", 1)[0] == "the running bees"
  assert own.vocab.size <= SIZES[kind] and max(ids) < own.vocab.size


@pytest.mark.parametrize(
  "kind, size", [("unigram", 5000), ("wordpiece", 12), ("sentences", 80), ("bpe", 4000)]
)
def test_a_vocabulary_that_cannot_be_trained_is_refused(tmp_path, kind, size):
  with pytest.raises(VocabError) as error:
    vocabulary.train(kind, iter(TEXT), size=size, path=tmp_path / "v.model")
  assert "\n" not in str(error.value)
  assert kind == "sentences" or f"data.vocab_size={size} " in str(error.value)
  assert list(tmp_path.iterdir()) == []


def test_tokenizer_json_gives_the_same_ids_as_its_vocab_txt(vocab_file, tmp_path):
  own = tokenizer.load(vocab_file)
  own._engine.add_special_tokens(SPECIAL)
  own._engine.enable_truncation(4)
  own._engine.save(str(tmp_path / "tokenizer.json"))
  again = tokenizer.load(tmp_path / "tokenizer.json")
  texts = ["the unaffable [MASK] café", "中 b"]
  assert again.encode_batch(texts) == tokenizer.load(vocab_file).encode_batch(texts)
  assert again.vocab.mask == own.vocab.mask and again.vocab.lowercase is None


def test_names_of_special_tokens_in_text_are_text_for_any_tokenizer_json(vocab_file, tmp_path):
  from tokenizers import pre_tokenizers

  engine = tokenizer.load(vocab_file)._engine
  engine.pre_tokenizer = pre_tokenizers.Whitespace()
  engine.add_special_tokens(SPECIAL)
  engine.save(str(tmp_path / "tokenizer.json"))
  own = tokenizer.load(tmp_path / "tokenizer.json")
  known = ids_of(vocab_file)
  expected = [known[piece] for piece in ("[", "m", "##a", "##s", "##k", "]", "the")]
  assert own.encode_batch(["[MASK] the"]) == [expected]


def vocabularies_with_names_as_pieces(folder):
  """Yields files whose model itself takes the name of a special token in a text for the token."""
  import sentencepiece
  from tokenizers import Tokenizer, models, pre_tokenizers

  letters = list("▁<s>/mak[M]xy")
  unigram = [(name, 0.0) for name in ("<pad>", "<s>", "</s>", "<unk>", "<mask>")]
  unigram += [(char, -3.0) for char in dict.fromkeys(letters)]
  ids = {piece: i for i, piece in enumerate(dict.fromkeys([*SPECIAL, "<s>", "x", "y", *letters]))}
  whole_words = pre_tokenizers.WhitespaceSplit()
  for name, model, pre_tokenizer in (
    ("unigram", models.Unigram(unigram, 3), pre_tokenizers.Metaspace()),
    ("wordpiece", models.WordPiece(ids, unk_token="[UNK]"), whole_words),
    ("wordlevel", models.WordLevel(ids, "[UNK]"), whole_words),
  ):
    engine = Tokenizer(model)
    engine.pre_tokenizer = pre_tokenizer
    engine.add_special_tokens([piece for piece in ids if len(piece) > 1])
    engine.save(str(folder / f"{name}.json"))
    yield folder / f"{name}.json"
  sentencepiece.SentencePieceTrainer.train(
    sentence_iterator=iter(["x y <s> [MASK] </s>"] * 9), model_prefix=str(folder / "spm"),
    vocab_size=30, hard_vocab_limit=False, pad_id=3, minloglevel=2,
    user_defined_symbols=["<mask>", "[MASK]"],
  )  # fmt: skip
  yield folder / "spm.model"


def test_names_that_are_pieces_of_the_model_are_text_with_their_characters(tmp_path):
  text = "x <s>y</s> [MASK] x"
  for path in vocabularies_with_names_as_pieces(tmp_path):
    own = tokenizer.load(path)
    ids, spans = own.encode_offsets([text])[0]
    assert not set(ids) & set(own.vocab.special_ids), path
    assert own.encode_batch([text, "x"]) == [ids, own.encode_batch(["x"])[0]]
    covered = {at for span in spans for at in range(*span)}
    assert covered == {i for i, char in enumerate(text) if char != " "} and spans == sorted(spans)


def test_no_shards_are_built_with_a_vocabulary_that_drops_unknown_text(tmp_path):
  from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

  ids = {piece: i for i, piece in enumerate([*SPECIAL, "a"])}
  engine = Tokenizer(models.BPE(ids, []))
  engine.normalizer = normalizers.BertNormalizer()
  engine.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
  config, path = files.load("base.py"), str(tmp_path / "tokenizer.json")
  config.data.vocab = path
  engine.save(path)
  assert tokenizer.load(path).encode_batch(["a xyz a"]) == [[5, 5]]  # of earlier shards
  with pytest.raises(VocabError, match="drops unknown text: give its model an unk_"):
    vocabulary.load_given(config)
  engine.model = models.BPE(ids, [], unk_token="[UNK]")
  engine.save(path)
  assert vocabulary.load_given(config).encode_batch(["a xyz a"]) == [[5, 1, 1, 1, 5]]


def test_a_tokenizer_json_that_fails_at_unknown_text_is_refused(tmp_path):
  from tokenizers import Tokenizer, models

  ids = {piece: i for i, piece in enumerate([*SPECIAL, "a"])}
  for model in (models.WordPiece(ids, unk_token="UNK"), models.BPE(ids, [], unk_token="UNK")):
    Tokenizer(model).save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(VocabError, match="tokenizer.json: cannot encode unknown text"):
      tokenizer.load(tmp_path / "tokenizer.json")


@pytest.fixture
def byte_level(tmp_path):
  """A byte-level BPE without a space before the first word, as ModernBERT's."""
  from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

  engine = Tokenizer(models.BPE())
  engine.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
  engine.decoder = decoders.ByteLevel()
  alphabet = pre_tokenizers.ByteLevel.alphabet()
  trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=SPECIAL, initial_alphabet=alphabet)
  engine.train_from_iterator(TEXT, trainer)
  engine.save(str(tmp_path / "tokenizer.json"))
  return tokenizer.load(tmp_path / "tokenizer.json")


@pytest.mark.parametrize("kind", ["packed", "segments"])
def test_shards_of_byte_level_bpe_keep_the_space_between_lines_and_sentences(byte_level, kind):
  v = byte_level.vocab
  spec = examples.ExampleSpec(64, kind, True, 0.0, 5, 1.0, 0.5, v.cls, v.sep, v.pad)
  work = chunks.WorkerSpec(str(byte_level.path.parent), v, spec, seed=0)
  text = "the cafe ran\nby a bee. The cab ran.\n下雨吗？下。 a  bee"
  chunk = chunks.Chunk(0, {"train": [text], "heldout": []}, len(text), last=True)
  made = chunks.encode(work, chunk).splits["train"].data
  ids = made if kind == "packed" else made[0]["ids"][: made[0]["length"]]
  decoded = byte_level.decode([i for i in ids if i not in v.special_ids])
  assert decoded == text.replace("\n", " ")


def test_tagged_words_of_byte_level_bpe_are_those_of_the_sentence(byte_level):
  words = ("the", "cab", ",", "a", "bee")
  sentence = tagging.Sentence(words, ("A", "B", "A", "A", "B"), "file:1")
  [window] = tagging.windows([sentence], byte_level, ("A", "B"), max_length=32)
  [whole] = byte_level.encode_batch([" ".join(words)])
  assert window.feature.ids[1:-1].tolist() == whole


@pytest.mark.parametrize("kind", vocabulary.KINDS)
def test_other_vocabularies_need_no_space_before_a_part(tmp_path, kind):
  own = trained(kind, tmp_path)
  assert own.spaced("a b", ["a", "b"]) == ["a", "b"]


def test_another_vocabulary_in_the_folder_is_refused(vocab_file, tmp_path):
  own = tokenizer.load(vocab_file)
  (tmp_path / "copy").mkdir()
  own.save(tmp_path / "copy")
  assert tokenizer.load_from(tmp_path / "copy", own.vocab).vocab == own.vocab
  with open(tmp_path / "copy" / "vocab.txt", "a", encoding="utf-8") as file:
    file.write("more\n")
  with pytest.raises(VocabError, match=f"{own.vocab.size + 1} entries.*{own.vocab.size} entries"):
    tokenizer.load_from(tmp_path / "copy", own.vocab)


# Any language.

LINES = {
  "hindi": "अच्छा लिखा है। क्या यह ठीक है? हाँ, ठीक है।",
  "vietnamese": "Tiếng Việt có dấu. Bạn có khỏe không? Vâng, tôi khỏe.",
  "chinese": "他说：“今天很好。”我们走吧！好的。",
  "arabic": "هل أنتَ بخير؟ نعم، أنا بخير.",
}


@pytest.mark.parametrize("kind", vocabulary.KINDS)
def test_marks_survive_a_trained_vocabulary(tmp_path, kind):
  size = {"wordpiece": 300, "unigram": 83, "bpe": 115}[kind]
  own = trained(kind, tmp_path, [*LINES.values()] * 20, size)
  for line, ids in zip(LINES.values(), own.encode_batch([*LINES.values()]), strict=True):
    assert own.vocab.unk not in ids
    expected = line if kind == "wordpiece" else unicodedata.normalize("NFKC", line)
    assert own.decode(ids).replace(" ", "") == expected.lower().replace(" ", "")


def test_a_wordpiece_alphabet_covers_a_script_of_many_characters(tmp_path):
  rng = random.Random(0)
  chars = [chr(0x4E00 + i) for i in range(600)]
  lines = ["".join(rng.choices(chars, range(600, 0, -1), k=40)) for _ in range(2000)]
  own = vocabulary.train("wordpiece", lines, size=2048, path=tmp_path / "v.txt")
  ids = [i for line in own.encode_batch(lines) for i in line]
  assert ids.count(own.vocab.unk) < 0.0005 * len(ids)


@pytest.mark.parametrize("lowercase", [True, False])
@pytest.mark.parametrize("strip_accents", [True, False, None])
def test_ids_are_hugging_faces_with_and_without_accents(tmp_path, lowercase, strip_accents):
  from tokenizers import BertWordPieceTokenizer

  texts = [*LINES.values(), *ODD_MARKS]
  path = tmp_path / "vocab.txt"
  vocabulary.train("wordpiece", texts, size=400, path=path, lowercase=False)
  theirs = BertWordPieceTokenizer(str(path), lowercase=lowercase, strip_accents=strip_accents)
  own = tokenizer.load(path, lowercase, strip_accents)
  for text in texts:
    assert own.encode_batch([text])[0] == theirs.encode(text, add_special_tokens=False).ids
  assert own.vocab.strip_accents == (lowercase if strip_accents is None else strip_accents)


ODD_MARKS = [
  "cafe\u0301 CAFÉ İ ẞ",
  "e\u0301\u0323 क\u093c क़",
  "ก็ ที่ נְקֻדָּה",
  "가\u1100\u1161 が か\u3099",
]


def test_accents_are_stripped_if_set_and_for_sentencepiece_it_is_an_error(tmp_path):
  line = LINES["vietnamese"]
  own = vocabulary.train("wordpiece", [line], size=90, path=tmp_path / "v.txt", strip_accents=True)
  assert own.decode(own.encode_batch(["Tiếng Việt"])[0]) == "tieng viet"
  with pytest.raises(
    VocabError, match="strip_accents=True needs data.vocab=wordpiece, not unigram"
  ):
    vocabulary.train("unigram", [line], size=90, path=tmp_path / "v.model", strip_accents=True)


@pytest.mark.parametrize("lowercase", [True, False, None])
def test_a_vocabulary_of_version_0_1_strips_accents_where_it_lower_cases(vocab_file, lowercase):
  saved = dataclasses.asdict(tokenizer.load(vocab_file).vocab) | {"lowercase": lowercase}
  del saved["strip_accents"]
  assert tokenizer.Vocab.from_json(saved).strip_accents is lowercase
