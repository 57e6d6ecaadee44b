"""The README.md of an exported network: its size, its training, and code that loads it."""

import json
from pathlib import Path

from electra_jax.core import params
from electra_jax.interop import hub, huggingface
from electra_jax.interop.huggingface import FLOAT32, Storage
from electra_jax.interop.sources import Network, Source

# {suffix of a class's name: its pipeline in transformers}
PIPELINES = {
  "MaskedLM": "fill-mask",
  "SequenceClassification": "text-classification",
  "TokenClassification": "token-classification",
}


def model_card(
  role: str,
  network: Network,
  source: Source,
  has_tokenizer: bool,
  storage: Storage = FLOAT32,
  *,
  repo: str | None = None,
) -> str:
  """Returns the README.md of an exported network, or of the Hub's `repo` that contains it."""
  config, heldout = source.card.get("config"), source.card.get("heldout") or {}
  family = huggingface.family_of(network.cfg)
  head = family.classes[network.head]
  stage = "Initial" if source.card.get("steps") == 0 else "Pretrained"
  lines = [
    "---",
    "library_name: transformers",
    f"tags: [{family.model_type}, electra_jax]",
    f"license: {source.card.get('license', 'unknown')}",
    *([f"base_model: {hub.split(origin)[0]}"] if (origin := hub.origin(source.card)) else []),
    "---",
    f"# {repo or f'{family.name} {role}'}",
    "",
    f"{'Fine-tuned' if source.finetuned else stage} {family.name}, exported by electra_jax;"
    f" loads with `{head}` and `AutoModel`{' and `AutoTokenizer`' if has_tokenizer else ''}.",
    "",
    f"- {params.count(network.weights):,} parameters in {storage.dtype}:"
    f" {network.cfg.num_layers} layers of hidden size {network.cfg.hidden_size},"
    f" {network.cfg.num_heads} heads, embeddings of"
    f" {network.cfg.embedding_size}, {network.cfg.vocab_size:,} tokens",
  ]
  if origin:
    lines += [f"- from `{origin}`"]
  if config:
    lines += [
      f"- objective `{config['objective']['name']}`, {source.card['steps']:,} steps of"
      f" {config['train']['batch_size']:,} sequences of {config['data']['seq_length']} tokens"
    ]
    if "flops" in source.card:
      lines += [
        f"- this run: {source.card['tokens']:,} tokens, padding included, and"
        f" {source.card['flops']:.2e} FLOPs of matrix products"
      ]
    lines += [f"- text: {', '.join(f'`{Path(text).name}`' for text in source.card['text'])}"]
  for row in source.card.get("metrics", []):
    shown = ", ".join(f"{name} {value:.2f}" for name, value in row["metrics"].items())
    lines.append(f"- {row['task']}, {row['split']}, seed {row['seed']}: {shown}")
  is_pooled = storage.pooling is not None and role == source.main
  calls = _calls(role, head, source.finetuned is not None, has_tokenizer, is_pooled, repo)
  lines += ["", "```python", *calls, "```"]
  if heldout:
    lines += ["", f"| held-out documents at step {heldout['step']:,} | |", "|---|---|"]
    lines += [f"| {k} | {v:.4f} |" for k, v in heldout.items() if isinstance(v, float)]
  if config:
    groups = ("model", "generator", "objective", "optimizer")
    kept = {k: v for k, v in config.items() if k in groups}
    lines += ["", "```json", json.dumps(kept, indent=1), "```"]
  return "\n".join(lines) + "\n"


def _calls(
  role: str, kind: str, is_finetuned: bool, has_tokenizer: bool, is_pooled: bool, repo: str | None
) -> list[str]:
  """Returns lines of Python that load a folder's network, of class `kind` in transformers."""
  purpose = kind.partition("For")[2]
  name = f'f"{{folder}}/{role}"' if repo else f'"{role}"'
  calls = {"AutoModel": f"encoder = AutoModel.from_pretrained({name})"}
  if purpose:
    calls[kind] = f"network = {kind}.from_pretrained({name})  # with its head"
  if role == "discriminator" and not is_finetuned:
    auto = "AutoModelForSequenceClassification"
    calls[auto] = f"classifier = {auto}.from_pretrained({name}, num_labels=2)  # a new head"
  if has_tokenizer and purpose in PIPELINES:
    calls["pipeline"] = f'predict = pipeline("{PIPELINES[purpose]}", {name})'
  fetch = [f'folder = snapshot_download("{repo}")'] if repo else []
  lines = [f"from transformers import {', '.join(calls)}", "", *fetch, *calls.values()]
  if is_pooled:
    lines.insert(0, "from sentence_transformers import SentenceTransformer")
    lines += [f"embedder = SentenceTransformer({name})"]
  if repo:
    lines.insert(0, "from huggingface_hub import snapshot_download")
    lines += ["", "import electra_jax", "", f'networks = electra_jax.load("{hub.PREFIX}{repo}")']
  return lines
