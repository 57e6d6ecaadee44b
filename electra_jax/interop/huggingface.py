"""Reads and writes Hugging Face folders: config.json, weights and tokenizers of FAMILIES."""

import contextlib
import dataclasses
import json
import math
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from electra_jax.core.batch import Batch
from electra_jax.core.transformer_config import TransformerConfig
from electra_jax.data.tokenizer import SPECIAL_NAMES, Tokenizer
from electra_jax.data.tokenizer import load as load_vocabulary
from electra_jax.interop import weight_files
from electra_jax.interop.deberta import DEBERTA
from electra_jax.interop.electra import ELECTRA
from electra_jax.interop.modernbert import LABELS, MODERNBERT
from electra_jax.interop.vocabularies import difference, engine_of, with_added
from electra_jax.interop.weights import ExchangeError, Family, from_hf, own_names, read_json, to_hf
from electra_jax.runtime import foreign

FAMILIES = {family.model_type: family for family in (ELECTRA, MODERNBERT, DEBERTA)}
TOKENIZER_CLASS = "PreTrainedTokenizerFast"  # of exported tokenizers
ORIGINAL_TOKENIZER = "electra_jax_tokenizer.json"  # the source of AutoTokenizer's tokenizer.json
NFC = "electra_jax_nfc"  # the field of tokenizer_config.json for `Vocab.nfc`
_BERTS = [f"{x}Tokenizer" for x in ("Bert", "DistilBert", "Electra")]
# {field of tokenizer_config.json: values that leave BERT's tokenizer unchanged}
BERT_RULES = {
  "tokenizer_class": (None, TOKENIZER_CLASS, *_BERTS, *(f"{x}Fast" for x in _BERTS)),
  "tokenize_chinese_chars": (None, True),
  "do_basic_tokenize": (None, True),
  "never_split": (None, []),
}
TRAINING = "electra_jax"  # the field of config.json for `sources.Source.training`
# The field of config.json for EXTRA_FIELDS that the family's fields do not determine.
NETWORK = "electra_jax_network"
# The labels of a detector: written now, written earlier, and the default.
DETECTORS = ([*LABELS], ["REPLACED"], ["LABEL_0"])
EXTRA_FIELDS = ("embedding_dropout", "ffn_dropout", "scaled_init")
# A release of DeBERTaV3 has its generator beside the discriminator.
GENERATOR, GENERATOR_CONFIG = "pytorch_model.generator.bin", "generator_config.json"
DETECTOR = "detector"  # the folder of a discriminator with its head, if `discriminator` has none
MASKED_LM = "masked_lm"  # the role of a discriminator with its second, masked-LM head
FOLDERS = ("discriminator", DETECTOR, MASKED_LM, "generator")  # of the networks of an export


# {pooling of token states to a text's vector: its name in sentence-transformers}
POOLINGS = {"mean": "pooling_mode_mean_tokens", "cls": "pooling_mode_cls_token"}


class Storage(NamedTuple):
  """Options for writing networks."""

  dtype: str = "float32"  # or bfloat16, float16
  max_bytes: float = math.inf  # of a file, unless a single tensor is larger
  pooling: str | None = None  # a key of POOLINGS: writes the main network for sentence-transformers
  onnx: bool = False  # also write model.onnx
  repo: str | None = None  # on the Hub: write a model card for its root


FLOAT32 = Storage()


def family_of(cfg: TransformerConfig) -> Family:
  """Returns the family in which a network is written."""
  return next((family for family in FAMILIES.values() if family.holds(cfg)), ELECTRA)


def config_json(
  cfg: TransformerConfig,
  head: str | None,
  pad_id: int,
  others: Mapping = MappingProxyType({}),
  dtype: str = "float32",
) -> dict:
  """Returns the content of config.json, plus the fields of `others`.

  Raises:
    ExchangeError: the family does not support the head or a field of the network.
  """
  family = family_of(cfg)
  if head not in family.classes:
    raise ExchangeError(f"Hugging Face's {family.name} has no {head}")
  fields = family.to_json(cfg, head)
  read = family.from_json(Path(), fields)
  unheld = {x: getattr(cfg, x) for x in EXTRA_FIELDS if getattr(cfg, x) != getattr(read, x)}
  return {
    "architectures": [family.classes[head]],
    "model_type": family.model_type,
    **fields,
    **({NETWORK: unheld} if unheld else {}),
    "pad_token_id": pad_id,
    "tie_word_embeddings": True,
    "dtype": dtype,
    **others,
  }


def check_form(cfg: TransformerConfig, head: str | None, decodes: bool) -> None:
  """Raises ExchangeError if a network, with a mask decoder if it `decodes`, cannot be written."""
  config_json(cfg, head, 0)
  if decodes and not (family := family_of(cfg)).decodes:
    raise ExchangeError(f"Hugging Face's {family.name} has no enhanced mask decoder")


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[None]:
  """Names a file in the errors that its content raises."""
  try:
    yield
  except ExchangeError:
    raise
  except (AttributeError, KeyError, TypeError, ValueError, ArithmeticError) as error:
    raise ExchangeError(
      f"{path}: not a config of {' or '.join(FAMILIES)}: {type(error).__name__} {error}"
    ) from None


def read_config(folder: str | Path) -> tuple[Family, TransformerConfig, str | None]:
  """Returns the family and the config of the network in a folder, and its head.

  Raises:
    ExchangeError: the model is an unsupported variant, or of no family in FAMILIES.
  """
  path = Path(folder) / "config.json"
  with _reading(path):
    c = foreign.read_json(path)
    family, cfg = _read_fields(path, c)
    if family.heads_by_tensors:
      names = _names(family, weight_files.find(path.parent))
      heads = family.heads_by_tensors.items()
      found = [head for head, start in heads if any(x.startswith(start) for x in names)]
    else:
      kinds = c.get("architectures") or []
      found = [head for head in family.pretraining_heads if family.classes[head] in kinds]
      # A token classifier may also be a task's tagger: only its labels make it a detector.
      if list((c.get("id2label") or {}).values()) not in DETECTORS:
        found = [head for head in found if not family.is_shared(head)]
  return family, cfg, found[0] if found else None


def _read_fields(path: Path, content: Mapping) -> tuple[Family, TransformerConfig]:
  """Returns the family and the config of a config.json."""
  kind = content["model_type"]
  if kind not in FAMILIES:
    raise ExchangeError(f"{path}: model type {kind!r} must be {' or '.join(FAMILIES)}")
  cfg = FAMILIES[kind].from_json(path, content)
  return FAMILIES[kind], dataclasses.replace(cfg, **content.get(NETWORK, {}))


def _names(family: Family, files: Sequence[Path]) -> list[str]:
  """Returns the names in transformers of the tensors in files."""
  return [*own_names(family, weight_files.names(files)).values()]


def save(
  folder: Path,
  cfg: TransformerConfig,
  network: Mapping,
  head: str | None,
  pad_id: int,
  others: Mapping = MappingProxyType({}),
  storage: Storage = FLOAT32,
) -> None:
  """Writes config.json and safetensors to a folder, with an index for several files.

  Raises:
    ExchangeError: as `config_json`, a weight exceeds the dtype, or a file cannot be written.
  """
  _write_json(folder / "config.json", config_json(cfg, head, pad_id, others, storage.dtype))
  dtype = jnp.dtype(storage.dtype)
  family = family_of(cfg)
  tensors = to_hf(family, cfg, network)
  tensors = family.two_labels(tensors) if head == "rtd_head" else tensors
  for name, x in tensors.items():
    if (largest := np.abs(x).max(initial=0)) > float(jnp.finfo(dtype).max):
      raise ExchangeError(f"{name} has {largest:.3g}, beyond {dtype}: use float32 or bfloat16")
  tensors = {name: x.astype(dtype, copy=False) for name, x in tensors.items()}
  if index := weight_files.save(folder, tensors, storage.max_bytes):
    _write_json(folder / weight_files.INDEX, index)


def save_tokenizer(
  folder: Path, tokenizer: Tokenizer, max_tokens: int, token_types: bool = True
) -> bool:
  """Writes files for an AutoTokenizer with the same ids; returns False if unsupported.

  As usual in Hugging Face, a special token's name in a text becomes the token.
  `sentencepiece_model.to_engine` lists the supported SentencePiece models.
  """
  from tokenizers import AddedToken, processors

  vocab, engine = tokenizer.vocab, engine_of(tokenizer)
  if engine is None:
    return False
  names = {role: engine.id_to_token(getattr(vocab, role)) for role in SPECIAL_NAMES}
  engine.add_special_tokens([AddedToken(n, special=True, normalized=False) for n in names.values()])
  cls, sep = names["cls"], names["sep"]
  engine.post_processor = processors.TemplateProcessing(
    single=f"{cls} $A {sep}",
    pair=f"{cls} $A {sep} $B:1 {sep}:1",
    special_tokens=[(cls, vocab.cls), (sep, vocab.sep)],
  )
  engine.save(str(folder / "tokenizer.json"))
  types = ["token_type_ids"] if token_types else []
  config = {
    "tokenizer_class": TOKENIZER_CLASS,
    "model_max_length": max_tokens,
    "model_input_names": ["input_ids", *types, "attention_mask"],
    **{f"{role}_token": name for role, name in names.items()},
  }
  if vocab.kind == "tokenizer.json":  # the original bytes, whose hash shards and runs compare
    shutil.copyfile(tokenizer.path, folder / ORIGINAL_TOKENIZER)
  else:
    tokenizer.save(folder)
  if vocab.nfc:
    config[NFC] = True
  if vocab.kind == "wordpiece":
    config["do_lower_case"] = vocab.lowercase
    if vocab.strip_accents != vocab.lowercase:
      config["strip_accents"] = vocab.strip_accents
  _write_json(folder / "tokenizer_config.json", config)
  return True


def save_sentence_transformer(
  folder: Path, width: int, pooling: str, normalize: bool = False
) -> None:
  """Adds files that make the folder of a network and its tokenizer a SentenceTransformer.

  The names are from before sentence-transformers 6, which reads them, too.

  Args:
    width: of the states.
    pooling: a key of POOLINGS.
    normalize: whether to scale the vectors to length 1.

  Raises:
    ValueError: `pooling` is unknown.
  """
  if pooling not in POOLINGS:
    raise ValueError(f"pooling must be {' or '.join(POOLINGS)}, got {pooling!r}")
  paths = {"Transformer": "", "Pooling": "1_Pooling", "Normalize": "2_Normalize"}
  modules = [
    {"idx": i, "name": f"{i}", "path": path, "type": f"sentence_transformers.models.{kind}"}
    for i, (kind, path) in enumerate(paths.items())
    if normalize or kind != "Normalize"
  ]
  for module in modules:
    (folder / module["path"]).mkdir(exist_ok=True)
  modes = {theirs: ours == pooling for ours, theirs in POOLINGS.items()}
  _write_json(folder / "modules.json", modules)
  _write_json(folder / "sentence_bert_config.json", {"do_lower_case": False})
  _write_json(folder / "1_Pooling" / "config.json", {"word_embedding_dimension": width, **modes})


def _write_json(path: Path, content: dict | list) -> None:
  text = json.dumps(content, indent=2, ensure_ascii=False) + "\n"
  path.write_text(text, encoding="utf-8", errors="backslashreplace")  # JSON of lone surrogates


def load_tokenizer(folder: Path) -> Tokenizer | None:
  """Returns the tokenizer of a folder, None without one.

  A vocab.txt is read as BERT's tokenizer, lower-casing unless tokenizer_config.json says otherwise.
  If a config changes another of BERT's rules, or the weights have as many entries as tokenizer.json
  alone, that is read instead. Added tokens follow a vocab.txt that has fewer entries than weights.

  Raises:
    ExchangeError: a file is damaged, or tokenizer.json is needed and missing, or differs from the
      vocab.txt.
  """
  network = read_json(folder / "config.json")
  size, kind = network.get("vocab_size"), network.get("tokenizer_class")
  config = {"tokenizer_class": kind, **read_json(folder / "tokenizer_config.json")}
  lowercase, strip_accents = config.get("do_lower_case", True), config.get("strip_accents")
  for name, value in {"do_lower_case": lowercase, "strip_accents": strip_accents}.items():
    if not isinstance(value, bool | None):
      raise ExchangeError(f"{folder}: {name} must be true or false, got {value!r:.40}")
  changed = [f"{k}={config[k]!r}" for k, right in BERT_RULES.items() if config.get(k) not in right]
  names = [ORIGINAL_TOKENIZER, "vocab.txt", "spm.model", "tokenizer.json"]
  names = [x for x in names if (folder / x).is_file() and not (changed and x == "vocab.txt")]
  if not names:
    if (folder / "vocab.txt").is_file():
      listed = ", ".join(changed)
      raise ExchangeError(f"{folder}: {listed} changes BERT's rules: add a tokenizer.json")
    return None
  rules = bool(lowercase), strip_accents, bool(config.get(NFC))
  if names[0] == "spm.model" and config.get("do_lower_case"):
    raise ExchangeError(f"{folder}: do_lower_case=true: a spm.model lower-cases by itself, or not")
  one, other = (load_vocabulary(folder / x, *rules) for x in (names[0], names[-1]))
  if names[0] == "vocab.txt" and one.vocab.size != size:
    try:
      if names[-1] == "vocab.txt" and (added := _added_tokens(folder, config)):
        return with_added(one, added)
    except (ValueError, TypeError, LookupError, AttributeError, OverflowError) as error:
      raise ExchangeError(f"{folder}: the added tokens of {one.path.name}: {error}") from None
    if other.vocab.size == size:
      return other
  if names[0] == "vocab.txt" and (text := difference(one, other)):
    raise ExchangeError(f"{one.path} differs from {names[-1]}: {text}; delete the wrong file")
  return one


def _added_tokens(folder: Path, config: Mapping) -> Mapping:
  """Returns {id: fields} of the tokens that transformers added to a vocab.txt."""
  if decoder := config.get("added_tokens_decoder"):
    return decoder
  named = [*config.items(), *read_json(folder / "special_tokens_map.json").items()]
  values = (v for k, v in named if k.endswith(("_token", "_special_tokens")))
  flat = (x for v in values for x in (v if isinstance(v, list) else [v]))
  special = {str(x.get("content") if isinstance(x, dict) else x) for x in flat}
  return {
    i: {"content": name, "special": name in special, "normalized": name not in special}
    for name, i in read_json(folder / "added_tokens.json").items()
  }


def load(folder: str | Path) -> tuple[TransformerConfig, str | None, dict]:
  """Returns the config, the head and the weights of the network in a folder.

  Raises:
    ExchangeError, FileNotFoundError: a file is missing, damaged, or does not fit.
  """
  folder = Path(folder)
  family, cfg, head = read_config(folder)
  return cfg, head, _weights(family, cfg, head, _files(folder), folder)


def _files(folder: Path) -> list[Path]:
  """Returns the files of a folder's weights; raises ExchangeError without one."""
  if files := weight_files.find(folder):
    return files
  missing = f"{folder / weight_files.WEIGHTS} is missing"
  if (folder / "adapter_config.json").is_file():
    missing += ": merge the adapter into its network: merge_and_unload().save_pretrained(DIR)"
  raise ExchangeError(missing)


def _weights(
  family: Family, cfg: TransformerConfig, head: str | None, files: list[Path], folder: Path
) -> dict:
  """Returns the network in files; errors name the file, or the folder of several."""
  try:
    tensors = weight_files.read(files)
    tensors = {name: tensors[x] for x, name in own_names(family, tensors).items()}
    tensors = family.one_logit(tensors) if head == "rtd_head" else tensors
    return from_hf(family, cfg, head, tensors)
  except ExchangeError as error:
    where = files[0] if len(files) == 1 else folder
    named = str(error).startswith(str(folder))
    raise ExchangeError(str(error) if named else f"{where}: {error}") from None


def load_generator(folder: Path, main: TransformerConfig) -> tuple[TransformerConfig, dict] | None:
  """Returns the config and the weights of a release's generator, None without its file.

  Without GENERATOR_CONFIG it has the fields of config.json and the layers of its tensors.

  Raises:
    ExchangeError: a file is damaged, or its width is not that of the discriminator `main`.
  """
  file, path = folder / GENERATOR, folder / GENERATOR_CONFIG
  if not file.is_file():
    return None
  with _reading(path):
    content = read_json(folder / "config.json") | read_json(path)
    numbers = re.findall(r"\.layer\.(\d+)\.", " ".join(weight_files.names([file])))
    content["num_hidden_layers"] = 1 + max(map(int, numbers), default=0)
    family, cfg = _read_fields(path, content)
  if cfg.hidden_size != main.hidden_size:
    raise ExchangeError(
      f"{file} has width {cfg.hidden_size}, the discriminator {main.hidden_size}: they are of"
      " different releases"
    )
  return cfg, _weights(family, cfg, "mlm_head", [file], folder)


def task_tensors(folder: str | Path) -> list[str]:
  """Returns the names of the heads' tensors that `load` drops."""
  family, _, head = read_config(folder)
  names = _names(family, weight_files.find(Path(folder)))
  names = [n for n in names if n.removeprefix(family.prefix).startswith(family.dropped(head))]
  return sorted({name.partition(".")[0] for name in names} if head else names)


def torch_network(folder: Path, head: str | None):
  """Loads the network of a folder with transformers, in float32, for inference."""
  import transformers

  transformers.utils.logging.set_verbosity_error()
  transformers.utils.logging.disable_progress_bar()
  kind = read_config(folder)[0].classes[head]
  return getattr(transformers, kind).from_pretrained(folder).float().eval()


def inputs(folder: Path, batch: Batch) -> dict[str, np.ndarray]:
  """Returns the int64 inputs [B, L] of a folder's network, by their names in transformers."""
  found = {"input_ids": batch.ids, "attention_mask": batch.padding_mask}
  if read_config(folder)[0].token_types:
    found["token_type_ids"] = batch.token_type_ids
  return {name: np.asarray(x, np.int64) for name, x in found.items()}


def one_array(outputs: Mapping[str, np.ndarray], head: str | None) -> np.ndarray:
  """Returns outputs, by their names in transformers, in the form of `torch_outputs`."""
  if "start_logits" in outputs:
    return np.stack([outputs["start_logits"], outputs["end_logits"]], -1)
  found = outputs["last_hidden_state" if head is None else "logits"]
  return found[..., 1] - found[..., 0] if head == "rtd_head" and found.ndim == 3 else found


def torch_outputs(folder: Path, head: str | None, batch: Batch) -> np.ndarray:
  """Returns the logits of a folder's network in transformers, computed in float32.

  [B, L] from a detector, [B, L, V or C] for tokens, [B, C] for texts, [B, L, 2] (start, end) for
  spans; without a head the states [B, L, D].
  """
  import torch

  with torch.no_grad():
    tensors = {name: torch.tensor(x) for name, x in inputs(folder, batch).items()}
    outputs = torch_network(folder, head)(**tensors)
  return one_array({name: x.numpy() for name, x in outputs.items()}, head)
