"""Hugging Face's DeBERTaV3 (`deberta-v2`), and the files that Microsoft released.

The detection head and the generator's mask decoder are in the files, but transformers has no class
for them: it computes the states of a discriminator, and other words than a generator.
"""

from collections.abc import Mapping
from pathlib import Path

from electra_jax.core.transformer_config import TransformerConfig
from electra_jax.interop import electra
from electra_jax.interop.weights import ExchangeError, Family, Row, check_fixed, check_layers

_HF = "deberta.encoder.layer.{i}"
_PARTS = {"kernel": "weight", "bias": "bias"}  # of a dense layer
_NORM = {"scale": "weight", "bias": "bias"}


def _rows(ours: str, hf: str, leaves: Mapping[str, str], part: int | None = None) -> list[Row]:
  return [Row(f"{ours}/{x}", f"{hf}.{y}", part=part) for x, y in leaves.items()]


TABLE = [
  Row("embeddings/word", "deberta.embeddings.word_embeddings.weight"),
  *_rows("embeddings/layer_norm", "deberta.embeddings.LayerNorm", _NORM),
  Row("encoder/distances/table", "deberta.encoder.rel_embeddings.weight"),
  *_rows("encoder/distances/norm", "deberta.encoder.LayerNorm", _NORM),
  *(
    row
    for part, name in enumerate(("query", "key", "value"))
    for row in _rows("encoder/layers/qkv", f"{_HF}.attention.self.{name}_proj", _PARTS, part)
  ),
  *_rows("encoder/layers/attention_output", f"{_HF}.attention.output.dense", _PARTS),
  *_rows("encoder/layers/attention_norm", f"{_HF}.attention.output.LayerNorm", _NORM),
  *_rows("encoder/layers/ffn_in", f"{_HF}.intermediate.dense", _PARTS),
  *_rows("encoder/layers/ffn_output", f"{_HF}.output.dense", _PARTS),
  *_rows("encoder/layers/ffn_norm", f"{_HF}.output.LayerNorm", _NORM),
  Row("mask_decoder/position", "deberta.embeddings.position_embeddings.weight"),
  *_rows("mlm_head/dense", "lm_predictions.lm_head.dense", _PARTS),
  *_rows("mlm_head/layer_norm", "lm_predictions.lm_head.LayerNorm", _NORM),
  Row("mlm_head/bias", "lm_predictions.lm_head.bias"),
  *_rows("rtd_head/first_norm", "mask_predictions.LayerNorm", _NORM),
  *_rows("rtd_head/dense", "mask_predictions.dense", _PARTS),
  *_rows("rtd_head/logit", "mask_predictions.classifier", _PARTS),
  *_rows("text_head/dense", "pooler.dense", _PARTS),
  *_rows("text_head/out_proj", "classifier", _PARTS),
  *_rows("token_head/classifier", "classifier", _PARTS),
  *_rows("span_head/qa_outputs", "qa_outputs", _PARTS),
]
# {field of a network: its name in config.json}
FIELDS = {ours: theirs for ours, theirs in electra.FIELDS.items() if ours != "embedding_size"}
FIELDS["position_buckets"] = "position_buckets"
# Of every DeBERTaV3: LAYERS in TransformerConfig, FIXED in config.json.
LAYERS = {
  "block": "post_norm",
  "norm": "layer_norm",
  "feed_forward": "gelu",
  "positions": "disentangled",
  "biases": True,
  "token_types": False,
  "qk_norm": False,
  "embedding_norm": True,
  "head_norm": False,
  "head_first_token": True,
  "direction": "both",
}
FIXED = {
  "hidden_act": "gelu",
  "relative_attention": True,
  "share_att_key": True,
  "position_biased_input": False,
  "norm_rel_ebd": "layer_norm",
  "max_relative_positions": -1,
  "type_vocab_size": 0,
  "pooler_hidden_act": "gelu",
}
POSITION_TERMS = ["p2c", "c2p"]
# What transformers takes for a field that config.json lacks.
DEFAULTS = {
  "relative_attention": False,
  "share_att_key": False,
  "position_biased_input": True,
  "norm_rel_ebd": "none",
  "conv_kernel_size": 0,
  "layer_norm_eps": 1e-7,
}


def _to_json(cfg: TransformerConfig, head: str | None) -> dict:
  rates = (x for x in ("embedding_dropout", "ffn_dropout") if getattr(cfg, x) is not None)
  check_layers("DeBERTaV3", cfg, head, {**LAYERS, **dict.fromkeys(rates, cfg.dropout)})
  return {
    **{theirs: getattr(cfg, ours) for ours, theirs in FIELDS.items()},
    **FIXED,
    "pos_att_type": POSITION_TERMS,
    "pooler_hidden_size": cfg.hidden_size,
    "pooler_dropout": 0,
    "legacy": False,  # the masked-LM head under the names of the release
  }


def _from_json(path: Path, content: Mapping) -> TransformerConfig:
  content = {**DEFAULTS, **content}
  width, terms = content["hidden_size"], content.get("pos_att_type") or []
  terms = terms.lower().split("|") if isinstance(terms, str) else terms
  limits = (-1, content["max_position_embeddings"])
  same = {
    **FIXED,
    "conv_kernel_size": 0,  # V2 has a convolution
    "embedding_size": width,
    "pooler_hidden_size": width,
  }
  if content.get("max_relative_positions") in limits:
    content["max_relative_positions"] = -1
  try:
    check_fixed(path, content, same)
    check_fixed(path, {"pos_att_type": sorted(terms)}, {"pos_att_type": sorted(POSITION_TERMS)})
  except ExchangeError as error:
    raise ExchangeError(f"{error}: of DeBERTa's networks, only V3's are read") from None
  sizes = {ours: content[theirs] for ours, theirs in FIELDS.items() if theirs in content}
  return TransformerConfig(**sizes, **LAYERS, embedding_size=width)


DEBERTA = Family(
  name="DeBERTaV3",
  model_type="deberta-v2",
  rows=TABLE,
  prefix="deberta.",
  classes={
    "rtd_head": "DebertaV2Model",
    "mlm_head": "DebertaV2ForMaskedLM",
    "text_head": "DebertaV2ForSequenceClassification",
    "token_head": "DebertaV2ForTokenClassification",
    "span_head": "DebertaV2ForQuestionAnswering",
    None: "DebertaV2Model",
  },
  to_json=_to_json,
  from_json=_from_json,
  tied="cls.predictions.decoder.weight",
  head_prefixes=("classifier.", "pooler.", "qa_outputs.", "lm_predictions.", "mask_predictions."),
  # In a discriminator `_weight` is what it adds to its generator's words: `weight` is the sum.
  ignored=frozenset(
    {
      "deberta.embeddings.position_embeddings.weight",
      "deberta.embeddings.position_embeddings._weight",
      "deberta.embeddings.word_embeddings._weight",
      "deberta.embeddings.position_ids",
      "cls.predictions.decoder.bias",
    }
  ),
  heads_by_tensors={"rtd_head": "mask_predictions.", "mlm_head": "lm_predictions."},
  # The names of transformers' masked-LM head with legacy=True, which computes the same.
  renamed={
    "cls.predictions.transform.": "lm_predictions.lm_head.",
    "cls.predictions.bias": "lm_predictions.lm_head.bias",
  },
  token_types=False,
  spare_words=True,
  holds=lambda cfg: cfg.positions == LAYERS["positions"],
)
