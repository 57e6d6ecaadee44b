"""Converts networks to and from Hugging Face's ELECTRA; one table maps all weights, TF1's too.

A network is a tree of float32 arrays: {"embeddings", "encoder"} and a head such as "rtd_head" or
"mlm_head". Conversion changes only layouts, so a round trip is bit-exact.
"""

import dataclasses
import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import load_file, save_file

from electra_jax.core import networks
from electra_jax.core.batch import Batch
from electra_jax.core.params import named
from electra_jax.core.transformer_config import TransformerConfig
from electra_jax.data.tokenizer import SPECIAL_NAMES, Tokenizer
from electra_jax.interop import sentencepiece_model


class ExchangeError(ValueError):
  """Weights cannot be converted; the message is one line that names them."""


class Row(NamedTuple):
  """The names of one weight. In `hf` and `tf`, {i} is the index of a layer."""

  ours: str  # path in a network; layers are stacked along the first axis
  hf: str  # a kernel is [out, in]
  tf: str  # a kernel is [in, out]
  part: int | None = None  # of query, key, value: the index in our array [..., 3, heads, width]


def _dense(ours: str, hf: str, tf: str, part: int | None = None) -> list[Row]:
  return [
    Row(f"{ours}/kernel", f"{hf}.weight", f"{tf}/kernel", part),
    Row(f"{ours}/bias", f"{hf}.bias", f"{tf}/bias", part),
  ]


def _norm(ours: str, hf: str, tf: str) -> list[Row]:
  return [
    Row(f"{ours}/scale", f"{hf}.weight", f"{tf}/gamma"),
    Row(f"{ours}/bias", f"{hf}.bias", f"{tf}/beta"),
  ]


_L, _HF, _TF = "encoder/layers", "electra.encoder.layer.{i}", "{encoder}/encoder/layer_{i}"
TABLE: list[Row] = [
  *(
    Row(
      f"embeddings/{ours}",
      f"electra.embeddings.{theirs}.weight",
      f"{{embeddings}}/embeddings/{theirs}",
    )
    for ours, theirs in (
      ("word", "word_embeddings"),
      ("position", "position_embeddings"),
      ("token_type", "token_type_embeddings"),
    )
  ),
  *_norm(
    "embeddings/layer_norm", "electra.embeddings.LayerNorm", "{embeddings}/embeddings/LayerNorm"
  ),
  *_dense("encoder/project", "electra.embeddings_project", "{encoder}/embeddings_project"),
  *(
    row
    for part, name in enumerate(("query", "key", "value"))
    for row in _dense(
      f"{_L}/qkv", f"{_HF}.attention.self.{name}", f"{_TF}/attention/self/{name}", part
    )
  ),
  *_dense(
    f"{_L}/attention_output", f"{_HF}.attention.output.dense", f"{_TF}/attention/output/dense"
  ),
  *_norm(
    f"{_L}/attention_norm", f"{_HF}.attention.output.LayerNorm", f"{_TF}/attention/output/LayerNorm"
  ),
  *_dense(f"{_L}/ffn_in", f"{_HF}.intermediate.dense", f"{_TF}/intermediate/dense"),
  *_dense(f"{_L}/ffn_output", f"{_HF}.output.dense", f"{_TF}/output/dense"),
  *_norm(f"{_L}/ffn_norm", f"{_HF}.output.LayerNorm", f"{_TF}/output/LayerNorm"),
  *_dense("rtd_head/dense", "discriminator_predictions.dense", "discriminator_predictions/dense"),
  *_dense(
    "rtd_head/logit",
    "discriminator_predictions.dense_prediction",
    "discriminator_predictions/dense_1",
  ),
  *_dense("mlm_head/dense", "generator_predictions.dense", "generator_predictions/dense"),
  *_norm(
    "mlm_head/layer_norm", "generator_predictions.LayerNorm", "generator_predictions/LayerNorm"
  ),
  Row("mlm_head/bias", "generator_lm_head.bias", "generator_predictions/output_bias"),
  # Fine-tuning heads have no fixed name in the original, which names them after the task.
  *_dense("text_head/dense", "classifier.dense", ""),
  *_dense("text_head/out_proj", "classifier.out_proj", ""),
  *_dense("token_head/classifier", "classifier", ""),
  *_dense("span_head/qa_outputs", "qa_outputs", ""),
]
# Tensors in Hugging Face's files that are no weights: a tied matrix, constants of older versions.
TIED = "generator_lm_head.weight"
IGNORED = {"electra.embeddings.position_ids", "electra.embeddings.token_type_ids"}
HEADS = {"rtd_head": "ElectraForPreTraining", "mlm_head": "ElectraForMaskedLM"}
TASK_HEADS = {
  "text_head": "ElectraForSequenceClassification",
  "token_head": "ElectraForTokenClassification",
  "span_head": "ElectraForQuestionAnswering",
}
TASK_PREFIXES = ("classifier.", "qa_outputs.")
TOKENIZER_CLASS = "PreTrainedTokenizerFast"  # of what is written here
ORIGINAL_TOKENIZER = "electra_jax_tokenizer.json"  # the source of AutoTokenizer's tokenizer.json
TRAINING = "electra_jax"  # a field of config.json, of `likelihood.training`
CLASSES = {**HEADS, **TASK_HEADS, None: "ElectraModel"}


def shapes(cfg: TransformerConfig, head: str | None) -> dict:
  """Returns the shapes of a network with a head of HEADS or None."""

  def fresh():
    key = jax.random.key(0)
    network = {
      "embeddings": networks.init_embeddings(cfg, key),
      "encoder": networks.init_encoder(cfg, key),
    }
    if head:
      network[head] = networks.init_head(head, cfg, cfg.hidden_size, key)
    return network

  return jax.eval_shape(fresh)


def _walk(cfg: TransformerConfig, ours: dict) -> Iterator[tuple[Row, int | None, tuple, tuple]]:
  """Yields (row, layer, index into our array, shape in TF1) of each tensor of the other formats."""
  for row in TABLE:
    if row.ours not in ours:
      continue
    stacked = "{i}" in row.tf
    for i in range(cfg.num_layers) if stacked else (None,):
      index = () if i is None else (i,)
      shape = ours[row.ours].shape[1:] if stacked else ours[row.ours].shape
      if row.part is not None:  # [D, 3, H, d] or [3, H, d]
        index += (slice(None), row.part) if len(shape) == 4 else (row.part,)
        shape = (*shape[:-3], shape[-2] * shape[-1])
      elif row.ours.endswith("attention_output/kernel"):  # [H, d, D]
        shape = (shape[0] * shape[1], shape[2])
      yield row, i, index, shape


def _is_kernel(row: Row) -> bool:
  return row.ours.endswith("/kernel")


def to_hf(cfg: TransformerConfig, network: Mapping) -> dict[str, np.ndarray]:
  """Returns a network's tensors under Hugging Face's names."""
  ours = named(network)
  tensors = {}
  for row, i, index, shape in _walk(cfg, ours):
    x = np.asarray(ours[row.ours], np.float32)[index].reshape(shape)
    tensors[row.hf.format(i=i)] = np.ascontiguousarray(x.T if _is_kernel(row) else x)
  return tensors


def fill(cfg: TransformerConfig, wanted: dict, name_of, read, *, transposed: bool) -> dict:
  """Returns a network of the `wanted` shapes; read(name) returns a tensor or None.

  Raises:
    ExchangeError: tensors are missing or of another shape.
  """
  ours = {name: np.empty(x.shape, np.float32) for name, x in named(wanted).items()}
  problems = []
  for row, i, index, shape in _walk(cfg, ours):
    name = name_of(row, i)
    x = read(name)
    if x is None:
      problems.append(f"{name} is missing")
      continue
    turned = transposed and _is_kernel(row)
    if x.shape != (shape[::-1] if turned else shape):
      problems.append(f"{name} is {x.shape}, the network's is {shape[::-1] if turned else shape}")
      continue
    target = ours[row.ours]
    target[index] = (x.T if turned else x).reshape(target[index].shape)
  if problems:
    listed = "; ".join(problems[:8]) + (f"; and {len(problems) - 8} more" * (len(problems) > 8))
    raise ExchangeError(listed)
  return jax.tree.unflatten(jax.tree.structure(wanted), list(ours.values()))


def from_hf(cfg: TransformerConfig, head: str | None, tensors: Mapping[str, np.ndarray]) -> dict:
  """Returns the network of Hugging Face's tensors.

  Raises:
    ExchangeError: tensors are missing, of another shape, or unknown.
  """
  wanted, left = shapes(cfg, head), dict(tensors)
  if not any(name.startswith("electra.") for name in left):  # saved from a bare ElectraModel
    left = {f"electra.{name}": x for name, x in left.items()}
  if head is None:  # drop the task's head
    left = {name: x for name, x in left.items() if not name.startswith(TASK_PREFIXES)}
  network = fill(
    cfg, wanted, lambda row, i: row.hf.format(i=i), lambda n: left.pop(n, None), transposed=True
  )
  tied = left.pop(TIED, None)
  if tied is not None and not np.array_equal(tied, network["embeddings"]["word"]):
    raise ExchangeError(f"{TIED} differs from the word embeddings: it must be tied")
  if extra := sorted(left.keys() - IGNORED):
    raise ExchangeError(f"unknown tensors: {', '.join(extra[:8])}")
  return network


# Folders of Hugging Face.

# Fields of a network and their names in config.json, which has no others.
FIELDS = {
  "vocab_size": "vocab_size",
  "embedding_size": "embedding_size",
  "hidden_size": "hidden_size",
  "num_layers": "num_hidden_layers",
  "num_heads": "num_attention_heads",
  "ffn_size": "intermediate_size",
  "max_positions": "max_position_embeddings",
  "dropout": "hidden_dropout_prob",
  "attention_dropout": "attention_probs_dropout_prob",
  "init_stddev": "initializer_range",
  "layer_norm_eps": "layer_norm_eps",
}


def config_json(
  cfg: TransformerConfig,
  head: str | None,
  pad_id: int,
  labels: tuple[str, ...] = (),
  others: Mapping | None = None,
) -> dict:
  """Returns the content of config.json.

  Args:
    head: a key of CLASSES.
    labels: of a task's classes, in the order of the logits.
    others: fields of config.json that no network has.

  Raises:
    ExchangeError: Hugging Face's ELECTRA does not support a field of the network.
  """
  named = {"id2label": dict(enumerate(labels)), "label2id": {x: i for i, x in enumerate(labels)}}
  for field in dataclasses.fields(cfg):
    value = getattr(cfg, field.name)
    if field.name not in (*FIELDS, "compute") and value != field.default:
      raise ExchangeError(f"Hugging Face's ELECTRA does not support {field.name}={value!r}")
  return {
    "architectures": [CLASSES[head]],
    "model_type": "electra",
    **{theirs: getattr(cfg, ours) for ours, theirs in FIELDS.items()},
    "hidden_act": "gelu",
    "type_vocab_size": 2,
    "pad_token_id": pad_id,
    "summary_type": "first",
    "summary_use_proj": True,
    "summary_activation": "gelu",
    "summary_last_dropout": 0.1,
    "tie_word_embeddings": True,
    "dtype": "float32",
    **(named if labels else {}),
    **(others or {}),
  }


def read_config(folder: str | Path) -> tuple[TransformerConfig, str | None]:
  """Returns the config of the network in a folder, and its head.

  Raises:
    ExchangeError: the model is not ELECTRA, or an unsupported variant.
  """
  path = Path(folder) / "config.json"
  try:
    c = json.loads(path.read_text())
    if c["model_type"] != "electra":
      raise ExchangeError(f"{path}: model type {c['model_type']!r} is not electra")
    check_variant(path, c)
    # Missing fields have ELECTRA's defaults, as in Hugging Face.
    cfg = TransformerConfig(**{ours: c[theirs] for ours, theirs in FIELDS.items() if theirs in c})
  except (KeyError, TypeError, json.JSONDecodeError) as error:
    raise ExchangeError(f"{path}: no ELECTRA config: {type(error).__name__} {error}") from None
  named = [head for head, kind in HEADS.items() if kind in (c.get("architectures") or [])]
  return cfg, named[0] if named else None


def check_variant(path: Path, content: Mapping) -> None:
  """Raises ExchangeError if a config.json describes a variant that is not supported."""
  for field, right in (("hidden_act", "gelu"), ("type_vocab_size", 2)):
    if content.get(field, right) != right:
      raise ExchangeError(f"{path}: {field} is {content[field]!r}, here it is {right!r}")


def save(
  folder: Path,
  cfg: TransformerConfig,
  network: Mapping,
  head: str | None,
  pad_id: int,
  labels: tuple[str, ...] = (),
  others: Mapping | None = None,
) -> None:
  """Writes config.json and model.safetensors to an existing folder; raises as `config_json`."""
  text = json.dumps(config_json(cfg, head, pad_id, labels, others), indent=2) + "\n"
  (folder / "config.json").write_text(text)
  path = folder / "model.safetensors"
  try:
    save_file(to_hf(cfg, network), path, metadata={"format": "pt"})
  except SafetensorError as error:
    raise ExchangeError(f"{path} cannot be written: {error}") from None


def save_tokenizer(folder: Path, tokenizer: Tokenizer, max_tokens: int) -> bool:
  """Writes the files with which AutoTokenizer gives the same ids; returns False if unsupported.

  As usual in Hugging Face, a special token's name in a text becomes that token. `to_engine` lists
  the supported SentencePiece models.
  """
  from tokenizers import AddedToken, processors
  from tokenizers import Tokenizer as Engine

  vocab = tokenizer.vocab
  if vocab.kind == "sentencepiece":
    engine = sentencepiece_model.to_engine(tokenizer.path)
    if engine is None:
      return False
  else:
    engine = Engine.from_str(tokenizer.engine_json())
  names = {role: engine.id_to_token(getattr(vocab, role)) for role in SPECIAL_NAMES}
  engine.add_special_tokens([AddedToken(n, special=True, normalized=False) for n in names.values()])
  cls, sep = names["cls"], names["sep"]
  engine.post_processor = processors.TemplateProcessing(
    single=f"{cls} $A {sep}",
    pair=f"{cls} $A {sep} $B:1 {sep}:1",
    special_tokens=[(cls, vocab.cls), (sep, vocab.sep)],
  )
  engine.save(str(folder / "tokenizer.json"))
  config = {
    "tokenizer_class": TOKENIZER_CLASS,
    "model_max_length": max_tokens,
    "model_input_names": ["input_ids", "token_type_ids", "attention_mask"],
    **{f"{role}_token": name for role, name in names.items()},
  }
  if vocab.kind == "tokenizer.json":  # the original bytes: shards and runs compare their hash
    shutil.copyfile(tokenizer.path, folder / ORIGINAL_TOKENIZER)
  else:
    tokenizer.save(folder)
  if vocab.kind == "wordpiece":
    config["do_lower_case"] = vocab.lowercase
    if vocab.strip_accents != vocab.lowercase:
      config["strip_accents"] = vocab.strip_accents
  text = json.dumps(config, indent=2, ensure_ascii=False) + "\n"
  (folder / "tokenizer_config.json").write_text(text, encoding="utf-8")
  return True


def read_training(folder: Path) -> dict | None:
  """Returns what an export wrote of the training into config.json, None in other folders."""
  return json.loads((folder / "config.json").read_text()).get(TRAINING)


def weight_files(folder: Path) -> list[Path]:
  """Returns the safetensors files of a folder: one, or those that its index names; [] for none.

  Raises:
    ExchangeError: the index is damaged, or names a file that is not in the folder.
  """
  one, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
  if one.is_file() or not index.is_file():
    return [one] if one.is_file() else []
  try:
    names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
  except (ValueError, TypeError, KeyError, AttributeError) as error:
    raise ExchangeError(f"{index} is damaged: {type(error).__name__} {error}") from None
  there = {path.name for path in folder.iterdir()}
  if missing := [name for name in names if name not in there]:
    raise ExchangeError(f"{index} names {', '.join(missing[:8])}: not in its folder")
  return [folder / name for name in names]


def load(folder: str | Path) -> tuple[TransformerConfig, str | None, dict]:
  """Returns the config, the head and the weights of the network in a folder.

  Raises:
    ExchangeError: a file is missing, damaged, or does not fit; FileNotFoundError: no such folder.
  """
  folder = Path(folder)
  cfg, head = read_config(folder)
  files, tensors = weight_files(folder), {}
  if not files:
    raise ExchangeError(_no_weights(folder))
  for path in files:
    try:
      tensors |= load_file(path)
    except (SafetensorError, TypeError) as error:  # TypeError: a dtype that NumPy lacks
      raise ExchangeError(f"{path} is damaged: {error}") from None
  try:
    return cfg, head, from_hf(cfg, head, tensors)
  except ExchangeError as error:
    raise ExchangeError(f"{files[0] if len(files) == 1 else folder}: {error}") from None


def _no_weights(folder: Path) -> str:
  missing = f"{folder / 'model.safetensors'} is missing"
  if not any(folder.glob("pytorch_model*.bin*")):
    return missing
  kind = (json.loads((folder / "config.json").read_text()).get("architectures") or ["AutoModel"])[0]
  return (
    f'{missing}, there is pytorch_model.bin alone; to convert it: python -c "from transformers'
    f" import {kind} as M; M.from_pretrained('{folder}').save_pretrained('{folder}')\""
  )


def task_tensors(folder: str | Path) -> list[str]:
  """Returns the names of a task head's tensors, which `load` drops."""
  names = []
  for path in weight_files(Path(folder)):
    with safe_open(path, "np") as file:
      names += file.keys()
  return sorted(n for n in names if n.removeprefix("electra.").startswith(TASK_PREFIXES))


def torch_outputs(folder: Path, head: str | None, batch: Batch) -> np.ndarray:
  """Returns the logits that transformers computes with a folder's network.

  Span logits have start and end in the last axis; without a head, the result is the states.
  """
  import torch
  import transformers

  transformers.utils.logging.set_verbosity_error()
  transformers.utils.logging.disable_progress_bar()
  network = getattr(transformers, CLASSES[head]).from_pretrained(folder).eval()
  with torch.no_grad():
    outputs = network(
      input_ids=torch.tensor(batch.ids).long(),
      attention_mask=torch.tensor(batch.padding_mask).long(),
      token_type_ids=torch.tensor(batch.token_type_ids).long(),
    )
  if head == "span_head":
    return torch.stack([outputs.start_logits, outputs.end_logits], -1).float().numpy()
  return (outputs.last_hidden_state if head is None else outputs.logits).float().numpy()
