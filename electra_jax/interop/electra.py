"""Hugging Face's ELECTRA, and the names of the original's TF1 code."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path

from electra_jax.core.transformer_config import TransformerConfig
from electra_jax.interop.weights import ExchangeError, Family, Row, check_fixed, dense, norm

_L, _HF, _TF = "encoder/layers", "electra.encoder.layer.{i}", "{encoder}/encoder/layer_{i}"
TABLE: list[Row] = [
  *(
    Row(
      f"embeddings/{name}",
      f"electra.embeddings.{name}_embeddings.weight",
      f"{{embeddings}}/embeddings/{name}_embeddings",
    )
    for name in ("word", "position", "token_type")
  ),
  *norm(
    "embeddings/layer_norm", "electra.embeddings.LayerNorm", "{embeddings}/embeddings/LayerNorm"
  ),
  *dense("encoder/project", "electra.embeddings_project", "{encoder}/embeddings_project"),
  *(
    row
    for part, name in enumerate(("query", "key", "value"))
    for row in dense(
      f"{_L}/qkv", f"{_HF}.attention.self.{name}", f"{_TF}/attention/self/{name}", part
    )
  ),
  *dense(
    f"{_L}/attention_output", f"{_HF}.attention.output.dense", f"{_TF}/attention/output/dense"
  ),
  *norm(
    f"{_L}/attention_norm", f"{_HF}.attention.output.LayerNorm", f"{_TF}/attention/output/LayerNorm"
  ),
  *dense(f"{_L}/ffn_in", f"{_HF}.intermediate.dense", f"{_TF}/intermediate/dense"),
  *dense(f"{_L}/ffn_output", f"{_HF}.output.dense", f"{_TF}/output/dense"),
  *norm(f"{_L}/ffn_norm", f"{_HF}.output.LayerNorm", f"{_TF}/output/LayerNorm"),
  *dense("rtd_head/dense", "discriminator_predictions.dense", "discriminator_predictions/dense"),
  *dense(
    "rtd_head/logit",
    "discriminator_predictions.dense_prediction",
    "discriminator_predictions/dense_1",
  ),
  *dense("mlm_head/dense", "generator_predictions.dense", "generator_predictions/dense"),
  *norm(
    "mlm_head/layer_norm", "generator_predictions.LayerNorm", "generator_predictions/LayerNorm"
  ),
  Row("mlm_head/bias", "generator_lm_head.bias", "generator_predictions/output_bias"),
  # Fine-tuning heads have no fixed name in the original, which names them after the task.
  *dense("text_head/dense", "classifier.dense", ""),
  *dense("text_head/out_proj", "classifier.out_proj", ""),
  *dense("token_head/classifier", "classifier", ""),
  *dense("span_head/qa_outputs", "qa_outputs", ""),
]

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
# Fields of config.json with one value, in what is read and in what is written.
FIXED = {"hidden_act": "gelu", "type_vocab_size": 2}
# The same, in what is read.
READ_FIXED = {
  **FIXED, "is_decoder": False, "add_cross_attention": False, "position_embedding_type": "absolute"
}  # fmt: skip


def _to_json(cfg: TransformerConfig, head: str | None) -> dict:
  for field in dataclasses.fields(cfg):
    value = getattr(cfg, field.name)
    if field.name not in (*FIELDS, "compute") and value != field.default:
      raise ExchangeError(f"Hugging Face's ELECTRA does not support {field.name}={value!r}")
  return {
    **{theirs: getattr(cfg, ours) for ours, theirs in FIELDS.items()},
    **FIXED,
    "summary_type": "first",
    "summary_use_proj": True,
    "summary_activation": "gelu",
    "summary_last_dropout": 0.1,
  }


def _from_json(path: Path, content: Mapping) -> TransformerConfig:
  check_fixed(path, content, READ_FIXED)
  # Missing fields have ELECTRA's defaults, as in Hugging Face.
  return TransformerConfig(
    **{ours: content[theirs] for ours, theirs in FIELDS.items() if theirs in content}
  )


ELECTRA = Family(
  name="ELECTRA",
  model_type="electra",
  rows=TABLE,
  prefix="electra.",
  classes={
    "rtd_head": "ElectraForPreTraining",
    "mlm_head": "ElectraForMaskedLM",
    "text_head": "ElectraForSequenceClassification",
    "token_head": "ElectraForTokenClassification",
    "span_head": "ElectraForQuestionAnswering",
    None: "ElectraModel",
  },
  to_json=_to_json,
  from_json=_from_json,
  tied="generator_lm_head.weight",
  head_prefixes=("classifier.", "qa_outputs."),
  ignored=frozenset({"electra.embeddings.position_ids", "electra.embeddings.token_type_ids"}),
)
