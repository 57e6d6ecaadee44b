"""Compares vocabularies by their entries and rules, which different files may share."""

import json
from collections.abc import Mapping

import numpy as np

from electra_jax.data import tokenizer
from electra_jax.data.tokenizer import SPECIAL_NAMES, Tokenizer
from electra_jax.interop import sentencepiece_model
from electra_jax.runtime import bucket
from electra_jax.runtime.workdir import replacing


def difference(one: Tokenizer, other: Tokenizer) -> str | None:
  """Returns the first difference between two vocabularies, None if they give the same ids.

  Compares SentencePiece models that `sentencepiece_model.to_engine` cannot convert by bytes.
  """
  if one.vocab == other.vocab:
    return None
  mine, theirs = engine_of(one), engine_of(other)
  if mine is None or theirs is None:
    return f"SHA-256 {one.vocab.hash[:12]}, not {other.vocab.hash[:12]}"
  a, b = (json.loads(engine.to_str()) for engine in (mine, theirs))
  if a["model"]["type"] != b["model"]["type"]:
    return f"a {a['model']['type']} model, not {b['model']['type']}"
  if one.vocab.size != other.vocab.size:
    return f"{one.vocab.size} entries, not {other.vocab.size}"
  for i in range(one.vocab.size):
    if mine.id_to_token(i) != theirs.id_to_token(i):
      return f"entry {i} is {mine.id_to_token(i)!r}, not {theirs.id_to_token(i)!r}"
  for part in ("normalizer", "pre_tokenizer", "model"):
    if found := _first(_canonical(a[part]), _canonical(b[part]), part):
      return found
  for role in (*SPECIAL_NAMES, "special_ids"):
    if getattr(one.vocab, role) != getattr(other.vocab, role):
      return f"{role} is {getattr(one.vocab, role)}, not {getattr(other.vocab, role)}"
  added = [[t for t in content["added_tokens"] if not t["special"]] for content in (a, b)]
  return None if added[0] == added[1] else "different added tokens"


def engine_of(tokenizer: Tokenizer):
  """Converts a tokenizer to the `tokenizers` library; None if it has no exact counterpart."""
  from tokenizers import Tokenizer as Engine

  if tokenizer.vocab.kind == "sentencepiece":
    return sentencepiece_model.to_engine(tokenizer.path)
  return Engine.from_str(tokenizer.engine_json())


def with_added(tokens: Tokenizer, added: Mapping[str, Mapping]) -> Tokenizer:
  """Returns a tokenizer with the added tokens {id: fields of AddedToken} of transformers.

  Its tokenizer.json, which shards and runs copy, is in the cache of this machine.

  Raises:
    ValueError, TypeError, LookupError, AttributeError, OverflowError: the ids do not follow the
      vocabulary's, or a field is wrong.
  """
  from tokenizers import AddedToken

  engine = engine_of(tokens)
  for i, fields in sorted(added.items(), key=lambda item: int(item[0])):
    engine.add_tokens([AddedToken(**fields)])
    if engine.token_to_id(fields["content"]) != int(i):
      raise ValueError(f"{fields['content']!r:.40} cannot have the id {i!r:.20}")
  text = engine.to_str()
  path = bucket.local_folder("tokenizers", text, "tokenizer.json")
  if not path.is_file():
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as temporary:
      temporary.write_text(text, "utf-8")
  return tokenizer.load(path)


def _canonical(rules):
  """Returns rules in a form that does not depend on the kind of file.

  strip_accents defaults to lowercase. A tokenizer.json may lose the last bit of a float32 score.
  """
  if isinstance(rules, dict) and rules.get("type") == "BertNormalizer":
    lowercase, accents = rules["lowercase"], rules["strip_accents"]
    accents = lowercase if accents is None else accents
    # The cause comes first, because only the first difference is reported.
    return {"nfc": False, "lowercase": lowercase, **rules, "strip_accents": accents}
  if isinstance(rules, dict) and rules.get("type") == "Sequence" and "normalizers" in rules:
    first, *others = map(_canonical, rules["normalizers"])
    if first == {"type": "NFC"} and len(others) == 1 and "nfc" in others[0]:
      return others[0] | {"nfc": True}
  if isinstance(rules, dict) and rules.get("type") == "Unigram":
    return {**rules, "vocab": [float(np.float32(score)) for _, score in rules["vocab"]]}
  return rules


def _first(one, other, name: str) -> str | None:
  """Describes the first field in which two JSON values differ."""
  if one == other:
    return None
  if not (isinstance(one, Mapping) and isinstance(other, Mapping)):
    return f"different {name}" if isinstance(one, list) else f"{name} is {one!r}, not {other!r}"
  key = next(k for k in {**one, **other} if one.get(k) != other.get(k))
  return _first(one.get(key), other.get(key), f"{name}.{key}")
