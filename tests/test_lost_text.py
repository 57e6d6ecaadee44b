"""Tests that a build says what it lost of its text, in characters, and reads text in any form."""

import json
import random
import re
import unicodedata
from pathlib import Path

import pytest
from test_build import contents, make_config
from test_tokenizer import LINES, SPECIAL, byte_level, trained

from electra_jax.data import build, characters, shards, tokenizer, vocabulary
from electra_jax.interop import huggingface, vocabularies
from electra_jax.interop.sources import vocab_of

byte_level = byte_level  # a fixture
SIZES = {"wordpiece": 300, "unigram": 83, "bpe": 115}
FORMS = ("NFC", "NFD")
ODD = ["a<\u0338b", "e\u0302\u0323 \u00ea\u0323", "\u1100\u1161\u11a8\u1102", "I\u0307 \u0344"]


@pytest.fixture(scope="module", params=vocabulary.KINDS)
def own(request, tmp_path_factory):
  texts = [*LINES.values()] * 20
  return trained(request.param, tmp_path_factory.mktemp(request.param), texts, SIZES[request.param])


def forms(text: str) -> list[str]:
  return [unicodedata.normalize(form, text) for form in FORMS]


def test_a_trained_vocabulary_reads_composed_and_decomposed_text_alike(own):
  for text in [*LINES.values(), *ODD]:
    composed, decomposed = forms(text)
    ids = own.encode_batch([composed, decomposed, text])
    assert ids[0] == ids[1] == ids[2], ascii(text)
    found = [own.encode_offsets([x])[0] for x in (composed, decomposed)]
    assert found[0][0] == found[1][0] == ids[0]
  for text in [*LINES.values(), *ODD[:1]]:  # in others two tokens share a character
    composed, decomposed = forms(text)
    spans = [own.encode_offsets([x])[0][1] for x in (composed, decomposed)]
    for (a, b), (c, d) in zip(*spans, strict=True):
      assert composed[a:b] == unicodedata.normalize("NFC", decomposed[c:d])


def test_an_export_reads_both_forms_and_comes_back_as_it_was(own, tmp_path):
  from tokenizers import Tokenizer

  assert huggingface.save_tokenizer(tmp_path, own, 64)
  (tmp_path / "config.json").write_text("{}")
  engine = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
  for text in LINES.values():
    expected = [own.vocab.cls, *own.encode_batch([text])[0], own.vocab.sep]
    assert [engine.encode(x).ids for x in forms(text)] == [expected, expected]
  assert huggingface.load_tokenizer(tmp_path).vocab == own.vocab
  alone = tokenizer.load(tmp_path / "tokenizer.json")
  text = "".join(ODD)
  assert alone.encode_batch([text]) == own.encode_batch([text])


def test_earlier_vocabularies_are_read_as_before_and_differ_by_name(tmp_path):
  own = trained("wordpiece", tmp_path, [*LINES.values()], 300)
  saved = json.loads(json.dumps(vars(own.vocab)))
  del saved["nfc"]
  own.save(tmp_path)
  earlier = tokenizer.load_from(tmp_path, tokenizer.Vocab.from_json(saved))
  assert not earlier.vocab.nfc
  composed, decomposed = forms(LINES["vietnamese"])
  assert earlier.encode_batch([composed]) == own.encode_batch([composed])
  assert earlier.vocab.unk in earlier.encode_batch([decomposed])[0]
  assert vocabularies.difference(own, earlier) == "normalizer.nfc is True, not False"


def test_a_given_vocabulary_is_read_by_the_manifest_beside_it(tmp_path, capsys):
  lines = [f"{LINES['vietnamese']} {i}" for i in range(99)]
  for folder, form in zip("ab", FORMS, strict=True):
    (tmp_path / folder).mkdir()
    texts = "\n\n".join(unicodedata.normalize(form, line) for line in lines)
    (tmp_path / f"{form}.txt").write_text(texts, "utf-8")
  rules = {"sources": f"text:{tmp_path}/NFC.txt", "vocab": "wordpiece", "vocab_size": 300}
  first = make_config(tmp_path / "a", texts, holdout_frac=0.0, **rules)
  build.build(first)
  given = Path(first.data.dir) / "vocab.txt"
  rules = {"sources": f"text:{tmp_path}/NFD.txt", "strip_accents": False, "holdout_frac": 0.0}
  second = make_config(tmp_path / "b", texts, vocab=str(given), **rules)
  build.build(second)
  bins = ({k: v for k, v in contents(x.data.dir).items() if "bin" in k} for x in (first, second))
  assert next(bins) == next(bins)
  assert "unknown, " not in capsys.readouterr().out
  alone = tmp_path / "alone.txt"
  alone.write_bytes(given.read_bytes())
  second.data.vocab, second.data.dir = str(alone), str(tmp_path / "c")
  build.build(second)
  noted = re.search(
    r"note: (.*)% of the char.*\(NFD\).*: set data.nfc=true", capsys.readouterr().out
  )
  assert float(noted[1]) > 20
  second.data.nfc, second.data.dir = True, str(tmp_path / "d")
  build.build(second)
  assert "unknown, " not in capsys.readouterr().out and vocab_of(second.data.dir).nfc


def spelled_out(own, texts) -> int:
  """Counts the characters of unknown tokens by the spans of whole texts."""
  found = own.encode_offsets(texts)
  return sum(
    b - a
    for ids, spans in found
    for i, (a, b) in zip(ids, spans, strict=True)
    if i == own.vocab.unk
  )


def other_rules(folder) -> tokenizer.Tokenizer:
  """A WordPiece tokenizer that is not BERT's."""
  from tokenizers import Tokenizer, models, pre_tokenizers

  ids = {piece: i for i, piece in enumerate([*SPECIAL, "a", "##a", "b", "##b"])}
  engine = Tokenizer(models.WordPiece(ids, unk_token="[UNK]", max_input_chars_per_word=20))
  engine.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
  engine.save(str(folder / "tokenizer.json"))
  return tokenizer.load(folder / "tokenizer.json")


@pytest.mark.parametrize("kind", [*vocabulary.KINDS, "other", "byte_level"])
def test_unknown_characters_are_those_of_unknown_tokens(kind, tmp_path, request):
  if kind == "byte_level":
    own = request.getfixturevalue(kind)
  else:
    own = other_rules(tmp_path) if kind == "other" else trained(kind, tmp_path)
  rng, runs = random.Random(0), ["a", "b", "ж", "ж" * 7, "中", "-", "(", "e\u0301", " ", "[MASK]"]
  texts = ["".join(rng.choices(runs, k=30)) for _ in range(99)] + ["ab" * 75, "a" * 101 + ".ж"]
  for encode in (own.encode_batch, own.encode_offsets, own.encode_batch):
    with own.counting() as counts:
      encode(texts)
    composed = list(map(characters.compose, texts)) if own.vocab.nfc else texts
    assert sum(counts[key] for key in characters.LOST) == spelled_out(own, composed)
    assert counts[characters.ALL] == len("".join(composed).replace(" ", ""))
  long = 150 + 101 if kind in ("wordpiece", "other") else 0
  assert counts[characters.LONG] >= long and (long or not counts[characters.LONG])


def notes(folder, text, capsys, **fields) -> list[str]:
  (folder / "text.txt").write_text(text, "utf-8")
  given = {"sources": f"text:{folder}/text.txt", "vocab": "wordpiece", "vocab_size": 100}
  config = make_config(folder, text, **(given | fields))
  build.build(config, overwrite=True)
  return re.findall(r"note: (.*)", capsys.readouterr().out)


def test_notes_begin_with_the_characters_that_are_lost_and_why(tmp_path, capsys):
  rng = random.Random(0)
  words = ["".join(rng.choices("กขคงจ", k=n)) for n in (2, 3, 4, 200, 300)]
  text = "\n\n".join(" ".join(rng.sample(words, 5)) for _ in range(60))
  first, *others = notes(tmp_path, text, capsys, seq_length=32)
  assert first.startswith("98.2% of the characters are unknown, in words that are too long")
  assert first.endswith("above 100 characters; set data.vocab=unigram, which splits words")
  assert any("more padding" in note for note in others)
  assert any("data.holdout_frac=0.1 held out" in note for note in others)
  found = notes(tmp_path, text, capsys, seq_length=32, vocab="unigram", vocab_size=18)
  assert not any("unknown" in note for note in found)


def test_a_vocabulary_of_another_script_is_named(tmp_path, capsys, byte_level):
  text = "\n\n".join(["съешь ещё этих мягких булок"] * 50)
  english = trained("wordpiece", tmp_path).path
  assert (
    "vocabulary cannot spell: train one on this text"
    in notes(tmp_path, text, capsys, vocab=str(english))[0]
  )
  assert "tokens for a character" in notes(tmp_path, text, capsys, vocab=str(byte_level.path))[0]


def test_parts_of_earlier_versions_are_joined(tmp_path, capsys, monkeypatch):
  config = make_config(tmp_path)
  with monkeypatch.context() as earlier:
    earlier.setattr(tokenizer.Tokenizer, "_named", lambda self, texts, found, suspects: [])
    build.build(config)
  assert shards.read_manifest(config.data.dir)["splits"]["train"]["characters"] == 0
  assert re.search(r"train │ .* │ +0 │ +0.00% │", capsys.readouterr().out)


def test_text_that_is_discarded_behind_short_examples_is_noted(tmp_path, capsys):
  rng = random.Random(0)
  lines = [" ".join(rng.choices("abcdefgh", k=rng.randint(5, 14))) + "." for _ in range(2000)]
  for kind, noted in (("segments", True), ("packed", False)):
    found = notes(tmp_path, " ".join(lines), capsys, seq_length=16, examples=kind, holdout_frac=0)
    assert any("% of the characters are discarded" in note for note in found) == noted


# What a tokenizer.json may hold.


def changed(own, **settings) -> Path:
  content = json.loads(own.path.read_text("utf-8"))
  content["model"] |= settings.pop("model", {})
  path = own.path.with_name("changed.json")
  path.write_text(json.dumps(content | settings), "utf-8")
  return path


CUT = {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}


def test_settings_that_cut_or_draw_are_switched_off_and_noted(byte_level, tmp_path, capsys):
  text = "the cat sat on the mat, the cat sat"
  loaded = tokenizer.load(changed(byte_level, model={"dropout": 0.9}, truncation=CUT))
  expected = byte_level.encode_batch([text])
  assert all(loaded.encode_batch([text]) == expected for _ in range(20))
  config = make_config(tmp_path, vocab=str(loaded.path))
  build.build(config)
  noted = "note: switched off BPE dropout 0.9, truncation to 3 tokens of"
  assert noted in capsys.readouterr().out
  assert huggingface.save_tokenizer(tmp_path, loaded, 64)
  saved = json.loads((tmp_path / "tokenizer.json").read_text("utf-8"))
  assert not saved["model"]["dropout"] and not saved["truncation"]


def test_ids_far_above_the_number_of_entries_are_refused(byte_level):
  model = json.loads(byte_level.path.read_text("utf-8"))["model"]
  path = changed(byte_level, model={"vocab": model["vocab"] | {"far": 1 << 31}})
  with pytest.raises(tokenizer.VocabError, match="changed.json: 'far' has id 2147483648, but the"):
    tokenizer.load(path)


def test_lone_surrogates_are_refused_with_their_place(own):
  for encode in (own.encode_batch, own.encode_offsets):
    with pytest.raises(ValueError, match=r"U\+D83D at character 3 of 'so \\ud83d' is half a char"):
      encode(["a text", "so \ud83d"])


# Words that cannot be entries.


def test_words_that_cannot_be_entries_are_not_trained_on(tmp_path, capsys):
  base = ["the cat sat on the mat " * 3, "mat-cat " * 9]
  run = "".join(random.Random(0).choices("thecasonm", k=64_000))
  files = []
  joined = [[run, f"{run}-mat "], ["-".join(["mat-cat"] * 99)]]
  for i, more in enumerate((["- mat "], joined[0], ["mat - cat - " * 98 + "mat - cat"], joined[1])):
    path = tmp_path / f"{i}.txt"
    vocabulary.train("wordpiece", [*base, *more], size=60, path=path)
    files.append(path.read_text("utf-8"))
    assert ("2 words above 100 characters, 128,000 characters" in capsys.readouterr().out) == (
      i == 1
    )
  assert files[0] == files[1] and files[2] == files[3]


@pytest.mark.parametrize(
  ("letter", "share", "why"), [("я", 0.25, "spell"), ("e\u0301", 2 / 7, "NFD")]
)
def test_a_prediction_says_what_the_vocabulary_does_not_know(letter, share, why, tmp_path):
  path = tmp_path / "vocab.txt"
  path.write_text("\n".join([*SPECIAL, "a", "e", "é"]) + "\n", "utf-8")
  own = tokenizer.load(path, lowercase=False)
  with own.counting() as counts:
    own.encode_batch([f"a a a {letter}", "a e" * (why == "NFD")])
  assert characters.note(counts).startswith(f"note: {share:.1%} of the characters are unknown")
  assert why in characters.note(counts)
  with own.counting() as counts:
    own.encode_batch(["a " * 95 + f"{letter[0]} " * 5])
  assert characters.note(counts) == ""
