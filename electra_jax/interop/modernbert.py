"""Hugging Face's ModernBERT; a detector is a token classifier with the two labels `LABELS`."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from electra_jax.core.transformer_config import TransformerConfig
from electra_jax.interop.weights import (
  ExchangeError,
  Family,
  Row,
  check_fixed,
  check_layers,
  label_fields,
)

LABELS = ("ORIGINAL", "REPLACED")  # of a detector

_L, _HF = "encoder/layers", "model.layers.{i}"
_HEAD = {"dense/kernel": "head.dense.weight", "layer_norm/scale": "head.norm.weight"}

_TASKS = {
  "modern_text_head": "ModernBertForSequenceClassification",
  "modern_text_mean_head": "ModernBertForSequenceClassification",
  "modern_token_head": "ModernBertForTokenClassification",
  "modern_span_head": "ModernBertForQuestionAnswering",
}
_OF_MEAN = ("modern_text_mean_head",)  # they read the mean of the token states, not [CLS]
TABLE = [
  Row("embeddings/word", "model.embeddings.tok_embeddings.weight"),
  Row("embeddings/layer_norm/scale", "model.embeddings.norm.weight"),
  Row(f"{_L}/attention_norm/scale", f"{_HF}.attn_norm.weight", first=1),
  Row(f"{_L}/qkv/kernel", f"{_HF}.attn.Wqkv.weight"),
  Row(f"{_L}/attention_output/kernel", f"{_HF}.attn.Wo.weight"),
  Row(f"{_L}/ffn_norm/scale", f"{_HF}.mlp_norm.weight"),
  Row(f"{_L}/ffn_in/kernel", f"{_HF}.mlp.Wi.weight"),
  Row(f"{_L}/ffn_output/kernel", f"{_HF}.mlp.Wo.weight"),
  Row("encoder/final_norm/scale", "model.final_norm.weight"),
  *(Row(f"mlm_head/{ours}", theirs) for ours, theirs in _HEAD.items()),
  Row("mlm_head/bias", "decoder.bias"),
  *(
    Row(f"{head}/{ours}", theirs)
    for head, last in {"rtd_head": "logit", **dict.fromkeys(_TASKS, "classifier")}.items()
    for ours, theirs in {
      **_HEAD,
      f"{last}/kernel": "classifier.weight",
      f"{last}/bias": "classifier.bias",
    }.items()
  ),
]
# {field of a network: (its name in config.json, the default in transformers)}
FIELDS = {
  "vocab_size": ("vocab_size", 50_368),
  "hidden_size": ("hidden_size", 768),
  "num_layers": ("num_hidden_layers", 22),
  "num_heads": ("num_attention_heads", 12),
  "ffn_size": ("intermediate_size", 1152),
  "max_positions": ("max_position_embeddings", 8192),
  "attention_dropout": ("attention_dropout", 0.0),
  "embedding_dropout": ("embedding_dropout", 0.0),
  "ffn_dropout": ("mlp_dropout", 0.0),
  "init_stddev": ("initializer_range", 0.02),
  "layer_norm_eps": ("norm_eps", 1e-5),
  "window": ("local_attention", 128),
}
# Fixed fields of every ModernBERT: LAYERS in TransformerConfig, FIXED in config.json.
LAYERS = {
  "block": "pre_norm",
  "norm": "layer_norm_no_bias",
  "feed_forward": "geglu",
  "positions": "rope",
  "biases": False,
  "token_types": False,
  "qk_norm": False,
  "embedding_norm": True,
  "first_norm": False,
  "head_norm": True,
  "head_first_token": False,
  "direction": "both",
}
FIXED = {
  "hidden_activation": "gelu",
  "attention_bias": False,
  "mlp_bias": False,
  "norm_bias": False,
  "classifier_bias": False,
  "classifier_activation": "gelu",
  "decoder_bias": True,
}
OUTPUT_DROPOUT = "attention_output_dropout"  # our field; transformers has one rate for both
GLOBAL, LOCAL = "full_attention", "sliding_attention"  # in layer_types and rope_parameters


def _to_json(cfg: TransformerConfig, head: str | None) -> dict:
  check_layers("ModernBERT", cfg, head, LAYERS)
  unset = [k for k in ("embedding_dropout", "ffn_dropout") if getattr(cfg, k) is None]
  known = dataclasses.replace(cfg, **dict.fromkeys(unset, cfg.dropout))
  thetas = {GLOBAL: cfg.rope_theta, LOCAL: cfg.local_rope_theta}
  return {
    **{theirs: getattr(known, ours) for ours, (theirs, _) in FIELDS.items()},
    **FIXED,
    OUTPUT_DROPOUT: cfg.dropout,
    "layer_types": [LOCAL if i % cfg.global_every else GLOBAL for i in range(cfg.num_layers)],
    "rope_parameters": {
      kind: {"rope_type": "default", "rope_theta": theta} for kind, theta in thetas.items()
    },
    # For transformers before version 5.
    "global_attn_every_n_layers": cfg.global_every,
    "global_rope_theta": cfg.rope_theta,
    "local_rope_theta": cfg.local_rope_theta,
    "classifier_pooling": "mean" if head in _OF_MEAN else "cls",
    **label_fields(LABELS if head == "rtd_head" else ()),
  }


def two_labels(tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
  """Converts a detector's logit x to logits [0, x] of LABELS, whose softmax is sigmoid(x)."""
  return {
    name: np.concatenate([np.zeros_like(x), x]) if name.startswith("classifier.") else x
    for name, x in tensors.items()
  }


def one_logit(tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
  """Converts a detector's two logits to one, the second minus the first."""
  return {
    name: np.diff(x, axis=0) if name.startswith("classifier.") and len(x) == 2 else x
    for name, x in tensors.items()
  }


def _from_json(path: Path, content: Mapping) -> TransformerConfig:
  check_fixed(path, content, FIXED)
  sizes = {ours: content.get(theirs, default) for ours, (theirs, default) in FIELDS.items()}
  thetas = _thetas(path, content)
  return TransformerConfig(
    **sizes,
    **LAYERS,
    scaled_init=True,
    embedding_size=sizes["hidden_size"],
    dropout=content.get(OUTPUT_DROPOUT, sizes["attention_dropout"]),
    global_every=_global_every(path, content, sizes["num_layers"]),
    rope_theta=thetas[GLOBAL],
    local_rope_theta=thetas[LOCAL],
  )


def _global_every(path: Path, content: Mapping, count: int) -> int:
  """Returns n where layers 0, n, 2 n, ... of `count` layers have global attention."""
  types = content.get("layer_types")
  if types is None:
    return content.get("global_attn_every_n_layers", 3)
  local = [kind == LOCAL for kind in types]
  for every in range(1, count + 1):
    if local == [bool(i % every) for i in range(count)]:
      return every
  raise ExchangeError(f"{path}: layer_types must have one global layer in every n: {types}")


def _thetas(path: Path, content: Mapping) -> dict[str, float]:
  """Returns the base of the rotary frequencies in GLOBAL and LOCAL layers."""
  found = content.get("rope_parameters")
  if found is None:
    theta = content.get("global_rope_theta", 160_000.0)
    local = content.get("local_rope_theta", 10_000.0)
    return {GLOBAL: theta, LOCAL: theta if local is None else local}
  types = {kind: found[kind].get("rope_type", "default") for kind in (LOCAL, GLOBAL)}
  if set(types.values()) != {"default"}:
    raise ExchangeError(f"{path}: rope_type must be default, got {types}")
  return {kind: found[kind]["rope_theta"] for kind in (LOCAL, GLOBAL)}


MODERNBERT = Family(
  name="ModernBERT",
  model_type="modernbert",
  rows=TABLE,
  prefix="model.",
  classes={
    "rtd_head": "ModernBertForTokenClassification",
    "mlm_head": "ModernBertForMaskedLM",
    **_TASKS,
    None: "ModernBertModel",
  },
  to_json=_to_json,
  from_json=_from_json,
  tied="decoder.weight",
  two_labels=two_labels,
  one_logit=one_logit,
  head_prefixes=("head.", "classifier.", "decoder."),
  token_types=False,
  token_ids={
    "cls_token_id": "cls",
    "sep_token_id": "sep",
    "bos_token_id": "cls",
    "eos_token_id": "sep",
  },
  holds=lambda cfg: cfg.block == LAYERS["block"],
)
