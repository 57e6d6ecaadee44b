"""Weight and field names of Hugging Face's ELECTRA and of the original TF1 code."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path

from electra_jax.core.positions import POSITIONS
from electra_jax.core.transformer_config import HEAD_FIELDS, TransformerConfig
from electra_jax.interop.weights import ExchangeError, Family, Row, check_fixed

_LAYER = "electra.encoder.layer.{i}"


def _rows(ours: str, hf: str, leaves: dict[str, tuple[str, str]], part: int | None) -> list[Row]:
  """Returns a module's rows; `leaves` is {our name: (Hugging Face's, TF1's)}."""
  scope = "{embeddings}" if hf.startswith("electra.embeddings.") else "{encoder}"
  tf = hf.replace("electra.", f"{scope}/").replace("layer.{i}", "layer_{i}").replace(".", "/")
  tf = tf.replace("dense_prediction", "dense_1")
  return [Row(f"{ours}/{x}", f"{hf}.{y}", f"{tf}/{z}", part) for x, (y, z) in leaves.items()]


def _dense(ours: str, hf: str, part: int | None = None) -> list[Row]:
  return _rows(ours, hf, {"kernel": ("weight", "kernel"), "bias": ("bias", "bias")}, part)


def _norm(ours: str, hf: str) -> list[Row]:
  return _rows(ours, hf, {"scale": ("weight", "gamma"), "bias": ("bias", "beta")}, None)


TABLE: list[Row] = [
  *(
    Row(
      f"embeddings/{name}",
      f"electra.embeddings.{name}_embeddings.weight",
      f"{{embeddings}}/embeddings/{name}_embeddings",
    )
    for name in ("word", "position", "token_type")
  ),
  *_norm("embeddings/layer_norm", "electra.embeddings.LayerNorm"),
  *_dense("encoder/project", "electra.embeddings_project"),
  *_dense("encoder/layers/qkv", f"{_LAYER}.attention.self.query", 0),
  *_dense("encoder/layers/qkv", f"{_LAYER}.attention.self.key", 1),
  *_dense("encoder/layers/qkv", f"{_LAYER}.attention.self.value", 2),
  *_dense("encoder/layers/attention_output", f"{_LAYER}.attention.output.dense"),
  *_norm("encoder/layers/attention_norm", f"{_LAYER}.attention.output.LayerNorm"),
  *_dense("encoder/layers/ffn_in", f"{_LAYER}.intermediate.dense"),
  *_dense("encoder/layers/ffn_output", f"{_LAYER}.output.dense"),
  *_norm("encoder/layers/ffn_norm", f"{_LAYER}.output.LayerNorm"),
  *_dense("rtd_head/dense", "discriminator_predictions.dense"),
  *_dense("rtd_head/logit", "discriminator_predictions.dense_prediction"),
  *_dense("mlm_head/dense", "generator_predictions.dense"),
  *_norm("mlm_head/layer_norm", "generator_predictions.LayerNorm"),
  Row("mlm_head/bias", "generator_lm_head.bias", "generator_predictions/output_bias"),
  # No TF1 names: the original names its fine-tuning heads after their tasks, and they are not read.
  *_dense("text_head/dense", "classifier.dense"),
  *_dense("text_head/out_proj", "classifier.out_proj"),
  *_dense("token_head/classifier", "classifier"),
  *_dense("span_head/qa_outputs", "qa_outputs"),
]

# {field of a network: its name in config.json}; config.json has no others.
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
# Fields of config.json with a fixed value.
FIXED = {"hidden_act": "gelu", "type_vocab_size": 2}
# Fields of config.json that are checked but not written.
READ_FIXED = {
  **FIXED, "is_decoder": False, "add_cross_attention": False, "position_embedding_type": "absolute"
}  # fmt: skip


def _to_json(cfg: TransformerConfig, head: str | None) -> dict:
  # Compute and initialisation settings, and fields that this network does not read.
  unread = {"compute", "scaled_init"} | (set() if head == "rtd_head" else set(HEAD_FIELDS))
  unread |= {x for x in ("embedding_dropout", "ffn_dropout") if getattr(cfg, x) == cfg.dropout}
  others = {name for x in POSITIONS.values() for name in x.fields}
  unread |= others - set(POSITIONS[cfg.positions].fields)
  unread |= {"window", "local_rope_theta"} if cfg.global_every == 1 else set()
  for field in dataclasses.fields(cfg):
    value = getattr(cfg, field.name)
    if field.name not in (*FIELDS, *unread) and value != field.default:
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
  # Missing rates and epsilon get ELECTRA's defaults, as in Hugging Face; sizes are required.
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
  head_prefixes=("classifier.", "qa_outputs.", "sequence_summary."),
  ignored=frozenset({"electra.embeddings.position_ids", "electra.embeddings.token_type_ids"}),
)
